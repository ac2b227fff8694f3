"""What a LayerNorm's backward needs of its input, as an operator returns and autograd keeps it.

fp32 rows are kept normalised, in the dtype of the matmuls, with rstd as fp32 [1, M]. Half-precision rows are kept as
they lie, with (mean, rstd) as fp32 [2, M]. An operator returns what it made: no result may be one of its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import new_statistics, no_tensor

if TYPE_CHECKING:
    from ..kernels.layer_norm import RowStatistics


def made_rows(x: Tensor, given: Tensor | None, known: RowStatistics) -> tuple[Tensor, Tensor]:
    """(rows, statistics) as far as the operator made them; no tensors in place of x and of statistics handed in."""
    if x.dtype == torch.float32:
        return known.source, known.statistics
    return no_tensor(x), known.statistics if given is None else no_tensor(x)


def fake_made_rows(x: Tensor, given: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for `made_rows` where the matmuls are of a dtype."""
    if x.dtype == torch.float32:
        M, C = x.numel() // x.shape[-1], x.shape[-1]
        return x.new_empty((M, C), dtype=dtype), x.new_empty((1, M))
    return no_tensor(x), new_statistics(x, given is None)


def rows_to_keep(x: Tensor, given: Tensor | None, made: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, statistics) for the backward, from an operator's inputs and what it made."""
    if x.dtype == torch.float32:
        return made, statistics
    return x, statistics if given is None else given


def input_dtype(rows: Tensor, statistics: Tensor) -> torch.dtype:
    """The dtype of x, from what was kept: that of its gradient."""
    return torch.float32 if statistics.shape[0] == 1 else rows.dtype
