"""Gradients of the parameters of a block, from the matmuls of `weight_products.py`, in two launches.

The kernels handle up to two linear layers after LayerNorms ("folded") and up to two before residuals. `gradients.py`
contains the formulas. The first kernel computes gradients of all weights, and of biases of layers after LayerNorms. The
second kernel computes those of gamma, beta, the other biases and LayerScales, from partial sums of the first kernel.
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

from ..launch import Launch, ceil_div, pointers
from ..layer_norm import load_columns
from ..matmul.matmul_tiles import READ_AT_ONCE, tile_mask, tile_offsets
from .folding import NormedLinear, row_pointers
from .gradients import (
    add_column_parts,
    column_sum_programs,
    column_sum_tiles,
    new_column_sums,
    store_column_sums,
    sum_rows,
)

ROWS, COLS = 32, 128  # tile of a weight
_VECTOR_COLS = 32  # columns per program of the second kernel
_REGISTERS = 64  # per thread of the second kernel; 32 (full occupancy) would spill, and the grid is too small for it


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
    """Returns the number of tiles of the weight and, unless `grad_part_ptr` is None, of column sums of dy."""
    tiles = _tiles(C, F, ROWS, COLS)
    if grad_part_ptr is not None:
        tiles += column_sum_programs(M, C)
    return tiles


@triton.jit(do_not_specialize=["M", "splits", "sums", "splits2", "splits3", "sums3", "splits4"])
def _weight_grad_kernel(
    # linear layer after a LayerNorm, or None:
    part_ptr,  # fp32 [splits, F, C], parts of dz~^T x or of dz^T n
    sum_ptr,  # fp32 [sums, F], partial sums of dz over M
    shift_ptr,  # fp32 [sums, F], partial sums of dz~ * mean over M, interleaved with sum_ptr; None for dz^T n
    weight_ptr, gate_ptr,  # [F, C] and None; with a gate, [F / 2, C] each
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


@triton.jit
def _affine_columns(
    vector_part_ptr, gamma_grad_ptr, beta_grad_ptr, col, F, C, WEIGHT_ROWS: tl.constexpr, COLS: tl.constexpr
):
    cols = col + tl.arange(0, COLS)
    parts = tl.cdiv(F, WEIGHT_ROWS)
    if gamma_grad_ptr is not None:
        total = sum_rows(add_column_parts(vector_part_ptr, parts, 2 * C, col, C, COLS))
        tl.store(gamma_grad_ptr + cols, total.to(gamma_grad_ptr.dtype.element_ty), mask=cols < C)
    if beta_grad_ptr is not None:
        total = sum_rows(add_column_parts(vector_part_ptr + C, parts, 2 * C, col, C, COLS))
        tl.store(beta_grad_ptr + cols, total.to(beta_grad_ptr.dtype.element_ty), mask=cols < C)


@triton.jit
def _branch_columns(
    grad_part_ptr, scale_part_ptr, bias_ptr, scale_ptr, bias_grad_ptr, scale_grad_ptr, col, F, C, sums,
    WEIGHT_COLS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
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
    # LayerNorm before a linear layer, or None:
    vector_part_ptr,  # fp32 [F / WEIGHT_ROWS, 2, C]
    gamma_grad_ptr,  # output: [C] or None
    beta_grad_ptr,  # output: [C] or None
    F, C,
    # linear layer before a residual, or None:
    grad_part2_ptr,  # fp32 [sums, C2], or None
    scale_part2_ptr,  # fp32 [F2 / WEIGHT_COLS, C2], or None
    bias2_ptr,  # [C2] or None
    scale2_ptr,  # [C2] or None
    bias_grad2_ptr,  # output: [C2] or None
    scale_grad2_ptr,  # output: [C2] or None
    F2, C2,
    # a second LayerNorm and a second linear layer, or None:
    vector_part3_ptr, gamma_grad3_ptr, beta_grad3_ptr, F3, C3,
    grad_part4_ptr, scale_part4_ptr, bias4_ptr, scale4_ptr, bias_grad4_ptr, scale_grad4_ptr, F4, C4,
    sums,
    WEIGHT_ROWS: tl.constexpr, WEIGHT_COLS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.cdiv(C, COLS)
    second = first + tl.cdiv(C2, COLS)
    third = second + tl.cdiv(C3, COLS)
    if program < first:
        _affine_columns(vector_part_ptr, gamma_grad_ptr, beta_grad_ptr, program * COLS, F, C, WEIGHT_ROWS, COLS)
    elif program < second:
        _branch_columns(
            grad_part2_ptr, scale_part2_ptr, bias2_ptr, scale2_ptr, bias_grad2_ptr, scale_grad2_ptr,
            (program - first) * COLS, F2, C2, sums, WEIGHT_COLS, COLS,
        )  # fmt: skip
    elif program < third:
        _affine_columns(
            vector_part3_ptr, gamma_grad3_ptr, beta_grad3_ptr, (program - second) * COLS, F3, C3, WEIGHT_ROWS, COLS
        )
    else:
        _branch_columns(
            grad_part4_ptr, scale_part4_ptr, bias4_ptr, scale4_ptr, bias_grad4_ptr, scale_grad4_ptr,
            (program - third) * COLS, F4, C4, sums, WEIGHT_COLS, COLS,
        )  # fmt: skip


@dataclass(frozen=True)
class FoldedProducts:
    """Inputs of the gradients of a linear layer after a LayerNorm.

    Args:
        part: Parts of dz~^T x or of dz^T n, fp32 [splits, F, C].
        column_part: Partial sums over M of dz and dz~ * mean, fp32 [sums, 2, F]; for dz^T n, only of dz: [sums, F].
        linear: The layer, contiguous.
    """

    part: Tensor
    column_part: Tensor
    linear: NormedLinear


@dataclass(frozen=True)
class ResidualProducts:
    """Inputs of the gradients of a linear layer before a residual: parts of V = dy^T h, dy, and the parameters."""

    part: Tensor  # fp32 [splits, C, F]
    grad: Tensor  # [M, C], contiguous like the parameters
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


@dataclass(frozen=True)
class Gradients:
    """Gradients of parameters in their dtypes, None if absent; and the partial sums of `_weight_grad_kernel`."""

    weight: Tensor
    bias: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    gate: Tensor | None = None
    gate_bias: Tensor | None = None
    scale: Tensor | None = None
    vector_part: Tensor | None = None
    grad_part: Tensor | None = None
    scale_part: Tensor | None = None


Folded = tuple[FoldedProducts, Gradients]
Residual = tuple[ResidualProducts, Gradients]


def _room_for(products: FoldedProducts | ResidualProducts) -> Gradients:
    """Allocates the gradients of the parameters of the layer."""
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": products.part.device}
    _, rows, cols = products.part.shape
    layer: Any = products
    names, made = ["bias", "scale"], {}
    if isinstance(products, FoldedProducts):
        layer, names = products.linear, ["bias", "gamma", "beta", "gate", "gate_bias"]
        made["vector_part"] = torch.empty(ceil_div(rows, ROWS), 2, cols, **fp32)
    else:
        if products.bias is not None:
            made["grad_part"] = new_column_sums(products.grad)
        if products.scale is not None:
            made["scale_part"] = torch.empty(ceil_div(cols, COLS), rows, **fp32)
    made |= {name: torch.empty_like(getattr(layer, name)) for name in names if getattr(layer, name) is not None}
    return Gradients(torch.empty_like(layer.weight), **made)


def _slots(folded: Sequence[Folded], residual: Sequence[Residual]) -> list[tuple[str, Any, Any]]:
    """Returns (suffix of argument names, products, gradients) of the four layers in order; None if absent."""
    pairs = [*zip_longest(folded, residual, fillvalue=(None, None)), ((None, None), (None, None))][:2]
    return [(suffix, *slot) for suffix, slot in zip(("", "2", "3", "4"), (slot for pair in pairs for slot in pair))]


def _run_weight_gradients(folded: Sequence[Folded], residual: Sequence[Residual]) -> None:
    args: dict[str, Any] = {}
    programs = M = 0
    for suffix, products, found in _slots(folded, residual):
        splits, rows, cols = (0, 0, 0) if products is None else products.part.shape
        programs += ceil_div(rows, ROWS) * ceil_div(cols, COLS)
        args |= pointers(suffix, products, part="part") | {f"splits{suffix}": splits}
        if suffix in ("", "3"):
            sums: Any = getattr(products, "column_part", None)
            split = sums is not None and sums.dim() == 3
            args |= {
                f"sum{suffix}_ptr": sums[:, 0] if split else sums, f"shift{suffix}_ptr": sums[:, 1] if split else None,
                f"sums{suffix}": 0 if sums is None else sums.shape[0], f"F{suffix}": rows, f"C{suffix}": cols,
            }  # fmt: skip
            linear = getattr(products, "linear", None)
            args |= pointers(suffix, linear, weight="weight", gate="gate", gamma="gamma", beta="beta")
            args |= pointers(
                suffix, found, out="weight", gate_out="gate", bias_grad="bias", gate_bias_grad="gate_bias",
                vector_part="vector_part",
            )  # fmt: skip
        else:
            args |= pointers(suffix, products, weight="weight", scale="scale", grad="grad")
            args |= pointers(suffix, found, out="weight", scale_part="scale_part", grad_part="grad_part")
            args |= {f"F{suffix}": cols, f"C{suffix}": rows}
            if found is not None and found.grad_part is not None:
                M = products.grad.shape[0]
                programs += column_sum_tiles(products.grad)
    constants = {"ROWS": ROWS, "COLS": COLS}
    device = (folded or residual)[0][0].part.device
    Launch(_weight_grad_kernel, (programs,), args | {"M": M}, constants, num_warps=4, device=device).run()


def _run_vector_gradients(folded: Sequence[Folded], residual: Sequence[Residual]) -> None:
    """Launches `_vector_grad_kernel`; the grid is empty if there are no vectors."""
    args: dict[str, Any] = {}
    programs = sums = 0
    for suffix, products, found in _slots(folded, residual):
        after_norm = suffix in ("", "3")
        vectors = (found.gamma, found.beta) if found and after_norm else (found.bias, found.scale) if found else ()
        F = C = 0
        if all(vector is None for vector in vectors):
            products = found = None
        elif after_norm:
            _, F, C = products.part.shape
        else:
            C, F = found.weight.shape
            sums = sums if found.grad_part is None else found.grad_part.shape[0]
        if after_norm:
            args |= pointers(suffix, found, vector_part="vector_part", gamma_grad="gamma", beta_grad="beta")
        else:
            args |= pointers(suffix, products, bias="bias", scale="scale")
            args |= pointers(
                suffix, found, grad_part="grad_part", scale_part="scale_part", bias_grad="bias", scale_grad="scale"
            )
        programs += ceil_div(C, _VECTOR_COLS)
        args |= {f"F{suffix}": F, f"C{suffix}": C}
    constants = {"WEIGHT_ROWS": ROWS, "WEIGHT_COLS": COLS, "COLS": _VECTOR_COLS}
    device = (folded or residual)[0][0].part.device
    Launch(
        _vector_grad_kernel, (programs,), args | {"sums": sums}, constants,
        num_warps=4, maxnreg=_REGISTERS, device=device,
    ).run()  # fmt: skip


def parameter_gradients(
    folded: Sequence[FoldedProducts], residual: Sequence[ResidualProducts]
) -> tuple[list[Gradients], list[Gradients]]:
    """Returns the gradients of up to two linear layers after LayerNorms and two before residuals, with equal M."""
    first = [(products, _room_for(products)) for products in folded]
    second = [(products, _room_for(products)) for products in residual]
    _run_weight_gradients(first, second)
    _run_vector_gradients(first, second)
    return [found for _, found in first], [found for _, found in second]
