"""The matrix products of a model's blocks: what can be computed in eight bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .graphs import constant_of


@dataclass(frozen=True, eq=False)
class Product:
    """A MatMul of tokens x [B, N, C] with a constant weight [C, F], or of two activations inside attention.

    Attributes:
        node: The MatMul.
        name: The linear's in the model, as far as the graph tells: the same in every export of a model.
    """

    node: ir.Node
    name: str

    @property
    def weight(self) -> np.ndarray | None:
        """The constant [C, F]; None inside attention."""
        return constant_of(self.node.inputs[1])

    @property
    def activations(self) -> list[ir.Value]:
        """The inputs that depend on the image."""
        inputs = [value for value in self.node.inputs if value is not None]
        return inputs if self.weight is None else inputs[:1]


def linears(model: ir.Model) -> list[Product]:
    """The linears over tokens, in the order of the graph; patch embedding and head are none.

    Raises:
        ValueError: there is none.
    """
    found = []
    for node in model.graph:
        if node.op_type != "MatMul" or node.domain:
            continue
        x, weight = node.inputs[0], constant_of(node.inputs[1])
        if x is not None and weight is not None and weight.ndim == 2 and (x.shape is None or len(x.shape) == 3):
            found.append(Product(node, _name_of(node)))
    if not found:
        raise ValueError("precision in eight bits: there is no linear over tokens in this model")
    return found


def attention_products(model: ir.Model) -> list[Product]:
    """The products of q with k and of the softmax with v, where the graph has them as nodes of their own."""
    found = []
    for node in model.graph:
        if node.op_type == "Softmax" and not node.domain:
            scores = node.inputs[0].producer() if node.inputs[0] is not None else None
            mixed = [use.node for use in node.outputs[0].uses()]
            if scores is not None and scores.op_type == "MatMul" and [n.op_type for n in mixed] == ["MatMul"]:
                found += [Product(scores, str(scores.name)), Product(mixed[0], str(mixed[0].name))]
    return found


def _name_of(node: ir.Node) -> str:
    """By its bias, since exporting gives a transposed weight a name of its own."""
    for use in node.outputs[0].uses():
        for value in use.node.inputs:
            if value is not None and value.const_value is not None and str(value.name).endswith(".bias"):
                return str(value.name).removeprefix("model.").removesuffix(".bias")
    return str(node.name)


def is_probability(value: ir.Value) -> bool:
    """True if a value is the output of a softmax, and therefore between 0 and 1."""
    producer = value.producer()
    return producer is not None and producer.op_type == "Softmax"
