"""Hooks and forwards that users set inside fused blocks: each is called, and its return value is used."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import packed_towers
import pytest
import torch
from fused_models import IMAGE, SUBJECTS, Subject, transformers_subject
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule
from vit_fast.libraries import known
from vit_fast.libraries.transformers.families import LIKE_QWEN

CLASSES = Path(__file__).parents[1] / "docs" / "classes.md"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ALL = SUBJECTS | packed_towers.TOWERS | packed_towers.NAFLEX
OFTEN = (
    "timm-vit", "timm-qk-norm", "timm-siglip", "timm-eva02-norms-inside", "transformers-siglip2", "torchvision-vit",
    "torch-encoder", "vit-fast", "qwen2_5_vl", "pixtral", "rotary, a table an image",
)  # fmt: skip
# and all towers of transformers that fuse supports and that read nothing but images
CHANGED = {name: ALL[name] for name in OFTEN} | {
    name: transformers_subject(f"{folder}.modeling_{folder}.{name}")
    for folder, name in re.findall(r"^\| (\w+) \| (\w+) \| default \| fused", CLASSES.read_text(), re.MULTILINE)
    if folder not in ("pixtral", "qwen2_vl", "siglip2", "vit_mae", *LIKE_QWEN)
}
CHANGED["VivitModel"] = dataclasses.replace(
    CHANGED["VivitModel"], inputs=lambda: {"pixel_values": torch.randn(2, 32, 3, IMAGE, IMAGE)}
)


@pytest.fixture(autouse=True)
def slow_path() -> Iterator[None]:
    """Disables torch's fast path of TransformerEncoderLayer, which ignores forwards set on modules inside."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


# --- changes that users make; each notes the shapes of the arguments, and returns a function that undoes it ---------

Change = Callable[[nn.Module, list[Any]], Callable[[], object]]


def changed(value: Any, scale: float) -> Any:
    """Returns a result, or arguments, with a changed first tensor."""
    first = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return value
    return (scale * first + 0.1, *value[1:]) if isinstance(value, tuple) else scale * first + 0.1


def shapes(args: Any, kwargs: dict[str, Any]) -> Any:
    named = {name: tuple(value.shape) for name, value in kwargs.items() if isinstance(value, Tensor)}
    return [tuple(value.shape) for value in args if isinstance(value, Tensor)], named


def hook_output(module: nn.Module, seen: list[Any]) -> Callable[[], object]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append(shapes(args, kwargs))
        return changed(output, 1.5)

    return module.register_forward_hook(hook, with_kwargs=True).remove


def hook_input(module: nn.Module, seen: list[Any]) -> Callable[[], object]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(shapes(args, kwargs))
        return changed(args, 0.5), kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def set_forward(module: nn.Module, seen: list[Any]) -> Callable[[], object]:
    before = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(shapes(args, kwargs))
        return changed(before(*args, **kwargs), 1.5)

    module.forward = forward  # type: ignore[method-assign]  # as users do
    return lambda: module.__dict__.pop("forward")


CHANGES: tuple[Change, ...] = (hook_output, hook_input, set_forward)


@torch.no_grad()
def blocks_of(subject: Subject) -> dict[type, tuple[nn.Module, Any, Any]]:
    """Returns the first module of each class that fuse supports in a model, and the arguments of its first call."""
    model = subject.build().eval()
    twin = copy.deepcopy(model)
    vit_fast.fuse(twin, "sdpa")
    calls: dict[type, tuple[nn.Module, Any, Any]] = {}
    for name, module in twin.named_modules():
        if isinstance(module, FusedModule) and name:
            original = model.get_submodule(name)
            original.register_forward_pre_hook(
                lambda each, args, kwargs: calls.setdefault(type(each), (each, args, kwargs)) and None, with_kwargs=True
            )
    model(**subject.inputs())
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGED)
def test_changes_inside_a_fused_block_take_effect(name: str) -> None:
    """Applies each change to each module of a block. The fused block matches the original, also after undoing it.

    With the triton backend, a changed block does not run as kernels only, which would bypass the change.
    """
    count = 0
    for block, args, kwargs in blocks_of(CHANGED[name]).values():
        for parameter in block.eval().parameters():
            nn.init.normal_(parameter, 0.1, 0.2)
        twin, by_kernels = copy.deepcopy(block), copy.deepcopy(block)
        vit_fast.fuse(by_kernels, "triton")
        is_whole = hasattr(by_kernels, "whole") and by_kernels.whole() is not None
        skipped = [twin.get_submodule(row.name) for row in vit_fast.fuse(twin, "sdpa").skipped]
        assert all(known.form_or_reason(type(module))[1] for module in skipped), "BEiT's attention in transformers 4"

        def run(each: nn.Module, args: Any = args, kwargs: Any = kwargs) -> Tensor:
            found = each(*args, **kwargs)
            return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]  # a tensor

        expected = run(twin)
        torch.testing.assert_close(expected, run(block), **CLOSE)
        for (path, _), change in itertools.product(list(block.named_modules()), CHANGES):
            seen: tuple[list[Any], list[Any]] = ([], [])
            undo = [change(each.get_submodule(path), noted) for each, noted in zip((block, twin), seen)]
            found, wanted = run(twin), run(block)
            what = f"{change.__name__} of {path or 'the block'} of {type(block).__name__}"
            torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda text, what=what: f"{what}: {text}")
            assert seen[1] == seen[0], what
            if is_whole and path:
                undo.append(change(by_kernels.get_submodule(path), []))
                assert by_kernels.whole() is None, what
            count += bool(seen[0])
            for each in undo:
                each()
        assert torch.equal(run(twin), expected)
        assert not is_whole or by_kernels.whole() is not None
        assert not hasattr(twin, "ready") or twin.ready() is not None, "the block is fused again"
    assert count


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02-norms-inside", "transformers-vit", "torchvision-vit"])
def test_a_forward_set_on_a_class_takes_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().eval(), subject.inputs()
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    block = next(module for module in model.modules() if hasattr(module, "whole"))
    with torch.no_grad():
        expected = subject.run(twin, inputs)
        for cls in {getattr(module, "original", type(module)) for module in block.modules()}:

            def forward(self: Any, *args: Any, before: Any = cls.forward, **kwargs: Any) -> Any:
                return changed(before(self, *args, **kwargs), 1.5)

            with monkeypatch.context() as patched:
                patched.setattr(cls, "forward", forward)
                torch.testing.assert_close(subject.run(model, inputs), subject.run(twin, inputs), **CLOSE)
        torch.testing.assert_close(subject.run(model, inputs), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:(Full backward hook is firing|For backward hooks to be called):UserWarning")
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "torchvision-vit"])
def test_backward_hooks_fire_as_often_as_before_fuse(name: str) -> None:
    subject = SUBJECTS[name]
    calls: tuple[list[Any], list[Any]] = ([], [])
    inputs = subject.inputs()
    for fused, seen in enumerate(calls):
        model = subject.build().eval()
        if fused:
            vit_fast.fuse(model, "sdpa").require_all()
        for path, module in model.named_modules():
            for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
                handle = register(lambda *args, path=path, seen=seen: seen.append((path, len(args))))
                subject.run(model, inputs).square().sum().backward()
                handle.remove()
    assert calls[1] == calls[0] and calls[0]
