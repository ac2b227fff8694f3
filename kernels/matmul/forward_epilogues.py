"""Forward epilogues of `matmul.py`, which describes their parameters. acc is A B.

A function NAME_epilogue follows each device function, and gives the shapes of its matrices and arguments.

A LayerNorm may be folded into B (`linear/folding.py`). With the statistics mean and rstd of a row of A,

    z = rstd (acc scale - mean weight_sum) + bias

weight_sum [N] contains the sums over K of B (s in `folding.py`; None for RMSNorm). `scale`, fp32 [N] or None, contains
the row scales of an e4m3 weight. Without `row_part`, A is normalized already: mean is 0 and rstd is 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate
from ..launch import decoded, unspecialized
from ..layer_norm import combine_statistics, merge_next, piece_statistics, store_statistics
from ..ptx import divided, divided_columns, rounded
from ..rotary import normed_pairs, shared_arguments
from ..row_parts import PIECE
from .matmul_launch import Epilogue, MatmulConfig
from .matmul_tiles import dtype_of, load_sub_tiles, store_tile


class FoldedNorm(NamedTuple):
    """The LayerNorm of A: its partial statistics as input, and its statistics as output."""

    row_part: Tensor | None = None  # fp32 [M, 2, PARTS], partial LayerNorm statistics of A (row_parts.py)
    statistics: Tensor | None = None  # output: mean and rstd of the rows of A, fp32 [2, M]; negative rstd: constant row
    weight_sum: Tensor | None = None  # fp32 [N]; None for RMSNorm
    eps: float = 0.0


_NO_NORM = FoldedNorm()


@triton.constexpr_function
def _sub_tiles_per_piece(COLS):
    return PIECE // COLS


@triton.jit
def _row_factors(norm, where, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Returns (r, -r * mean) of each row, or (1, 0) without `row_part`. `norm`: a `FoldedNorm`.

    r is rstd, or 0 for a constant row, which `combine_statistics` marks by a negative rstd.
    """
    row_part_ptr, statistics_ptr, weight_sum_ptr, eps = norm
    row, col, M, _, K, _ = where
    scale = tl.full((ROWS,), 1.0, tl.float32)
    shift = tl.zeros((ROWS,), tl.float32)
    if row_part_ptr is not None:
        mean, rstd = combine_statistics(row_part_ptr, row, M, K, eps, ROWS, PARTS, weight_sum_ptr is None)
        scale = tl.maximum(rstd, 0.0)
        shift = -scale * mean
        if statistics_ptr is not None:
            rows = row + tl.arange(0, ROWS)
            once = (rows < M) & (col == 0)
            tl.store(statistics_ptr + rows, mean, mask=once)
            tl.store(statistics_ptr + M + rows, rstd, mask=once)
    return scale, shift


@triton.jit
def _normed(acc, weight_sum_ptr, scale_ptr, factors, cols, N):
    """Returns z - bias of columns `cols`; `factors` are from `_row_factors`."""
    value = acc * factors[0][:, None]
    if scale_ptr is not None:
        value *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if weight_sum_ptr is not None:
        value += factors[1][:, None] * tl.load(weight_sum_ptr + cols, mask=cols < N, other=0.0)[None, :]
    return value


@triton.jit
def _pre_activation(
    acc, norm, scale_ptr, bias_ptr, factors, z, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Returns a sub-tile of z. If the matrix `z` is not None, stores z, and returns the stored, rounded values."""
    cols = col + tl.arange(0, COLS)
    value = _normed(acc, norm[2], scale_ptr, factors, cols, N)
    value += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if z is not None:  # the backward applies the activation to the rounded values, too
        stored = rounded(value, dtype_of(z, TMA))
        store_tile(z, stored, row, col, M, N, ROWS, COLS, TMA)
        value = stored.to(tl.float32)
    return value


@triton.jit
def _merge_statistics(
    merged, value, out_part_ptr, row, col, M, N,
    INDEX: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Merges the LayerNorm statistics of sub-tile INDEX into those of its piece; stores them after its last sub-tile.

    `value`: stored values of the sub-tile. `col`: first column of the tile. PARTS: pieces per row (row_parts.py).
    WHOLE: all pieces have full width.
    """
    TIMES: tl.constexpr = _sub_tiles_per_piece(COLS)
    found = piece_statistics(value.to(tl.float32), col + INDEX * COLS, N, COLS, WHOLE)
    first = col + INDEX // TIMES * TIMES * COLS
    if INDEX % TIMES > 0:
        found = merge_next(merged, found, first, N, INDEX % TIMES * COLS, COLS)
    if INDEX % TIMES == TIMES - 1:
        store_statistics(out_part_ptr, found[0], found[1], row, first, M, N, ROWS, PARTS)
    return found


def _parts(statistics: Tensor | None) -> int:
    return 0 if statistics is None else statistics.shape[-1]


def _output_settings(out_part: Tensor | None, out: Tensor) -> tuple[int, bool]:
    """Returns PARTS and WHOLE of `_merge_statistics`."""
    return _parts(out_part), out_part is not None and out.shape[-1] % PIECE == 0


# --- out = act(z): a linear layer after a LayerNorm; with a gate, out = act(g) u ---


@triton.jit
def layer_norm(
    sub_tiles, matrices, arguments, settings, where, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """Stores act(z) or act(g) u, z if given, and partial LayerNorm statistics of out if `out_part` is given.

    Columns 2j and 2j + 1 of z are g and u (`linear/folding.py`). If out is e4m3, the result is multiplied by out_scale.
    settings: (PARTS of row_part, activation, PARTS and WHOLE of `_merge_statistics`, True with a gate, 0).
    """
    out, z, _, _ = matrices
    row_part_ptr, statistics_ptr, weight_sum_ptr, eps, scale_ptr, bias_ptr, out_scale_ptr, out_part_ptr = arguments
    row, col, M, N, _, _ = where
    GATED: tl.constexpr = settings[4]
    WIDTH: tl.constexpr = 2 if GATED else 1  # columns of z per column of out
    norm = (row_part_ptr, statistics_ptr, weight_sum_ptr, eps)
    factors = _row_factors(norm, where, ROWS, settings[0])
    merged = None
    for i in tl.static_range(len(sub_tiles)):
        start = col + i * COLS
        value = _pre_activation(sub_tiles[i], norm, scale_ptr, bias_ptr, factors, z, row, start, M, N, ROWS, COLS, TMA)
        if GATED:
            gate, up = tl.split(value.reshape(ROWS, COLS // 2, 2))
            value = activate(gate, settings[1], dtype_of(out, TMA) == tl.float32) * up
        else:
            value = activate(value, settings[1], dtype_of(out, TMA) == tl.float32)
        stored = divided(value, out_scale_ptr).to(dtype_of(out, TMA))
        store_tile(out, stored, row, start // WIDTH, M, N // WIDTH, ROWS, COLS // WIDTH, TMA)
        if out_part_ptr is not None:
            merged = _merge_statistics(
                merged, stored, out_part_ptr, row, col // WIDTH, M, N // WIDTH, i, ROWS, COLS // WIDTH, settings[2],
                settings[3],
            )  # fmt: skip


def layer_norm_epilogue(
    out: Tensor,  # [M, N]; with a gate, [M, N / 2]
    norm: FoldedNorm,
    bias: Tensor,  # fp32 [N]
    scale: Tensor | None = None,  # fp32 [N]
    activation: str = "identity",
    has_gate: bool = False,
    z: Tensor | None = None,  # output: z before the activation, [M, N]
    out_scale: Tensor | None = None,  # fp32 [1], the reciprocal scale of an e4m3 `out` (ptx.py)
    out_part: Tensor | None = None,  # output, only with a gate: partial statistics of out, fp32 [M, 2, parts]
) -> Epilogue:
    return Epilogue(
        "gated" if has_gate else "layer_norm", layer_norm, (out, z), (*norm, scale, bias, out_scale, out_part),
        (_parts(norm.row_part), activation, *_output_settings(out_part, out), has_gate),
        activation=activation, instructions=10 if has_gate else 7 if activation == "identity" else 17,
        narrowest=0 if out_part is None else 2 * PIECE,
    )  # fmt: skip


# --- out = z of a qkv matmul, with norms and rotary embeddings of the heads of q and k (`rotary.py`) ---


@triton.jit
def _rotated_columns(value, tables, counts, steps, where, ROWS: tl.constexpr, COLS: tl.constexpr, HEAD: tl.constexpr):
    """Rotates pairs of adjacent columns of q and k by the angles of each token.

    counts: (tokens, prefix + 1, image_rows + 1) of `Rotary`, encoded. steps: strides of rows and pairs of the tables.
    """
    row, col, M, N = where
    tokens = decoded(counts[0])
    rows = row + tl.arange(0, ROWS)
    pairs = col // 2 + tl.arange(0, COLS // 2)
    position = rows % tokens - (decoded(counts[1]) - 1)
    line = (rows // tokens).to(tl.int64) * (decoded(counts[2]) - 1) + position
    offsets = line[:, None] * steps[0] + (pairs % (HEAD // 2) * steps[1])[None, :]
    inside = ((rows < M) & (position >= 0))[:, None] & (pairs < N // 3)[None, :]
    cos = tl.load(tables[0] + offsets, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + offsets, mask=inside, other=0.0).to(tl.float32)
    first, second = tl.split(value.reshape(ROWS, COLS // 2, 2))
    return tl.join(first * cos - second * sin, second * cos + first * sin).reshape(ROWS, COLS)


@triton.jit
def _normed_columns(
    value, weights, biases, eps, which, ROWS: tl.constexpr, HEAD: tl.constexpr, NORM: tl.constexpr, HALVES: tl.constexpr
):
    """Normalizes a head of q (which = 0) or of k, [ROWS, HEAD], in fp32, before any rounding.

    HALVES: a pair has channels (j, j + HEAD / 2) in weights and biases; it has (2j, 2j + 1) in z (`folding.py`).
    """
    first, second = tl.split(value.reshape(ROWS, HEAD // 2, 2))
    pairs = tl.arange(0, HEAD // 2)[None, :]
    first, second = normed_pairs(
        first, second, weights, biases, which, 0, pairs, pairs < HEAD // 2, eps, 1, HEAD, NORM, False, not HALVES
    )
    return tl.join(first, second).reshape(ROWS, HEAD)


@triton.jit
def rotary(sub_tiles, matrices, arguments, settings, where, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Stores z after norms (unless NORM is "none") and rotary embeddings (if there are tables) of q and k.

    settings: (PARTS of row_part, HEAD, NORM, HALVES of `_normed_columns`, steps of `_rotated_columns`, 0).
    """
    (
        row_part_ptr, statistics_ptr, weight_sum_ptr, eps, scale_ptr, bias_ptr, q_weight, k_weight, q_bias, k_bias,
        cos, sin, qk_eps, tokens, prefix, image_rows,
    ) = arguments  # fmt: skip
    row, col, M, N, _, _ = where
    HEAD: tl.constexpr = settings[1]
    NORM: tl.constexpr = settings[2]
    norm = (row_part_ptr, statistics_ptr, weight_sum_ptr, eps)
    factors = _row_factors(norm, where, ROWS, settings[0])
    for i in tl.static_range(len(sub_tiles)):
        start = col + i * COLS
        value = _pre_activation(
            sub_tiles[i], norm, scale_ptr, bias_ptr, factors, None, row, start, M, N, ROWS, COLS, TMA
        )
        if NORM != "none":
            if start < 2 * (N // 3):
                value = _normed_columns(
                    value, (q_weight, k_weight), (q_bias, k_bias), qk_eps, start // (N // 3), ROWS, HEAD, NORM,
                    settings[3],
                )  # fmt: skip
        if cos is not None:
            if start < 2 * (N // 3):
                value = _rotated_columns(
                    value, (cos, sin), (tokens, prefix, image_rows), (settings[4], settings[5]), (row, start, M, N),
                    ROWS, COLS, HEAD,
                )  # fmt: skip
        store_tile(matrices[0], value.to(dtype_of(matrices[0], TMA)), row, start, M, N, ROWS, COLS, TMA)


def rotary_epilogue(
    out: Tensor,  # [M, N], N = 3 * heads * head_dim
    norm: FoldedNorm,
    bias: Tensor,  # fp32 [N]
    scale: Tensor | None,  # fp32 [N]
    tensors: Any,  # as in `rotary.py`; tables [B or 1, 1, tokens - prefix, head_dim / 2]
    qk: Any,  # settings, as in `rotary.py`; not `over` the width
    tokens: int,  # per image
    head_dim: int,
) -> Epilogue:
    rotates, (args, constants) = qk.norm == "none", shared_arguments(tensors, qk)
    counts = map(unspecialized, (tokens, args["prefix"] + 1, args["image_rows"] + 1))
    halves = tensors.cos is not None and qk.layout != "interleaved"
    return Epilogue(
        "rotary" if rotates else "qk_norm", rotary, (out,),
        (*norm, scale, bias, *args["weights"], tensors.q_bias, tensors.k_bias, *args["tables"], qk.eps, *counts),
        (_parts(norm.row_part), head_dim, qk.norm, halves, constants["ROW_STEP"], constants["PAIR_STEP"]),
        instructions=18 if rotates else 29, head=0 if rotates else head_dim,
    )  # fmt: skip


# --- out = [residual +] [scale] (acc + bias): a linear layer before a residual ---


@triton.jit
def add_residual(
    sub_tiles, matrices, arguments, settings, where, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr
):
    """Stores out, and if given, `branch` (acc), LayerNorm statistics of out, and out8 (out * out_scale in e4m3).

    With a norm folded into B, z - bias replaces acc. settings: (PARTS of row_part, PARTS and WHOLE of
    `_merge_statistics`, EARLY).
    """
    out, branch, residual, out8 = matrices
    row_part_ptr, statistics_ptr, weight_sum_ptr, eps, scale_ptr, bias_ptr, out_part_ptr, out_scale_ptr = arguments
    row, col, M, N, _, _ = where
    COUNT: tl.constexpr = len(sub_tiles)
    EARLY: tl.constexpr = settings[3]  # number of sub-tiles of the residual that are loaded ahead
    factors = _row_factors((row_part_ptr, statistics_ptr, weight_sum_ptr, eps), where, ROWS, settings[0])
    if residual is not None:
        added = load_sub_tiles(residual, row, col, M, N, ROWS, COLS, EARLY)
    merged = None
    for i in tl.static_range(COUNT):
        start = col + i * COLS
        cols = start + tl.arange(0, COLS)
        if residual is not None and i + EARLY < COUNT:
            added = added + load_sub_tiles(residual, row, start + EARLY * COLS, M, N, ROWS, COLS, 1)
        value = sub_tiles[i]
        if row_part_ptr is not None:
            value = _normed(value, weight_sum_ptr, None, factors, cols, N)
        if branch is not None:
            store_tile(branch, value.to(dtype_of(branch, TMA)), row, start, M, N, ROWS, COLS, TMA)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if scale_ptr is not None:
            value *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            value += added[i].to(tl.float32)
        stored = rounded(value, dtype_of(out, TMA))
        store_tile(out, stored, row, start, M, N, ROWS, COLS, TMA)
        if out_part_ptr is not None:
            merged = _merge_statistics(
                merged, stored, out_part_ptr, row, col, M, N, i, ROWS, COLS, settings[1], settings[2]
            )
        if out8 is not None:  # after the statistics, because this order needs fewer registers
            narrow = divided_columns(stored, out_scale_ptr, start, N, COLS)
            store_tile(out8, narrow, row, start, M, N, ROWS, COLS, TMA)


class BranchOutput(NamedTuple):
    """out = [residual +] [scale] (acc + bias), and what is computed from it or for it; all tensors are contiguous."""

    out: Tensor  # output: [M, N], fp32 or half precision
    residual: Tensor | None = None  # [M, N], in the dtype of out
    out_part: Tensor | None = None  # output: partial LayerNorm statistics of out, fp32 [M, 2, parts] (row_parts.py)
    out8: Tensor | None = None  # output: [M, N] e4m3
    bias: Tensor | None = None  # [N]; if `scale` has row scales of an e4m3 weight, divided by them
    scale: Tensor | None = None  # [N], LayerScale, times the row scales of an e4m3 weight
    out_scale: Tensor | None = None  # fp32 [N], reciprocal scales of out8 (ptx.py)

    def of_rows(self, rows: slice) -> BranchOutput:
        return self._replace(**{name: t[rows] for name, t in zip(self._fields, self[:4]) if t is not None})


def residual_epilogue(output: BranchOutput, norm: FoldedNorm = _NO_NORM, branch: Tensor | None = None) -> Epilogue:
    out, residual, out_part, out8, bias, scale, out_scale = output

    def early(a: Tensor, config: MatmulConfig) -> int:
        """Early loads need registers. With e4m3, only one sub-tile of the residual is loaded early."""
        return 1 if out8 is not None or a.dtype == torch.float8_e4m3fn else config.sub_tiles

    extras = 8 * (residual is not None) + 7 * (out_part is not None) + 5 * (out8 is not None)
    return Epilogue(
        "residual", add_residual, (out, branch, residual, out8), (*norm, scale, bias, out_part, out_scale),
        (_parts(norm.row_part), *_output_settings(out_part, out)), instructions=2 + extras,
        early=early, by_pointer=(2,), narrowest=0 if out_part is None else PIECE,
        largest=128 * 128 if norm.row_part is not None else 2**31,
    )  # fmt: skip


# --- out[part] = acc, fp32: split-K; `linear/split_k.py` sums the parts ---


@triton.jit
def partial(sub_tiles, matrices, arguments, settings, where, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    row, col, M, N, _, part = where
    base = matrices[0] + tl.cast(part, tl.int64) * M * N
    store_tile(base, sub_tiles[0], row, col, M, N, ROWS, COLS, False)


def partial_epilogue(out: Tensor) -> Epilogue:
    """`out`: fp32 [parts, M, N]."""
    return Epilogue("partial", partial, (out,), instructions=4, early=lambda *_: 1, by_pointer=(0,))
