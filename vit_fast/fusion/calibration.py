"""calibrate(model, images): the scales that a model's linear layers need to read their operands in e4m3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..blocks.fp8_scales import LEAST, LINEARS, MOST, give_scales
from ..blocks.fused import device_of
from ..errors import UnsupportedInputError, check_type
from ..ops import reference
from ..ops.descriptions import BlockScales, Norm
from ..quantization.fp8_agreement import IMAGES, as_taken
from ..quantization.fp8_shadow import Look, Simulated, simulate
from ..quantization.ranges import Observation, Observer, power_of_two, smoothing_scale
from ..quantization.schemes import Scheme, first_near_best
from .fuse import shadow_of

BATCH = 16
"""Images that a tensor of many is cut into."""
E4M3 = Scheme("e4m3", power_of_two=True)


@dataclass(frozen=True)
class LinearCalibration:
    """What was chosen for one linear layer.

    Attributes:
        name: Of the layer in the model; of the first, where several read one operand.
        method: How the range of its operand was chosen: "largest", "percentile ..." or "mean square".
        smoothed: Whether large channels of the operand were moved into the weight.
        error: Of its output in e4m3, root mean square, relative.
    """

    name: str
    method: str
    smoothed: bool
    error: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found; print it.

    Attributes:
        images: How many were seen.
        linears: In the model's order.
    """

    images: int
    linears: tuple[LinearCalibration, ...]

    def __str__(self) -> str:
        width = max(len(linear.name) for linear in self.linears)
        lines = [f"calibrated on {self.images} images: error of each linear layer in e4m3"]
        for linear in self.linears:
            how = linear.method + (", smoothed" if linear.smoothed else "")
            lines.append(f"{linear.name.ljust(width)}  {linear.error:.1e}  {how}")
        return "\n".join(lines)


def calibrate(model: nn.Module, images: Tensor | Iterable[Any]) -> Calibration:
    """Finds what a model needs to run in e4m3 by `fuse(model, precision="fp8")`, and keeps it in the model.

    The model sees the images once. For the operand of each linear layer of each block that the kernels run as a whole,
    a range is looked for by the largest magnitude, by percentiles and by mean square, as it is and with large channels
    moved into the weight (SmoothQuant), and the one taken with which the layer's output differs least.

    What is found are scales, buffers of the blocks (`blocks.0.vit_fast_fp8.qkv` and so on): they are saved and loaded
    with the weights, and right for these weights alone. `vit_fast.unfuse` takes them away. Calibrating again replaces
    them; layers that `fuse` was to keep in half precision are kept until it is told otherwise.

    Args:
        model: Any that `fuse` takes, fused or not, in evaluation mode, on any device and of any dtype.
        images: As the model takes them, [B, ...], or batches of them, alone or first in a tuple, as of a DataLoader;
            moved to the model's device, and to its dtype where they are floating. Some dozens that are like those to
            come. They are held until the model goes, for `fuse(..., min_agreement=...)`.
    Returns:
        What was chosen, layer by layer.
    Raises:
        TypeError: the model is no module, or images are no tensors.
        ValueError: there are no images, the model is in training mode, or an activation is infinite or undefined.
        UnsupportedInputError: no block of the model can run in e4m3; says why of each.
    """
    _check(model)
    batches = _batches(model, images)
    shadow = shadow_of(model)
    blocks, left = simulate(shadow)
    if not blocks:
        raise UnsupportedInputError(
            "calibrate",
            [f"{name}: {why}" for name, why in left.items()]
            or ["the model holds no attention and MLP that vit_fast knows"],
        )
    observers = _observe(shadow, blocks, batches)
    found, rows = {}, []
    for block in blocks:
        chosen = {linear: _choose(block, linear, observers[block.name][linear].seen()) for linear in LINEARS}
        found[block.name] = BlockScales(*(scale for scale, _ in chosen.values()))
        rows += [about for _, about in chosen.values()]
    for name, scales in found.items():
        give_scales(model.get_submodule(name), scales)
    IMAGES[model] = batches
    return Calibration(sum(map(len, batches)), tuple(rows))


def _check(model: nn.Module) -> None:
    check_type("model", model, nn.Module)
    if hasattr(model, "_orig_mod"):
        raise ValueError("model must not be compiled yet: calibrate and fuse it before compiling")
    if device_of(model).type == "meta":
        raise ValueError("model must have weights, but is on meta: load them first")
    if model.training:
        raise ValueError("model must be in evaluation mode, not in training mode: call eval() first")


def _batches(model: nn.Module, images: Any) -> list[Tensor]:
    if isinstance(images, Tensor):
        images = images.split(BATCH) if images.dim() > 1 else [images]
    elif isinstance(images, str | bytes) or not isinstance(images, Iterable):
        raise TypeError(f"images must be a tensor or an iterable of batches, got {type(images).__name__}")
    batches = []
    for number, batch in enumerate(images):
        if isinstance(batch, tuple | list) and batch:
            batch = batch[0]
        if not isinstance(batch, Tensor) or batch.dim() < 2:
            what = f"of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
            raise TypeError(f"images: batch {number} must be a tensor [B, ...], or a tuple with one first, got {what}")
        if len(batch):
            batches.append(as_taken(model, batch.clone()))  # a loader may write the next one into the same memory
    if not batches:
        raise ValueError("images must hold one image or more, got none")
    return batches


def _observe(shadow: nn.Module, blocks: list[Simulated], batches: list[Tensor]) -> dict[str, dict[str, Observer]]:
    """What the linear layers of every block read."""
    observers = {block.name: {linear: Observer(np.random.default_rng(0)) for linear in LINEARS} for block in blocks}

    def looking(block: Simulated) -> Look:
        def look(linear: str, x: Tensor) -> None:
            for rows in x.flatten(1, -2).cpu().numpy():
                if not observers[block.name][linear].add(rows):
                    undefined.append(block.linears[linear][0])

        return look

    undefined: list[str] = []
    for block in blocks:
        block.look = looking(block)
    with torch.inference_mode():
        for batch in batches:
            try:
                shadow(batch)
            except (RuntimeError, ValueError, TypeError) as error:
                what = f"a batch of shape {tuple(batch.shape)}, {batch.dtype}"
                raise ValueError(f"images: the model does not take {what}: {error}") from error
            if undefined:
                raise ValueError(f"images: what {undefined[0]} reads is infinite or undefined on them")
    return observers


def _choose(block: Simulated, linear: str, seen: Observation) -> tuple[Tensor, LinearCalibration]:
    """Scale of an operand, and how it was found."""
    weight, norm = _layer(block, linear)
    tokens = torch.from_numpy(seen.tokens).to(weight.device)
    exact = reference.fp8_linear(tokens, weight, None, None, norm)
    smoothings = [np.ones(())]
    if norm is not None:
        folded = weight if norm.weight is None else weight * norm.weight
        smoothings.append(power_of_two(smoothing_scale(seen.peak, [folded.T.cpu().numpy()])))
    tried = []
    for smoothing in smoothings:
        for limits in E4M3.ranges(seen.divided(smoothing)):
            steps = np.clip(smoothing * E4M3.grid(limits)[0], LEAST, MOST)
            scale = torch.as_tensor(steps).float().to(weight.device)
            loss = (reference.fp8_linear(tokens, weight, None, scale, norm) - exact).square().sum().item()
            tried.append((loss, (scale, limits.method, smoothing.ndim > 0)))
    loss, (scale, method, smoothed) = first_near_best(tried)
    if norm is not None:
        scale = scale.expand(weight.shape[1])
    error = (loss / max(exact.square().sum().item(), 1e-30)) ** 0.5
    return scale, LinearCalibration(block.linears[linear][0], method, smoothed, error)


def _layer(block: Simulated, linear: str) -> tuple[Tensor, Norm | None]:
    """The weight of a linear layer, its gate's below, and the norm before it without its bias, which is not rounded."""
    t, (eps1, eps2), kind = block.tensors(), block.eps, block.norm
    if linear == "qkv":
        return t.qkv_weight, Norm(t.norm1_weight, None, eps1, kind)
    if linear == "fc1":
        weight = t.fc1_weight if t.gate_weight is None else torch.cat([t.fc1_weight, t.gate_weight])
        return weight, Norm(t.norm2_weight, None, eps2, kind)
    return (t.proj_weight if linear == "proj" else t.fc2_weight), None
