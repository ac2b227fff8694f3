"""The eager definitions: what every backend is held against, in any floating dtype up to fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, dropout_p: float = 0.0) -> Tensor:
    """softmax(scale * q k^T) v for q [B, H, N_q, D] and k, v [B, H, N_kv, D]; scale None means D**-0.5."""
    weights = attention_weights(q, k, scale=scale)
    return F.dropout(weights, dropout_p) @ v if dropout_p else weights @ v


def attention_weights(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(scale * q k^T), [B, H, N_q, N_kv]; rows sum to one."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (q * scale @ k.transpose(-2, -1)).softmax(dim=-1)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), OpenAI CLIP's activation."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


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
) -> Tensor:
    """[x +] layer_scale * (act(LN(x) W1^T + b1) W2^T + b2); see ops.layer_norm_mlp for the arguments."""
    normed = F.layer_norm(x, (x.shape[-1],), norm_weight, norm_bias, eps)
    hidden = ACTIVATIONS[activation](F.linear(normed, fc1_weight, fc1_bias))
    branch = F.linear(hidden, fc2_weight, fc2_bias)
    if layer_scale is not None:
        branch = branch * layer_scale
    return x + branch if residual else branch
