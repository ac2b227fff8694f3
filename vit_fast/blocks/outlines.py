"""Outlines: parts of a block with paths instead of modules.

While torch.compile traces, `built` rebuilds the parts from the block and a constant `outline`. If the compiled graph
read the modules of `BlockParts` instead, torch.compile would guard each module in Python, doubling the host time.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from . import parts as every_part
from .parts import Argument, BlockParts
from .plain import forward_is_replaced, is_hooked

Path = tuple[str, ...]
Node = tuple[str, Any]  # kind and content of an object in an outline
Outline = tuple[Node, Node, tuple[Path, ...], tuple[tuple[Path, str, Any], ...]]

_LITERALS = (bool, int, float, str, tuple)
_DATACLASSES = (cls for cls in vars(every_part).values() if isinstance(cls, type) and is_dataclass(cls))
CLASSES: dict[str, Any] = {cls.__name__: cls for cls in _DATACLASSES}


def outline(block: nn.Module, parts: BlockParts) -> Outline:
    """Returns names and numbers from which `built` rebuilds the parts."""
    paths = _paths(block)
    values = tuple(
        (paths[id(owner)], name, value if isinstance(value, _LITERALS) else None)
        for owner, name, value in parts.watch.values
        if id(owner) in paths and type(owner) is not nn.Identity  # an Identity has no values; its class is guarded
    )
    modules = tuple(paths[id(module)] for module in parts.watch.modules)
    return _node(parts.attention, paths), _node(parts.mlp, paths), modules, values


def detached(block: nn.Module, parts: Any) -> Node:
    """Returns parts with paths below `block` instead of modules; `attached` rebuilds them on an equal block."""
    return _node(parts, _paths(block))


def _paths(block: nn.Module) -> dict[int, Path]:
    """Returns the paths of all modules, and of objects in their attributes, e.g. a configuration."""
    paths = {id(module): tuple(name.split(".")) if name else () for name, module in block.named_modules()}
    for name, module in block.named_modules():
        for own, value in vars(module).items():
            if hasattr(value, "__dict__"):
                paths.setdefault(id(value), (*(name.split(".") if name else ()), own))
    return paths


def _node(value: Any, paths: dict[int, Path]) -> Node:
    if isinstance(value, nn.Module):
        return "module", paths[id(value)]
    if type(value) is tuple:
        return "tuple", tuple(_node(each, paths) for each in value)
    if type(value) is Argument:
        value = Argument(value.number)  # without the tensor
    if type(value) in CLASSES.values():
        return type(value).__name__, tuple(_node(getattr(value, each.name), paths) for each in fields(value))
    return "value", value


def built(block: Any, traced: Outline) -> BlockParts:
    """Rebuilds the parts. Reads all watched attributes, so that torch.compile guards them."""
    attention, mlp, modules, values = traced
    for path in modules:  # guards classes, and hooks if configured; parameters are guarded as inputs
        is_hooked(_at(block, path))
        forward_is_replaced(_at(block, path))
    for path, name, value in values:
        if getattr(_at(block, path), name, None) != value:
            continue  # a function, which torch.compile guards too
    parts: BlockParts = block.vit_fast_parts
    return BlockParts(attached(block, attention), attached(block, mlp), (), (), parts.watch, parts.frozen, parts.fp8)


def attached(block: Any, node: Node) -> Any:
    kind, content = node
    if kind == "module":
        return _at(block, content)
    if kind == "value":
        return content
    inner = [attached(block, each) for each in content]
    if kind == "tuple":
        return tuple(inner)
    cls = CLASSES[kind]
    return cls(**dict(zip(cls.__dataclass_fields__, inner)))


def _at(block: Any, path: Path) -> Any:
    for name in path:
        block = getattr(block, name)
    return block
