"""Matmuls of weight gradients, and partial sums over rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_support import DEVICE
from torch import Tensor

from vit_fast.kernels.device import REFERENCE_GPU
from vit_fast.kernels.layer_norm import NormInput
from vit_fast.kernels.linear import gradients, weight_products
from vit_fast.kernels.linear.weight_products import weight_products_launch
from vit_fast.kernels.matmul.matmul_launch import MatmulConfig, fits_tma


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("programs", [1, 2, 3, 132])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "widths",
    [[(40, 72)], [(40, 72), (136, 48)], [(40, 33), (130, 48)], [(40, 72), (8, 8), (136, 48), (64, 96)]],
    ids=str,
)
def test_products_of_one_to_four_pairs(
    widths: list[tuple[int, int]], splits: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program continues with the next matmul where one ends."""
    gpu = dataclasses.replace(REFERENCE_GPU, sm_count=programs)
    monkeypatch.setattr(weight_products, "gpu_of", lambda device: gpu)
    rows = 70
    pairs = [
        tuple(normal(rows, width, dtype=torch.bfloat16, seed=8 * index + i) for i, width in enumerate(pair))
        for index, pair in enumerate(widths)
    ]
    tma = fits_tma(tensor for pair in pairs for tensor in pair)
    assert tma == all(width % 8 == 0 for pair in widths for width in pair)
    config = MatmulConfig(64, 32, 16, tma=tma, num_stages=2)
    out = [torch.full((splits, *pair), float("nan"), device=DEVICE) for pair in widths]
    weight_products_launch(pairs, out, config).run()
    for (a, b), found in zip(pairs, out, strict=True):
        torch.testing.assert_close(found.double().sum(0), a.double().T @ b.double(), rtol=1e-5, atol=1e-4)
        first = -(-5 // splits) * 16  # of 5 steps
        torch.testing.assert_close(found[0].double(), a[:first].double().T @ b[:first].double(), rtol=1e-5, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "F"), [(1, 1), (255, 127), (256, 128), (257, 129), (600, 24)])
def test_partial_sums_in_the_layer_norm_backward(M: int, F: int, dtype: torch.dtype, residual: bool) -> None:
    C = 40
    grad, x, gamma, dz = normal(M, C, dtype=dtype), normal(M, C, seed=1), normal(C, seed=2), normal(M, F, seed=3)
    dz, added = dz.to(dtype), normal(M, C, seed=4, dtype=dtype) if residual else None
    x = x.to(dtype)
    statistics = torch.stack([x.float().mean(1), (x.float().var(1, correction=0) + 1e-6).rsqrt()])
    rows = NormInput(x, statistics)
    dx, normalized, parts = gradients.layer_norm_gradient(grad, gamma, rows, added, dz)
    assert parts.shape == (-(-M // gradients.SUM_ROWS), F)
    exact = torch.stack([part.double().sum(0) for part in dz.split(gradients.SUM_ROWS)])
    torch.testing.assert_close(parts.double(), exact, rtol=1e-6, atol=1e-4)
    plain, same, _ = gradients.layer_norm_gradient(grad, gamma, rows, None, dz)
    assert torch.equal(dx, plain if added is None else plain + added)
    assert torch.equal(normalized, same)
