"""Fused softmax attention, forward and backward: the functions that the operators call.

Inputs are packed (with `sequences`), masked (with `key_mask`) or fixed (with neither); see attention_tiles.py. Tensors
[B, H, N, D] have last stride 1 and arbitrary other strides, e.g. q, k and v may be views of the qkv layer's output.
"""

from __future__ import annotations

from typing import Any

import torch

from ..device import gpu_of, matmul_kind
from ..launch import ceil_div
from .attention_backward import backward_launches
from .attention_forward import forward_launch
from .attention_launch import access_of
from .attention_policy import Problem, dkdv_config, dq_config, forward_config


def problem_of(
    q: torch.Tensor, k: torch.Tensor, *others: torch.Tensor, sequences: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None, longest: int = 0,
) -> Problem:  # fmt: skip
    """Returns the input of the launch policy for a call with these tensors.

    For packed inputs, n_q and n_kv are the mean sequence length, limited to `longest` (0: unknown).
    """
    (batch, heads, n_q, head_dim), n_kv, form = q.shape, k.shape[2], "fixed" if key_mask is None else "masked"
    if sequences is not None:
        n_q = n_kv = min(longest or n_q, ceil_div(n_q, max(sequences.shape[0] - 1, 1)))
        form = "packed"
    gpu, access = gpu_of(q.device), access_of(q, k, *others)
    kind = matmul_kind(q.dtype)
    return Problem(gpu.arch, gpu.sm_count, kind, head_dim, n_q, n_kv, batch * heads, access, form)


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, scale: float,
    o_scale: torch.Tensor | None = None, sequences: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
    longest: int = 0,
) -> None:  # fmt: skip
    """Computes o = softmax(scale q k^T) v [* o_scale], and `lse` for the backward.

    Args:
        q: Queries [B, H, N_q, D], D from 16 to 128; fp32, fp16 or bf16; last stride 1. B is 1 for packed inputs.
        k, v: Keys and values [B, H, N_kv, D], N_kv at least 1.
        o: Output [B, H, N_q, D] in q's dtype, or in e4m3 with o_scale; last stride 1.
        lse: Output: log2(sum(exp(scale q k^T))) per query, fp32 [B, H, N_q], contiguous. A query
            without keys gets +inf instead of -inf, for which the backward computes a weight of 0.
        scale: Multiplier of q k^T; positive and finite.
        o_scale: For o in e4m3: the reciprocal scale, which multiplies o before rounding, fp32 [1]. None otherwise.
        sequences: cu_seqlens of packed inputs: int32 [S + 1], contiguous, on the device.
        key_mask: Key mask of masked inputs: bool [B, N_kv], False for masked keys; last stride 1.
        longest: Length of the longest packed sequence; affects only the choice of tiles.
    """
    form: dict[str, Any] = {"sequences": sequences, "key_mask": key_mask}
    config = forward_config(problem_of(q, k, v, o, **form, longest=longest))
    forward_launch(q, k, v, o, lse, scale, config, o_scale, **form).run()


def attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, scale: float, sequences: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None, longest: int = 0,
) -> None:  # fmt: skip
    """Computes dq, dk and dv from the gradient `do` of o. The other arguments are as in `attention_forward`.

    dq, dk and dv have the shapes of q, k and v. `do`, dq, dk and dv have the dtype of q and last stride 1.
    """
    form: dict[str, Any] = {"sequences": sequences, "key_mask": key_mask}
    for_dq = dq_config(problem_of(q, k, v, o, do, dq, **form, longest=longest))
    for_dkdv = dkdv_config(problem_of(q, k, v, do, dk, dv, **form, longest=longest))
    delta = torch.empty_like(lse)
    for launch in backward_launches(q, k, v, o, do, lse, dq, dk, dv, delta, scale, for_dq, for_dkdv, **form):
        launch.run()
