"""The attention kernels on shapes, layouts and scales that hypothesis draws (HYPOTHESIS_PROFILE=full: 500 cases)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_support import LAYOUTS, check_attention, strided

pytest.importorskip("triton", reason="the kernels need triton")


@given(
    data=st.data(),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    n_q=st.integers(1, 70),
    n_kv=st.integers(1, 70),
    head_dim=st.integers(16, 128),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    sharpness=st.floats(0.1, 1.5),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn_shapes_and_layouts(
    data: st.DataObject,
    batch: int,
    heads: int,
    n_q: int,
    n_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    sharpness: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    kinds = st.sampled_from(tuple(LAYOUTS))
    q, do = (strided(data.draw(kinds), (batch, heads, n_q, head_dim), dtype) for _ in range(2))
    k, v = (strided(data.draw(kinds), (batch, heads, n_kv, head_dim), dtype) for _ in range(2))
    # in units of D**-0.5: a softmax that saturates shows what delta, summed from the rounded o, costs every kernel
    check_attention(q, k, v, do, sharpness * head_dim**-0.5)
