"""The attention kernel as torch operators: schema, checks, fake implementations, autograd, FLOP formulas.

Two operators, each with its backward as an operator of its own:

- `vit_fast::attention(q, k, v, scale) -> (out, lse)` and `vit_fast::attention_backward`;
- `vit_fast::attention_qkvpacked(qkv, scale) -> (out, lse)` and `vit_fast::attention_qkvpacked_backward`.

Only torch is needed to register and trace them; Triton and the kernels are imported when one first runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .backends import kernel_reasons
from .checks import refuse_double_backward, refuse_vmap
from .flops import flop_formula
from .operators import differentiable, fake, operator
from .transforms import transformable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 128
_MAX_GRID = 2**31 - 1
_SMALLEST_TILE = 32


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[str]:
    """Every reason why the kernel cannot compute attention of q, k, v [B, H, N, D]; empty when it can."""
    reasons = kernel_reasons(q.device, q.dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            reasons.append(f"{name} has shape {tuple(tensor.shape)}: accepted is [B, H, N, D]")
            continue
        if tensor.dtype not in DTYPES:
            reasons.append(f"{name} is {tensor.dtype}: accepted are float32, float16, bfloat16")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            reasons.append(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: they must agree"
            )
        if tensor.stride(-1) != 1:
            reasons.append(f"{name} has stride {tensor.stride(-1)} along D: accepted is 1 (.contiguous() makes it so)")
        if tensor.shape[2] == 0:
            reasons.append(f"{name} has no tokens, N = 0: accepted is N >= 1")
    if q.dim() == k.dim() == v.dim() == 4:
        if k.shape != v.shape or (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
            reasons.append(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
                "accepted are [B, H, N_q, D], [B, H, N_kv, D], [B, H, N_kv, D]"
            )
        if not MIN_HEAD_DIM <= q.shape[3] <= MAX_HEAD_DIM:
            reasons.append(f"head_dim is {q.shape[3]}: accepted is {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
        longest = max(q.shape[2], k.shape[2])
        if q.shape[0] * q.shape[1] * -(-longest // _SMALLEST_TILE) > _MAX_GRID:
            reasons.append(f"B * H * N / {_SMALLEST_TILE} passes {_MAX_GRID}: split the batch")
    if not 0 < scale < math.inf:  # comparisons, which a symbolic scale knows too
        reasons.append(f"scale is {scale}: accepted is a positive finite number")
    return reasons


def _require_supported(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    reasons = unsupported_reasons(q, k, v, scale)
    if reasons:
        raise UnsupportedInputError("attention with backend='triton'", reasons)


def heads_first(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, H, N, D] as views of [B, N, 3, H, D]."""
    q, k, v = packed.transpose(1, 3).unbind(2)
    return q, k, v


def new_output(q: Tensor) -> Tensor:
    """[B, H, N, D] that lies in memory as [B, N, H, D], so that joining the heads copies nothing."""
    batch, heads, tokens, head_dim = q.shape
    return q.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)


def new_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def last_stride_one(grad: Tensor) -> Tensor:
    """Autograd hands over gradients of any layout, such as the expanded scalar of `sum`; the kernel needs rows."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


@operator("vit_fast::attention")
def attention_op(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v as [B, H, N_q, D], and its log-sum-exp [B, H, N_q], fp32, base 2."""
    _require_supported(q, k, v, scale)
    from ..kernels.attention.attention import attention_forward

    out, lse = new_output(q), new_lse(q)
    attention_forward(q, k, v, out, lse, scale)
    return out, lse


@fake(attention_op)
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return new_output(q), new_lse(q)


@operator("vit_fast::attention_backward")
def attention_backward_op(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attention_op`, contiguous."""
    from ..kernels.attention.attention import attention_backward

    dq, dk, dv = new_gradients(q, k, v)
    attention_backward(q, k, v, out, last_stride_one(grad_output), lse, dq, dk, dv, scale)
    return dq, dk, dv


def new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
    return dq, dk, dv


@fake(attention_backward_op)
def _(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return new_gradients(q, k, v)


@operator("vit_fast::attention_qkvpacked")
def attention_qkvpacked_op(qkv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v of qkv [B, N, 3, H, D] as [B, N, H, D], and its log-sum-exp [B, H, N], fp32, base 2."""
    q, k, v = heads_first(qkv)
    _require_supported(q, k, v, scale)
    from ..kernels.attention.attention import attention_forward

    out, lse = new_output(q), new_lse(q)
    attention_forward(q, k, v, out, lse, scale)
    return out.transpose(1, 2), lse


@fake(attention_qkvpacked_op)
def _(qkv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q, _, _ = heads_first(qkv)
    return new_output(q).transpose(1, 2), new_lse(q)


@operator("vit_fast::attention_qkvpacked_backward")
def attention_qkvpacked_backward_op(grad_output: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    """d qkv [B, N, 3, H, D] of `attention_qkvpacked_op`, contiguous: the three gradients written in place in one."""
    from ..kernels.attention.attention import attention_backward

    q, k, v = heads_first(qkv)
    grad = qkv.new_empty(qkv.shape)
    dq, dk, dv = heads_first(grad)
    do = last_stride_one(grad_output).transpose(1, 2)
    attention_backward(q, k, v, out.transpose(1, 2), do, lse, dq, dk, dv, scale)
    return grad


@fake(attention_qkvpacked_backward_op)
def _(grad_output: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _attention_backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return None, None, None, None
    return *_backward(grad_output, *ctx.saved_tensors, ctx.scale), None


def _qkvpacked_backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return None, None
    return _backward_qkvpacked(grad_output, *ctx.saved_tensors, ctx.scale), None


differentiable(attention_op, _save, _attention_backward)
differentiable(attention_qkvpacked_op, _save, _qkvpacked_backward)
differentiable(attention_backward_op, None, refuse_double_backward("attention"))
differentiable(attention_qkvpacked_backward_op, None, refuse_double_backward("attention"))
attention_kernel = transformable("attention", attention_op, _save, _attention_backward)
attention_qkvpacked_kernel = transformable("attention", attention_qkvpacked_op, _save, _qkvpacked_backward)
_backward = transformable("attention", attention_backward_op)
_backward_qkvpacked = transformable("attention", attention_qkvpacked_backward_op)
for _operator in (
    attention_op,
    attention_backward_op,
    attention_qkvpacked_op,
    attention_qkvpacked_backward_op,
):
    torch.library.register_vmap(_operator, refuse_vmap("attention"))


def attention_flop(batch: int, heads: int, n_q: int, n_kv: int, head_dim: int) -> int:
    """FLOP of a forward, 2 a multiply-add: two products. A backward has five, 2.5 times as many."""
    return 4 * batch * heads * n_q * n_kv * head_dim


@flop_formula(torch.ops.vit_fast.attention)
def _(q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flop(q[0], q[1], q[2], k[2], q[3])


@flop_formula(torch.ops.vit_fast.attention_backward)
def _(grad_output: Any, q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flop(q[0], q[1], q[2], k[2], q[3]) * 5 // 2


@flop_formula(torch.ops.vit_fast.attention_qkvpacked)
def _(qkv: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flop(qkv[0], qkv[3], qkv[1], qkv[1], qkv[4])


@flop_formula(torch.ops.vit_fast.attention_qkvpacked_backward)
def _(grad_output: Any, qkv: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flop(qkv[0], qkv[3], qkv[1], qkv[1], qkv[4]) * 5 // 2
