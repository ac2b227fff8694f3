"""Hooks, forwards and modules that users set inside fused blocks: each is called, and its return value is used."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, of_depth
from hooked_blocks import (
    CHANGES,
    LAYERS,
    Change,
    assert_changes_count,
    blocks_of,
    changed,
    hook_the_output,
    hook_without_change,
    transformers_layer,
)
from kernel_support import DEVICE
from packed_towers import NAFLEX, TOWERS
from torch import nn

import vit_fast

OFTEN = (
    "timm-vit", "timm-qk-norm", "timm-siglip", "timm-eva02-norms-inside", "transformers-siglip",
    "torchvision-vit", "torch-encoder", "ours",
)  # fmt: skip
ALL = SUBJECTS | TOWERS | NAFLEX
PACKED = ("qwen2_5_vl", "pixtral", "rotary, a table an image")


@pytest.fixture(autouse=True)
def slow_path() -> Iterator[None]:
    """Disables torch's fast path of TransformerEncoderLayer, which ignores forwards set on modules inside."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.parametrize("name", [*OFTEN, *PACKED])
def test_changes_of_modules_inside_a_fused_block_take_effect(name: str) -> None:
    assert sum(assert_changes_count(block, call) for block, call in blocks_of(ALL[name]))


@pytest.mark.parametrize("path", LAYERS)
def test_changes_inside_any_layer_of_transformers_take_effect(path: str) -> None:
    torch.manual_seed(0)
    assert assert_changes_count(*transformers_layer(path))


@pytest.mark.parametrize("name", ["timm-vit", "timm-dinov3", "transformers-dinov2", "torchvision-vit", "ours"])
def test_kernels_do_not_bypass_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with a hook anywhere inside does not run as kernels only, until the hook is removed."""
    model = SUBJECTS[name].build().eval()
    vit_fast.fuse(model, "triton")
    block = next(module for module in model.modules() if hasattr(module, "whole"))
    inside = [path for path, _ in block.named_modules() if path]
    assert block.whole() is not None and len(inside) >= 11
    for path in inside:
        for change in CHANGES:
            undo = change(block, path, [])
            parts = block.whole()
            undo()
            assert parts is None or change is CHANGES[-1], f"{change.__name__} of {path}"
            assert block.whole() is not None, path
    for cls in {type(block.get_submodule(path)) for path in inside}:
        with monkeypatch.context() as patched:
            patched.setattr(cls, "forward", lambda self, x: x)
            assert block.whole() is None, cls
        assert block.whole() is not None, cls


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02-norms-inside", "transformers-vit", "torchvision-vit"])
def test_a_forward_that_is_set_on_a_class_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().eval(), subject.inputs()
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    block = next(module for module in model.modules() if hasattr(module, "whole"))
    close, seen = {"rtol": 1e-4, "atol": 1e-4}, []

    def patch(patched: pytest.MonkeyPatch, cls: Any) -> None:
        before = cls.forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(cls)
            return changed(before(self, *args, **kwargs), 1.5)

        patched.setattr(cls, "forward", forward)

    with torch.no_grad():
        expected = subject.run(twin, inputs)
        for cls in {type(module) for module in block.modules() if not hasattr(module, "original")}:
            with monkeypatch.context() as patched:
                patch(patched, cls)
                torch.testing.assert_close(subject.run(model, inputs), subject.run(twin, inputs), **close)
        for cls in {type(module) for module in model.modules() if hasattr(module, "original")}:
            with monkeypatch.context() as patched:
                patch(patched, cls.original)
                torch.testing.assert_close(subject.run(model, inputs), subject.run(twin, inputs), **close)
            with monkeypatch.context() as patched:
                patch(patched, cls)
                seen.clear()
                subject.run(model, inputs)
                assert seen == [cls] * sum(type(module) is cls for module in model.modules())
        torch.testing.assert_close(subject.run(model, inputs), expected, **close)


@pytest.mark.filterwarnings("ignore:(Full backward hook is firing|For backward hooks to be called):UserWarning")
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "torchvision-vit"])
def test_backward_hooks_fire_as_often_as_before_fuse(name: str) -> None:
    subject = SUBJECTS[name]
    counts = []
    for fused in (False, True):
        model, calls = subject.build().eval(), []
        if fused:
            vit_fast.fuse(model, "sdpa").require_all()
        torch.manual_seed(1)
        inputs = subject.inputs()
        paths = [path for path, _ in model.named_modules() if path]
        for path in paths:
            module = model.get_submodule(path)
            for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
                handle = register(lambda *args, path=path, calls=calls: calls.append((path, len(args))))
                subject.run(model, inputs).square().sum().backward()
                handle.remove()
        counts.append(calls)
    assert counts[1] == counts[0] and counts[0]


def test_modules_that_no_reader_knows_or_that_occur_twice_are_watched() -> None:
    """If the reader of a family misses a module, a hook on it still keeps the kernels from bypassing it."""
    (block,) = of_depth(1)["timm"].build().eval().blocks
    block.forgotten = nn.Sequential(nn.Identity())
    for parent in (block.attn, block.mlp):
        parent.more = nn.Identity()
    block.ls2 = block.drop_path2 = block.ls1
    vit_fast.fuse(block, "triton")
    for path in ("forgotten.0", "attn.more", "mlp.more", "ls1"):
        assert block.whole() is not None
        handle = block.get_submodule(path).register_forward_hook(lambda *_: None)
        assert block.whole() is None, path
        handle.remove()
    for name in ("ls1", "ls2", "drop_path2"):
        before = getattr(block, name)
        setattr(block, name, nn.Tanh())
        assert block.whole() is None, name
        setattr(block, name, before)
        assert block.whole() is not None


# --- with freeze, and in a Sequential -----------------------------------------------------------------------


def test_weights_frozen_for_another_half_of_a_packed_gate_are_dropped() -> None:
    model = SUBJECTS["timm-gated"].build().to(DEVICE).eval()
    vit_fast.fuse(model, "triton").require_all()
    vit_fast.freeze(model)
    block = model.blocks[0]
    block.mlp.gate_last = not block.mlp.gate_last
    assert block.whole().frozen is None


@pytest.mark.parametrize("change", [hook_the_output, hook_without_change])
def test_a_hook_in_a_sequential_of_fused_blocks_counts(change: Change) -> None:
    model = of_depth(2)["timm"].build().eval()
    twin, x, seen = copy.deepcopy(model), torch.randn(2, 5, 64), ([], [])
    vit_fast.fuse(model, "sdpa").require_all()
    for path in ("", "1", "1.attn.q_norm", "0.mlp.drop2"):
        undo = [change(each.blocks, path, found) for each, found in zip((model, twin), seen)]
        torch.testing.assert_close(model.blocks(x), twin.blocks(x))
        for each in undo:
            each()
    assert seen[0] == seen[1] and len(seen[0]) == 4
    torch.testing.assert_close(model.blocks(x), twin.blocks(x))


def test_hooks_from_before_compilation_are_in_the_graph() -> None:
    model, x = of_depth(1)["timm"].build().eval(), torch.randn(1, 5, 64)
    (block,) = model.blocks
    plain = copy.deepcopy(block)(x)
    vit_fast.fuse(model, "sdpa").require_all()
    block.attn.k_norm.register_forward_hook(lambda module, args, output: output * 1.5)
    torch.compiler.reset()
    found = torch.compile(block, backend="eager", fullgraph=True)(x)
    vit_fast.unfuse(model)
    torch.testing.assert_close(found, block(x))
    assert not torch.allclose(found, plain, atol=1e-4)
