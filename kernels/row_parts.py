"""Layout of partial LayerNorm statistics, which one kernel writes and the next kernel combines (`layer_norm.py`).

A row of C columns consists of pieces of PIECE columns; the last piece may be shorter. The tensor, fp32
[M, 2, row_parts(C)], contains for each row the means of its pieces, then the sums of squared deviations from these
means. This file must not import triton: fake kernels use `row_parts`, and also run without triton.
"""

from __future__ import annotations

PIECE = 64  # columns


def row_parts(width: int) -> int:
    """Returns the number of pieces of a row of `width` columns."""
    return -(-width // PIECE)
