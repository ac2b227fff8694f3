"""The MLP with a norm of its hidden layer by the kernels, forward and every gradient, against fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_execution import DTYPES
from mlp_support import check_case, make_case

from vit_fast.kernels.launch import Launch
from vit_fast.kernels.linear import hidden_norm, linear
from vit_fast.kernels.matmul.matmul_launch import MatmulConfig, Operands
from vit_fast.kernels.matmul.matmul_policy import is_usable


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", ["layer_norm", "rms_norm"])
def test_swiglu_with_a_norm_inside(dtype: torch.dtype, inner: str) -> None:
    check_case(make_case(37, 72, 96, dtype, gated=True, activation="silu", inner_norm=inner))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_gate(dtype: torch.dtype) -> None:
    """Columns past the last one of a tile have an activation's slope, and are no part of any sum."""
    check_case(make_case(37, 40, 72, dtype, activation="gelu", inner_norm="layer_norm"))


def test_as_eva02_has_it() -> None:
    """No LayerScale, fp32 parameters beside bf16 rows."""
    case = make_case(20, 64, 136, torch.bfloat16, gated=True, activation="silu", inner_norm="layer_norm")
    check_case(replace(case, layer_scale=None))
    check_case(replace(case, layer_scale=None), torch.float32)


def test_without_biases_affine_and_residual() -> None:
    case = make_case(9, 40, 45, torch.bfloat16, gated=True, activation="silu", inner_norm="layer_norm", residual=False)
    _, _, fc1, _, fc2, _ = case.parameters
    bare = replace(case, parameters=(None, None, fc1, None, fc2, None), gate=(case.gate[0], None), layer_scale=None)
    check_case(replace(bare, inner=(None, None)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hidden_row_that_is_constant(dtype: torch.dtype) -> None:
    """Of zeros: its norm is beta, and its gradient large."""
    case = make_case(9, 64, 48, dtype, gated=True, activation="silu", inner_norm="layer_norm")
    with torch.no_grad():
        case.x[2] = 3
        case.parameters[1].zero_()
        case.gate[1].zero_()
    check_case(case)


@pytest.mark.parametrize("gated", [False, True])
def test_no_matmul_takes_tiles_that_are_not_compiled_offline(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way back, too, the norm is known when the tile is chosen: larger ones spill."""
    usable: dict[str, bool] = {}
    launch = linear.matmul_launch

    def watched(operands: Operands, *, epilogue: str, config: MatmulConfig, **rest: Any) -> Launch:
        usable[epilogue] = is_usable(config, operands, epilogue)
        return launch(operands, epilogue=epilogue, config=config, **rest)

    for module in (linear, hidden_norm):
        monkeypatch.setattr(module, "matmul_launch", watched)
    make_case(9, 64, 48, torch.bfloat16, gated=gated, inner_norm="layer_norm").run("triton")
    of_gate = {"gated", "gated_grad"} if gated else {"layer_norm", "activation_grad"}
    assert usable.keys() >= {*of_gate, "residual"} and all(usable.values()), usable


@pytest.mark.slow
@given(
    M=st.integers(1, 140), C=st.sampled_from([8, 72, 136]), F=st.sampled_from([8, 21, 72, 130, 200]),
    dtype=st.sampled_from(DTYPES), inner=st.sampled_from(["layer_norm", "rms_norm"]), gated=st.booleans(),
)  # fmt: skip
def test_drawn(M: int, C: int, F: int, dtype: torch.dtype, inner: str, gated: bool) -> None:
    check_case(make_case(M, C, F, dtype, gated=gated, activation="silu", inner_norm=inner))
