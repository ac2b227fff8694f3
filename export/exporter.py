"""export_onnx: a model into a file that is right, says what it needs, and is fast where it is going to run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from PIL import Image
from torch import nn

from vit_fast.apps.data import find_images
from vit_fast.blocks.fp8_scales import runs_in_fp8
from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError, check_type
from vit_fast.files import file_aside
from vit_fast.libraries.image_model import ImageModel, Output
from vit_fast.libraries.known import recognise
from vit_fast.version import __version__

from . import model_files
from .capture import capture
from .deployment import trtexec_line
from .export_report import ExportReport
from .graphs import prepend
from .metadata import inspect_onnx, metadata_for, write_metadata
from .optimise import count_nodes, forget_inner_shapes, optimise
from .options import ATTENTION_OPSET, ExportOptions, Precision, Target, opset_for
from .photographs import CALIBRATION_IMAGES, as_inputs, left_over, photographs
from .preprocessing import preprocessing_model
from .quantise import Quantised, quantise
from .verification import BATCHES, check_labelled, check_verifiable, measure_accuracy, verify_file, verify_preprocessing

HELD_OUT_IMAGES = 64
LEAST_HELD_OUT = 32
"""Fewer images do not show how often the top-1 class changes in eight bits."""


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    opset: int | None = None,
    dynamic_batch: bool = True,
    dynamic_size: bool = False,
    precision: Precision = "fp32",
    preprocess: bool = False,
    target: Target = "generic",
    output: Output = "logits",
    external_data: bool | None = None,
    calibration: Iterable[str | Path] | None = None,
    calibration_cache: str | Path | None = None,
    images: Iterable[str | Path] | None = None,
    validation: str | Path | None = None,
    data_config: DataConfig | Mapping[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
    source: str | None = None,
    verify: bool = True,
) -> ExportReport:
    """Writes a Vision Transformer as an ONNX file, and checks that the file computes what the model does.

    Args:
        model: A VisionTransformer of vit_fast, timm, transformers or torchvision, fused or not, on any backend,
            device and dtype. It is left as it was.
        path: The .onnx file to write.
        opset: ONNX operator set, 18 or newer; None means 20, which every runtime in use takes, and for bf16 22, the
            first that has it.
        dynamic_batch: Whether the file takes any number of images; if not, one.
        dynamic_size: Whether it takes any height and width that divide by the patch: positions are interpolated inside.
        precision: "fp32", "fp16", "bf16"; "int8": static, calibrated; "int8-dynamic": ranges found at run time; "fp8":
            e4m3, calibrated, in fp16 otherwise. In eight bits, layers are left float until the loss is acceptable.
        preprocess: Whether the file takes uint8 pixels [batch, height, width, channels] of any size and resizes,
            crops and normalises them itself.
        target: "generic": standard operators only. "ort-cpu", "ort-cuda": ONNX Runtime's fused operators. "tensorrt":
            what its parser takes.
        output: "logits", "probabilities" (softmax) or "features" (pooled, before the head).
        external_data: Whether weights lie beside the file, in PATH.data; None means only when they exceed 2 GB.
        calibration: Image files and folders that activations are measured on: needed for "int8" and "fp8", where there
            is no cache; for "int8-dynamic" they tell which channels are large.
        calibration_cache: A file to keep what was measured in: written with `calibration`, else read.
        images: Image files and folders to verify with; None means a sample image of matplotlib, and in eight
            bits the images of `calibration` that nothing was measured on, where there are any.
        validation: A folder of labelled images, one subfolder a class: the model's and the file's accuracy on it are
            measured, and a file that loses more than 0.6 points is refused.
        data_config: How images are prepared, where the model does not say.
        class_names: Names of the outputs, where the model does not say.
        source: Where the weights come from, for the metadata.
        verify: Whether to compare the file with the eager model; a file that fails is removed.
    Returns:
        What was written and how far it is from the model.
    Raises:
        ValueError: an argument is not one of those accepted, or is missing for what was asked.
        UnsupportedInputError: these arguments exclude one another, or the model cannot be exported; lists every reason.
        VerificationError: the file does not compute what the model computes.
        QuantisationError: the model loses too much in eight bits.
        CalibrationError: a cache is not this model's.
        OSError: the file cannot be written.
    """
    check_type("model", model, nn.Module)
    check_type("path", path, str, Path)
    options = ExportOptions(
        opset=opset_for(precision) if opset is None else opset, dynamic_batch=dynamic_batch, dynamic_size=dynamic_size,
        precision=precision, preprocess=preprocess, target=target, output=output, external_data=external_data,
    )  # fmt: skip
    if runs_in_fp8(model):
        reason = "call vit_fast.fuse(model) first, and export with precision='fp8' (--precision fp8), which calibrates"
        raise UnsupportedInputError("export of a model in FP8", [reason])
    vit = recognise(model)
    _complete(vit, options, data_config, class_names)
    images_of = _Images.find(options, calibration, calibration_cache, images, verify)
    if verify:
        check_verifiable(options)
    labelled = None if validation is None else check_labelled(Path(validation), vit, options)

    path = Path(path)
    report = ExportReport(str(path), vit.name, vit.library, options.opset, target, precision, output)
    if not vit.num_classes:
        report.output = "features"
    clock = partial(_timed, report.seconds)
    with file_aside(path) as aside:
        with clock("capture"):
            graph = capture(vit, options)
        with clock("optimise"):
            report.fusions = optimise(graph, vit, options)
        if options.is_eight_bit:
            with clock("quantise"):
                graph, report.eight_bit = _quantise(graph, vit, options, images_of)
        _finish(graph, vit, options)
        report.nodes = dict(count_nodes(graph))
        external = _external(graph, options)
        with clock("write"):
            model_files.save(graph, aside, external)
        del graph
        if verify:
            with clock("verify"):
                if options.preprocess and vit.data_config is not None:
                    hw, chans = vit.image_hw, vit.in_chans
                    verify_preprocessing(vit.data_config, hw, chans, options.opset, images_of.verified[0])
                report.checks, report.reference = verify_file(aside, vit, options, images_of.verified)
            report.budget = options.budget
        if labelled is not None:
            with clock("accuracy"):
                report.accuracy = measure_accuracy(aside, vit, options, labelled)
        write_metadata(aside, metadata_for(vit, options, source, report.measured()))
        report.external_data = f"{path.name}.data" if external else None
        report.bytes = sum(part.stat().st_size for part in aside.parent.iterdir())
    if target == "tensorrt":
        report.trtexec = trtexec_line(inspect_onnx(path))
    report.warnings = _warnings(report, options, vit)
    if options.is_eight_bit and verify and images_of.files < LEAST_HELD_OUT:
        report.warnings.append(
            f"the outputs were compared on {images_of.files} image files and crops of them: pass {LEAST_HELD_OUT} or "
            "more that nothing was measured on (images, or a folder of more calibration images)"
        )
    return report


def _complete(
    vit: ImageModel,
    options: ExportOptions,
    data_config: DataConfig | Mapping[str, Any] | None,
    names: Sequence[str] | None,
) -> None:
    """Adds what was given by hand to what the model says, and checks that it is enough."""
    if data_config is not None:
        check_type("data_config", data_config, DataConfig, Mapping)
        if not isinstance(data_config, DataConfig):
            data_config = DataConfig.from_dict(data_config)
        vit.set_data_config(data_config)
    if names is not None:
        check_type("class_names", names, Sequence)
        if len(names) != vit.num_classes:
            raise ValueError(f"class_names must have {vit.num_classes} names, as num_classes, got {len(names)}")
        vit.class_names = tuple(map(str, names))
    if options.preprocess and vit.data_config is None:
        raise ValueError(f"data_config must be given for preprocess=True, because {vit.name} has none")
    if options.output == "probabilities" and not vit.num_classes:
        raise UnsupportedInputError("output='probabilities'", [f"{vit.name} has no classification head"])


@dataclass(frozen=True)
class _Images:
    """Images to calibrate and to verify with; the first `files` of the latter are whole, the others crops."""

    measured: list[Image.Image]
    verified: list[Image.Image]
    files: int
    cache: Path | None

    @classmethod
    def find(
        cls, options: ExportOptions, calibration: Iterable[str | Path] | None, cache: str | Path | None,
        images: Iterable[str | Path] | None, verify: bool,
    ) -> _Images:  # fmt: skip
        if not options.is_eight_bit and (calibration is not None or cache is not None):
            raise ValueError(f"calibration needs precision='int8', 'int8-dynamic' or 'fp8', got {options.precision!r}")
        if options.needs_calibration and calibration is None and cache is None:
            raise ValueError(
                f"calibration=None: precision={options.precision!r} needs image files or folders to measure ranges on"
            )
        files = [] if calibration is None else find_images(calibration)
        measured = photographs(files, CALIBRATION_IMAGES) if calibration is not None else []
        verified, given = [], None
        if verify:
            given = (left_over(files, CALIBRATION_IMAGES) or None) if images is None else find_images(images)
            count = HELD_OUT_IMAGES if options.is_eight_bit else max(BATCHES)
            if given:  # in eight bits all of them, because few images do not show rare changes
                count = min(count, max(max(BATCHES), len(given)))
            verified = photographs(given, count, seed=1)
        return cls(measured, verified, min(len(verified), len(given or [None])), None if cache is None else Path(cache))


def _quantise(graph: ir.Model, vit: ImageModel, options: ExportOptions, images: _Images) -> tuple[ir.Model, Quantised]:
    def batches(photos: list[Image.Image]) -> list[np.ndarray]:
        if not photos:
            return []
        inputs = as_inputs(photos, vit.data_config, vit.image_hw, vit.in_chans)
        return [one.numpy() for one in inputs.split(4 if options.dynamic_batch else 1)]

    return quantise(graph, options, batches(images.measured), batches(images.verified), images.cache)


def _finish(graph: ir.Model, vit: ImageModel, options: ExportOptions) -> None:
    """Preprocessing in front; names and documentation for people."""
    if options.preprocess and vit.data_config is not None:
        batch = None if options.dynamic_batch else 1
        prepend(graph, preprocessing_model(vit.data_config, vit.image_hw, vit.in_chans, options.opset, batch))
    forget_inner_shapes(graph)
    graph.producer_name, graph.producer_version = "vit-fast", __version__
    graph.graph.name = vit.name.replace("/", "_")
    graph.doc_string = json.dumps({"written by": "vit-fast", "see": "vit-fast export --inspect"})


def _external(graph: ir.Model, options: ExportOptions) -> bool:
    size = model_files.weight_bytes(graph)
    if size <= model_files.PROTOBUF_LIMIT:
        return bool(options.external_data)
    if options.external_data is False:
        raise ValueError(f"external_data=False: {size / 1e9:.1f} GB of weights do not fit into one file (2 GB)")
    return True


def _warnings(report: ExportReport, options: ExportOptions, vit: ImageModel) -> list[str]:
    warnings = [f"not everywhere fused: {fusion.line()}" for fusion in report.fusions if not fusion.complete]
    if options.precision.startswith("int8") and options.target in ("ort-cuda", "tensorrt"):
        warnings.append("int8 is usually slower than fp16 on a GPU: measure both")
    if options.precision.startswith("int8") and options.target in ("generic", "ort-cpu"):
        warnings.append("int8 is fast on CPUs with VNNI (avx512_vnni, avx_vnni); older ones may saturate: verify there")
    if options.precision == "fp16" and options.target in ("generic", "ort-cpu"):
        warnings.append("ONNX Runtime's CPU provider computes fp16 files in fp32: half the size, not faster")
    if options.target == "tensorrt" and options.opset >= ATTENTION_OPSET:
        warnings.append("the Attention operator needs TensorRT 10.14 or newer; opset 22 and older write it in parts")
    if not report.checks:
        warnings.append("not verified: verify=False")
    if vit.data_config is None:
        warnings.append("the model has no data_config: pass one to store the preprocessing in the file")
    return warnings


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = round(time.perf_counter() - start, 3)
