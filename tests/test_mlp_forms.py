"""The MLP behind each norm, gated, and with a norm of its hidden layer: forward and gradients against fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_execution import DTYPES
from mlp_support import DEVICE, check_case, make_case, statistics_of
from torch.utils.flop_counter import FlopCounterMode

from vit_fast.kernels import plan
from vit_fast.kernels.launch import Launch
from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul.matmul_launch import MatmulConfig, Operands
from vit_fast.kernels.matmul.matmul_policy import is_usable
from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp, layer_norm_mlp
from vit_fast.ops.reference import ACTIVATIONS

GATED: dict[str, Any] = {"gated": True, "activation": "silu"}
FORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm": {"norm": "rms_norm"},
    "gated": GATED,
    "RMSNorm, gated": GATED | {"norm": "rms_norm"},
    "norm inside": {"inner_norm": "layer_norm"},
    "gated, norm inside": GATED | {"inner_norm": "layer_norm"},
    "gated, RMSNorm inside": GATED | {"inner_norm": "rms_norm"},
}
any_form = pytest.mark.parametrize("form", FORMS)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.pairwise
@any_dtype
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@any_form
def test_forms(form: str, residual: bool, scaled: bool, dtype: torch.dtype) -> None:
    case = make_case(37, 72, 96, dtype, residual=residual, **FORMS[form])
    check_case(case if scaled else replace(case, layer_scale=None))


@pytest.mark.each_value
@any_dtype
@any_form
def test_widths_off_every_tile(form: str, dtype: torch.dtype) -> None:
    """Columns past the last one of a tile have an activation's slope, and are no part of any sum."""
    check_case(make_case(37, 40, 72, dtype, **FORMS[form]))


@any_dtype
def test_a_mean_far_above_the_spread(dtype: torch.dtype) -> None:
    check_case(make_case(37, 72, 96, dtype, mean=100.0, norm="rms_norm"))


@pytest.mark.each_value
@pytest.mark.parametrize("scaled", [True, False])
@any_form
def test_fp32_parameters(form: str, scaled: bool) -> None:
    """Beside bf16 rows, of several pieces of statistics; with and without a LayerScale."""
    case = make_case(20, 136, 72, torch.bfloat16, **FORMS[form])
    check_case(case if scaled else replace(case, layer_scale=None), torch.float32)


@any_form
def test_absent_parameters(form: str) -> None:
    case = make_case(9, 40, 45, torch.bfloat16, residual=False, **FORMS[form])
    _, _, fc1, _, fc2, _ = case.parameters
    bare = replace(case, parameters=(None, None, fc1, None, fc2, None), gate=(case.gate[0], None), layer_scale=None)
    check_case(replace(bare, inner=(None, None)))


@pytest.mark.each_value
@any_dtype
@any_form
def test_constant_rows(form: str, dtype: torch.dtype) -> None:
    """Rows of variance 0, or of zeros for an RMSNorm; those of the hidden layer too, without biases."""
    case = make_case(9, 64, 48, dtype, **FORMS[form])
    with torch.no_grad():
        case.x[2], case.x[5] = 3, 0
        for bias in (case.parameters[1], case.gate[1]) if case.inner_norm != "none" else ():
            if bias is not None:
                bias.zero_()
    check_case(case)


@pytest.mark.slow
@given(
    M=st.integers(1, 140), C=st.sampled_from([8, 24, 72, 136]), F=st.sampled_from([8, 21, 72, 130, 200]),
    dtype=st.sampled_from(DTYPES), form=st.sampled_from([*FORMS]),
)  # fmt: skip
def test_drawn(M: int, C: int, F: int, dtype: torch.dtype, form: str) -> None:
    check_case(make_case(M, C, F, dtype, **FORMS[form]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_a_gate(activation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_case(make_case(19, 40, 48, dtype, gated=True, activation=activation))


def test_a_tiny_layer_scale_in_fp16() -> None:
    case = make_case(9, 40, 48, torch.float16, residual=False, **GATED)
    with torch.no_grad():
        case.layer_scale.mul_(2.0**-12)
    check_case(case)


def test_halves_of_a_packed_layer() -> None:
    """fc1 and its gate are rows of one weight, whose gradient is whole."""
    case = make_case(9, 40, 48, torch.float32, **GATED)
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
    case = make_case(18, 32, 48, torch.float32, **GATED)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, eager = case.run("triton"), case.run("eager")
    for name, found in ours.items():
        assert found.dtype == eager[name].dtype
        torch.testing.assert_close(found, eager[name], rtol=0.05, atol=0.05 * float(eager[name].abs().max()))


@any_dtype
@pytest.mark.parametrize("form", ["RMSNorm", "gated"])
def test_statistics_go_in_and_out(form: str, dtype: torch.dtype) -> None:
    """Given statistics replace the kernel's own, whatever norm reads them; emitted ones are those of the output."""
    if dtype == torch.float32:
        pytest.skip("fp32 rows are normalised without statistics")
    case = make_case(19, 72, 48, dtype, **FORMS[form])
    choices = {"eps": 1e-6, "norm": case.norm, "activation": case.activation, "layer_scale": None, "residual": True}
    choices |= {"gate_weight": case.gate[0], "gate_bias": case.gate[1], "next_statistics": True}
    with torch.no_grad():
        given = fused_layer_norm_mlp(case.x, statistics_of(case.x), *case.parameters, **choices)
        own = fused_layer_norm_mlp(case.x, None, *case.parameters, **choices)
    torch.testing.assert_close(given[0], own[0])
    for y, emitted in (given, own):  # compiled kernels may round the last bit of the two outputs differently
        torch.testing.assert_close(emitted, statistics_of(y))


def test_flop_are_those_of_the_eager_formula() -> None:
    counts = []
    for backend in ("triton", "eager"):
        with FlopCounterMode(display=False) as counter:
            make_case(18, 32, 48, torch.float32, gated=True).run(backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("gated", [False, True])
def test_no_matmul_takes_tiles_that_are_not_compiled_offline(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward, too, the inner norm is known when the tile is chosen: larger ones spill."""
    plan.forget()  # a recorded plan launches without choosing a tile
    usable: dict[str, bool] = {}
    launch = linear.matmul_launch

    def watched(operands: Operands, *, epilogue: str, config: MatmulConfig, **rest: Any) -> Launch:
        usable[epilogue] = is_usable(config, operands, epilogue)
        return launch(operands, epilogue=epilogue, config=config, **rest)

    monkeypatch.setattr(linear, "matmul_launch", watched)
    make_case(9, 64, 48, torch.bfloat16, gated=gated, inner_norm="layer_norm").run("triton")
    of_gate = {"gated", "gated_grad"} if gated else {"layer_norm", "activation_grad"}
    assert usable.keys() >= {*of_gate, "residual"} and all(usable.values()), usable
