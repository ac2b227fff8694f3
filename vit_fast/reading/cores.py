"""Reads an attention core, softmax(scale * q k^T) v, in a graph of torch.compile, exactly and without evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from .capture import UnreadableError
from .regions import argument, drops, is_cast, is_same_shape, name_of, value_of

_PRODUCTS = ("matmul", "bmm", "einsum")
_MULTIPLIES, _DIVIDES = {"mul", "imul", "mul_", "multiply"}, {"div", "truediv", "itruediv", "div_", "divide"}
_MAX_CHANNELS = 256  # of fused attention


@dataclass(frozen=True)
class Core:
    """Queries, keys and values, each with its permutation to [..., tokens, channels]."""

    operands: tuple[tuple[fx.Node, tuple[int, ...]], ...]
    order: tuple[int, ...]  # permutation of the output
    scale: float | None
    factors: tuple[tuple[fx.Node, bool], ...]  # tensors [] that multiply the scores; True: divide
    nodes: tuple[fx.Node, ...]  # in order, with the output
    is_spelled: bool  # False for scaled_dot_product_attention


def core_of(node: fx.Node) -> Core:
    """Reads the core with a softmax or scaled_dot_product_attention; raises UnreadableError with the reason."""
    if name_of(node) == "softmax":
        return _spelled(node)
    operands = [argument(node, i, name) for i, name in enumerate(("query", "key", "value"))]
    given = {"attn_mask": argument(node, 3, "attn_mask"), "is_causal": argument(node, 5, "is_causal", False)}
    given["enable_gqa"] = node.kwargs.get("enable_gqa", False)
    if changes := [name for name, value in given.items() if value not in (None, False)]:
        raise UnreadableError(f"its scores are changed before the softmax ({', '.join(changes)})")
    if drops(node):
        raise UnreadableError("its dropout is active")
    same = tuple(range(value_of(operands[0]).dim()))
    return Core(tuple((each, same) for each in operands), same, node.kwargs.get("scale"), (), (node,), False)


def _spelled(softmax: fx.Node) -> Core:
    scores, scale, factors, nodes = argument(softmax, 0, "input"), 1.0, [], [softmax]
    while name_of(scores) not in _PRODUCTS:
        name = name_of(scores)
        nodes.insert(0, scores)
        if name in _MULTIPLIES | _DIVIDES and len(scores.args) == 2 and not scores.kwargs:
            given, by = scores.args if name in _DIVIDES or _is_scores(scores.args[0]) else scores.args[::-1]
            if type(by) in (int, float):
                scale = scale / by if name in _DIVIDES else scale * by  # type: ignore[operator]
            elif isinstance(by, fx.Node) and isinstance(value_of(by), Tensor) and value_of(by).dim() == 0:
                factors.append((by, name in _DIVIDES))
            else:
                given = None
        else:
            given = scores.args[0] if is_cast(scores) else None
        if not isinstance(given, fx.Node):
            raise UnreadableError(f"its scores are changed before the softmax ({name or scores.name})")
        scores = given
    weights = softmax
    while weights is softmax or name_of(weights) not in _PRODUCTS:
        if len(weights.users) != 1:
            raise UnreadableError("its attention weights are used more than once")
        before, (weights,) = weights, weights.users
        if drops(weights):
            raise UnreadableError("its dropout is active")
        if name_of(weights) not in _PRODUCTS and not is_cast(weights) and "dropout" not in name_of(weights):
            raise UnreadableError(f"its attention weights are changed after the softmax ({name_of(weights)})")
        nodes.append(weights)
    nodes.insert(0, scores)
    if any(len(node.users) > 1 for node in nodes[:-1]):
        raise UnreadableError("its scores are used more than once")
    (q, of_q), (k, of_k), of_scores = _product(scores)
    first, second, out = _product(weights)
    (_, of_weights), (v, of_v) = (first, second) if first[0] is before else (second, first)
    names = dict(zip(of_weights, of_scores))
    of_v, out = ("".join(names.get(each, "?") for each in labels) for labels in (of_v, out))
    batch = "".join(each for each in of_q if each in of_k and each in of_scores)
    wanted = [*(set(of_q) - set(of_k)), *(set(of_k) - set(of_q)), *(set(of_q) & set(of_k) - set(of_scores))]
    dim = argument(softmax, 1, "dim")
    if len(wanted) != 3 or not isinstance(dim, int) or of_scores[dim] != wanted[1]:
        raise UnreadableError("its softmax is not over the keys")
    n, m, d = wanted
    every = ((of_q, batch + n + d), (of_k, batch + m + d), (of_scores, batch + n + m), (of_v, batch + m + "?"))
    if any(sorted(a) != sorted(b) for a, b in (*every, (out, batch + n + "?"))):
        raise UnreadableError("its products are not softmax(scale * q k^T) v")
    sizes = [value_of(q).shape[of_q.index(d)], value_of(v).shape[of_v.index("?")]]
    if not is_same_shape(sizes[:1], sizes[1:]) or type(sizes[0]) is not int or sizes[0] > _MAX_CHANNELS:
        raise UnreadableError(f"q and v must have the same width, at most {_MAX_CHANNELS}, got {sizes}")
    operands = tuple(
        (node, tuple(map(labels.index, order))) for node, (labels, order) in zip((q, k, v), (*every[:2], every[3]))
    )
    if len({value_of(each).dtype for each in (q, k, v)}) > 1 or not scale > 0:
        raise UnreadableError(f"q, k and v must have one dtype and scale must be positive, got {scale}")
    return Core(operands, tuple(map((batch + n + "?").index, out)), scale, tuple(factors), tuple(nodes), True)


def _is_scores(operand: Any) -> bool:
    return isinstance(operand, fx.Node) and isinstance(value_of(operand), Tensor) and value_of(operand).dim() > 2


def _product(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str]:
    """Returns both operands of a product of batches, each with a label per dimension, and the labels of the output."""
    if name_of(node) == "einsum":
        equation, *operands = node.args
        operands = list(operands[0]) if len(operands) == 1 else operands  # type: ignore[arg-type]
        left, _, out = str(equation).replace(" ", "").partition("->")
        labels = left.split(",")
    else:
        operands = [argument(node, 0, "input"), argument(node, 1, "other")]
        batch = "ABCDEFG"[: value_of(node).dim() - 2]
        labels, out = [f"{batch}nd", f"{batch}dm"], f"{batch}nm"
    values = [value_of(each) for each in operands]  # type: ignore[arg-type]
    plain = len(operands) == len(labels) == 2 and out and all(len(set(each)) == len(each) for each in (*labels, out))
    sizes: dict[str, Any] = {}
    for value, names in zip(values, labels):
        if not plain or not isinstance(value, Tensor) or len(names) != value.dim() or not names.isalpha():
            raise UnreadableError("its products broadcast, or are sums of more than one dimension")
        for name, size in zip(names, value.shape):
            if not is_same_shape([sizes.setdefault(name, size)], [size]):
                raise UnreadableError("its heads share keys, or its products broadcast")
    return (operands[0], labels[0]), (operands[1], labels[1]), out  # type: ignore[return-value]
