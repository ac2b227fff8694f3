"""The part of a qkv matmul's epilogue for columns of q and k: norms over the heads, and rotary positions.

The formulas are those of `rotary.py`. Pairs that are turned are neighbouring columns here, as `folding.py` lays the
rows of the weight. A norm sees the sums of the matmul before they are rounded, a whole head at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rotary import normed_pairs


@triton.jit
def turned_columns(
    value, cos_ptr, sin_ptr, tokens, prefix, image_rows, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEAD: tl.constexpr, ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr,
):  # fmt: skip
    """Pairs of neighbouring columns of q and k turned by the angles of their tokens."""
    rows = row + tl.arange(0, ROWS)
    pairs = col // 2 + tl.arange(0, COLS // 2)
    position = rows % tokens - prefix
    line = (rows // tokens).to(tl.int64) * image_rows + position
    offsets = line[:, None] * ROW_STEP + (pairs % (HEAD // 2) * PAIR_STEP)[None, :]
    inside = ((rows < M) & (position >= 0))[:, None] & (pairs < N // 3)[None, :]
    cos = tl.load(cos_ptr + offsets, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    first, second = tl.split(value.reshape(ROWS, COLS // 2, 2))
    return tl.join(first * cos - second * sin, second * cos + first * sin).reshape(ROWS, COLS)


@triton.jit
def normed_columns(
    value, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, eps, which,
    ROWS: tl.constexpr, HEAD: tl.constexpr, NORM: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """A head of q (which = 0) or of k, [ROWS, HEAD], normalised.

    HALVES: to the norm's vectors its pairs are channels j and j + HEAD / 2.
    """
    first, second = tl.split(value.reshape(ROWS, HEAD // 2, 2))
    pairs = tl.arange(0, HEAD // 2)[None, :]
    first, second = normed_pairs(
        first, second, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, which, 0, pairs, pairs < HEAD // 2, eps, 1,
        HEAD, NORM, False, not HALVES,
    )  # fmt: skip
    return tl.join(first, second).reshape(ROWS, HEAD)
