"""`fuse(model, precision="fp8")`: selects the blocks that run in e4m3, and the layers that stay in half precision."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..blocks.fp8_scales import LINEARS, PLACE, Fp8Scales, scales_of
from ..blocks.fused import FusedNormMlp, device_of, dtype_of
from ..blocks.fusion_report import ModuleReport
from ..errors import UnsupportedInputError, check_choice
from ..ops.backends import fp8_reasons
from .fp8_emulation import IMAGES, as_taken, emulate, find_kept

WHAT = "fuse with precision='fp8'"


def unable_reasons(device: torch.device, dtype: torch.dtype | None) -> list[str]:
    """Returns the reasons why a model of this device and dtype cannot run in e4m3."""
    reasons = [] if device.type == "meta" else list(fp8_reasons(device))
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(
            f"the weights must be float16 or bfloat16, got {dtype}: call model.to(torch.bfloat16), or build the model "
            "with dtype=torch.bfloat16"
        )
    return reasons


def check_request(
    model: nn.Module, backend: str, precision: str | None, keep: Iterable[str] | None, min_agreement: float | None
) -> None:
    """Raises an error with all reasons if the model cannot run in e4m3. Nothing has been changed by then."""
    if precision is None:
        raise ValueError("keep and min_agreement require precision='fp8', got precision=None")
    check_choice("precision", precision, (None, "fp8"))
    reasons = unable_reasons(device_of(model), dtype_of(model))
    if backend not in ("auto", "triton"):
        reasons.append(f"backend must be 'auto' or 'triton', got {backend!r}")
    if model.training:
        reasons.append("the model must be in evaluation mode, because e4m3 supports inference only: call eval() first")
    if not any(isinstance(module, Fp8Scales) for module in model.modules()):
        reasons.append(
            "the model must be calibrated: call vit_fast.calibrate(model, images), or load weights that contain scales"
        )
    if reasons:
        raise UnsupportedInputError(WHAT, reasons)


@dataclass(frozen=True)
class Choice:
    """Reasons why layers stay in half precision, by block and name of LINEARS, and why whole blocks do."""

    kept: dict[str, dict[str, str]]
    skipped: dict[str, str]
    notes: tuple[str, ...] = ()


def choose(model: nn.Module, copied: nn.Module, keep: Iterable[str] | None, min_agreement: float | None) -> Choice:
    """Selects the layers that run in e4m3, by a fused copy of the model; see `fuse` for keep and min_agreement."""
    blocks, skipped = emulate(copied)
    scales = {block.name: scales_of(model.get_submodule(block.name)) for block in blocks}
    advice = "must be calibrated: call vit_fast.calibrate(model, images)"
    without = [f"{name} {advice}" for name, own in scales.items() if own is None]
    if without or not blocks:
        raise UnsupportedInputError(WHAT, without or [f"{name}: {why}" for name, why in skipped.items()])
    if keep is None and min_agreement is None:
        kept = {name: dict.fromkeys(own.names_kept(), "saved with the scales") for name, own in scales.items() if own}
        return Choice(kept, skipped)
    asked = _kept_by_name({block.name: block.linears for block in blocks}, () if keep is None else keep)
    kept = {name: dict.fromkeys(layers, "requested by keep") for name, layers in asked.items()}
    if min_agreement is None:
        return Choice(kept, skipped)
    if not isinstance(min_agreement, int | float) or not 0 < min_agreement <= 1:
        raise ValueError(f"min_agreement must be in (0, 1], got {min_agreement}")
    if model not in IMAGES:
        raise ValueError("min_agreement requires calibration images: call vit_fast.calibrate(model, images) first")
    everything = {name: own.all() for name, own in scales.items() if own}
    images = [as_taken(model, batch) for batch in IMAGES[model]]  # the model may have been converted or moved since
    required, agreement = find_kept(copied, blocks, everything, images, min_agreement, asked)
    for name, layer in required:
        kept[name][layer] = "required by min_agreement"
    count = sum(map(len, images))
    note = f"top-1 agreement of {agreement:.1%} on {count} calibration images, computed by the reference"
    return Choice(kept, skipped, (note,))


@torch.no_grad()
def switch(model: nn.Module, choice: Choice | None) -> None:
    """Switches exactly these blocks of a fused model to e4m3. On an error, some attributes may have changed."""
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
                raise UnsupportedInputError(WHAT, [f"the kernels cannot run {name} as one operator"])
            if own.qkv.device.type != "meta":
                own.cached_of(parts)
    except BaseException:  # the caller restores attributes, but not the values of tensors
        for tensor, value in before:
            tensor.copy_(value)
        raise


def touched(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose attributes `switch` changes."""
    blocks = [module for module in model.modules() if isinstance(module._modules.get(PLACE), Fp8Scales)]
    return blocks + [module for module in model.modules() if isinstance(module, Fp8Scales)]


def annotated(rows: Sequence[ModuleReport], choice: Choice, dtype: torch.dtype | None) -> list[ModuleReport]:
    """Adds notes to the rows of the report: layers that run in e4m3, and the reasons why others do not."""
    half = str(dtype).removeprefix("torch.")

    def notes(row: ModuleReport) -> list[str]:
        if row.fused and row.name in choice.kept and "MLP" in row.part:
            kept = choice.kept[row.name]
            inside = ", ".join(name for name in LINEARS if name not in kept)
            stay = [f"{name} stays in {half}: {kept[name]}" for name in LINEARS if name in kept]
            return [f"in e4m3: {inside or 'nothing'}", *stay]
        return [f"stays in {half}: {choice.skipped[row.name]}"] if row.fused and row.name in choice.skipped else []

    return [dataclasses.replace(row, notes=(*row.notes, *notes(row))) for row in rows]


def _kept_by_name(linears: Mapping[str, Mapping[str, Sequence[str]]], keep: Iterable[str]) -> dict[str, set[str]]:
    """Returns, by block, the names of LINEARS whose layers match one of the names or shell-style patterns."""
    if isinstance(keep, str):
        raise TypeError(f"keep must be a sequence of names, got {keep!r}: pass ({keep!r},)")
    keep = list(keep) if isinstance(keep, Iterable) else [keep]
    if not all(isinstance(pattern, str) for pattern in keep):
        raise TypeError(f"keep must contain names of linear layers or patterns, got {keep!r}")
    kept: dict[str, set[str]] = {block: set() for block in linears}
    for pattern in keep:
        found = [
            (block, linear)
            for block, layers in linears.items()
            for linear, names in layers.items()
            if any(fnmatch.fnmatchcase(name, pattern) for name in names)
        ]
        if not found:
            first = ", ".join(name for names in next(iter(linears.values())).values() for name in names)
            raise ValueError(f"keep must match linear layers of the blocks, such as {first}, got {pattern!r}")
        for block, linear in found:
            kept[block].add(linear)
    return kept
