"""Verifies a file: checks it with onnx, runs it in ONNX Runtime on real images, and compares it with eager in fp64.

max_error = max |file - eager| / max(1, max |eager|)          fp32, fp16, bf16; for 8-bit, see report.Loss
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from PIL import Image

from vit_fast.apps.classifiers import evaluate, labelled_images
from vit_fast.apps.data import as_inputs, as_pixels, per_channel, read_image
from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError, VitFastError
from vit_fast.libraries.interface.image_model import ImageModel

from .graphs import run_graph
from .options import BUDGETS, ExportOptions
from .preprocessing import preprocessing_model
from .report import POINTS, Accuracy, Check, loss_of
from .runtime.model_files import ModelFileError
from .runtime.providers import ProviderError, open_session
from .runtime.runner import OnnxRunner

FP64_PARAMETERS = 200_000_000
"""Larger models are compared with eager in fp32, because a copy in fp64 would need too much memory."""
BATCHES, BATCHES_LARGE, LABELLED_BATCH = (1, 3, 8), (1, 2), 16
PIXEL_TOLERANCE = 1.5
"""Largest allowed difference between the graph's preprocessing and Pillow's, in gray levels: both round per axis."""


class VerificationError(VitFastError, RuntimeError):
    """The file does not match the model; the message contains the error."""


def verify_file(
    path: Path, vit: ImageModel, options: ExportOptions, images: list[Image.Image]
) -> tuple[list[Check], str]:
    """Compares a file with its model on real images, at least one; returns the checks and the name of the reference.

    Raises:
        VerificationError: the file is invalid or cannot be loaded, an output is NaN, or the error exceeds the budget.
        UnsupportedInputError: ONNX Runtime cannot run this precision here.
    """
    try:
        onnx.checker.check_model(str(path), full_check=not options.targets_ort)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(f"onnx.checker rejects the file: {error}") from error
    session = _session(path, options)
    large = options.is_eight_bit or sum(p.numel() for p in vit.model.parameters()) > FP64_PARAMETERS
    dtype = torch.float32 if large else torch.float64
    reference = vit if large else vit.copy_in(dtype)
    name = session.get_inputs()[0].name
    checks = []
    for number, size in enumerate(_sizes(vit, options)):
        for pieces in _pieces(vit, options, images, size, full=number == 0, few=large):
            expected = _eager(reference, torch.cat([inputs for _, inputs in pieces]).to(dtype), options)
            got = np.concatenate([session.run(None, {name: fed})[0] for fed, _ in pieces])
            batch = max(len(inputs) for _, inputs in pieces)
            shape = pieces[0][0].shape[1:3] if options.preprocess else size
            checks.append(_compare(got, expected, batch, shape, options))
    if failed := [check for check in checks if not check.passed]:
        worst = max(failed, key=lambda check: check.max_error if np.isfinite(check.max_error) else np.inf)
        same = "" if worst.top1_agreement is None else f", top-1 agreement {worst.top1_agreement:.1%}"
        raise VerificationError(
            f"{options.precision} file differs from eager at batch {worst.batch}, size {worst.image_hw}: "
            f"max error {worst.max_error:.2e}, rms error {worst.rms_error:.2e}{same}, the model is sure of "
            f"another class on {worst.flips} of {worst.images} images; allowed: {options.budget}"
        )
    return checks, f"eager {'fp32' if large else 'fp64'}, {session.get_providers()[0]}"


def verify_preprocessing(
    data_config: DataConfig, image_hw: Size, in_chans: int, opset: int, image: Image.Image
) -> None:
    """Compares preprocessing in the graph with preprocessing by Pillow.

    Raises:
        VerificationError: they differ by more than rounding.
    """
    pixels = as_pixels(image, 2, in_chans)
    got = _run_preprocessing(data_config, image_hw, in_chans, opset, pixels)
    want = as_inputs([Image.fromarray(p.squeeze()) for p in pixels], data_config, image_hw, in_chans).numpy()
    levels = np.abs(got - want) * 255 * np.reshape(per_channel(data_config.std, in_chans), (1, -1, 1, 1))
    if not levels.max() <= PIXEL_TOLERANCE:
        raise VerificationError(
            f"preprocessing in the graph must match Pillow within {PIXEL_TOLERANCE} gray levels, got {levels.max():.1f}"
        )


def _sizes(vit: ImageModel, options: ExportOptions) -> list[Size]:
    (height, width), (patch_h, patch_w) = vit.image_hw, vit.patch_hw
    if not options.dynamic_size:
        return [(height, width)]
    return [(height, width), (height + 2 * patch_h, width), (max(patch_h, height - patch_h), width + patch_w)]


def _pieces(
    vit: ImageModel, options: ExportOptions, images: list[Image.Image], size: Size, *, full: bool, few: bool
) -> Iterator[list[tuple[np.ndarray, torch.Tensor]]]:
    """Yields the batches of each check at one size, each as inputs of the file and of the eager model.

    There is one check per batch size. For 8-bit precisions, there is one check of all images, in batches of several
    sizes, because only many images show how often the class changes.
    """
    if options.is_eight_bit:
        images = images if full else images[: sum(BATCHES)]
        if options.preprocess:
            yield [_inputs(vit, options, [image], size, 1) for image in images]
            return
        fed, inputs = _inputs(vit, options, images, size, len(images))
        cuts = range(1, len(images)) if not options.dynamic_batch else [1, *range(4, len(images), BATCHES[-1])]
        pieces = zip(np.split(fed, cuts), inputs.tensor_split(list(cuts)))
        yield [(piece, same) for piece, same in pieces if len(piece)]
        return
    batches = (BATCHES_LARGE if few else BATCHES) if options.dynamic_batch else (1,)
    fed, inputs = _inputs(vit, options, images, size, max(batches))
    for batch in batches:
        yield [(fed[:batch], inputs[:batch])]


def _inputs(
    vit: ImageModel, options: ExportOptions, images: list[Image.Image], size: Size, count: int
) -> tuple[np.ndarray, torch.Tensor]:
    """Returns inputs of the file and of the eager model; pixels for a file that contains the preprocessing."""
    if options.preprocess and vit.data_config is not None:
        pixels = as_pixels(images[0], count, vit.in_chans)
        planes = _run_preprocessing(vit.data_config, size, vit.in_chans, options.opset, pixels)
        return pixels, torch.from_numpy(planes)
    inputs = as_inputs([images[i % len(images)] for i in range(count)], vit.data_config, size, vit.in_chans)
    return inputs.numpy(), inputs


def _run_preprocessing(data: DataConfig, image_hw: Size, in_chans: int, opset: int, pixels: np.ndarray) -> np.ndarray:
    ((planes,),) = run_graph(preprocessing_model(data, image_hw, in_chans, opset), [pixels])
    return planes


def _eager(vit: ImageModel, inputs: torch.Tensor, options: ExportOptions) -> np.ndarray:
    with vit.exporting("eager", options.dynamic_size), torch.inference_mode():
        result = torch.cat([vit.forward(one, options.output, options.dynamic_size) for one in inputs.split(4)])
    return result.double().numpy()


def check_verifiable(options: ExportOptions) -> None:
    """Raises UnsupportedInputError, before the model is captured, if ONNX Runtime cannot run the file here."""
    if options.precision == "bf16" and not _on_cuda(options):
        reason = "ONNX Runtime runs bf16 on CUDA only, but torch found no CUDA device"
        raise UnsupportedInputError("verification of a bf16 file", [reason, "pass verify=False (--no-verify)"])


def _on_cuda(options: ExportOptions) -> bool:
    return (options.target in ("ort-cuda", "tensorrt") or options.precision == "bf16") and torch.cuda.is_available()


def _session(path: Path, options: ExportOptions) -> Any:
    settings: dict[str, Any] = {"threads": torch.get_num_threads(), "fp8": options.precision == "fp8"}
    try:
        if _on_cuda(options):
            with contextlib.suppress(ProviderError):
                return open_session(path, "cuda", **settings)
        return open_session(path, **settings)
    except ModelFileError as error:
        if options.precision == "bf16":
            reasons = [str(error), "pass verify=False, or install onnxruntime-gpu on a machine with CUDA"]
            raise UnsupportedInputError("verification of a bf16 file", reasons) from error
        raise VerificationError(str(error)) from error


def _compare(got: np.ndarray, expected: np.ndarray, batch: int, size: Any, options: ExportOptions) -> Check:
    if got.shape != expected.shape:
        raise VerificationError(f"the file's output must have the model's shape {expected.shape}, got {got.shape}")
    loss = loss_of(got, expected, options.output)
    passed = loss.acceptable() if options.is_eight_bit else bool(loss.max_error <= BUDGETS[options.precision])
    return Check(**asdict(loss), batch=batch, image_hw=(int(size[0]), int(size[1])), passed=passed)


def check_labelled(folder: Path, vit: ImageModel, options: ExportOptions) -> list[tuple[Path, int]]:
    """Returns the labeled images of a folder.

    Raises:
        ImageError, ValueError: see labelled_images.
        UnsupportedInputError: the model or the file does not classify, or the preprocessing is unknown.
    """
    if options.output == "features" or not vit.num_classes:
        raise UnsupportedInputError("validation", ["the file must output classes, got features"])
    if vit.data_config is None:
        raise UnsupportedInputError("validation", [f"{vit.name} has no data_config: pass data_config to export_onnx"])
    return labelled_images(folder, vit.num_classes, vit.class_names)


def measure_accuracy(
    path: Path, vit: ImageModel, options: ExportOptions, labelled: Sequence[tuple[Path, int]]
) -> Accuracy:
    """Measures the accuracy of the file and its model, both on the CPU.

    Raises:
        VerificationError: the file loses too much.
    """
    image_hw = None if options.preprocess else vit.image_hw
    runner = OnnxRunner(path, "cpu", data_config=vit.data_config, image_hw=image_hw, output=options.output)

    def logits(images: list[Image.Image]) -> np.ndarray:
        inputs = as_inputs(images, vit.data_config, vit.image_hw, vit.in_chans)
        return np.asarray(vit.forward(inputs, "logits").float())

    files = [file for file, _ in labelled]
    of_file = evaluate(labelled, _outputs(files, runner.probabilities))
    with vit.exporting("eager", False), torch.inference_mode():
        of_model = evaluate(labelled, _outputs(files, logits))
    accuracy = Accuracy(len(files), of_model.top1, of_file.top1)
    if not accuracy.acceptable:
        raise VerificationError(
            f"top-1 accuracy of the {options.precision} file must be at most {POINTS:.1%} or one image "
            f"below the model's, got {accuracy.line()}"
        )
    return accuracy


def _outputs(files: Sequence[Path], run: Callable[[list[Image.Image]], np.ndarray]) -> Iterator[np.ndarray]:
    for start in range(0, len(files), LABELLED_BATCH):
        yield from run([read_image(file) for file in files[start : start + LABELLED_BATCH]])
