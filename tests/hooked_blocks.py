"""A small block of every class that fuse supports, a call of it, and changes that users make to modules inside."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_models import Subject
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule
from vit_fast.libraries import known
from vit_fast.libraries.transformers import encoder_layer, families

Call = tuple[tuple[Any, ...], dict[str, Any]]
Undo = Callable[[], object]
FORMS = families.FORMS.mixins
LAYERS = [path for path, mixin in FORMS.items() if issubclass(mixin, encoder_layer.FusedLayer)]
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_heads": 2, "intermediate_size": 96}


def transformers_layer(path: str) -> tuple[nn.Module, Call]:
    """Returns the encoder layer of transformers with this dotted path, and a call as by its model."""
    home, _, name = path.rpartition(".")
    try:
        module: Any = importlib.import_module(home)
    except ImportError:
        pytest.skip("this version of transformers has no such model")
    config = _config_of(module)
    for field, value in SIZES.items():
        if isinstance(getattr(config, field, None), int):
            setattr(config, field, value)
    config._attn_implementation = "sdpa"
    layer = getattr(module, name)(config)
    return layer, _call_of(FORMS[path], layer)


def _config_of(module: Any) -> Any:
    """Returns the configuration of a model's layers, found by the annotations of the layers or of the model."""
    classes = [getattr(module, path.rpartition(".")[2], None) for path in FORMS if path.startswith(module.__name__)]
    said = " ".join(str(inspect.signature(cls.__init__)) for cls in classes if cls is not None)
    named = re.findall(r"transformers[\w.]+Config", said)
    if not named:  # Pixtral, in transformers 4
        named = [f"{cls.__module__}.{cls.__qualname__}" for cls in vars(module).values() if _is_config(cls)]
    home, _, name = sorted(named, key=lambda each: ("Encoder" not in each, "Vision" not in each))[0].rpartition(".")
    config = getattr(importlib.import_module(home), name)()
    return config if hasattr(config, "hidden_size") else config.vision_config  # OWL-ViT's layer, in transformers 4


def _is_config(cls: Any) -> bool:
    return inspect.isclass(cls) and cls.__name__.endswith("VisionConfig")


def _call_of(mixin: type[FusedModule], layer: nn.Module) -> Call:
    names = ("num_heads", "num_attention_heads")
    attention, heads = next((m, getattr(m, name)) for m in layer.modules() for name in names if hasattr(m, name))
    width = next(len(parameter) for name, parameter in layer.named_parameters() if "norm" in name)
    half = width // heads // 2

    def rotary(tokens: int) -> dict[str, Any]:
        angles = torch.randn(tokens, half).repeat(1, 2)
        return {"position_embeddings": (angles.cos(), angles.sin())}

    if issubclass(mixin, encoder_layer.FusedPackedLayer):
        return (torch.randn(7, width),), {"cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32), **rotary(7)}
    if issubclass(mixin, encoder_layer.FusedLlama4Layer):
        freqs = torch.polar(torch.ones(5, 1, half), torch.randn(5, 1, half))
        return (), {"hidden_state": torch.randn(2, 5, width), "freqs_ci": freqs}
    takes = inspect.signature(type(attention).forward).parameters
    keywords = rotary(4 if "dinov3" in type(layer).__name__.lower() else 5) if "position_embeddings" in takes else {}
    takes = inspect.signature(type(layer).forward).parameters
    masks = [takes[name] for name in ("attention_mask", "causal_attention_mask") if name in takes]
    keywords |= {mask.name: None for mask in masks if mask.default is not None}
    return (torch.randn(2, 5, width),), keywords


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
