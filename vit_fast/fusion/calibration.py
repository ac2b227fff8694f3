"""calibrate(model, images): finds the e4m3 scales of the inputs of a model's linear layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..blocks.fp8_scales import LINEARS, MAX_SCALE, MIN_SCALE, set_scales
from ..blocks.fused import device_of
from ..errors import UnsupportedInputError, check_type, type_name
from ..ops import reference
from ..ops.descriptions import BlockScales, Norm
from ..quantization.fp8 import IMAGES, EmulatedBlock, as_model_input, emulate
from ..quantization.schemes import Observation, Observer, Scheme, first_near_best
from .fuse import sharing_copy

BATCH = 16  # images per batch, if they are given as one tensor
E4M3 = Scheme("e4m3", power_of_two=True)


@dataclass(frozen=True)
class LinearCalibration:
    """Calibration of one linear layer."""

    name: str  # the first name if several layers have the same input
    method: str  # how the input range was selected: "largest", "percentile ..." or "mean squared error"
    smoothed: bool  # SmoothQuant moved the scale of large input channels into the weight
    error: float  # relative root mean square error of the layer's output in e4m3


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`, which prints as a table."""

    images: int  #: Number of images.
    linears: tuple[LinearCalibration, ...]  #: Linear layers in the order of the model.

    def __str__(self) -> str:
        width = max(len(linear.name) for linear in self.linears)
        lines = [f"calibrated on {self.images} images: error of each linear layer in e4m3"]
        for linear in self.linears:
            how = linear.method + (", smoothed" if linear.smoothed else "")
            lines.append(f"{linear.name.ljust(width)}  {linear.error:.1e}  {how}")
        return "\n".join(lines)


def calibrate(model: nn.Module, images: Tensor | Iterable[Any]) -> Calibration:
    """Finds the scales that `fuse(model, precision="fp8")` needs, and stores them in the model.

    Runs the model on the images and observes the input of each linear layer in the blocks that can run in FP8. For
    each layer, selects the input range with the smallest error of the output, with or without SmoothQuant.

    The scales are buffers of the blocks, e.g. `blocks.0.vit_fast_fp8.qkv`, and part of the state_dict. They are valid
    for the current weights only. `vit_fast.unfuse` removes the scales. Calibrating again replaces the scales, but not
    the choice of layers that stay in half precision (see `keep` of `fuse`).

    Args:
        model: A model in evaluation mode, fused or not. Modules of unknown classes are read on the images.
        images: Images [B, ...], or an iterable of batches such as a DataLoader. If a batch is a tuple or list, its
            first element is used. Images are moved to the model's device, and floating images to its dtype. A few dozen
            images suffice. They stay in memory as long as the model, for `fuse(..., min_agreement=...)`.
    Returns:
        The selected range and the error of each layer.
    Raises:
        TypeError: model is not a module, or images are not tensors.
        ValueError: the model is in training mode, compiled or on the meta device, or cannot run on the images.
        UnsupportedInputError: no block of the model can run in e4m3; lists the reasons per block.
    """
    check_type("model", model, nn.Module)
    if hasattr(model, "_orig_mod"):
        raise ValueError("model must not be compiled: calibrate and fuse it before torch.compile")
    if device_of(model).type == "meta":
        raise ValueError("model must have weights, got tensors on the meta device: load the weights first")
    if model.training:
        raise ValueError("model must be in evaluation mode: call eval() first")
    batches = _batches(model, images)
    copied = sharing_copy(model, batches[0][:2])
    blocks, skipped = emulate(copied)
    if not blocks:
        reasons = [f"{name}: {why}" for name, why in skipped.items()]
        none = "the model must have an encoder block that vit_fast.fuse supports, got none"
        raise UnsupportedInputError("calibrate", reasons or [none])
    observers = {(block.name, linear): Observer(np.random.default_rng(0)) for block in blocks for linear in LINEARS}
    undefined: list[str] = []

    def observe(block: EmulatedBlock, linear: str, x: Tensor) -> None:
        for tokens in x.flatten(1, -2).cpu().numpy():
            if not observers[block.name, linear].add(tokens):
                undefined.append(block.linears[linear][0])

    for block in blocks:
        block.observe = functools.partial(observe, block)
    with torch.inference_mode():
        for batch in batches:
            try:
                copied(batch)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError) as error:
                what = f"a batch of shape {tuple(batch.shape)}, {batch.dtype}"
                raise ValueError(f"images must be inputs of the model, got {what}: {error}") from error
            if undefined:
                raise ValueError(f"the input of {undefined[0]} must be finite on all images, got infinity or NaN")
    chosen = [[_choose(block, each, observers[block.name, each].seen()) for each in LINEARS] for block in blocks]
    for block, linears in zip(blocks, chosen):
        set_scales(model.get_submodule(block.name), BlockScales(*(scale for scale, _ in linears)))
    IMAGES[model] = batches
    return Calibration(sum(map(len, batches)), tuple(about for linears in chosen for _, about in linears))


def _batches(model: nn.Module, images: Any) -> list[Tensor]:
    if isinstance(images, Tensor):
        images = images.split(BATCH) if images.dim() > 1 else [images]
    elif not isinstance(images, Iterable):
        raise TypeError(f"images must be a tensor or an iterable of batches, got {type_name(images)}")
    batches = []
    for number, batch in enumerate(images):
        outer = ""
        if isinstance(batch, tuple | list) and batch:
            outer, batch = f"a {type(batch).__name__} that starts with ", batch[0]
        if not isinstance(batch, Tensor) or batch.dim() < 2:
            got = outer + (f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type_name(batch))
            requirement = "must be a tensor of at least 2 dimensions, or a tuple or list that starts with one"
            raise TypeError(f"batch {number} of images {requirement}, got {got}")
        if len(batch):
            batches.append(as_model_input(model, batch.clone()))  # a loader may reuse the memory of the batch
    if not batches:
        raise ValueError("images must contain at least one image, got none")
    return batches


def _choose(block: EmulatedBlock, linear: str, seen: Observation) -> tuple[Tensor, LinearCalibration]:
    """Returns the scale of a linear layer's input; fc1 and its gate have the same input."""
    t, norm = block.tensors(), None
    weight: Tensor = getattr(t, f"{linear}_weight")
    if linear == "qkv":
        norm = Norm(t.norm1_weight, None, block.eps[0], block.norm)
    elif linear == "fc1":
        norm = Norm(t.norm2_weight, None, block.eps[1], block.norm)
        weight = weight if t.gate_weight is None else torch.cat([weight, t.gate_weight])
    tokens = torch.from_numpy(seen.tokens).to(weight.device)
    exact = reference.fp8_linear(tokens, weight, None, None, norm)
    smoothings = [np.ones(())]
    if norm is not None:
        folded = weight if norm.weight is None else weight * norm.weight
        smoothings.append(E4M3.smoothing_scale(seen.peak, [folded.T.cpu().numpy()]))
    tried = []
    for smoothing in smoothings:
        for limits in E4M3.ranges(seen.divided(smoothing)):
            steps = np.clip(smoothing * E4M3.grid(limits)[0], MIN_SCALE, MAX_SCALE)
            scale = torch.as_tensor(steps, device=weight.device).float()
            loss = (reference.fp8_linear(tokens, weight, None, scale, norm) - exact).square().sum().item()
            tried.append((loss, (scale, limits.method, smoothing.ndim > 0)))
    loss, (scale, method, smoothed) = first_near_best(tried)
    if norm is not None:
        scale = scale.expand(weight.shape[1])
    error = (loss / max(exact.square().sum().item(), 1e-30)) ** 0.5
    return scale, LinearCalibration(block.linears[linear][0], method, smoothed, error)
