"""Reads attention, MLPs and blocks in a graph of torch.compile, in which weights and sizes are arguments.

A region contains all nodes between two nodes: the tokens and the output. Its other inputs are weights. It becomes a
module of its own, whose reshapes follow the size of the tokens, so that `read` can prove it with few tokens.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from .capture import UnreadableError
from .forms import Recipe
from .reader import read

_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ATTENTION = {"softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
_MAX_NODES = 150  # of a region; blocks of common models have 20 to 60
_MAX_READS = 6  # regions that contain one attention or MLP
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])}
_READ: dict[Any, Recipe | str] = {}  # what was read before, or the reason why not


@dataclass(frozen=True)
class Region:
    """The nodes that depend on `x` and lead to `y`, with y, in order."""

    x: fx.Node
    y: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def inputs(self) -> list[fx.Node]:
        """Returns the inputs other than x."""
        inside = {self.x, *self.nodes}
        return list(dict.fromkeys(each for node in self.nodes for each in node.all_input_nodes if each not in inside))


@dataclass(frozen=True)
class Found:
    """A region that was read, and the sources of its weights: (index of the holder, attribute, node, transposed)."""

    region: Region
    recipe: Recipe
    weights: tuple[tuple[int, str, fx.Node, bool], ...]


def value_of(node: fx.Node) -> Any:
    """Returns the fake tensor of a node, or its symbolic number."""
    return node.meta.get("example_value")


def name_of(node: fx.Node) -> str:
    """Returns the name of a function or method, e.g. "softmax" for torch.softmax, F.softmax and Tensor.softmax."""
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    name = target if isinstance(target, str) else getattr(packet, "__name__", "")
    return name if node.op in ("call_function", "call_method") else ""


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def drops(node: fx.Node) -> bool:
    """Returns True if a node drops elements at random."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0.0
    if name == "multi_head_attention_forward":
        return bool(argument(node, 10, "dropout_p", 0.0) != 0.0 and argument(node, 13, "training", True))
    default = not name.startswith("feature") and node.op == "call_function" and node.target is not torch.dropout
    return (
        "dropout" in name and argument(node, 1, "p", 0.5) != 0.0 and argument(node, 2, "training", default) is not False
    )


def is_cast(node: fx.Node) -> bool:
    """Returns True for a cast among fp64, fp32, fp16 and bf16."""
    source, y = argument(node, 0, "input"), value_of(node)
    if name_of(node) not in _CASTS or not isinstance(source, fx.Node) or not isinstance(value_of(source), Tensor):
        return False
    return y.dtype in _DTYPES and value_of(source).dtype in _DTYPES and value_of(source).device == y.device


def writes(node: fx.Node) -> bool:
    """Returns True if a node may change a tensor or a global state, such as autocast."""
    target, name = node.target, name_of(node)
    if node.op not in ("call_function", "call_method"):
        return False
    if value_of(node) is None or isinstance(target, torch._ops.HigherOrderOperator) or "out" in node.kwargs:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return True
    try:
        return bool(inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get("inplace"))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a method, or a function without a signature
        return False


def is_linear(node: fx.Node) -> bool:
    """Returns True for a product of tokens and a matrix."""
    if name_of(node) == "linear":
        return True
    operands = [value_of(each) for each in node.args[:2] if isinstance(each, fx.Node)]
    fits = len(operands) == 2 and all(isinstance(each, Tensor) for each in operands)
    return name_of(node) == "matmul" and fits and operands[0].dim() > 2 and operands[1].dim() == 2


class Regions:
    """The regions of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        # sets of nodes are bits of integers
        self.before, self.after = [0] * len(self.nodes), [0] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            for each in node.all_input_nodes:
                self.before[i] |= self.before[self.at[each]] | 1 << self.at[each]
        for i, node in reversed(list(enumerate(self.nodes))):
            for each in node.users:
                self.after[i] |= self.after[self.at[each]] | 1 << self.at[each]
        self.attention = self._bits(lambda node: name_of(node) in ATTENTION)
        self.linears = self._bits(is_linear)
        self.parameters = self._bits(lambda node: isinstance(value_of(node), nn.Parameter))

    def _bits(self, test: Any) -> int:
        return sum(1 << i for i, node in enumerate(self.nodes) if test(node))

    def read_around(self, seed: fx.Node, done: set[fx.Node]) -> tuple[Found | None, list[str]]:
        """Reads the largest region possible that contains a node and no node in `done`; else returns the reasons.

        `seed` is one of `ATTENTION`, or a linear layer of an MLP. Without a reason, it is not part of an MLP.
        """
        reasons: list[str] = []
        regions = [region for region in self._around(seed) if not done & {*region.nodes}][:_MAX_READS]
        for region in regions:
            try:
                return self._read(region), []
            except UnreadableError as error:
                reasons.append(str(error))
        done.update(node for region in regions[:1] for node in region.nodes if is_linear(node))  # report them once
        return None, reasons

    def _around(self, seed: fx.Node) -> list[Region]:
        at, found = self.at[seed], []
        attends = bool(self.attention >> at & 1)
        for i in range(at - 1, max(at - _MAX_NODES, -1), -1):
            x = value_of(self.nodes[i])
            if not (self.before[at] >> i & 1 and _is_tokens(x)):
                continue
            for j in range(at, min(i + _MAX_NODES, len(self.nodes))):
                y, inside = value_of(self.nodes[j]), self.after[i] & (self.before[j] | 1 << j)
                if not (inside >> at & 1 and isinstance(y, Tensor) and is_same_shape(x, y)):
                    continue
                cores, linears = inside & self.attention, (inside & self.linears).bit_count()
                if any(self.before[k] & cores for k in _members(cores)) or attends is not bool(cores):
                    break  # several layers
                least = 0 if any(name_of(self.nodes[k]).startswith("multi") for k in _members(cores)) else 2
                if least <= linears <= 3 * cores.bit_count() + 4:
                    nodes = tuple(self.nodes[k] for k in _members(inside))
                    if self.is_closed(nodes) and self._has_weights_only(
                        region := Region(self.nodes[i], nodes[-1], nodes)
                    ):
                        found.append((linears, len(nodes), region))
        return [region for _, _, region in sorted(found, key=lambda each: each[:2], reverse=True)]

    def is_closed(self, nodes: tuple[fx.Node, ...]) -> bool:
        """Returns True if only the last node is used elsewhere, and no other node writes while these nodes run."""
        inside = {*nodes}
        if any(user not in inside for node in nodes[:-1] for user in node.users):
            return False
        return not any(
            writes(each) for each in self.nodes[self.at[nodes[0]] : self.at[nodes[-1]]] if each not in inside
        )

    def _has_weights_only(self, region: Region) -> bool:
        for node in region.inputs:
            value = value_of(node)
            if isinstance(value, torch.SymInt):
                continue
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return False
            if any(type(size) is not int for size in value.shape):
                return False
            i = self.at[node]
            if value.dim() > 2 and not (self.before[i] | 1 << i) & self.parameters:  # e.g. a mask
                return False
        return True

    def _read(self, region: Region) -> Found:
        if any(map(drops, region.nodes)):
            raise UnreadableError("its dropout is active")
        x, copier = value_of(region.x), _Copier(region)
        shape = (2, *map(hint, x.shape[1:]))
        key = (shape, *copier.body.key())
        if key not in _READ:
            _READ[key] = _proved(copier.body, shape)
        recipe = _READ[key]
        if isinstance(recipe, str):
            raise UnreadableError(recipe)
        if any(
            fixed is not None and not (type(size) is int and size == fixed)
            for size, fixed in zip(x.shape, recipe.shape)
        ):
            raise UnreadableError(f"it computes the same for tokens of shape {recipe.shape} only, got {tuple(x.shape)}")
        if x.dtype not in recipe.dtypes:
            raise UnreadableError(f"module and parts differ in {x.dtype}")
        return Found(region, recipe, tuple(copier.weights))


def _proved(body: nn.Module, shape: tuple[int, ...]) -> Recipe | str:
    with (
        torch.device("cpu"), torch.inference_mode(False), torch._guards.tracing(None), _disable_current_modes(),
        torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False),
    ):  # fmt: skip
        try:
            return read(body, torch.empty(shape))
        except Exception as error:  # of any operator in the region
            return str(error).split("\n")[0]


def _is_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() in (3, 4) and x.is_floating_point()


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def hint(size: int | torch.SymInt) -> int:
    """Returns the size in the example, without a guard."""
    if isinstance(size, int):
        return size
    if size.node.hint is None:
        raise UnreadableError("the sizes of its tokens depend on values of tensors")
    return int(size.node.hint)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_same_shape(a: Any, b: Any) -> bool:
    """Compares shapes without a guard."""
    a, b = (getattr(each, "shape", each) for each in (a, b))
    return len(a) == len(b) and all(_expression(m) == _expression(n) for m, n in zip(a, b))


class _Body(nn.Module):
    """A region as a module. `holder0`, `holder1`, ... hold weights, and biases if present."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()

    def forward(self, x: Tensor) -> Any:
        return fx.Interpreter(self, graph=self.graph).run(x)

    def key(self) -> tuple[Any, ...]:
        nodes = ((node.op, node.target, repr(node.args), repr(node.kwargs)) for node in self.graph.nodes)
        return *nodes, *((name, each.shape) for name, each in self.named_parameters())


class _Copier:
    """Copies a region into a module with zeros as weights. Only sizes of the tokens are arguments of the copy."""

    def __init__(self, region: Region) -> None:
        self.body = _Body()
        self.graph = self.body.graph
        self.weights: list[tuple[int, str, fx.Node, bool]] = []
        self.tokens = region.x
        self.copies = {region.x: self.graph.placeholder("x")}
        self.dtypes = {value_of(node).dtype for node in region.nodes if is_linear(node)}  # e.g. of autocast
        self.unbiased: dict[fx.Node, int] = {}  # holders of linear layers without bias
        for node in region.nodes:
            self.copies[node] = self._copied(node)
        self.graph.output(self.copies[region.y])

    def _copied(self, node: fx.Node) -> Any:
        name = name_of(node)
        if "dropout" in name:  # inactive
            return self.copies[node.args[0]]  # type: ignore[index]
        if is_cast(node) and self._is_harmless(node):
            return self.copies[node.args[0]]  # type: ignore[index]
        if name in ("view", "reshape") and (copy := self._reshape(node)) is not None:
            return copy
        if name == "matmul" and is_linear(node):
            x, weight = node.args
            if weight not in self.copies:
                copied = self._weight(weight, transposed=True)
                linear = self.graph.call_function(F.linear, (self._argument(x), copied))
                self.unbiased[linear] = self.weights[-1][0]
                return linear
        if name in ("add", "iadd", "add_") and len(node.args) == 2 and not node.kwargs:
            for linear, bias in (node.args, node.args[::-1]):
                at = self.unbiased.get(self.copies.get(linear)) if len(linear.users) == 1 else None  # type: ignore[arg-type, union-attr]
                rows = None if at is None else getattr(self.body, f"holder{at}").weight.shape[:1]
                if at is not None and isinstance(bias, fx.Node) and value_of(bias).shape == rows:
                    copied = self.copies[linear]  # type: ignore[index]
                    with self.graph.inserting_before(copied):
                        copied.args = (*copied.args, self._slot(at, "bias", bias))
                    return copied
        arguments: list[Any] = []
        for i, each in enumerate(node.args):
            if i and arguments[-1] is not None and self._is_bias(node.args[i - 1], each):
                at = self.weights[-1][0]
                arguments.append(self._slot(at, "bias", each))  # type: ignore[arg-type]
            else:
                arguments.append(fx.map_arg(each, self._argument))
        kwargs = {key: fx.map_arg(each, self._argument) for key, each in node.kwargs.items()}
        if name == "softmax" and self._is_harmless(node):
            kwargs.pop("dtype", None)
        return self.graph.create_node(node.op, node.target, tuple(arguments), kwargs)

    def _is_harmless(self, node: fx.Node) -> bool:
        """Returns True if the dtype of a node, which is a constant here, is a usual one with enough precision."""
        dtype = value_of(node).dtype
        return dtype in self.dtypes or (dtype in _DTYPES and dtype.itemsize >= value_of(self.tokens).dtype.itemsize)

    def _argument(self, node: fx.Node) -> Any:
        if node in self.copies:
            return self.copies[node]
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            for i, size in enumerate(value_of(self.tokens).shape):
                if _expression(size) == _expression(value):
                    return self.graph.call_method("size", (self.copies[self.tokens], i))
            if node.op == "call_function" and node.all_input_nodes:  # arithmetic
                args = fx.map_arg(node.args, self._argument)
                return self.graph.call_function(node.target, args)  # type: ignore[arg-type]
        if not isinstance(value, Tensor):
            raise UnreadableError(f"its input {node.name} is not a size of its tokens")
        return self._weight(node)

    def _is_bias(self, weight: Any, bias: Any) -> bool:
        """Returns True for a vector after a matrix with as many rows among the arguments of a function."""
        nodes = all(isinstance(each, fx.Node) and each not in self.copies for each in (weight, bias))
        if not nodes or not all(isinstance(value_of(each), Tensor) for each in (weight, bias)):
            return False
        return value_of(weight).dim() == 2 and value_of(bias).shape == value_of(weight).shape[:1]

    def _weight(self, node: Any, transposed: bool = False) -> fx.Node:
        at = len(self.body._modules)
        self.body.add_module(f"holder{at}", holder := nn.Module())
        holder.register_parameter("bias", None)
        return self._slot(at, "weight", node, transposed)

    def _slot(self, at: int, name: str, node: fx.Node, transposed: bool = False) -> fx.Node:
        shape = value_of(node).shape
        parameter = nn.Parameter(torch.zeros(shape[::-1] if transposed else shape))
        setattr(getattr(self.body, f"holder{at}"), name, parameter)
        self.weights.append((at, name, node, transposed))
        return self.graph.get_attr(f"holder{at}.{name}")

    def _reshape(self, node: fx.Node) -> fx.Node | None:
        """Returns a reshape that depends on the size of the tokens; None if the constant sizes must stay."""
        source: Any = node.args[0]
        shapes = [value_of(each).shape for each in (source, node, self.tokens)]
        hints = [tuple(map(hint, shape)) for shape in shapes]
        sizes = _resized(*hints, shapes[0], shapes[2])
        if sizes is None or not is_same_shape(sizes, shapes[1]):
            return None
        return self.graph.call_function(_reshaped, (self.copies[source], self.copies[self.tokens], *hints))


def _reshaped(y: Tensor, x: Tensor, before: tuple[int, ...], after: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
    sizes = _resized(before, after, tokens, y.shape, x.shape)
    return y.reshape(after if sizes is None else tuple(sizes))


def _resized(
    before: Sequence[int], after: Sequence[int], tokens: Sequence[int], now: Sequence[Any], tokens_now: Sequence[Any]
) -> list[Any] | None:
    """Returns the shape to which a reshape from `before` to `after` maps the shape `now`, for other tokens; or None.

    Sizes are matched from the left. Where one dimension becomes several, those with the sizes of the tokens follow.
    """
    sizes: list[Any] = []
    i = j = 0
    while i < len(before) and j < len(after):
        first, start = i, j
        source, target, i, j = before[i], after[j], i + 1, j + 1
        while source != target:
            if source < target and i < len(before):
                source, i = source * before[i], i + 1
            elif target < source and j < len(after):
                target, j = target * after[j], j + 1
            else:
                return None
        if j == start + 1:
            sizes.append(math.prod(now[first:i]))
        elif all(type(size) is int and size == old for size, old in zip(now[first:i], before[first:i])):
            sizes += after[start:j]
        else:
            rest = list(zip(tokens[:-1], tokens_now))
            for size in after[start:j]:
                found = next((k for k, (old, _) in enumerate(rest) if old == size), None)
                sizes.append(size if found is None else rest[found][1])
                rest = rest if found is None else rest[found + 1 :]
    if any(size != 1 for size in (*before[i:], *after[j:])):
        return None
    return [*sizes, *after[j:]]
