"""The matmul by itself, launched as data: each way through it against the same product in fp64."""

from __future__ import annotations

import pytest
import torch
from kernel_support import DEVICE, FORWARD_FACTOR, assert_as_exact_as_eager, nan_like
from torch import Tensor

from vit_fast.kernels.matmul_launch import Operands, matmul_launch
from vit_fast.kernels.matmul_policy import matmul_config

HALF = (torch.float16, torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("N", [48, 33], ids=["TMA", "pointers"])
def test_a_residual_in_fp32_is_added_and_kept_in_fp32(N: int, dtype: torch.dtype) -> None:
    """The branch is not rounded to the operands' dtype either: as exact as the formula in fp32."""
    a, b = normal(70, 64, dtype=dtype), normal(N, 64, dtype=dtype, seed=1)
    residual, bias, scale = normal(70, N, seed=2) * 100, normal(N, seed=3), normal(N, seed=4)
    (out,) = nan_like(residual)
    operands = Operands(a, b, out, b_is_nk=True, residual=residual, bias=bias, scale=scale)
    config = matmul_config(operands, "residual")
    assert config.tma == (N == 48)
    matmul_launch(operands, epilogue="residual", config=config).run()

    def formula(precision: torch.dtype) -> Tensor:
        residual_, a_, b_, bias_, scale_ = (t.to(precision) for t in (residual, a, b, bias, scale))
        return residual_ + scale_ * (a_ @ b_.T + bias_)

    assert_as_exact_as_eager("out", out, formula(torch.float32), formula(torch.float64), FORWARD_FACTOR)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("N", [48, 33], ids=["TMA", "pointers"])
def test_an_input_gradient_in_fp32(N: int, dtype: torch.dtype) -> None:
    a, b = normal(70, 64, dtype=dtype), normal(64, N, dtype=dtype, seed=1)
    x, residual = normal(70, N, seed=2), normal(70, N, seed=3)
    mean, rstd, coefficient = normal(70, seed=4), normal(70, seed=5).abs(), normal(70, seed=6)
    (out,) = nan_like(x)
    operands = Operands(a, b, out, x=x, residual=residual, mean=mean, rstd=rstd, coefficient=coefficient)
    config = matmul_config(operands, "layer_norm_grad")
    assert config.tma == (N == 48)
    matmul_launch(operands, epilogue="layer_norm_grad", config=config).run()

    def formula(precision: torch.dtype) -> Tensor:
        a_, b_, x_, residual_, mean_, coefficient_ = (t.to(precision) for t in (a, b, x, residual, mean, coefficient))
        return residual_ + a_ @ b_ - (x_ - mean_[:, None]) * coefficient_[:, None]

    assert_as_exact_as_eager("out", out, formula(torch.float32), formula(torch.float64), FORWARD_FACTOR)
