"""A small block of every class that fuse supports, a call of it, and changes that users make to modules inside."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_classes import TABLE
from fused_models import IMAGE, Subject
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule
from vit_fast.libraries import known
from vit_fast.libraries.transformers.families import LIKE_QWEN

Call = tuple[tuple[Any, ...], dict[str, Any]]
Undo = Callable[[], object]
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 1}
SIZES |= {"image_size": IMAGE, "patch_size": 16}
# towers of transformers that fuse supports and that read nothing but images, by folder and class
TOWERS = [
    row
    for row in re.findall(r"^\| (\w+) \| (\w+) \| default \| fused", TABLE.read_text(), re.MULTILINE)
    if row[0] not in ("pixtral", "qwen2_vl", "siglip2", "vit_mae", *LIKE_QWEN)
]


def tower_of(folder: str, name: str) -> Subject:
    """Returns a small tower of transformers."""

    def make() -> nn.Module:
        pytest.importorskip(f"transformers.models.{folder}")
        cls = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name, None)
        if cls is None:
            pytest.skip("this version of transformers has no such model")
        config = cls.config_class()
        for field, value in SIZES.items():
            default = getattr(config, field, None)
            if isinstance(default, int | list | tuple):
                setattr(config, field, value if isinstance(default, int) else [value] * len(default))
        config._attn_implementation = "sdpa"
        tower: nn.Module = cls(config)
        return tower

    frames = (32,) if folder == "vivit" else ()
    return Subject(make, lambda: {"pixel_values": torch.randn(2, *frames, 3, IMAGE, IMAGE)})


def blocks_of(subject: Subject) -> Iterator[tuple[nn.Module, Call]]:
    """Yields the first module of each class that fuse supports in a model, and the model's call of it."""
    model = subject.build().eval()
    twin = copy.deepcopy(model)
    vit_fast.fuse(twin, "sdpa")
    fused = {type(module): name for name, module in reversed(list(twin.named_modules())) if _is_fused(name, module)}
    calls: dict[str, Call] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, (args, kwargs))

        return note

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(noting(name), with_kwargs=True) for name in fused.values()
    ]
    with torch.no_grad():
        model(**subject.inputs())
    for hook in hooks:
        hook.remove()
    for name, call in calls.items():
        yield model.get_submodule(name), call


def _is_fused(name: str, module: nn.Module) -> bool:
    return isinstance(module, FusedModule) and bool(name) and not isinstance(module, nn.Sequential)


# --- changes that users make --------------------------------------------------------------------------------


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value else value


def changed(value: Any, scale: float) -> Any:
    """Returns a result, or arguments, with a changed first tensor."""
    first = _first(value)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return value
    return (scale * first + 0.1, *value[1:]) if isinstance(value, tuple) else scale * first + 0.1


def _noted(seen: list[Any], args: Any, kwargs: dict[str, Any]) -> None:
    shapes = {name: tuple(value.shape) for name, value in kwargs.items() if isinstance(value, Tensor)}
    seen.append(([tuple(value.shape) for value in args if isinstance(value, Tensor)], shapes))


def hook_the_output(owner: nn.Module, name: str, seen: list[Any]) -> Undo:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        _noted(seen, args, kwargs)
        return changed(output, 1.5)

    return owner.get_submodule(name).register_forward_hook(hook, with_kwargs=True).remove


def hook_the_input(owner: nn.Module, name: str, seen: list[Any]) -> Undo:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        _noted(seen, args, kwargs)
        return changed(args, 0.5), kwargs

    return owner.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True).remove


def set_a_forward(owner: nn.Module, name: str, seen: list[Any]) -> Undo:
    module = owner.get_submodule(name)
    before = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        _noted(seen, args, kwargs)
        return changed(before(*args, **kwargs), 1.5)

    module.forward = forward  # type: ignore[method-assign]  # as users do
    return lambda: module.__dict__.pop("forward")


Change = Callable[[nn.Module, str, list[Any]], Undo]
CHANGES: tuple[Change, ...] = (hook_the_output, hook_the_input, set_a_forward)


def run(block: nn.Module, call: Call) -> Tensor:
    with torch.no_grad():
        found = _first(block(*call[0], **call[1]))
    assert isinstance(found, Tensor)
    return found


def assert_changes_count(block: nn.Module, call: Call) -> int:
    """Applies every change to every module of a block. The fused block must match the original, also after undoing it.

    Returns:
        Number of changes that a call noticed.
    """
    for parameter in block.eval().parameters():
        nn.init.normal_(parameter, 0.1, 0.2)
    twin = copy.deepcopy(block)
    left = [twin.get_submodule(row.name) for row in vit_fast.fuse(twin, "sdpa").skipped]
    assert all(known.form_or_reason(type(module))[1] for module in left), "BEiT's attention in transformers 4"
    expected, count = run(twin, call), 0
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(expected, run(block, call), **close)
    for name, _ in list(block.named_modules()):
        for change in CHANGES:
            seen: tuple[list[Any], list[Any]] = ([], [])
            undo = [change(owner, name, found) for owner, found in zip((block, twin), seen)]
            found, wanted = run(twin, call), run(block, call)
            what = f"{change.__name__} of {name or 'the block'} of {type(block).__name__}"
            torch.testing.assert_close(found, wanted, **close, msg=lambda said, what=what: f"{what}: {said}")
            assert seen[1] == seen[0], what
            count += bool(seen[0])
            for each in undo:
                each()
    assert torch.equal(run(twin, call), expected)
    if hasattr(twin, "ready"):
        assert twin.ready() is not None, "it is fast again"
    return count
