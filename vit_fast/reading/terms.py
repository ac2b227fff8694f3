"""Finds what may change the scores of attention: a bias, a window mask, and windows of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from torch import Tensor, fx

from ..blocks.parts import TermParts, Windows, tensor_at
from .capture import Graph
from .elements import Core


def terms_of(graph: Graph, core: Core, tokens: Tensor, heads: int, keys: int) -> Iterator[TermParts | None]:
    """Yields candidates for attention of `heads` heads, whose queries attend to `keys` tokens.

    `tokens` are the input of the module, [B, N, C] or [B, height, width, C].
    """
    count = tokens[0, ..., 0].numel()
    windows = [None] if keys == count else _windows(tokens, keys)
    if not core.changes and windows == [None]:
        yield None
        return
    end: fx.Node = core.node if core.scores is None else core.scores
    slots = [(slot, tensor_at(slot)) for slot in graph.parameters_between(core.q, end)]
    floats = [(slot, each) for slot, each in slots if each.is_floating_point()]
    groups = count // keys
    masks = [slot for slot, each in floats if each.shape == (groups, keys, keys) and groups > 1]
    biases = [
        (slot, None, False)
        for slot, each in floats
        if each.shape[-2:] == (keys, keys) and each.numel() == each.shape[-3:].numel() and each.shape[-3] in (1, heads)
    ]
    tables = [(slot, each) for slot, each in floats if each.dim() == 2 and heads in each.shape]
    indices = [slot for slot, each in slots if each.shape == (keys, keys) and not each.is_floating_point()]
    looked_up = [(slot, index, table.shape[1] != heads) for (slot, table), index in itertools.product(tables, indices)]
    for (bias, index, first), mask, window in itertools.product(
        [*looked_up, *biases, (None, None, False)], [*masks, None], windows
    ):
        yield TermParts(bias, index, first, mask, None, window)


def _windows(tokens: Tensor, keys: int) -> list[Windows | None]:
    """Returns the windows of `keys` tokens that divide the grid."""
    side = math.isqrt(tokens.shape[1])  # tokens [B, N, C] may be a square grid
    H, W = tokens.shape[1:3] if tokens.dim() == 4 else (side, side)
    if tokens.dim() == 3 and side * side != tokens.shape[1]:
        return []
    heights = sorted(range(1, keys + 1), key=lambda height: abs(height - keys / height))
    sizes = [(h, keys // h) for h in heights if keys % h == 0 and H % h == 0 and W % (keys // h) == 0]
    shifts = [(0, 0), *((h // 2, w // 2) for h, w in sizes[:1])]
    plain: list[Windows | None] = [Windows((H, W), size, shift) for size in sizes for shift in shifts]
    return [*plain, *(Windows((H, W), size, dilated=True) for size in sizes)]
