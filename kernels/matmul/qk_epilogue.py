"""Epilogue of a qkv matmul for the columns of q and k: norms over each head, and rotary positions.

`rotary.py` states the formulas. The two channels of a pair are adjacent columns here, because `folding.py` permutes the
rows of the weight. A norm reads the unrounded fp32 values of a whole head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rotary import normed_pairs


@triton.jit
def _normed_columns(value, heads, which, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Normalizes a head of q (which = 0) or of k, [ROWS, HEAD].

    HALVES: in weight and bias of the norm, a pair has channels j and j + HEAD / 2.
    """
    q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, eps, _, _, _, _, _ = heads
    HEAD: tl.constexpr = HEADS[0]
    first, second = tl.split(value.reshape(ROWS, HEAD // 2, 2))
    pairs = tl.arange(0, HEAD // 2)[None, :]
    first, second = normed_pairs(
        first, second, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, which, 0, pairs, pairs < HEAD // 2, eps, 1,
        HEAD, HEADS[1], False, not HEADS[2],
    )  # fmt: skip
    return tl.join(first, second).reshape(ROWS, HEAD)


@triton.jit
def _rotated_columns(value, heads, where, ROWS: tl.constexpr, COLS: tl.constexpr, HEADS: tl.constexpr):
    """Rotates pairs of adjacent columns of q and k by the angles of the token."""
    _, _, _, _, _, cos_ptr, sin_ptr, tokens, prefix, image_rows = heads
    row, col, M, N = where
    HEAD: tl.constexpr = HEADS[0]
    rows = row + tl.arange(0, ROWS)
    pairs = col // 2 + tl.arange(0, COLS // 2)
    position = rows % tokens - prefix
    line = (rows // tokens).to(tl.int64) * image_rows + position
    offsets = line[:, None] * HEADS[3] + (pairs % (HEAD // 2) * HEADS[4])[None, :]
    inside = ((rows < M) & (position >= 0))[:, None] & (pairs < N // 3)[None, :]
    cos = tl.load(cos_ptr + offsets, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    first, second = tl.split(value.reshape(ROWS, COLS // 2, 2))
    return tl.join(first * cos - second * sin, second * cos + first * sin).reshape(ROWS, COLS)


@triton.jit
def finished_heads(value, heads, where, ROWS: tl.constexpr, COLS: tl.constexpr, HEADS: tl.constexpr):
    """Returns a piece [ROWS, COLS] of qkv after the norms and rotary positions of q and k.

    heads: (q_weight, k_weight, q_bias, k_bias, eps, cos, sin, tokens, prefix, image_rows) of `_matmul_kernel`.
    HEADS: (HEAD, NORM, HALVES, ROW_STEP, PAIR_STEP) of `_matmul_kernel`.
    """
    col, N = where[1], where[3]
    if HEADS[1] != "none":
        if col < 2 * (N // 3):
            value = _normed_columns(value, heads, col // (N // 3), ROWS, HEADS)
    if heads[5] is not None:
        if col < 2 * (N // 3):
            value = _rotated_columns(value, heads, where, ROWS, COLS, HEADS)
    return value
