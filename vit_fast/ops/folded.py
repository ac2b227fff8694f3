"""Parameters of a block for inference: norms folded into the weights, which may be rounded to e4m3.

With scales s from `vit_fast.calibrate`, a block without qk-norm takes five launches. A kernel that writes the residual
stream x also writes LayerNorm statistics and x8 = x / s in e4m3. With the weight W8 and its scales `rows` from
`reference.fp8_weight`, qkv and fc1 compute

    z = rstd (rows (x8 W8^T) - mean weight_sum) + shift,  weight_sum = rowsum(rows W8 / s)

so the mean is multiplied by the same rounded weight as x. A layer without s stays in half precision. The reference is
`reference.fp8_block`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from . import reference
from .backends import fp8_reasons
from .block_backward import normed_linears
from .descriptions import E4M3, BlockScales, BlockTensors

if TYPE_CHECKING:
    from ..kernels.linear.folding import NormedLinear

_HALF = (torch.float16, torch.bfloat16)
_DIVISOR = 16  # rows must be multiples of 16 bytes for tensor cores and TMA descriptors
_DROPPED_BY_FOLD = [f"{name}_{part}" for name in ("norm1", "norm2", "gate", "inner") for part in ("weight", "bias")]


def fold(
    tensors: BlockTensors, dtype: torch.dtype, norm: str = "layer_norm", rope_head: int = 0, inner_norm: str = "none"
) -> BlockTensors:
    """Folds the norms of a block into the weights of qkv, fc1 and, with a norm inside the MLP, fc2.

    The folded weights are not updated when the parameters change, and have no gradients. If rope_head is head_dim D,
    channels j and j + D/2 of q and k become adjacent; then pass the result of `interleave` to `fused_block`.
    """
    from ..kernels.linear.folding import fold_linears

    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        linears = normed_linears(t, norm, inner_norm, rope_head)
        folded: dict[str, Any] = {"proj_weight": t.proj_weight.to(dtype), "fc2_weight": t.fc2_weight.to(dtype)}
        for name, linear in zip(linears, fold_linears(list(linears.values()), dtype)):
            folded |= _folded(name, linear.weight, linear.weight_sum, linear.shift)
        return t._replace(**dict.fromkeys(_DROPPED_BY_FOLD), **folded)


def quantize_block(
    tensors: BlockTensors, scales: BlockScales, dtype: torch.dtype, norm: str = "layer_norm", rope_head: int = 0
) -> BlockTensors:
    """Folds the norms as `fold` does, folds LayerScale, and rounds the weights of layers with a scale to e4m3.

    `dtype` is that of the activations and of weights that are not quantized.

    Raises:
        ValueError: the shape or a value of a scale is invalid.
        UnsupportedInputError: FP8 cannot run this block; lists all reasons.
    """
    reasons = fp8_reasons(tensors.qkv_weight.device)
    if dtype not in _HALF:
        reasons.append(f"dtype must be float16 or bfloat16, got {dtype}")
    if others := [name for name, tensor in list(tensors._asdict().items())[16:] if tensor is not None]:
        reasons.append(f"{', '.join(others)} must be None: FP8 supports neither folded blocks nor norms inside the MLP")
    for name, scale in scales._asdict().items():
        weight = getattr(tensors, f"{name}_weight")
        if scale is None:
            continue
        _check_scale(name, scale, (weight.shape[1],) if name in ("qkv", "fc1") else ())
        if weight.shape[1] % _DIVISOR:
            reasons.append(
                f"the input width of {name} must be a multiple of {_DIVISOR} in FP8, got {weight.shape[1]} "
                f"(scales.{name}=None keeps it in half precision)"
            )
    if reasons:
        raise UnsupportedInputError("a block in FP8", reasons)
    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        linears = normed_linears(t, norm, "none", rope_head)
        return BlockTensors(
            **_after_norm("qkv", linears["qkv"], scales.qkv, dtype),
            **_before_residual("proj", t.proj_weight, t.proj_bias, "scale1", t.scale1, scales.proj, dtype),
            **_after_norm("fc1", linears["fc1"], scales.fc1, dtype),
            **_before_residual("fc2", t.fc2_weight, t.fc2_bias, "scale2", t.scale2, scales.fc2, dtype),
        )


def _check_scale(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(scale.shape) != shape:
        raise ValueError(f"scales.{name} must have shape {shape}, got {tuple(scale.shape)}")
    factor = scale.reciprocal()  # kernels multiply by the reciprocal
    if not bool(((scale > 0) & scale.isfinite() & factor.isfinite()).all()):
        raise ValueError(f"scales.{name} must be positive and finite, with finite reciprocals, got "
                         f"{float(scale.min()):g} to {float(scale.max()):g}")  # fmt: skip


def _folded(name: str, weight: Tensor, weight_sum: Tensor | None, shift: Tensor) -> dict[str, Any]:
    sums = shift.new_empty(0) if weight_sum is None else weight_sum
    return {f"{name}_weight": weight, f"{name}_bias": shift, f"{name}_sum": sums}


def _after_norm(name: str, linear: NormedLinear, scale: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    if scale is None:
        from ..kernels.linear.folding import fold_linear

        folded = fold_linear(linear, dtype)
        return _folded(name, folded.weight, folded.weight_sum, folded.shift)
    weight = linear.weight
    shift = weight.new_zeros(weight.shape[0], dtype=torch.float64) if linear.bias is None else linear.bias.double()
    if linear.gate is not None:
        of_gate = torch.zeros_like(shift) if linear.gate_bias is None else linear.gate_bias.double()
        weight, shift = torch.stack((linear.gate, weight), 1).flatten(0, 1), torch.stack((of_gate, shift), 1).flatten()
    if linear.rope_head:
        weight, shift = _interleaved(weight, linear.rope_head), _interleaved(shift, linear.rope_head)
    if linear.beta is not None:
        shift = shift + weight.double() @ linear.beta.double()
    values, rows = reference.fp8_weight(weight, scale, linear.gamma)
    sums = None if linear.rms else (values / scale).sum(1).mul(rows).float()
    of_fp8 = {f"{name}_factor": scale.reciprocal().contiguous(), f"{name}_row_scale": rows}
    return _folded(name, values.to(E4M3), sums, shift.float()) | of_fp8


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Permutes [3 H D, ...] so that rows j and j + D/2 of each head of q and k are adjacent, as `fold` does."""
    of_qk = rows.shape[0] // 3 * 2
    heads = rows[:of_qk].unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((heads, rows[of_qk:]))


def _before_residual(
    name: str, weight: Tensor, bias: Tensor | None, scale_name: str, layer_scale: Tensor | None, scale: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Quantizes proj or fc2, which compute layer_scale * rows * (a W8^T + bias / rows)."""
    if scale is None:
        vectors = {f"{name}_bias": bias, scale_name: layer_scale}
        return {f"{name}_weight": weight.to(dtype).contiguous()} | vectors
    values, rows = reference.fp8_weight(weight, scale)
    return {
        f"{name}_weight": values.to(E4M3),
        f"{name}_bias": None if bias is None else bias.float() / rows,
        scale_name: rows if layer_scale is None else rows * layer_scale.float(),
        f"{name}_factor": scale.reciprocal().reshape(1),
    }
