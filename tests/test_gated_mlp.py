"""layer_norm_mlp with a gate, an RMSNorm, a norm of the hidden layer: against the modules of timm and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_support import DEVICE
from timm.layers import GluMlp, RmsNorm, SwiGLU, SwiGLUPacked
from torch import nn

from vit_fast.ops import Norm, layer_norm_mlp

BACKENDS = ("eager", "sdpa", "triton")
C, HIDDEN = 24, 16


def _apart(mlp: Any) -> dict[str, Any]:
    return {
        "fc1_weight": mlp.fc1_x.weight, "fc1_bias": mlp.fc1_x.bias, "gate_weight": mlp.fc1_g.weight,
        "gate_bias": mlp.fc1_g.bias,
    }  # fmt: skip


def _halves(mlp: Any, first: str, second: str) -> dict[str, Any]:
    biases = (None, None) if mlp.fc1.bias is None else mlp.fc1.bias.detach().chunk(2)
    weights = mlp.fc1.weight.detach().chunk(2)
    return {f"{first}_weight": weights[0], f"{second}_weight": weights[1], f"{first}_bias": biases[0],
            f"{second}_bias": biases[1]}  # fmt: skip


# timm's MLP, its gate and fc1 as layer_norm_mlp takes them, its activation.
MLPS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], dict[str, Any]], str]] = {
    "two linear layers": (lambda: SwiGLU(C, HIDDEN), _apart, "silu"),
    "a norm inside": (lambda: SwiGLU(C, HIDDEN, norm_layer=nn.LayerNorm), _apart, "silu"),
    "packed": (lambda: SwiGLUPacked(C, 2 * HIDDEN), lambda mlp: _halves(mlp, "gate", "fc1"), "silu"),
    "no bias": (lambda: SwiGLUPacked(C, 2 * HIDDEN, bias=False), lambda mlp: _halves(mlp, "gate", "fc1"), "silu"),
    "gate last": (lambda: GluMlp(C, 2 * HIDDEN, act_layer=nn.GELU), lambda mlp: _halves(mlp, "fc1", "gate"), "gelu"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, RmsNorm])
@pytest.mark.parametrize("name", MLPS)
def test_a_gated_mlp_is_timms(name: str, norm: Any, backend: str) -> None:
    make, weights, activation = MLPS[name]
    before, mlp = norm(C, eps=1e-4).to(DEVICE), make().to(DEVICE)
    for parameter in (*before.parameters(), *mlp.parameters()):
        nn.init.normal_(parameter, std=0.3)
    inner = None
    if name == "a norm inside":
        inner = Norm(mlp.norm.weight, mlp.norm.bias, mlp.norm.eps)
    x = torch.randn(2, 5, C, device=DEVICE)
    found = layer_norm_mlp(
        x, before.weight, getattr(before, "bias", None), fc2_weight=mlp.fc2.weight, fc2_bias=mlp.fc2.bias,
        **weights(mlp), eps=1e-4, norm="rms_norm" if norm is RmsNorm else "layer_norm", activation=activation,
        residual=False, inner_norm=inner, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(found, mlp(before(x)))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"norm": "batch_norm"}, "norm must be one of 'layer_norm', 'rms_norm', got 'batch_norm'"),
        ({"gate_weight": torch.zeros(C, C)}, r"gate_weight must have shape \(16, 24\) .*, got \(24, 24\)"),
        ({"gate_bias": torch.zeros(HIDDEN)}, "gate_bias must be None without gate_weight"),
        ({"inner_norm": Norm(torch.ones(C))}, r"inner_norm\.weight must have shape \(16,\), got \(24,\)"),
        ({"norm": "rms_norm", "norm_bias": torch.zeros(C)}, "bias must be None for 'rms_norm'"),
    ],
)
def test_refusals(choices: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict.fromkeys(("norm_weight", "norm_bias", "fc1_bias", "fc2_bias"))
    arguments |= {"x": torch.zeros(2, C), "fc1_weight": torch.zeros(HIDDEN, C), "fc2_weight": torch.zeros(C, HIDDEN)}
    with pytest.raises(ValueError, match=message):
        layer_norm_mlp(**arguments | choices, backend="eager")
