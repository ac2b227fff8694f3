"""Norm between the hidden layer of an MLP and its second linear layer fc2, as in EVA-02: forward and backward.

The norm is folded into fc2 (`folding.py`). In half precision, the fc2 matmul reads the hidden layer h [M, F] directly.
The fc1 matmul or an extra kernel writes the statistics of h. fp32 h is normalized before the fc2 matmul.

Let h^ = (h - mean) rstd be the normalized h, and y' = h^ W''^T + c the output of fc2, with W'' [C, F] and c [C] of
`folding.py`. The MLP returns y = r + ls y' with residual r and LayerScale ls. Let dy be the gradient of y, and
g = (ls dy) W'' the gradient of h^:

    dh    = rstd (g - h^ * along)
    along = sum_F(g * h^) / F = sum_C(ls dy * (y' - c)) / F, one number per token

The two sums are equal, because y' - c = h^ W''^T. For a LayerNorm, dh omits the mean of g over F. This mean is 0 except
for rounding errors, because each row of W'' sums to 0. The forward stores y' - c. `_along_kernel` computes `along` from
y' - c and dy, and also sums dy over M for the gradients of beta and bias. The matmul of `linear.activation_gradient`
then computes g and dh, and stores h^. For the gradients of W, gamma, beta and bias, substitute dz = ls dy and n = h^ in
`gradients.py`.

Source: differentiation of the formulas above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layer_norm import load_chunk, load_columns, normalize_launch, rows_launch
from ..matmul.forward_epilogues import BranchOutput, FoldedNorm, residual_epilogue
from ..matmul.matmul_launch import Matmul
from .folding import FoldedLinear
from .gradients import column_sum_programs, column_sum_tiles, new_column_sums, store_column_sums
from .linear import run_matmul


def hidden_linear_residual(
    h: Tensor, part: Tensor | None, folded: FoldedLinear, eps: float, output: BranchOutput, training: bool
) -> tuple[Tensor | None, Tensor]:
    """Computes `output` without its bias, which `folded` replaces; returns y' - c and statistics of h for the backward.

    y' - c has the shape and dtype of `output.out`, and is None without `training`. The statistics are mean and rstd of
    h, fp32 [2, M], valid only with `training`. In half precision, a negative rstd marks a constant row
    (`layer_norm.py`).

    Args:
        part: LayerNorm statistics of h (`row_parts.py`); None for fp32 h, which an extra kernel normalizes.
        eps: Epsilon of the norm.
    """
    branch = torch.empty_like(output.out) if training else None
    statistics = torch.empty(2, h.shape[0], dtype=torch.float32, device=h.device)
    source, norm = h, FoldedNorm()
    if part is None:
        source, rms = torch.empty_like(h), folded.weight_sum is None
        normalize_launch(h, eps, statistics[1], source, rms, statistics[0] if training else None).run()
    else:
        norm = FoldedNorm(part, statistics if training else None, folded.weight_sum, eps)
    epilogue = residual_epilogue(output._replace(bias=folded.shift), norm, branch)
    run_matmul(Matmul(source, folded.weight, epilogue, b_is_nk=True))
    return branch, statistics


@triton.jit(do_not_specialize=["M"])
def _along_kernel(
    grad_ptr,  # [M, C] dy
    branch_ptr,  # [M, C] y' - c
    scale_ptr,  # [C] ls or None
    along_ptr,  # output: fp32 [M]
    sum_part_ptr,  # output: fp32 [M / SUM_ROWS, C], partial sums of dy over M
    M, C, F,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sums = column_sum_programs(M, C)
    if program < sums:
        store_column_sums(grad_ptr, sum_part_ptr, program, M, C)
    else:
        rows = (program - sums) * ROWS + tl.arange(0, ROWS)
        inside = rows < M
        start = rows.to(tl.int64)[:, None] * C
        total = tl.zeros((ROWS,), tl.float32)
        for first in tl.range(0, C, BLOCK_C):
            cols = first + tl.arange(0, BLOCK_C)
            mask = inside[:, None] & (cols < C)[None, :]
            grad = load_chunk(grad_ptr, start, cols, mask) * load_columns(scale_ptr, cols, C, 1.0)[None, :]
            total += tl.sum(grad * load_chunk(branch_ptr, start, cols, mask), 1)
        tl.store(along_ptr + rows, total / F, mask=inside)


def along_rows(grad: Tensor, branch: Tensor, scale: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Returns `along`, fp32 [M], and the partial sums of dy over M; `width` is F."""
    along, sum_part = grad.new_empty(grad.shape[0], dtype=torch.float32), new_column_sums(grad)
    M, C = grad.shape
    values = grad, branch, None if scale is None else scale.contiguous(), along, sum_part, M, C, width
    # without maxnreg, ptxas uses 40 registers and spills on sm_100
    rows_launch(_along_kernel, (M,), C, values, grad.device, column_sum_tiles(grad), maxnreg=64).run()
    return along, sum_part
