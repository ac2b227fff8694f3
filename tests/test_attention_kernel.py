"""The attention kernels match the fp64 reference, for all shapes, dtypes, layouts and launch configurations."""

from __future__ import annotations

import dataclasses
import os
from itertools import cycle

import pytest
import torch
from children import run_python
from hypothesis import given
from hypothesis import strategies as st
from kernel_execution import DTYPES, KERNEL_ARCH, few
from kernel_support import (
    DEVICE,
    LAYOUTS,
    check_attention,
    check_outputs,
    nan_like,
    nan_output,
    packed_inputs,
    run_attention,
    strided,
)

pytest.importorskip("triton", reason="the kernels need triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from vit_fast.kernels.attention import attention, attention_launch
from vit_fast.kernels.attention.attention_backward import backward_launches
from vit_fast.kernels.attention.attention_forward import forward_launch
from vit_fast.kernels.attention.attention_launch import AttentionCall
from vit_fast.kernels.attention.attention_policy import AttentionConfig
from vit_fast.kernels.device import gpu_of

HALF = (torch.float16, torch.bfloat16)
HEAD_DIMS = (16, 32, 48, 64, 72, 80, 88, 96, 128)
FAST_LENGTHS = (1, 9, 17, 50, 65, 128, 129, 197)  # multiples of the tile sizes, and others
SLOW_LENGTHS = (2, 8, 16, 49, 64, 127, 196, 198, 200, 201, 233, 240, 255, 256, 257, 577)
HEADS, DIMS = cycle((1, 3)), cycle((64, 16, 80, 32, 72, 48, 96))

# batch, queries, keys, heads, head_dim, dtype
SHAPES = [
    *((1, n, n, next(HEADS), next(DIMS), dtype) for n, dtype in zip(FAST_LENGTHS, cycle(HALF))),
    *((1, n, n, 1, 64, DTYPES[0]) for n in (1, 17, 129)),
    *((2, 20, 20, 2, d, dtype) for d, dtype in zip(HEAD_DIMS, cycle(DTYPES))),
    (2, 5, 5, 12, 16, torch.float16), (1, 21, 21, 3, 75, torch.float16),
    (1, 1, 196, 2, 72, torch.float16), (1, 3, 300, 2, 64, torch.float16), (1, 70, 5, 2, 32, torch.float16),
    (0, 197, 197, 3, 64, torch.float16),
]  # fmt: skip
SLOW_SHAPES = [
    *((1, n, n, next(HEADS), next(DIMS), dtype) for n, dtype in zip(SLOW_LENGTHS, cycle(HALF))),
    (1, 1025, 1025, 1, 16, torch.float16),
    *((2, 20, 20, 2, head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES),
]


def _gradient_of(q: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, head_dim = q.shape
    return torch.randn(batch, tokens, heads, head_dim, device=q.device).to(q.dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("batch", "n_q", "n_kv", "heads", "head_dim", "dtype"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES if shape not in SHAPES)],
    ids=str,
)
def test_every_shape(batch: int, n_q: int, n_kv: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    q = packed_inputs(batch, n_q, heads, head_dim, dtype)[0]
    _, k, v = packed_inputs(batch, n_kv, heads, head_dim, dtype)
    check_attention(q, k, v, _gradient_of(q), head_dim**-0.5)


@given(
    data=st.data(), batch=st.integers(1, 2), heads=st.integers(1, 2),
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)), head_dim=st.integers(16, 128),
    dtype=st.sampled_from(HALF), sharpness=st.floats(0.1, 1.5), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_drawn_shapes_and_layouts(data, batch, heads, lengths, head_dim, dtype, sharpness, seed) -> None:
    torch.manual_seed(seed)
    kinds = st.sampled_from(tuple(LAYOUTS))
    q, do, k, v = (
        strided(data.draw(kinds), (batch, heads, tokens, head_dim), dtype)
        for tokens in (lengths[0], lengths[0], lengths[1], lengths[1])
    )
    # with sharper scores, the softmax saturates, and delta, summed from the rounded o, costs every kernel accuracy
    check_attention(q, k, v, do, sharpness * head_dim**-0.5)


FORWARD_CONFIGS = [
    AttentionConfig(64, 128, chunks=3, tiles=1),
    AttentionConfig(16, 64, chunks=3, tiles=4),
    AttentionConfig(64, 256, num_warps=8, chunks=3, tiles=4),
    AttentionConfig(64, 128, chunks=1, tiles=2),
    AttentionConfig(64, 128),
    AttentionConfig(32, 32, num_stages=1),
]
BACKWARD_CONFIGS = [AttentionConfig(64, 32, num_stages=1), AttentionConfig(32, 64, num_stages=1)]


@pytest.mark.pairwise
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("head_dim", [64, 80], ids=["whole", "split"])
@pytest.mark.parametrize("config", [*FORWARD_CONFIGS, *BACKWARD_CONFIGS], ids=str)
def test_every_configuration(config: AttentionConfig, head_dim: int, tma: bool) -> None:
    if tma and int(gpu_of(DEVICE).arch.removeprefix("sm_")) < 90:
        pytest.skip("no TMA before sm_90")
    forward, config = config in FORWARD_CONFIGS, dataclasses.replace(config, tma=tma)
    q, k, v = packed_inputs(1, 100, 2, head_dim, torch.float16)
    do = _gradient_of(q)
    o, lse = nan_output(q)
    dq, dk, dv, delta = nan_like(q, k, v, lse)
    call = AttentionCall(q, k, v, lse, 0.2)
    if forward:
        launches, found = [forward_launch(call, o, config)], {"o": o}
    else:
        attention.attention_forward(call, o)
        launches = [*backward_launches(call, o, do, dq, dk, dv, delta, config, config)]
        found = {"dq": dq, "dk": dk, "dv": dv}
    for launch in launches:
        assert any(isinstance(value, TensorDescriptor) for value in launch.args.values()) is tma
        launch.run()
    check_outputs(found, q, k, v, do, 0.2)
    assert lse.isfinite().all()


@pytest.mark.parametrize(("kind", "expected"), LAYOUTS.items())
def test_every_layout(kind: str, expected: str) -> None:
    q, k, v = (strided(kind, (2, 2, 33, 64), torch.float16) for _ in range(3))
    assert attention_launch.access_of(q, k, v) == expected
    check_attention(q, k, v, strided(kind, (2, 2, 33, 64), torch.float16), 0.125)


@pytest.mark.parametrize("n_kv", [5, 70, 261])
def test_scores_far_below_zero(n_kv: int) -> None:
    """All scores are near -2000. Keys past the end, with score 0, must neither count nor overflow."""
    q = torch.full((1, 1, 3, 32), 8.0, device=DEVICE, dtype=torch.float16)
    k = -q[:, :, :1].expand(1, 1, n_kv, 32) + torch.randn(1, 1, n_kv, 32, device=DEVICE).half() / 64
    v = torch.randn(1, 1, n_kv, 32, device=DEVICE).half()
    check_attention(q, k.contiguous(), v, torch.randn_like(q), 1.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [1, 30, 1000])
@pytest.mark.parametrize("kind", ["saturated", "shared"])
def test_large_scores(kind: str, size: int, dtype: torch.dtype) -> None:
    """Scores are far apart, so that one key dominates; or close to each other, but far from zero.

    Not in fp32, whose gradients have 20 times the error of eager, because lse is fp32 and delta is summed from o.
    """
    q, k, v, do = (torch.randn(1, 2, 50, 64) for _ in range(4))
    if kind == "saturated":
        q, k = q * size**0.5, k * size**0.5
    else:
        shared = torch.randn(64)
        shared *= (8 * size) ** 0.5 / shared.norm()
        q, k = q + shared, k + shared
    q, k, v, do = (tensor.to(DEVICE, dtype) for tensor in (q, k, v, do))
    check_attention(q, k, v, do, 0.125)


def test_nan_stays_in_its_image() -> None:
    q, k, v = packed_inputs(3, 40, 2, 32, torch.float16)
    v[1, 0, 3, 5] = float("nan")
    q[1, 1, 2, 0] = float("nan")
    found = run_attention(q, k, v, _gradient_of(q), 0.2)
    for value in found.values():
        assert value[0].isfinite().all() and value[2].isfinite().all()
    assert found["o"][1, 0].isnan().any() and found["o"][1, 1, 2].isnan().all()


_BEYOND_32_BITS = """
import sys
sys.path.insert(0, "tests")
import torch
from kernel_support import DEVICE, check_attention
from vit_fast.kernels.attention.attention_launch import needs_wide_offsets

def far_apart(stride_b, stride_n):
    shape, strides = (2, 1, 17, 16), (stride_b, 16, stride_n, 1)
    elements = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides))
    assert elements > 2**31
    buffer = torch.empty(elements, dtype=torch.float16, device=DEVICE)
    return buffer.as_strided(shape, strides).copy_(torch.randn(shape))

for stride_b, stride_n, wide in ((2**31 + 16, 16, False), (16, 2**27 + 16, True)):
    q, k, v = (far_apart(stride_b, stride_n) for _ in range(3))
    assert needs_wide_offsets(q) is wide
    check_attention(q, k, v, far_apart(stride_b, stride_n), 0.25)
"""


@pytest.mark.slow
@pytest.mark.skipif(KERNEL_ARCH is not None, reason="a process of its own, without the emulator")
def test_more_than_two_to_the_31_elements() -> None:
    """Runs in a child process: an offset that overflows 32 bits may crash the process."""
    run_python(["-c", _BEYOND_32_BITS], os.environ)


def test_grids() -> None:
    """All heads are on the first axis, because the others are limited to 65,535. Impossible launches raise errors."""
    qkv = torch.empty(70_000, 5, 3, 2, 16, device="meta", dtype=torch.float16)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    lse, config = torch.empty(70_000, 2, 5, device="meta"), AttentionConfig(32, 32)
    call = AttentionCall(q, k, v, lse, 0.25)
    launches = (
        forward_launch(call, q, AttentionConfig(16, 64, chunks=3)),
        forward_launch(call, q, AttentionConfig(32, 32)),
        *backward_launches(call, q, q, q, k, v, lse, config, config),
    )
    assert [launch.programs for launch in launches] == [140_000] * 4
    with pytest.raises(ValueError, match="use a smaller batch"):
        dataclasses.replace(launches[0], programs=2**31).run()
    with pytest.raises(ValueError, match=r"n_kv must be between 1 and 4 .* got 5"):
        forward_launch(call, q, AttentionConfig(16, 4, chunks=1))


@pytest.mark.gpu
def test_results_are_deterministic_and_equal_in_a_cuda_graph() -> None:
    q, k, v = packed_inputs(few(8, 2), few(197, 50), few(12, 2), 64, torch.bfloat16)
    do = _gradient_of(q)
    first = run_attention(q, k, v, do, 0.125)
    for _ in range(few(250, 2)):
        again = run_attention(q, k, v, do, 0.125)
        assert all(torch.equal(value, again[name]) for name, value in first.items())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_attention(q, k, v, do, 0.125)
    graph.replay()
    assert all(torch.equal(value, captured[name]) for name, value in first.items())
