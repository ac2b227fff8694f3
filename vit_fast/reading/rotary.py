"""Finds rotary embeddings between the linear layers of q and k and the attention core."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ..blocks.parts import RopeParts, Slot, tensor_at
from ..ops import reference
from ..ops.descriptions import Rope, checked_rope
from ..positions import pairs
from .capture import Graph, UnreadableError, operator_of
from .constants import computed, derived
from .elements import Core, same_tokens

# Dimensions of a table (batch, heads, tokens, channels), and the operators that convert it to [T, d] or [B, H, T, d]
_FORMS: dict[str, tuple[tuple[str, int | tuple[int, int]], ...]] = {
    "td": (), "btd": (("unsqueeze.default", 1),), "htd": (("unsqueeze.default", 0),),
    "thd": (("transpose.int", (0, 1)), ("unsqueeze.default", 0)), "bhtd": (), "bthd": (("transpose.int", (1, 2)),),
}  # fmt: skip
_LAYOUTS = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "contiguous", "clone", "slice", "to",
    "_to_copy",
}  # fmt: skip


def ropes_of(graph: Graph, core: Core, start: fx.Node, qkv: Tensor) -> Iterator[RopeParts | None]:
    """Yields candidates that explain the queries of a core, computed from qkv [B, N, 3, H, D] of the node `start`.

    Tables are constants or arguments of the forward that multiply the queries. The last candidate is None.
    """
    factors = [each for node in graph.path(start, core.q) for each in node.all_input_nodes if not graph.is_live(each)]
    tables = [slot for node in dict.fromkeys(factors) for slot in _tables(graph, node, qkv.shape)]
    q = graph.values[core.q]
    for cos, sin in itertools.permutations(tables, 2):
        if tensor_at(cos).shape != tensor_at(sin).shape:
            continue
        prefix = qkv.shape[1] - tensor_at(cos).shape[-2]
        for layout, sign in itertools.product(("half", "interleaved"), (1, -1)):
            rope = RopeParts(cos, sin if sign == 1 else derived(graph, (sin,), "neg.default"), prefix, layout)
            rotated = rotated_by(rope, qkv)[:, :, 0]
            if same_tokens(rotated * (q.norm() / rotated.norm()), q):
                yield rope
    yield None


def check_pairs(rope: Rope, head_dim: int) -> None:
    """Raises UnreadableError if the channels of a pair have different cos or sin, which kernels do not support."""
    for table in (rope.cos, rope.sin):
        if table.shape[-1] == head_dim and not torch.equal(*pairs(table, rope.layout)):
            raise UnreadableError("its rotary tables have different values for both channels of a pair")


def rotated_by(rope: RopeParts | None, qkv: Tensor) -> Tensor:
    if rope is None:
        return qkv
    return reference.qk_norm_rope(qkv, None, checked_rope(rope.now(), qkv.shape, by_pair=False))


def _tables(graph: Graph, node: fx.Node, shape: tuple[int, ...]) -> Iterator[Slot]:
    """Yields the slots of a tensor as tables of cos or sin [T, d] or [B or 1, H or 1, T, d] for qkv of a shape."""
    value = graph.values[node]
    if not isinstance(value, Tensor) or value.dim() < 2 or not (value.is_floating_point() or value.is_complex()):
        return
    B, N, _, H, D = shape
    wanted = {"b": (1, B), "h": (1, H), "t": range(1, N + 1), "d": (D, D // 2)}
    node = _origin(graph, node)
    try:
        slots = [computed(graph, node)]
    except UnreadableError:
        return
    if value.is_complex():
        real = derived(graph, slots, "view_as_real.default")
        slots = [derived(graph, (real,), "select.int", -1, i) for i in (0, 1)]
    sizes = tensor_at(slots[0]).shape
    for form, operators in _FORMS.items():
        if len(form) != len(sizes) or not all(size in wanted[name] for name, size in zip(form, sizes)):
            continue
        for slot in slots:
            for operator, args in operators:
                slot = derived(graph, (slot,), operator, *(args if isinstance(args, tuple) else (args,)))
            yield slot


def _origin(graph: Graph, node: fx.Node) -> fx.Node:
    """Returns the first node with the same numbers, apart from dimensions of size 1, whose operators fix no sizes."""
    while operator_of(node) in _LAYOUTS and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        value, before = graph.values[node], graph.values[source]
        if before.dim() < 2 or before.dtype != value.dtype or not torch.equal(before.squeeze(), value.squeeze()):
            break
        node = source
    return node
