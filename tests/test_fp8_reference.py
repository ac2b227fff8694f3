"""The reference of e4m3: its rounding matches torch's, its layers match fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from vit_fast.ops import reference
from vit_fast.ops.descriptions import Norm

ONE = torch.ones(())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_matches_torch_saturates_and_preserves_nan(dtype: torch.dtype) -> None:
    """Compares random numbers, those of e4m3, and the ties between them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    drawn = torch.randn(100_000) * 2.0 ** torch.randint(-14, 10, (100_000,))
    x = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, drawn)).to(dtype).clamp(-448, 448)
    assert torch.equal(reference.quantize_e4m3(x, ONE), x.float().to(torch.float8_e4m3fn).double())
    x, scale = torch.tensor([449.0, torch.inf, -torch.inf, -30.0, torch.nan]), torch.tensor([1.0, 1, 1, 2, 1])
    *rounded, nan = reference.quantize_e4m3(x, scale).tolist()
    assert rounded == [448, 448, -448, -15] and nan != nan


def test_a_weight_uses_the_whole_range_of_every_row() -> None:
    weight, gamma, scale = torch.randn(6, 32), torch.randn(32), torch.rand(32) + 0.5
    weight[3] = 0
    values, rows = reference.fp8_weight(weight, scale, gamma)
    assert torch.equal(values.to(torch.float8_e4m3fn).double(), values)
    assert values.abs().amax(1).tolist() == [448, 448, 448, 0, 448, 448]
    torch.testing.assert_close(values * rows[:, None], (weight * gamma * scale).double(), rtol=2**-4, atol=1e-6)


def test_layers_match_fp64_if_rounding_changes_nothing() -> None:
    """Powers of two as weights, small integers as x; the rounded weight's row sums cancel the mean exactly."""
    x, weight = torch.randint(-4, 5, (3, 16)).double(), 2.0 ** torch.randint(0, 3, (5, 16)).double()
    bias, two = torch.randn(5).double(), torch.tensor(2.0)
    torch.testing.assert_close(reference.fp8_linear(x, weight, bias, two), linear(x, weight, bias))
    for norm in (Norm(None, torch.randn(16).double(), 1e-6, "layer_norm"), Norm(None, None, 1e-6, "rms_norm")):
        normed = (reference.fp8_linear(x, weight, bias, scale, norm) for scale in (two, None))
        torch.testing.assert_close(*normed)
    weight = torch.randn(5, 16).double()
    shifted = (reference.fp8_linear(x + shift, weight, None, ONE, Norm()) for shift in (0.0, 4.0))
    torch.testing.assert_close(*shifted)
    constant = reference.fp8_linear(torch.full((2, 16), 3.3), weight, bias.float(), torch.tensor(0.7), Norm())
    assert torch.equal(constant, bias.float().expand(2, 5))
