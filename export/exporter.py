"""export_onnx: exports a model to an ONNX file and verifies the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import onnx
from PIL import Image
from torch import nn

from vit_fast.apps.data import CALIBRATION_IMAGES, find_images, left_over, read_images
from vit_fast.blocks.fp8_scales import runs_in_fp8
from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError, check_type, raise_unsupported
from vit_fast.files import file_aside
from vit_fast.libraries.interface.image_model import Output, Outputs
from vit_fast.version import __version__, installed

from . import graphs
from .call import Batch, Call, call_of
from .deployment import trtexec_line
from .graphs import shape_of
from .half import keep_in_range
from .options import ATTENTION_OPSET, ExportOptions, Precision, Target, default_opset
from .preprocessing import prepend, preprocessing_model
from .quantize import quantize
from .report import ExportReport
from .runtime.metadata import CLASSES, PREFIX, inspect_onnx
from .runtime.runner import reasons_against
from .tensorrt import tensorrt_reasons
from .verification import IMAGES_LARGE, check_labeled, image_count, measure_accuracy, verify_file

PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "timm", "transformers", "torchvision")
HELD_OUT_IMAGES = 64
MIN_HELD_OUT = 32  # fewest held-out images that show how often quantization changes the top-1 class


def export_onnx(
    model: nn.Module, path: str | Path, *, opset: int | None = None, dynamic_batch: bool = True,
    dynamic_size: bool = False, precision: Precision = "fp32", preprocess: bool = False, target: Target = "generic",
    output: Output | Sequence[Output] | None = None, layers: Sequence[int] = (), normed: bool = False,
    spatial: bool = False, example: Any = None, external_data: bool | None = None,
    calibration: Iterable[str | Path] | None = None, images: Iterable[str | Path] | None = None,
    validation: str | Path | None = None, data_config: DataConfig | Mapping[str, Any] | None = None,
    class_names: Sequence[str] | None = None,
    source: str | None = None, verify: bool = True, ir_version: int | None = None,
) -> ExportReport:  # fmt: skip
    """Exports a vision model to an ONNX file, and verifies that its outputs match the model.

    Args:
        model: A Vision Transformer of vit_fast, timm, transformers or torchvision, or any model with `example`. It is
            not modified.
        path: The .onnx file to write.
        opset: ONNX operator set, 18 or newer; None means 20, or 22 for bf16.
        dynamic_batch: True accepts any batch size, False only 1, or that of `example`.
        dynamic_size: Accept any height and width divisible by the patch size; positions are interpolated in the graph.
        precision: "fp32", "fp16", "bf16", "int8" (calibrated), "int8-dynamic" (ranges are computed at run time), or
            "fp8" (e4m3, calibrated). If 8 bits change the outputs too much, some layers stay in float. Layers that can
            overflow in fp16 stay in fp32; this is measured on `images`, and skipped without `verify`.
        preprocess: Accept uint8 pixels [batch, height, width, channels] of any size; the file resizes, crops and
            normalizes the images.
        target: "generic": standard operators only. "ort-cpu", "ort-cuda": ONNX Runtime's fused operators. "tensorrt":
            operators that TensorRT supports.
        output: One or several of "logits", "probabilities" (softmax), "features" (pooled, before the head), "tokens"
            (of patches [B, N, C], after the last norm) and "intermediate" (tokens after the blocks `layers`). Class
            and register tokens [B, P, C] are separate outputs, "prefix_tokens" and "intermediate_I_prefix". None means
            logits, or features or tokens of a model without head.
        layers: Indices of encoder blocks; negative indices count from the last.
        normed: Apply the model's last norm to intermediate tokens.
        spatial: Output tokens of patches as [B, C, rows, columns].
        example: Inputs of any model: a tensor, a tuple, or a dict. The file then has the inputs of the example, and
            all tensors that the model returns as outputs, named after keys and fields. Floating-point inputs and
            outputs are fp32, whatever the dtype of example and model; others keep their dtype. Not supported with
            `output`.
        external_data: Store weights beside the file, in PATH.data; None means only if they exceed 2 GB.
        calibration: Image files and folders to measure activations on. Required for "int8" and "fp8", optional for
            "int8-dynamic".
        images: Image files and folders to verify with. None means unused images of `calibration`, or a sample image of
            matplotlib.
        validation: Folder of labeled images, one subfolder per class, to compare the accuracy of model and file. The
            file may lose 0.6 percentage points or one image, whichever is more.
        data_config: Preprocessing; None means the model's.
        class_names: Names of the classes; None means the model's.
        source: Origin of the weights, for the metadata.
        verify: Compare the file with the eager model; a file that fails is removed.
        ir_version: Version of the file format, for older runtimes. With opset None, an older opset is used if the
            version requires it. None means torch's default.
    Returns:
        The file's properties, and the difference of its outputs from the model's.
    Raises:
        ValueError: an argument is invalid, or a required one is missing.
        UnsupportedInputError: arguments conflict, or the model cannot be exported; lists all reasons.
        VerificationError: the file does not match the model.
        QuantisationError: quantization changes the outputs too much.
        CalibrationError: activations are infinite or NaN.
        OSError: a file cannot be read or written.
    """
    check_type("model", model, nn.Module)
    check_type("layers", layers, list, tuple)
    check_type("output", output, str, list, tuple, type(None))
    names: Any = (output,) if isinstance(output, str) else tuple(output or ())
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"path must end in .onnx, got {str(path)!r}")
    if opset is None:
        opset = default_opset(precision, ir_version)
    options = ExportOptions(
        opset=opset, ir_version=ir_version, dynamic_batch=dynamic_batch, dynamic_size=dynamic_size,
        precision=precision, preprocess=preprocess, target=target, external_data=external_data,
        outputs=Outputs(names=names, layers=tuple(layers), normed=normed, spatial=spatial),
    )  # fmt: skip
    call = _read(model, example, options)
    vit = call.vit
    _complete(call, data_config, class_names)
    measured, verified, whole = _images(call, calibration, images, verify)
    if verify and precision == "bf16" and (reasons := reasons_against("cuda")):
        reasons = [f"ONNX Runtime runs bf16 on CUDA only, but {reason}" for reason in reasons]
        reasons.append("to export without verification, pass verify=False (--no-verify)")
        raise UnsupportedInputError("a bf16 file cannot be verified on this machine", reasons)
    labeled = None if validation is None else check_labeled(Path(validation), call)

    report = ExportReport(str(path), vit.name, vit.library, options.opset, target, precision)
    with file_aside(path) as aside:
        graph = graphs.capture(call)
        graph.graph.name = vit.name.replace("/", "_")
        report.outputs = {str(y.name): shape_of(y) for y in graph.graph.outputs}
        if options.dtype == "fp16":
            report.in_fp32 = keep_in_range(graph, _batches(call, verified[: image_count(vit)]))
        report.fusions = graphs.optimize(graph, options)
        if options.is_eight_bit:
            graph, report.eight_bit = quantize(graph, options, _batches(call, measured), _batches(call, verified))
        if options.preprocess and vit.data_config is not None:
            batch = None if options.dynamic_batch else call.batch
            prepend(graph, preprocessing_model(vit.data_config, vit.image_hw, vit.in_chans, options.opset, batch))
        if target == "tensorrt":
            raise_unsupported("a file for TensorRT", tensorrt_reasons(graph))
        report.inputs = {str(x.name): f"{x.dtype.name.lower()} {shape_of(x)}" for x in graph.graph.inputs if x.dtype}
        graphs.forget_inner_shapes(graph)
        graph.producer_name, graph.producer_version = "vit-fast", __version__
        report.nodes = dict(graphs.count_nodes(graph).most_common())
        graph.ir_version = report.ir_version = options.ir_version or graph.ir_version
        report.external_data = graphs.save(graph, aside, options.external_data)
        del graph
        _write_metadata(aside, call, source, report)  # OnnxRunner reads it
        if verify:
            report.checks, report.reference, report.device = verify_file(aside, call, verified)
            report.budget = options.budget
        if labeled is not None:
            report.accuracy = measure_accuracy(aside, call, labeled)
        _write_metadata(aside, call, source, report)
        report.bytes = sum(part.stat().st_size for part in aside.parent.iterdir())
    if target == "tensorrt":
        report.trtexec = trtexec_line(inspect_onnx(path))
    report.warnings = _warnings(report, call, whole)
    return report


def _read(model: nn.Module, example: Any, options: ExportOptions) -> Call:
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if runs_in_fp8(model):
        reason = "the model must not be in FP8 already: pass the original model, and export with precision='fp8'"
        raise UnsupportedInputError("export of a model in FP8", [reason])
    try:
        return call_of(model, example, options)
    except UnsupportedInputError as error:
        advice = ["to export any model, pass example (--img-size)"] if example is None else []
        raise UnsupportedInputError(error.what, [*error.reasons, *advice]) from None


def _complete(call: Call, data_config: DataConfig | Mapping[str, Any] | None, names: Sequence[str] | None) -> None:
    """Sets the given preprocessing and class names, and checks that nothing is missing."""
    vit, options = call.vit, call.options
    if data_config is not None:
        check_type("data_config", data_config, DataConfig, Mapping)
        if not isinstance(data_config, DataConfig):
            data_config = DataConfig.from_dict(data_config)
        vit.set_data_config(data_config)
    if names is not None:
        check_type("class_names", names, list, tuple)
        if vit.num_classes and len(names) != vit.num_classes:
            raise ValueError(f"class_names must have {vit.num_classes} names, one per class, got {len(names)}")
        vit.class_names = tuple(map(str, names))
    if options.preprocess and vit.data_config is None:
        raise ValueError(f"data_config must be given for preprocess=True: {vit.no_data_config}")
    if {"logits", "probabilities"} & set(options.outputs.names) and not vit.num_classes:
        raise UnsupportedInputError("export of logits or probabilities", [f"{vit.name} has no classification head"])
    if beyond := [layer for layer in options.outputs.layers if not -vit.depth <= layer < vit.depth]:
        raise ValueError(f"layers must be between {-vit.depth} and {vit.depth - 1}, got {beyond[0]}")


def _images(
    call: Call, calibration: Iterable[str | Path] | None, images: Iterable[str | Path] | None, verify: bool
) -> tuple[list[Image.Image], list[Image.Image], int]:
    """Returns images for calibration and for verification, and how many of the latter are not random crops.

    Copies of the example replace them if the model takes no images.
    """
    options = call.options
    if not options.is_eight_bit and calibration is not None:
        raise ValueError(f"calibration images require precision int8, int8-dynamic or fp8, got {options.precision}")
    if options.needs_calibration and calibration is None and call.images is not None:
        raise ValueError(f"calibration (--calibrate) must be image files or folders for {options.precision}, got None")
    files = None if calibration is None else find_images(calibration)
    measured = read_images(files, CALIBRATION_IMAGES) if files is not None or options.needs_calibration else []
    if not verify:
        return measured, [], 0
    given = (left_over(files or (), CALIBRATION_IMAGES) or None) if images is None else find_images(images)
    # 8-bit precisions need many images, because the class changes rarely
    least = image_count(call.vit)
    count = HELD_OUT_IMAGES if options.is_eight_bit else least
    if given:  # read_images adds random crops only up to `least`
        count = min(count, max(least, len(given)))
    return measured, read_images(given, count, seed=1), min(count, len(given or [None]))


def _batches(call: Call, images: list[Image.Image]) -> list[Batch]:
    most = 1 if image_count(call.vit) == IMAGES_LARGE else 4
    return list(map(call.fed, call.batches(images, call.vit.image_hw, most)))


def _write_metadata(path: Path, call: Call, source: str | None, report: ExportReport) -> None:
    """Replaces the metadata of a file: prefixed keys, values in JSON. Does not read external weights."""
    vit, options = call.vit, call.options
    normalized = "[batch, channels, height, width] fp32, normalized by data_config"
    kinds = [name for name in (*CLASSES, *report.outputs) if name in report.outputs and name in get_args(Output)]
    kinds += options.outputs.names  # "intermediate"
    facts: dict[str, Any] = {"format": 1, "model": vit.name, "source": source} | report.measured()
    facts |= {name: getattr(vit, name) for name in ("library", "config", "class_names", "image_hw", "patch_hw")}
    facts |= {name: getattr(options, name) for name in ("dynamic_size", "preprocess", "precision", "target")}
    facts |= {
        "data_config": vit.data_config.to_dict() if vit.data_config else None,
        "input": "[batch, height, width, channels] uint8 pixels" if options.preprocess else normalized,
        "output": next(iter(kinds), None),
        "outputs": report.outputs,
        "inputs": None if call.takes_images else list(call.names.values()),
        "versions": {"vit-fast": __version__} | {name: version for name in PACKAGES if (version := installed(name))},
    }
    if not vit.in_chans:  # the inputs contain no images
        facts = {name: value for name, value in facts.items() if name not in ("image_hw", "patch_hw", "input")}
    proto = onnx.load_model(path, load_external_data=False)
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, {PREFIX + key: json.dumps(value, default=str) for key, value in facts.items()})
    path.write_bytes(proto.SerializeToString())


def _warnings(report: ExportReport, call: Call, whole: int) -> list[str]:
    vit, options = call.vit, call.options
    is_int8, on_gpu = options.precision.startswith("int8"), options.target in ("ort-cuda", "tensorrt")
    slow_on_gpu = "int8 is usually slower than fp16 on a GPU: measure both"
    on_cpu_only = "verified on a CPU only: on the GPU, check the file with `vit-fast bench --models FILE`"
    in_fp32 = "ONNX Runtime's CPU provider computes fp16 files in fp32: half the size, but no speedup"
    new_operator = "the Attention operator needs TensorRT 10.14 or newer: for older versions, export with opset 22"
    no_data_config = f"{vit.no_data_config}: pass data_config to store the preprocessing in the metadata"
    few_images = (
        f"verification used few images ({whole}) and crops of them: pass at least "
        f"{MIN_HELD_OUT + CALIBRATION_IMAGES} images as `calibration` (--calibrate), of which {CALIBRATION_IMAGES} are "
        f"not used for verification, or in Python at least {MIN_HELD_OUT} as `images`"
    )
    warnings = [
        *((not fusion.complete, f"not fully fused: {fusion.line()}") for fusion in report.fusions),
        (is_int8 and on_gpu, slow_on_gpu),
        (options.precision == "fp16" and not on_gpu, in_fp32),
        (options.target == "tensorrt" and options.opset >= ATTENTION_OPSET, new_operator),
        (not report.checks, "not verified: verify=False (--no-verify)"),
        (on_gpu and (report.device or "").startswith("CPU"), on_cpu_only),
        (vit.data_config is None, no_data_config),
        (options.is_eight_bit and bool(report.checks) and whole < MIN_HELD_OUT, few_images),
    ]
    return [warning for applies, warning in warnings if applies]
