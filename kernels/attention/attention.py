"""Fused softmax attention, forward and backward: the functions that the operators call."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_backward import backward_launches
from .attention_forward import forward_launch
from .attention_launch import AttentionCall
from .attention_policy import dkdv_config, dq_config, forward_config
from .bias_launch import bias_backward, bias_forward_launch


def attention_forward(call: AttentionCall, o: Tensor, o_scale: Tensor | None = None) -> None:
    """Computes o = softmax(scale q k^T) v [* o_scale], with the terms of the call added to the scores, and `call.lse`.

    Args:
        o: Output [B, H, N_q, D] in q's dtype, or in e4m3 with o_scale; last stride 1.
        o_scale: For o in e4m3: the reciprocal scale, which multiplies o before rounding, fp32 [1]. None with terms.
    """
    if call.terms is not None:
        bias_forward_launch(call, o).run()
    else:
        forward_launch(call, o, forward_config(call.problem(o)), o_scale).run()


def attention_backward(
    call: AttentionCall, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, bias_grad: bool = True
) -> dict[str, Tensor]:
    """Computes dq, dk and dv from the gradient `do` of o.

    dq, dk and dv have the shapes of q, k and v. `do`, dq, dk and dv have the dtype of q and last stride 1. Returns the
    gradients of `call.terms` as `bias_backward` does.
    """
    if call.terms is not None:
        return bias_backward(call, o, do, dq, dk, dv, bias_grad)
    for_dq, for_dkdv = dq_config(call.problem(o, do, dq)), dkdv_config(call.problem(do, dk, dv))
    for launch in backward_launches(call, o, do, dq, dk, dv, torch.empty_like(call.lse), for_dq, for_dkdv):
        launch.run()
    return {}
