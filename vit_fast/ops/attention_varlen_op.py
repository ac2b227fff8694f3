"""Attention over sequences of any lengths as torch operators, like those of attention_op.py.

- `vit_fast::attention_varlen(q, k, v, cu_seqlens, max_seqlen, scale) -> (out, lse)`: packed sequences;
- `vit_fast::attention_varlen_qkvpacked(qkv, cu_seqlens, max_seqlen, scale) -> (out, lse)`: in one tensor;
- `vit_fast::attention_masked(q, k, v, key_mask, scale) -> (out, lse)`: a batch of which keys are left out;

each with its backward as an operator of its own; `attention_forward` and `attention_gradient` are all of them, and
`attention_op.py`'s, for an operator that is made of others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .attention_op import (
    attention_flop,
    attention_qkvpacked_backward_op,
    attention_qkvpacked_op,
    heads_first,
    last_stride_one,
    new_gradients,
    new_lse,
    new_output,
    unsupported_reasons,
)
from .checks import refuse_double_backward, refuse_vmap
from .flops import flop_formula
from .operators import differentiable, fake, function_of, operator
from .transforms import transformable


def as_batch(packed: Tensor) -> Tensor:
    """[total, H, D] as the view [1, H, total, D]."""
    return packed.transpose(0, 1).unsqueeze(0)


def _require_supported(what: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    reasons = unsupported_reasons(q, k, v, scale)
    if reasons:
        raise UnsupportedInputError(f"{what} with backend='triton'", reasons)


def _new_packed(q: Tensor) -> tuple[Tensor, Tensor]:
    """Output [total, H, D] and log-sum-exp fp32 [1, H, total]."""
    return q.new_empty(q.shape), q.new_empty((1, q.shape[1], q.shape[0]), dtype=torch.float32)


@operator("vit_fast::attention_varlen")
def attention_varlen_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v of each sequence as [total, H, D], and its log-sum-exp [1, H, total], fp32, base 2."""
    out, lse = _new_packed(q)
    if q.shape[0]:
        views = as_batch(q), as_batch(k), as_batch(v)
        _require_supported("attention_varlen", *views, scale)
        from ..kernels.attention.attention import varlen_forward

        varlen_forward(*views, as_batch(out), lse, scale, sequences=cu_seqlens.contiguous(), longest=max_seqlen)
    return out, lse


@fake(attention_varlen_op)
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> tuple[Tensor, Tensor]:
    return _new_packed(q)


@operator("vit_fast::attention_varlen_backward")
def attention_varlen_backward_op(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor,
    max_seqlen: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of `attention_varlen_op`, contiguous."""
    gradients = new_gradients(q, k, v)
    _write_gradients(grad_output, (q, k, v), cu_seqlens, out, lse, gradients, max_seqlen, scale)
    return gradients


@fake(attention_varlen_backward_op)
def _(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return new_gradients(q, k, v)


def _write_gradients(
    grad_output: Tensor,
    inputs: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, ...],
    max_seqlen: int,
    scale: float,
) -> None:
    if not out.shape[0]:
        return
    from ..kernels.attention.attention import varlen_backward

    q, k, v, o, do, dq, dk, dv = map(as_batch, (*inputs, out, last_stride_one(grad_output), *gradients))
    sequences = cu_seqlens.contiguous()
    varlen_backward(q, k, v, o, do, lse, dq, dk, dv, scale, sequences=sequences, longest=max_seqlen)


@operator("vit_fast::attention_varlen_qkvpacked")
def attention_varlen_qkvpacked_op(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`attention_varlen_op` of qkv [total, 3, H, D]."""
    out, lse = _new_packed(qkv[:, 0])
    if qkv.shape[0]:
        q, k, v = map(as_batch, qkv.unbind(1))
        _require_supported("attention_varlen_qkvpacked", q, k, v, scale)
        from ..kernels.attention.attention import varlen_forward

        varlen_forward(q, k, v, as_batch(out), lse, scale, sequences=cu_seqlens.contiguous(), longest=max_seqlen)
    return out, lse


@fake(attention_varlen_qkvpacked_op)
def _(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> tuple[Tensor, Tensor]:
    return _new_packed(qkv[:, 0])


@operator("vit_fast::attention_varlen_qkvpacked_backward")
def attention_varlen_qkvpacked_backward_op(
    grad_output: Tensor, qkv: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """d qkv [total, 3, H, D], contiguous: the three gradients written in place in one."""
    grad = qkv.new_empty(qkv.shape)
    _write_gradients(grad_output, qkv.unbind(1), cu_seqlens, out, lse, grad.unbind(1), max_seqlen, scale)
    return grad


@fake(attention_varlen_qkvpacked_backward_op)
def _(grad_output: Tensor, qkv: Tensor, *args: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


@operator("vit_fast::attention_masked")
def attention_masked_op(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [B, H, N_q, D] to the keys that are true in key_mask [B, N_kv], and its log-sum-exp, fp32, base 2."""
    _require_supported("attention", q, k, v, scale)
    from ..kernels.attention.attention import varlen_forward

    out, lse = new_output(q), new_lse(q)
    varlen_forward(q, k, v, out, lse, scale, keep=last_stride_one(key_mask))
    return out, lse


@fake(attention_masked_op)
def _(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return new_output(q), new_lse(q)


@operator("vit_fast::attention_masked_backward")
def attention_masked_backward_op(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `attention_masked_op`, contiguous."""
    from ..kernels.attention.attention import varlen_backward

    dq, dk, dv = new_gradients(q, k, v)
    do = last_stride_one(grad_output)
    varlen_backward(q, k, v, out, do, lse, dq, dk, dv, scale, keep=last_stride_one(key_mask))
    return dq, dk, dv


@fake(attention_masked_backward_op)
def _(grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return new_gradients(q, k, v)


def attention_forward(
    qkv: Tensor, cu_seqlens: Tensor | None, key_mask: Tensor | None, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of qkv [B, N, 3, H, D] to whatever keys -> [B, N, H, D] and the log-sum-exp, fp32 [B, H, N].

    Args:
        cu_seqlens: Of packed sequences, where B is 1; `longest` is their max_seqlen.
        key_mask: Of padded images.
    """
    if cu_seqlens is not None:
        out, lse = function_of(attention_varlen_qkvpacked_op)(qkv[0], cu_seqlens, longest, scale)
        return out[None], lse
    if key_mask is None:
        return function_of(attention_qkvpacked_op)(qkv, scale)
    out, lse = function_of(attention_masked_op)(*heads_first(qkv), key_mask, scale)
    return out.transpose(1, 2), lse


def attention_gradient(
    grad_output: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None, key_mask: Tensor | None,
    longest: int, scale: float,
) -> Tensor:  # fmt: skip
    """The gradient of qkv in `attention_forward`, contiguous."""
    if cu_seqlens is not None:
        backward = function_of(attention_varlen_qkvpacked_backward_op)
        return backward(grad_output[0], qkv[0], cu_seqlens, out[0], lse, longest, scale)[None]
    if key_mask is None:
        return function_of(attention_qkvpacked_backward_op)(grad_output, qkv, out, lse, scale)
    from ..kernels.attention.attention import varlen_backward

    grad = qkv.new_empty(qkv.shape)
    do = last_stride_one(grad_output).transpose(1, 2)
    tensors = (*heads_first(qkv), out.transpose(1, 2), do, lse, *heads_first(grad))
    varlen_backward(*tensors, scale, keep=last_stride_one(key_mask))
    return grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    ctx.numbers = inputs[len(tensors) :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _varlen_backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 6
    return *_backward(grad_output, *ctx.saved_tensors, *ctx.numbers), None, None, None


def _qkvpacked_backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 4
    return _backward_qkvpacked(grad_output, *ctx.saved_tensors, *ctx.numbers), None, None, None


def _masked_backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 5
    return *_backward_masked(grad_output, *ctx.saved_tensors, *ctx.numbers), None, None


def _register(forward: Any, derivative: Any, backward: Any) -> tuple[Any, Any]:
    """What autograd, torch.func and vmap do with an operator and its backward; both, to be called."""
    differentiable(forward, _save, derivative)
    differentiable(backward, None, refuse_double_backward("attention"))
    for one in (forward, backward):
        torch.library.register_vmap(one, refuse_vmap("attention"))
    return transformable("attention", forward, _save, derivative), transformable("attention", backward)


attention_varlen_kernel, _backward = _register(attention_varlen_op, _varlen_backward, attention_varlen_backward_op)
attention_varlen_qkvpacked_kernel, _backward_qkvpacked = _register(
    attention_varlen_qkvpacked_op, _qkvpacked_backward, attention_varlen_qkvpacked_backward_op
)
attention_masked_kernel, _backward_masked = _register(
    attention_masked_op, _masked_backward, attention_masked_backward_op
)


# Of packed sequences the shapes tell only what they cost at most: that each is as long as the longest.
@flop_formula(torch.ops.vit_fast.attention_varlen)
def _(q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, *args: Any, **kwargs: Any) -> int:
    return attention_flop(1, q[1], q[0], max_seqlen, q[2])


@flop_formula(torch.ops.vit_fast.attention_varlen_backward)
def _(
    grad_output: Any, q: Any, k: Any, v: Any, cu: Any, out: Any, lse: Any, longest: int, *args: Any, **kwargs: Any
) -> int:
    return attention_flop(1, q[1], q[0], longest, q[2]) * 5 // 2


@flop_formula(torch.ops.vit_fast.attention_varlen_qkvpacked)
def _(qkv: Any, cu_seqlens: Any, max_seqlen: int, *args: Any, **kwargs: Any) -> int:
    return attention_flop(1, qkv[2], qkv[0], max_seqlen, qkv[3])


@flop_formula(torch.ops.vit_fast.attention_varlen_qkvpacked_backward)
def _(grad_output: Any, qkv: Any, cu: Any, out: Any, lse: Any, max_seqlen: int, *args: Any, **kwargs: Any) -> int:
    return attention_flop(1, qkv[2], qkv[0], max_seqlen, qkv[3]) * 5 // 2


@flop_formula(torch.ops.vit_fast.attention_masked)
def _(q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flop(q[0], q[1], q[2], k[2], q[3])


@flop_formula(torch.ops.vit_fast.attention_masked_backward)
def _(grad_output: Any, q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    return attention_flop(q[0], q[1], q[2], k[2], q[3]) * 5 // 2
