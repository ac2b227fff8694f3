"""Linear layers fused with the neighboring operations of a block: forward and backward as sequences of launches.

Forward: `layer_norm_linear` (LayerNorm, linear, activation) and `linear_residual` (linear, LayerScale, residual).
Backward: `matmul_gradient` and `gradients.layer_norm_gradient` for attention, `activation_gradient` and
`input_gradient` for the MLP, `weight_matmuls.py` and `weight_gradients.py` for parameters. Matrices must be contiguous.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..device import gpu_of, starts_early
from ..launch import ceil_div
from ..layer_norm import NormInput, layer_norm_statistics_launch, new_statistics
from ..matmul.matmul_launch import HeadStep, Operands, matmul_launch
from ..matmul.matmul_policy import matmul_config, residual_config, rows_in_whole_waves
from .folding import FoldedLinear
from .scaled_weights import ScaledWeight
from .split_k import finish_residual_launch


def run_matmul(operands: Operands, epilogue: str, activation: str = "identity") -> None:
    config = matmul_config(operands, epilogue, activation)
    matmul_launch(operands, epilogue=epilogue, config=config, activation=activation).run()


def layer_norm_linear(
    x: NormInput, folded: FoldedLinear, activation: str = "identity", gated: bool = False,
    head_step: HeadStep | None = None, out_part: Tensor | None = None, dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None, saves: bool = False,
) -> tuple[Tensor, Tensor, NormInput]:  # fmt: skip
    """Returns act(LayerNorm(x) W^T + b) [M, F], or act(g) u [M, F / 2] if gated (`folding.py` defines g and u).

    Also returns two inputs of the backward, valid only if `saves`: z before the activation, and x with its statistics.

    Args:
        head_step: Norms and rotary embeddings that the epilogue applies to q and k.
        out_part: Output: LayerNorm statistics of the result (`row_parts.py`).
        dtype: Dtype of the result; None means the dtype of `x.source`.
        out_scale: For a result in e4m3: the reciprocal scale, which multiplies the result before rounding, fp32 [1].
    """
    (M, _), F = x.source.shape, folded.weight.shape[0]
    out, z, mean, rstd = x.source.new_empty((M, F // (2 if gated else 1)), dtype=dtype), None, None, None
    if saves and (activation != "identity" or gated):
        z = x.source.new_empty((M, F))
    if saves and x.part is not None:
        statistics = torch.empty(2, M, dtype=torch.float32, device=out.device)
        mean, rstd = statistics
    operands = Operands(
        x.source, folded.weight, out, b_is_nk=True, z=z, mean=mean, rstd=rstd, row_part=x.part, eps=x.eps,
        bias=folded.shift, weight_sum=folded.weight_sum, scale=folded.scale, out_scale=out_scale,
        head_step=head_step, out_part=out_part if gated else None,
    )  # fmt: skip
    run_matmul(operands, "gated" if gated else head_step.epilogue if head_step else "layer_norm", activation)
    if out_part is not None and not gated:  # without a gate, the epilogue would spill if it also computed statistics
        layer_norm_statistics_launch(out, out_part).run()
    return out, out if z is None else z, x if mean is None else NormInput(x.source, statistics)


def linear_residual(
    h: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, residual: Tensor | None,
    statistics: bool = False, dtype: torch.dtype | None = None, out8: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns y = [residual +] scale (h W^T + b) [M, C], and the LayerNorm statistics of y (`row_parts.py`) or None.

    Args:
        residual: [M, C], fp32 or half precision; y has the dtype of the residual.
        statistics: Also return LayerNorm statistics; y must be half precision.
        dtype: Dtype of y if there is no residual; None means the dtype of h.
        out8: Output: y in e4m3 [M, C].
        out_scale: For out8: reciprocal scales, which multiply y before rounding to e4m3, fp32 [C].
    """
    M, C = h.shape[0], weight.shape[0]
    bias, scale = (vector if vector is None else vector.contiguous() for vector in (bias, scale))
    dtype = dtype or h.dtype if residual is None else residual.dtype
    row_part = new_statistics(M, C, h.device) if statistics else None
    out = torch.empty(M, C, dtype=dtype, device=h.device)
    operands = Operands(
        h, weight, out, b_is_nk=True, residual=residual, bias=bias, scale=scale, out_part=row_part, out8=out8,
        out_scale=out_scale,
    )  # fmt: skip
    first = rows_in_whole_waves(operands)
    for rows in (slice(0, first), slice(first, M)) if first < M else (slice(0, M),):
        o = operands if first == M else operands.of_rows(rows)
        config, splits = residual_config(o)
        if splits == 1:
            matmul_launch(o, epilogue="residual", config=config).run()
        else:
            part = torch.empty(splits, *o.out.shape, dtype=torch.float32, device=o.out.device)
            partial = Operands(o.a, o.b, part, b_is_nk=True)
            matmul_launch(partial, epilogue="partial", config=config, split_k=splits).run()
            finish_residual_launch(part, o, dependent=starts_early(gpu_of(o.out.device).arch)).run()
    return out, row_part


def activation_gradient(
    grad: Tensor, scaled: ScaledWeight, z: Tensor, x: NormInput, folded: FoldedLinear, activation: str,
    gated: bool = False, hidden: Tensor | None = None, along: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of fc2 and the activation: returns dz~, row_part, column_part and h.

    z is the output of fc1. h = act(z), or act(g) u if gated. `x` is the input of the LayerNorm of fc1, and has the
    statistics mean and rstd.

    - dz~ [M, columns of z]: rstd dz, where dz is the gradient of z. It is dz if x was fp32, and in constant rows of x.
    - row_part, fp32 [M, parts], contains partial sums of dz * (z - c) over the columns of z. `folding.py` defines c.
    - column_part, fp32 [parts of M, 2, columns of z], contains partial sums over M of dz and of dz~ * mean.

    `grad` is dy [M, C], the gradient of the MLP's output after LayerScale. `scaled` is diag(LayerScale) W2 [C, F] with
    the weight W2 of fc2. If a norm lies between h and fc2 (`hidden_norm.py`), W2 is the folded weight, and the last
    result is the normalized h. Then also pass `hidden` (mean and rstd of h, fp32 [2, M]), and `along` (fp32 [M]) from
    `hidden_norm.along_rows`.
    """
    (M, width), F = z.shape, scaled.weight.shape[1]
    out, h = torch.empty_like(z), z.new_empty((M, F))
    epilogue = "gated_grad" if gated else "activation_grad"
    operands = Operands(
        grad, scaled.weight, out, z=z, h=h, mean=x.mean, rstd=x.rstd, bias=folded.shift, scale=scaled.factor,
        hidden=hidden, along=along,
    )  # fmt: skip
    config = matmul_config(operands, epilogue)
    row_part = torch.empty(M, ceil_div(F, config.sub_tile_width), dtype=torch.float32, device=z.device)
    column_part = torch.empty(ceil_div(M, config.block_m), 2, width, dtype=torch.float32, device=z.device)
    operands = replace(operands, row_part=row_part, column_part=column_part)
    matmul_launch(operands, epilogue=epilogue, config=config, activation=activation).run()
    return out, row_part, column_part, h


def input_gradient(
    scaled: Tensor, row_part: Tensor, x: NormInput, folded: FoldedLinear, residual: Tensor | None, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns [residual +] dx [M, C] in `x.input_dtype`, and if `rounded`, a copy in the dtype of `x.source`.

    Without a copy, both results are the same tensor. `scaled` (dz~) and `row_part` are from `activation_gradient`.
    """
    out = torch.empty_like(x.source, dtype=x.input_dtype)
    narrow = torch.empty_like(x.source) if rounded and out.dtype != x.source.dtype else None
    operands = Operands(
        scaled, folded.weight, out, x=x.source, residual=residual, mean=x.mean,
        rstd=x.rstd, row_part=row_part, h=narrow,
    )  # fmt: skip
    run_matmul(operands, "layer_norm_grad")
    return out, out if narrow is None else narrow


def matmul_gradient(grad: Tensor, scaled: ScaledWeight) -> Tensor:
    """Returns grad diag(LayerScale) W, the gradient of the input of qkv or proj. LayerScale may be absent."""
    out = torch.empty(grad.shape[0], scaled.weight.shape[1], dtype=grad.dtype, device=grad.device)
    run_matmul(Operands(grad, scaled.weight, out, scale=scaled.factor), "residual")
    return out
