"""Attention with the triton backend: errors, and the replacement of torch's scaled_dot_product_attention."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from children import run_python
from kernel_support import DEVICE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast import ops
from vit_fast.errors import UnsupportedInputError
from vit_fast.ops import scaled_dot_product_attention as ours

pytest.importorskip("triton", reason="the kernels need triton")


def _qkv(head_dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 2, 5, head_dim, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 9, head_dim, device=DEVICE)
    return q, k, v


def test_every_reason_is_listed() -> None:
    q = torch.randn(1, 2, 5, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(UnsupportedInputError) as caught:
        ops.attention(q, q, q.transpose(2, 3).contiguous().transpose(2, 3), scale=-1.0, backend="triton")
    dtype = "q must be float32, float16 or bfloat16, got torch.float64"
    for part in (dtype, "v must have stride 1 along head_dim, got 5", "got 8", "got -1.0"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :, :3], v), "k and v must have equal shapes"),
        (lambda q, k, v: (q, k.half(), v), "got torch.float16"),
        (lambda q, k, v: (q, k.to("meta"), v), "on meta"),
        (lambda q, k, v: (q[0], k, v), "q must have shape"),
        (lambda q, k, v: (q[:1], k, v), "must have equal B, H and D"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "int64"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "must have at least one token"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]), "head_dim must be between 16 and 128, got 0"),
    ],
)
def test_bad_inputs_are_named(change: Callable[..., tuple[Tensor, Tensor, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.attention(*change(*_qkv()), backend="triton")
    with pytest.raises(ValueError, match=r"qkv must have shape \[B, N, 3, H, D\]"):
        ops.attention_qkvpacked(torch.randn(2, 17, 2, 2, 16, device=DEVICE), backend="triton")


def test_autocast_casts_tensors_of_several_dtypes() -> None:
    """As in AIMv2, whose queries are a parameter, and InternVL with qk-norm."""
    q, k, v = _qkv()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k.bfloat16(), v.bfloat16())
        for backend in ("sdpa", "eager"):
            found = ops.attention(q, k.bfloat16(), v.bfloat16(), backend=backend)
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import vit_fast", "import torch.utils.flop_counter"])
def test_existing_flop_counters_count_operators(first: str) -> None:
    code = f"""
{first}
import torch
from torch.utils.flop_counter import FlopCounterMode
counter = FlopCounterMode(display=False)
from vit_fast import ops
with counter:
    ops.attention(*torch.randn(3, 1, 2, 4, 16, device="{DEVICE}"), backend="triton")
print(counter.get_total_flops())
"""
    assert run_python(["-c", code], dict(os.environ)).split() == [str(4 * 2 * 4 * 4 * 16)]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes "auto" mean triton for the replacement of torch's function, and counts what reaches the kernel."""
    module = import_module("vit_fast.ops.attention")  # by name: `vit_fast.ops.attention` is also the function
    kernel, calls = module.run_attention, []

    def counted(*args: Any) -> Any:
        if args[3] is None:  # no bias
            calls.append("kernel")
        return kernel(*args)

    monkeypatch.setattr(module, "resolve_backend", lambda backend, *_: "triton" if backend == "auto" else backend)
    monkeypatch.setattr(module, "run_attention", counted)
    return calls


def _close(value: Any, expected: Any) -> None:
    torch.testing.assert_close(value, expected, atol=2e-5, rtol=2e-5)


def _agrees(*inputs: Any, **options: Any) -> None:
    torch.manual_seed(3)
    found = ours(*inputs, **options)
    torch.manual_seed(3)
    _close(found, F.scaled_dot_product_attention(*inputs, **options))


class Marked(torch.Tensor):
    """A subclass, which torch's function dispatches."""


def test_the_kernel_runs_only_what_it_supports(kernel_calls: list[str]) -> None:
    q, k, v = _qkv()
    wide = torch.cat((v, v[..., :4]), -1)
    for more in (q, k, v), (q[0], k[0], v[0]), (q[None], k[None], v[None]), (q, k, v[..., :16]), (q, k, wide):
        _agrees(*more)
    assert len(kernel_calls) == 5
    for inputs, options in (
        ((q, k, v), {"attn_mask": torch.ones(5, 9, dtype=torch.bool, device=DEVICE).tril(3)}),
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"scale": -0.5}),
        ((q, k, v), {"dropout_p": 0.5}),
        ((q[..., :8], k[..., :8], v[..., :8]), {}),
        ((q[..., :0], k[..., :0], v[..., :0]), {}),
        ((q[None], k[None], v[None]), {"attn_mask": torch.ones(5, 9, dtype=torch.bool, device=DEVICE).tril(3)}),
        ((torch.randn(2, 4, 5, 32, device=DEVICE), k, v), {"enable_gqa": True}),
        ((q.double(), k.double(), v.double()), {}),
    ):
        _agrees(*inputs, **options)
    marked = ours(*(tensor.as_subclass(Marked) for tensor in (q, k, v)))
    _close(marked.as_subclass(Tensor), F.scaled_dot_product_attention(q, k, v))
    assert len(kernel_calls) == 5


def test_key_padding_masks_run_the_kernel(kernel_calls: list[str]) -> None:
    """Masks whose sizes and strides show that all queries have equal values; torch runs the others."""
    q, k, v = _qkv()
    keep = torch.rand(2, 1, 1, 9, device=DEVICE) < 0.6
    keep[1] = False
    valid = [keep, keep.expand(2, 2, 5, 9), keep[:1], keep[0], keep[0, 0], keep[..., :1]]
    invalid = [keep.expand(2, 2, 5, 9).contiguous(), keep.float(), torch.ones(5, 9, dtype=torch.bool).tril(3)]
    for mask in valid + invalid:
        _agrees(q, k, v, mask)
    assert len(kernel_calls) == len(valid)
    with pytest.raises(RuntimeError):  # torch's own error
        ours(q, k, v, keep[..., :4])


def test_torch_runs_torch_func_transforms(kernel_calls: list[str]) -> None:
    inputs = [tensor[:, None, :1] for tensor in _qkv()]
    for transform in (torch.vmap, torch.func.jacrev):
        _close(transform(ours)(*inputs), transform(F.scaled_dot_product_attention)(*inputs))
    assert kernel_calls == []


@pytest.mark.slow
def test_it_compiles_with_dynamic_shapes(kernel_calls: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours, dynamic=True, fullgraph=True, backend="aot_eager")
    for head_dim, tokens in ((16, 5), (32, 5), (32, 4)):
        q, k, v = (tensor[:, :, :tokens] for tensor in _qkv(head_dim))
        for scale in (None, 0.3):
            _close(compiled(q, k, v, scale=scale), F.scaled_dot_product_attention(q, k, v, scale=scale))


def test_torch_fx_traces_it(kernel_calls: list[str]) -> None:
    q, k, v = _qkv()
    traced = torch.fx.symbolic_trace(ours)
    _close(traced(q, k, v, None, 0.0, False, None, False), F.scaled_dot_product_attention(q, k, v))


def test_it_obeys_sdpa_kernel(kernel_calls: list[str]) -> None:
    q, k, v = _qkv()
    with sdpa_kernel(SDPBackend.MATH):
        _close(ours(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert kernel_calls == []
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        ours(q, k, v)
    assert kernel_calls == ["kernel"]
