"""Reads attention cores, softmax(scale * q k^T) v, in a graph of torch.compile by their operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .capture import UnreadableError

_LIBRARIES = {"_operator", "torch", "torch.functional", "torch.nn.functional", "torch._C._nn"}
_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])}
_PRODUCTS = ("matmul", "bmm", "einsum")
_FACTORS = {"mul": 1, "imul": 1, "mul_": 1, "div": -1, "truediv": -1, "itruediv": -1, "div_": -1}  # exponents


@dataclass(frozen=True)
class Core:
    q: fx.Node  # [..., N, D], with [..., M, D] for k and v
    k: fx.Node
    v: fx.Node
    scale: float | None
    order: tuple[int, ...]  # permutation of the output [..., N, D]
    transposes: bool  # True if k is [..., D, M]
    nodes: tuple[fx.Node, ...]  # in order, with the output


def core_of(node: fx.Node) -> Core:
    """Reads the core with a softmax or scaled_dot_product_attention; raises UnreadableError with the reason."""
    core = _spelled(node) if name_of(node) == "softmax" else _called(node)
    values = [value_of(each) for each in (core.q, core.k, core.v)]
    if any(not isinstance(each, FakeTensor) or each.dtype != values[0].dtype for each in values):
        raise UnreadableError("its q, k and v must be tensors of one dtype")
    (*batch, _, width), *others = (each.shape for each in values)
    same = all(is_same_shape(batch, each[:-2]) for each in others) and is_same_shape([width], others[1][-1:])
    if not batch or not same or type(width) is not int:
        raise UnreadableError("its q, k and v must be batches of one size and width")
    every = list(node.graph.nodes)
    meanwhile = every[every.index(core.nodes[0]) : every.index(core.nodes[-1])]
    if any(_writes(each) for each in meanwhile if each not in core.nodes):
        raise UnreadableError("other operators write into tensors between its operators")
    return core


def _called(node: fx.Node) -> Core:
    given = {name: _argument(node, at, name) for at, name in ((3, "attn_mask"), (5, "is_causal"), (7, "enable_gqa"))}
    if changes := [name for name, value in given.items() if value not in (None, False)]:
        raise UnreadableError(f"its scores are changed before the softmax ({', '.join(changes)})")
    if _drops(node):
        raise UnreadableError("its dropout is active")
    q, k, v = (_argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    return Core(q, k, v, _argument(node, 6, "scale"), tuple(range(value_of(node).dim())), False, (node,))


def _spelled(softmax: fx.Node) -> Core:
    scores, scale, nodes = _argument(softmax, 0, "input"), 1.0, [softmax]
    while name_of(scores) not in _PRODUCTS:
        nodes.insert(0, scores)
        exponent = 0 if scores.kwargs else _FACTORS.get(name_of(scores), 0)
        given, factor = (*scores.args, None, None)[:2]
        if exponent == 1 and type(given) in (int, float):
            given, factor = factor, given
        if exponent and type(factor) in (int, float):
            scale *= float(factor) ** exponent
        elif not _is_cast(scores):
            raise UnreadableError(f"its scores are changed before the softmax ({name_of(scores) or scores.name})")
        scores = given
    nodes.insert(0, scores)
    weights = softmax
    while name_of(weights) not in _PRODUCTS:
        before, weights = weights, next(iter(weights.users), softmax.graph.output_node())
        nodes.append(weights)
        if _drops(weights):
            raise UnreadableError("its dropout is active")
        if name_of(weights) not in _PRODUCTS and not _is_cast(weights) and "dropout" not in name_of(weights):
            raise UnreadableError(f"its attention weights are changed after the softmax ({name_of(weights)})")
    if any(len(node.users) != 1 for node in nodes[:-1]):
        raise UnreadableError("its scores are used more than once")
    q, k, of_q, of_k, of_scores = labels_of(name_of(scores), scores.args, value_of)
    first, v, of_weights, of_v, out = labels_of(name_of(weights), weights.args, value_of)
    dim, n, m, d = _argument(softmax, 1, "dim"), of_q[-2], of_scores[-1], of_q[-1]
    if dim not in (-1, len(of_scores) - 1):
        raise UnreadableError("its softmax is not over the keys")
    names = dict(zip(of_weights, of_scores))
    of_v, out = ("".join(names.get(each, "?") for each in labels) for labels in (of_v, out))
    batch, transposes = of_q[:-2], of_k[-2:] == d + m
    keys = batch + (d + m if transposes else m + d)
    if (of_k, of_scores, of_v) != (keys, batch + n + m, batch + m + "?") or first is not before or not scale > 0:
        raise UnreadableError("its products are not softmax(scale * q k^T) v with dimensions [..., tokens, channels]")
    order = tuple((batch + n + "?").index(each) for each in out)
    return Core(q, k, v, scale, order, transposes, tuple(nodes))


def labels_of(
    name: str, args: Sequence[Any], value_of: Callable[[Any], Any] = lambda each: each
) -> tuple[Any, Any, str, str, str]:
    """Returns both operands of a product of batches, and the labels of the dimensions of operands and output."""
    equation, operands = args[0], args[1:]
    if name != "einsum":
        batch = "ABCDEFG"[: len(value_of(args[0]).shape) - 2]
        equation, operands = f"{batch}nd,{batch}dm->{batch}nm", args
    found = re.fullmatch(r"([a-zA-Z]{3,}),([a-zA-Z]{3,})->([a-zA-Z]{3,})", str(equation).replace(" ", ""))
    shapes = [value_of(each).shape for each in operands if value_of(each) is not None]
    if found is None or len(shapes) != 2 or [len(found[1]), len(found[2])] != [len(each) for each in shapes]:
        raise UnreadableError("its products are not those of two batches of matrices")
    sizes: dict[str, Any] = {}
    for label, size in (*zip(found[1], shapes[0]), *zip(found[2], shapes[1])):
        if not is_same_shape([sizes.setdefault(label, size)], [size]):
            raise UnreadableError("its heads share keys, or its products broadcast")
    return operands[0], operands[1], found[1], found[2], found[3]


def value_of(node: Any) -> Any:
    """Returns the fake tensor of a node, or its symbolic number; None if there is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def name_of(node: fx.Node) -> str:
    """Returns the name of a function of torch or of a method, e.g. "softmax" for torch.softmax, F.softmax; or ""."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if getattr(node.target, "__module__", "") in _LIBRARIES else ""


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _drops(node: fx.Node) -> bool:
    """Returns True for active dropout, also of attention."""
    if name_of(node) == "scaled_dot_product_attention":
        return _argument(node, 4, "dropout_p", 0.0) != 0
    rate, training = _argument(node, 1, "p", 0.5), _argument(node, 2, "training", node.kwargs.get("train", True))
    return "dropout" in name_of(node) and rate != 0 and training


def _is_cast(node: fx.Node) -> bool:
    """Returns True for a cast among fp64, fp32, fp16 and bf16."""
    x, y = value_of(_argument(node, 0, "input")), value_of(node)
    are_tensors = name_of(node) in _CASTS and isinstance(x, FakeTensor) and isinstance(y, FakeTensor)
    return are_tensors and x.dtype in _DTYPES and y.dtype in _DTYPES and x.device == y.device


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
