"""The pointwise and reducing ends of the backward: what the matmuls' partial products become.

With z = n W''^T + c = LayerNorm(x) W^T + b folded as in `layer_norm.py`, n = (x - mean) rstd the normalised row, dz the
gradient of z, g = dz W'' that of n, U = dz^T n:

    dx     = rstd (g - mean_c(g) - n mean_c(g n))
    dW     = U gamma + (sum_m dz) beta^T
    dgamma = sum_f U W
    dbeta  = sum_f (sum_m dz) W
    db     = sum_m dz

mean_c(g) is 0 but for rounding, as the rows of W'' sum to 0, and C mean_c(g n) = sum_f dz (z - c). Hence two ways:
- A linear layer whose dz is at hand (qkv): one pass over g and x, which also writes n where it does not lie there.
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

from .launch import Launch, ceil_div
from .layer_norm import RowStatistics, chunk
from .matmul import _inside, _load_tile, _offsets, _store_tile

_ROWS, _COLS = 32, 128


@triton.jit
def _layer_norm_grad_kernel(
    grad_ptr,  # [M, C] g, the gradient of the normalised rows
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
        source = tl.load(source_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(grad, 1)
        along += tl.sum(grad * ((source - shift[:, None]) * scale[:, None]), 1)
    total /= C
    along /= C
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        grad = tl.load(grad_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        source = tl.load(source_ptr + start + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        normalised = (source - shift[:, None]) * scale[:, None]
        if mean_ptr is not None:
            tl.store(normalised_ptr + start + cols[None, :], normalised.to(normalised_ptr.dtype.element_ty), mask=mask)
        dx = tl.abs(rstd)[:, None] * (grad - total[:, None] - normalised * along[:, None])
        tl.store(out_ptr + start + cols[None, :], dx.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _coefficient_kernel(
    part_ptr,  # fp32 [parts, M] of sum_f dz (z - c)
    rstd_ptr,  # fp32 [M]
    out_ptr,  # fp32 [M]
    M, C, parts,
    NORMALISED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    total = tl.zeros((ROWS,), tl.float32)
    for part in tl.range(0, parts):
        total += tl.load(part_ptr + tl.cast(part, tl.int64) * M + rows, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)
    factor = rstd if NORMALISED else rstd * rstd
    tl.store(out_ptr + rows, total * factor / C, mask=inside)


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
def _folded_weight_grad_kernel(
    part_ptr,  # fp32 [splits, F, C] of dz~^T x, or of dz^T n
    grad_sum_ptr,  # fp32 [F] sum_m dz
    shifted_sum_ptr,  # fp32 [F] sum_m dz~ mean; None for dz^T n
    weight_ptr,  # [F, C]
    gamma_ptr,  # [C] or None
    beta_ptr,  # [C] or None
    out_ptr,  # [F, C] dW
    gamma_part_ptr,  # fp32 [F / ROWS, C]
    beta_part_ptr,  # fp32 [F / ROWS, C]
    F, C, splits,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    tiles_c = tl.cdiv(C, COLS)
    tile_f = tl.program_id(0) // tiles_c
    row = tile_f * ROWS
    col = tl.program_id(0) % tiles_c * COLS
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    grad_sum = tl.load(grad_sum_ptr + rows, mask=rows < F, other=0.0)
    u = _sum_splits(part_ptr, splits, row, col, F, C, ROWS, COLS)
    if shifted_sum_ptr is not None:
        u -= tl.load(shifted_sum_ptr + rows, mask=rows < F, other=0.0)[:, None]
    weight = _load_tile(weight_ptr, row, col, F, C, ROWS, COLS, False).to(tl.float32)
    tl.store(gamma_part_ptr + tile_f * C + cols, tl.sum(u * weight, 0), mask=cols < C)
    tl.store(beta_part_ptr + tile_f * C + cols, tl.sum(grad_sum[:, None] * weight, 0), mask=cols < C)
    if gamma_ptr is not None:
        u *= tl.load(gamma_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    if beta_ptr is not None:
        u += grad_sum[:, None] * tl.load(beta_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    _store_tile(out_ptr, u.to(out_ptr.dtype.element_ty), row, col, F, C, ROWS, COLS, False)


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


def layer_norm_grad_launch(grad: Tensor, rows: RowStatistics, out: Tensor, normalised: Tensor | None) -> Launch:
    """dx into `out` [M, C] from g [M, C]; the normalised rows into `normalised` where `rows` does not hold them."""
    M, C = grad.shape
    block, count = chunk(C)
    args = {
        "grad_ptr": grad, "source_ptr": rows.source, "mean_ptr": rows.mean, "rstd_ptr": rows.rstd, "out_ptr": out,
        "normalised_ptr": normalised, "M": M, "C": C,
    }  # fmt: skip
    constants = {"ROWS": count, "BLOCK_C": block}
    return Launch(_layer_norm_grad_kernel, (ceil_div(M, count),), args, constants, num_warps=4, device=grad.device)


def coefficient_launch(part: Tensor, rows: RowStatistics, out: Tensor) -> Launch:
    """The coefficient of the LayerNorm's input in its gradient, fp32 [M], from parts fp32 [parts, M]."""
    parts, M = part.shape
    args = {
        "part_ptr": part, "rstd_ptr": rows.rstd, "out_ptr": out, "M": M, "C": rows.source.shape[1], "parts": parts,
    }  # fmt: skip
    constants = {"NORMALISED": rows.mean is None, "ROWS": 128}
    return Launch(_coefficient_kernel, (ceil_div(M, 128),), args, constants, num_warps=4, device=part.device)


def layer_norm_gradient(grad: Tensor, rows: RowStatistics) -> tuple[Tensor, Tensor]:
    """dx [M, C] from g [M, C], and the normalised rows, in the dtype of the matmuls."""
    out = torch.empty_like(grad, dtype=rows.input_dtype)
    normalised = None if rows.mean is None else torch.empty_like(rows.source)
    layer_norm_grad_launch(grad, rows, out, normalised).run()
    return out, rows.source if normalised is None else normalised


def gradient_coefficient(part: Tensor, rows: RowStatistics) -> Tensor:
    """What `coefficient_launch` computes."""
    out = torch.empty(part.shape[1], dtype=torch.float32, device=part.device)
    coefficient_launch(part, rows, out).run()
    return out


def folded_weight_grad_launch(
    part: Tensor, grad_sum: Tensor, shifted_sum: Tensor | None, weight: Tensor, gamma: Tensor | None,
    beta: Tensor | None, out: Tensor, gamma_part: Tensor, beta_part: Tensor,
) -> Launch:  # fmt: skip
    """dW of a linear layer behind a LayerNorm, with partial dgamma and dbeta."""
    splits, F, C = part.shape
    args = {
        "part_ptr": part, "grad_sum_ptr": grad_sum, "shifted_sum_ptr": shifted_sum, "weight_ptr": weight,
        "gamma_ptr": gamma, "beta_ptr": beta, "out_ptr": out, "gamma_part_ptr": gamma_part,
        "beta_part_ptr": beta_part, "F": F, "C": C, "splits": splits,
    }  # fmt: skip
    constants = {"ROWS": _ROWS, "COLS": _COLS}
    return Launch(_folded_weight_grad_kernel, (_tiles(F, C),), args, constants, num_warps=4, device=part.device)


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
    part: Tensor,
    grad_sum: Tensor,
    shifted_sum: Tensor | None,
    weight: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dW in the dtype of `weight`, dgamma and dbeta in fp32."""
    F, C = weight.shape
    gamma, beta = (vector if vector is None else vector.contiguous() for vector in (gamma, beta))
    out = torch.empty_like(weight)
    gamma_part, beta_part = torch.empty(2, ceil_div(F, _ROWS), C, dtype=torch.float32, device=weight.device)
    folded_weight_grad_launch(part, grad_sum, shifted_sum, weight, gamma, beta, out, gamma_part, beta_part).run()
    return out, gamma_part.sum(0), beta_part.sum(0)


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
