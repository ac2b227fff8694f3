"""Epilogues of the matmul kernel match the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from kernel_support import DEVICE, FORWARD_FACTOR, assert_as_exact_as_eager, nan_like
from mlp_support import combined, statistics_of
from torch import Tensor

from vit_fast.kernels.device import gpu_of, reads_descriptors
from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul.matmul_launch import MatmulConfig, Operands, matmul_launch
from vit_fast.kernels.matmul.matmul_policy import matmul_config

HALF = (torch.float16, torch.bfloat16)
ARCH = gpu_of(torch.device(DEVICE)).arch  # of the interpreter: the reference GPU's


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def launch(operands: Operands, epilogue: str) -> None:
    """Launches with TMA exactly if N is a multiple of 8."""
    config = matmul_config(operands, epilogue)
    assert config.tma == (operands.sizes[1] % 8 == 0 and reads_descriptors(ARCH))
    matmul_launch(operands, epilogue=epilogue, config=config).run()


on_both_paths = pytest.mark.parametrize("N", [48, 33], ids=["TMA", "pointers"])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@on_both_paths
def test_residual_in_fp32(N: int, dtype: torch.dtype) -> None:
    """The branch is not rounded to the dtype of the operands: it is as accurate as in fp32."""
    a, b = normal(70, 64, dtype=dtype), normal(N, 64, dtype=dtype, seed=1)
    residual, bias, scale = normal(70, N, seed=2) * 100, normal(N, seed=3), normal(N, seed=4)
    (out,) = nan_like(residual)
    launch(Operands(a, b, out, b_is_nk=True, residual=residual, bias=bias, scale=scale), "residual")
    fp32, exact = (_formula((a, b, bias, scale, residual), precision) for precision in (torch.float32, torch.float64))
    assert_as_exact_as_eager("out", out, fp32, exact, FORWARD_FACTOR)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@on_both_paths
def test_input_gradient_in_fp32(N: int, dtype: torch.dtype) -> None:
    a, b = normal(70, 64, dtype=dtype), normal(64, N, dtype=dtype, seed=1)
    x, residual = normal(70, N, seed=2), normal(70, N, seed=3)
    mean, rstd, parts = normal(70, seed=4), normal(70, seed=5).abs(), normal(70, 19, seed=6)
    out, rounded = nan_like(x, x.to(dtype))
    given = Operands(a, b, out, x=x, residual=residual, mean=mean, rstd=rstd, row_part=parts, h=rounded)
    launch(given, "layer_norm_grad")

    def formula(precision: torch.dtype) -> Tensor:
        a_, b_, x_, residual_, mean_, parts_ = (t.to(precision) for t in (a, b, x, residual, mean, parts))
        coefficient = rstd.to(precision) ** 2 * parts_.sum(1) / N
        return residual_ + a_ @ b_ - (x_ - mean_[:, None]) * coefficient[:, None]

    assert_as_exact_as_eager("out", out, formula(torch.float32), formula(torch.float64), FORWARD_FACTOR)
    assert torch.equal(rounded, out.to(dtype))


def _branch(M: int, C: int, dtype: torch.dtype, stream: torch.dtype) -> tuple[Tensor, ...]:
    """h, weight, bias, scale, residual of linear_residual."""
    h, weight = normal(M, 200, dtype=dtype), normal(C, 200, dtype=dtype, seed=1)
    bias, scale, residual = (normal(*shape, dtype=stream, seed=i) for i, shape in enumerate(((C,), (C,), (M, C)), 2))
    return h, weight, bias, scale, residual


def _formula(tensors: tuple[Tensor | None, ...], precision: torch.dtype) -> Tensor:
    h, weight, bias, scale, residual = (None if t is None else t.to(precision) for t in tensors)
    assert h is not None and weight is not None
    out = torch.nn.functional.linear(h, weight, bias)
    out = out if scale is None else out * scale
    return out if residual is None else out + residual


def _check_statistics(out: Tensor, part: Tensor) -> None:
    found, exact = (combined(statistics, out.shape[1], 1e-6) for statistics in (part, statistics_of(out)))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("stream", [None, torch.float32], ids=["stream of h", "fp32 stream"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("splits", [2, 3, 7])  # of 4 iterations: parts of 2; of 2 or none; of 1 or none
@pytest.mark.parametrize("C", [48, 33, 200], ids=["TMA", "pointers", "pieces"])
def test_split_k(
    C: int, splits: int, dtype: torch.dtype, stream: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = _branch(70, C, dtype, stream or dtype)
    config = matmul_config(Operands(tensors[0], tensors[1], tensors[4], b_is_nk=True), "partial")
    monkeypatch.setattr(linear, "residual_config", lambda operands: (config, splits))
    out, statistics = linear.linear_residual(*tensors, statistics=stream is None)
    assert out.dtype == (stream or dtype)
    eager = _formula(tensors, stream or dtype)
    assert_as_exact_as_eager("out", out, eager, _formula(tensors, torch.float64), FORWARD_FACTOR)
    if statistics is not None:
        _check_statistics(out, statistics)
    again, _ = linear.linear_residual(*tensors, statistics=stream is None)
    assert torch.equal(out, again)


@pytest.mark.each_value
@pytest.mark.parametrize("sub_tiles", [1, 2, 4])
@pytest.mark.parametrize("C", [200, 33, 64, 260])
def test_statistics_do_not_depend_on_sub_tiles(C: int, sub_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are per 64 columns, also if sub-tiles have 32 columns. The last piece may be shorter."""
    config = MatmulConfig(64, 64 * sub_tiles if sub_tiles < 4 else 128, 32, sub_tiles=sub_tiles)
    monkeypatch.setattr(linear, "residual_config", lambda operands: (config, 1))
    tensors = _branch(70, C, torch.float16, torch.float16)
    out, part = linear.linear_residual(*tensors, statistics=True)
    assert part is not None
    _check_statistics(out, part)
