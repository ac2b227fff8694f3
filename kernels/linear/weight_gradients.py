"""Weight gradients of the linear layers of a block, computed in one launch from the matmuls of `weight_products.py`.

The kernel handles up to two linear layers after LayerNorms ("folded") and up to two before residuals. The formulas are
in `gradients.py`. The kernel also writes partial sums of the gradients of vectors for `vector_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, ceil_div
from ..matmul.matmul_tiles import READ_AT_ONCE, tile_mask, tile_offsets
from .folding import NormedLinear, load_columns, row_pointers
from .gradients import (
    add_column_parts,
    column_sum_programs,
    column_sum_tiles,
    new_column_sums,
    store_column_sums,
    sum_rows,
)

ROWS, COLS = 32, 128  # tile size


@triton.jit
def _sum_splits(part_ptr, splits, offsets, mask, M, N):
    """Returns a tile of the sum of [splits, M, N] over splits."""
    total = tl.zeros(offsets.shape, tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(part_ptr + tl.cast(split, tl.int64) * M * N + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def _folded_tile(
    part_ptr, sum_ptr, shift_ptr, weight_ptr, gate_ptr, gamma_ptr, beta_ptr, out_ptr, gate_out_ptr, bias_grad_ptr,
    gate_bias_grad_ptr, vector_part_ptr, program, F, C, splits, sums, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(C, COLS)
    tile_f = program // tiles_c
    row = tile_f * ROWS
    col = program % tiles_c * COLS
    rows = row + tl.arange(0, ROWS)
    cols = tl.max_contiguous(col + tl.arange(0, COLS), READ_AT_ONCE)
    stride = F if shift_ptr is None else 2 * F
    grad_sum = tl.sum(add_column_parts(sum_ptr, sums, stride, row, F, ROWS), 0)
    inside = tile_mask(row, col, F, C, ROWS, COLS)
    u = _sum_splits(part_ptr, splits, tile_offsets(row, col, C, ROWS, COLS), inside, F, C)
    if shift_ptr is not None:
        u -= tl.sum(add_column_parts(shift_ptr, sums, stride, row, F, ROWS), 0)[:, None]
    if bias_grad_ptr is not None:
        bias_grads = row_pointers(bias_grad_ptr, gate_bias_grad_ptr, rows, 1)
        tl.store(bias_grads, grad_sum.to(bias_grad_ptr.dtype.element_ty), mask=(rows < F) & (col == 0))
    pointers = row_pointers(weight_ptr, gate_ptr, rows, C)[:, None] + cols[None, :]
    weight = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    vectors = vector_part_ptr + tile_f * 2 * C + cols
    tl.store(vectors, sum_rows(u * weight), mask=cols < C)
    tl.store(vectors + C, sum_rows(grad_sum[:, None] * weight), mask=cols < C)
    u *= load_columns(gamma_ptr, cols, C, 1.0)[None, :]
    u += grad_sum[:, None] * load_columns(beta_ptr, cols, C, 0.0)[None, :]
    pointers = row_pointers(out_ptr, gate_out_ptr, rows, C)[:, None] + cols[None, :]
    tl.store(pointers, u.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _residual_tile(
    part_ptr, weight_ptr, scale_ptr, out_ptr, scale_part_ptr, grad_ptr, grad_part_ptr,
    program, C, F, splits, M, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_f = tl.cdiv(F, COLS)
    tiles = tl.cdiv(C, ROWS) * tiles_f
    if program < tiles:
        row = program // tiles_f * ROWS
        tile_f = program % tiles_f
        col = tile_f * COLS
        rows = row + tl.arange(0, ROWS)
        offsets = tile_offsets(row, col, F, ROWS, COLS, READ_AT_ONCE)
        inside = tile_mask(row, col, C, F, ROWS, COLS)
        v = _sum_splits(part_ptr, splits, offsets, inside, C, F)
        if scale_part_ptr is not None:
            weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            tl.store(scale_part_ptr + tile_f * C + rows, tl.sum(v * weight, 1), mask=rows < C)
        if scale_ptr is not None:
            v *= tl.load(scale_ptr + rows, mask=rows < C, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + offsets, v.to(out_ptr.dtype.element_ty), mask=inside)
    elif grad_part_ptr is not None:
        store_column_sums(grad_ptr, grad_part_ptr, program - tiles, M, C)


@triton.jit
def _tiles(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.cdiv(rows, ROWS) * tl.cdiv(cols, COLS)


@triton.jit
def _residual_tiles(grad_part_ptr, C, F, M, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Returns the number of programs of `_residual_tile`: tiles of the weight, then tiles of column sums of dy."""
    tiles = _tiles(C, F, ROWS, COLS)
    if grad_part_ptr is not None:
        tiles += column_sum_programs(M, C)
    return tiles


@triton.jit(do_not_specialize=["M", "splits", "sums", "splits2", "splits3", "sums3", "splits4"])
def _weight_grad_kernel(
    # linear layer after a LayerNorm, or None:
    part_ptr,  # fp32 [splits, F, C], parts of dz~^T x or of dz^T n
    sum_ptr,  # fp32 [sums, F], partial sums of dz over M
    shift_ptr,  # fp32 [sums, F], partial sums of dz~ mean, interleaved with sum_ptr; None for dz^T n
    weight_ptr, gate_ptr,  # [F, C] and None, or with a gate [F / 2, C] each
    gamma_ptr,  # [C] or None
    beta_ptr,  # [C] or None
    out_ptr, gate_out_ptr,  # output: dW, like the weights
    bias_grad_ptr, gate_bias_grad_ptr,  # output: [F], or with a gate [F / 2] each; or None
    vector_part_ptr,  # output: fp32 [F / ROWS, 2, C], parts of dgamma and dbeta
    F, C, splits, sums,
    # linear layer before a residual, or None:
    part2_ptr,  # fp32 [splits2, C2, F2], parts of V = dy^T h
    weight2_ptr,  # [C2, F2]
    scale2_ptr,  # [C2] or None
    out2_ptr,  # output: [C2, F2] dW
    scale_part2_ptr,  # output: fp32 [F2 / COLS, C2], partial sums of V W over F; or None
    grad2_ptr,  # [M, C2] dy
    grad_part2_ptr,  # output: fp32 [M / SUM_ROWS, C2], partial sums of dy over M; or None
    F2, C2, splits2,
    # a second layer after a LayerNorm and a second layer before a residual, or None:
    part3_ptr, sum3_ptr, shift3_ptr, weight3_ptr, gate3_ptr, gamma3_ptr, beta3_ptr, out3_ptr, gate_out3_ptr,
    bias_grad3_ptr, gate_bias_grad3_ptr, vector_part3_ptr,
    F3, C3, splits3, sums3,
    part4_ptr, weight4_ptr, scale4_ptr, out4_ptr, scale_part4_ptr, grad4_ptr, grad_part4_ptr, F4, C4, splits4,
    M,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = _tiles(F, C, ROWS, COLS)
    second = first + _residual_tiles(grad_part2_ptr, C2, F2, M, ROWS, COLS)
    third = second + _tiles(F3, C3, ROWS, COLS)
    if part_ptr is not None:
        if program < first:
            _folded_tile(
                part_ptr, sum_ptr, shift_ptr, weight_ptr, gate_ptr, gamma_ptr, beta_ptr, out_ptr, gate_out_ptr,
                bias_grad_ptr, gate_bias_grad_ptr, vector_part_ptr, program, F, C, splits, sums, ROWS, COLS,
            )  # fmt: skip
    if part2_ptr is not None:
        if (program >= first) & (program < second):
            _residual_tile(
                part2_ptr, weight2_ptr, scale2_ptr, out2_ptr, scale_part2_ptr, grad2_ptr, grad_part2_ptr,
                program - first, C2, F2, splits2, M, ROWS, COLS,
            )  # fmt: skip
    if part3_ptr is not None:
        if (program >= second) & (program < third):
            _folded_tile(
                part3_ptr, sum3_ptr, shift3_ptr, weight3_ptr, gate3_ptr, gamma3_ptr, beta3_ptr, out3_ptr, gate_out3_ptr,
                bias_grad3_ptr, gate_bias_grad3_ptr, vector_part3_ptr, program - second, F3, C3, splits3, sums3,
                ROWS, COLS,
            )  # fmt: skip
    if part4_ptr is not None:
        if program >= third:
            _residual_tile(
                part4_ptr, weight4_ptr, scale4_ptr, out4_ptr, scale_part4_ptr, grad4_ptr, grad_part4_ptr,
                program - third, C4, F4, splits4, M, ROWS, COLS,
            )  # fmt: skip


@dataclass(frozen=True)
class FoldedProducts:
    """Inputs of the gradients of a linear layer after a LayerNorm.

    Args:
        part: Parts of dz~^T x or of dz^T n, fp32 [splits, F, C].
        column_part: Partial sums of dz and dz~ mean over M, fp32 [sums, 2, F]. For dz^T n: only of dz, fp32 [sums, F].
        linear: The layer, contiguous.
    """

    part: Tensor
    column_part: Tensor
    linear: NormedLinear


@dataclass(frozen=True)
class ResidualProducts:
    """Inputs of the gradients of a linear layer before a residual.

    Args:
        part: Parts of V = dy^T h, fp32 [splits, C, F].
        grad: dy [M, C], contiguous.
        weight, bias, scale: Weight [C, F], bias [C] and LayerScale [C] of the layer, contiguous.
    """

    part: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


@dataclass(frozen=True)
class FoldedGradients:
    """Gradients of a linear layer and the preceding LayerNorm, in the parameters' dtypes; None for absent parameters.

    Args:
        vector_part: Parts of dgamma and dbeta, fp32 [F / 32, 2, C].
    """

    weight: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None
    vector_part: Tensor


@dataclass(frozen=True)
class ResidualGradients:
    """Gradients of a linear layer and the following LayerScale, in the parameters' dtypes; None for absent parameters.

    Args:
        grad_part: Partial sums of dy over M, fp32 [M / 256, C]; None without a bias.
        scale_part: Partial sums of V W over F, fp32 [F / 128, C]; None without a LayerScale.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    grad_part: Tensor | None
    scale_part: Tensor | None


Folded = tuple[FoldedProducts, FoldedGradients]
Residual = tuple[ResidualProducts, ResidualGradients]


def room_for(products: FoldedProducts | ResidualProducts) -> Any:
    """Allocates the gradients of the parameters of the layer."""

    def like(tensor: Tensor | None) -> Any:
        return None if tensor is None else torch.empty_like(tensor)

    def parts(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=products.part.device)

    if isinstance(products, FoldedProducts):
        linear, (_, F, C) = products.linear, products.part.shape
        gamma, beta, bias = like(linear.gamma), like(linear.beta), like(linear.bias)
        gate, gate_bias = like(linear.gate), like(linear.gate_bias)
        return FoldedGradients(like(linear.weight), gamma, beta, bias, gate, gate_bias, parts(ceil_div(F, ROWS), 2, C))
    C, F = products.weight.shape
    return ResidualGradients(
        like(products.weight), like(products.bias), like(products.scale),
        None if products.bias is None else new_column_sums(products.grad),
        None if products.scale is None else parts(ceil_div(F, COLS), C),
    )  # fmt: skip


def slots(folded: Sequence[Folded], residual: Sequence[Residual]) -> list[tuple[Any, str]]:
    """Returns ((products, gradients), suffix of argument names) of four layers in order; (None, None) if absent."""
    pairs = [*zip_longest(folded, residual, fillvalue=(None, None)), ((None, None), (None, None))][:2]
    return [*zip((slot for pair in pairs for slot in pair), ("", "2", "3", "4"), strict=True)]


def weight_grad_launch(folded: Sequence[Folded], residual: Sequence[Residual]) -> Launch:
    """Returns the launch of `_weight_grad_kernel`, which describes the tensors."""
    args: dict[str, Any] = {}
    programs, M = 0, 0
    for index, ((products, found), suffix) in enumerate(slots(folded, residual)):
        rows, cols = (0, 0) if products is None else products.part.shape[1:]
        splits = 0 if products is None else products.part.shape[0]
        programs += ceil_div(rows, ROWS) * ceil_div(cols, COLS)
        if index % 2 == 0:
            linear, sums = products and products.linear, products and products.column_part
            split = sums is not None and sums.dim() == 3
            names = {
                "part": products and products.part, "sum": sums[:, 0] if split else sums,
                "shift": sums[:, 1] if split else None, "weight": linear and linear.weight,
                "gate": linear and linear.gate, "gamma": linear and linear.gamma, "beta": linear and linear.beta,
                "out": found and found.weight, "gate_out": found and found.gate, "bias_grad": found and found.bias,
                "gate_bias_grad": found and found.gate_bias, "vector_part": found and found.vector_part,
            }  # fmt: skip
            args |= {f"F{suffix}": rows, f"C{suffix}": cols, f"sums{suffix}": 0 if sums is None else sums.shape[0]}
        else:
            names = {
                "part": products and products.part, "weight": products and products.weight,
                "scale": products and products.scale, "out": found and found.weight,
                "scale_part": found and found.scale_part, "grad": products and products.grad,
                "grad_part": found and found.grad_part,
            }  # fmt: skip
            args |= {f"F{suffix}": cols, f"C{suffix}": rows}
            if found is not None and found.grad_part is not None:
                M = products.grad.shape[0]
                programs += column_sum_tiles(products.grad)
        args |= {f"{name}{suffix}_ptr": value for name, value in names.items()} | {f"splits{suffix}": splits}
    constants = {"ROWS": ROWS, "COLS": COLS}
    device = (folded or residual)[0][0].part.device
    return Launch(_weight_grad_kernel, (programs,), args | {"M": M}, constants, num_warps=4, device=device)
