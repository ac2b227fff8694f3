"""The pointwise and reducing ends of the backward: what the matmuls' partial products become.

With z = LayerNorm(x) W^T + b folded as in `layer_norm.py`, dz the gradient of z, dz~ = rstd dz, U = dz~^T (x - mean):

    dW     = U gamma + (sum_m dz) beta^T
    dgamma = sum_f U W
    dbeta  = sum_f (sum_m dz) W
    db     = sum_m dz

U is the matmul dz~^T x less (sum_m dz~ mean) on every column, so x is read as it lies. With y = r + ls (h W^T + b) and
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

from .launch import Launch
from .matmul import (
    _activation_grad_epilogue,
    _inside,
    _load_tile,
    _offsets,
    _store_tile,
    weight_gradient_scale,
)
from .matmul_launch import TL_DTYPES

_ROWS, _COLS = 32, 128


@triton.jit
def _scale_gradient_kernel(
    grad_ptr,  # [M, N] dz
    z_ptr,  # [M, N]
    out_ptr,  # [M, N] dz~ = rstd dz
    mean_ptr,  # fp32 [M] or None
    rstd_ptr,  # fp32 [M]
    bias_ptr,  # fp32 [N] c
    row_part_ptr,  # fp32 [N / COLS, M]
    column_part_ptr,  # fp32 [M / ROWS, 2, N]
    M, N,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """What the "activation_grad" epilogue does, for a linear layer without an activation: no matmul comes before it."""
    tiles_n = tl.cdiv(N, COLS)
    row = tl.program_id(0) // tiles_n * ROWS
    col = tl.program_id(0) % tiles_n * COLS
    rows = row + tl.arange(0, ROWS)
    rstd = weight_gradient_scale(tl.load(rstd_ptr + rows, mask=rows < M, other=0.0))
    mean = tl.zeros((ROWS,), tl.float32)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
    grad = _load_tile(grad_ptr, row, col, M, N, ROWS, COLS, False).to(tl.float32)
    _activation_grad_epilogue(
        grad, out_ptr, z_ptr, None, bias_ptr, None, row_part_ptr, column_part_ptr, rstd, mean, row, col, M, N,
        ROWS, COLS, "identity", False, DTYPE,
    )  # fmt: skip


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
    part_ptr,  # fp32 [splits, F, C] of dz~^T x
    grad_sum_ptr,  # fp32 [F] sum_m dz
    shifted_sum_ptr,  # fp32 [F] sum_m dz~ mean
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
    shifted_sum = tl.load(shifted_sum_ptr + rows, mask=rows < F, other=0.0)
    u = _sum_splits(part_ptr, splits, row, col, F, C, ROWS, COLS) - shifted_sum[:, None]
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


def scale_gradient_launch(
    grad: Tensor, z: Tensor, out: Tensor, mean: Tensor | None, rstd: Tensor, bias: Tensor,
    row_part: Tensor, column_part: Tensor,
) -> Launch:  # fmt: skip
    """dz~ = rstd dz into `out`, with the partial sums of `scale_gradient_parts`."""
    M, N = grad.shape
    args = {
        "grad_ptr": grad, "z_ptr": z, "out_ptr": out, "mean_ptr": mean, "rstd_ptr": rstd, "bias_ptr": bias,
        "row_part_ptr": row_part, "column_part_ptr": column_part, "M": M, "N": N,
    }  # fmt: skip
    constants = {"DTYPE": TL_DTYPES[grad.dtype], "ROWS": _ROWS, "COLS": _COLS}
    return Launch(_scale_gradient_kernel, (_tiles(M, N),), args, constants, num_warps=4, device=grad.device)


def scale_gradient_parts(M: int, N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the partial sums along rows, fp32 [parts, M], and along columns, fp32 [parts, 2, N]."""
    row_part = torch.empty(triton.cdiv(N, _COLS), M, dtype=torch.float32, device=device)
    return row_part, torch.empty(triton.cdiv(M, _ROWS), 2, N, dtype=torch.float32, device=device)


def folded_weight_grad_launch(
    part: Tensor, grad_sum: Tensor, shifted_sum: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None,
    out: Tensor, gamma_part: Tensor, beta_part: Tensor,
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
    return triton.cdiv(rows, _ROWS) * triton.cdiv(cols, _COLS)


def folded_weight_gradients(
    part: Tensor, grad_sum: Tensor, shifted_sum: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dW in the dtype of `weight`, dgamma and dbeta in fp32."""
    F, C = weight.shape
    gamma, beta = (vector if vector is None else vector.contiguous() for vector in (gamma, beta))
    out = torch.empty_like(weight)
    gamma_part, beta_part = torch.empty(2, triton.cdiv(F, _ROWS), C, dtype=torch.float32, device=weight.device)
    folded_weight_grad_launch(part, grad_sum, shifted_sum, weight, gamma, beta, out, gamma_part, beta_part).run()
    return out, gamma_part.sum(0), beta_part.sum(0)


def residual_weight_gradients(part: Tensor, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """dW in the dtype of `weight`, and sum_f V W in fp32 [C] where there is a LayerScale."""
    C, F = weight.shape
    out = torch.empty_like(weight)
    scale_part = None
    if scale is not None:
        scale = scale.contiguous()
        scale_part = torch.empty(triton.cdiv(F, _COLS), C, dtype=torch.float32, device=weight.device)
    residual_weight_grad_launch(part, weight, scale, out, scale_part).run()
    return out, None if scale_part is None else scale_part.sum(0)
