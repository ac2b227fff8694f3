"""Deployment: repositories for Triton Inference Server, the command that builds a TensorRT engine, and model cards.

NVIDIA's Triton Inference Server is not Triton, the language of the kernels. A repository contains MODEL/config.pbtxt,
MODEL/labels.txt and MODEL/1/model.onnx.

Source: docs.nvidia.com, Triton Inference Server user guide, "Model Repository" and "Model Configuration";
the schema is model_config.proto of triton-inference-server/common. TensorRT developer guide, "Working with Dynamic
Shapes" and "trtexec". A strongly typed network computes in the types of the file, including 8-bit types.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import text_encoding

from vit_fast.errors import UnsupportedInputError, check_choice, check_integer
from vit_fast.files import file_aside, folder_aside

from .runtime.metadata import (
    CHECKED,
    ModelFileError,
    OnnxInfo,
    copy_model,
    damaged,
    inspect_onnx,
    parts_of,
    read_signature,
    shortened,
)

DATA_TYPES = {
    "float": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16", "double": "TYPE_FP64",
    "uint8": "TYPE_UINT8", "int64": "TYPE_INT64", "int32": "TYPE_INT32",
}  # fmt: skip
INSTANCE_KINDS = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}
TARGET_DEVICES = {"ort-cpu": "cpu", "ort-cuda": "gpu", "tensorrt": "gpu"}
ACCELERATOR_MODES = {"fp32": "FP32", "fp16": "FP16", "int8": "INT8"}
QUEUE_DELAY_US = 500
LABELS = "labels.txt"
PROFILE = (("min", 1, 0.5), ("opt", 8, 1.0), ("max", 64, 2.0))
"""Batch sizes of an engine and, for images of any size, their sides relative to the model's image size."""


def write_triton_repository(
    model_path: str | Path, repository: str | Path, *, name: str | None = None, max_batch: int = 64,
    instances: int = 1, device: str | None = None,
) -> Path:  # fmt: skip
    """Adds an ONNX file to a model repository for NVIDIA's Triton Inference Server.

    Args:
        model_path: The .onnx file, which is copied with its external weights.
        repository: The repository's folder; created if missing.
        name: The model's name in the repository; None means the name of the file.
        max_batch: Largest batch into which the server combines requests; ignored for a file with a fixed batch.
        instances: Number of copies of the model that run concurrently on each device.
        device: "gpu", "cpu", or "auto" (a GPU if the server has one); None means the device of the export's target.
    Returns:
        The model's folder.
    Raises:
        ValueError: an argument is invalid.
        ModelFileError: the file is missing, damaged or unsafe.
        FileExistsError: the repository has a model of this name.
        UnsupportedInputError: the server cannot build TensorRT engines in the file's precision.
    """
    name = name or Path(model_path).stem
    check_integer("max_batch", max_batch, 1)
    check_integer("instances", instances, 1)
    check_choice("device", device, (None, *INSTANCE_KINDS))
    info = inspect_onnx(model_path)
    for_tensorrt = info.metadata.get("target") == "tensorrt"
    device = device or TARGET_DEVICES.get(str(info.metadata.get("target")), "auto")
    precision = str(info.metadata.get("precision")) if for_tensorrt and device == "gpu" else None
    target = check_triton_repository(Path(repository), name, precision)
    config = _server_config(info, name, max_batch, instances, device, precision)
    with folder_aside(target) as aside:
        copy_model(Path(model_path), aside / "1" / "model.onnx")
        if labels := _labels(info):
            (aside / LABELS).write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
        (aside / "config.pbtxt").write_text(config, encoding="utf-8")
    return target


def check_triton_repository(repository: Path, name: str, precision: str | None) -> Path:
    """Returns the folder for a new model.

    Raises FileExistsError if the folder exists, ValueError for an invalid name, and UnsupportedInputError if the server
    cannot build TensorRT engines in `precision`; None means that it builds none.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in (".", ".."):
        raise ValueError(f"the model name must match [A-Za-z0-9_.-]+ and not be '.' or '..', got {name!r}")
    if precision not in (None, *ACCELERATOR_MODES):
        known = ", ".join(ACCELERATOR_MODES)
        reasons = [f"the precision of the server's TensorRT accelerator must be one of {known}, got {precision}"]
        reasons.append("export without a repository, and build an engine with the trtexec command that export prints")
        raise UnsupportedInputError("a repository for Triton Inference Server with TensorRT", reasons)
    target = repository / name
    if target.exists():
        raise FileExistsError(f"{target}: already exists: remove this folder, or choose another name")
    return target


def _server_config(
    info: OnnxInfo, name: str, max_batch: int, instances: int, device: str, precision: str | None
) -> str:
    """Returns the server's ModelConfig in protobuf's text format."""
    dynamic = all(not isinstance(v["shape"][0], int) for v in [*info.inputs, *info.outputs] if v["shape"])
    lines = [
        f"name: {_quoted(name)}",
        'platform: "onnxruntime_onnx"',
        'backend: "onnxruntime"',
        f"max_batch_size: {max_batch if dynamic else 0}",
        f"instance_group {{ count: {instances} kind: {INSTANCE_KINDS[device]} }}",
    ]
    for kind, values in (("input", info.inputs), ("output", info.outputs)):
        for value in values:
            shape = value["shape"][1:] if dynamic else value["shape"]
            dims = [dim if isinstance(dim, int) and dim > 0 else -1 for dim in shape]
            labels = f' label_filename: "{LABELS}"' if value is info.outputs[0] and _labels(info) else ""
            lines.append(f"{kind} {{ name: {_quoted(value['name'])} {_type_of(value, info)} dims: {dims}{labels} }}")
    if dynamic:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_DELAY_US} }}")
    if precision is not None:
        mode = f'parameters {{ key: "precision_mode" value: "{ACCELERATOR_MODES[precision]}" }}'
        accelerator = f'gpu_execution_accelerator {{ name: "tensorrt" {mode} }}'
        lines.append(f"optimization {{ execution_accelerators {{ {accelerator} }} }}")
    if dynamic and info.output is not None and (profile := _shape_profile(info)):
        tensor, dims = info.inputs[0], list(profile["opt"][info.inputs[0]["name"]][1:])
        request = f"{_type_of(tensor, info)} dims: {dims} random_data: true"
        inputs = f"inputs {{ key: {_quoted(tensor['name'])} value {{ {request} }} }}"
        for batch in dict.fromkeys((1, max_batch)):  # these requests build TensorRT engines before the model is ready
            lines.append(f'model_warmup {{ name: "batch {batch}" batch_size: {batch} {inputs} }}')
    return "".join(f"{line}\n" for line in lines)


def _quoted(text: str) -> str:
    return f'"{text_encoding.CEscape(text, as_utf8=True)}"'


def _type_of(value: dict[str, Any], info: OnnxInfo) -> str:
    if value["dtype"] not in DATA_TYPES:
        known = ", ".join(DATA_TYPES)
        raise ModelFileError(f"{info.path}: the dtype of {value['name']} must be one of {known}, got {value['dtype']}")
    return f"data_type: {DATA_TYPES[value['dtype']]}"


def _labels(info: OnnxInfo) -> tuple[str, ...]:
    """Returns the class names for the server's labels file; () for features or names of several lines."""
    names = info.class_names or ()
    one_per_line = all([name.strip()] == name.splitlines() for name in names)
    return names if info.output in ("logits", "probabilities") and one_per_line else ()


def _shape_profile(info: OnnxInfo) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of an engine's inputs as "min", "opt" and "max"; {} for fixed shapes."""
    signature = read_signature(info, any_inputs=info.metadata.get("inputs") is not None)
    hw, patches = signature.image_hw or (224, 224), signature.patch_hw or (1, 1)
    dynamic = any(not isinstance(dim, int) for entry in info.inputs for dim in entry["shape"])
    profile = {}
    for name, batch, part in PROFILE if dynamic else ():
        sides = [max(1, round(side * part / patch)) * patch for side, patch in zip(hw, patches)]
        wanted = (batch, *sides, signature.in_chans) if signature.takes_pixels else (batch, signature.in_chans, *sides)
        profile[name] = {
            entry["name"]: tuple(
                fixed if isinstance(fixed, int) else wanted[i] for i, fixed in enumerate(entry["shape"])
            )
            for entry in info.inputs
        }
    return profile


def trtexec_line(info: OnnxInfo) -> str:
    """Returns the command that builds FILE.plan beside FILE.onnx."""
    path = Path(info.path)
    words = ["trtexec", f"--onnx={path}", f"--saveEngine={path.with_suffix('.plan')}", "--stronglyTyped"]
    for name, shapes in _shape_profile(info).items():
        listed = [f"{tensor}:{'x'.join(map(str, shape))}" for tensor, shape in shapes.items()]
        words.append(f"--{name}Shapes={','.join(listed)}")
    return shlex.join(words)


def write_card(path: str | Path, license_name: str | None = None) -> Path:
    """Writes the model card FILE.md beside FILE.onnx, from the file's metadata.

    Args:
        path: The .onnx file.
        license_name: License of the weights; None writes "unknown".
    Returns:
        The card.
    Raises:
        ModelFileError: the file is missing, damaged or unsafe.
    """
    path = Path(path)
    if (card := path.with_suffix(".md")) == path:
        raise ValueError(f"path must not end in .md, the suffix of the card, got {path}")
    info, files = inspect_onnx(path), parts_of(path)
    if not isinstance(checked := info.metadata.get("checked", {"verification": "unknown"}), dict):
        raise damaged(path, f"checked must be a dict, got {checked!r}")
    facts = {"license": license_name or "unknown: ask the source of the weights"} | info.facts()
    hashes = []
    for file in files:
        with file.open("rb") as content:
            hashes.append((file.name, file.stat().st_size, hashlib.file_digest(content, "sha256").hexdigest()))
    lines = ["---", f"license: {license_name or 'unknown'}", "library_name: onnx", "---", "", f"# {path.name}", ""]
    lines += _markdown(("field", "value"), [row for row in facts.items() if row[0] not in (*CHECKED, "config")])
    lines += ["", "## Checked", "", *_markdown(("check", "result"), checked.items()), "", "## Run", ""]
    lines += ["    from vit_fast.export import OnnxRunner", ""]
    lines.append(f'    probabilities = OnnxRunner("{path.name}").probabilities([image])')
    if info.metadata.get("target") == "tensorrt":
        lines.append(f"    # as a TensorRT engine: {trtexec_line(replace(info, path=path.name))}")
    lines += ["", "## Files", "", *_markdown(("file", "bytes", "sha256"), hashes), ""]
    with file_aside(card) as aside:
        aside.write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")
    return card


def _markdown(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    cells = [[" ".join(shortened(cell).split()).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *cells)]
