"""The operators `vit_fast::attention` and `vit_fast::biased_attention`, which run the Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .backends import kernel_reasons
from .descriptions import DTYPES, E4M3, ScoreTerms
from .registration import operator, text_of, words_of

if TYPE_CHECKING:
    from ..kernels.attention.bias_launch import BiasedAttention

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 128
_MAX_GRID = 2**31 - 1
_SMALLEST_TILE = 32
_WITH_GRADIENT = ("bias", "rel_h", "rel_w", "scale")


def unsupported_reasons(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[str]:
    """Returns the reasons why the kernel cannot run on q, k and v [B, H, N, D] of matching shapes."""
    reasons = kernel_reasons(q.device, q.dtype)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPES:
            reasons.append(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
        if tensor.stride(-1) != 1:
            reasons.append(f"{name} must have stride 1 along head_dim, got {tensor.stride(-1)}: call .contiguous()")
        if tensor.shape[2] == 0:
            reasons.append(f"{name} must have at least one token, got 0")
    if not MIN_HEAD_DIM <= q.shape[3] <= MAX_HEAD_DIM:
        reasons.append(f"head_dim must be between {MIN_HEAD_DIM} and {MAX_HEAD_DIM}, got {q.shape[3]}")
    if (size := q.shape[0] * q.shape[1] * -(-max(q.shape[2], k.shape[2]) // _SMALLEST_TILE)) > _MAX_GRID:
        reasons.append(f"batch * heads * tokens / {_SMALLEST_TILE} must be at most {_MAX_GRID}, got {size}")
    if not 0 < scale < math.inf:  # math.isfinite does not accept a symbolic scale
        reasons.append(f"scale must be a positive finite number, got {scale}")
    return reasons


def as_batch(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1).unsqueeze(0)  # [total, H, D] to [1, H, total, D]


def heads_first(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v [B, H, N, D] as views of the argument `qkv` of `attention_forward`."""
    first = qkv[0]
    if len(qkv) == 1:
        q, k, v = (first if first.dim() == 5 else first[None]).transpose(1, 3).unbind(2)
    else:
        q, k, v = qkv if first.dim() == 4 else map(as_batch, qkv)
    return q, k, v


def _new_output(qkv: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the output of `attention_forward`, its view as [B, H, N_q, D], and the log-sum-exp [B, H, N_q]."""
    q = heads_first(qkv)[0]
    batch, heads, tokens, head_dim = q.shape
    memory = q.new_empty((batch, tokens, heads, head_dim), dtype=dtype)  # the proj layer flattens [H, D] without a copy
    view = memory.transpose(1, 2)
    separate = len(qkv) == 3
    out = memory[0] if qkv[0].dim() == (3 if separate else 4) else view if separate else memory
    return out, view, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def attention_forward(
    qkv: Sequence[Tensor], cu_seqlens: Tensor | None, key_mask: Tensor | None, max_seqlen: int, scale: float,
    out_factor: Tensor | None = None, terms: ScoreTerms | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns softmax(scale q k^T) v, and per query log2(sum(exp(scale q k^T))), fp32 [B, H, N_q].

    `qkv` contains q, k and v, each [B, H, N, D] or packed [total, H, D], or only the `qkv` of `attention_among`. The
    output has the shape of q, or of the `qkv` of `attention_among` without its dimension of size 3. With out_factor
    (fp32 [1]), the output is multiplied by out_factor, then rounded to e4m3. With `terms`, cu_seqlens and out_factor
    must be None; with terms.groups, the second output has the memory layout [B * W, H, n].
    """
    q, k, v = heads_first(qkv)
    out, view, lse = _new_output(qkv, None if out_factor is None else E4M3)
    if cu_seqlens is not None and not q.shape[2]:
        return out, lse
    if reasons := unsupported_reasons(q, k, v, scale):
        raise UnsupportedInputError("attention with backend='triton'", reasons)
    if terms is not None:
        from ..kernels.attention import bias_launch

        bias_launch.attention_bias_forward(_call(q, k, v, lse, scale, terms, key_mask), view)
        return out, lse
    from ..kernels.attention import attention

    options = _kernel_options(cu_seqlens, key_mask, max_seqlen)
    attention.attention_forward(q, k, v, view, lse, scale, out_factor, **options)
    return out, lse


def _kernel_options(cu_seqlens: Tensor | None, key_mask: Tensor | None, max_seqlen: int) -> dict[str, Any]:
    if key_mask is not None and key_mask.stride(-1) != 1:
        key_mask = key_mask.contiguous()
    sequences = None if cu_seqlens is None else cu_seqlens.contiguous()
    return {"sequences": sequences, "key_mask": key_mask, "longest": max_seqlen}


def attention_gradient(
    grad_output: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    key_mask: Tensor | None, max_seqlen: int, scale: float, terms: ScoreTerms | None = None, bias_grad: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Returns contiguous gradients of the tensors in the argument `qkv` of `attention_forward`.

    With `terms`, appends the gradients of bias (if `bias_grad`), rel_h, rel_w and scale, if present.
    """
    gradients = [tensor.new_empty(tensor.shape) for tensor in qkv]
    q, k, v = heads_first(qkv)
    if cu_seqlens is not None and not q.shape[2]:
        return gradients
    if grad_output.stride(-1) != 1:  # e.g. the gradient of `sum` is an expanded scalar
        grad_output = grad_output.contiguous()
    if out.dim() == 3:
        o, do = as_batch(out), as_batch(grad_output)
    else:
        o, do = (out, grad_output) if len(qkv) == 3 else (out.transpose(1, 2), grad_output.transpose(1, 2))
    if terms is not None:
        from ..kernels.attention import bias_launch

        call = _call(q, k, v, lse, scale, terms, key_mask)
        of_terms = bias_launch.attention_bias_backward(call, o, do, *heads_first(gradients), bias_grad)
        names = term_names(terms, bias_grad)
        return gradients + [
            of_terms[name].sum_to_size(getattr(terms, name).shape).to(getattr(terms, name).dtype) for name in names
        ]
    from ..kernels.attention import attention

    options = _kernel_options(cu_seqlens, key_mask, max_seqlen)
    attention.attention_backward(q, k, v, o, do, lse, *heads_first(gradients), scale, **options)
    return gradients


def _flop(qkv: Any, cu_seqlens: Any, key_mask: Any, max_seqlen: int, scale: float) -> int:
    """Returns the matmul FLOPs of the forward; `qkv` contains shapes. Assumes max_seqlen keys per packed query."""
    if cu_seqlens is None:
        max_seqlen = qkv[0][1] if len(qkv) == 1 else qkv[1][2]
    return 4 * math.prod(qkv[0]) * max_seqlen // (3 if len(qkv) == 1 else 1)


def _save(args: Sequence[Any], output: Any) -> tuple[Sequence[Tensor | None], Any]:
    qkv, cu_seqlens, key_mask, *rest = args
    return (*output, cu_seqlens, key_mask, *qkv), rest


def _backward(grad_output: Tensor, saved: Sequence[Any], rest: Any) -> Sequence[Tensor | None]:
    out, lse, cu_seqlens, key_mask, *qkv = saved
    return attention_backward_kernel(grad_output, qkv, out, lse, cu_seqlens, key_mask, *rest)


attention_kernel = operator(
    "attention", "(Tensor[] qkv, Tensor? cu_seqlens, Tensor? key_mask, SymInt max_seqlen, float scale) "
    "-> (Tensor, Tensor)",
    attention_forward, what="attention", fake=lambda qkv, *args: _new_output(qkv)[::2], flop=_flop,
    save=_save, backward=_backward,
)  # fmt: skip
attention_backward_kernel = operator(
    "attention_backward", "(Tensor grad_output, Tensor[] qkv, Tensor out, Tensor lse, Tensor? cu_seqlens, "
    "Tensor? key_mask, SymInt max_seqlen, float scale) -> Tensor[]",
    attention_gradient, what="attention",
    fake=lambda grad_output, qkv, *args: [tensor.new_empty(tensor.shape) for tensor in qkv],
    flop=lambda grad_output, qkv, out, lse, *args: _flop(qkv, *args) * 5 // 2,
)  # fmt: skip


def _call(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float, terms: ScoreTerms, key_mask: Tensor | None
) -> BiasedAttention:
    from ..kernels.attention.bias_launch import BiasedAttention

    terms = ScoreTerms(*(
        tensor if tensor is None or (tensor is terms.bias and tensor.stride(3) == 1) else tensor.contiguous()
        for tensor in terms
    ))  # fmt: skip
    if key_mask is not None and key_mask.stride(1) != 1:
        key_mask = key_mask.contiguous()
    if terms.groups is not None:
        (batch, heads, _), (windows, tokens) = lse.shape, terms.groups.shape
        lse = lse.view(batch * windows, heads, tokens)
    return BiasedAttention(q, k, v, lse, scale, terms, key_mask)


def term_names(terms: ScoreTerms, bias_grad: bool = True) -> list[str]:
    """Returns the names of the terms whose gradients `attention_gradient` returns."""
    return [name for name in _WITH_GRADIENT[not bias_grad :] if getattr(terms, name) is not None]


def biased_attention(qkv: Sequence[Tensor], key_mask: Tensor | None, scale: float, terms: ScoreTerms) -> Tensor:
    """Calls the operator; `qkv` and the output are those of `attention_forward`, `terms` those of `checked_terms`."""
    given = {"key_mask": key_mask, **terms._asdict()}
    names = [name for name, tensor in given.items() if tensor is not None]
    bias_grad = terms.bias is not None and terms.bias.requires_grad
    words = text_of(len(qkv), bias_grad, tuple(names))
    out: Tensor = _biased_kernel([*qkv, *(given[name] for name in names)], scale, words)[0]
    return out


def _unpacked(tensors: Sequence[Any], words: str) -> tuple[Any, Any, ScoreTerms, bool]:
    """Returns qkv, key_mask, terms and bias_grad."""
    count, bias_grad, names = words_of(words)
    given = dict(zip(names, tensors[count:], strict=True))
    return tensors[:count], given.pop("key_mask", None), ScoreTerms(**given), bias_grad


def _biased_forward(tensors: Sequence[Tensor], scale: float, words: str) -> tuple[Tensor, Tensor]:
    qkv, key_mask, terms, _ = _unpacked(tensors, words)
    return attention_forward(qkv, None, key_mask, 0, scale, None, terms)


def _biased_gradient(
    grad_output: Tensor, tensors: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float, words: str
) -> list[Tensor]:
    qkv, key_mask, terms, bias_grad = _unpacked(tensors, words)
    return attention_gradient(grad_output, qkv, out, lse, None, key_mask, 0, scale, terms, bias_grad)


def _biased_gradient_fake(grad_output: Tensor, tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
    qkv, _, terms, bias_grad = _unpacked(tensors, args[-1])
    return [t.new_empty(t.shape) for t in (*qkv, *(getattr(terms, name) for name in term_names(terms, bias_grad)))]


def _biased_flop(tensors: Any, scale: float, words: str) -> int:
    qkv, _, terms, _ = _unpacked(tensors, words)
    flop = _flop(qkv, None, None, 0, scale)
    return flop if terms.groups is None else flop // terms.groups[0]  # type: ignore[return-value]  # a shape


def _biased_backward(grad_output: Tensor, saved: Sequence[Tensor], rest: Any) -> Sequence[Tensor | None]:
    out, lse, *tensors = saved
    qkv, _, terms, bias_grad = _unpacked(tensors, rest[-1])
    gradients = _biased_backward_kernel(grad_output, tensors, out, lse, *rest)
    of_terms = dict(zip(term_names(terms, bias_grad), gradients[len(qkv) :]))
    return [*gradients[: len(qkv)], *(of_terms.get(name) for name in words_of(rest[-1])[2])]


_biased_kernel = operator(
    "biased_attention", "(Tensor[] tensors, float scale, str words) -> (Tensor, Tensor)", _biased_forward,
    what="attention", fake=lambda tensors, scale, words: _new_output(_unpacked(tensors, words)[0])[::2],
    flop=_biased_flop, save=lambda args, output: ((*output, *args[0]), args[1:]), backward=_biased_backward,
)  # fmt: skip
_biased_backward_kernel = operator(
    "biased_attention_backward",
    "(Tensor grad_output, Tensor[] tensors, Tensor out, Tensor lse, float scale, str words) -> Tensor[]",
    _biased_gradient, what="attention", fake=_biased_gradient_fake,
    flop=lambda grad_output, tensors, out, lse, *args: _biased_flop(tensors, *args) * 5 // 2,
)  # fmt: skip
