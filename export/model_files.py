"""Model files, read with suspicion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from vit_fast.errors import VitFastError, check_type

PROTOBUF_LIMIT = 2 * 2**30 - 32 * 2**20
"""Bytes of weights that fit into one file: protobuf's 2 GiB less room for the graph."""


class ModelFileError(VitFastError, ValueError):
    """An ONNX file that is missing, damaged, foreign or unsafe; names the file and why."""


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def save(model: ir.Model, path: Path, external: bool) -> None:
    """Writes a model, its weights inside or in one file beside it (NAME.onnx.data).

    Raises:
        OSError: it cannot be written; says how many bytes were needed.
    """
    try:
        ir.save(model, path, external_data=f"{path.name}.data" if external else None)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        if cause is None:
            raise
        megabytes = weight_bytes(model) / 2**20
        raise OSError(cause.errno, f"{cause.strerror or cause} ({megabytes:.0f} MiB of weights)") from error


def read_proto(path: str | Path) -> onnx.ModelProto:
    """The graph of an ONNX file without the weights beside it, after checking that both are what they should be.

    Raises:
        ModelFileError: missing, not ONNX, truncated, or with external data that leaves the model's folder.
    """
    check_type("path", path, str, Path)
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelFileError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}, not an ONNX file")
    try:
        proto = onnx.load_model(path, load_external_data=False)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (DecodeError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path}: not an ONNX file, or a truncated one: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not proto.HasField("graph") or not proto.graph.node or not proto.opset_import or not proto.graph.output:
        raise ModelFileError(f"{path}: not an ONNX model: it has no graph, output or opset")
    check_external_data(proto, path)
    return proto


def check_external_data(proto: onnx.ModelProto, path: Path) -> None:
    """Refuses weights outside the model's folder, also through links, and files too short for what should be in them.

    ONNX Runtime refuses absolute paths, "..", and symbolic links, but reads a hard link: a second name of any file on
    the same disk. So a file with more than one name is refused here.

    Raises:
        ModelFileError: names every location refused and why.
    """
    folder = path.parent.resolve()  # ONNX Runtime looks beside the name given, also where that is a link
    reasons: dict[str, str] = {}
    for tensor in external_tensors(proto):
        fields = {entry.key: entry.value for entry in tensor.external_data}
        location = fields.get("location", "")
        if location in reasons:
            continue
        if reason := _unsafe(folder, location) or _too_short(folder / location, fields):
            reasons[location] = f"{location!r} {reason}"
    if reasons:
        raise ModelFileError(f"{path}: external data refused: {'; '.join(sorted(reasons.values()))}")


def _unsafe(folder: Path, location: str) -> str:
    parts = location.replace("\\", "/").split("/")
    if not location or Path(location).is_absolute() or ".." in parts or ":" in parts[0]:
        return "is not a file name inside the model's folder"
    target = folder / location
    for step in (target, *target.parents):
        if step == folder:
            break
        if step.is_symlink():
            return "is reached through a symbolic link"
    if not target.is_file():
        return "does not exist" if not target.exists() else "is not a regular file"
    if target.stat().st_nlink > 1:
        return "is a hard link: the file has another name elsewhere"
    return ""


def _too_short(target: Path, fields: dict[str, str]) -> str:
    try:
        offset, length = int(fields.get("offset", 0)), int(fields.get("length", 0))
    except ValueError:
        return "has an offset or length that is no number"
    size = target.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        return f"has {size} bytes, {offset + length} are needed"
    return ""


def external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor whose values lie in another file: of the graph, of the graphs inside it, and of functions."""
    graphs = [proto.graph]
    nodes = [node for function in proto.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from (t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
            for sparse in graph.sparse_initializer:
                yield from (t for t in (sparse.values, sparse.indices) if t.data_location == onnx.TensorProto.EXTERNAL)
            nodes.extend(graph.node)
            continue
        for attribute in nodes.pop().attribute:
            tensors = [*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors]
            yield from (t for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL)
            graphs.extend(([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs))
