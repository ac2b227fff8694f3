"""Adding nodes to a graph, with readable names; moving one graph in front of another; running a graph."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .model_files import PROTOBUF_LIMIT, save, weight_bytes
from .providers import KEEP_FP8_APART


class Writer:
    """Adds nodes to a graph, before a given node or at the end.

    Args:
        graph: Where they go.
        prefix: What their names start with.
        before: The node to add them before; None means at the end.
    """

    def __init__(self, graph: ir.Graph, prefix: str, before: ir.Node | None = None) -> None:
        self.graph, self.prefix, self.before, self._count = graph, prefix, before, 0

    def op(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", outputs: int = 1,
        dtype: ir.DataType | None = None, **attributes: Any,
    ) -> Any:  # fmt: skip
        """The new node's output, or the list of them when there are several; dtype: None is the first input's."""
        name = self._name(op_type)
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        kind = dtype or next((v.dtype for v in inputs if v is not None and v.dtype is not None), ir.DataType.FLOAT)
        for i, output in enumerate(node.outputs):
            output.name, output.dtype = name + (f".{i}" if outputs > 1 else ""), kind
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def constant(self, array: np.ndarray | list[int], name: str) -> ir.Value:
        """An initializer; int64 when given as a list."""
        values = np.asarray(array, dtype=np.int64) if isinstance(array, list) else array
        tensor, array_shape = ir.tensor(values), values.shape
        tensor.name = self._name(name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=tensor.name, type=kind, shape=ir.Shape(array_shape), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{self.prefix}.{what}_{self._count}"


def replace(old: ir.Value, new: ir.Value) -> None:
    """Everything that used `old`, graph outputs included, uses `new`, which takes over shape and dtype."""
    new.shape = old.shape
    if old.dtype is not None:
        new.dtype = old.dtype
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def prepend(model: ir.Model, front: ir.Model) -> None:
    """Puts the nodes of `front` before those of `model`: its one output becomes the model's first input; in place."""
    graph = model.graph
    first = graph[0]
    nodes = list(front.graph)
    front_input, front_output = front.graph.inputs[0], front.graph.outputs[0]
    initializers = list(front.graph.initializers.values())
    front.graph.inputs.clear()
    front.graph.outputs.clear()
    front.graph.initializers.clear()
    for node in nodes:
        front.graph.remove(node)
        graph.insert_before(first, node)
    for value in initializers:
        graph.register_initializer(value)
    old_input = graph.inputs[0]
    ir.convenience.replace_all_uses_with(old_input, front_output)
    graph.inputs[0] = front_input


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The array behind an initializer or constant."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def run_graph(
    model: ir.Model, batches: Iterable[np.ndarray], values: Sequence[ir.Value] | None = None
) -> Iterator[list[np.ndarray]]:
    """Computes a graph that is still being worked on, by ONNX Runtime on the CPU.

    Args:
        model: A graph with one input; it is left as it was.
        batches: Inputs.
        values: What to compute of it, also inside; None means its outputs.
    Yields:
        The arrays of each batch.
    """
    import onnxruntime

    outputs = list(model.graph.outputs)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry(*KEEP_FP8_APART)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        if values is not None:
            model.graph.outputs[:] = values
        try:
            save(model, path, external=weight_bytes(model) > PROTOBUF_LIMIT)
        finally:
            model.graph.outputs[:] = outputs
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for batch in batches:
        yield session.run(None, {name: batch})
