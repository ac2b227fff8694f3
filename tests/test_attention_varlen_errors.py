"""Errors of attention with packed sequences and masked keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_support import (
    DEVICE,
    packed,
    sequences_of,
)
from torch import Tensor

from vit_fast import ops

pytest.importorskip("triton", reason="the kernels need triton")


BACKENDS = ("eager", "sdpa", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, bounds: (q, q[:, :1], q, bounds, 4), r"k must have q\'s shape \(6, 2, 16\), got \(6, 1, 16\)"),
        (lambda q, bounds: (q[None], q, q, bounds, 4), "q must have shape"),
        (lambda q, bounds: (q, q, q.half(), bounds, 4), "got torch.float16"),
        (lambda q, bounds: (q.long(),) * 3 + (bounds, 4), "int64"),
        (lambda q, bounds: (q, q, q, bounds.long(), 4), "cu_seqlens must be torch.int32 on .*, got torch.int64"),
        (lambda q, bounds: (q, q, q, bounds.to("meta"), 4), "got torch.int32 on meta"),
        (lambda q, bounds: (q, q, q, bounds[None], 4), r"cu_seqlens must have shape \[S \+ 1\], got \(1, 3\)"),
        (lambda q, bounds: (q, q, q, bounds, -1), "max_seqlen must be an int of at least 0, got -1"),
        (lambda q, bounds: (q, q, q, bounds, bounds.max()), "max_seqlen must be an int of at least 0, got tensor"),
    ],
)
def test_bad_inputs_are_named(change: Callable[..., tuple[Any, ...]], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.attention_varlen(*change(packed(6, 2, 16)[:, 0], sequences_of([2, 4])), backend=backend)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("bounds", [[1, 6], [0, 4, 2], [0, 7], [0, 5, 6]])
def test_wrong_lengths_are_found_where_they_are_read(bounds: list[int], backend: str) -> None:
    q = packed(6, 2, 16)[:, 0]
    sequences = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"(cu_seqlens must start with 0|max_seqlen must be at least .*, got 4)"):
        ops.attention_varlen(q, q, q, sequences, 4, backend=backend)


def test_packed_input_of_the_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"qkv must have shape \[total, 3, H, D\], got \(6, 2, 2, 16\)"):
        ops.attention_varlen_qkvpacked(torch.randn(6, 2, 2, 16), sequences_of([6]), 6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 9), "got torch.float32"),
        (torch.ones(9, dtype=torch.bool), r"key_mask must be torch.bool \[2, 9\] on .*, got torch.bool \[9\]"),
        (torch.ones(2, 5, dtype=torch.bool), "key_mask must be torch.bool"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_key_masks_are_named(mask: Tensor, message: str, backend: str) -> None:
    q, k = torch.randn(2, 2, 5, 32, device=DEVICE), torch.randn(2, 2, 9, 32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        ops.attention(q, k, k, key_mask=mask.to(DEVICE), backend=backend)
