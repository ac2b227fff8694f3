"""Reads and copies ONNX files and the weights beside them. Rejects damaged and unsafe files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from vit_fast.errors import VitFastError, check_type


class ModelFileError(VitFastError, ValueError):
    """An ONNX file is missing, damaged or unsafe, or is not ONNX; the message contains the path and the reason."""


def read_proto(path: str | Path) -> onnx.ModelProto:
    """Reads the graph of an ONNX file without the weights beside it, after checking both.

    Raises:
        ModelFileError: the file is missing, not ONNX or truncated, or has external data outside the model's folder.
    """
    check_type("path", path, str, Path)
    path = Path(path)
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise ModelFileError(
            f"{path}: is {'a folder' if path.is_dir() else 'not a regular file'}, must be an ONNX file"
        )
    try:
        proto = onnx.load_model(path, format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (DecodeError, ValueError, RuntimeError) as error:
        raise ModelFileError(f"{path}: not an ONNX file, or truncated: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not proto.HasField("graph") or not proto.graph.node or not proto.opset_import or not proto.graph.output:
        raise ModelFileError(f"{path}: not an ONNX model: it has no graph, output or opset")
    _check_external_data(proto, path)
    return proto


def parts_of(path: Path) -> list[Path]:
    """Returns a model file and the files of its weights.

    Raises:
        ModelFileError: see read_proto.
    """
    locations = {_fields(tensor).get("location", "") for tensor in _external_tensors(read_proto(path))}
    return [path, *(path.parent / location for location in sorted(locations))]


def copy_model(path: Path, target: Path) -> None:
    """Copies a model file to `target`, and the files of its weights to the same folder, under their names.

    Raises:
        ModelFileError: see read_proto; or the target has the name of the weights file.
    """
    for part in parts_of(path):
        copy = target if part == path else target.parent / part.relative_to(path.parent)
        if part != path and copy == target:
            raise ModelFileError(f"{path}: its weights file must not be named {target.name}, like the target")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part, copy)


def _check_external_data(proto: onnx.ModelProto, path: Path) -> None:
    """Rejects weights outside the model's folder, behind links, and in files that are too short.

    ONNX Runtime rejects absolute paths, ".." and symbolic links, but not hard links, which can refer to any file on the
    same disk. So this also rejects files with more than one hard link.
    """
    folder = path.parent.resolve()  # ONNX Runtime searches beside the given name, even if that is a link
    reasons: dict[str, str] = {}
    for fields in map(_fields, _external_tensors(proto)):
        location = fields.get("location", "")
        reason = reasons.get(location) or _unsafe(folder, location) or _too_short(folder / location, fields)
        reasons |= {location: reason} if reason else {}
    if reasons:
        listed = "; ".join(f"{location!r} {reason}" for location, reason in sorted(reasons.items()))
        raise ModelFileError(f"{path}: external data rejected: {listed}")


def _fields(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


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
        return "has an offset or length that is not a number"
    size = target.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        return f"must have at least {offset + length} bytes, got {size}"
    return ""


def _external_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yields all tensors with external data, wherever they are in the model."""
    todo: list[Any] = [proto]
    while todo:
        message = todo.pop()
        if isinstance(message, onnx.TensorProto):
            if message.data_location == onnx.TensorProto.EXTERNAL:
                yield message
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                todo += [value] if hasattr(value, "ListFields") else value
