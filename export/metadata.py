"""Metadata of exported files, written and read; also reads files from other exporters."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from vit_fast.config import DataConfig
from vit_fast.libraries.image_model import ImageModel
from vit_fast.version import __version__, installed

from .model_files import ModelFileError, read_proto
from .options import ExportOptions

if TYPE_CHECKING:
    from rich.table import Table

PREFIX = "vit_fast."
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "timm", "transformers", "torchvision")


@dataclass
class OnnxInfo:
    """An ONNX file in words.

    Attributes:
        path: The file.
        producer: Program that wrote it.
        opsets: Version of each operator set, by domain ("" is ONNX's own).
        inputs: Name, dtype and dimensions of each input.
        outputs: The same of each output.
        nodes: How many nodes of each operator.
        data_config: How images are prepared; None when the file does not say.
        preprocess: Whether the file takes uint8 pixels and prepares them itself.
        class_names: Names of the outputs; None when the file does not say.
        output: "logits", "probabilities" or "features"; None when the file does not say.
        fp8: Whether weights are in e4m3.
        metadata: Everything else that export_onnx wrote, or all metadata of a file from elsewhere.
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
        """The file as a rich table; long lists shortened."""
        from rich.markup import escape
        from rich.table import Table

        table = Table("what", "value", title=self.path)
        rows: dict[str, Any] = {
            "producer": self.producer,
            "opsets": ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items()),
            "nodes": ", ".join(f"{name} {n}" for name, n in sorted(self.nodes.items(), key=lambda item: -item[1])),
        }
        rows |= {f"input {i['name']}": f"{i['dtype']} {i['shape']}" for i in self.inputs}
        rows |= {f"output {o['name']}": f"{o['dtype']} {o['shape']}" for o in self.outputs}
        rows["output meaning"] = self.output or "not said"
        rows["preprocessing"] = str(self.data_config.to_dict()) if self.data_config else "not said"
        rows["preprocessing happens"] = "in the file" if self.preprocess else "before the file"
        rows["classes"] = _shortened(self.class_names)
        rows |= {key: _shortened(value) for key, value in self.metadata.items()}
        for what, value in rows.items():
            table.add_row(what, escape(str(value)))
        return table


def metadata_for(
    vit: ImageModel, options: ExportOptions, source: str | None, measured: dict[str, Any]
) -> dict[str, str]:
    """Metadata of a file: keys with a prefix, values in JSON."""
    layout = "[batch, height, width, channels] uint8 pixels" if options.preprocess else (
        "[batch, channels, height, width] fp32, normalised as data_config says"
    )  # fmt: skip
    facts: dict[str, Any] = {
        "format": 1,
        "model": vit.name,
        "library": vit.library,
        "config": vit.config,
        "class_names": vit.class_names,
        "data_config": vit.data_config.to_dict() if vit.data_config else None,
        "image_hw": vit.image_hw,
        "patch_hw": vit.patch_hw,
        "dynamic_size": options.dynamic_size,
        "preprocess": options.preprocess,
        "input": layout,
        "output": options.output if vit.num_classes else "features",
        "precision": options.precision,
        "target": options.target,
        "source": source,
        "versions": {"vit-fast": __version__}
        | {package: version for package in PACKAGES if (version := installed(package))},
    } | measured
    return {PREFIX + key: json.dumps(value, default=str) for key, value in facts.items()}


def write_metadata(path: Path, metadata: dict[str, str]) -> None:
    """Replaces the metadata of a file that was just written; weights beside it stay as they are."""
    proto = onnx.load_model(path, load_external_data=False)
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, metadata)
    path.write_bytes(proto.SerializeToString())


def inspect_onnx(path: str | Path) -> OnnxInfo:
    """Reads the metadata of an ONNX file, also of other exporters.

    Raises:
        ModelFileError: the file is missing, damaged, unsafe, or not an ONNX file.
    """
    return describe(read_proto(path), Path(path))


def describe(proto: onnx.ModelProto, path: Path) -> OnnxInfo:
    """inspect_onnx of a file that has been read already."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    info = OnnxInfo(
        path=str(path),
        producer=f"{proto.producer_name} {proto.producer_version}".strip() or "not said",
        opsets={entry.domain: entry.version for entry in proto.opset_import},
        inputs=[_describe_value(v) for v in proto.graph.input if v.name not in initializers],
        outputs=[_describe_value(v) for v in proto.graph.output],
        nodes=dict(Counter(node.op_type for node in proto.graph.node)),
        fp8=any(tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN for tensor in proto.graph.initializer),
    )
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    ours = {key.removeprefix(PREFIX): value for key, value in properties.items() if key.startswith(PREFIX)}
    if not ours:
        info.metadata = dict(properties)
        return info
    try:
        facts = {key: json.loads(value) for key, value in ours.items()}
        data_config, names = facts.pop("data_config", None), facts.pop("class_names", None)
        info.data_config = DataConfig.from_dict(data_config) if data_config else None
        info.class_names = tuple(map(str, names)) if names else None
        for key in ("image_hw", "patch_hw"):
            sides = facts.get(key, [1, 1])
            if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
                raise ValueError(f"{key} must be two integers >= 1, got {sides!r}")
    except (json.JSONDecodeError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileError(f"{path}: its metadata is damaged: {error}") from None
    info.preprocess, info.output = bool(facts.pop("preprocess", False)), facts.pop("output", None)
    info.metadata = facts
    return info


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


def _shortened(value: Any, limit: int = 6) -> str:
    if value is None:
        return "not said"
    if isinstance(value, list | tuple) and len(value) > limit:
        return ", ".join(map(str, value[:limit])) + f", ... ({len(value)})"
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
