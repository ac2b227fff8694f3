"""The form in which row statistics go from kernel to kernel: of pieces of columns, combined by whoever reads them.

fp32 [M, 2, row_parts(C)]: means, then sums of squared deviations, of PIECE columns each, the last piece shorter. The
form follows from C alone, whoever wrote it, so that operators can be traced where no kernel is; nothing is imported. A
row's pieces lie together because they are written once and read by every tile.
"""

from __future__ import annotations

PIECE = 64  # columns; a matmul's epilogue works on as many at a time, or on half of them


def row_parts(width: int) -> int:
    """Pieces of a row of `width` columns."""
    return -(-width // PIECE)
