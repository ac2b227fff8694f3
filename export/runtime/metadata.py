"""Metadata and signature of ONNX files of any exporter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import onnx

from vit_fast.arguments import pair
from vit_fast.config import DataConfig, Size
from vit_fast.libraries.interface.image_model import Output

from .model_files import ModelFileError, read_proto

if TYPE_CHECKING:
    from rich.table import Table

PREFIX = "vit_fast."
_DTYPES = {"float": np.float32, "float16": np.float16, "double": np.float64, "uint8": np.uint8}


@dataclass
class OnnxInfo:
    """Description of an ONNX file.

    Attributes:
        path: The file.
        producer: Program that wrote it.
        opsets: Version of each operator set, by domain ("" is ONNX's own).
        inputs: Name, dtype and dimensions of each input.
        outputs: The same of each output.
        nodes: Number of nodes per operator.
        data_config: Preprocessing; None if unknown.
        preprocess: True if the file contains the preprocessing and takes uint8 pixels.
        class_names: Names of the outputs; None if unknown.
        output: "logits", "probabilities" or "features"; None if unknown.
        fp8: True if weights are in e4m3.
        metadata: The other metadata of export_onnx, or all metadata of another exporter.
    """

    path: str
    producer: str
    opsets: dict[str, int]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    nodes: dict[str, int]
    data_config: DataConfig | None = None
    preprocess: bool = False
    class_names: tuple[str, ...] | None = None
    output: str | None = None
    fp8: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_table(self) -> Table:
        """Returns the description as a rich table; long lists are shortened."""
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        rows: dict[str, Any] = {"producer": self.producer, "opsets": opsets, "nodes": counted(self.nodes)}
        rows |= {f"input {i['name']}": f"{i['dtype']} {i['shape']}" for i in self.inputs}
        rows |= {f"output {o['name']}": f"{o['dtype']} {o['shape']}" for o in self.outputs}
        rows |= {"output meaning": self.output, "preprocessing": self.data_config and str(self.data_config.to_dict())}
        rows |= {"preprocessing happens": "in the file" if self.preprocess else "before the file"}
        rows |= {"classes": self.class_names} | self.metadata
        return two_columns(self.path, ((what, _shortened(value)) for what, value in rows.items()))


def two_columns(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and values, in which markup of rich has no effect."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("what", "value", title=escape(title))
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def counted(nodes: dict[str, int]) -> str:
    """Formats operators and their counts, the most frequent first."""
    return ", ".join(f"{name} {n}" for name, n in sorted(nodes.items(), key=lambda item: -item[1]))


def _shortened(value: Any, limit: int = 6) -> str:
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
    info = OnnxInfo(
        path=str(path),
        producer=f"{proto.producer_name} {proto.producer_version}".strip() or "unknown",
        opsets={entry.domain: entry.version for entry in proto.opset_import},
        inputs=[_describe_value(v) for v in proto.graph.input if v.name not in initializers],
        outputs=[_describe_value(v) for v in proto.graph.output],
        nodes=dict(Counter(node.op_type for node in proto.graph.node)),
        fp8=any(tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN for tensor in proto.graph.initializer),
    )
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    ours = {key.removeprefix(PREFIX): value for key, value in properties.items() if key.startswith(PREFIX)}
    if not ours:
        info.metadata = properties
        return info
    try:
        _read_ours(info, {key: json.loads(value) for key, value in ours.items()})
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise damaged(path, error) from None
    return info


def damaged(path: str | Path, error: object) -> ModelFileError:
    return ModelFileError(f"{path}: its metadata is damaged: {error}")


def _read_ours(info: OnnxInfo, facts: dict[str, Any]) -> None:
    """Checks and stores the metadata that export_onnx writes."""
    data_config, names = facts.pop("data_config", None), facts.pop("class_names", None)
    info.data_config = DataConfig.from_dict(data_config) if data_config else None
    if not isinstance(names, list | None):
        raise ValueError(f"class_names must be a list, got {names!r}")
    info.class_names = tuple(map(str, names)) if names else None
    info.output, info.preprocess = facts.pop("output", None), bool(facts.pop("preprocess", False))
    if info.output not in (None, *get_args(Output)):
        raise ValueError(f"output must be one of {', '.join(get_args(Output))}, got {info.output!r}")
    for key in ("image_hw", "patch_hw"):
        if isinstance(facts.get(key, [1, 1]), int):
            raise ValueError(f"{key} must be two integers, got {facts[key]!r}")
        pair(key, facts.get(key, [1, 1]))
    info.metadata = facts


def _describe_value(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    dims = [
        d.dim_param if d.HasField("dim_param") else d.dim_value if d.HasField("dim_value") else "?"
        for d in tensor.shape.dim
    ]
    try:
        dtype = onnx.helper.tensor_dtype_to_string(tensor.elem_type).removeprefix("TensorProto.").lower()
    except KeyError:
        dtype = "unknown"
    return {"name": value.name, "dtype": dtype, "shape": dims}


@dataclass
class Signature:
    """Input and first output of a file that takes images.

    Attributes:
        path: The file, for messages.
        input: The input's name.
        dtype: The input's numpy dtype; uint8 if the file contains the preprocessing.
        shape: [B, channels, height, width], or [B, height, width, channels] in uint8; None for any size.
        image_hw: Height and width that images must be resized to; None if unknown.
        patch_hw: Divisors of height and width if the file accepts any size, otherwise None.
        output: The first output's name.
        output_dtype: Its numpy dtype.
        output_tail: Its shape after the batch axis; None if shape or dtype is unknown, so ONNX Runtime allocates it.
    """

    path: Path
    input: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    image_hw: Size | None
    patch_hw: Size | None
    output: str
    output_dtype: np.dtype[Any]
    output_tail: tuple[int, ...] | None

    @property
    def takes_pixels(self) -> bool:
        """True if the file takes uint8 [B, height, width, channels] and contains the preprocessing."""
        return self.dtype == np.uint8

    @property
    def in_chans(self) -> int:
        return self.shape[3 if self.takes_pixels else 1] or 3

    @property
    def classes(self) -> int | None:
        """Size of the output's last axis; None if dynamic."""
        return self.output_tail[-1] if self.output_tail else None

    def set_image_hw(self, image_hw: Size) -> None:
        """Sets the size that images must be resized to; raises ValueError if it differs from the file's."""
        image_hw = pair("image_hw", image_hw)
        if self.takes_pixels:
            raise ValueError(f"image size must not be given: this ONNX model resizes images itself, got {image_hw!r}")
        fixed = self.shape[2:]
        if any(n is not None and n != side for n, side in zip(fixed, image_hw)):
            raise ValueError(f"image_hw must be {fixed} like the file's input, got {image_hw!r}")
        self.image_hw = image_hw

    def check(self, images: Any) -> None:
        """Raises ValueError unless dtype and shape of numpy or torch images match the file."""
        shape, problems = tuple(images.shape), []
        dtype = str(images.dtype).removeprefix("torch.")
        wanted = ["batch" if i == 0 else n or "any" for i, n in enumerate(self.shape)]
        if dtype != str(self.dtype):
            problems.append(f"dtype must be {self.dtype}, got {dtype}")
        if len(shape) != 4 or any(n is not None and n != got for n, got in zip(self.shape[1:], shape[1:])):
            problems.append(f"shape must be {wanted}, got {shape}")
        elif self.takes_pixels and 0 in shape[1:]:
            problems.append(f"images must not be empty, got shape {shape}")
        elif self.patch_hw is not None:
            patch_h, patch_w = self.patch_hw
            if shape[2] % patch_h or shape[3] % patch_w or 0 in shape[2:]:
                problems.append(
                    f"image height and width must be multiples of the patch size {patch_h}x{patch_w}, got shape {shape}"
                )
        if problems:
            raise ValueError(f"images for {self.path.name}: " + "; ".join(problems))


def read_signature(info: OnnxInfo) -> Signature:
    """Returns the signature of a file; raises ModelFileError unless images are its only input."""
    path = Path(info.path)
    if len(info.inputs) != 1:
        names = ", ".join(entry["name"] for entry in info.inputs)
        raise ModelFileError(f"{path}: must have images as its only input, got {len(info.inputs)} inputs ({names})")
    entry, out = info.inputs[0], info.outputs[0]
    if entry["dtype"] not in _DTYPES or len(entry["shape"]) != 4:
        raise ModelFileError(
            f"{path}: input {entry['name']} must be floating [batch, channels, height, width] or uint8 "
            f"[batch, height, width, channels], got {entry['dtype']} {entry['shape']}"
        )
    dtype: np.dtype[Any] = np.dtype(_DTYPES[entry["dtype"]])
    shape = tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in entry["shape"])
    height, width = shape[1:3] if dtype == np.uint8 else shape[2:]
    known, patch = info.metadata.get("image_hw"), info.metadata.get("patch_hw", (1, 1))
    image_hw: Size | None = (height, width) if height and width else None
    if image_hw is None and isinstance(known, list):  # other exporters may store text here
        image_hw = (known[0], known[1])
    tail = tuple(dim for dim in out["shape"][1:] if isinstance(dim, int) and dim > 0)
    is_known = bool(tail) and len(tail) == len(out["shape"]) - 1 and out["dtype"] in _DTYPES
    return Signature(
        path=path, input=entry["name"], dtype=dtype, shape=shape, image_hw=image_hw,
        patch_hw=(patch[0], patch[1]) if info.metadata.get("dynamic_size") is True else None, output=out["name"],
        output_dtype=np.dtype(_DTYPES.get(out["dtype"], np.float32)), output_tail=tail if is_known else None,
    )  # fmt: skip
