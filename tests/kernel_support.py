"""Support for the kernel tests: device, fp64 reference, accuracy rule, inputs, and outputs filled with NaN."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from kernel_execution import DTYPES, HAS_GPU
from torch import Tensor

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, error_of, judge

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def assert_as_exact_as_eager(name: str, value: Tensor, eager: Tensor, exact: Tensor, factor: float) -> None:
    found = judge(value, eager, exact, factor)
    assert found.passed, f"{name}: {found}"


def packed_inputs(
    batch: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v [B, H, N, D] as views of one packed tensor [B, N, 3, H, D]."""
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, device=DEVICE).to(dtype)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return q, k, v


def nan_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors with the same shapes and strides, filled with NaN."""
    return tuple(
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).fill_(float("nan")) for t in tensors
    )


def nan_output(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o [B, H, N, D] with the strides of [B, N, H, D], and lse, both filled with NaN."""
    batch, heads, tokens, head_dim = q.shape
    o = torch.full((batch, tokens, heads, head_dim), float("nan"), dtype=q.dtype, device=q.device).transpose(1, 2)
    return o, torch.full((batch, heads, tokens), float("nan"), device=q.device)


def check_outputs(found: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> None:
    """Compares outputs of attention, by name, with eager attention in fp64."""

    def eager(dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        o = (inputs[0] * scale @ inputs[1].mT).softmax(-1) @ inputs[2]
        gradients = torch.autograd.grad(o, inputs, do.to(dtype))
        return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients)))

    same_dtype, exact = eager(q.dtype), eager(torch.float64)
    for name, value in found.items():
        factor = FORWARD_FACTOR if name == "o" else GRADIENT_FACTOR
        assert_as_exact_as_eager(name, value, same_dtype[name], exact[name], factor)


def run_attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, **which: Any) -> dict[str, Tensor]:
    """Runs the kernels with outputs filled with NaN, and returns o, dq, dk, dv and lse by name."""
    from vit_fast.kernels.attention.attention import attention_backward, attention_forward
    from vit_fast.kernels.attention.attention_launch import AttentionCall

    o, lse = nan_output(q)
    call = AttentionCall(q, k, v, lse, scale, **which)
    attention_forward(call, o)
    dq, dk, dv = nan_like(q.contiguous(), k.contiguous(), v.contiguous())
    attention_backward(call, o, do, dq, dk, dv)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv, "lse": lse}


def check_attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> None:
    found = run_attention(q, k, v, do, scale)
    lse = found.pop("lse")
    check_outputs(found, q, k, v, do, scale)
    if lse.numel():
        exact = (q.double() * scale @ k.double().mT).logsumexp(-1) / math.log(2)
        assert error_of(lse, exact) <= 1e-5 * max(1.0, float(exact.abs().max()))


# {layout: access that the kernels choose}
LAYOUTS = {"contiguous": "tma", "permuted": "tma", "sliced": "tma", "offset": "scalar", "expanded": "vector"}


def strided(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Returns a random tensor [B, H, N, D] with the named layout."""
    batch, heads, tokens, head_dim = shape
    values = torch.randn(shape, device=DEVICE).to(dtype)
    if kind == "contiguous":
        return values
    if kind == "permuted":
        return values.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if kind == "sliced":
        wide = torch.full((batch, heads, 2 * tokens, head_dim + 8), float("nan"), dtype=dtype, device=DEVICE)
        view = wide[:, :, 1::2, :head_dim]
    elif kind == "offset":
        flat = torch.full((values.numel() + 1,), float("nan"), dtype=dtype, device=DEVICE)
        view = flat[1:].view(shape)
    else:  # one image for the whole batch
        return values[:1].expand(shape)
    return view.copy_(values)


def sequences_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def packed(total: int, heads: int, head_dim: int, dtype: torch.dtype = DTYPES[0]) -> Tensor:
    return torch.randn(total, 3, heads, head_dim, device=DEVICE).to(dtype)
