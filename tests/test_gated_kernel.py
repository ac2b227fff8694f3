"""The gated MLP by the kernels, forward and every gradient, against the eager definition in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_execution import DTYPES
from mlp_support import DEVICE, check_case, make_case, statistics_of
from torch.utils.flop_counter import FlopCounterMode

from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp, layer_norm_mlp
from vit_fast.ops.reference import ACTIVATIONS


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [True, False])
def test_swiglu(dtype: torch.dtype, norm: str, residual: bool) -> None:
    check_case(make_case(37, 72, 96, dtype, gated=True, activation="silu", norm=norm, residual=residual))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    check_case(make_case(19, 40, 48, torch.float32, gated=True, activation=activation))
    check_case(make_case(19, 40, 48, torch.bfloat16, gated=True, activation=activation))


def test_with_fp32_parameters() -> None:
    check_case(make_case(20, 64, 40, torch.bfloat16, gated=True, activation="silu"), torch.float32)


def test_without_biases_norm_and_scale() -> None:
    case = make_case(9, 40, 45, torch.bfloat16, gated=True, activation="silu")
    _, _, fc1, _, fc2, _ = case.parameters
    bare = replace(case, parameters=(None, None, fc1, None, fc2, None), gate=(case.gate[0], None), layer_scale=None)
    check_case(bare)


def test_a_tiny_layer_scale_in_fp16() -> None:
    case = make_case(9, 40, 48, torch.float16, gated=True, activation="silu", residual=False)
    with torch.no_grad():
        case.layer_scale.mul_(2.0**-12)
    check_case(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_row(dtype: torch.dtype) -> None:
    case = make_case(9, 64, 48, dtype, gated=True, activation="silu")
    with torch.no_grad():
        case.x[2] = 3
    check_case(case)


@pytest.mark.slow
@given(
    M=st.integers(1, 140), C=st.sampled_from([8, 24, 72, 136]), F=st.sampled_from([8, 21, 72, 130]),
    dtype=st.sampled_from(DTYPES), norm=st.sampled_from(["layer_norm", "rms_norm"]),
)  # fmt: skip
def test_drawn(M: int, C: int, F: int, dtype: torch.dtype, norm: str) -> None:
    check_case(make_case(M, C, F, dtype, gated=True, activation="silu", norm=norm))


def test_halves_of_a_packed_layer() -> None:
    """fc1 and its gate are rows of one weight, whose gradient is whole."""
    case = make_case(9, 40, 48, torch.float32, gated=True, activation="silu")
    packed = torch.cat((case.gate[0], case.parameters[2])).detach().requires_grad_()
    bias = torch.cat((case.gate[1], case.parameters[3])).detach().requires_grad_()
    found = []
    for backend in ("triton", "eager"):
        gate, up = packed.chunk(2)
        gate_bias, up_bias = bias.chunk(2)
        norm_weight, norm_bias, _, _, *second = case.parameters
        y = layer_norm_mlp(
            case.x, norm_weight, norm_bias, up, up_bias, *second, activation="silu", gate_weight=gate,
            gate_bias=gate_bias, backend=backend,
        )  # fmt: skip
        found.append((y, *torch.autograd.grad(y, (packed, bias), case.grad)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast() -> None:
    case = make_case(18, 32, 48, torch.float32, gated=True, activation="silu")
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, eager = case.run("triton"), case.run("eager")
    for name, found in ours.items():
        assert found.dtype == eager[name].dtype
        torch.testing.assert_close(found, eager[name], rtol=0.05, atol=0.05 * float(eager[name].abs().max()))


def test_statistics_go_in_and_out() -> None:
    case = make_case(19, 72, 48, torch.bfloat16, gated=True, activation="silu")
    choices = {"eps": 1e-6, "activation": "silu", "layer_scale": None, "residual": True, "next_statistics": True}
    gate = {"gate_weight": case.gate[0], "gate_bias": case.gate[1]}
    with torch.no_grad():
        handed = fused_layer_norm_mlp(case.x, statistics_of(case.x), *case.parameters, **choices, **gate)
        own = fused_layer_norm_mlp(case.x, None, *case.parameters, **choices, **gate)
    torch.testing.assert_close(handed, own)
    torch.testing.assert_close(own[1], statistics_of(own[0]))


def test_flop_are_those_of_the_eager_formula() -> None:
    counts = []
    for backend in ("triton", "eager"):
        case = make_case(18, 32, 48, torch.float32, gated=True)
        with FlopCounterMode(display=False) as counter:
            case.run(backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
