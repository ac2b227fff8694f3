"""Reads attention, MLPs and blocks in a graph of torch.compile, in which weights and sizes are arguments.

A region consists of all nodes between two nodes, the tokens and the output. Its other inputs are weights. `read` proves
a copy of the region as a module, whose reshapes follow the shape of the tokens, on few tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from .capture import UnreadableError
from .forms import Recipe
from .reader import read

ATTENTION = {"softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
_LIBRARIES = {"_operator", "torch", "torch.functional", "torch.nn.functional", "torch._C._nn"}
_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])}
_MAX_NODES = 150  # of a region; blocks of common models have 20 to 60
_MAX_READS = 6  # regions around one node
_READ: dict[Any, Recipe | str] = {}  # recipes by structure, or the reason why there is none


@dataclass(frozen=True)
class Region:
    """Nodes that lead from the tokens `x` to the last of them, in order, and what they compute."""

    x: fx.Node
    nodes: tuple[fx.Node, ...]
    recipe: Recipe
    weights: tuple[tuple[int, str, fx.Node, bool], ...]  # number of the holder, attribute, node, True if transposed


def value_of(node: Any) -> Any:
    """Returns the fake tensor of a node, or its symbolic number; None if there is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def name_of(node: fx.Node) -> str:
    """Returns the name of a function of torch or of a method, e.g. "softmax" for torch.softmax, F.softmax; or ""."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if getattr(node.target, "__module__", "") in _LIBRARIES else ""


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def drops(node: fx.Node) -> bool:
    """Returns True for active dropout, also of attention."""
    if "dropout" in (name := name_of(node)):
        return argument(node, 1, "p", 0.5) != 0 and argument(node, 2, "training", node.kwargs.get("train", True))
    at = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}.get(name)
    return at is not None and argument(node, at, "dropout_p", 0.0) != 0 and argument(node, 13, "training", True)


def is_cast(node: fx.Node) -> bool:
    """Returns True for a cast among fp64, fp32, fp16 and bf16."""
    x, y = value_of(argument(node, 0, "input")), value_of(node)
    are_tensors = name_of(node) in _CASTS and isinstance(x, FakeTensor) and isinstance(y, FakeTensor)
    return are_tensors and x.dtype in _DTYPES and y.dtype in _DTYPES and x.device == y.device


def is_linear(node: fx.Node) -> bool:
    """Returns True for a product of tokens and a matrix."""
    x, weight = (value_of(argument(node, i, "")) for i in (0, 1))
    fits = isinstance(x, FakeTensor) and isinstance(weight, FakeTensor) and x.dim() > 2 and weight.dim() == 2
    return fits and name_of(node) in ("linear", "matmul")


def _writes(node: fx.Node) -> bool:
    """Returns True if a node may change a tensor, or a global state such as autocast."""
    name, flags = name_of(node), (*node.args[1:], node.kwargs.get("inplace"))  # flags may be `inplace`
    is_new = name and not name.endswith("_") and node.target not in _IN_PLACE and "out" not in node.kwargs
    is_new = is_new and value_of(node) is not None and not any(each is True for each in flags)
    return node.op.startswith("call") and not is_new


def hint(size: int | torch.SymInt) -> int:
    """Returns the size in the example, without a guard."""
    found = size if isinstance(size, int) else size.node.hint
    if found is None:
        raise UnreadableError("the shapes of its tensors depend on values of tensors")
    return int(found)


def is_same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Compares shapes for all sizes that the graph supports, without a guard."""
    first, second = ([each.node.expr if isinstance(each, torch.SymInt) else each for each in shape] for shape in (a, b))
    return first == second


class Regions:
    """The regions of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: i for i, node in enumerate(self.nodes)}
        self.before, self.after = [0] * len(self.nodes), [0] * len(self.nodes)  # sets of nodes as bits
        for i, node in enumerate(self.nodes):
            for each in node.all_input_nodes:
                self.before[i] |= self.before[self.at[each]] | 1 << self.at[each]
        for i in reversed(range(len(self.nodes))):
            for each in self.nodes[i].users:
                self.after[i] |= self.after[self.at[each]] | 1 << self.at[each]
        self.attention = self._bits(lambda node: name_of(node) in ATTENTION)
        self.linears = self._bits(is_linear)
        self.parameters = self._bits(lambda node: isinstance(value_of(node), nn.Parameter))

    def _bits(self, test: Callable[[fx.Node], bool]) -> int:
        return sum(1 << i for i, node in enumerate(self.nodes) if test(node))

    def read(self, seed: fx.Node, done: set[fx.Node]) -> tuple[Region | None, list[str]]:
        """Reads the largest possible region that contains `seed` and no node in `done`; else returns the reasons.

        `seed` is one of `ATTENTION`, or a linear layer. Without a reason, the linear layer is not part of an MLP.
        """
        reasons: list[str] = []
        around = [each for each in self._around(self.at[seed]) if not done & {*each[1]}][:_MAX_READS]
        for x, nodes in around:
            try:
                return _read(x, nodes), []
            except (UnreadableError, LookupError) as error:  # LookupError: unusual arguments
                reasons.append(str(error))
        done.update(node for _, nodes in around[:1] for node in nodes if is_linear(node))  # one report of an MLP
        return None, reasons

    def _around(self, at: int) -> list[tuple[fx.Node, tuple[fx.Node, ...]]]:
        """Returns the tokens and the nodes of the regions with one attention layer or one MLP, largest first."""
        found = []
        for i in range(at - 1, max(at - _MAX_NODES, -1), -1):
            x = value_of(self.nodes[i])
            if not self.before[at] >> i & 1 or not isinstance(x, FakeTensor):
                continue
            if x.dim() not in (3, 4) or not x.is_floating_point():
                continue
            for j in range(at, min(i + _MAX_NODES, len(self.nodes))):
                y, inside = value_of(self.nodes[j]), self.after[i] & (self.before[j] | 1 << j)
                if not inside >> at & 1 or not isinstance(y, FakeTensor) or not is_same_shape(x.shape, y.shape):
                    continue
                cores, linears = inside & self.attention, (inside & self.linears).bit_count()
                if bool(cores) != self.attention >> at & 1 or any(self.before[k] & cores for k in _members(cores)):
                    break  # several layers
                nodes = tuple(self.nodes[k] for k in _members(inside))
                linears += 2 * sum(name_of(node).startswith("multi_head") for node in nodes)
                if 2 <= linears <= 3 * cores.bit_count() + 4 and self.is_closed(nodes) and self._has_weights(i, inside):
                    found.append((linears, len(nodes), self.nodes[i], nodes))
        return [each[2:] for each in sorted(found, key=lambda each: each[:2], reverse=True)]

    def is_closed(self, nodes: tuple[fx.Node, ...]) -> bool:
        """Returns True if only the last node is used elsewhere, and no other node writes while these nodes run."""
        inside, meanwhile = {*nodes}, self.nodes[self.at[nodes[0]] : self.at[nodes[-1]]]
        is_used = any(user not in inside for node in nodes[:-1] for user in node.users)
        return not is_used and not any(_writes(each) for each in meanwhile if each not in inside)

    def _has_weights(self, x: int, inside: int) -> bool:
        """Returns True if the other inputs are sizes, matrices, vectors, or computed from parameters."""
        sources = {self.at[each] for i in _members(inside) for each in self.nodes[i].all_input_nodes} - {x}
        for i in (i for i in sources if not inside >> i & 1):
            value = value_of(self.nodes[i])
            if isinstance(value, torch.SymInt):
                continue
            if (
                not isinstance(value, FakeTensor)
                or not value.is_floating_point()
                or torch.SymInt in map(type, value.shape)
            ):
                return False
            if value.dim() > 2 and not (self.before[i] | 1 << i) & self.parameters:  # e.g. a mask
                return False
        return True


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _read(x: fx.Node, nodes: tuple[fx.Node, ...]) -> Region:
    if any(map(drops, nodes)):
        raise UnreadableError("its dropout is active")
    tokens, copier = value_of(x), _Copier(x, nodes)
    shape = (2, *map(hint, tokens.shape[1:]))
    key = (shape, *copier.body.key())
    if key not in _READ:
        _READ[key] = _proved(copier.body, shape)
    recipe = _READ[key]
    if isinstance(recipe, str):
        raise UnreadableError(recipe)
    wanted = [size if fixed is None else fixed for size, fixed in zip(tokens.shape, recipe.shape)]
    if not is_same_shape(wanted, tokens.shape):
        raise UnreadableError(f"it can be read for tokens of shape {recipe.shape} only, got {tuple(tokens.shape)}")
    if tokens.dtype not in recipe.dtypes:
        raise UnreadableError(f"its parts compute something else in {tokens.dtype}")
    return Region(x, nodes, recipe, tuple(copier.weights))


def _proved(body: nn.Module, shape: tuple[int, ...]) -> Recipe | str:
    with (
        torch.device("cpu"), torch.inference_mode(False), torch._guards.tracing(None), _disable_current_modes(),
        torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), torch.random.fork_rng([]),
    ):  # fmt: skip
        try:
            before = torch.get_rng_state()
            body(torch.zeros(shape))
            if not torch.equal(before, torch.get_rng_state()):
                return "it draws random numbers"
            return read(body, torch.empty(shape))
        except Exception as error:  # of any operator
            return str(error).split("\n")[0]


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
    """Copies nodes into a module, with zeros as weights and sizes that follow the tokens."""

    def __init__(self, tokens: fx.Node, nodes: tuple[fx.Node, ...]) -> None:
        self.body = _Body()
        self.graph, self.shape = self.body.graph, value_of(tokens).shape
        self.weights: list[tuple[int, str, fx.Node, bool]] = []
        self.x = self.graph.placeholder("x")
        self.copies: dict[Any, Any] = {tokens: self.x}
        self.linear: tuple[fx.Node | None, Any, int] = None, None, 0  # the last, number of rows, and its holder
        # casts to dtypes with less precision than the tokens stay, except to the dtype of autocast
        products = [
            (value_of(node).dtype, value_of(argument(node, 0, "input")).dtype) for node in nodes if is_linear(node)
        ]
        self.dtypes = {after for after, before in products if after != before}
        self.dtypes |= {each for each in _DTYPES if each.itemsize >= value_of(tokens).dtype.itemsize}
        for node in nodes:
            self.node = node
            self.copies[node] = self._copied(node, name_of(node))
        self.graph.output(self.copies[nodes[-1]])

    def _copied(self, node: fx.Node, name: str) -> Any:
        if is_cast(node) and value_of(node).dtype in self.dtypes:  # the dtype is a constant here
            return self.copies[node.args[0]]
        if name in ("view", "reshape") and value_of(node).dtype == value_of(node.args[0]).dtype:
            return self._reshape(node)
        if name == "matmul" and is_linear(node) and node.args[1] not in self.copies:
            weight = self._weight(node.args[1], transposed=True)
            return self.graph.call_function(F.linear, (self.copies[node.args[0]], weight))
        kwargs = dict(node.kwargs)
        if name == "softmax" and value_of(node).dtype in self.dtypes:
            kwargs.pop("dtype", None)
        args, kwargs = map_aggregate((node.args, kwargs), self._argument)
        return self.graph.create_node(node.op, node.target, args, kwargs)

    def _reshape(self, node: fx.Node) -> fx.Node:
        """Infers the first size, because the batch size is a constant in many graphs; others follow the tokens."""
        sizes: list[Any] = [-1]
        left = list(range(1, len(self.shape) - 1))
        for size in value_of(node).shape[1:]:
            at = next((i for i in left if is_same_shape([size], self.shape[i : i + 1])), None)
            left = left if at is None else left[left.index(at) + 1 :]
            if at is None and type(size) is not int:
                raise UnreadableError("its tokens have a symbolic size besides the batch size and the number of tokens")
            sizes.append(size if at is None else self.graph.call_method("size", (self.x, at)))
        return self.graph.call_method("reshape", (self.copies[node.args[0]], *sizes))

    def _argument(self, given: Any) -> Any:
        if not isinstance(given, fx.Node):
            return torch.device("cpu") if isinstance(given, torch.device) else given
        if given in self.copies:
            return self.copies[given]
        if isinstance(value := value_of(given), FakeTensor):
            return self._weight(given)
        for i, size in enumerate(self.shape):
            if is_same_shape([size], [value]):
                return self.graph.call_method("size", (self.x, i))
        if given.op != "call_function" or not given.all_input_nodes:
            raise UnreadableError(f"its input {given.name} is not a size of its tokens")
        return self.graph.node_copy(given, self._argument)  # arithmetic of sizes

    def _weight(self, given: Any, transposed: bool = False) -> fx.Node:
        """Adds a weight in a holder of its own; the bias of a linear layer to the holder of its weight."""
        shape, name, at = value_of(given).shape, "weight", len(self.body._modules)
        shape, node, (linear, rows, last) = (shape[::-1] if transposed else shape), self.node, self.linear
        if shape == rows and (node is linear or (name_of(node) in ("add", "iadd") and linear in node.all_input_nodes)):
            name, at, self.linear = "bias", last, (None, None, 0)
        else:
            self.body.add_module(f"holder{at}", holder := nn.Module())
            holder.register_parameter("bias", None)
            if len(shape) == 2:
                self.linear = node, shape[:1], at
        parameter = nn.Parameter(torch.zeros(shape, device="cpu"))
        self.body.get_submodule(f"holder{at}").register_parameter(name, parameter)
        self.weights.append((at, name, given, transposed))
        return self.graph.get_attr(f"holder{at}.{name}")
