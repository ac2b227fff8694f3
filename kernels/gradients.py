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

import torch
import triton
import triton.language as tl
from torch import Tensor

from .folding import NormedLinear, load_columns
from .launch import Launch, ceil_div
from .layer_norm import RowStatistics, chunk
from .matmul import _inside, _load_tile, _offsets, _store_tile

_ROWS, _COLS = 32, 128


@triton.jit
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
def _folded_weight_grad_kernel(
    part_ptr,  # fp32 [splits, F, C] of dz~^T x, or of dz^T n
    column_part_ptr,  # fp32 [sums, 2, F] of sum_m dz and sum_m dz~ mean; for dz^T n [sums, F] of the former
    weight_ptr,  # [F, C]
    gamma_ptr,  # [C] or None
    beta_ptr,  # [C] or None
    out_ptr,  # [F, C] dW
    bias_grad_ptr,  # [F], or None
    vector_part_ptr,  # fp32 [F / ROWS, 2, C] of dgamma and dbeta
    F, C, splits, sums,
    SHIFTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(C, COLS)
    tile_f = tl.program_id(0) // tiles_c
    row = tile_f * ROWS
    col = tl.program_id(0) % tiles_c * COLS
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


@triton.jit
def _residual_weight_grad_kernel(
    part_ptr,  # fp32 [splits, C, F] of dy^T h
    weight_ptr,  # [C, F]
    scale_ptr,  # [C] or None
    out_ptr,  # [C, F] dW
    scale_part_ptr,  # fp32 [F / COLS, C] of sum_f V W, or None
    C, F, splits,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_f = tl.cdiv(F, COLS)
    row = tl.program_id(0) // tiles_f * ROWS
    tile_f = tl.program_id(0) % tiles_f
    col = tile_f * COLS
    rows = row + tl.arange(0, ROWS)
    v = _sum_splits(part_ptr, splits, row, col, C, F, ROWS, COLS)
    if scale_part_ptr is not None:
        weight = _load_tile(weight_ptr, row, col, C, F, ROWS, COLS, False).to(tl.float32)
        tl.store(scale_part_ptr + tile_f * C + rows, tl.sum(v * weight, 1), mask=rows < C)
    if scale_ptr is not None:
        v *= tl.load(scale_ptr + rows, mask=rows < C, other=0.0).to(tl.float32)[:, None]
    _store_tile(out_ptr, v.to(out_ptr.dtype.element_ty), row, col, C, F, ROWS, COLS, False)


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


def folded_weight_grad_launch(
    part: Tensor, column_part: Tensor, linear: NormedLinear, out: Tensor, bias_grad: Tensor | None, vector_part: Tensor
) -> Launch:
    """dW and db of a linear layer behind a LayerNorm, with partial dgamma and dbeta."""
    splits, F, C = part.shape
    args = {
        "part_ptr": part, "column_part_ptr": column_part, "weight_ptr": linear.weight, "gamma_ptr": linear.gamma,
        "beta_ptr": linear.beta, "out_ptr": out, "bias_grad_ptr": bias_grad, "vector_part_ptr": vector_part,
        "F": F, "C": C, "splits": splits, "sums": column_part.shape[0],
    }  # fmt: skip
    constants = {"SHIFTED": column_part.dim() == 3, "ROWS": _ROWS, "COLS": _COLS}
    return Launch(_folded_weight_grad_kernel, (_tiles(F, C),), args, constants, num_warps=4, device=part.device)


def affine_grad_launch(part: Tensor, gamma_grad: Tensor | None, beta_grad: Tensor | None) -> Launch:
    """dgamma and dbeta [C], unless None, from parts fp32 [parts, 2, C]."""
    parts, _, C = part.shape
    args = {"part_ptr": part, "gamma_grad_ptr": gamma_grad, "beta_grad_ptr": beta_grad, "parts": parts, "C": C}
    return Launch(_affine_grad_kernel, (ceil_div(C, _ROWS),), args, {"COLS": _ROWS}, num_warps=4, device=part.device)


def residual_weight_grad_launch(
    part: Tensor, weight: Tensor, scale: Tensor | None, out: Tensor, scale_part: Tensor | None
) -> Launch:
    """dW of a linear layer before a residual, with partial sums over f of the gradient of LayerScale."""
    splits, C, F = part.shape
    args = {
        "part_ptr": part, "weight_ptr": weight, "scale_ptr": scale, "out_ptr": out, "scale_part_ptr": scale_part,
        "C": C, "F": F, "splits": splits,
    }  # fmt: skip
    constants = {"ROWS": _ROWS, "COLS": _COLS}
    return Launch(_residual_weight_grad_kernel, (_tiles(C, F),), args, constants, num_warps=4, device=part.device)


def _tiles(rows: int, cols: int) -> int:
    return ceil_div(rows, _ROWS) * ceil_div(cols, _COLS)


def folded_weight_gradients(
    part: Tensor, column_part: Tensor, linear: NormedLinear
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of weight, gamma, beta and bias in their dtypes; None of an absent one.

    Args:
        part: fp32 [splits, F, C] of dz~^T x, or of dz^T n.
        column_part: fp32 [sums, 2, F] of sum_m dz and sum_m dz~ mean, or [sums, F] of the former.
        linear: Of dense tensors.
    """
    F, C = linear.weight.shape
    out = torch.empty_like(linear.weight)
    bias, gamma, beta = (v if v is None else torch.empty_like(v) for v in (linear.bias, linear.gamma, linear.beta))
    vectors = torch.empty(ceil_div(F, _ROWS), 2, C, dtype=torch.float32, device=part.device)
    folded_weight_grad_launch(part, column_part, linear, out, bias, vectors).run()
    if gamma is not None or beta is not None:
        affine_grad_launch(vectors, gamma, beta).run()
    return out, gamma, beta, bias


def residual_weight_gradients(part: Tensor, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """dW in the dtype of `weight`, and sum_f V W in fp32 [C] where there is a LayerScale."""
    C, F = weight.shape
    out = torch.empty_like(weight)
    scale_part = None
    if scale is not None:
        scale = scale.contiguous()
        scale_part = torch.empty(ceil_div(F, _COLS), C, dtype=torch.float32, device=weight.device)
    residual_weight_grad_launch(part, weight, scale, out, scale_part).run()
    return out, None if scale_part is None else scale_part.sum(0)
