"""Hooks and forwards that users set inside fused blocks: each is called, and its return value is used."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import packed_towers
import pytest
import torch
from fused_models import SUBJECTS, of_depth
from hooked_blocks import (
    CHANGES,
    TOWERS,
    assert_changes_count,
    blocks_of,
    changed,
    hook_the_output,
    tower_of,
)
from torch import nn

import vit_fast

OFTEN = (
    "timm-vit", "timm-qk-norm", "timm-siglip", "timm-eva02-norms-inside", "transformers-siglip2",
    "torchvision-vit", "torch-encoder", "vit-fast",
)  # fmt: skip
ALL = SUBJECTS | packed_towers.TOWERS | packed_towers.NAFLEX
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


@pytest.mark.parametrize(("folder", "name"), TOWERS)
def test_changes_inside_any_tower_of_transformers_take_effect(folder: str, name: str) -> None:
    assert sum(assert_changes_count(block, call) for block, call in blocks_of(tower_of(folder, name)))


@pytest.mark.parametrize("name", ["timm-vit", "timm-dinov3", "transformers-dinov2", "torchvision-vit", "vit-fast"])
def test_kernels_do_not_bypass_changes(name: str) -> None:
    """A block with a hook anywhere inside does not run as kernels only, until the hook is removed."""
    model = SUBJECTS[name].build().eval()
    vit_fast.fuse(model, "triton")
    block = next(module for module in model.modules() if hasattr(module, "whole"))
    inside = [path for path, _ in block.named_modules() if path]
    for path, change in itertools.product(inside, CHANGES):
        assert block.whole() is not None
        undo = change(block, path, [])
        assert block.whole() is None, f"{change.__name__} of {path}"
        undo()
    assert block.whole() is not None and len(inside) >= 11


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02-norms-inside", "transformers-vit", "torchvision-vit"])
def test_a_forward_that_is_set_on_a_class_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().eval(), subject.inputs()
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    block = next(module for module in model.modules() if hasattr(module, "whole"))
    close = {"rtol": 1e-4, "atol": 1e-4}
    with torch.no_grad():
        expected = subject.run(twin, inputs)
        for cls in {getattr(module, "original", type(module)) for module in block.modules()}:

            def forward(self: Any, *args: Any, before: Any = cls.forward, **kwargs: Any) -> Any:
                return changed(before(self, *args, **kwargs), 1.5)

            with monkeypatch.context() as patched:
                patched.setattr(cls, "forward", forward)
                torch.testing.assert_close(subject.run(model, inputs), subject.run(twin, inputs), **close)
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
        for path, module in model.named_modules():
            for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
                handle = register(lambda *args, path=path, calls=calls: calls.append((path, len(args))))
                subject.run(model, inputs).square().sum().backward()
                handle.remove()
        counts.append(calls)
    assert counts[1] == counts[0] and counts[0]


def test_modules_that_no_reader_knows_are_watched() -> None:
    """If the reader of a family misses a module, a hook on it still keeps the kernels from bypassing it."""
    (block,) = of_depth(1)["timm"].build().eval().blocks
    block.forgotten = nn.Sequential(nn.Identity())
    for parent in (block.attn, block.mlp):
        parent.more = nn.Identity()
    vit_fast.fuse(block, "triton")
    for path in ("forgotten.0", "attn.more", "mlp.more"):
        assert block.whole() is not None
        handle = block.get_submodule(path).register_forward_hook(lambda *_: None)
        assert block.whole() is None, path
        handle.remove()


def test_a_hook_in_a_sequential_of_fused_blocks_counts() -> None:
    model = of_depth(2)["timm"].build().eval()
    twin, x, seen = copy.deepcopy(model), torch.randn(2, 5, 64), ([], [])
    vit_fast.fuse(model, "sdpa").require_all()
    for path in ("", "1", "1.attn.q_norm", "0.mlp.drop2"):
        undo = [hook_the_output(each.blocks, path, found) for each, found in zip((model, twin), seen)]
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
