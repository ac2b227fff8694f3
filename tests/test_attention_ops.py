"""Attention with the triton backend: what it refuses; and its stand-in for torch's scaled_dot_product_attention."""

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

pytest.importorskip("triton", reason="the kernels need triton")


def _separate() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 2, 5, 32, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 9, 32, device=DEVICE)
    return q, k, v


def test_every_reason_is_listed() -> None:
    q = torch.randn(1, 2, 5, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(UnsupportedInputError) as caught:
        ops.attention(q, q, q.transpose(2, 3).contiguous().transpose(2, 3), scale=-1.0, backend="triton")
    text = str(caught.value)
    for part in (
        "q must be float32, float16 or bfloat16, got torch.float64",
        "v must have stride 1 along D, got 5",
        "got 8",
        "got -1.0",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :, :3], v), "k and v must have equal shapes"),
        (lambda q, k, v: (q, k.half(), v), "got torch.float16"),
        (lambda q, k, v: (q, k.to("meta"), v), "on meta"),
        (lambda q, k, v: (q[0], k, v), "q must have shape"),
        (lambda q, k, v: (q[:1], k, v), "B, H and D of q and k must be equal"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "int64"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "must have at least one token"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]), "head_dim must be between 16 and 128, got 0"),
    ],
)
def test_bad_inputs_are_named(change: Callable[..., tuple[Tensor, Tensor, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.attention(*change(*_separate()), backend="triton")
    with pytest.raises(ValueError, match=r"qkv must have shape \[B, N, 3, H, D\]"):
        ops.attention_qkvpacked(torch.randn(2, 17, 2, 2, 16, device=DEVICE), backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import vit_fast", "import torch.utils.flop_counter"])
def test_flop_counters_made_before_triton_was_asked_for_count_us(first: str) -> None:
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


# --- the stand-in for torch's own function ---------------------------------------------------------------------------


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes "auto" mean triton for the stand-in of torch's function, and counts what reaches the kernel."""
    module = import_module("vit_fast.ops.attention")  # by name: `vit_fast.ops.attention` is also the function
    right, calls = module.attention_kernel, []

    def counted(*args: Any) -> Any:
        calls.append("kernel")
        return right(*args)

    monkeypatch.setattr(module, "resolve_backend", lambda backend, *_: "triton" if backend == "auto" else backend)
    monkeypatch.setattr(module, "attention_kernel", counted)
    return calls


class Marked(torch.Tensor):
    """A subclass, which is torch's to dispatch."""


def test_the_stand_in_uses_the_kernel_where_it_can(kernel_calls: list[str]) -> None:
    q, k, v = _separate()
    torch.testing.assert_close(ops.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert kernel_calls == ["kernel"]
    mask = torch.ones(5, 9, dtype=torch.bool, device=DEVICE).tril(3)
    wide = torch.randn(2, 4, 5, 32, device=DEVICE)
    others = [
        ((q, k, v), {"attn_mask": mask}),
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"scale": -0.5}),
        ((q[..., :8], k[..., :8], v[..., :8]), {}),
        ((q[..., :0], k[..., :0], v[..., :0]), {}),
        ((q[0], k[0], v[0]), {}),
        ((q, k, v[..., :16]), {}),
        ((wide, k, v), {"enable_gqa": True}),
        ((q.double(), k.double(), v.double()), {}),
    ]
    for inputs, options in others:
        value = ops.scaled_dot_product_attention(*inputs, **options)
        torch.testing.assert_close(value, F.scaled_dot_product_attention(*inputs, **options))
    torch.manual_seed(3)
    dropped = ops.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    marked = ops.scaled_dot_product_attention(*(tensor.as_subclass(Marked) for tensor in (q, k, v)))
    torch.testing.assert_close(marked.as_subclass(Tensor), F.scaled_dot_product_attention(q, k, v))
    assert kernel_calls == ["kernel"]


def test_key_padding_masks_run_the_kernel(kernel_calls: list[str]) -> None:
    """Masks that say by their form that they are the same for every query; any other is torch's."""
    q, k, v = _separate()
    keep = torch.rand(2, 1, 1, 9, device=DEVICE) < 0.6
    keep[1] = False
    valid = [keep, keep.expand(2, 2, 5, 9), keep[:1], keep[0], keep[0, 0], keep[..., :1]]
    invalid = [keep.expand(2, 2, 5, 9).contiguous(), keep.float(), torch.ones(5, 9, dtype=torch.bool).tril(3)]
    for mask in valid + invalid:
        found = ops.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))
    assert len(kernel_calls) == len(valid)
    with pytest.raises(RuntimeError):  # torch's own error
        ops.scaled_dot_product_attention(q, k, v, keep[..., :4])


def _close(value: Any, right: Any) -> None:
    torch.testing.assert_close(value, right, atol=2e-5, rtol=2e-5)


def _qkv(head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 2, 5, head_dim, device=DEVICE)
    return q, k, v


def test_the_stand_in_inside_transforms_is_torchs(kernel_calls: list[str]) -> None:
    q, k, v = _qkv()

    def results(sdpa: Callable[..., Tensor]) -> tuple[Any, ...]:
        def loss(q: Tensor) -> Tensor:
            return sdpa(q, k, v).square().sum()

        with sdpa_kernel(SDPBackend.MATH):
            jvp = torch.func.jvp(loss, (q,), (q,))
        return torch.func.grad(loss)(q), torch.vmap(sdpa)(q[:, None], k[:, None], v[:, None]), jvp

    _close(results(ops.scaled_dot_product_attention), results(F.scaled_dot_product_attention))
    assert kernel_calls == []


@pytest.mark.slow
def test_the_stand_in_compiles_with_dynamic_shapes(kernel_calls: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ops.scaled_dot_product_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    for head_dim, tokens in ((16, 5), (32, 5), (32, 4)):
        q, k, v = (tensor[:, :, :tokens] for tensor in _qkv(head_dim))
        _close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
        _close(compiled(q, k, v, scale=0.3), F.scaled_dot_product_attention(q, k, v, scale=0.3))


class _Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.scaled_dot_product_attention(q, k, v)


def test_the_stand_in_under_fx(kernel_calls: list[str]) -> None:
    q, k, v = _qkv()
    for traced in (torch.fx.symbolic_trace(_Attend()), torch.fx.symbolic_trace(ops.scaled_dot_product_attention)):
        extra = () if len(list(traced.graph.find_nodes(op="placeholder"))) == 3 else (None, 0.0, False, None, False)
        _close(traced(q, k, v, *extra), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_stand_in_obeys_a_restriction_to_the_formula(compiled: bool, kernel_calls: list[str]) -> None:
    q, k, v = _qkv()

    def attend(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return ops.scaled_dot_product_attention(q, k, v)

    torch._dynamo.reset()
    function = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    _close(function(q), F.scaled_dot_product_attention(q, k, v))
    assert kernel_calls == []
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        ops.scaled_dot_product_attention(q, k, v)
    assert kernel_calls == ["kernel"]
