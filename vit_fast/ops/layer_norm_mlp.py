"""LayerNorm + MLP (+ LayerScale + residual) as a function and as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import check_choice, check_type
from . import reference
from .backends import resolve_backend
from .block import fused_block
from .descriptions import BlockTensors, Norm, check_norm, check_tensors
from .registration import is_exporting


def layer_norm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-6,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    residual: bool = True,
    norm: str = "layer_norm",
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    inner_norm: Norm | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes the MLP half of a pre-norm block: [x +] layer_scale * fc2(act(fc1(norm(x)))).

    With a gate (SwiGLU, GEGLU), act(gate(norm(x))) * fc1(norm(x)) replaces act(fc1(norm(x))).

    Args:
        x: Tokens [..., C]; fp32, fp16, bf16 or, if the backend is not triton, fp64.
        norm_weight: gamma [C] of the norm; None means ones.
        norm_bias: beta [C] of the norm; None means zeros. Must be None for an RMSNorm.
        fc1_weight: Weight [F, C] of the first linear layer (with a gate: the up projection).
        fc1_bias: Bias [F] of the first linear layer; None means zeros.
        fc2_weight: Weight [C, F] of the second linear layer.
        fc2_bias: Bias [C] of the second linear layer; None means zeros.
        eps: Added to the variance (RMSNorm: to the mean of x^2) before the square root.
        activation: "gelu" (exact), "gelu_tanh", "quick_gelu", "relu" or "silu".
        layer_scale: Multiplier [C] per channel; None means ones.
        residual: True adds x to the result.
        norm: "layer_norm" or "rms_norm" (x / sqrt(mean(x^2) + eps)).
        gate_weight: Weight [F, C] of the gate; None for no gate. If one weight contains gate and fc1, split it.
        gate_bias: Bias [F] of the gate; None if fc1_bias is None.
        inner_norm: Norm of the hidden activations [..., F] (after gating) before fc2, as in EVA-02; None for no norm.
        backend: See `attention`. eager and sdpa are identical here. triton accumulates in fp32 and also supports fp32
            parameters with fp16 or bf16 x.
    Returns:
        [..., C] in x.dtype. Under autocast, fp16 or bf16 x gives the autocast dtype. So does fp32 x without a residual,
        except with an fp32 layer_scale.
    Raises:
        ValueError: shapes do not match, or the activation, norm or backend is unknown.
        UnsupportedInputError: triton cannot run this input. The message lists all reasons.
    Source: section 3.1 of arXiv 2010.11929. triton folds the norm into the weight of fc1 (`kernels/linear/folding.py`).
    """
    check_tensors(x=x, fc1_weight=fc1_weight, fc2_weight=fc2_weight)
    check_choice("activation", activation, tuple(reference.ACTIVATIONS))
    if x.dim() < 1 or fc1_weight.dim() != 2:
        shapes = f"{tuple(x.shape)} and {tuple(fc1_weight.shape)}"
        raise ValueError(f"x and fc1_weight must have shapes [..., C] and [F, C], got {shapes}")
    if gate_weight is None and gate_bias is not None:
        raise ValueError("gate_bias must be None without gate_weight, got a tensor")
    if gate_weight is not None and (gate_bias is None) != (fc1_bias is None):
        raise ValueError("fc1_bias and gate_bias must both be tensors or both be None, got one tensor")
    C, F = x.shape[-1], fc1_weight.shape[0]
    for name, tensor, shape in (
        ("norm_weight", norm_weight, (C,)), ("norm_bias", norm_bias, (C,)), ("fc1_weight", fc1_weight, (F, C)),
        ("fc1_bias", fc1_bias, (F,)), ("gate_weight", gate_weight, (F, C)), ("gate_bias", gate_bias, (F,)),
        ("fc2_weight", fc2_weight, (C, F)), ("fc2_bias", fc2_bias, (C,)), ("layer_scale", layer_scale, (C,)),
    ):  # fmt: skip
        check_type(name, tensor, Tensor, type(None))
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} for x of width {C}, got {tuple(tensor.shape)}")
    check_norm("norm", Norm(norm_weight, norm_bias, kind=norm), C)
    if inner_norm is not None:
        check_norm("inner_norm", inner_norm, F)
    tensors = BlockTensors(
        norm2_weight=norm_weight, norm2_bias=norm_bias, fc1_weight=fc1_weight, fc1_bias=fc1_bias,
        fc2_weight=fc2_weight, fc2_bias=fc2_bias, scale2=layer_scale, gate_weight=gate_weight, gate_bias=gate_bias,
        inner_weight=inner_norm and inner_norm.weight, inner_bias=inner_norm and inner_norm.bias,
    )  # fmt: skip
    inner = inner_norm and (inner_norm.kind, inner_norm.eps)
    options: dict[str, Any] = {"norm": norm, "activation": activation, "residual": residual, "inner_norm": inner}
    if resolve_backend(backend, x.device, x.dtype) == "triton" and not is_exporting():
        return fused_block(x, None, tensors, eps=(0.0, eps), **options)[0]
    return reference.layer_norm_mlp(x, tensors, eps=eps, **options)


class LayerNormMLP(nn.Module):
    """Computes [x +] gamma * fc2(act(fc1(norm(x)))) with `layer_norm_mlp`. `gamma` is LayerScale, not the norm's gamma.

    Args:
        dim: Width C of the tokens.
        hidden_dim: Width F of the hidden layer.
        init_values: Initial value of LayerScale [C]; None means no LayerScale.
        bias: True if fc1 and fc2 have a bias.
        activation, eps, residual, backend: See `layer_norm_mlp`.
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
        check_choice("activation", activation, tuple(reference.ACTIVATIONS))
        self.activation, self.residual, self.backend = activation, residual, backend
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias)
        self.gamma = None if init_values is None else nn.Parameter(torch.full((dim,), init_values))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., C] to [..., C]."""
        norm, fc1, fc2 = self.norm, self.fc1, self.fc2
        return layer_norm_mlp(
            x, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias,
            eps=norm.eps, activation=self.activation, layer_scale=self.gamma, residual=self.residual,
            backend=self.backend,
        )  # fmt: skip
