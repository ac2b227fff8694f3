"""Layout of LayerNorm statistics, which one kernel writes per piece of a row and the next kernel combines.

fp32 [M, 2, row_parts(C)]: for each of M rows, the means of its pieces, then their sums of squared deviations. A piece
has PIECE columns; the last one may be shorter. The statistics of a row are adjacent, because every tile reads them.
The shape depends only on C, so operators can be traced without triton.
"""

from __future__ import annotations

PIECE = 64  # columns


def row_parts(width: int) -> int:
    """Returns the number of pieces of a row of `width` columns."""
    return -(-width // PIECE)
