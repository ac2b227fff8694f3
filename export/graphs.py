"""Edits, runs and saves ONNX graphs in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .runtime.providers import open_session

MICROSOFT = "com.microsoft"
PROTOBUF_LIMIT = 2 * 2**30 - 32 * 2**20
"""Bytes of weights that fit into one file: protobuf's limit of 2 GiB, minus room for the graph."""


class Writer:
    """Adds nodes, before `before` or at the end, and initializers to a graph. Their names start with `prefix`."""

    def __init__(self, graph: ir.Graph, prefix: str, before: ir.Node | None = None) -> None:
        self.graph, self.prefix, self.before, self._count = graph, prefix, before, 0

    def op(self, op_type: str, *inputs: ir.Value | None, **options: Any) -> ir.Value:
        """Adds a node with one output, and returns the output. See `node` for the options."""
        return self.node(op_type, *inputs, **options).outputs[0]

    def node(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", outputs: int = 1,
        dtype: ir.DataType | None = None, **attributes: Any,
    ) -> ir.Node:  # fmt: skip
        """Adds a node. The dtype of its outputs defaults to that of the first input."""
        name = self._name(op_type)
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        kind = dtype or next((v.dtype for v in inputs if v is not None and v.dtype is not None), ir.DataType.FLOAT)
        for i, output in enumerate(node.outputs):
            output.name, output.dtype = name + (f".{i}" if outputs > 1 else ""), kind
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return node

    def constant(self, array: np.ndarray | list[int], name: str) -> ir.Value:
        """Adds an initializer; a list becomes int64."""
        values = np.asarray(array, dtype=np.int64) if isinstance(array, list) else array
        tensor = ir.tensor(values, name=self._name(name))
        kind, shape = ir.TensorType(tensor.dtype), ir.Shape(values.shape)
        value = ir.Value(name=tensor.name, type=kind, shape=shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{self.prefix}.{what}_{self._count}"


def replace(old: ir.Value, new: ir.Value) -> None:
    """Replaces all uses of `old`, also as an output of the graph; `new` gets its shape and dtype."""
    new.shape = old.shape
    if old.dtype is not None:
        new.dtype = old.dtype
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Returns the array of an initializer or constant; None if the value depends on the input."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def save(model: ir.Model, path: Path, external: bool | None = None) -> str | None:
    """Writes a model.

    Args:
        model: The model.
        path: The .onnx file.
        external: True writes the weights to PATH.data; None does so if they exceed protobuf's limit.
    Returns:
        The name of the file with the weights, or None.
    Raises:
        ValueError: the weights must not be external, but exceed the limit.
        OSError: the file cannot be written; the message contains the size.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > PROTOBUF_LIMIT and external is False:
        exceed = "exceed protobuf's limit of 2 GB per file: use external_data=True"
        raise ValueError(f"{size / 1e9:.1f} GB of weights {exceed}")
    beside = f"{path.name}.data" if external or size > PROTOBUF_LIMIT else None
    try:
        ir.save(model, path, external_data=beside)
    except Exception as error:
        cause: BaseException | None = error
        while not isinstance(cause, OSError):
            if cause is None:
                raise
            cause = cause.__cause__
        raise OSError(cause.errno, f"{cause.strerror or cause} ({size / 2**20:.0f} MiB of weights)") from error
    return beside


def run_graph(
    model: ir.Model, batches: Iterable[np.ndarray], values: Sequence[ir.Value] | None = None
) -> Iterator[list[np.ndarray]]:
    """Runs a graph with one input in ONNX Runtime on the CPU, and yields the arrays of each batch.

    `values`, which may be inner values of the graph, default to its outputs.
    """
    outputs = list(model.graph.outputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        if values is not None:
            model.graph.outputs[:] = values
        try:
            save(model, path)
        finally:
            model.graph.outputs[:] = outputs
        session = open_session(path, fp8=True)
    name = session.get_inputs()[0].name
    for batch in batches:
        yield session.run(None, {name: batch})
