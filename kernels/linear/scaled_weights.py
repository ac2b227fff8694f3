"""Weights as operands of matmuls: contiguous, in the dtype of the matmul, and for the backward scaled by LayerScale ls.

    W~ = diag(ls) W / f, rounded to the dtype

In fp16, f is the largest |ls|, rounded down to a power of two. Without f, an ls of 1e-5 (CaiT, DINOv2) would make W~
underflow, which loss scaling does not prevent. The matmul's epilogue multiplies by f. In other dtypes and without
LayerScale, f is 1. One launch converts up to three weights. Weights that need no conversion are used without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import load_chunk, load_columns, rows_launch, store_chunk

_AT_ONCE = 3  # maximum number of weights per launch


@triton.jit
def _largest_power(scale_ptr, F, BLOCK: tl.constexpr):
    """Returns f: the largest |ls|, rounded down to a power of two, at least 2^-126."""
    largest = tl.full((BLOCK,), 2.0**-126, tl.float32)
    for first in tl.range(0, F, BLOCK):
        largest = tl.maximum(largest, tl.abs(load_columns(scale_ptr, first + tl.arange(0, BLOCK), F, 0.0)))
    exponent = tl.max(largest, 0).to(tl.int32, bitcast=True) & 0x7F800000
    return exponent.to(tl.float32, bitcast=True)


@triton.jit
def _scale_rows(layer, program, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    (
        F, C,
        weight_ptr,  # [F, C]
        scale_ptr,  # [F] or None
        factor_ptr,  # output: fp32 [C], f repeated; None without LayerScale, or if the dtype is not fp16
        scaled_ptr,  # output: [F, C]
    ) = layer  # fmt: skip
    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < F
    start = rows.to(tl.int64)[:, None] * C
    scale = load_columns(scale_ptr, rows, F, 1.0)
    if factor_ptr is not None:
        factor = _largest_power(scale_ptr, F, BLOCK_C)
        scale /= factor
        if program == 0:
            for first in tl.range(0, C, BLOCK_C):
                cols = first + tl.arange(0, BLOCK_C)
                tl.store(factor_ptr + cols, tl.zeros((BLOCK_C,), tl.float32) + factor, mask=cols < C)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        scaled = load_chunk(weight_ptr, start, cols, mask) * scale[:, None]
        store_chunk(scaled_ptr, scaled, start, cols, mask)


@triton.jit
def _scaled_weights_kernel(
    first, second, third,  # each like `layer` in `_scale_rows`; if absent, its sizes are 0
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    second_start = tl.cdiv(first[0], ROWS)
    third_start = second_start + tl.cdiv(second[0], ROWS)
    if program < second_start:
        _scale_rows(first, program, ROWS, BLOCK_C)
    elif program < third_start:
        if second[2] is not None:
            _scale_rows(second, program - second_start, ROWS, BLOCK_C)
    elif third[2] is not None:
        _scale_rows(third, program - third_start, ROWS, BLOCK_C)


@dataclass(frozen=True)
class ScaledWeight:
    """W~ and f: diag(ls) W as an operand of a matmul."""

    weight: Tensor  # W~ [F, C]
    factor: Tensor | None  # f repeated, fp32 [C]; None without LayerScale, or if the dtype is not fp16


def scaled_weights(pairs: Sequence[tuple[Tensor, Tensor | None]], dtype: torch.dtype) -> list[ScaledWeight]:
    """Returns W~ in `dtype` and f for each pair of W [F, C] and LayerScale ls, [F] or None."""
    made: list[ScaledWeight] = []
    todo: list[tuple[Any, ...]] = []
    for weight, scale in pairs:
        dense = weight.contiguous()
        if scale is None and dense.dtype == dtype:
            made.append(ScaledWeight(dense, None))
            continue
        factored = scale is not None and dtype == torch.float16
        factor = dense.new_empty(dense.shape[1], dtype=torch.float32) if factored else None
        made.append(ScaledWeight(torch.empty_like(dense, dtype=dtype), factor))
        scale = scale if scale is None else scale.contiguous()
        todo.append((*dense.shape, dense, scale, factor, made[-1].weight))
    for start in range(0, len(todo), _AT_ONCE):
        weights = todo[start : start + _AT_ONCE]
        rows, widths = zip(*(weight[:2] for weight in weights))
        values = [*weights, *[(0, 0, *[None] * 4)] * 2][:_AT_ONCE]
        rows_launch(_scaled_weights_kernel, rows, max(widths), values, weights[0][2].device).run()
    return made


def in_dtype(dtype: torch.dtype, *weights: Tensor) -> list[Tensor]:
    """Returns contiguous weights in `dtype`; copies only if necessary."""
    return [made.weight for made in scaled_weights([(weight, None) for weight in weights], dtype)]
