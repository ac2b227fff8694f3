"""RMSNorm in the place of LayerNorm: folded into linear layers, MLPs and whole blocks, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_execution import DTYPES
from mlp_support import check_case, make_case, statistics_of

from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("residual", [True, False])
def test_mlp(dtype: torch.dtype, mean: float, residual: bool) -> None:
    check_case(make_case(37, 72, 96, dtype, mean=mean, norm="rms_norm", residual=residual))


def test_mlp_of_several_pieces_with_fp32_parameters() -> None:
    check_case(make_case(20, 264, 40, torch.bfloat16, norm="rms_norm"), torch.float32)


def test_mlp_without_parameters_of_the_norm() -> None:
    case = make_case(9, 40, 48, torch.float16, norm="rms_norm")
    check_case(replace(case, parameters=(None, None, *case.parameters[2:])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_and_constant_rows(dtype: torch.dtype) -> None:
    case = make_case(9, 64, 48, dtype, norm="rms_norm")
    with torch.no_grad():
        case.x[2] = 0
        case.x[5] = 3
    check_case(case)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_statistics_are_those_of_a_layer_norm(dtype: torch.dtype) -> None:
    """Whoever wrote the rows need not know which norm will read them."""
    case = make_case(19, 72, 48, dtype, norm="rms_norm")
    with torch.no_grad():
        choices = {"eps": 1e-6, "norm": "rms_norm", "activation": "gelu", "layer_scale": None, "residual": True}
        handed, _ = fused_layer_norm_mlp(case.x, statistics_of(case.x), *case.parameters, **choices)
        own, _ = fused_layer_norm_mlp(case.x, None, *case.parameters, **choices)
    torch.testing.assert_close(handed, own)


def test_an_unknown_norm() -> None:
    case = make_case(4, 8, 8, torch.float32)
    with pytest.raises(ValueError, match="norm must be one of 'layer_norm', 'rms_norm', got 'rms'"):
        fused_layer_norm_mlp(
            case.x, None, *case.parameters, eps=1e-6, norm="rms", activation="gelu", layer_scale=None, residual=True
        )
