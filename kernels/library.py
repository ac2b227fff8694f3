"""cuBLASLt, through torch, in place of a matmul of ours: the other way that the policy may take.

    linear_residual      torch.addmm with the residual, or with the bias and a pass of torch's for the rest
    layer_norm_linear    rows normalised in one pass, torch.addmm with the bias, and torch._addmm_activation for the
                         activations that cuBLASLt has (tanh GELU, ReLU) where nobody keeps their argument

Which way runs is decided by `matmul_policy.prefers_library` from measurements; without one it is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import TORCH_ACTIVATIONS
from .folding import FoldedLinear
from .layer_norm import RowStatistics


def linear_residual(
    h: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[residual +] scale (h W^T + b) [M, C] in `dtype`: that of the residual, where there is one."""
    bias = None if bias is None else bias.to(h.dtype)
    if residual is not None and scale is None and bias is None and residual.dtype == h.dtype:
        return torch.addmm(residual, h, weight.t())
    branch = h @ weight.t() if bias is None else torch.addmm(bias, h, weight.t())
    if residual is None:
        return (branch if scale is None else branch * scale).to(dtype)
    if scale is None:
        return residual + branch
    return torch.addcmul(residual, branch.to(dtype), scale.to(dtype))


def layer_norm_linear(rows: RowStatistics, folded: FoldedLinear, activation: str, z: Tensor | None) -> Tensor:
    """act(LayerNorm(x) W^T + b) [M, F]; its argument into z unless None."""
    normalised, shift = _normalised(rows), folded.shift.to(rows.source.dtype)
    # off CUDA torch._addmm_activation has another GELU, the exact one
    if z is None and (activation == "relu" or (activation == "gelu_tanh" and normalised.is_cuda)):
        return torch._addmm_activation(shift, normalised, folded.weight.t(), use_gelu=activation == "gelu_tanh")
    argument = torch.addmm(shift, normalised, folded.weight.t(), out=z)
    if activation == "identity":
        return argument if z is None else argument.clone()
    return TORCH_ACTIVATIONS[activation](argument)


def _normalised(rows: RowStatistics) -> Tensor:
    """(x - mean) rstd in the dtype of the matmul, zeros of a constant row."""
    if rows.mean is None:
        return rows.source
    rstd = rows.rstd.clamp_min(0)[:, None]
    return torch.addcmul(-rows.mean[:, None] * rstd, rows.source, rstd, out=torch.empty_like(rows.source))
