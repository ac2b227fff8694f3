"""A pre-norm encoder block with linear layers in e4m3 as one operator for inference: `vit_fast::block_fp8`.

`quantize_block` quantizes the parameters with scales from `vit_fast.calibrate`, `fused_block_fp8` runs the block, and
`reference.fp8_block` is the reference.

Without qk-norm, a block takes five launches. A kernel that writes the residual stream x also writes LayerNorm
statistics and x8: x / s in e4m3, with s from `BlockScales`. LayerNorms are folded into the weights. With W8 and the row
scales `scale` from `reference.fp8_weight`, qkv and fc1 compute

    z = rstd (scale (x8 W8^T) - mean weight_sum) + shift,  weight_sum = rowsum(scale W8 / s)

so the mean is multiplied by the same rounded weight as x. A layer without s stays in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from ..kernels.row_parts import row_parts
from . import reference
from .attention_op import attention_flop
from .attention_op import unsupported_reasons as attention_reasons
from .backends import fp8_reasons
from .block import checked_qk
from .block_backward import SETTINGS, BlockSettings, normed_linears
from .descriptions import BlockScales, BlockTensors, QkNorm, Rope, as_matrix, count_tokens, interleave
from .registration import operator, text_of
from .rotary import QkTensors, qkv_step

if TYPE_CHECKING:
    from ..kernels.layer_norm import InputRows
    from ..kernels.linear.folding import FoldedLinear, NormedLinear

E4M3 = torch.float8_e4m3fn
_HALF = (torch.float16, torch.bfloat16)
_DIVISOR = 16  # rows must be multiples of 16 bytes for tensor cores and TMA descriptors
_WHAT = "a block in FP8"


class Fp8Linear(NamedTuple):
    """Tensors of a linear layer, as the matmul kernel reads them."""

    weight: Tensor  # [F, K] in e4m3, or in half precision if it is not quantized
    # qkv and fc1: c of `kernels/linear/folding.py`, fp32 [F]. proj and fc2: the bias, divided by the row scales
    shift: Tensor | None
    scale: Tensor | None  # multiplier of the matmul's result [F]: row scales times LayerScale of proj and fc2
    weight_sum: Tensor | None  # after a LayerNorm, row sums of the weight that multiplies x, fp32 [F]
    # 1 / s above, fp32 [C] for qkv and fc1, [1] for proj and fc2; None if the layer is not quantized
    operand_factor: Tensor | None


class Fp8Block(NamedTuple):
    """The parameters of a block for `fused_block_fp8`, with folded norms and LayerScales.

    If rope_head is head_dim D, rows of channels j and j + D/2 of q and k are adjacent, so that the matmul can apply
    rotary embeddings. Rows of fc1 and of the gate alternate.
    """

    qkv: Fp8Linear
    proj: Fp8Linear
    fc1: Fp8Linear
    fc2: Fp8Linear
    rope_head: int = 0


def quantize_block(
    tensors: BlockTensors, scales: BlockScales, dtype: torch.dtype, norm: str = "layer_norm", rope_head: int = 0
) -> Fp8Block:
    """Folds the norms into qkv and fc1, and rounds the weights of layers with a scale to e4m3.

    The result is not updated when the parameters change, and has no gradients. `dtype` is that of the activations and
    of weights that are not quantized. rope_head is head_dim for rotary embeddings of layout "half" without qk-norm over
    the width, otherwise 0. Without any qk-norm, the matmul then rotates q and k if all heads share the tables.

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
        raise UnsupportedInputError(_WHAT, reasons)
    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        linears = normed_linears(t, norm, "none", rope_head)
        qkv, fc1 = (_after_norm(linears[name], getattr(scales, name), dtype) for name in ("qkv", "fc1"))
        proj = _before_residual(t.proj_weight, t.proj_bias, t.scale1, scales.proj, dtype)
        fc2 = _before_residual(t.fc2_weight, t.fc2_bias, t.scale2, scales.fc2, dtype)
        return Fp8Block(qkv, proj, fc1, fc2, rope_head)


def _check_scale(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(scale.shape) != shape:
        raise ValueError(f"scales.{name} must have shape {shape}, got {tuple(scale.shape)}")
    factor = scale.reciprocal()  # kernels multiply by the reciprocal
    if not bool(((scale > 0) & scale.isfinite() & factor.isfinite()).all()):
        raise ValueError(f"scales.{name} must be positive and finite, with finite reciprocals, got "
                         f"{float(scale.min()):g} to {float(scale.max()):g}")  # fmt: skip


def _after_norm(linear: NormedLinear, scale: Tensor | None, dtype: torch.dtype) -> Fp8Linear:
    if scale is None:
        from ..kernels.linear.folding import fold_linear

        folded = fold_linear(linear, dtype)
        return Fp8Linear(folded.weight, folded.shift, None, folded.weight_sum, None)
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
    return Fp8Linear(values.to(E4M3), shift.float(), rows, sums, scale.reciprocal().contiguous())


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Permutes [3 H D, ...] so that rows j and j + D/2 of each head of q and k are adjacent, as `fold` does."""
    of_qk = rows.shape[0] // 3 * 2
    heads = rows[:of_qk].unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((heads, rows[of_qk:]))


def _before_residual(
    weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Fp8Linear:
    """Quantizes proj or fc2, which compute layer_scale * rows * (a W8^T + bias / rows)."""
    if scale is None:
        shift, factor = (vector if vector is None else vector.contiguous() for vector in (bias, layer_scale))
        return Fp8Linear(weight.to(dtype).contiguous(), shift, factor, None, None)
    values, rows = reference.fp8_weight(weight, scale)
    factor = rows if layer_scale is None else rows * layer_scale.float()
    shift = None if bias is None else bias.float() / rows
    return Fp8Linear(values.to(E4M3), shift, factor, None, scale.reciprocal().reshape(1))


def fused_block_fp8(
    x: Tensor,
    x8: Tensor | None,
    statistics: Tensor | None,
    block: Fp8Block,
    next_factor: Tensor | None,
    *,
    heads: int,
    attention_scale: float | None,
    eps: tuple[float, float],
    activation: str,
    qk_norm: QkNorm | None = None,
    rope: Rope | None = None,
    next_statistics: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs a block in FP8, without gradients; optionally accepts and returns tokens in e4m3 and LayerNorm statistics.

    Args:
        x: [B, N, C]; fp16 or bf16.
        x8: x times block.qkv.operand_factor in e4m3, from the previous block; computed if None.
        block: Result of `quantize_block` with dtype x.dtype.
        next_factor: The qkv.operand_factor of the next block, fp32 [C], which multiplies the output. None if the next
            block reads half precision.
        statistics, heads, attention_scale, eps, activation, qk_norm, rope, next_statistics: See `fused_block`.
    Returns:
        Output y [B, N, C] in x.dtype; y times next_factor in e4m3, or None; and the LayerNorm statistics of y, or None.
    Raises:
        UnsupportedInputError: FP8 cannot run this input; lists all reasons.
    """
    width = block.qkv.weight.shape[0]
    if any(linear.weight.device != x.device for linear in block[:4]):  # before torch dispatches to one of the devices
        raise UnsupportedInputError(_WHAT, _unsupported_reasons(x, block[:4]))
    if attention_scale is None:
        attention_scale = (width // (3 * heads)) ** -0.5
    if block.rope_head:
        if rope is None or rope.layout != "half" or (qk_norm is not None and qk_norm.over == "width"):
            reason = (
                f"rope_head={block.rope_head} requires rope of layout 'half' and no qk-norm over the width: "
                "quantize the block with rope_head=0"
            )
            raise UnsupportedInputError(_WHAT, [reason])
        rope = interleave(rope, block.rope_head)
    of_qk, qk, prefix = checked_qk(x, width, heads, qk_norm, rope, block.rope_head > 0)
    words = text_of("", activation, qk.norm, qk.over, qk.layout, "none", True, next_statistics, False, x.dtype)
    tensors = [x8, statistics, next_factor, *block.qkv, *block.proj, *block.fc1, *block.fc2, *of_qk[:6]]
    outputs = _block_fp8_kernel(x, tensors, heads, attention_scale, prefix, 0, *eps, qk.eps, 0.0, words)
    return outputs[0], None if next_factor is None else outputs[1], outputs[-1] if next_statistics else None


def _unsupported_reasons(x: Tensor, linears: Sequence[Fp8Linear]) -> list[str]:
    """Returns all reasons why the kernels cannot run on x [B, N, C] with qkv, proj, fc1 and fc2."""
    reasons, C = fp8_reasons(x.device), x.shape[-1]
    if x.dtype not in _HALF:
        reasons.append(f"x must be float16 or bfloat16, got {x.dtype}")
    for name, linear in zip(BlockScales._fields, linears):
        if linear.weight.dtype not in (E4M3, x.dtype):
            reasons.append(f"{name} must be {x.dtype} like x, got {linear.weight.dtype}: quantize the block again")
        if linear.weight.device != x.device:
            reasons.append(f"{name} must be on {x.device} like x, got {linear.weight.device}")
    if linears[0].weight.shape[1] != C:
        reasons.append(f"x must have {linears[0].weight.shape[1]} channels like qkv's weight, got {C}")
    return reasons


def _linears(tensors: Sequence[Any]) -> list[Fp8Linear]:
    return [Fp8Linear._make(tensors[first : first + 5]) for first in range(3, 23, 5)]


def _block_forward(x: Tensor, tensors: Sequence[Tensor | None], *settings: Any) -> list[Tensor]:
    """Runs a block on x [B, N, C]; returns y and, if requested, y in e4m3 and the LayerNorm statistics of y.

    `tensors` are x8, statistics, next_factor, four `Fp8Linear`, and the first six tensors of `QkTensors`.
    """
    from ..kernels.attention.attention import attention_forward
    from ..kernels.linear.linear import layer_norm_linear, linear_residual

    x8, statistics, next_factor = tensors[:3]
    linears = qkv, proj, fc1, fc2 = _linears(tensors)
    s = BlockSettings.read(settings)
    if reasons := _unsupported_reasons(x, linears):
        raise UnsupportedInputError(_WHAT, reasons)
    step = qkv_step(QkTensors(*tensors[23:]), s.qk, s.prefix, qkv.weight.shape[0] // (3 * s.heads), True)
    rows, dtype = as_matrix(x), x.dtype
    first = _first_operand(rows, x8, statistics, qkv.operand_factor, s.eps1)
    flat = layer_norm_linear(first, _folded(qkv), head_step=step.for_matmul(x.shape[1]), dtype=dtype)
    packed = flat.view(*x.shape[:-1], 3, s.heads, step.head_dim)
    q, k, v = step.forward(packed)[0].transpose(1, 3).unbind(2)
    if reasons := attention_reasons(q, k, v, s.scale):
        raise UnsupportedInputError(_WHAT, reasons)
    mixed = torch.empty_like(packed[:, :, 0], dtype=_operand_dtype(proj, dtype), memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    attention_forward(q, k, v, mixed.transpose(1, 2), lse, s.scale, proj.operand_factor)
    between8 = None if fc1.operand_factor is None else torch.empty_like(rows, dtype=E4M3)
    between, statistics2 = linear_residual(
        as_matrix(mixed.flatten(2)), proj.weight, proj.shift, proj.scale, rows, True, out8=between8,
        out_scale=fc1.operand_factor,
    )  # fmt: skip
    gated = fc1.weight.shape[0] != fc2.weight.shape[1]
    h = layer_norm_linear(
        _input_rows(between if between8 is None else between8, statistics2, s.eps2), _folded(fc1), s.activation, gated,
        dtype=_operand_dtype(fc2, dtype), out_scale=fc2.operand_factor,
    )  # fmt: skip
    y8 = None if next_factor is None else torch.empty_like(x, dtype=E4M3, memory_format=torch.contiguous_format)
    y, emitted = linear_residual(
        h, fc2.weight, fc2.shift, fc2.scale, between, s.next_statistics,
        out8=None if y8 is None else as_matrix(y8), out_scale=next_factor,
    )  # fmt: skip
    return [y.view(x.shape), *(tensor for tensor in (y8, emitted) if tensor is not None)]


def _first_operand(
    rows: Tensor, x8: Tensor | None, statistics: Tensor | None, factor: Tensor | None, eps: float
) -> InputRows:
    """Returns the input of the first matmul; one kernel computes x8 and statistics unless they were passed in."""
    from ..kernels.layer_norm import new_statistics, row_statistics_launch

    x8 = None if x8 is None or factor is None else as_matrix(x8)
    if statistics is None or (factor is not None and x8 is None):
        statistics = new_statistics(rows.shape[0], rows.shape[1], rows.device)
        x8 = None if factor is None else torch.empty_like(rows, dtype=E4M3)
        row_statistics_launch(rows, statistics, x8, factor).run()
    return _input_rows(rows if x8 is None else x8, statistics, eps)


def _input_rows(source: Tensor, statistics: Tensor | None, eps: float) -> InputRows:
    from ..kernels.layer_norm import InputRows

    assert statistics is not None, "half-precision tokens must have statistics"
    return InputRows(source, statistics, eps)


def _folded(linear: Fp8Linear) -> FoldedLinear:
    from ..kernels.linear.folding import FoldedLinear

    assert linear.shift is not None, "a folded layer has a shift"
    return FoldedLinear(linear.weight, linear.weight_sum, linear.shift, linear.scale)


def _operand_dtype(linear: Fp8Linear, dtype: torch.dtype) -> torch.dtype:
    return dtype if linear.operand_factor is None else E4M3


def _fake(x: Tensor, tensors: Sequence[Tensor | None], *settings: Any) -> list[Tensor]:
    outputs = [x.new_empty(x.shape)]
    if tensors[2] is not None:
        outputs.append(x.new_empty(x.shape, dtype=E4M3))
    if BlockSettings.read(settings).next_statistics:
        rows = x.shape[0] * x.shape[1]
        outputs.append(x.new_empty((rows, 2, row_parts(x.shape[-1])), dtype=torch.float32))
    return outputs


def _flop(x: Any, tensors: Any, *settings: Any) -> int:
    linears, tokens = _linears(tensors), int(x[-2])
    matmuls = sum(2 * count_tokens(x) * int(linear.weight[0]) * int(linear.weight[1]) for linear in linears)
    images = count_tokens(x) // max(tokens, 1)
    return matmuls + attention_flop(images, 1, tokens, tokens, int(linears[1].weight[1]))


_block_fp8_kernel = operator(
    "block_fp8", f"(Tensor x, Tensor?[] tensors, {SETTINGS}) -> Tensor[]", _block_forward,
    what=_WHAT, fake=_fake, flop=_flop, cached=4,
)  # fmt: skip
