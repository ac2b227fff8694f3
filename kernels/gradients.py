"""The pointwise and reducing ends of the backward: what the matmuls' partial products become.

With z = n W''^T + c = LayerNorm(x) W^T + b folded as in `layer_norm.py`, n = (x - mean) rstd the normalised row, dz the
gradient of z, g = dz W'' that of n, U = dz^T n:

    dx     = rstd (g - mean_c(g) - n mean_c(g n))
    dW     = U gamma + (sum_m dz) beta^T
    dgamma = sum_f U W
    dbeta  = sum_f (sum_m dz) W
    db     = sum_m dz

mean_c(g) is 0 but for rounding, as the rows of W'' sum to 0, and C mean_c(g n) = sum_f dz (z - c). Hence two ways:
- A linear layer whose dz is at hand (qkv): one pass over dz W and x, with g = dz W gamma, so that nothing needs to be
  folded; it also writes n where that does not lie there.
- Behind an activation, where dz leaves a matmul, its epilogue sums dz (z - c) and stores dz~ = rstd dz, so that x is
  read as it lies: U = dz~^T x less (sum_m dz~ mean) on every column. No pass over x or g is left.

With y = r + ls (h W^T + b) and
V = dy^T h:

    dW  = ls V
    dls = sum_f V W + b sum_m dy
    db  = ls sum_m dy

so the branch itself, h W^T + b, is neither kept nor computed again.

Each kernel sums its split-K parts and its blocks in a fixed order. Source: differentiation of the formulas above; held
against fp64 autograd by the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .folding import NormedLinear, load_columns
from .launch import Launch, ceil_div
from .layer_norm import RowStatistics, chunk
from .matmul import _inside, _load_tile, _offsets, _store_tile

_ROWS, _COLS = 32, 128


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["rstd_ptr"])
def _layer_norm_grad_kernel(
    grad_ptr,  # [M, C] dz W, the gradient of the LayerNorm's result
    gamma_ptr,  # [C] or None
    source_ptr,  # [M, C] x; n itself where there is no mean
    mean_ptr,  # fp32 [M] or None
    rstd_ptr,  # fp32 [M], negative for a constant row where there is a mean
    out_ptr,  # [M, C] dx
    normalised_ptr,  # [M, C] n, written where there is a mean
    M, C,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    start = rows.to(tl.int64)[:, None] * C
    rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)
    shift = tl.zeros((ROWS,), tl.float32)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if mean_ptr is not None:
        shift = tl.load(mean_ptr + rows, mask=inside, other=0.0)
        scale = tl.maximum(rstd, 0.0)
    total = tl.zeros((ROWS,), tl.float32)
    along = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        grad = tl.load(grad_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        grad *= load_columns(gamma_ptr, cols, C, 1.0)[None, :]
        source = tl.load(source_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(grad, 1)
        along += tl.sum(grad * ((source - shift[:, None]) * scale[:, None]), 1)
    total /= C
    along /= C
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        grad = tl.load(grad_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        grad *= load_columns(gamma_ptr, cols, C, 1.0)[None, :]
        source = tl.load(source_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        normalised = (source - shift[:, None]) * scale[:, None]
        if mean_ptr is not None:
            tl.store(normalised_ptr + start + cols[None, :], normalised.to(normalised_ptr.dtype.element_ty), mask=mask)
        dx = tl.abs(rstd)[:, None] * (grad - total[:, None] - normalised * along[:, None])
        tl.store(out_ptr + start + cols[None, :], dx.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_splits(part_ptr, splits, row, col, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile [ROWS, COLS] of the sum of fp32 parts [splits, M, N]."""
    offsets = _offsets(row, col, N, ROWS, COLS)
    mask = _inside(row, col, M, N, ROWS, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(part_ptr + tl.cast(split, tl.int64) * M * N + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def _sum_column_parts(part_ptr, parts, stride, col, N, COLS: tl.constexpr):
    """[COLS] sums over fp32 parts that lie `stride` apart, each of at least N columns."""
    cols = col + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for first in tl.range(0, parts, 16):
        part = first + tl.arange(0, 16)
        mask = (part < parts)[:, None] & (cols < N)[None, :]
        pointers = part_ptr + (part.to(tl.int64)[:, None] * stride + cols[None, :])
        total += tl.sum(tl.load(pointers, mask=mask, other=0.0), 0)
    return total


@triton.jit
def _folded_tile(
    part_ptr, column_part_ptr, weight_ptr, gamma_ptr, beta_ptr, out_ptr, bias_grad_ptr, vector_part_ptr,
    program, F, C, splits, sums, SHIFTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(C, COLS)
    tile_f = program // tiles_c
    row = tile_f * ROWS
    col = program % tiles_c * COLS
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    stride = 2 * F if SHIFTED else F
    grad_sum = _sum_column_parts(column_part_ptr, sums, stride, row, F, ROWS)
    u = _sum_splits(part_ptr, splits, row, col, F, C, ROWS, COLS)
    if SHIFTED:
        u -= _sum_column_parts(column_part_ptr + F, sums, stride, row, F, ROWS)[:, None]
    if bias_grad_ptr is not None:
        tl.store(bias_grad_ptr + rows, grad_sum.to(bias_grad_ptr.dtype.element_ty), mask=(rows < F) & (col == 0))
    weight = _load_tile(weight_ptr, row, col, F, C, ROWS, COLS, False).to(tl.float32)
    vectors = vector_part_ptr + tile_f * 2 * C + cols
    tl.store(vectors, tl.sum(u * weight, 0), mask=cols < C)
    tl.store(vectors + C, tl.sum(grad_sum[:, None] * weight, 0), mask=cols < C)
    u *= load_columns(gamma_ptr, cols, C, 1.0)[None, :]
    u += grad_sum[:, None] * load_columns(beta_ptr, cols, C, 0.0)[None, :]
    _store_tile(out_ptr, u.to(out_ptr.dtype.element_ty), row, col, F, C, ROWS, COLS, False)


@triton.jit
def _residual_tile(
    part_ptr, weight_ptr, scale_ptr, out_ptr, scale_part_ptr, program, C, F, splits,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_f = tl.cdiv(F, COLS)
    row = program // tiles_f * ROWS
    tile_f = program % tiles_f
    col = tile_f * COLS
    rows = row + tl.arange(0, ROWS)
    v = _sum_splits(part_ptr, splits, row, col, C, F, ROWS, COLS)
    if scale_part_ptr is not None:
        weight = _load_tile(weight_ptr, row, col, C, F, ROWS, COLS, False).to(tl.float32)
        tl.store(scale_part_ptr + tile_f * C + rows, tl.sum(v * weight, 1), mask=rows < C)
    if scale_ptr is not None:
        v *= tl.load(scale_ptr + rows, mask=rows < C, other=0.0).to(tl.float32)[:, None]
    _store_tile(out_ptr, v.to(out_ptr.dtype.element_ty), row, col, C, F, ROWS, COLS, False)


@triton.jit(do_not_specialize=["splits", "sums", "splits2"])
def _weight_grad_kernel(
    part_ptr,  # fp32 [splits, F, C] of dz~^T x, or of dz^T n; None: no linear layer behind a LayerNorm
    column_part_ptr,  # fp32 [sums, 2, F] of sum_m dz and sum_m dz~ mean; for dz^T n [sums, F] of the former
    weight_ptr,  # [F, C]
    gamma_ptr,  # [C] or None
    beta_ptr,  # [C] or None
    out_ptr,  # [F, C] dW
    bias_grad_ptr,  # [F], or None
    vector_part_ptr,  # fp32 [F / ROWS, 2, C] of dgamma and dbeta
    part2_ptr,  # fp32 [splits2, C2, F2] of dy^T h; None: no linear layer before a residual
    weight2_ptr,  # [C2, F2]
    scale_ptr,  # [C2] or None
    out2_ptr,  # [C2, F2] dW
    scale_part_ptr,  # fp32 [F2 / COLS, C2] of sum_f V W, or None
    F, C, splits, sums, C2, F2, splits2,
    SHIFTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.cdiv(F, ROWS) * tl.cdiv(C, COLS)
    if part_ptr is not None:
        if program < first:
            _folded_tile(
                part_ptr, column_part_ptr, weight_ptr, gamma_ptr, beta_ptr, out_ptr, bias_grad_ptr, vector_part_ptr,
                program, F, C, splits, sums, SHIFTED, ROWS, COLS,
            )  # fmt: skip
    if part2_ptr is not None:
        if program >= first:
            _residual_tile(
                part2_ptr, weight2_ptr, scale_ptr, out2_ptr, scale_part_ptr, program - first, C2, F2, splits2,
                ROWS, COLS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def _affine_grad_kernel(
    part_ptr,  # fp32 [parts, 2, C]
    gamma_grad_ptr,  # [C] or None
    beta_grad_ptr,  # [C] or None
    parts, C,
    COLS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS
    cols = col + tl.arange(0, COLS)
    if gamma_grad_ptr is not None:
        total = _sum_column_parts(part_ptr, parts, 2 * C, col, C, COLS)
        tl.store(gamma_grad_ptr + cols, total.to(gamma_grad_ptr.dtype.element_ty), mask=cols < C)
    if beta_grad_ptr is not None:
        total = _sum_column_parts(part_ptr + C, parts, 2 * C, col, C, COLS)
        tl.store(beta_grad_ptr + cols, total.to(beta_grad_ptr.dtype.element_ty), mask=cols < C)


def layer_norm_grad_launch(
    grad: Tensor, gamma: Tensor | None, rows: RowStatistics, out: Tensor, normalised: Tensor | None
) -> Launch:
    """dx into `out` [M, C] from dz W [M, C]; the normalised rows into `normalised` where `rows` does not hold them."""
    M, C = grad.shape
    block, count = chunk(C)
    args = {
        "grad_ptr": grad, "gamma_ptr": gamma, "source_ptr": rows.source, "mean_ptr": rows.mean,
        "rstd_ptr": rows.rstd, "out_ptr": out, "normalised_ptr": normalised, "M": M, "C": C,
    }  # fmt: skip
    constants = {"ROWS": count, "BLOCK_C": block}
    return Launch(_layer_norm_grad_kernel, (ceil_div(M, count),), args, constants, num_warps=4, device=grad.device)


def layer_norm_gradient(grad: Tensor, gamma: Tensor | None, rows: RowStatistics) -> tuple[Tensor, Tensor]:
    """dx [M, C] from dz W [M, C], and the normalised rows, in the dtype of the matmuls."""
    out = torch.empty_like(grad, dtype=rows.input_dtype)
    normalised = None if rows.mean is None else torch.empty_like(rows.source)
    layer_norm_grad_launch(grad, gamma, rows, out, normalised).run()
    return out, rows.source if normalised is None else normalised


@dataclass(frozen=True)
class FoldedProducts:
    """What the gradients of a linear layer behind a LayerNorm are made of.

    Args:
        part: fp32 [splits, F, C] of dz~^T x, or of dz^T n.
        column_part: fp32 [sums, 2, F] of sum_m dz and sum_m dz~ mean, or [sums, F] of the former.
        linear: Of dense tensors.
    """

    part: Tensor
    column_part: Tensor
    linear: NormedLinear


@dataclass(frozen=True)
class ResidualProducts:
    """What the gradients of a linear layer before a residual are made of.

    Args:
        part: fp32 [splits, C, F] of dy^T h.
        weight: [C, F], dense.
        scale: LayerScale [C], dense, or None.
    """

    part: Tensor
    weight: Tensor
    scale: Tensor | None


@dataclass(frozen=True)
class FoldedGradients:
    """Of a linear layer and the LayerNorm before it, in the dtypes of the parameters; None of an absent one."""

    weight: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    bias: Tensor | None


def weight_grad_launch(
    folded: FoldedProducts | None, gradients: FoldedGradients | None, vector_part: Tensor | None,
    residual: ResidualProducts | None, out: Tensor | None, scale_part: Tensor | None,
) -> Launch:  # fmt: skip
    """dW and db of a linear layer behind a LayerNorm with partial dgamma and dbeta [F / 32, 2, C], and dW of one before
    a residual with partial sums over f of the gradient of LayerScale, fp32 [F / 128, C]; None of one of the two.
    """
    splits, F, C = (0, 0, 0) if folded is None else folded.part.shape
    splits2, C2, F2 = (0, 0, 0) if residual is None else residual.part.shape
    linear = None if folded is None else folded.linear
    args = {
        "part_ptr": folded and folded.part, "column_part_ptr": folded and folded.column_part,
        "weight_ptr": linear and linear.weight, "gamma_ptr": linear and linear.gamma,
        "beta_ptr": linear and linear.beta, "out_ptr": gradients and gradients.weight,
        "bias_grad_ptr": gradients and gradients.bias, "vector_part_ptr": vector_part,
        "part2_ptr": residual and residual.part, "weight2_ptr": residual and residual.weight,
        "scale_ptr": residual and residual.scale, "out2_ptr": out, "scale_part_ptr": scale_part,
        "F": F, "C": C, "splits": splits, "sums": folded.column_part.shape[0] if folded else 0,
        "C2": C2, "F2": F2, "splits2": splits2,
    }  # fmt: skip
    shifted = folded is not None and folded.column_part.dim() == 3
    constants = {"SHIFTED": shifted, "ROWS": _ROWS, "COLS": _COLS}
    device = next(products.part.device for products in (folded, residual) if products is not None)
    programs = _tiles(F, C) + _tiles(C2, F2)
    return Launch(_weight_grad_kernel, (programs,), args, constants, num_warps=4, device=device)


def affine_grad_launch(part: Tensor, gamma_grad: Tensor | None, beta_grad: Tensor | None) -> Launch:
    """dgamma and dbeta [C], unless None, from parts fp32 [parts, 2, C]."""
    parts, _, C = part.shape
    args = {"part_ptr": part, "gamma_grad_ptr": gamma_grad, "beta_grad_ptr": beta_grad, "parts": parts, "C": C}
    return Launch(_affine_grad_kernel, (ceil_div(C, _ROWS),), args, {"COLS": _ROWS}, num_warps=4, device=part.device)


def _tiles(rows: int, cols: int) -> int:
    return ceil_div(rows, _ROWS) * ceil_div(cols, _COLS)


def weight_gradients(
    folded: FoldedProducts | None, residual: ResidualProducts | None
) -> tuple[FoldedGradients | None, Tensor | None, Tensor | None]:
    """The gradients of one linear layer or of two, in one launch for their weights and one for a LayerNorm's affine.

    Returns:
        Those of `folded`; dW of `residual` in the dtype of its weight; and its sum_f V W in fp32 [C] where it has a
        LayerScale. None of what is None.
    """
    found = vectors = out = scale_part = None
    if folded is not None:
        linear = folded.linear
        F, C = linear.weight.shape
        given = (linear.weight, linear.gamma, linear.beta, linear.bias)
        found = FoldedGradients(*(v if v is None else torch.empty_like(v) for v in given))  # type: ignore[arg-type]
        vectors = torch.empty(ceil_div(F, _ROWS), 2, C, dtype=torch.float32, device=linear.weight.device)
    if residual is not None:
        C, F = residual.weight.shape
        out = torch.empty_like(residual.weight)
        if residual.scale is not None:
            scale_part = torch.empty(ceil_div(F, _COLS), C, dtype=torch.float32, device=out.device)
    weight_grad_launch(folded, found, vectors, residual, out, scale_part).run()
    if found is not None and vectors is not None and not (found.gamma is None and found.beta is None):
        affine_grad_launch(vectors, found.gamma, found.beta).run()
    return found, out, None if scale_part is None else scale_part.sum(0)
