"""Linear layers fused with the neighboring operations of a block: forward and backward as sequences of launches.

Forward: `layer_norm_linear` (LayerNorm, linear, activation) and `linear_residual` (linear, LayerScale, residual).
Backward: `matmul_gradient` and `gradients.layer_norm_gradient` for attention, `activation_gradient` and
`input_gradient` for the MLP, `weight_matmuls.py` and `weight_gradients.py` for parameters. Matrices must be contiguous.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device import gpu_of, starts_early
from ..launch import ceil_div
from ..layer_norm import NormInput, layer_norm_statistics_launch
from ..matmul import forward_epilogues as forward
from ..matmul.forward_epilogues import BranchOutput, FoldedNorm
from ..matmul.gradient_epilogues import activation_grad_epilogue, layer_norm_grad_epilogue
from ..matmul.matmul_launch import Matmul, matmul_launch
from ..matmul.matmul_policy import matmul_config, residual_config, rows_in_whole_waves
from .folding import FoldedLinear
from .scaled_weights import ScaledWeight
from .split_k import finish_residual_launch


def run_matmul(matmul: Matmul) -> None:
    matmul_launch(matmul, matmul_config(matmul)).run()


def layer_norm_linear(
    x: NormInput, folded: FoldedLinear, activation: str = "identity", gated: bool = False,
    head_step: tuple[Any, Any, int, int] | None = None, out_part: Tensor | None = None,
    dtype: torch.dtype | None = None, out_scale: Tensor | None = None, saves: bool = False,
) -> tuple[Tensor, Tensor, NormInput]:  # fmt: skip
    """Returns act(LayerNorm(x) W^T + b) [M, F], or act(g) u [M, F / 2] if gated (`folding.py` defines g and u).

    Also returns two inputs of the backward, valid only if `saves`: z before the activation, and x with its statistics.

    Args:
        head_step: Norms and rotary embeddings that the epilogue applies to q and k: the last arguments of
            `rotary_epilogue`.
        out_part: Output: LayerNorm statistics of the result (`row_parts.py`).
        dtype: Dtype of the result; None means the dtype of `x.source`.
        out_scale: For a result in e4m3: the reciprocal scale, which multiplies the result before rounding, fp32 [1].
    """
    (M, _), F = x.source.shape, folded.weight.shape[0]
    out, z, statistics = x.source.new_empty((M, F // (2 if gated else 1)), dtype=dtype), None, None
    if saves and (activation != "identity" or gated):
        z = x.source.new_empty((M, F))
    if saves and x.part is not None:
        statistics = torch.empty(2, M, dtype=torch.float32, device=out.device)
    common = out, FoldedNorm(x.part, statistics, folded.weight_sum, x.eps), folded.shift, folded.scale
    if head_step is not None:
        epilogue = forward.rotary_epilogue(*common, *head_step)
    else:
        part = out_part if gated else None
        epilogue = forward.layer_norm_epilogue(*common, activation, gated, z, out_scale, part)
    run_matmul(Matmul(x.source, folded.weight, epilogue, b_is_nk=True))
    if out_part is not None and not gated:  # without a gate, the epilogue would spill if it also computed statistics
        layer_norm_statistics_launch(out, out_part).run()
    return out, out if z is None else z, x if statistics is None else NormInput(x.source, statistics)


def linear_residual(h: Tensor, weight: Tensor, output: BranchOutput) -> None:
    """Computes `output` for the inputs h [M, K] and the weight [C, K] of a linear layer."""
    M = h.shape[0]
    matmul = Matmul(h, weight, forward.residual_epilogue(output), b_is_nk=True)
    first = rows_in_whole_waves(matmul)
    for rows in (slice(0, first), slice(first, M)) if first < M else (slice(0, M),):
        own = output if first == M else output.of_rows(rows)
        if first < M:
            matmul = Matmul(h[rows], weight, forward.residual_epilogue(own), b_is_nk=True)
        config, splits = residual_config(matmul)
        if splits == 1:
            matmul_launch(matmul, config).run()
        else:
            part = torch.empty(splits, *own.out.shape, dtype=torch.float32, device=h.device)
            matmul_launch(replace(matmul, epilogue=forward.partial_epilogue(part)), config, splits).run()
            finish_residual_launch(part, own, dependent=starts_early(gpu_of(h.device).arch)).run()


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
    made = partial(
        activation_grad_epilogue, out, z, h, folded.shift, None if x.mean is None else x.statistics, scaled.factor,
        hidden, along, activation, gated,
    )  # fmt: skip
    config = matmul_config(Matmul(grad, scaled.weight, made()))  # determines the number of partial sums
    row_part = torch.empty(M, ceil_div(F, config.sub_tile_width), dtype=torch.float32, device=z.device)
    column_part = torch.empty(ceil_div(M, config.block_m), 2, width, dtype=torch.float32, device=z.device)
    matmul_launch(Matmul(grad, scaled.weight, made(row_part, column_part)), config).run()
    return out, row_part, column_part, h


def input_gradient(
    scaled: Tensor, row_part: Tensor, x: NormInput, folded: FoldedLinear, residual: Tensor | None, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns [residual +] dx [M, C] in `x.input_dtype`, and if `rounded`, a copy in the dtype of `x.source`.

    Without a copy, both results are the same tensor. `scaled` (dz~) and `row_part` are from `activation_gradient`.
    """
    out = torch.empty_like(x.source, dtype=x.input_dtype)
    narrow = torch.empty_like(x.source) if rounded and out.dtype != x.source.dtype else None
    epilogue = layer_norm_grad_epilogue(out, x.source, x.statistics, row_part, residual, narrow)
    run_matmul(Matmul(scaled, folded.weight, epilogue))
    return out, out if narrow is None else narrow


def matmul_gradient(grad: Tensor, scaled: ScaledWeight) -> Tensor:
    """Returns grad diag(LayerScale) W, the gradient of the input of qkv or proj. LayerScale may be absent."""
    out = torch.empty(grad.shape[0], scaled.weight.shape[1], dtype=grad.dtype, device=grad.device)
    run_matmul(Matmul(grad, scaled.weight, forward.residual_epilogue(BranchOutput(out, scale=scaled.factor))))
    return out
