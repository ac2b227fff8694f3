"""LayerNorm folded into the linear layer that follows.

The LayerNorm has the weight gamma and the bias beta, the linear layer the weight W [F, C] and the bias b [F]. Let mean
and rstd be the mean and the reciprocal standard deviation of an input row x [C]. Then:

    W'' = W diag(gamma) - rowmean(W diag(gamma)), rounded to the dtype of the matmul
    s   = rowsum(W''), zero except for rounding errors
    c   = W beta + b
    z   = rstd (x W''^T - mean s) + c = LayerNorm(x) W^T + b

Subtracting the row means does not change z, because the channels of x - mean sum to zero. The term mean s corrects the
rounding errors of W'', which a large mean amplifies. The matmul reads x directly, and its epilogue computes z.

Only for fp32 x, a separate kernel first writes n = (x - mean) rstd. The matmul then reads n, and z = n W''^T + c. For
RMSNorm, W'' = W diag(gamma), z = rstd x W''^T + c and rstd = 1 / sqrt(mean(x^2) + eps).

One launch folds up to two layers, usually qkv and fc1, and permutes rows of W in two cases:

- A gated layer computes act(g) u, where g and u are the outputs of two linear layers after the same LayerNorm. Rows 2j
  and 2j + 1 of W'' come from row j of the weight of g and row j of the weight of u. Each output tile of the matmul then
  contains g and u.
- Rotary embeddings can rotate channels j and j + D/2 of a head as a pair (D is head_dim). The rows of W'' of such a
  pair become adjacent. q k^T stays the same, because q and k are permuted equally.

Source: vit-fast's own derivation, checked in fp64 by the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import load_chunk, load_columns, rows_launch, store_chunk


@triton.jit
def row_pointers(pointer, gate_ptr, rows, C, F=0, HEAD: tl.constexpr = 0):
    """Returns pointers to the rows of the weight or gate that become `rows` of W''.

    HEAD: head_dim if the rows of q and k, the first two thirds of F rows, are permuted; else 0.
    """
    if HEAD:
        place = rows % HEAD
        source = rows - place + place // 2 + place % 2 * (HEAD // 2)
        rows = tl.where(rows < F // 3 * 2, source, rows)
    if gate_ptr is None:
        return pointer + rows.to(tl.int64) * C
    else:
        return tl.where(rows % 2 == 0, gate_ptr, pointer) + (rows // 2).to(tl.int64) * C


@triton.jit
def _fold_rows(layer, program, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    (
        F, C,
        weight_ptr, bias_ptr,  # [F, C]; [F] or None. With a gate, both have F / 2 rows
        gamma_ptr, beta_ptr,  # [C] or None
        gate_ptr, gate_bias_ptr,  # like weight and bias; None without a gate
        folded_ptr,  # output: [F, C] W''
        sum_ptr,  # output: fp32 [F] s; None for RMSNorm
        shift_ptr,  # output: fp32 [F] c
    ) = layer  # fmt: skip
    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < F
    start = rows.to(tl.int64)[:, None] * C
    source = row_pointers(weight_ptr, gate_ptr, rows, C, F, HEAD)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    shift = tl.zeros((ROWS,), tl.float32)
    if bias_ptr is not None:
        shift += tl.load(row_pointers(bias_ptr, gate_bias_ptr, rows, 1, F, HEAD), mask=inside, other=0.0).to(tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        weight = load_chunk(source, 0, cols, inside[:, None] & (cols < C)[None, :])
        total += tl.sum(weight * load_columns(gamma_ptr, cols, C, 1.0)[None, :], 1)
        shift += tl.sum(weight * load_columns(beta_ptr, cols, C, 0.0)[None, :], 1)
    mean = total / C
    if sum_ptr is None:
        mean = tl.zeros((ROWS,), tl.float32)
    left = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, C, BLOCK_C):
        cols = first + tl.arange(0, BLOCK_C)
        mask = inside[:, None] & (cols < C)[None, :]
        scaled = load_chunk(source, 0, cols, mask) * load_columns(gamma_ptr, cols, C, 1.0)[None, :]
        folded = tl.where(mask, scaled - mean[:, None], 0.0).to(folded_ptr.dtype.element_ty)
        store_chunk(folded_ptr, folded, start, cols, mask)
        left += tl.sum(folded.to(tl.float32), 1)
    if sum_ptr is not None:
        tl.store(sum_ptr + rows, left, mask=inside)
    tl.store(shift_ptr + rows, shift, mask=inside)


@triton.jit
def _fold_kernel(
    layer, second,  # as in `_fold_rows`; if there is no second layer, all elements of `second` are None
    HEAD: tl.constexpr,  # head_dim if q and k of the first layer are permuted; else 0
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = tl.cdiv(layer[0], ROWS)
    if program < first:
        _fold_rows(layer, program, HEAD, ROWS, BLOCK_C)
    elif second[2] is not None:
        _fold_rows(second, program - first, 0, ROWS, BLOCK_C)


@dataclass(frozen=True)
class NormedLinear:
    """A linear layer and the LayerNorm before it; all tensors are contiguous."""

    weight: Tensor  # [F, C]; with a gate, [F / 2, C]
    bias: Tensor | None
    gamma: Tensor | None  # weight of the LayerNorm [C]; None means ones
    beta: Tensor | None  # bias of the LayerNorm [C]; None means zeros
    rms: bool = False  # the norm is an RMSNorm
    gate: Tensor | None = None  # weight of g in act(g) u; `weight` is then the weight of u
    gate_bias: Tensor | None = None
    rope_head: int = 0  # head_dim if rows of q and k are permuted, else 0; must be 0 for the second layer of a launch

    @property
    def rows(self) -> int:
        return self.weight.shape[0] * (1 if self.gate is None else 2)


@dataclass(frozen=True)
class FoldedLinear:
    """A linear layer with the LayerNorm before it folded in."""

    weight: Tensor  # W'' [F, C] in the dtype of the matmul; F includes the rows of the gate
    weight_sum: Tensor | None  # s, fp32 [F]; None for RMSNorm
    shift: Tensor  # c, fp32 [F]
    scale: Tensor | None = None  # row scales of an e4m3 weight, fp32 [F]; None for other dtypes


def fold_linears(linears: Sequence[NormedLinear], dtype: torch.dtype) -> list[FoldedLinear]:
    """Folds the LayerNorms into the linear layers, with weights in `dtype`. Each launch folds up to two layers."""
    folded = []
    for linear in linears:
        sums, shift = (linear.weight.new_empty(linear.rows, dtype=torch.float32) for _ in range(2))
        weight = linear.weight.new_empty((linear.rows, linear.weight.shape[1]), dtype=dtype)
        folded.append(FoldedLinear(weight, None if linear.rms else sums, shift))
    for first in range(0, len(linears), 2):
        layers = [
            (*into.weight.shape, linear.weight, linear.bias, linear.gamma, linear.beta, linear.gate, linear.gate_bias,
             into.weight, into.weight_sum, into.shift)
            for linear, into in zip(linears[first : first + 2], folded[first:])
        ]  # fmt: skip
        rows, widths = zip(*(layer[:2] for layer in layers))
        values, device = [*layers, (None,) * 11][:2], linears[first].weight.device
        rows_launch(_fold_kernel, rows, max(widths), values, device, HEAD=linears[first].rope_head).run()
    return folded
