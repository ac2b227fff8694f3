"""Fused softmax attention, forward and backward: the entry points that the operators call.

Of a batch in which every query meets every key, and of sequences of any lengths (attention_varlen.py). Tensors are
views [B, H, N, D] of any strides whose last is 1, so the qkv linear's output is read as it lies and the gradients are
written into one packed tensor. Nothing of size N x N exists at any time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .attention_backward import dkdv_launch, dq_launch
from .attention_forward import forward_launch
from .attention_launch import access_of
from .attention_policy import Problem, dkdv_config, dq_config, forward_config, varlen_configs
from .attention_varlen import varlen_forward_launch
from .attention_varlen_backward import varlen_dkdv_launch, varlen_dq_launch
from .device import gpu_of, product_kind
from .launch import ceil_div

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def problem_of(q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor) -> Problem:
    """What the launch policy needs to know about a call: the device, the shape, and how memory can be read."""
    batch, heads, n_q, head_dim = q.shape
    gpu = gpu_of(q.device)
    return Problem(
        arch=gpu.arch,
        sm_count=gpu.sm_count,
        element=product_kind(q.dtype),
        head_dim=head_dim,
        n_q=n_q,
        n_kv=k.shape[2],
        batch_heads=batch * heads,
        access=access_of(q, k, *others),
    )


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, scale: float,
    o_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write o = softmax(scale q k^T) v [o_scale] and its log-sum-exp.

    Args:
        q: Queries [B, H, N_q, D], D from 16 to 128; fp32, fp16 or bf16; last stride 1.
        k: Keys [B, H, N_kv, D], N_kv at least 1.
        v: Values [B, H, N_kv, D].
        o: Written: [B, H, N_q, D] of q's dtype, with o_scale of e4m3; last stride 1.
        lse: Written: fp32 [B, H, N_q], contiguous, base 2.
        scale: Multiplier of q k^T; positive and finite.
        o_scale: fp32 [1]; None: o is not scaled.
    """
    problem = problem_of(q, k, v, o)
    forward_launch(q, k, v, o, lse, scale, forward_config(problem), problem.precision, o_scale).run()


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
) -> None:
    """Write dq, dk and dv for the gradient `do` of o.

    Args:
        q: As given to `attention_forward`; so are k and v.
        o: What `attention_forward` wrote; so is lse.
        do: Gradient of o [B, H, N_q, D] of q's dtype, last stride 1.
        dq: Written: [B, H, N_q, D] of q's dtype, last stride 1; dk and dv [B, H, N_kv, D] likewise.
        scale: As given to `attention_forward`.
    """
    for_dq, for_dkdv = problem_of(q, k, v, o, do, dq), problem_of(q, k, v, do, dk, dv)
    precision = for_dq.backward_precision
    delta = torch.empty_like(lse)
    inverse = None
    dq_launch(q, k, v, o, do, lse, dq, delta, inverse, scale, dq_config(for_dq), precision).run()
    dkdv_launch(q, k, v, do, lse, delta, inverse, dk, dv, scale, dkdv_config(for_dkdv), precision).run()


def varlen_problem_of(
    q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor, sequences: torch.Tensor | None, longest: int
) -> Problem:
    """`problem_of` sequences: of their mean length where that is below the longest, which one outlier decides."""
    problem = problem_of(q, k, *others)
    if sequences is None:
        return problem
    usual = min(longest, ceil_div(q.shape[2], max(sequences.shape[0] - 1, 1)))
    return replace(problem, n_q=usual, n_kv=usual)


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    sequences: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    longest: int = 0,
) -> None:
    """Write o and its log-sum-exp, each sequence by itself, or without the keys that are not kept.

    Args:
        q: As for `attention_forward`, and so are k, v, o, lse and scale; B is 1 where packed.
        sequences: Packed: int32 [S + 1], contiguous, on the device: where each sequence starts and the last one ends.
        keep: Masked: bool [B, N_kv], last stride 1. One of the two is given.
        longest: Packed: of the tokens of a sequence. It decides tiles, never what is computed.
    """
    problem = varlen_problem_of(q, k, v, o, sequences=sequences, longest=longest)
    config, _, _ = varlen_configs(problem, keep is not None)
    varlen_forward_launch(q, k, v, o, lse, sequences, keep, scale, config, problem.precision).run()


def varlen_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    sequences: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    longest: int = 0,
) -> None:
    """Write dq, dk and dv for the gradient `do` of o: as `attention_backward`, of what `varlen_forward` was given."""
    for_dq = varlen_problem_of(q, k, v, o, do, dq, sequences=sequences, longest=longest)
    for_dkdv = varlen_problem_of(q, k, v, do, dk, dv, sequences=sequences, longest=longest)
    precision = for_dq.backward_precision
    delta = torch.empty_like(lse)
    inverse = None
    _, config, _ = varlen_configs(for_dq, keep is not None)
    varlen_dq_launch(q, k, v, o, do, lse, dq, delta, inverse, sequences, keep, scale, config, precision).run()
    _, _, config = varlen_configs(for_dkdv, keep is not None)
    varlen_dkdv_launch(q, k, v, do, lse, delta, inverse, dk, dv, sequences, keep, scale, config, precision).run()
