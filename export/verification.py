"""Verifies a file: checks it with onnx, runs it in ONNX Runtime on real images, and compares it with eager in fp64.

Files in int8 are also compared as CPUs without VNNI run them (saturation.py), because this CPU may have VNNI.

max_error = max |file - eager| / max(1, max |eager|)          fp32, fp16, bf16; for 8-bit, see report.Check
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from PIL import Image
from torch import Tensor

from vit_fast.apps.classifiers import labeled_images
from vit_fast.apps.data import as_inputs, as_pixels, per_channel, read_image
from vit_fast.config import Size
from vit_fast.errors import UnsupportedInputError, VitFastError
from vit_fast.libraries.interface.image_model import ImageModel

from .graphs import run_graph
from .options import BUDGETS, ExportOptions
from .preprocessing import preprocessing_model
from .report import POINTS, Accuracy, Check, loss_of
from .runtime.metadata import ModelFileError
from .runtime.runner import OnnxRunner
from .saturation import saturate

FP64_PARAMETERS = 200_000_000  # larger models are compared with eager in fp32: an fp64 copy needs too much memory
IMAGES, IMAGES_LARGE, LABELED_BATCH = 8, 3, 16
PIXEL_TOLERANCE = 1.5  # largest difference between the graph's preprocessing and Pillow's, in gray levels


class VerificationError(VitFastError, RuntimeError):
    """The file does not match the model; the message contains the error."""


def verify_file(
    path: Path, vit: ImageModel, options: ExportOptions, images: list[Image.Image]
) -> tuple[list[Check], str, str]:
    """Compares a file with its model on images; returns checks per image size, and names of reference and device."""
    on_cuda = options.target in ("ort-cuda", "tensorrt") or options.precision == "bf16"
    try:
        onnx.checker.check_model(str(path), full_check=not options.targets_ort)
        # "auto" uses the CPU if CUDA is not available
        runner = OnnxRunner(path, "auto" if on_cuda else "cpu", threads=torch.get_num_threads())
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ModelFileError) as error:
        raise VerificationError(f"the file is invalid: {error}") from error
    in_fp32 = options.is_eight_bit or sum(p.numel() for p in vit.model.parameters()) > FP64_PARAMETERS
    device = runner.device.upper()
    runs: list[Callable[[list[np.ndarray]], Iterable[Any]]] = [lambda fed: map(runner, fed)]
    if options.uint8_by_int8:
        device += ", with and without VNNI"
        graph = ir.load(path)
        if saturate(graph):
            runs.append(lambda fed: (arrays[0] for arrays in run_graph(graph, fed)))
    dtype = torch.float32 if in_fp32 else torch.float64
    reference = vit if in_fp32 else vit.copy_in(dtype)
    if in_fp32 and not options.is_eight_bit:
        images = images[:IMAGES_LARGE]
    (height, width), (patch_h, patch_w) = vit.image_hw, vit.patch_hw
    sizes = [(height, width)]
    if options.dynamic_size:
        sizes += [(height + 2 * patch_h, width), (max(patch_h, height - patch_h), width + patch_w)]
    checks: list[Check] = []
    for size in sizes:
        fed, inputs = _batches(vit, options, images[:IMAGES] if checks else images, size)
        with reference.exporting("eager", options.dynamic_size), torch.inference_mode():
            outputs = [reference.forward(x.to(dtype), options.output, options.dynamic_size) for x in inputs.split(4)]
        expected = torch.cat(outputs).double().numpy()
        shown: Any = fed[0].shape[1:3] if options.preprocess else size
        for run in runs:
            loss = loss_of(np.concatenate(list(run(fed))), expected, options.output)
            passed = loss.acceptable() if options.is_eight_bit else bool(loss.max_error <= BUDGETS[options.precision])
            more: dict[str, Any] = {
                "batch": max(map(len, fed)),
                "image_hw": tuple(shown),
                "saturating": run is not runs[0],
            }
            checks.append(replace(loss, passed=passed, **more))
    if failed := [check for check in checks if not check.passed]:
        worst = max(failed, key=lambda check: check.max_error if np.isfinite(check.max_error) else np.inf)
        raise VerificationError(
            f"the {options.precision} file differs from eager on {worst.title()}: {worst.line()}; "
            f"allowed: {options.budget}"
        )
    return checks, f"eager {'fp32' if in_fp32 else 'fp64'}", device


def _batches(
    vit: ImageModel, options: ExportOptions, images: list[Image.Image], size: Size
) -> tuple[list[np.ndarray], Tensor]:
    """Returns batches of inputs of the file (pixels if it preprocesses), and all inputs of the eager model."""
    if not options.preprocess or vit.data_config is None:
        inputs = as_inputs(images, vit.data_config, size, vit.in_chans)
        cuts = [1, 3, *range(8, len(images), 8)] if options.dynamic_batch else range(1, len(images))
        return [batch for batch in np.split(inputs.numpy(), cuts) if len(batch)], inputs
    pixels = [as_pixels(image, 1, vit.in_chans) for image in images]
    if options.dynamic_batch:
        pixels.append(as_pixels(images[0], 3, vit.in_chans))
    graph = preprocessing_model(vit.data_config, size, vit.in_chans, options.opset)
    got = np.concatenate([planes for (planes,) in run_graph(graph, pixels)])
    shown = [Image.fromarray(one.squeeze()) for batch in pixels for one in batch]
    want = as_inputs(shown, vit.data_config, size, vit.in_chans).numpy()
    levels = np.abs(got - want) * 255 * np.reshape(per_channel(vit.data_config.std, vit.in_chans), (1, -1, 1, 1))
    if not levels.max() <= PIXEL_TOLERANCE:
        raise VerificationError(
            f"preprocessing in the graph must match Pillow within {PIXEL_TOLERANCE} gray levels, got {levels.max():.1f}"
        )
    return pixels, torch.from_numpy(got)


def check_labeled(folder: Path, vit: ImageModel, options: ExportOptions) -> list[tuple[Path, int]]:
    """Returns the labeled images of a folder; rejects features, and models without data_config."""
    if options.output == "features" or not vit.num_classes:
        raise UnsupportedInputError("validation", ["the file must output classes, got features"])
    if vit.data_config is None:
        raise UnsupportedInputError("validation", [f"{vit.no_data_config}: pass data_config to export_onnx"])
    return labeled_images(folder, vit.num_classes, vit.class_names)


def measure_accuracy(
    path: Path, vit: ImageModel, options: ExportOptions, labeled: Sequence[tuple[Path, int]]
) -> Accuracy:
    """Measures the accuracy of the file and its model on the CPU; raises VerificationError for a large loss."""
    image_hw = None if options.preprocess else vit.image_hw
    runner = OnnxRunner(path, "cpu", data_config=vit.data_config, image_hw=image_hw, output=options.output)

    correct = np.zeros(2)
    with vit.exporting("eager", False), torch.inference_mode():
        for start in range(0, len(labeled), LABELED_BATCH):
            files, labels = zip(*labeled[start : start + LABELED_BATCH])
            images = list(map(read_image, files))
            inputs = as_inputs(images, vit.data_config, vit.image_hw, vit.in_chans)
            outputs = vit.forward(inputs, "logits").float().numpy(), runner.probabilities(images)
            correct += [(output.argmax(-1) == labels).sum() for output in outputs]
    accuracy = Accuracy(len(labeled), *(correct / len(labeled)).tolist())
    if not accuracy.acceptable:
        raise VerificationError(
            f"top-1 accuracy of the {options.precision} file must not drop by more than "
            f"{100 * POINTS:g} percentage points, or one image if that is more, got {accuracy.line()}"
        )
    return accuracy
