"""layer_norm_mlp with a gate, an RMSNorm, a norm of the hidden layer: against the modules of timm and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_support import DEVICE
from timm.layers import GluMlp, RmsNorm, SwiGLU, SwiGLUPacked
from torch import Tensor, nn

from vit_fast.ops import Norm, layer_norm_mlp

BACKENDS = ("eager", "sdpa", "triton")
C, HIDDEN = 24, 16


def _tokens() -> Tensor:
    return torch.randn(2, 5, C, device=DEVICE)


def _check(backend: str, x: Tensor, norm: Any, mlp: nn.Module, **choices: Any) -> None:
    """norm and mlp one after another are layer_norm_mlp of these choices, which say where gate and fc1 lie."""
    for parameter in (*norm.parameters(), *mlp.parameters()):
        nn.init.normal_(parameter, std=0.3)
    given = {name: value() if callable(value) else value for name, value in choices.items()}
    kind = "rms_norm" if isinstance(norm, RmsNorm) else "layer_norm"
    found = layer_norm_mlp(
        x, norm.weight, getattr(norm, "bias", None), given.pop("fc1_weight"), given.pop("fc1_bias"), mlp.fc2.weight,
        mlp.fc2.bias, eps=norm.eps, norm=kind, residual=False, backend=backend, **given,
    )  # fmt: skip
    torch.testing.assert_close(found, mlp(norm(x)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, RmsNorm])
def test_two_linear_layers_are_timms_swiglu(backend: str, norm: type[nn.Module]) -> None:
    mlp = SwiGLU(C, HIDDEN).to(DEVICE)
    _check(
        backend, _tokens(), norm(C, eps=1e-4).to(DEVICE), mlp, activation="silu", fc1_weight=mlp.fc1_x.weight,
        fc1_bias=mlp.fc1_x.bias, gate_weight=mlp.fc1_g.weight, gate_bias=mlp.fc1_g.bias,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_of_the_hidden_layer_is_that_of_eva02(backend: str) -> None:
    mlp = SwiGLU(C, HIDDEN, norm_layer=nn.LayerNorm).to(DEVICE)
    _check(
        backend, _tokens(), nn.LayerNorm(C).to(DEVICE), mlp, activation="silu", fc1_weight=mlp.fc1_x.weight,
        fc1_bias=mlp.fc1_x.bias, gate_weight=mlp.fc1_g.weight, gate_bias=mlp.fc1_g.bias,
        inner_norm=lambda: Norm(mlp.norm.weight, mlp.norm.bias, mlp.norm.eps),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
def test_halves_of_a_packed_layer_are_timms_glu(backend: str, bias: bool) -> None:
    mlp = SwiGLUPacked(C, 2 * HIDDEN, bias=bias).to(DEVICE)
    halves = dict(zip(("gate_weight", "fc1_weight"), mlp.fc1.weight.detach().chunk(2)))
    biases = mlp.fc1.bias.detach().chunk(2) if bias else (None, None)
    halves |= dict(zip(("gate_bias", "fc1_bias"), biases))
    _check(backend, _tokens(), nn.LayerNorm(C).to(DEVICE), mlp, activation="silu", **halves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gate_in_the_second_half(backend: str) -> None:
    mlp = GluMlp(C, 2 * HIDDEN, act_layer=nn.GELU).to(DEVICE)
    halves = dict(zip(("fc1_weight", "gate_weight"), mlp.fc1.weight.detach().chunk(2)))
    halves |= dict(zip(("fc1_bias", "gate_bias"), mlp.fc1.bias.detach().chunk(2)))
    _check(backend, _tokens(), nn.LayerNorm(C).to(DEVICE), mlp, **halves)


def _call(**choices: Any) -> Tensor:
    arguments = [torch.zeros(2, C), None, None, torch.zeros(HIDDEN, C), None, torch.zeros(C, HIDDEN), None]
    return layer_norm_mlp(*arguments, **{"backend": "eager", **choices})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"norm": "batch_norm"}, "norm must be one of 'layer_norm', 'rms_norm', got 'batch_norm'"),
        ({"gate_weight": torch.zeros(C, C)}, r"gate_weight must have shape \(16, 24\) .*, got \(24, 24\)"),
        ({"gate_bias": torch.zeros(HIDDEN)}, "gate_bias must be None without gate_weight"),
        ({"inner_norm": Norm(torch.ones(C))}, r"inner_norm\.weight must have shape \(16,\), got \(24,\)"),
    ],
)
def test_refusals(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**choices)


def test_an_rms_norm_has_no_bias() -> None:
    with pytest.raises(ValueError, match="bias must be None for 'rms_norm'"):
        layer_norm_mlp(
            torch.zeros(2, C), None, torch.zeros(C), torch.zeros(HIDDEN, C), None, torch.zeros(C, HIDDEN), None,
            norm="rms_norm", backend="eager",
        )  # fmt: skip
