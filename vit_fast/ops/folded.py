"""Folds the norms of a block into the weights for inference, and optionally rounds the weights to e4m3 (FP8).

In FP8, qkv and fc1 read x8 = x / s in e4m3; x is the residual stream, s the scale per channel (`vit_fast.calibrate`).
Let mean and rstd be mean and reciprocal standard deviation of a token. Let W and b be weight and bias of qkv or fc1,
gamma and beta those of the preceding norm. `rows` contains a scale per row of W. `reference.fp8_weight` computes
W8 = W gamma s / rows in e4m3. Hence, rows W8 / s is about W gamma, and rows (x8 W8^T) about x (W gamma)^T. Then the
output z of the layer is:

    z = rstd (rows (x8 W8^T) - mean weight_sum) + shift,  weight_sum = rowsum(rows W8 / s),  shift = W beta + b

The term `mean weight_sum` replaces the subtraction of mean from x. A layer whose scale in `BlockScales` is None
stays in half precision. `reference.fp8_block` is the reference for the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import raise_unsupported
from . import reference
from .backends import fp8_reasons
from .block_backward import RESIDUAL, normed_linears, residual_linears
from .descriptions import E4M3, BlockScales, BlockTensors

if TYPE_CHECKING:
    from ..kernels.linear.folding import NormedLinear

_DIVISOR = 16  # rows must be multiples of 16 bytes for tensor cores and TMA descriptors
_FOLDED = [f"{name}_{part}" for name in ("norm1", "norm2", "gate", "inner") for part in ("weight", "bias")]


def fold(
    tensors: BlockTensors, dtype: torch.dtype, norm: str = "layer_norm", rope_head: int = 0, inner_norm: str = "none",
    scales: BlockScales | None = None,
) -> BlockTensors:  # fmt: skip
    """Folds the norms of a block or half into the weights of qkv, fc1 and, after an inner norm, fc2.

    The folded weights have no gradients, and are not updated when the parameters change. A weight is in e4m3 if its
    layer has a scale, else in `dtype`. If rope_head is head_dim D instead of 0, channels j and j + D/2 of q and k
    become adjacent. In this case, pass `interleave(rope, D)` to `fused_block` as rope.

    Raises:
        ValueError: a scale or its reciprocal is not positive and finite.
        UnsupportedInputError: FP8 does not support this block. The message lists all reasons.
    """
    from ..kernels.linear.folding import fold_linears

    if scales is not None:
        _check_fp8(tensors, scales, dtype)
    scale_of = (scales or BlockScales())._asdict()
    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        linears = normed_linears(t, norm, inner_norm, rope_head)
        new: dict[str, Any] = dict.fromkeys(_FOLDED)
        for (name, linear), folded in zip(linears.items(), fold_linears(list(linears.values()), dtype)):
            part = {"weight": folded.weight, "sum": folded.weight_sum}
            if (scale := scale_of[name]) is not None:
                part = _rounded(linear, scale)
            if part["sum"] is None:  # RMSNorm
                part["sum"] = folded.shift.new_empty(0)
            new |= {f"{name}_{key}": tensor for key, tensor in part.items()} | {f"{name}_bias": folded.shift}
        for name, layer in residual_linears(t, linears).items():
            if (scale := scale_of[name]) is None:
                new[f"{name}_weight"] = layer.weight.to(dtype)
                continue
            # the kernel computes layer_scale * rows * (a8 W8^T + bias / rows), with a8 = input / scale in e4m3
            values, rows = reference.fp8_weight(layer.weight, scale)
            new |= {f"{name}_weight": values.to(E4M3), f"{name}_factor": scale.reciprocal().reshape(1)}
            new[f"{name}_bias"] = None if layer.bias is None else layer.bias.float() / rows
            new[RESIDUAL[name]["scale"]] = rows if layer.scale is None else rows * layer.scale.float()
        return t._replace(**new)


def _check_fp8(tensors: BlockTensors, scales: BlockScales, dtype: torch.dtype) -> None:
    reasons = fp8_reasons(tensors.qkv_weight.device)
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"the dtype of the weights must be float16 or bfloat16, got {dtype}")
    for name, scale in scales._asdict().items():
        if scale is None:
            continue
        width = getattr(tensors, f"{name}_weight").shape[1]
        factor = scale.reciprocal()  # kernels multiply by the reciprocal
        if not bool(((scale > 0) & scale.isfinite() & factor.isfinite()).all()):
            got = f"{float(scale.min()):g} to {float(scale.max()):g}: call vit_fast.calibrate again"
            raise ValueError(f"FP8 scales of {name} must be positive and finite, with finite reciprocals, got {got}")
        if width % _DIVISOR:
            reasons.append(
                f"the input width of {name} must be a multiple of {_DIVISOR} in FP8, got {width} "
                f"(to run {name} in half precision, pass its module name in vit_fast.fuse(..., keep=[...]))"
            )
    raise_unsupported("a block in FP8", reasons)


def _rounded(linear: NormedLinear, scale: Tensor) -> dict[str, Any]:
    """Rounds the weight of a layer after a norm to e4m3, with the row order of `kernels/linear/folding.py`."""
    weight = linear.weight
    if linear.gate is not None:
        weight = torch.stack((linear.gate, weight), 1).flatten(0, 1)
    if linear.rope_head:
        qk, v = weight.tensor_split((len(weight) // 3 * 2,))
        weight = torch.cat((qk.unflatten(0, (-1, 2, linear.rope_head // 2)).transpose(1, 2).flatten(0, 2), v))
    values, rows = reference.fp8_weight(weight, scale, linear.gamma)
    sums = None if linear.rms else (values / scale).sum(1).mul(rows).float()
    return {"weight": values.to(E4M3), "sum": sums, "factor": scale.reciprocal().contiguous(), "row_scale": rows}
