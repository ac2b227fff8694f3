"""Reads an attention core, softmax(scale * q k^T) v, in a graph of torch.compile by its operators."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import fx

from .capture import UnreadableError
from .regions import argument, drops, is_cast, is_same_shape, name_of, value_of

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
    if name_of(node) == "softmax":
        return _spelled(node)
    given = {name: argument(node, at, name) for at, name in ((3, "attn_mask"), (5, "is_causal"), (7, "enable_gqa"))}
    if changes := [name for name, value in given.items() if value not in (None, False)]:
        raise UnreadableError(f"its scores are changed before the softmax ({', '.join(changes)})")
    if drops(node):
        raise UnreadableError("its dropout is active")
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    return Core(q, k, v, argument(node, 6, "scale"), tuple(range(value_of(node).dim())), False, (node,))


def _spelled(softmax: fx.Node) -> Core:
    scores, scale, nodes = argument(softmax, 0, "input"), 1.0, [softmax]
    while name_of(scores) not in _PRODUCTS:
        nodes.insert(0, scores)
        exponent, (given, factor) = _FACTORS.get(name_of(scores), 0), (*scores.args, None, None)[:2]
        if exponent == 1 and type(given) in (int, float):
            given, factor = factor, given
        if exponent and type(factor) in (int, float):
            scale *= float(factor) ** exponent
        elif not is_cast(scores):
            raise UnreadableError(f"its scores are changed before the softmax ({name_of(scores) or scores.name})")
        scores = given
    nodes.insert(0, scores)
    weights = softmax
    while name_of(weights) not in _PRODUCTS:
        before, weights = weights, next(iter(weights.users))
        nodes.append(weights)
        if drops(weights):
            raise UnreadableError("its dropout is active")
        if name_of(weights) not in _PRODUCTS and not is_cast(weights) and "dropout" not in name_of(weights):
            raise UnreadableError(f"its attention weights are changed after the softmax ({name_of(weights)})")
    if any(len(node.users) != 1 for node in nodes[:-1]):
        raise UnreadableError("its scores are used more than once")
    q, k, of_q, of_k, of_scores = _product(scores)
    first, v, of_weights, of_v, out = _product(weights)
    dim, n, m, d = argument(softmax, 1, "dim"), of_q[-2], of_scores[-1], of_q[-1]
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


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, str, str, str]:
    """Returns both operands of a product of batches, and the labels of the dimensions of operands and output."""
    equation, operands = node.args[0], node.args[1:]
    if name_of(node) != "einsum":
        batch = "ABCDEFG"[: value_of(node).dim() - 2]
        equation, operands = f"{batch}nd,{batch}dm->{batch}nm", node.args
    found = re.fullmatch(r"([a-zA-Z]{3,}),([a-zA-Z]{3,})->([a-zA-Z]{3,})", str(equation).replace(" ", ""))
    shapes = [value_of(each).shape for each in operands if value_of(each) is not None]
    if (
        found is None
        or len(shapes) != 2
        or [len(each) for each in found.groups()[:2]] != [len(each) for each in shapes]
    ):
        raise UnreadableError("its products are not those of two batches of matrices")
    sizes: dict[str, Any] = {}
    for label, size in (*zip(found[1], shapes[0]), *zip(found[2], shapes[1])):
        if not is_same_shape([sizes.setdefault(label, size)], [size]):
            raise UnreadableError("its heads share keys, or its products broadcast")
    return operands[0], operands[1], found[1], found[2], found[3]  # type: ignore[return-value]
