"""The parts of a block for torch.compile: every module by its path from the block.

`BlockParts` refer to modules of the block. If a graph read modules from both the block and `BlockParts`, torch.compile
would add one Python guard per module. So while torch.compile traces, parts are rebuilt from the block's modules and an
outline: names and numbers that are a constant of the graph.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from .parts import AttentionParts, BlockParts, LinearParts, MlpParts, NormParts, QkNormParts
from .plain import forward_is_replaced, is_hooked

_CLASSES = {cls.__name__: cls for cls in (AttentionParts, LinearParts, MlpParts, NormParts, QkNormParts)}
_LITERALS = (bool, int, float, str, type(None))

Path = tuple[str, ...]
Node = tuple[str, Any]  # kind and content
Outline = tuple[Node, Node, tuple[Path, ...], tuple[tuple[Path, str, Any], ...]]


def outline(block: nn.Module, parts: BlockParts) -> Outline | None:
    """Returns names and numbers from which `built` rebuilds the parts; None if parts contain any other object.

    Returns:
        Both halves; the path of every watched module; and path, name and value of every watched attribute.
    """
    paths = {id(module): tuple(name.split(".")) if name else () for name, module in block.named_modules()}
    try:
        values = tuple(
            (paths[id(owner)], name, _literal(value))
            for owner, name, value in parts.watch.values
            if type(owner) is not nn.Identity  # an Identity has no values; its class is guarded
        )
        modules = tuple(paths[id(module)] for module in parts.watch.modules)
        return _node(parts.attention, paths), _node(parts.mlp, paths), modules, values
    except LookupError:  # an object that is neither a module of the block, nor parts, nor a literal
        return None


def _node(value: Any, paths: dict[int, Path]) -> Node:
    if isinstance(value, nn.Module):
        return "module", paths[id(value)]
    if type(value) is tuple:
        return "tuple", tuple(_node(each, paths) for each in value)
    if type(value).__name__ in _CLASSES:
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return type(value).__name__, tuple(_node(each, paths) for each in fields)
    return "value", _literal(value)


def _literal(value: Any) -> Any:
    if type(value) not in _LITERALS:
        raise LookupError
    return value


def built(block: Any, traced: Outline) -> BlockParts:
    """Rebuilds the parts, and reads all watched attributes, so that torch.compile guards these."""
    attention, mlp, modules, values = traced
    for path in modules:  # guards classes, and hooks if configured; parameters are guarded as inputs
        is_hooked(_at(block, path))
        forward_is_replaced(_at(block, path))
    for path, name, value in values:
        if getattr(_at(block, path), name, None) != value:
            break
    parts: BlockParts = block.vit_fast_parts
    return BlockParts(_built(block, attention), _built(block, mlp), (), (), parts.watch, parts.frozen, parts.fp8)


def _built(block: Any, node: Node) -> Any:
    kind, content = node
    if kind == "module":
        return _at(block, content)
    if kind == "value":
        return content
    inner = [_built(block, each) for each in content]
    return tuple(inner) if kind == "tuple" else _CLASSES[kind](*inner)


def _at(block: Any, path: Path) -> Any:
    for name in path:
        block = getattr(block, name)
    return block
