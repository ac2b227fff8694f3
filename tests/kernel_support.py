"""Support for the kernel tests: device, fp64 reference, error rule, inputs, and outputs filled with NaN."""

from __future__ import annotations

import itertools

import torch
from kernel_execution import DTYPES, HAS_GPU
from torch import Tensor

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, error_of, judge

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def assert_as_exact_as_eager(name: str, value: Tensor, eager: Tensor, exact: Tensor, factor: float) -> None:
    """The rule of accuracy, over the largest error."""
    found = judge(value, eager, exact, factor)
    assert found.passed, f"{name}: {found}"


def attention_with_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eager attention in a dtype: o, dq, dk, dv."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v))
    o = (q * scale @ k.transpose(-1, -2)).softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do.to(dtype))
    return o.detach(), dq, dk, dv


def packed_inputs(
    batch: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, H, N, D] as views of one packed tensor [B, N, 3, H, D]."""
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, device=DEVICE).to(dtype)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return q, k, v


def nan_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Outputs to be written, of these shapes and strides, full of NaN: what is not written shows."""
    return tuple(
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).fill_(float("nan")) for t in tensors
    )


def nan_output(q: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, H, N, D] lying as [B, N, H, D], and lse, both full of NaN."""
    batch, heads, tokens, head_dim = q.shape
    o = torch.full((batch, tokens, heads, head_dim), float("nan"), dtype=q.dtype, device=q.device).transpose(1, 2)
    return o, torch.full((batch, heads, tokens), float("nan"), device=q.device)


def check_outputs(found: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> None:
    """Holds outputs of attention, by name, against fp64."""
    names = ("o", "dq", "dk", "dv")
    exact = dict(zip(names, attention_with_gradients(q, k, v, do, scale, torch.float64)))
    eager = dict(zip(names, attention_with_gradients(q, k, v, do, scale, q.dtype)))
    for name, value in found.items():
        factor = FORWARD_FACTOR if name == "o" else GRADIENT_FACTOR
        assert_as_exact_as_eager(name, value, eager[name], exact[name], factor)


def check_attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> None:
    """Run the kernels forward and backward and hold every output against fp64."""
    from vit_fast.kernels.attention.attention import attention_backward, attention_forward

    o, lse = nan_output(q)
    attention_forward(q, k, v, o, lse, scale)
    dq, dk, dv = nan_like(q.contiguous(), k.contiguous(), v.contiguous())
    attention_backward(q, k, v, o, do, lse, dq, dk, dv, scale)
    check_outputs({"o": o, "dq": dq, "dk": dk, "dv": dv}, q, k, v, do, scale)
    if lse.numel() == 0:
        return
    scores = q.double() * scale @ k.double().transpose(-1, -2)
    right_lse = scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    assert error_of(lse, right_lse) <= 1e-5 * max(1.0, float(right_lse.abs().max()))


# What the kernels make of each layout.
LAYOUTS = {"contiguous": "tma", "permuted": "tma", "sliced": "tma", "offset": "scalar", "expanded": "vector"}


def strided(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A tensor [B, H, N, D] of the named layout, random."""
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
