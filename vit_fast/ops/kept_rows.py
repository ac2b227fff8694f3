"""Row statistics as operators return them: for the LayerNorm that follows, and for the backward of their own.

What goes from operator to operator is of pieces of columns, fp32 [M, 2, row_parts(C)]; whoever reads it combines it
with an epsilon of its own (`kernels/row_parts.py`). For its backward an operator keeps its rows: those of fp32
normalised, in the dtype of the matmuls, with rstd as fp32 [1, M]; those of half precision as they lie, with (mean,
rstd) as fp32 [2, M]. No result of an operator may be one of its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.row_parts import row_parts
from .checks import no_tensor

if TYPE_CHECKING:
    from ..kernels.layer_norm import RowStatistics


def fake_statistics(x: Tensor, width: int, present: bool) -> Tensor:
    """Room for the statistics of rows of `width` columns, as many as x [..., C] has; no tensor where not wanted."""
    rows = x.numel() // x.shape[-1]
    return x.new_empty((rows, 2, row_parts(width)), dtype=torch.float32) if present else no_tensor(x)


def made_rows(x: Tensor, known: RowStatistics) -> tuple[Tensor, Tensor]:
    """(rows, statistics) as far as the operator made them: no tensor in place of x."""
    return known.source if x.dtype == torch.float32 else no_tensor(x), known.statistics


def fake_made_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for `made_rows` where the matmuls are of a dtype."""
    M, C = x.numel() // x.shape[-1], x.shape[-1]
    if x.dtype == torch.float32:
        return x.new_empty((M, C), dtype=dtype), x.new_empty((1, M))
    return no_tensor(x), x.new_empty((2, M), dtype=torch.float32)


def rows_to_keep(x: Tensor, made: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, statistics) for the backward, from an operator's input and what it made."""
    return made if x.dtype == torch.float32 else x, statistics


def input_dtype(rows: Tensor, statistics: Tensor) -> torch.dtype:
    """The dtype of x, from what was kept: that of its gradient."""
    return torch.float32 if statistics.shape[0] == 1 else rows.dtype
