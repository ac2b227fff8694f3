"""pytest-benchmark suite: attention and LayerNorm+MLP alone, on every backend and beside torch's own kernels.

pytest-benchmark's clock is the host's and includes the launch; `extra_info` holds what device events say of the same
call with cold inputs and the launch hidden (on a CPU, the host's clock with cold inputs), and the rates that follow.
An implementation is benchmarked only after it was held against the fp64 definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast import ops
from vit_fast.accuracy import judge
from vit_fast.benchmarks.timing import Protocol, cold_rotation, synchronise, time_call
from vit_fast.errors import UnsupportedInputError
from vit_fast.ops import reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE, BATCH = {"cpu": (torch.float32, 2), "cuda": (torch.bfloat16, 64)}[DEVICE.type]
DEVICE_TIME = Protocol(launch="hidden")


def sdpa_with(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v)


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eager": functools.partial(ops.attention, backend="eager"),
    "sdpa": functools.partial(ops.attention, backend="sdpa"),
    "triton": functools.partial(ops.attention, backend="triton"),
    "torch-flash": functools.partial(sdpa_with, SDPBackend.FLASH_ATTENTION),
    "torch-cudnn": functools.partial(sdpa_with, SDPBackend.CUDNN_ATTENTION),
    "torch-efficient": functools.partial(sdpa_with, SDPBackend.EFFICIENT_ATTENTION),
}


@pytest.mark.parametrize(("seqlen", "head_dim"), [(197, 64), (257, 80), (577, 64)])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(benchmark: Any, name: str, seqlen: int, head_dim: int) -> None:
    heads = 12
    q, k, v = (torch.randn(BATCH, heads, seqlen, head_dim, device=DEVICE, dtype=DTYPE) for _ in range(3))
    expected = reference.attention(q.double(), k.double(), v.double())
    benchmark.group = f"attention N={seqlen} D={head_dim}"
    _measure(
        benchmark,
        ATTENTIONS[name],
        (q, k, v),
        expected,
        reference.attention(q, k, v),
        4 * BATCH * heads * seqlen**2 * head_dim,
    )


def mlp_by_epilogue(x: Tensor, g: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """torch's matmul with bias and tanh GELU in cuBLASLt's epilogue; on a CPU it is another function, exact GELU."""
    normed = F.layer_norm(x, (x.shape[-1],), g, b, 1e-6)
    hidden = torch._addmm_activation(b1, normed.flatten(0, -2), w1.t(), use_gelu=True)
    return x + F.linear(hidden, w2, b2).view_as(x)


MLPS: dict[str, Callable[..., Tensor]] = {
    "eager": functools.partial(ops.layer_norm_mlp, activation="gelu_tanh", backend="eager"),
    "triton": functools.partial(ops.layer_norm_mlp, activation="gelu_tanh", backend="triton"),
}
if DEVICE.type == "cuda":
    MLPS["torch-epilogue"] = mlp_by_epilogue


@pytest.mark.parametrize("width", [384, 768])
@pytest.mark.parametrize("name", MLPS)
def test_layer_norm_mlp(benchmark: Any, name: str, width: int) -> None:
    hidden, seqlen = 4 * width, 197
    shapes = ((BATCH, seqlen, width), (width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,))
    scales = (1.0, 1.0, 0.1, width**-0.5, 0.1, hidden**-0.5, 0.1)
    inputs = tuple(
        (scale * torch.randn(shape, device=DEVICE)).to(DTYPE) for shape, scale in zip(shapes, scales, strict=True)
    )
    expected = reference.layer_norm_mlp(*(tensor.double() for tensor in inputs), activation="gelu_tanh")
    eager = reference.layer_norm_mlp(*inputs, activation="gelu_tanh")
    benchmark.group = f"LayerNorm+MLP C={width} F={hidden}"
    _measure(benchmark, MLPS[name], inputs, expected, eager, 4 * BATCH * seqlen * width * hidden)


def _measure(
    benchmark: Any,
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    expected: Tensor,
    eager: Tensor,
    flops: int,
) -> None:
    """Checks, then lets pytest-benchmark time the call, and puts beside it what device events say."""
    try:
        output = function(*inputs)
    except UnsupportedInputError as refusal:
        pytest.skip(str(refusal))
    except RuntimeError as failure:
        if "No available kernel" in str(failure) or "No viable backend" in str(failure):
            pytest.skip("torch has no such attention kernel here")
        raise
    verdict = judge(output, eager, expected)
    assert verdict.passed, verdict

    def run() -> None:
        function(*inputs)
        synchronise(DEVICE)

    benchmark(run)
    rotation = cold_rotation(inputs)
    timing = time_call(lambda number: function(*rotation[number % len(rotation)]), DEVICE, DEVICE_TIME)
    moved = sum(tensor.nbytes for tensor in (*inputs, output))
    benchmark.extra_info.update(
        max_error=verdict.error,
        ms=timing.ms,
        ms_p20=timing.ms_p20,
        ms_p80=timing.ms_p80,
        host_ms=timing.host_ms,
        host_bound=timing.host_bound,
        TFLOP_per_s=flops / timing.ms / 1e9,
        GB_per_s=moved / timing.ms / 1e6,
    )
