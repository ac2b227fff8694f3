"""Layout of partial LayerNorm statistics. One kernel writes them per piece of a row; the next kernel combines them.

The tensor, fp32 [M, 2, row_parts(C)], contains for each row the means of its pieces, then the pieces' sums of squared
deviations. A piece has PIECE columns; the last piece may be shorter. The statistics of a row are adjacent in memory,
because a tile of the next matmul reads all statistics of its rows. Fake kernels use this file without triton.
"""

from __future__ import annotations

PIECE = 64  # columns


def row_parts(width: int) -> int:
    """Returns the number of pieces of a row of `width` columns."""
    return -(-width // PIECE)
