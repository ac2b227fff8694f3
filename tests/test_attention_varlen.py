"""Packed and masked attention: kernels against the fp64 reference; errors, export and compilation of the operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_tapes import NoHost
from hypothesis import given
from hypothesis import strategies as st
from kernel_execution import DTYPES, INTERPRETED, KERNEL_ARCH
from kernel_support import DEVICE, check_outputs, nan_output, packed, run_attention, sequences_of
from our_operators import OurOperators
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit_fast import ops
from vit_fast.ops.attention_operator import as_batch

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.attention.attention import attention_forward
from vit_fast.kernels.attention.attention_launch import AttentionCall

BACKENDS = ("eager", "sdpa", "triton")
# Compiled kernels run in fp16. They round the probabilities, which are at most 1, at other points than torch.
CLOSE: dict[str, float] = {} if INTERPRETED else {"rtol": 2**-10, "atol": 2**-9}


def check_packed(lengths: list[int], qkv: Tensor, scale: float, longest: int | None = None) -> None:
    """Compares each sequence with the reference; results after the last sequence must be 0."""
    q, k, v = (as_batch(part) for part in qkv.unbind(1))
    do = torch.randn_like(q)
    longest = max(lengths, default=0) if longest is None else longest
    found = run_attention(q, k, v, do, scale, sequences=sequences_of(lengths), longest=longest)
    found.pop("lse")
    bounds = [0, *itertools.accumulate(lengths)]
    for start, end in itertools.pairwise(bounds):
        if start < end:
            own = [tensor[:, :, start:end] for tensor in (q, k, v, do)]
            check_outputs({name: tensor[:, :, start:end] for name, tensor in found.items()}, *own, scale)
    assert all((tensor[:, :, bounds[-1] :] == 0).all() for tensor in found.values())


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "dtype"),
    [
        ([5, 0, 17, 64, 70], 2, 64, torch.float16),
        ([130, 1, 0, 0, 33], 1, 72, torch.bfloat16),
        ([20, 30], 1, 80, DTYPES[0]),
        ([200], 1, 128, torch.float16),
        ([64, 64, 64], 2, 80, torch.bfloat16),
        ([0, 0, 3], 3, 16, DTYPES[0]),
        ([], 1, 32, torch.float16),
        # the search in two steps; the gradients of one token alone would be rounding errors
        pytest.param([9, 0, 7] * 100 + [150, 0, 0, 20], 1, 16, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("behind", [0, 3])
def test_packed(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, behind: int) -> None:
    if total := sum(lengths) + behind:  # test_no_tokens tests the operator with none
        check_packed(lengths, packed(total, heads, head_dim, dtype), head_dim**-0.5)


@given(
    share=st.sampled_from((0.0, 0.1, 0.6, 1.0)), batch=st.integers(1, 3), n_q=st.integers(1, 40),
    n_kv=st.integers(1, 150), head_dim=st.sampled_from((64, 72, 80, 128)), dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_drawn_masks(
    share: float, batch: int, n_q: int, n_kv: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:  # fmt: skip
    """Masks any pattern of keys, including all keys. The reference computes attention without the masked keys."""
    torch.manual_seed(seed)
    q, do = torch.randn(2, batch, 2, n_q, head_dim, device=DEVICE).to(dtype)
    k, v = torch.randn(2, batch, 2, n_kv, head_dim, device=DEVICE).to(dtype)
    keep = torch.rand(batch, n_kv, device=DEVICE) < share
    found = run_attention(q, k, v, do, head_dim**-0.5, key_mask=keep)
    found.pop("lse")
    for image in range(batch):
        kept = keep[image].nonzero()[:, 0]
        o, dq, dk, dv = (tensor[image : image + 1] for tensor in found.values())
        assert (dk[:, :, ~keep[image]] == 0).all() and (dv[:, :, ~keep[image]] == 0).all()
        if not len(kept):
            assert (o == 0).all() and (dq == 0).all()
            continue
        own = [t[image : image + 1] for t in (q, k, v, do)]
        own = [own[0], own[1][:, :, kept], own[2][:, :, kept], own[3]]
        if len(kept) == 1:  # dq and dk are 0 except for rounding errors
            for gradient in (dq, dk):
                torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)
                gradient.zero_()
        outputs = {"o": o, "dq": dq, "dk": dk[:, :, kept], "dv": dv[:, :, kept]}
        check_outputs(outputs, *own, head_dim**-0.5)


def test_an_unknown_longest_sequence_selects_tiles_by_the_mean() -> None:
    lengths, qkv = [5, 17], torch.randn(22, 3, 1, 64, device=DEVICE, dtype=torch.float16)
    check_packed(lengths, qkv, 0.1, longest=0)
    q, k, v = (as_batch(part) for part in qkv.unbind(1))
    call = AttentionCall(q, k, v, nan_output(q)[1], 0.1, sequences_of(lengths))
    unknown, known = (call._replace(longest=longest).problem() for longest in (0, 17))
    assert unknown == known and unknown.n_q == unknown.n_kv == 11


def test_expanded_and_strided_masks() -> None:
    q, k, v = torch.randn(3, 2, 1, 20, 32, device=DEVICE).unbind(0)
    row = torch.arange(20, device=DEVICE) < 13
    apart = torch.zeros(20, 2, dtype=torch.bool, device=DEVICE)
    apart[:, 1] = row
    right = ops.attention(q, k, v, key_mask=row.expand(2, 20).contiguous(), backend="triton")
    for mask in (row.expand(2, 20), apart[:, 1:].transpose(0, 1).expand(2, 20)):
        assert torch.equal(ops.attention(q, k, v, key_mask=mask, backend="triton"), right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_sequence(backend: str) -> None:
    bounds, clean = sequences_of([20, 70, 5]), packed(95, 2, 16)
    spoilt = clean.clone()
    spoilt[20:90] = float("nan")
    results = []
    for qkv in (clean.requires_grad_(), spoilt.requires_grad_()):
        out = ops.attention_varlen_qkvpacked(qkv, bounds, 70, backend=backend)
        results.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for expected, found in zip(*results):
        assert torch.equal(found[:20], expected[:20]) and torch.equal(found[90:], expected[90:])
        assert found[20:90].isnan().any()


def padded_attention(qkv: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Computes packed attention as masked attention of padded images."""
    longest = max(lengths)
    keep = torch.arange(longest, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    whole = qkv.new_zeros(len(lengths), longest, *qkv.shape[1:]).masked_scatter(keep[..., None, None, None], qkv)
    q, k, v = whole.transpose(1, 3).unbind(2)
    return ops.attention(q, k, v, key_mask=keep, scale=scale, backend="eager").transpose(1, 2)[keep]


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_attention_equals_padded_attention(backend: str) -> None:
    lengths = [4, 0, 11, 11, 2]
    bounds, total = sequences_of(lengths), sum(lengths)
    qkv = packed(total + 2, 2, 16).requires_grad_()
    right = padded_attention(qkv[:total], lengths, 0.3)
    (right_grad,) = torch.autograd.grad(right.sin().sum(), qkv)
    out = ops.attention_varlen_qkvpacked(qkv, bounds, 11, scale=0.3, backend=backend)
    apart = ops.attention_varlen(*qkv.unbind(1), bounds, 11, scale=0.3, backend=backend)
    for value in (out, apart):
        (grad,) = torch.autograd.grad(value.sin().sum(), qkv)
        torch.testing.assert_close(value[:total], right, **CLOSE)
        torch.testing.assert_close(grad, right_grad, **CLOSE)
        assert not value[total:].any()
    assert out.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequences", [[0], [0, 0, 0]])
def test_no_tokens(backend: str, sequences: list[int]) -> None:
    qkv = packed(0, 2, 16).requires_grad_()
    bounds = torch.tensor(sequences, dtype=torch.int32, device=DEVICE)
    out = ops.attention_varlen_qkvpacked(qkv, bounds, 0, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert out.shape == (0, 2, 16) and grad.shape == qkv.shape


def test_compiles_without_graph_breaks_for_dynamic_lengths() -> None:
    def function(qkv: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return ops.attention_varlen_qkvpacked(qkv * 2, bounds, longest, backend="triton").sin()

    seen = OurOperators()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=seen)
    for lengths in ([4, 5], [3, 8, 1], [20]):
        qkv, bounds = packed(sum(lengths), 2, 16).requires_grad_(), sequences_of(lengths)
        right, value = (f(qkv, bounds, max(lengths)) for f in (function, compiled))
        torch.testing.assert_close(value, right)
        grads = [torch.autograd.grad(result.sum(), qkv)[0] for result in (right, value)]
        torch.testing.assert_close(grads[1], grads[0])
    assert seen == ["attention"] * seen.graphs and seen.graphs <= 2


def test_export_contains_operators_of_torch_only() -> None:
    """The exported program supports other lengths, and tokens after the last sequence."""

    class Packed(torch.nn.Module):
        def forward(self, qkv: Tensor, bounds: Tensor) -> Tensor:
            return ops.attention_varlen_qkvpacked(qkv, bounds, 9, backend="triton")

    qkv = packed(16, 2, 16)
    program = torch.export.export(Packed(), (qkv, sequences_of([5, 0, 9])))
    assert "vit_fast" not in str(program.graph)
    for lengths in ([5, 0, 9], [2, 2, 7]):
        bounds = sequences_of(lengths)
        torch.testing.assert_close(program.module()(qkv, bounds), Packed()(qkv, bounds), **CLOSE)


def test_lengths_are_not_read_on_the_host() -> None:
    """Reading them would synchronize with the device."""
    bounds, q = sequences_of([2, 0, 4]), packed(6, 2, 16)[:, 0]
    keep = torch.ones(1, 6, dtype=torch.bool, device=DEVICE)
    with NoHost():
        ops.attention_varlen(q, q, q, bounds, 4, backend="triton")
        ops.attention(*(as_batch(q),) * 3, key_mask=keep, backend="triton")


def test_flop_formulas() -> None:
    """The formula is exact if all sequences have the same length."""
    qkv, bounds = packed(20, 2, 16).requires_grad_(), sequences_of([5, 5, 5, 5])
    with FlopCounterMode(display=False) as counter:
        ops.attention_varlen_qkvpacked(qkv, bounds, 5, backend="triton").sum().backward()
    assert counter.get_total_flops() == 14 * 4 * 2 * 5 * 5 * 16


@pytest.mark.skipif(KERNEL_ARCH is not None, reason="sequences overlap, which the emulator reports as races")
def test_invalid_lengths_write_only_into_the_output() -> None:
    room = torch.full((30, 3, 1, 16), 7.0, device=DEVICE)
    q, k, v = (as_batch(part) for part in room[10:20].unbind(1))
    _, lse = nan_output(q)
    for bounds in ([0, 25], [-4, 6], [0, 8, 3, 40]):
        sequences = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        attention_forward(AttentionCall(q, k, v, lse, 0.25, sequences, longest=10), as_batch(room[10:20, 0]))
        assert (room[:10] == 7).all() and (room[20:] == 7).all()


# arguments of attention_varlen, given q and bounds
BAD_INPUTS: list[tuple[Callable[..., tuple[Any, ...]], str]] = [
    (lambda q, bounds: (q, q[:, :1], q, bounds, 4), r"k must have q\'s shape \(6, 2, 16\), got \(6, 1, 16\)"),
    (lambda q, bounds: (q[None], q, q, bounds, 4), "q must have shape"),
    (lambda q, bounds: (q, q, q.double(), bounds, 4), "got torch.float64"),
    (lambda q, bounds: (q, q, q, bounds.long(), 4), "cu_seqlens must be torch.int32 on .*, got torch.int64"),
    (lambda q, bounds: (q, q, q, bounds.to("meta"), 4), "got torch.int32 on meta"),
    (lambda q, bounds: (q, q, q, bounds[None], 4), r"must have shape \[S \+ 1\] for S sequences, got \(1, 3\)"),
    (lambda q, bounds: (q, q, q, bounds, -1), "max_seqlen must be an integer >= 0, got -1"),
]
BAD_MASKS = [
    (torch.ones(2, 9), "got torch.float32"),
    (torch.ones(9, dtype=torch.bool), r"key_mask must be torch.bool \[2, 9\] on .*, got torch.bool \[9\]"),
    (torch.ones(2, 5, dtype=torch.bool), "key_mask must be torch.bool"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_name_bad_inputs(backend: str) -> None:
    """Eager and SDPA also check the lengths."""
    bounds, q = sequences_of([2, 4]), packed(6, 2, 16)[:, 0]
    for change, message in BAD_INPUTS:
        with pytest.raises(ValueError, match=message):
            ops.attention_varlen(*change(q, bounds), backend=backend)
    with pytest.raises(ValueError, match=r"qkv must have shape \[total, 3, H, D\], got \(6, 2, 2, 16\)"):
        ops.attention_varlen_qkvpacked(torch.randn(6, 2, 2, 16), bounds, 6, backend=backend)
    for invalid in ([1, 6], [0, 4, 2], [0, 7], [0, 5, 6]) if backend != "triton" else ():
        sequences = torch.tensor(invalid, dtype=torch.int32, device=DEVICE)
        with pytest.raises(ValueError, match=r"(cu_seqlens must start with 0|max_seqlen must be at least .*, got 4)"):
            ops.attention_varlen(q, q, q, sequences, 4, backend=backend)
    q, k = torch.randn(2, 2, 5, 32, device=DEVICE), torch.randn(2, 2, 9, 32, device=DEVICE)
    for mask, message in BAD_MASKS:
        with pytest.raises(ValueError, match=message):
            ops.attention(q, k, k, key_mask=mask.to(DEVICE), backend=backend)
