"""Layout of LayerNorm statistics between kernels: one pair per piece of columns; the reading kernel combines them.

fp32 [M, 2, row_parts(C)]: means, then sums of squared deviations, of PIECE columns each; the last piece may be shorter.
The shape depends on C alone, so that operators can be traced without triton. A row's pieces are adjacent, because they
are written once and read by every tile.
"""

from __future__ import annotations

PIECE = 64  # columns; a matmul's epilogue processes this many or half as many at a time


def row_parts(width: int) -> int:
    """Returns the number of pieces of a row of `width` columns."""
    return -(-width // PIECE)
