"""The second half of a pre-norm block as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layer_norm_mlp import layer_norm_mlp
from .reference import ACTIVATIONS


class LayerNormMLP(nn.Module):
    """[x +] gamma * fc2(act(fc1(norm(x)))), computed by `layer_norm_mlp`.

    Args:
        dim: Width C of the tokens.
        hidden_dim: Width F of the hidden layer.
        activation: "gelu" (exact), "gelu_tanh", "quick_gelu", "relu" or "silu".
        eps: LayerNorm's epsilon, in units of x squared.
        init_values: Initial value of LayerScale's gamma [C]; None means no LayerScale.
        residual: Whether x is added to the branch.
        bias: Whether fc1 and fc2 have one.
        backend: "eager", "sdpa", "triton" or "auto" (by x's device).
    Raises:
        ValueError: the activation is unknown.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str = "gelu",
        eps: float = 1e-6,
        init_values: float | None = None,
        residual: bool = True,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: accepted are {', '.join(map(repr, ACTIVATIONS))}")
        self.activation, self.residual, self.backend = activation, residual, backend
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.gamma = None if init_values is None else nn.Parameter(torch.full((dim,), init_values))

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        norm, fc1, fc2 = self.norm, self.fc1, self.fc2
        return layer_norm_mlp(
            x, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias,
            eps=norm.eps, activation=self.activation, layer_scale=self.gamma, residual=self.residual,
            backend=self.backend,
        )  # fmt: skip
