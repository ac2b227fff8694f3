"""Verifies a file: checks it with onnx, runs it in ONNX Runtime on real images, and compares it with eager in fp64.

Files in int8 are also compared as CPUs without VNNI run them (saturation.py), because this CPU may have VNNI.

max_error = max |file - eager| / max(1, max |eager|)          fp32, fp16, bf16; for 8-bit, see report.Check
"""

from __future__ import annotations

import contextlib
import math
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

from .call import Call, cast
from .graphs import run_graph
from .options import BUDGETS
from .preprocessing import preprocessing_model
from .report import POINTS, Accuracy, Check, joined, losses_of, worst
from .runtime.metadata import CLASSES, ModelFileError, Signature, read_signature
from .runtime.runner import OnnxRunner, outputs_of
from .saturation import saturate

FP64_PARAMETERS = 200_000_000  # larger models are compared with eager in fp32: an fp64 copy needs too much memory
IMAGES, IMAGES_LARGE, LABELED_BATCH = 8, 4, 16
PIXELS_LARGE = 512**2  # larger images are verified with fewer images, and if possible one by one in eager
PIXEL_TOLERANCE = 1.5  # largest difference between the graph's preprocessing and Pillow's, in gray levels


class VerificationError(VitFastError, RuntimeError):
    """The file does not match the model; the message contains the error."""


def _is_beyond_fp64(vit: ImageModel) -> bool:
    return sum(p.numel() for p in vit.model.parameters()) > FP64_PARAMETERS


def image_count(vit: ImageModel) -> int:
    """Returns the number of images to compare float files on."""
    is_large = _is_beyond_fp64(vit) or math.prod(vit.image_hw) > PIXELS_LARGE
    return IMAGES_LARGE if is_large else IMAGES


def verify_file(path: Path, call: Call, images: list[Image.Image]) -> tuple[list[Check], str, str]:
    """Compares a file with its model on images; returns checks per image size, and names of reference and device."""
    is_large = math.prod(call.vit.image_hw) > PIXELS_LARGE
    if is_large and call.takes_images and call.options.dynamic_batch:
        with contextlib.suppress(VerificationError, ValueError):  # outputs may depend on all images of a batch
            return _verify(path, call, images, split=True)
    return _verify(path, call, images, split=False)


def _verify(path: Path, call: Call, images: list[Image.Image], split: bool) -> tuple[list[Check], str, str]:
    vit, options = call.vit, call.options
    on_cuda = options.target in ("ort-cuda", "tensorrt") or options.precision == "bf16"
    try:
        onnx.checker.check_model(str(path), full_check=not options.targets_ort)
        # "auto" uses the CPU if CUDA is not available
        runner = OnnxRunner(path, "auto" if on_cuda else "cpu", threads=torch.get_num_threads())
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ModelFileError) as error:
        raise VerificationError(f"the file is invalid: {error}") from error
    in_fp32 = options.is_eight_bit or _is_beyond_fp64(vit)
    device, signature = runner.device.upper(), read_signature(runner.info, any_inputs=True)
    runs: list[Callable[[list[np.ndarray]], Iterable[Any]]] = [lambda fed: map(outputs_of, map(runner, fed))]
    if options.uint8_by_int8:
        device += ", with and without VNNI"
        graph = ir.load(path)
        if saturate(graph):
            runs.append(lambda fed: run_graph(graph, fed))
    reference = call if in_fp32 else replace(call, vit=vit.copy_in(torch.float64))
    (height, width), (patch_h, patch_w) = vit.image_hw, vit.patch_hw
    sizes = [(height, width)]
    if options.dynamic_size:
        sizes += [(height + 2 * patch_h, width), (max(patch_h, height - patch_h), width + patch_w)]
    checks: list[Check] = []
    for size in sizes:
        fed, inputs = _batches(call, images[:IMAGES] if checks else images, size)
        try:
            exact = [_reference(reference, each, signature, split) for each in inputs]
        except RuntimeError:  # a model may mix dtypes in fp64
            in_fp32, reference = True, call
            try:
                exact = [_reference(reference, each, signature, split) for each in inputs]
            except RuntimeError as error:
                raise VerificationError(f"the model must run in fp32, which is the reference: {error}") from error
        names, expected = list(exact[0]), joined(exact)
        shown: Any = fed[0].shape[1:3] if options.preprocess else size
        for run in runs:
            outputs = [dict(zip(names, arrays)) for arrays in run(fed)]
            if different := [
                f"{name} {list(want.shape)}, got {list(got[name].shape)}"
                for got, wanted in zip(outputs, exact) for name, want in wanted.items() if got[name].shape != want.shape
            ]:  # fmt: skip
                raise VerificationError(f"outputs must have the shapes of eager: {'; '.join(different)}")
            counts = [len(each[0]) for each in inputs]
            more: dict[str, Any] = {"images": sum(counts), "batch": max(counts), "image_hw": tuple(shown)}
            for loss in losses_of(joined(outputs), expected):
                passed = loss.acceptable() if options.is_eight_bit else loss.max_error <= BUDGETS[options.precision]
                checks.append(replace(loss, **more, saturating=run is not runs[0], passed=bool(passed)))
    if failed := [check for check in checks if not check.passed]:
        difference = f"differs from eager on {worst(failed)}; allowed: {options.budget}"
        again = _reference(reference, inputs[0], signature, split)
        if not all(np.array_equal(again[name], y, equal_nan=True) for name, y in exact[0].items()):
            difference += ": the model draws random numbers or has a state, because equal inputs give unequal outputs"
        if nan := [name for name, y in expected.items() if np.isnan(y).any()]:
            difference += f": the model returns NaN in {', '.join(nan)}"
        raise VerificationError(f"the {options.precision} file {difference}")
    return checks, f"eager {'fp32' if in_fp32 else 'fp64'}", device


def _reference(call: Call, inputs: tuple[Tensor, ...], signature: Signature, split: bool) -> dict[str, np.ndarray]:
    """Runs the eager model in the dtype of its parameters; if `split`, image by image, which needs less memory."""
    dtype = next((p.dtype for p in call.vit.model.parameters() if p.is_floating_point()), torch.float64)
    inputs = tuple(cast([x.clone() for x in inputs], dtype))  # a model may modify its inputs
    parts = list(zip(*(x.split(1) for x in inputs))) if split else [inputs]
    with call.vit.exporting("eager", call.options.dynamic_size), torch.inference_mode():
        outputs = list(map(call, parts))
    return {name: signature.join(name, [part[name] for part in outputs]).double().numpy() for name in outputs[0]}


def _batches(call: Call, images: list[Image.Image], size: Size) -> tuple[list[Any], list[tuple[Tensor, ...]]]:
    """Returns batches of inputs of the file (pixels if it preprocesses), and of the eager model."""
    vit, options = call.vit, call.options
    if not options.preprocess or vit.data_config is None:
        inputs = call.batches(images, size)
        return list(map(call.fed, inputs)), inputs
    pixels = [as_pixels(image, call.batch, vit.in_chans) for image in images]
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
    return pixels, [(batch,) for batch in torch.from_numpy(got).split([len(batch) for batch in pixels])]


def check_labeled(folder: Path, call: Call) -> list[tuple[Path, int]]:
    """Returns the labeled images of a folder; rejects features, and models without data_config."""
    vit, names = call.vit, call.options.outputs.names
    if not vit.num_classes or (names and not {"logits", "probabilities"} & set(names)):
        raise UnsupportedInputError(
            "validation", [f"the file must output classes, got {', '.join(names) or 'features'}"]
        )
    if vit.data_config is None:
        raise UnsupportedInputError("validation", [f"{vit.no_data_config}: pass data_config to export_onnx"])
    return labeled_images(folder, vit.num_classes, vit.class_names)


def measure_accuracy(path: Path, call: Call, labeled: Sequence[tuple[Path, int]]) -> Accuracy:
    """Measures the accuracy of the file and its model on the CPU; raises VerificationError for a large loss."""
    vit, image_hw = call.vit, None if call.options.preprocess else call.vit.image_hw
    runner = OnnxRunner(path, "cpu", data_config=vit.data_config, image_hw=image_hw)

    correct = np.zeros(2)
    with vit.exporting("eager", False), torch.inference_mode():
        for start in range(0, len(labeled), LABELED_BATCH):
            files, labels = zip(*labeled[start : start + LABELED_BATCH])
            images = list(map(read_image, files))
            inputs = as_inputs(images, vit.data_config, vit.image_hw, vit.in_chans)
            found = call((inputs,))
            outputs = found[max(set(CLASSES) & set(found))].numpy(), runner.probabilities(images)
            correct += [(output.argmax(-1) == labels).sum() for output in outputs]
    accuracy = Accuracy(len(labeled), *(correct / len(labeled)).tolist())
    if not accuracy.acceptable:
        raise VerificationError(
            f"top-1 accuracy of the {call.options.precision} file must not drop by more than "
            f"{100 * POINTS:g} percentage points, or one image if that is more, got {accuracy.line()}"
        )
    return accuracy
