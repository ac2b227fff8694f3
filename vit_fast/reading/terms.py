"""Finds what changes the scores of attention: rotary embeddings, a scale, a bias, masks, and windows of tokens."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..blocks.computed import DEVICE, DTYPE
from ..blocks.parts import RopeParts, Slot, TermParts, Windows, tensor_at
from ..ops import reference
from ..ops.descriptions import Rope, checked_rope
from ..positions import pairs
from .arguments import FIXES_SIZES, arguments_of, computed, derived
from .capture import LAYOUTS, Graph, UnreadableError, operator_of
from .elements import MATMULS, TOLERANCE, Core, same_tokens

INFINITY = float("inf")
Shape = tuple[int, int, int, int]  # of scores [B, H, N, M]
# Dimensions of a table (batch, heads, tokens, channels), and the operators that convert it to [T, d] or [B, H, T, d]
_FORMS: dict[str, tuple[tuple[str, int | tuple[int, int]], ...]] = {
    "td": (), "btd": (("unsqueeze.default", 1),), "htd": (("unsqueeze.default", 0),),
    "thd": (("transpose.int", (0, 1)), ("unsqueeze.default", 0)), "bhtd": (), "bthd": (("transpose.int", (1, 2)),),
}  # fmt: skip


def terms_of(graph: Graph, core: Core, tokens: Tensor, heads: int, keys: int) -> Iterator[TermParts | None]:
    """Yields candidates for attention of `heads` heads, whose queries attend to `keys` tokens.

    `tokens` are the input of the module, [B, N, C] or on a grid, e.g. [B, height, width, C].
    """
    count = tokens[0, ..., 0].numel()
    groups = count // keys
    placed = []
    for slot, hides in _added(graph, core, keys, (len(tokens), heads, count, keys)):
        found = _placed(graph, slot, groups, heads, keys)
        if found is None:
            return
        placed.append((*found, hides))
    bias, mask = (
        _sum(graph, [(slot, hides) for slot, found, hides in placed if found is is_mask]) for is_mask in (False, True)
    )
    terms = TermParts(bias, window_mask=mask, scale=_head_scale(graph, core, heads))
    name, per_call = ("bias", bias) if groups == 1 and mask is None else ("window_mask", mask)
    if per_call is not None and arguments_of(per_call):
        if core.scores is not None:  # softmax, unlike SDPA, returns NaN without keys
            largest = derived(graph, (per_call,), "amax.default", (-1,), True)
            per_call = derived(graph, (per_call, derived(graph, (largest,), "mul.Scalar", 0.0)), "add.Tensor")
        terms = replace(terms.with_term(name, per_call), per_call=name)
    if bias is not None and terms.per_call != "bias":
        terms = next(_tables(graph, core, terms, tensor_at(bias)), terms)
    windows = [None] if groups == 1 else _windows(tokens, keys)
    pairs = itertools.permutations(_rel(graph, core, keys) or (None, None))
    for (rel_h, rel_w), window in itertools.product(pairs, windows):
        every = replace(terms, windows=window, rel_h=rel_h, rel_w=rel_w)
        yield every if every.given or window else None


def _tables(graph: Graph, core: Core, terms: TermParts, bias: Tensor) -> Iterator[TermParts]:
    """Yields terms whose bias is a table with an index, which has a deterministic backward on GPUs."""
    end: fx.Node = core.node if core.scores is None else core.scores
    slots = [(slot, tensor_at(slot)) for slot in graph.parameters_between(core.q, end)]
    tables = [(slot, each) for slot, each in slots if each.is_floating_point() and each.dim() == 2]
    indices = [slot for slot, each in slots if not each.is_floating_point() and each.shape == bias.shape[1:]]
    for (slot, table), index in itertools.product(tables, indices):
        for heads_first in (False, True):
            if tensor_at(index).max() >= table.shape[heads_first]:
                continue
            found = replace(terms, bias=slot, index=index, heads_first=heads_first)
            if table.shape[1 - heads_first] == len(bias) and torch.equal(found.term("bias"), bias):
                yield found


def _sum(graph: Graph, slots: list[tuple[Slot, bool]]) -> Slot | None:
    """Returns the sum of slots; keys that several masks hide count once."""
    found: Slot | None = None
    for slot, hides in sorted(slots, key=lambda each: not each[1]):
        found = slot if found is None else derived(graph, (found, slot), "minimum.default" if hides else "add.Tensor")
    return found


def _added(graph: Graph, core: Core, keys: int, shape: Shape) -> Iterator[tuple[Slot, bool]]:
    """Yields what a core adds to its scores [B, H, N, M] of a shape, apart from `_rel`, and True if it hides keys."""
    if core.is_causal:
        hidden = derived(graph, (), "full.default", (keys, keys), -INFINITY, dtype=(DTYPE,), device=(DEVICE,))
        yield derived(graph, (hidden,), "triu.default", 1), True
    by_rel = _rel(graph, core, keys)
    for node, sign in _addends(graph, core):
        if not by_rel or not graph.is_live(node):
            slot = _sum_of(graph, core, node, shape)
            hides = node is core.mask and tensor_at(slot).dtype == torch.bool
            slot = _hidden(graph, slot, -INFINITY, False) if hides else slot
            yield slot if sign > 0 else derived(graph, (slot,), "neg.default"), hides
    inside = {core.product, *core.path(graph)}
    for node in core.path(graph):
        args: Any = node.args
        if operator_of(node) == "masked_fill":
            yield _hidden(graph, _slot_of(graph, core, args[1], shape), _number(graph, args[2])), True
        elif operator_of(node) == "where":
            is_scores = args[1] in inside  # where the condition is True
            value = _number(graph, args[2 if is_scores else 1])
            yield _hidden(graph, _slot_of(graph, core, args[0], shape), value, not is_scores), True


def _sum_of(graph: Graph, core: Core, node: fx.Node, shape: Shape) -> Slot:
    """Returns `_slot_of` a node; of both masks that a forward adds, as nn.MultiheadAttention does."""
    source: Any = node
    while operator_of(source) in FIXES_SIZES and graph.values[source].numel() == graph.values[source.args[0]].numel():
        source = source.args[0]
    terms = source.all_input_nodes
    if operator_of(source) != "add" or source.kwargs or len(terms) != 2 or not arguments_of(computed(graph, node)):
        return _slot_of(graph, core, node, shape)
    try:
        a, b = (_slot_of(graph, core, each, shape, graph.values[source].shape) for each in terms)
    except (RuntimeError, UnreadableError):
        return _slot_of(graph, core, node, shape)
    return derived(graph, (a, b), "add.Tensor")


def _slot_of(graph: Graph, core: Core, node: fx.Node, shape: Shape, sizes: Sequence[int] = ()) -> Slot:
    """Returns the slot of a constant; of a tensor that depends on arguments, as [B or 1, H or 1, N or 1, M or 1].

    `sizes` is the shape that the tensor has when it is added to the scores, by default that of the scores.
    """
    slot = computed(graph, node)
    if not sizes and (not arguments_of(slot) or shape[2] != shape[3]):
        return slot
    scores: Any = core.product if core.product is not None else core.node
    sizes = sizes or (*graph.values[scores].shape[:-2], *shape[2:])
    if graph.values[node].dim() > len(sizes):
        if graph.values[node].shape == (1, graph.values[node].shape[1], 1, *shape[2:]):  # of the windows of an image
            return slot
        raise UnreadableError("its mask has more dimensions than its scores, [batch, heads, queries, keys]")
    target = graph.values[node].expand(*sizes).reshape(shape[0], -1, *shape[2:])
    for any_size in (True, False):
        with contextlib.suppress(RuntimeError):
            slot = computed(graph, node, any_size)
            sizes = tensor_at(slot).shape
            if len(sizes) == 3 and sizes[0] == shape[0] * shape[1]:
                slot = derived(graph, (slot,), "unflatten.int", 0, (-1, shape[1]))
            value = tensor_at(slot)
            for axes in itertools.permutations(range(4), value.dim()):  # of [B, H, N, M]
                if any(size not in (1, shape[axis]) for size, axis in zip(value.shape, axes)):
                    continue
                order = sorted(range(value.dim()), key=axes.__getitem__)
                placed = derived(graph, (slot,), "permute.default", tuple(order)) if order != sorted(order) else slot
                for axis in sorted({0, 1, 2, 3}.difference(axes)):
                    placed = derived(graph, (placed,), "unsqueeze.default", axis)
                if torch.equal(tensor_at(placed).expand(target.shape), target):
                    return placed
    raise UnreadableError("the shape of its mask is not [batch, heads, queries, keys] or a part of it")


def _addends(graph: Graph, core: Core) -> Iterator[tuple[Any, int]]:
    """Yields the nodes that a core adds to its scores, and their signs."""
    product, inside = core.product, {core.product, *core.path(graph)}
    if product is not None and operator_of(product) == "baddbmm" and product.kwargs.get("beta", 1) == 1:
        yield product.args[0], 1
    if core.mask is not None:
        yield core.mask, 1
    for node in core.path(graph):
        if operator_of(node) in ("add", "sub"):
            yield node.args[1 if node.args[0] in inside else 0], 1 if operator_of(node) == "add" else -1


def _rel(graph: Graph, core: Core, keys: int) -> list[Slot]:
    """Returns the tables [h, Kh, D] and [w, Kw, D] whose products with the queries are added to the scores."""
    live = [node for node, _ in _addends(graph, core) if graph.is_live(node)]
    before = set().union(*({node, *graph.ancestors[node]} for node in live))
    products = (node for node in graph.nodes if node in before and operator_of(node) in MATMULS)
    tables, width = [], graph.values[core.q].shape[-1]
    for table in (each for node in products for each in node.all_input_nodes if not graph.is_live(each)):
        shape = graph.values[table].shape
        if len(shape) == 3 and width in shape[1:]:
            slot = computed(graph, table)
            tables.append(slot if shape[2] == width else derived(graph, (slot,), "transpose.int", 1, 2))
    sizes = [math.prod(tensor_at(table).shape[i] for table in tables) for i in (0, 1)]
    return tables if len(tables) == 2 and sizes == [keys, keys] else []


def _hidden(graph: Graph, mask: Slot, value: float, where: bool = True) -> Slot:
    """Returns the slot of a tensor that is `value` where the mask is True, or False, and 0 elsewhere."""
    per_call = bool(arguments_of(mask))  # in fp32, because no value of fp16 hides keys of all scores
    zeros = derived(graph, (mask,), "zeros_like.default", dtype=torch.float32 if per_call else (DTYPE,))
    value = -1e30 if per_call and -INFINITY < value < -1e3 else value
    hides = mask if where else derived(graph, (mask,), "logical_not.default")
    return derived(graph, (zeros, hides), "masked_fill.Scalar", value)


def _number(graph: Graph, given: Any) -> float:
    value = graph.values[given] if isinstance(given, fx.Node) else given
    if isinstance(value, Tensor) and (value.numel() > 1 or graph.is_live(given)):
        raise UnreadableError("its mask inserts values that are not constant")
    return float(value)


def _placed(graph: Graph, slot: Slot, groups: int, heads: int, keys: int) -> tuple[Slot, bool] | None:
    """Returns the slot as bias [H or 1, N, M], or as window mask [W, N, M] with True; None if it is neither."""
    by_window = groups == 1 and tensor_at(slot).dim() == 5  # of batches that contain the windows of images
    if groups == 1 and arguments_of(slot) and not by_window:
        return slot, False
    shape = [1, 1, 1, 1, *tensor_at(slot).shape]
    lead, (a, b, n, m) = shape[:-4], shape[-4:]
    if math.prod(lead) > 1 or n not in (1, keys) or m not in (1, keys):
        return None
    is_mask = a > 1 == b and (a == groups or by_window)
    if not is_mask and (a > 1 or b not in (1, heads)):
        return None
    first = a if is_mask else b
    if tensor_at(slot).shape != (first, n, m):
        slot = derived(graph, (slot,), "reshape.default", (first, n, m))
    if (n, m) != (keys, keys):
        slot = derived(graph, (slot,), "expand.default", (first, keys, keys))
    return slot, is_mask


def _head_scale(graph: Graph, core: Core, heads: int) -> Slot | None:
    """Returns a tensor [H] of the module that multiplies the scores."""
    for node in core.path(graph):
        for each in node.all_input_nodes:
            is_factor = operator_of(node) in ("mul", "div") and not graph.is_live(each)
            value = graph.values[each]
            if is_factor and isinstance(value, Tensor) and value.numel() in (1, heads) and graph.depends(each):
                slot = derived(graph, (computed(graph, each),), "reshape.default", (value.numel(),))
                slot = derived(graph, (slot,), "expand.default", (heads,))
                return slot if operator_of(node) == "mul" else derived(graph, (slot,), "reciprocal.default")
    return None


def factor_of(graph: Graph, core: Core, heads: int, scale: Slot | None) -> float | None:
    """Returns the number that multiplies the product of queries and keys, apart from `scale`; None if there is none."""
    if core.scores is None or core.product is None:
        return core.scale
    product = graph.values[core.product]
    ones, zeros = (core.rerun(graph, torch.full_like(product, value)) for value in (1.0, 0.0))
    slope = (ones - zeros).double()
    if scale is not None:
        slope = slope.reshape(-1, heads, *slope.shape[-2:]) / tensor_at(scale)[:, None, None]
    found = slope.flatten()[(slope.isfinite() & (zeros.abs() < 1e6).reshape(slope.shape)).flatten()]
    found = found[found != 0]  # masks may insert numbers
    if not found.numel() or not bool((found - found[0]).abs().max() <= TOLERANCE * found[0].abs()):
        return None
    return float(found[0])


def _windows(tokens: Tensor, keys: int) -> list[Windows]:
    """Returns the windows of `keys` tokens that divide the grid."""
    side = math.isqrt(tokens.shape[1])  # tokens [B, N, C] may be a square grid
    grid = tuple(tokens.shape[1:-1]) if tokens.dim() > 3 else (side, side)
    if tokens.dim() == 3 and side * side != tokens.shape[1]:
        return []
    divisors = ([n for n in range(1, size + 1) if size % n == 0] for size in grid)
    sizes = [window for window in itertools.product(*divisors) if math.prod(window) == keys]
    sizes.sort(key=lambda window: max(window) - min(window))
    none = (0,) * len(grid)
    plain = []
    for window in sizes:
        shifts = [none]
        if max(window) - min(window) == max(sizes[0]) - min(sizes[0]):
            # a window that covers a dimension is usually not shifted in it
            shifts += [tuple(n // 2 for n in window), tuple(n // 2 * (n < size) for n, size in zip(window, grid))]
        plain += [Windows(grid, window, shift) for shift in dict.fromkeys(shifts)]
    return [*plain, *(Windows(grid, window, none, dilated=True) for window in sizes)]


def ropes_of(graph: Graph, core: Core, start: fx.Node, qkv: Tensor) -> Iterator[RopeParts | None]:
    """Yields candidates that explain the queries of a core, computed from qkv [B, N, 3, H, D] of the node `start`.

    Tables are constants or arguments of the forward that multiply the queries. The last candidate is None.
    """
    factors = [each for node in graph.path(start, core.q) for each in node.all_input_nodes if not graph.is_live(each)]
    tables = [slot for node in dict.fromkeys(factors) for slot in _rope_tables(graph, node, qkv.shape)]
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


def _rope_tables(graph: Graph, node: fx.Node, shape: tuple[int, ...]) -> Iterator[Slot]:
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
    while operator_of(node) in LAYOUTS and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        value, before = graph.values[node], graph.values[source]
        if before.dim() < 2 or before.dtype != value.dtype or not torch.equal(before.squeeze(), value.squeeze()):
            break
        node = source
    return node
