"""The reference of e4m3: its rounding matches torch's, its layers match fp64."""

from __future__ import annotations

import pytest
import torch

from vit_fast.ops import reference
from vit_fast.ops.descriptions import Norm

ONE = torch.ones(())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_matches_torch_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    """Compares random numbers, those of e4m3, and the ties between them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    drawn = torch.randn(100_000) * 2.0 ** torch.randint(-14, 10, (100_000,))
    x = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, drawn)).to(dtype).clamp(-448, 448)
    assert torch.equal(reference.quantize_e4m3(x, ONE), x.float().to(torch.float8_e4m3fn).double())
    special = reference.quantize_e4m3(torch.tensor([449.0, torch.inf, -torch.inf, torch.nan]), ONE)
    assert special[:3].tolist() == [448, 448, -448] and special[3].isnan()
    scaled = reference.quantize_e4m3(torch.tensor([7.0, -30.0]), torch.tensor([7.0, 2.0]))
    assert scaled.tolist() == [1, -15]


def test_a_weight_uses_the_whole_range_of_every_row() -> None:
    weight, gamma, scale = torch.randn(6, 32), torch.randn(32), torch.rand(32) + 0.5
    weight[3] = 0
    values, rows = reference.fp8_weight(weight, scale, gamma)
    assert torch.equal(values.to(torch.float8_e4m3fn).double(), values)
    assert values.abs().amax(1).tolist() == [448, 448, 448, 0, 448, 448]
    torch.testing.assert_close(values * rows[:, None], (weight * gamma * scale).double(), rtol=2**-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_operands_that_need_no_rounding_give_the_layer_itself(kind: str) -> None:
    """Powers of two as weights, small integers as x."""
    x = torch.randint(-8, 9, (3, 16)).double()
    weight = 2.0 ** torch.randint(0, 3, (5, 16)).double()
    bias, beta = torch.randn(5).double(), torch.randn(16).double() if kind == "layer_norm" else None
    norm = Norm(None, beta, 1e-6, kind)
    plain = reference.fp8_linear(x, weight, bias, torch.tensor(2.0))
    torch.testing.assert_close(plain, torch.nn.functional.linear(x, weight, bias))
    normed = reference.fp8_linear(x, weight, bias, torch.tensor(2.0), norm)
    torch.testing.assert_close(normed, reference.fp8_linear(x, weight, bias, None, norm))


def test_the_mean_of_a_row_cancels_though_the_weight_is_rounded() -> None:
    """The rounded weight's own row sums meet the mean, so a common shift by numbers of e4m3 changes nothing."""
    x, weight = torch.randint(-4, 5, (3, 16)).double(), torch.randn(5, 16).double()
    at = [reference.fp8_linear(x + shift, weight, None, ONE, Norm()) for shift in (0.0, 4.0)]
    torch.testing.assert_close(at[0], at[1])
    constant = reference.fp8_linear(torch.full((2, 16), 3.3), weight, torch.arange(5.0), torch.tensor(0.7), Norm())
    assert torch.equal(constant, torch.arange(5.0).expand(2, 5))
