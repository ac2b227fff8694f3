"""Selects the blocks that `fuse(model, precision="fp8")` runs in e4m3, and the layers that stay in half precision.

Calibration and selection use emulated FP8: a copy of the model, which shares its tensors and runs on any device. The
blocks of the copy run `reference.fp8_block` in fp32. All other modules run in the model's dtype, with sdpa if fused.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.block import parts_of, runs_whole
from ..blocks.fp8_scales import LINEARS, PLACE, Fp8Scales, scales_of
from ..blocks.fused import FusedNormMlp, device_of, dtype_of
from ..blocks.fusion_report import ModuleReport
from ..blocks.parts import BlockParts, LinearParts, block_tensors, origins
from ..blocks.token_facts import NOTHING, TokenFacts
from ..errors import UnsupportedInputError, check_choice, raise_unsupported, type_name
from ..ops import reference
from ..ops.backends import fp8_reasons
from ..ops.descriptions import NO_TERMS, BlockScales, BlockTensors, QkNorm, Rope, checked_rope
from .schemes import fewest_excluded

WHAT = "fuse with precision='fp8'"
IMAGES_FOR_ORDER = 32
"""Largest number of images used to rank the layers by sensitivity."""
IMAGES: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
"""Calibration images of each model."""
Linear = tuple[str, str]  # a block's name, and one of LINEARS ("qkv", "proj", "fc1", "fc2")


class EmulatedBlock:
    """Runs a block with `reference.fp8_block`; replaces the block's Fp8Scales.

    Attributes:
        scales: Scales of the layers; None for a layer that is not rounded.
        observe: Called with a name of LINEARS and the layer's input, fp32 [B, N, K]; for qkv and fc1, before the norm.
        name: The block's name in its model.
        linears: Names of the modules that form each of LINEARS: e.g. q, k and v if separate, or fc1 and its gate. The
            input projection of a MultiheadAttention is called `in_proj`.
    """

    emulated = True

    def __init__(self, name: str, parts: BlockParts, names: Mapping[nn.Module, str]) -> None:
        self.scales = BlockScales()
        self.observe: Callable[[str, Tensor], None] = lambda name, x: None
        self.name = name
        attention, mlp = self._attention, self._mlp = parts.halves
        self.norm = str(mlp.norm.kind)
        self.eps = attention.norm.eps, mlp.norm.eps

        def joined(*linears: LinearParts | None) -> tuple[str, ...]:
            slots = [slot for linear in linears if linear is not None for slot in linear.weights]
            found = (
                names[owner] + ("" if slot == "weight" else ".in_proj")
                for each in slots
                for owner, slot in origins(each)
            )
            return tuple(dict.fromkeys(found))

        self.linears = {
            "qkv": joined(attention.qkv), "proj": (names[attention.proj],),
            "fc1": joined(mlp.fc1, mlp.gate), "fc2": (names[mlp.fc2],),
        }  # fmt: skip

    def tensors(self) -> BlockTensors:
        """Returns the parameters in fp32."""
        return BlockTensors._make(map(_wide, block_tensors(self._attention, self._mlp)))

    def run(
        self, parts: BlockParts, x: Tensor, facts: TokenFacts, rope: Rope | None, reader: None = None
    ) -> tuple[Tensor, TokenFacts]:
        """Runs the block; see `Fp8Scales.run`."""
        attention, tensors, heads = self._attention, self.tensors(), self._attention.num_heads
        if rope is not None:
            rope = checked_rope(rope, (*x.shape[:2], 3, heads, tensors.qkv_weight.shape[0] // (3 * heads)))
        qk_norm = attention.qk_norm and attention.qk_norm.now()
        if qk_norm is not None:
            q, k = (norm._replace(weight=_wide(norm.weight), bias=_wide(norm.bias)) for norm in qk_norm[:2])
            qk_norm = QkNorm(q, k, qk_norm.over)
        read = iter(LINEARS if tensors.gate_weight is None else ("qkv", "proj", "fc1", "fc1", "fc2"))

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
            self.observe(next(read), x)
            return reference.fp8_linear(x, weight, bias, *rest)

        with torch.autocast(x.device.type, enabled=False):
            y = reference.fp8_block(
                x.float(), tensors, self.scales, heads=heads, attention_scale=attention.scale, eps=self.eps,
                norm=self.norm, activation=self._mlp.activation, qk_norm=qk_norm, rope=rope, linear=linear,
            )  # fmt: skip
        return y.to(x.dtype), NOTHING

    def reader(self, parts: BlockParts) -> None:
        """Returns None, because the block rounds its input itself."""

    def check(self, backend: str) -> None:
        """Accepts every backend."""


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


def emulate(copied: nn.Module) -> tuple[list[EmulatedBlock], dict[str, str]]:
    """Switches the blocks of a fused copy to `EmulatedBlock` if the kernels could run them in e4m3 as one operator.

    Returns these blocks in the model's order, and why other blocks were skipped, by name. No layer is rounded yet.
    """
    found, skipped = [], {}
    names = {module: name for name, module in copied.named_modules()}
    for block, name in names.items():
        if not isinstance(block, FusedNormMlp):
            continue
        block.__dict__.pop("vit_fast_parts", None)
        block._modules.pop(PLACE, None)
        parts = parts_of(block)
        inside = parts.mlp is not None and parts.mlp.inner_norm is not None
        terms = parts.attention is not None and parts.attention.terms is not None
        if runs_whole(parts) and not inside and not terms:
            parts.fp8 = EmulatedBlock(name, parts, names)
            found.append(parts.fp8)
            continue
        reasons = [*parts.attention_reasons, *parts.mlp_reasons]
        if terms:
            reasons.append(f"in FP8, {NO_TERMS}")
        if inside:
            reasons.append("in FP8, the MLP must not have a norm before fc2")
        alone = "FP8 requires a block with attention and an MLP, whose norms are of the same kind"
        skipped[name] = "; ".join(reasons or [alone])
    return found, skipped


def as_model_input(model: nn.Module, batch: Tensor) -> Tensor:
    """Moves a batch to the model's device and, if it is floating, to its dtype."""
    return batch.detach().to(device_of(model), dtype_of(model) if batch.is_floating_point() else None)


def calibration_images(model: nn.Module) -> Tensor | None:
    """Returns at most two calibration images of a model; None if it was not calibrated in this process."""
    return as_model_input(model, IMAGES[model][0][:2]) if model in IMAGES else None


def _required(
    copied: nn.Module, blocks: Sequence[EmulatedBlock], scales: Mapping[str, Fp8Scales], batches: Sequence[Tensor],
    wanted: float, always: Mapping[str, Collection[str]],
) -> tuple[Collection[Linear], float]:  # fmt: skip
    """Returns the linear layers, besides `always`, that must stay in half precision for top-1 agreement `wanted`.

    A layer's sensitivity is the change of the logits if this layer alone is rounded. Bisection finds how many of the
    most sensitive layers must stay. Also returns the reached agreement with the model that rounds no layer.
    """
    everything = {name: own.all()._asdict() for name, own in scales.items()}

    def logits(rounded: Collection[Linear], images: Sequence[Tensor] = batches) -> Tensor:
        for block in blocks:
            own = everything[block.name]
            block.scales = BlockScales(**{k: own[k] if (block.name, k) in rounded else None for k in LINEARS})
        with torch.inference_mode():
            outputs = [copied(batch) for batch in images]
        if any(logits_of(output) is None for output in outputs):
            got = tuple(outputs[0].shape) if isinstance(outputs[0], Tensor) else type_name(outputs[0])
            raise ValueError(f"the model must return logits [B, classes] for min_agreement, got {got}")
        return torch.cat([logits_of(output) for output in outputs])  # type: ignore[misc]  # none is None

    linears = [(block.name, k) for block in blocks for k in LINEARS if k not in always[block.name]]
    classes = logits(()).argmax(-1)
    reached: dict[int, float] = {}  # by number of layers kept

    def passes(kept: Collection[Linear]) -> bool:
        found = logits(set(linears) - set(kept)).argmax(-1)
        reached[len(kept)] = (found == classes).double().mean().item()
        return reached[len(kept)] >= wanted

    if passes(()):
        return (), reached[0]
    few = [batch[: IMAGES_FOR_ORDER // 2] for batch in batches[:2]]
    exact = logits((), few)
    damage = {one: (logits((one,), few) - exact).square().sum().item() for one in linears}
    kept = fewest_excluded(sorted(linears, key=lambda one: -damage[one]), passes, len(linears) - 1)
    if kept is None:
        enough = max(reached)
        reason = (
            f"top-1 agreement on {len(classes)} images must be at least {wanted:g}, got {reached[enough]:.4g} with "
            f"{enough} of {len(linears)} linear layers in half precision, and {reached[0]:.4g} with none of them"
        )
        raise UnsupportedInputError(f"fuse with precision='fp8', min_agreement={wanted:g}", [reason])
    return kept, reached[len(kept)]


def logits_of(output: object) -> Tensor | None:
    """Returns the logits [B, classes] in the output of a model; None if it has none."""
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return logits.float() if isinstance(logits, Tensor) and logits.dim() == 2 else None


def unable_reasons(device: torch.device, dtype: torch.dtype | None) -> list[str]:
    """Returns the reasons why a model of this device and dtype cannot run in e4m3."""
    reasons = [] if device.type == "meta" else list(fp8_reasons(device))
    if dtype not in (torch.float16, torch.bfloat16):
        how = "call model.to(torch.bfloat16), or build the model with dtype=torch.bfloat16"
        reasons.append(f"the weights must be float16 or bfloat16, got {dtype}: {how}")
    return reasons


def check_request(model: nn.Module, backend: str, precision: str | None) -> None:
    """Raises an error if the model or the arguments do not permit e4m3. Changes nothing."""
    if precision is None:
        raise ValueError("keep and min_agreement require precision='fp8', got precision=None")
    check_choice("precision", precision, (None, "fp8"))
    reasons = unable_reasons(device_of(model), dtype_of(model))
    if backend not in ("auto", "triton"):
        reasons.append(f"backend must be 'auto' or 'triton', got {backend!r}")
    if model.training:
        reasons.append("the model must be in evaluation mode, because FP8 supports inference only: call eval() first")
    if not any(isinstance(module, Fp8Scales) for module in model.modules()):
        how = "call vit_fast.calibrate(model, images), or load weights that contain FP8 scales"
        reasons.append(f"the model must be calibrated: {how}")
    raise_unsupported(WHAT, reasons)


@dataclass(frozen=True)
class Choice:
    """Layers and blocks that stay in half precision."""

    kept: dict[str, dict[str, str]]  # reasons by block and name of LINEARS
    skipped: dict[str, str]  # reasons by block
    notes: tuple[str, ...] = ()


def choose(model: nn.Module, copied: nn.Module, keep: Iterable[str] | None, min_agreement: float | None) -> Choice:
    """Selects the layers that run in e4m3, with a fused copy of the model; see `fuse` for keep and min_agreement."""
    blocks, skipped = emulate(copied)
    found = {block.name: scales_of(model.get_submodule(block.name)) for block in blocks}
    scales = {name: own for name, own in found.items() if own is not None}
    advice = "must be calibrated: call vit_fast.calibrate(model, images)"
    raise_unsupported(WHAT, [f"{name} {advice}" for name in found if name not in scales])
    if not blocks:
        raise UnsupportedInputError(WHAT, [f"{name}: {why}" for name, why in skipped.items()])
    if keep is None and min_agreement is None:
        kept = {name: dict.fromkeys(own.names_kept(), "selected by an earlier fuse") for name, own in scales.items()}
        return Choice(kept, skipped)
    kept = _kept_by_name(blocks, () if keep is None else keep)
    if min_agreement is None:
        return Choice(kept, skipped)
    if not isinstance(min_agreement, int | float) or not 0 < min_agreement <= 1:
        raise ValueError(f"min_agreement must be in (0, 1], got {min_agreement}")
    if model not in IMAGES:
        raise ValueError("min_agreement requires calibration images: call vit_fast.calibrate(model, images) first")
    images = [as_model_input(model, batch) for batch in IMAGES[model]]  # the model may have been moved
    required, agreement = _required(copied, blocks, scales, images, min_agreement, kept)
    for name, layer in required:
        kept[name][layer] = "required by min_agreement"
    count = sum(map(len, images))
    note = f"top-1 agreement with the unrounded model: {agreement:.1%} on {count} calibration images, in emulated FP8"
    return Choice(kept, skipped, (note,))


def _kept_by_name(blocks: Sequence[EmulatedBlock], keep: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns `Choice.kept` for the layers that match one of the names or shell-style patterns."""
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise TypeError(f"keep must be an iterable of names, such as ('*.fc2',), got {keep!r}")
    kept: dict[str, dict[str, str]] = {block.name: {} for block in blocks}
    for pattern in keep:
        found = [
            (block.name, linear)
            for block in blocks
            for linear, names in block.linears.items()
            if any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        if not found:
            first = ", ".join(name for names in blocks[0].linears.values() for name in names)
            raise ValueError(f"keep must match linear layers of the blocks, such as {first}, got {pattern!r}")
        for name, linear in found:
            kept[name][linear] = "requested by keep"
    return kept


@torch.no_grad()
def switch(model: nn.Module, choice: Choice | None) -> None:
    """Switches only the blocks of `choice` to e4m3. On an error, restores `kept`; the caller restores attributes."""
    owners = [(name, block, own) for name, block in model.named_modules() if (own := scales_of(block)) is not None]
    before = [(own.kept, own.kept.clone()) for _, _, own in owners]
    try:
        for name, block, own in owners:
            kept = None if choice is None else choice.kept.get(name)
            own.active = kept is not None and len(kept) < len(LINEARS)
            if kept is not None:
                own.keep(kept)
            block.__dict__.pop("vit_fast_parts", None)
            if not own.active:
                continue
            parts = block.whole() if isinstance(block, FusedNormMlp) else None
            if parts is None:
                raise UnsupportedInputError(WHAT, [f"the kernels cannot run {name}: fuse(model, 'triton') reports why"])
            if own.qkv.device.type != "meta":
                own.cached_of(parts)
    except BaseException:  # the caller restores attributes, but not the values of tensors
        for tensor, value in before:
            tensor.copy_(value)
        raise


def annotated(rows: Sequence[ModuleReport], choice: Choice, dtype: torch.dtype | None) -> list[ModuleReport]:
    """Adds notes to the rows of the report: layers that run in e4m3, and why other layers do not."""
    half, noted = str(dtype).removeprefix("torch."), []
    for row in rows:
        notes = list(row.notes)
        if row.fused and row.name in choice.kept and "MLP" in row.part:
            kept = choice.kept[row.name]
            notes.append("in e4m3: " + (", ".join(name for name in LINEARS if name not in kept) or "nothing"))
            notes += [f"{name} stays in {half}: {kept[name]}" for name in LINEARS if name in kept]
        elif row.fused and row.name in choice.skipped:
            notes.append(f"stays in {half}: {choice.skipped[row.name]}")
        noted.append(dataclasses.replace(row, notes=tuple(notes)))
    return noted
