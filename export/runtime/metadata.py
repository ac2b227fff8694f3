"""Reads, checks, describes and copies ONNX files of any exporter; rejects damaged and unsafe files."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError

from vit_fast.config import DataConfig, Size
from vit_fast.errors import VitFastError, pair
from vit_fast.libraries.interface.image_model import Output

if TYPE_CHECKING:
    from rich.table import Table

PREFIX = "vit_fast."
CHECKED = ("verification", "in_fp32", "eight_bit", "accuracy", "checked")  # metadata of measurements
CLASSES = ("logits", "probabilities")  # outputs whose last axis is classes
KINDS = onnx.TensorProto
NARROW = {  # number formats by dtype of weights
    KINDS.FLOAT16: "fp16", KINDS.BFLOAT16: "bf16", KINDS.INT8: "int8", KINDS.UINT8: "int8", KINDS.FLOAT8E4M3FN: "fp8",
}  # fmt: skip
DTYPES: dict[str, Any] = {"float": np.float32, "float16": np.float16, "double": np.float64, "uint8": np.uint8}
OUTPUT_DTYPES = DTYPES | {"int64": np.int64, "int32": np.int32, "bool": np.bool_}


class ModelFileError(VitFastError, ValueError):
    """An ONNX file is missing, damaged or unsafe, or is not ONNX; the message contains the path and the reason."""


def read_proto(path: str | Path) -> onnx.ModelProto:
    """Checks an ONNX file and its external weights, and reads the graph without these weights."""
    path = Path(path)
    if not path.is_file():  # reading a pipe would block
        reason = "must be an ONNX file, got a folder, pipe or device" if path.exists() else "no such file"
        raise ModelFileError(f"{path}: {reason}")
    try:
        proto = onnx.load_model(path, format="protobuf", load_external_data=False)
    except (DecodeError, ValueError, RuntimeError, OSError) as error:
        raise ModelFileError(f"{path}: not an ONNX file, or truncated, or unreadable: {error}") from None
    if not proto.HasField("graph") or not proto.graph.node or not proto.opset_import or not proto.graph.output:
        raise ModelFileError(f"{path}: not an ONNX model: it must have a graph with nodes and outputs, and an opset")
    folder = path.parent.resolve()  # ONNX Runtime searches beside the given name, even if that is a link
    unsafe = {name: reason for name, fields in _external_data(proto) if (reason := _unsafe(folder, name, fields))}
    if unsafe:
        listed = "; ".join(f"{name!r} {reason}" for name, reason in sorted(unsafe.items()))
        raise ModelFileError(f"{path}: external data rejected: {listed}")
    return proto


def parts_of(path: Path) -> list[Path]:
    """Returns a model file and the files of its weights; raises the errors of read_proto."""
    return [path, *(path.parent / name for name in sorted({name for name, _ in _external_data(read_proto(path))}))]


def copy_model(path: Path, target: Path) -> None:
    """Copies a model file to `target`, and the files of its weights into the folder of `target`."""
    for part in parts_of(path):
        copy = target if part == path else target.parent / part.relative_to(path.parent)
        if part != path and copy == target:
            raise ModelFileError(f"{path}: weights file must not be named {target.name}, the name of the model's copy")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part, copy)


def _unsafe(folder: Path, location: str, fields: dict[str, str]) -> str:
    """Returns the reason to reject weights: outside the model's folder, behind a link, or in a file that is too short.

    ONNX Runtime rejects absolute paths, ".." and symbolic links, but not hard links, which can refer to any file on the
    same disk. This function also rejects files with more than one hard link.
    """
    parts = location.replace("\\", "/").split("/")
    if not location or Path(location).is_absolute() or ".." in parts or ":" in parts[0]:
        return "is not a file name inside the model's folder"
    target = folder / location
    if any(step.is_symlink() for step in (target, *target.parents) if step.is_relative_to(folder) and step != folder):
        return "is reached through a symbolic link: replace the link by a copy"
    if not target.is_file():
        return "does not exist" if not target.exists() else "is not a regular file"
    if target.stat().st_nlink > 1:
        return "has more than one hard link: replace it by a copy"
    try:
        needed = int(fields.get("offset", 0)) + int(fields.get("length", 0))
    except ValueError:
        return "has an offset or length that is not an integer"
    size = target.stat().st_size
    return f"must have at least {needed} bytes, got {size}" if needed > size else ""


def _external_data(message: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields location and other fields of each tensor with external data, wherever it is in the model."""
    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            fields = {entry.key: entry.value for entry in message.external_data}
            yield fields.get("location", ""), fields
        return
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _external_data(inner)


@dataclass
class OnnxInfo:
    """Description of an ONNX file."""

    path: str
    producer: str  # program that wrote the file
    opsets: dict[str, int]  # version of each operator set, by domain ("" is ONNX's own)
    inputs: list[dict[str, Any]]  # name, dtype and shape of each
    outputs: list[dict[str, Any]]
    nodes: dict[str, int]  # number of nodes per operator, the most frequent first
    ir_version: int = 0  # of the file format
    data_config: DataConfig | None = None  # preprocessing; None if unknown
    preprocess: bool = False  # the file contains the preprocessing and takes uint8 pixels
    class_names: tuple[str, ...] | None = None  # None if unknown
    output: str | None = None  # kind of the most important output, e.g. "logits"; None if unknown
    precision: str | None = None  # number format of most weights: int8, fp8, fp16 or bf16; None for fp32 or wider
    fp8: bool = False  # some weights are in e4m3
    metadata: dict[str, Any] = field(default_factory=dict)  # other fields of export_onnx, or all of another exporter

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def facts(self) -> dict[str, Any]:
        """Returns the facts about the file that a table shows, by name."""
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        facts: dict[str, Any] = {"producer": self.producer, "opsets": opsets, "IR version": self.ir_version}
        facts |= {f"input {i['name']}": f"{i['dtype']} {i['shape']}" for i in self.inputs}
        facts |= {f"output {o['name']}": f"{o['dtype']} {o['shape']}" for o in self.outputs}
        facts |= {"output meaning": self.output, "data_config": self.data_config and self.data_config.to_dict()}
        facts |= {"preprocessing": "in the file (uint8 input)" if self.preprocess else "before the file"}
        return facts | {"classes": self.class_names} | self.metadata

    def to_table(self) -> Table:
        """Returns the description as a rich table; long lists are shortened."""
        return two_columns(self.path, [*self.facts().items(), ("nodes", self.nodes)])


def two_columns(title: str, rows: Iterable[tuple[str, Any]]) -> Table:
    """Returns a table of names and values, which are not parsed as rich markup."""
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table("what", Column("value", overflow="fold"), title=escape(title))  # commands can be copied in whole
    for name, value in rows:
        table.add_row(escape(name), escape(shortened(value)))
    return table


def shortened(value: Any, limit: int = 6) -> str:
    """Formats a value in one line; of a long list, only the first elements."""
    if value is None:
        return "unknown"
    if isinstance(value, list | tuple) and len(value) > limit:
        return ", ".join(map(str, value[:limit])) + f", ... ({len(value)})"
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)


def inspect_onnx(path: str | Path) -> OnnxInfo:
    """Reads the metadata of an ONNX file of any exporter.

    Raises:
        ModelFileError: the file is missing, damaged, unsafe, or not an ONNX file.
    """
    proto = read_proto(path)
    initializers = {tensor.name for tensor in proto.graph.initializer}  # old files list them as inputs, too
    sizes: Counter[str | None] = Counter()
    for tensor in proto.graph.initializer:
        sizes[NARROW.get(tensor.data_type)] += math.prod(tensor.dims)
    info = OnnxInfo(
        path=str(path),
        producer=f"{proto.producer_name} {proto.producer_version}".strip() or "unknown",
        opsets={entry.domain: entry.version for entry in proto.opset_import},
        inputs=[_describe_value(v) for v in proto.graph.input if v.name not in initializers],
        outputs=[_describe_value(v) for v in proto.graph.output],
        nodes=dict(Counter(node.op_type for node in proto.graph.node).most_common()),
        ir_version=proto.ir_version,
        precision=max(sizes, key=lambda name: sizes[name], default=None),
        fp8="fp8" in sizes,
    )
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    own = {key.removeprefix(PREFIX): value for key, value in properties.items() if key.startswith(PREFIX)}
    info.metadata = own or properties
    if not own:
        return info
    try:
        info.metadata = facts = {key: json.loads(value) for key, value in own.items()}
        data_config, names = facts.pop("data_config", None), facts.pop("class_names", None)
        info.data_config = DataConfig.from_dict(data_config) if data_config else None
        if not isinstance(names, list | None):
            raise ValueError(f"class_names must be a list, got {names!r}")
        info.class_names = tuple(map(str, names)) if names else None
        info.output, info.preprocess = facts.pop("output", None), bool(facts.pop("preprocess", False))
        if info.output not in (None, *get_args(Output)):
            raise ValueError(f"output must be one of {', '.join(get_args(Output))}, got {info.output!r}")
        for key in ("image_hw", "patch_hw"):
            sides = facts.get(key, [1, 1])
            pair(key, None if isinstance(sides, int) else sides)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from None
    return info


def images_and_others(info: OnnxInfo) -> tuple[str, list[int], Callable[[int], dict[str, np.ndarray]]]:
    """Returns name and shape of the images or volumes among several inputs, and a function that makes the others.

    It maps a batch size to random inputs, with equal entries along the batch; integers are 0 or 1. Raises
    ModelFileError without images, or for an axis of unknown size other than the batch.
    """
    given = {entry["name"]: entry for entry in info.inputs}
    found = [name for name, entry in given.items() if entry["dtype"] == "float" and len(entry["shape"]) >= 4]
    unknown = [name for name, entry in given.items() if any(isinstance(dim, str) for dim in entry["shape"][1:])]
    if not found or unknown:
        got = "; ".join(f"{entry['name']} {entry['dtype']} {entry['shape']}" for entry in info.inputs)
        raise ModelFileError(f"{info.path}: an input must be images in float, and all but the batch fixed, got {got}")
    images, generator, others = given.pop(found[0]), np.random.default_rng(0), {}
    for name, entry in given.items():
        shape = [1 if isinstance(dim, str) else dim for dim in entry["shape"]]
        dtype = np.dtype(OUTPUT_DTYPES.get(entry["dtype"], np.float32))
        is_float = np.issubdtype(dtype, np.floating)
        others[name] = (generator.standard_normal(shape) if is_float else generator.integers(0, 2, shape)).astype(dtype)
    batched = [name for name, entry in given.items() if any(isinstance(dim, str) for dim in entry["shape"])]

    @functools.cache
    def made(count: int) -> dict[str, np.ndarray]:
        return {name: x.repeat(count, 0) if name in batched else x for name, x in others.items()}

    return found[0], images["shape"][1:], made


def damaged(path: str | Path, error: object) -> ModelFileError:
    return ModelFileError(f"{path}: its metadata is damaged: {error}")


def _describe_value(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor, kinds = value.type.tensor_type, onnx.TensorProto.DataType
    dims = [getattr(dim, kind) if (kind := dim.WhichOneof("value")) else "?" for dim in tensor.shape.dim]
    dtype = kinds.Name(tensor.elem_type).lower() if tensor.elem_type in kinds.values() else "unknown"
    return {"name": value.name, "dtype": dtype, "shape": dims}


def _depends_on_all(name: str) -> ValueError:
    return ValueError(f"output {name!r} depends on all images of a batch: pass one batch, of at most max_batch images")


@dataclass
class Signature:
    """Input and outputs of a file that takes images."""

    path: Path
    input: str
    dtype: np.dtype[Any]
    takes_pixels: bool  # the input is [B, height, width, channels] in uint8; otherwise [B, channels, height, width]
    shape: tuple[int | None, ...]  # of the input; None: any
    in_chans: int
    image_hw: Size | None  # size of the images; None if unknown
    patch_hw: Size | None  # images of any size must have multiples of it as sides
    batch: str  # name of the batch axis; "" for a fixed batch
    outputs: dict[str, tuple[np.dtype[Any] | None, list[int | str]]]  # dtype if known, and declared shape

    def _is_batched(self, name: str, y: Any) -> bool:
        fixed = next(iter(self.outputs[name][1]), None)
        return bool(y.ndim) and (len(y) != fixed or fixed == self.shape[0])

    @property
    def paired(self) -> list[str]:
        """Outputs of pairs of images, e.g. [B, B] or [B * B], which cannot be computed in pieces."""
        texts = {name: ",".join(map(str, dims)) for name, (_, dims) in self.outputs.items() if self.batch}
        own = rf"^(\d+\*)?{re.escape(self.batch)}(?=,|$)"  # axis 0 of one image or more
        return [
            name for name, text in texts.items() if re.search(rf"\b{re.escape(self.batch)}\b", re.sub(own, "", text))
        ]

    @property
    def main(self) -> int:
        """Index of the first output that contains floating-point values per image; 0 without one."""
        rows = {
            name: dims[0] for name, (dtype, dims) in self.outputs.items() if dims and "float" in np.dtype(dtype).name
        }
        found = (name for name, rows in rows.items() if not isinstance(rows, int) or rows == self.shape[0])
        return list(self.outputs).index(
            next((name for name in found if name not in self.paired), next(iter(self.outputs)))
        )

    def shape_of(self, name: str, count: int) -> list[int] | None:
        """Returns the shape of an output of `count` images; None if the file does not contain it."""
        of_batch = re.compile(rf"(?:(\d+)\*)?{re.escape(self.batch or 'fixed')}")
        found = [dim if isinstance(dim, int) else of_batch.fullmatch(dim) for dim in self.outputs[name][1]]
        sizes: list[Any] = [dim if isinstance(dim, int) else dim and count * int(dim[1] or 1) for dim in found]
        return None if None in sizes else sizes or None

    def first(self, found: Any, count: int, of: int) -> Any:
        """Returns the outputs of the first `count` of some images; `found` is a dict, or the only output."""
        if self.paired and count != of:
            raise _depends_on_all(self.paired[0])
        if not isinstance(found, dict):
            return self.first(dict.fromkeys(self.outputs, found), count, of).popitem()[1]
        return {name: y[: len(y) * count // of] if self._is_batched(name, y) else y for name, y in found.items()}

    def join(self, name: str, pieces: Sequence[Any]) -> Any:
        """Returns an output of all images, from the outputs of several batches.

        Raises ValueError for an output without a batch axis that differs among the batches, e.g. a mean of all images.
        """
        if len(pieces) == 1:
            return pieces[0]
        is_batched = self._is_batched(name, pieces[0])
        if name in self.paired or not (is_batched or all((each == pieces[0]).all() for each in pieces)):
            raise _depends_on_all(name)
        if not is_batched:
            return pieces[0]
        return np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else torch.cat(list(pieces))

    def check(self, images: Any) -> None:
        """Raises ValueError if the dtype or shape of numpy or torch images does not match the file."""
        shape, dtype, problem = tuple(images.shape), str(images.dtype).removeprefix("torch."), ""
        if dtype != str(self.dtype):
            problem = f"dtype must be {self.dtype}, got {dtype}"
        elif len(shape) != 4 or any(n is not None and n != got for n, got in zip(self.shape[1:], shape[1:])):
            problem = f"shape must be {['batch', *(n or 'any' for n in self.shape[1:])]}, got {shape}"
        elif 0 in shape[1:]:
            problem = f"no axis except the batch may be empty, got shape {shape}"
        elif self.patch_hw and any(side % patch for side, patch in zip(shape[2:], self.patch_hw)):
            multiples = f"multiples of the patch size {self.patch_hw[0]}x{self.patch_hw[1]}"
            problem = f"image height and width must be {multiples}, got shape {shape}"
        if problem:
            raise ValueError(f"images for {self.path.name}: {problem}")


def read_signature(info: OnnxInfo, any_inputs: bool = False) -> Signature:
    """Returns the signature of a file.

    Raises ModelFileError if the file does not take one batch of images, unless `any_inputs`: then, only the outputs of
    the signature have a meaning.
    """
    entry = info.inputs[0] if info.inputs else {}
    if any_inputs:
        entry = {"name": "", "dtype": "float", "shape": ["batch", "?", "?", "?"]}
    elif len(info.inputs) != 1 or entry["dtype"] not in DTYPES or len(entry["shape"]) != 4:
        got = "; ".join(f"{entry['name']} {entry['dtype']} {entry['shape']}" for entry in info.inputs)
        raise ModelFileError(
            f"{info.path}: its only input must be images, as float, float16 or double [batch, channels, height, width] "
            f"or as uint8 [batch, height, width, channels], got {got or 'no input'}"
        )
    dtype: np.dtype[Any] = np.dtype(DTYPES[entry["dtype"]])
    shape = tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in entry["shape"])
    takes_pixels = dtype == np.uint8
    height, width = shape[1:3] if takes_pixels else shape[2:]
    known, patch = info.metadata.get("image_hw"), info.metadata.get("patch_hw", (1, 1))
    outputs = {out["name"]: (OUTPUT_DTYPES.get(out["dtype"]), out["shape"]) for out in info.outputs}
    image_hw: Size | None = (height, width) if height and width else None
    if image_hw is None and isinstance(known, list):  # other exporters may store text here
        image_hw = (known[0], known[1])
    return Signature(
        path=Path(info.path), input=entry["name"], dtype=dtype, takes_pixels=takes_pixels, shape=shape,
        in_chans=shape[3 if takes_pixels else 1] or 3, image_hw=image_hw,
        patch_hw=(patch[0], patch[1]) if info.metadata.get("dynamic_size") is True else None, outputs=outputs,
        batch="" if shape[0] else str(entry["shape"][0]),
    )  # fmt: skip
