"""The operator `vit_fast::attention` and its backward, which run the Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import raise_unsupported
from .attention_bias import has_tables, rel_gradients, with_rel
from .backends import kernel_reasons
from .descriptions import DTYPES, E4M3, Keys, ScoreTerms
from .registration import operator

if TYPE_CHECKING:
    from ..kernels.attention.attention_launch import AttentionCall

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 128
_MAX_GRID = 2**31 - 1
_SMALLEST_TILE = 32
_NO_KEYS, _NO_TERMS = Keys(), ScoreTerms()
INPUTS = ("cu_seqlens", "key_mask", *ScoreTerms._fields)  # tensors of attention apart from q, k and v


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
    qkv: Sequence[Tensor], keys: Keys, scale: float, terms: ScoreTerms | None = None, out_factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns softmax(scale q k^T) v, and per query log2(sum(exp(scale q k^T))), fp32 [B, H, N_q].

    `qkv` contains q, k and v, each [B, H, N, D] or packed [total, H, D], or only the `qkv` of `attention_among`. The
    output has the shape of q, or of the `qkv` of `attention_among` without its dimension of size 3. With out_factor
    (fp32 [1]), the output is multiplied by out_factor, then rounded to e4m3. With `terms`, cu_seqlens and out_factor
    must be None; with terms.groups, the second output has the memory layout [B * W, H, n].
    """
    q, k, v = heads_first(qkv)
    out, view, lse = _new_output(qkv, None if out_factor is None else E4M3)
    if keys.cu_seqlens is not None and not q.shape[2]:
        return out, lse
    raise_unsupported("attention with backend='triton'", unsupported_reasons(q, k, v, scale))
    from ..kernels.attention import attention

    attention.attention_forward(_call(qkv, lse, keys, scale, terms), view, out_factor)
    return out, lse


def attention_gradient(
    grad_output: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor, keys: Keys, scale: float,
    terms: ScoreTerms | None = None, bias_grad: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the gradients of bias (if `bias_grad`), rel_h, rel_w, scale, and contiguous gradients of `qkv`.

    `qkv` is as in `attention_forward`; its gradients are called q, k and v, or only q.
    """
    from ..kernels.attention import attention

    gradients = [tensor.new_empty(tensor.shape) for tensor in qkv]
    q = heads_first(qkv)[0]
    if keys.cu_seqlens is not None and not q.shape[2]:
        return dict(zip("qkv", gradients))
    if grad_output.stride(-1) != 1:  # e.g. the gradient of `sum` is an expanded scalar
        grad_output = grad_output.contiguous()
    if out.dim() == 3:
        o, do = as_batch(out), as_batch(grad_output)
    else:
        o, do = (out, grad_output) if len(qkv) == 3 else (out.transpose(1, 2), grad_output.transpose(1, 2))
    call = _call(qkv, lse, keys, scale, terms)
    of_terms = attention.attention_backward(call, o, do, *heads_first(gradients), bias_grad)
    if terms is not None and has_tables(terms):
        d_rel = of_terms["rel_h"], of_terms["rel_w"]
        d_q, of_terms["rel_h"], of_terms["rel_w"] = rel_gradients(terms, q, *d_rel)
        heads_first(gradients)[0].add_(d_q)
    for name, grad in of_terms.items():
        term = getattr(terms, name)
        of_terms[name] = grad.sum_to_size(term.shape).to(term.dtype)
    return dict(zip("qkv", gradients)) | of_terms


def _call(qkv: Sequence[Tensor], lse: Tensor, keys: Keys, scale: float, terms: ScoreTerms | None) -> AttentionCall:
    """Returns the inputs in the layouts that the kernels require."""
    from ..kernels.attention.attention_launch import AttentionCall

    q, k, v = heads_first(qkv)
    sequences, longest, key_mask = keys
    if sequences is not None:
        sequences = sequences.contiguous()
    if key_mask is not None and key_mask.stride(1) != 1:
        key_mask = key_mask.contiguous()
    if terms is not None:
        terms = ScoreTerms(*(
            tensor if tensor is None or (tensor is terms.bias and tensor.stride(3) == 1) else tensor.contiguous()
            for tensor in with_rel(terms, q)
        ))  # fmt: skip
        if terms.groups is not None:
            (batch, heads, _), (windows, tokens) = lse.shape, terms.groups.shape
            lse = lse.view(batch * windows, heads, tokens)
    return AttentionCall(q, k, v, lse, scale, sequences, longest, key_mask, terms)


def inputs_of(keys: Keys | None, terms: ScoreTerms | None) -> tuple[Tensor | None, ...]:
    """Returns the tensors of keys and terms, which `INPUTS` names."""
    cu_seqlens, _, key_mask = keys or _NO_KEYS
    return cu_seqlens, key_mask, *(terms or _NO_TERMS)


def restored_inputs(tensors: Sequence[Any], max_seqlen: int) -> tuple[Keys, ScoreTerms | None]:
    """Inverts `inputs_of`."""
    cu_seqlens, key_mask, *terms = tensors
    has_terms = any(tensor is not None for tensor in terms)
    return Keys(cu_seqlens, max_seqlen, key_mask), ScoreTerms(*terms) if has_terms else None


class _Settings(NamedTuple):
    max_seqlen: int  # length of the longest packed sequence; 0 without packed sequences
    scale: float
    bias_grad: bool  # the bias has a gradient


def run_attention(qkv: Sequence[Tensor], keys: Keys | None, scale: float, terms: ScoreTerms | None = None) -> Tensor:
    """Calls the operator; for the arguments and the result, see `attention_forward`."""
    bias_grad = terms is not None and terms.bias is not None and terms.bias.requires_grad
    tensors: Sequence[Tensor | None] = qkv
    present: tuple[int, ...] | None = (0, 1, 2)[: len(qkv)]
    if keys is not None or terms is not None:
        tensors, present = (*qkv, *(None,) * (3 - len(qkv)), *inputs_of(keys, terms)), None
    return _kernel(tensors, (0 if keys is None else keys.max_seqlen, scale), (bias_grad,), present)[0]


def _read(tensors: Sequence[Any], s: _Settings) -> tuple[Any, ...]:
    """Returns the arguments of `attention_forward`."""
    qkv = [tensor for tensor in tensors[:3] if tensor is not None]
    keys, terms = restored_inputs(tensors[3:], s.max_seqlen)
    return qkv, keys, s.scale, terms


def _gradient(grad_output: Tensor, tensors: Sequence[Any], outputs: Sequence[Any], s: _Settings) -> dict[str, Tensor]:
    (qkv, keys, scale, terms), (out, lse) = _read(tensors, s), outputs
    return attention_gradient(grad_output, qkv, out, lse, keys, scale, terms, s.bias_grad)


def attention_flop(queries: int, keys: int, terms: Any) -> tuple[int, int]:
    """Returns the matmul FLOPs of forward and backward, for q with `queries` elements; `terms` contains shapes."""
    flop, rel = 4 * queries * keys // (1 if terms is None or terms.groups is None else int(terms.groups[0])), 0
    if terms is not None and terms.rel_h is not None and len(terms.rel_h) == 3:  # tables
        rel = 2 * queries * (int(terms.rel_h[1]) + int(terms.rel_w[1]))
    return flop + rel, flop * 5 // 2 + 3 * rel  # the backward computes the scores, and values of rel, again


def _flop(shapes: Sequence[Any], s: _Settings) -> tuple[int, int]:
    """Assumes max_seqlen keys per packed query."""
    qkv, keys, _, terms = _read(shapes, s)
    tokens = s.max_seqlen if keys.cu_seqlens is not None else qkv[0][1] if len(qkv) == 1 else qkv[1][2]
    return attention_flop(math.prod(qkv[0]) // (3 if len(qkv) == 1 else 1), tokens, terms)


_kernel = operator(
    "attention", ("q", "k", "v", *INPUTS), _Settings, lambda tensors, s: attention_forward(*_read(tensors, s)),
    _gradient, what="attention", fake=lambda tensors, s: _new_output(_read(tensors, s)[0])[::2], flop=_flop,
    with_gradient=lambda s: ("q", "k", "v", "rel_h", "rel_w", "scale", *(("bias",) if s.bias_grad else ())),
)  # fmt: skip
