"""Finds norms, linear layers and attention cores in a graph, whatever operators compute them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..blocks.parts import NO_NORM, NormParts, Slot, matrix, tensor_at
from ..ops import reference
from .arguments import computed, derived
from .capture import Graph, UnreadableError, operator_of

TOLERANCE = 1e-5  # relative; modules that compute norms or softmax in fp32 differ by 1e-7

MATMULS = {"matmul", "bmm", "einsum", "baddbmm", "mm"}
_PROJECTIONS = {*MATMULS, "linear", "addmm"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
_CHANGES = {"add", "sub", "masked_fill", "where", "tanh", "clamp"}  # of scores, apart from their scale


@dataclass(frozen=True)
class Linear:
    """A product of tokens and a parameter."""

    node: fx.Node  # the output
    x: fx.Node
    weights: tuple[Slot, ...]
    biases: tuple[Slot | None, ...]
    chunk: tuple[int, int] = (0, 1)  # index and number of the equal parts of the rows

    def half(self) -> int | None:
        return {1: None, 2: self.chunk[0]}.get(self.chunk[1], -1)


@dataclass(frozen=True)
class Core:
    """A product of queries and keys, and the next product with values."""

    q: Any  # these are nodes
    k: Any
    v: Any
    node: fx.Node  # the output
    scores: fx.Node | None = None  # the input of the softmax; None for SDPA
    scale: float = 1.0  # of SDPA
    changes: str = ""  # what else the core computes
    product: fx.Node | None = None  # of queries and keys; None for SDPA
    mask: fx.Node | None = None  # the mask of SDPA
    is_causal: bool = False
    cu_seqlens: Slot | None = None  # of packed sequences

    def path(self, graph: Graph) -> list[fx.Node]:
        """Returns the nodes from the product to the scores."""
        return [] if self.product is None or self.scores is None else graph.path(self.product, self.scores)

    def rerun(self, graph: Graph, product: Tensor) -> Tensor:
        """Returns the scores for another product of queries and keys."""
        assert self.product is not None and self.scores is not None
        values = {self.product: product}
        for node in self.path(graph):
            given: Any = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda each: values.get(each, graph.values[each])
            )
            values[node] = node.target(*given[0], **given[1])  # type: ignore[operator]
        return values[self.scores]


def is_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def same_tokens(a: Tensor, b: Tensor) -> bool:
    """Compares tokens in any order."""
    if a.shape[-1] != b.shape[-1] or a.numel() != b.numel():
        return False
    a, b = (each.reshape(-1, each.shape[-1]) for each in (a, b))
    return is_equal(a, b) or is_equal(a[a[:, 0].argsort()], b[b[:, 0].argsort()])


class Vectors:
    """Finds norms and LayerScale by the vectors that enter between two nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.values = graph, graph.values

    def _scales(self, before: fx.Node, after: fx.Node, width: int) -> list[Slot | None]:
        return [None, *(self._vectors(before, after, width) if before is not after else [])]

    def _vectors(self, before: fx.Node, after: fx.Node, width: int) -> list[Slot]:
        """Returns the vectors [width] that enter between two nodes, also those computed from parameters."""
        slots = self.graph.parameters_between(before, after)
        found = [slot for slot in slots if tensor_at(slot).shape == (width,)]
        entering = dict.fromkeys(each for node in self.graph.path(before, after) for each in node.all_input_nodes)
        for node in entering:
            value = self.values[node]
            if not isinstance(value, Tensor) or self.graph.is_live(node) or not self.graph.depends(node):
                continue
            if value.is_floating_point() and value.numel() in (1, width) and value.shape[-1:] in ((), (1,), (width,)):
                vector = value.flatten().expand(width)
                if not any(is_equal(vector, tensor_at(slot)) for slot in found):
                    slot = derived(self.graph, (computed(self.graph, node),), "flatten.using_ints")
                    found.append(derived(self.graph, (slot,), "expand.default", (width,)))
        return found

    def _norm(self, x: Tensor, target: Tensor, before: fx.Node, after: fx.Node) -> NormParts | None:
        """Returns the norm that maps the tokens x to target, with parameters that enter between two nodes."""
        if x.shape[-1] != target.shape[-1] or x.numel() != target.numel():
            return None
        slots = self._vectors(before, after, x.shape[-1])
        for eps, kind in itertools.product(self._epsilons(before, after), ("layer_norm", "rms_norm")):
            for weight, bias in itertools.product((*slots, None), (*slots, None) if kind == "layer_norm" else (None,)):
                norm = NormParts(weight, bias, kind, eps)
                if same_tokens(reference.normalize(x, norm.now()), target):
                    return norm
        return None

    def _epsilons(self, before: fx.Node, after: fx.Node) -> list[float]:
        found = []
        for node in self.graph.path(before, after):
            numbers = [
                each for each in (*node.args, *node.kwargs.values()) if isinstance(each, float) and 0 < each < 0.1
            ]
            if operator_of(node) == "layer_norm" and not numbers:
                numbers = [1e-5]
            if (operator_of(node) == "rms_norm" and not numbers) or torch.finfo(torch.float64).eps in numbers:
                raise UnreadableError("the epsilon of its norm depends on the dtype")
            found += numbers
        return [*dict.fromkeys(found), 1e-30]  # the last for norms without epsilon: zeros stay zeros

    def _normed(self, x: Tensor, linear: Linear, before: fx.Node, what: str) -> NormParts:
        """Returns the norm before a linear layer."""
        target = self.values[linear.x]
        if same_tokens(x, target):
            return NO_NORM
        norm = self._norm(x, target, before, linear.x)
        if norm is None:
            raise UnreadableError(f"the input of its {what} is not a LayerNorm or RMSNorm of the tokens")
        return norm


def linears_of(graph: Graph) -> list[Linear]:
    """Returns the linear layers of tokens, in the order of the graph."""
    nodes = [node for node in graph.nodes if operator_of(node) in _PROJECTIONS and len(graph.live_inputs(node)) == 1]
    found = [linear for linear in (_linear(graph, node) for node in nodes) if linear is not None]
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted((part for each in found for part in (each, *_parts(graph, each))), key=lambda each: order[each.node])


def _parts(graph: Graph, linear: Linear) -> list[Linear]:
    """Returns the parts of a layer whose output is split into different sizes, e.g. qkv and the hidden channels."""
    y, (weight, *others) = graph.values[linear.node], linear.weights
    found = []
    for node in _splits(linear.node):
        x = graph.values[node]
        size = x.shape[-1]
        start = next((i for i in range(y.shape[-1] - size + 1) if torch.equal(y[..., i : i + size], x)), None)
        if start is not None:
            biases = tuple(bias and rows(graph, bias, start, size) for bias in linear.biases)
            found.append(Linear(node, linear.x, (rows(graph, weight, start, size),), biases))
    sizes = [graph.values[each.node].shape[-1] for each in found]
    is_equal_parts = len(set(sizes)) == 1 and sizes[0] * len(sizes) == y.shape[-1]
    return [] if others or len(linear.biases) > 1 or linear.chunk != (0, 1) or is_equal_parts else found


def _splits(node: fx.Node) -> Iterator[fx.Node]:
    """Yields slices of the last dimension of a node."""
    for user in node.users:
        if operator_of(user) in ("split", "split_with_sizes", "tensor_split"):
            yield from user.users
        elif operator_of(user) in ("slice", "narrow"):
            inner = list(_splits(user))  # x[:, :, 2:3] slices each dimension
            yield from inner or [user]


def is_matrix(weight: Tensor) -> bool:
    """Returns True for the shape of a weight of a linear layer, or of a convolution of single positions."""
    return weight.dim() > 1 and weight.shape[2:].numel() == 1


def rows(graph: Graph, slot: Slot, start: int, size: int) -> Slot:
    """Returns the slot of some rows of a tensor."""
    every = tensor_at(slot).shape[0] == size
    return slot if every else derived(graph, (slot,), "narrow.default", 0, start, size)


def _linear(graph: Graph, node: fx.Node) -> Linear | None:
    (source,) = graph.live_inputs(node)
    x, y = graph.values[source], graph.values[node]
    weights = tuple(slot for slot in graph.parameters_between(source, node) if is_matrix(tensor_at(slot)))
    if y.shape[:-1] != x.shape[:-1]:
        return None
    if weights and all(tensor_at(slot).shape[1] == x.shape[-1] for slot in weights):
        found = _product(graph, node, source, weights)
        if found is not None:
            return found
    weights = _computed_weight(graph, node)
    return _product(graph, node, source, weights) if weights else None


def _product(graph: Graph, node: fx.Node, source: fx.Node, weights: tuple[Slot, ...]) -> Linear | None:
    """Returns the linear layer with these weights if a node computes it or an equal part of it."""
    x, y = graph.values[source], graph.values[node]
    weight = torch.cat([matrix(tensor_at(slot)) for slot in weights])
    count, rest = divmod(weight.shape[0], y.shape[-1])
    for i in range(0 if rest else count):
        biases = _biases(graph, node, y - F.linear(x, weight.chunk(count)[i]), (i, count), len(weights))
        if biases is None:
            continue
        for user in node.users:  # a bias may be added apart
            slots = graph.parameters_between(node, user) if operator_of(user) == "add" else []
            if len(node.users) == len(slots) == 1 and tensor_at(slots[0]).shape == y.shape[-1:] and not any(biases):
                return Linear(user, source, weights, tuple(slots), (i, count))
        return Linear(node, source, weights, biases, (i, count))
    return None


def _computed_weight(graph: Graph, node: fx.Node) -> tuple[Slot, ...]:
    """Returns the weight [out, in] of a product if it is computed from parameters, e.g. with a low-rank update."""
    shape = graph.values[node].shape[-1], graph.values[graph.live_inputs(node)[0]].shape[-1]
    for each in node.all_input_nodes:
        if not graph.is_live(each) and graph.depends(each) and len(graph.values[each].shape) == 2:
            slot = computed(graph, each)
            if operator_of(node) != "linear":
                slot = derived(graph, (slot,), "t.default")
            if tensor_at(slot).shape == shape:
                return (slot,)
    return ()


def _biases(
    graph: Graph, node: fx.Node, rest: Tensor, chunk: tuple[int, int], number: int
) -> tuple[Slot | None, ...] | None:
    """Returns the slots of the bias, which is the same for all tokens; None if there is another remainder."""
    rows = rest.reshape(-1, rest.shape[-1])
    limit = TOLERANCE * max(float(graph.values[node].abs().max()), 1e-30)
    if float((rows - rows[0]).abs().max()) > limit:
        return None
    if float(rows[0].abs().max()) <= limit:
        return (None,) * number
    slots = graph.parameters_between(graph.live_inputs(node)[0], node)
    vectors = [slot for slot in slots if tensor_at(slot).dim() == 1]
    for slot in vectors:
        bias = tensor_at(slot)
        if len(bias) == len(rows[0]) * chunk[1] and is_equal(bias.chunk(chunk[1])[chunk[0]], rows[0]):
            return (slot,)
    if operator_of(node) == "linear" and isinstance(given := node.args[2:] and node.args[2], fx.Node):
        slot = computed(graph, given)
        if is_equal(tensor_at(slot), rows[0]):
            return (slot,)
    found: list[Slot | None] = []
    for part in rows[0].chunk(3 if number == 1 else number):  # BEiT's keys have no bias
        found.append(next((slot for slot in vectors if is_equal(tensor_at(slot), part)), None))
        if found[-1] is None and part.abs().max() > limit:
            return None
    return tuple(found)


def cores_of(graph: Graph) -> Iterator[Core]:
    """Yields the attention cores in the order of the graph."""
    used: set[fx.Node] = set()
    for node in graph.nodes:
        live = graph.live_inputs(node)
        if operator_of(node) == "scaled_dot_product_attention" and live:
            yield _sdpa(graph, node)
        if operator_of(node) not in MATMULS or node in used or len(live) < 2:
            continue
        following = [each for each in graph.nodes if operator_of(each) in MATMULS and node in graph.ancestors[each]]
        mix = next((each for each in following if len(graph.live_inputs(each)) > 1), None)
        path = [] if mix is None else graph.path(node, mix)
        softmax = next((each for each in path if operator_of(each) in _SOFTMAX), None)
        if mix is None or softmax is None:
            continue
        used.add(mix)
        values = [each for each in _operands(mix) if node not in {*graph.ancestors[each], each}]
        changes = sorted({operator_of(each) for each in graph.path(node, softmax)} & _CHANGES)
        if values:
            q, k = _operands(node)
            scores = softmax.all_input_nodes[0]
            yield Core(q, k, values[0], mix, scores, changes=", ".join(changes), product=node)


def among_sequences(graph: Graph, cores: list[Core]) -> list[Core]:
    """Returns one core for those of packed sequences, whose bounds are an argument; otherwise the given cores."""
    bounds = [0, *itertools.accumulate(graph.values[core.k].shape[-2] for core in cores)]
    arguments = (node for node in graph.others if graph.values[node].dim() == 1)
    cu_seqlens = next((graph.slots[node] for node in arguments if graph.values[node].tolist() == bounds), None)
    if cu_seqlens is None or any(core.scores is not None or core.changes for core in cores):
        return cores
    q, k, v = (_whole(graph, [getattr(core, part) for core in cores]) for part in "qkv")
    if q is None or k is None or v is None:
        return cores
    return [Core(q, k, v, cores[-1].node, scale=cores[0].scale, cu_seqlens=cu_seqlens)]


def _whole(graph: Graph, parts: list[fx.Node]) -> fx.Node | None:
    """Returns the latest node that contains the tokens of all parts."""
    values = torch.cat([graph.values[part].flatten(0, -2) for part in parts])
    shared = set.intersection(*({part, *graph.ancestors[part]} for part in parts))
    found = (node for node in reversed(graph.nodes) if node in shared and isinstance(graph.values[node], Tensor))
    return next((node for node in found if graph.values[node].dim() and same_tokens(values, graph.values[node])), None)


def _sdpa(graph: Graph, node: fx.Node) -> Core:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args)) | node.kwargs
    changes = [name for name in ("attn_mask", "is_causal") if given.get(name) not in (None, False)]
    q, k, v = node.args[:3]
    scale: Any = given.get("scale") or graph.values[q].shape[-1] ** -0.5  # type: ignore[index]
    mask: Any = given.get("attn_mask")
    return Core(q, k, v, node, None, scale, ", ".join(changes), None, mask, bool(given.get("is_causal")))


def _operands(node: fx.Node) -> list[Any]:
    name, args = operator_of(node), node.args
    operands: Any = args[1] if name == "einsum" else args[1:3] if name == "baddbmm" else args[:2]
    return list(operands)
