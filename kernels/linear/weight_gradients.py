"""Gradients of the parameters of linear layers and norms, from the matmuls of `weight_matmuls.py`, in two launches.

The kernels handle up to two linear layers after LayerNorms ("folded") and up to two before residuals. `gradients.py`
defines the symbols. The first kernel computes the gradients of all weights, and of the biases of folded layers. It also
stores partial sums, from which the second kernel computes the gradients of all other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, ceil_div
from ..layer_norm import load_columns
from ..matmul.matmul_tiles import READ_AT_ONCE, tile_mask, tile_offsets
from .folding import NormedLinear, row_pointers
from .gradients import (
    SUM_ROWS,
    add_column_parts,
    column_sum_programs,
    column_sum_tiles,
    new_column_sums,
    store_column_sums,
    sum_rows,
)

ROWS, COLS = 32, 128  # tile of a weight
_VECTOR_COLS = 32  # columns per program of the second kernel
_REGISTERS = 64  # per thread of the second kernel; 32 would spill


@triton.jit
def _sum_splits(part_ptr, splits, offsets, mask, M, N):
    """Returns a tile of the sum of [splits, M, N] over splits."""
    total = tl.zeros(offsets.shape, tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(part_ptr + tl.cast(split, tl.int64) * M * N + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def _folded_tile(layer, program, splits, sums, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Computes a tile of dW and partial sums of dgamma and dbeta of a layer after a LayerNorm."""
    (
        F, C,
        part_ptr,  # fp32 [splits, F, C], partial sums of dz~^T x or of dz^T n
        sum_ptr,  # fp32 [sums, F], partial sums of dz over M
        shift_ptr,  # like sum_ptr, partial sums of dz~ * mean; or None. If given, both are views of one [sums, 2, F]
        weight_ptr, gate_ptr,  # [F, C] and None; with a gate, [F / 2, C] each
        gamma_ptr, beta_ptr,  # [C] or None
        out_ptr, gate_out_ptr,  # output: dW, like the weights
        bias_grad_ptr, gate_bias_grad_ptr,  # output: [F], or with a gate [F / 2] each; or None
        vector_part_ptr,  # output: fp32 [F / ROWS, 2, C], partial sums of dgamma and dbeta
    ) = layer  # fmt: skip
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
def _residual_tile(layer, program, splits, M, ROWS: tl.constexpr, COLS: tl.constexpr):
    """For a layer before a residual, computes a tile of dW and partial sums of dls, or a tile of partial sums of dy."""
    (
        C, F,
        part_ptr,  # fp32 [splits, C, F], partial sums of V = dy^T h
        weight_ptr,  # [C, F]
        scale_ptr,  # [C] or None
        out_ptr,  # output: [C, F] dW
        scale_part_ptr,  # output: fp32 [F / COLS, C], partial sums of V * W over F; or None
        grad_ptr,  # [M, C] dy
        grad_part_ptr,  # output: fp32 [M / SUM_ROWS, C], partial sums of dy over M; or None
    ) = layer  # fmt: skip
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
def _tiles(layer, ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.cdiv(layer[0], ROWS) * tl.cdiv(layer[1], COLS)


@triton.jit(do_not_specialize=["splits", "sums", "sums2", "M"])
def _weight_grad_kernel(
    # up to two layers of each kind, as in `_folded_tile` and `_residual_tile`; sizes of an absent layer are 0
    folded, residual, folded2, residual2,
    splits, sums, sums2, M,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = _tiles(folded, ROWS, COLS)
    second = first + _tiles(residual, ROWS, COLS)
    if residual[8] is not None:
        second += column_sum_programs(M, residual[0])
    third = second + _tiles(folded2, ROWS, COLS)
    if folded[2] is not None:
        if program < first:
            _folded_tile(folded, program, splits, sums, ROWS, COLS)
    if residual[2] is not None:
        if (program >= first) & (program < second):
            _residual_tile(residual, program - first, splits, M, ROWS, COLS)
    if folded2[2] is not None:
        if (program >= second) & (program < third):
            _folded_tile(folded2, program - second, splits, sums2, ROWS, COLS)
    if residual2[2] is not None:
        if program >= third:
            _residual_tile(residual2, program - third, splits, M, ROWS, COLS)


@triton.jit
def _affine_columns(norm, col, WEIGHT_ROWS: tl.constexpr, COLS: tl.constexpr):
    (
        C, F,
        vector_part_ptr,  # fp32 [F / WEIGHT_ROWS, 2, C]
        gamma_grad_ptr, beta_grad_ptr,  # output: [C] or None
    ) = norm  # fmt: skip
    cols = col + tl.arange(0, COLS)
    parts = tl.cdiv(F, WEIGHT_ROWS)
    if gamma_grad_ptr is not None:
        total = sum_rows(add_column_parts(vector_part_ptr, parts, 2 * C, col, C, COLS))
        tl.store(gamma_grad_ptr + cols, total.to(gamma_grad_ptr.dtype.element_ty), mask=cols < C)
    if beta_grad_ptr is not None:
        total = sum_rows(add_column_parts(vector_part_ptr + C, parts, 2 * C, col, C, COLS))
        tl.store(beta_grad_ptr + cols, total.to(beta_grad_ptr.dtype.element_ty), mask=cols < C)


@triton.jit
def _branch_columns(branch, col, sums, WEIGHT_COLS: tl.constexpr, COLS: tl.constexpr):
    (
        C, F,
        grad_part_ptr,  # fp32 [sums, C], or None
        scale_part_ptr,  # fp32 [F / WEIGHT_COLS, C], or None
        bias_ptr, scale_ptr,  # [C] or None
        bias_grad_ptr, scale_grad_ptr,  # output: [C] or None
    ) = branch  # fmt: skip
    cols = col + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    if grad_part_ptr is not None:
        total = sum_rows(add_column_parts(grad_part_ptr, sums, C, col, C, COLS))
    if bias_grad_ptr is not None:
        bias_grad = total * load_columns(scale_ptr, cols, C, 1.0)
        tl.store(bias_grad_ptr + cols, bias_grad.to(bias_grad_ptr.dtype.element_ty), mask=cols < C)
    if scale_grad_ptr is not None:
        scale_grad = sum_rows(add_column_parts(scale_part_ptr, tl.cdiv(F, WEIGHT_COLS), C, col, C, COLS))
        scale_grad += total * load_columns(bias_ptr, cols, C, 0.0)
        tl.store(scale_grad_ptr + cols, scale_grad.to(scale_grad_ptr.dtype.element_ty), mask=cols < C)


@triton.jit(do_not_specialize=["sums"])
def _vector_grad_kernel(
    norm, branch, norm2, branch2,  # up to two of each, as in `_affine_columns` and `_branch_columns`
    sums,
    WEIGHT_ROWS: tl.constexpr, WEIGHT_COLS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.cdiv(norm[0], COLS)
    second = first + tl.cdiv(branch[0], COLS)
    third = second + tl.cdiv(norm2[0], COLS)
    if program < first:
        _affine_columns(norm, program * COLS, WEIGHT_ROWS, COLS)
    elif program < second:
        _branch_columns(branch, (program - first) * COLS, sums, WEIGHT_COLS, COLS)
    elif program < third:
        _affine_columns(norm2, (program - second) * COLS, WEIGHT_ROWS, COLS)
    else:
        _branch_columns(branch2, (program - third) * COLS, sums, WEIGHT_COLS, COLS)


class ResidualLinear(NamedTuple):
    """A linear layer before a residual, and its LayerScale; all tensors are contiguous."""

    weight: Tensor  # [C, F]
    bias: Tensor | None
    scale: Tensor | None


Layer = tuple[Any, tuple[Any, ...], tuple[Any, ...]]  # gradients, arguments of the first and the second kernel
_NO_FOLDED: Layer = None, (0, 0, *[None] * 12), (0, 0, *[None] * 3)
_NO_RESIDUAL: Layer = None, (0, 0, *[None] * 7), (0, 0, *[None] * 6)


def _like(layer: Any, *names: str) -> SimpleNamespace:
    """Allocates the gradients of the named parameters of a layer; None for an absent parameter."""
    given = {name: getattr(layer, name) for name in names}
    return SimpleNamespace(**{name: None if one is None else torch.empty_like(one) for name, one in given.items()})


def _folded_layer(part: Tensor, sums: Tensor, linear: NormedLinear) -> Layer:
    _, F, C = part.shape
    found = _like(linear, "weight", "bias", "gamma", "beta", "gate", "gate_bias")
    vector_part = part.new_empty(ceil_div(F, ROWS), 2, C)
    arguments = (
        F, C, part, *((sums[:, 0], sums[:, 1]) if sums.dim() == 3 else (sums, None)),
        linear.weight, linear.gate, linear.gamma, linear.beta,
        found.weight, found.gate, found.bias, found.gate_bias, vector_part,
    )  # fmt: skip
    has_vectors = found.gamma is not None or found.beta is not None
    return found, arguments, (C, F, vector_part, found.gamma, found.beta) if has_vectors else _NO_FOLDED[2]


def _residual_layer(part: Tensor, grad: Tensor, linear: ResidualLinear) -> Layer:
    (_, C, F), (weight, bias, scale) = part.shape, linear
    found = _like(linear, *ResidualLinear._fields)
    grad_part = None if bias is None else new_column_sums(grad)
    scale_part = None if scale is None else part.new_empty(ceil_div(F, COLS), C)
    arguments = (C, F, part, weight, scale, found.weight, scale_part, grad, grad_part)
    vectors = (C, F, grad_part, scale_part, bias, scale, found.bias, found.scale)
    return found, arguments, vectors if grad_part is not None or scale_part is not None else _NO_RESIDUAL[2]


def parameter_gradients(
    folded: Sequence[tuple[Tensor, Tensor, NormedLinear]], residual: Sequence[tuple[Tensor, Tensor, ResidualLinear]]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of up to two linear layers after LayerNorms and two before residuals.

    Each result has the attributes weight and bias; after a LayerNorm also gamma, beta, gate and gate_bias; before a
    residual also scale. The gradient of an absent parameter is None. All layers must have equal M and number of splits.

    Args:
        folded: Partial sums of dz~^T x or of dz^T n, fp32 [splits, F, C]; partial sums over M of dz and dz~ * mean,
            fp32 [sums, 2, F], or only of dz, [sums, F]; and the layer.
        residual: Partial sums of V = dy^T h, fp32 [splits, C, F]; dy [M, C], contiguous; and the layer.
    """
    layers = [_folded_layer(*matmul) for matmul in folded]
    branches = [_residual_layer(*matmul) for matmul in residual]
    (_, layer, norm), (_, layer2, norm2) = [*layers, _NO_FOLDED, _NO_FOLDED][:2]
    (_, branch, vectors), (_, branch2, vectors2) = [*branches, _NO_RESIDUAL, _NO_RESIDUAL][:2]
    parts = [part for part, *_ in (*folded, *residual)]
    splits, device = parts[0].shape[0], parts[0].device
    sums = [*(column_part.shape[0] for _, column_part, _ in folded), 0, 0]
    summed = [grad for _, grad, linear in residual if linear.bias is not None]
    M = summed[0].shape[0] if summed else 0
    programs = sum(ceil_div(part.shape[1], ROWS) * ceil_div(part.shape[2], COLS) for part in parts)
    programs += sum(map(column_sum_tiles, summed))
    values, constants = (layer, branch, layer2, branch2, splits, *sums[:2], M), {"ROWS": ROWS, "COLS": COLS}
    Launch.of(_weight_grad_kernel, programs, values, constants=constants, device=device).run()
    # `Launch.run` does nothing if there are no programs
    programs = sum(ceil_div(each[0], _VECTOR_COLS) for each in (norm, vectors, norm2, vectors2))
    values, constants = (norm, vectors, norm2, vectors2, ceil_div(M, SUM_ROWS)), {"WEIGHT_ROWS": ROWS}
    constants |= {"WEIGHT_COLS": COLS, "COLS": _VECTOR_COLS}
    Launch.of(_vector_grad_kernel, programs, values, constants=constants, maxnreg=_REGISTERS, device=device).run()
    return [found for found, *_ in layers], [found for found, *_ in branches]
