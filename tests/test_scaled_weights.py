"""Weights in the dtype of the matmuls, scaled by LayerScale for the backward."""

from __future__ import annotations

import json

import pytest
import torch
from children import environment, run_python
from kernel_execution import KERNEL_ARCH
from mlp_support import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.linear.scaled_weights import in_dtype, scaled_weights

HALVES = (torch.float16, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_rounded_once(made: Tensor, exact: Tensor) -> None:
    rounding = torch.finfo(made.dtype).eps / 2
    smallest = torch.finfo(made.dtype).smallest_normal * rounding
    error = (made.double() - exact).abs()
    assert bool((error <= exact.abs() * rounding * 1.01 + smallest * 1.01).all())


@pytest.mark.parametrize(
    ("given", "wanted"), [*((given, half) for half in HALVES for given in (torch.float32, half)), (torch.float32,) * 2]
)
@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_weights_of_a_backward(given: torch.dtype, wanted: torch.dtype, size: float) -> None:
    """Five weights of different shapes, with and without LayerScale. In fp16, a power of two is factored out."""
    shapes = (48, 72), (130, 16), (7, 1), (16, 2050), (3, 5)
    scales = [random(rows, dtype=given) * size for rows, _ in shapes]
    scales[1] = torch.zeros_like(scales[1])
    pairs = [(random(*shape, dtype=given), scale) for shape, scale in zip(shapes, scales)]
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
    weight, scale = random(72, 48, dtype=torch.float32), random(96, dtype=torch.float32)
    for turned, of_two in ((weight.t(), scale[::2]), (weight[:48], scale[48:])):
        (made,) = scaled_weights([(turned, of_two)], torch.bfloat16)
        assert_rounded_once(made.weight, turned.double() * of_two.double()[:, None])
    ready, other = random(8, 16, dtype=torch.bfloat16), random(8, 16, dtype=torch.float32)
    first, second, third = in_dtype(torch.bfloat16, ready, other, ready.t())
    assert first is ready and second.dtype == torch.bfloat16
    assert third.is_contiguous() and torch.equal(third, ready.t())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_invalid_scales_propagate(value: float) -> None:
    weight, scale = random(4, 16, dtype=torch.float32), random(4, dtype=torch.float32)
    scale[2] = value
    (made,) = scaled_weights([(weight, scale)], torch.float16)
    assert made.factor is not None
    assert not (made.weight.float() * made.factor)[2].isfinite().any()


_COUNT = """
import json, torch, vit_fast
from torch.profiler import ProfilerActivity, profile
from vit_fast.blocks.block import run_blocks
from vit_fast.kernels.inspect import offline

found = []
for scale in (None, 1e-5):
    with offline.recorded(offline.gpu("sm_90")) as launches:
        options = {"depth": 1, "num_classes": 0, "init_values": scale}
        model = vit_fast.create_model("vit_base_patch16_224", backend="triton", **options)
        x = torch.empty(256, 197, 768, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU]) as told:
            with torch.autocast("cpu", torch.bfloat16):
                y = run_blocks(model.blocks, x)
            y.backward(torch.empty_like(y))
    by_torch = {event.key: event.count for event in told.key_averages() if event.key in ("aten::_to_copy", "aten::mul")}
    found.append([len(launches), by_torch])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="records launches of CPU tensors")
@pytest.mark.skipif(KERNEL_ARCH is not None, reason="counts launches in a process without the emulator")
def test_torch_casts_no_weights_under_autocast() -> None:
    """In a training step, torch casts only the gradient of a block's fp32 output."""
    for launches, by_torch in json.loads(run_python(["-c", _COUNT], environment())):
        assert launches <= 21 and by_torch == {"aten::_to_copy": 1}
