"""The matmul kernel and the kernels of weights and weight gradients match the fp64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_execution import KERNEL_ARCH
from kernel_support import DEVICE, FORWARD_FACTOR, assert_as_exact_as_eager, nan_like
from mlp_support import statistics_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import vit_fast
from vit_fast.blocks.block import run_blocks

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.device import REFERENCE_GPU, gpu_of, reads_descriptors
from vit_fast.kernels.inspect import offline
from vit_fast.kernels.layer_norm import new_statistics
from vit_fast.kernels.linear import linear, weight_matmuls
from vit_fast.kernels.linear.scaled_weights import in_dtype, scaled_weights
from vit_fast.kernels.linear.weight_matmuls import weight_matmuls_launch
from vit_fast.kernels.matmul.forward_epilogues import BranchOutput, partial_epilogue, residual_epilogue
from vit_fast.kernels.matmul.gradient_epilogues import layer_norm_grad_epilogue
from vit_fast.kernels.matmul.matmul_launch import Matmul, MatmulConfig, fits_tma, matmul_launch
from vit_fast.kernels.matmul.matmul_policy import matmul_config

HALF = (torch.float16, torch.bfloat16)
ARCH = gpu_of(torch.device(DEVICE)).arch  # of the interpreter: the reference GPU's


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("N", [48, 33], ids=["TMA", "pointers"])
def test_input_gradient_in_fp32(N: int, dtype: torch.dtype) -> None:
    a, b = normal(70, 64, dtype=dtype), normal(64, N, dtype=dtype, seed=1)
    x, residual = normal(70, N, seed=2), normal(70, N, seed=3)
    statistics, parts = torch.stack((normal(70, seed=4), normal(70, seed=5).abs())), normal(70, 19, seed=6)
    out, rounded = nan_like(x, x.to(dtype))
    matmul = Matmul(a, b, layer_norm_grad_epilogue(out, x, statistics, parts, residual, rounded))
    config = matmul_config(matmul)
    assert config.tma == (N % 8 == 0 and reads_descriptors(ARCH))
    matmul_launch(matmul, config).run()

    def formula(precision: torch.dtype) -> Tensor:
        tensors = (t.to(precision) for t in (a, b, x, residual, statistics, parts))
        a_, b_, x_, residual_, (mean, rstd), parts_ = tensors
        return residual_ + a_ @ b_ - (x_ - mean[:, None]) * (rstd**2 * parts_.sum(1) / N)[:, None]

    assert_as_exact_as_eager("out", out, formula(torch.float32), formula(torch.float64), FORWARD_FACTOR)
    assert torch.equal(rounded, out.to(dtype))


def _branch(M: int, C: int, dtype: torch.dtype, stream: torch.dtype) -> tuple[Tensor, ...]:
    """h, weight, bias, scale, residual of linear_residual."""
    h, weight = normal(M, 200, dtype=dtype), normal(C, 200, dtype=dtype, seed=1)
    bias, scale, residual = (normal(*shape, dtype=stream, seed=i) for i, shape in enumerate(((C,), (C,), (M, C)), 2))
    return h, weight, bias, scale, residual


def _computed(
    h: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, residual: Tensor, statistics: bool
) -> BranchOutput:
    part = new_statistics(*residual.shape, DEVICE).fill_(torch.nan) if statistics else None
    output = BranchOutput(torch.full_like(residual, torch.nan), residual, part, bias=bias, scale=scale)
    linear.linear_residual(h, weight, output)
    return output


def _formula(tensors: tuple[Tensor | None, ...], precision: torch.dtype) -> Tensor:
    h, weight, bias, scale, residual = (None if t is None else t.to(precision) for t in tensors)
    assert h is not None and weight is not None
    out = torch.nn.functional.linear(h, weight, bias)
    out = out if scale is None else out * scale
    return out if residual is None else out + residual


@pytest.mark.pairwise
@pytest.mark.parametrize("stream", [None, torch.float32], ids=["stream of h", "fp32 stream"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 7])  # of 4 iterations: one part; parts of 2; of 2 or none; of 1 or none
@pytest.mark.parametrize("C", [48, 33, 200], ids=["TMA", "pointers", "pieces"])
def test_residual_with_and_without_split_k(
    C: int, splits: int, dtype: torch.dtype, stream: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an fp32 stream, the branch is not rounded to the dtype of the operands: it is as accurate as in fp32."""
    tensors = _branch(70, C, dtype, stream or dtype)
    epilogue = residual_epilogue(BranchOutput(tensors[4], tensors[4])) if splits == 1 else partial_epilogue(tensors[4])
    config = matmul_config(Matmul(tensors[0], tensors[1], epilogue, b_is_nk=True))
    monkeypatch.setattr(linear, "residual_config", lambda matmul: (config, splits))
    out, _, statistics, *_ = _computed(*tensors, stream is None)
    eager = _formula(tensors, stream or dtype)
    assert_as_exact_as_eager("out", out, eager, _formula(tensors, torch.float64), FORWARD_FACTOR)
    if statistics is not None:
        torch.testing.assert_close(statistics, statistics_of(out))
    assert torch.equal(out, _computed(*tensors, stream is None).out)


@pytest.mark.each_value
@pytest.mark.parametrize("sub_tiles", [1, 2, 4])
@pytest.mark.parametrize("C", [200, 33, 64, 260])
def test_statistics_do_not_depend_on_sub_tiles(C: int, sub_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are per 64 columns, also if sub-tiles have 32 columns. The last piece may be shorter."""
    config = MatmulConfig(64, 64 * sub_tiles if sub_tiles < 4 else 128, 32, sub_tiles=sub_tiles)
    monkeypatch.setattr(linear, "residual_config", lambda operands: (config, 1))
    tensors = _branch(70, C, torch.float16, torch.float16)
    output = _computed(*tensors, True)
    torch.testing.assert_close(output.out_part, statistics_of(output.out))


@pytest.mark.each_value
@pytest.mark.parametrize("programs", [1, 2, 3, 132])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "widths",
    [[(40, 72)], [(40, 72), (136, 48)], [(40, 33), (130, 48)], [(40, 72), (8, 8), (136, 48), (64, 96)]],
    ids=str,
)
def test_matmuls_of_one_to_four_pairs(
    widths: list[tuple[int, int]], splits: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program continues with the next matmul where one ends."""
    gpu = dataclasses.replace(REFERENCE_GPU, sm_count=programs)
    monkeypatch.setattr(weight_matmuls, "gpu_of", lambda device: gpu)
    rows = 70
    pairs = [
        tuple(normal(rows, width, dtype=torch.bfloat16, seed=8 * index + i) for i, width in enumerate(pair))
        for index, pair in enumerate(widths)
    ]
    tma = fits_tma(tensor for pair in pairs for tensor in pair)
    assert tma == all(width % 8 == 0 for pair in widths for width in pair)
    config = MatmulConfig(64, 32, 16, tma=tma, num_stages=2)
    out = [torch.full((splits, *pair), float("nan"), device=DEVICE) for pair in widths]
    weight_matmuls_launch(pairs, out, config).run()
    for (a, b), found in zip(pairs, out, strict=True):
        torch.testing.assert_close(found.double().sum(0), a.double().T @ b.double(), rtol=1e-5, atol=1e-4)
        first = -(-5 // splits) * 16  # of 5 steps
        torch.testing.assert_close(found[0].double(), a[:first].double().T @ b[:first].double(), rtol=1e-5, atol=1e-4)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_rounded_once(made: Tensor, exact: Tensor) -> None:
    rounding = torch.finfo(made.dtype).eps / 2
    smallest = torch.finfo(made.dtype).smallest_normal * rounding
    error = (made.double() - exact).abs()
    assert bool((error <= exact.abs() * rounding * 1.01 + smallest * 1.01).all())


@pytest.mark.parametrize(
    ("given", "wanted"), [*((given, half) for half in HALF for given in (torch.float32, half)), (torch.float32,) * 2]
)
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_weights_of_a_backward(given: torch.dtype, wanted: torch.dtype, size: float) -> None:
    """Five weights of different shapes, with and without LayerScale. In fp16, a power of two is factored out."""
    shapes = (48, 72), (130, 16), (7, 1), (16, 2050), (3, 5)
    scales = [_random(rows, dtype=given) * size for rows, _ in shapes]
    scales[1] = torch.zeros_like(scales[1])
    pairs = [(_random(*shape, dtype=given), scale) for shape, scale in zip(shapes, scales)]
    pairs[3] = (pairs[3][0], None)
    for (weight, scale), made in zip(pairs, scaled_weights(pairs, wanted), strict=True):
        assert made.weight.shape == weight.shape and made.weight.is_contiguous()
        assert (made.factor is None) == (scale is None or wanted != torch.float16)
        exact = weight.double() if scale is None else weight.double() * scale.double()[:, None]
        if made.factor is not None:
            assert made.factor.shape == weight.shape[1:]
            factor = made.factor.unique().item()
            assert torch.frexp(torch.tensor(factor))[0] == 0.5  # a power of two
            if scale is not None and scale.any():
                assert factor <= scale.abs().max() < 2 * factor
            exact = exact / factor
        assert_rounded_once(made.weight, exact)


def test_weights_are_copied_only_if_necessary() -> None:
    weight, scale = _random(72, 48, dtype=torch.float32), _random(96, dtype=torch.float32)
    for turned, of_two in ((weight.t(), scale[::2]), (weight[:48], scale[48:])):
        (made,) = scaled_weights([(turned, of_two)], torch.bfloat16)
        assert_rounded_once(made.weight, turned.double() * of_two.double()[:, None])
    ready, other = _random(8, 16, dtype=torch.bfloat16), _random(8, 16, dtype=torch.float32)
    first, second, third = in_dtype(torch.bfloat16, ready, other, ready.t())
    assert first is ready and second.dtype == torch.bfloat16
    assert third.is_contiguous() and torch.equal(third, ready.t())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_invalid_scales_propagate(value: float) -> None:
    weight, scale = _random(4, 16, dtype=torch.float32), _random(4, dtype=torch.float32)
    scale[2] = value
    (made,) = scaled_weights([(weight, scale)], torch.float16)
    assert made.factor is not None
    assert not (made.weight.float() * made.factor)[2].isfinite().any()


@pytest.mark.skipif(torch.cuda.is_available() or KERNEL_ARCH is not None, reason="records launches of CPU tensors")
@pytest.mark.parametrize("layer_scale", [None, 1e-5])
def test_torch_casts_no_weights_under_autocast(layer_scale: float | None) -> None:
    """In a training step, torch casts only the gradient of a block's fp32 output."""
    options = {"depth": 1, "num_classes": 0, "init_values": layer_scale}
    model = vit_fast.create_model("vit_tiny_patch16_224", backend="triton", **options)
    x = torch.empty(2, 197, 192, requires_grad=True)
    with offline.recorded(offline.gpu("sm_90")) as launches, profile(activities=[ProfilerActivity.CPU]) as told:
        with torch.autocast("cpu", torch.bfloat16):
            y = run_blocks(model.blocks, x)
        y.backward(torch.empty_like(y))
    counts = {event.key: event.count for event in told.key_averages()}
    assert (counts.get("aten::_to_copy"), counts.get("aten::mul")) == (1, None)
    assert len(launches) <= 21
