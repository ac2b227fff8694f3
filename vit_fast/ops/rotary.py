"""qk-norm and rotary embeddings, between the qkv matmul and attention.

Operators: `vit_fast::qk_norm_rope` and its backward. In a block, `qkv_step` selects a kernel for norms and rotation:
- The epilogue of the qkv matmul runs norms and rotation if possible. For rotation, all heads must share cos and sin,
  and the channels of a rotated pair must be adjacent in the matmul's output (`kernels/linear/folding.py`). Norms
  require `QkNorm.over` "head", head_dim 64 or 128, fp16 or bf16, and a block without FP8 and without a backward.
- Otherwise, a separate kernel runs norms and rotation: in place, or into a new tensor if the backward needs the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import raise_unsupported
from . import reference
from .backends import resolve_backend, triton_unavailable_reasons
from .descriptions import DTYPES, MAX_TOKENS, QkNorm, Rope, check_qk_norm, check_tensors, checked_rope
from .registration import is_exporting, operator

_WHAT = "qk_norm_rope"
_ARGUMENTS = ("qk_norm.q.weight", "qk_norm.q.bias", "qk_norm.k.weight", "qk_norm.k.bias", "rope.cos", "rope.sin")


class QkTensors(NamedTuple):
    """Parameters of the q and k norms, and rotary tables [B or 1, H or 1, rotated tokens, D/2]."""

    q_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class QkSettings(NamedTuple):
    """Epsilon of the q and k norms, `prefix` of `Rope`, kind of the norms or "none", `over` of `QkNorm`.

    `layout` is that of `Rope`, or "interleaved_half": channels 2j and 2j + 1 of qkv, but j and j + D/2 of weights and
    biases, form a pair. Only the forward supports "interleaved_half".
    """

    eps: float = 0.0
    prefix: int = 0
    norm: str = "none"
    over: str = "head"
    layout: str = "half"


def qk_norm_rope(
    qkv: Tensor, *, qk_norm: QkNorm | None = None, rope: Rope | None = None, backend: str = "auto"
) -> Tensor:
    """Normalizes q and k, then rotates them; copies v.

    Args:
        qkv: Output of the qkv layer [B, N, 3, H, D], or [total, 3, H, D] for packed sequences; fp32, fp16, bf16 or,
            with backends other than triton, fp64.
        qk_norm: Norms of q and k; None means no norm.
        rope: Rotary embeddings; None means no rotation.
        backend: See `attention`. eager and sdpa are identical here.
    Returns:
        A new tensor with the shape and dtype of qkv.
    Raises:
        ValueError: shapes do not match, or qk_norm, rope or the backend is invalid.
        UnsupportedInputError: triton cannot run this input. The message lists all reasons.
    Source: rotary embeddings: arXiv 2104.09864; qk-norm: arXiv 2302.05442.
    """
    check_tensors(qkv=qkv)
    if qkv.dim() not in (4, 5) or qkv.shape[-3] != 3:
        raise ValueError(f"qkv must have shape [B, N, 3, H, D] or [total, 3, H, D], got {tuple(qkv.shape)}")
    if qkv.dim() == 4:
        return qk_norm_rope(qkv[None], qk_norm=qk_norm, rope=rope, backend=backend)[0]
    if qk_norm is not None:
        check_qk_norm(qk_norm, *qkv.shape[-2:])
    runs_kernel = resolve_backend(backend, qkv.device, qkv.dtype) == "triton" and not is_exporting()
    if rope is not None:
        rope = checked_rope(rope, qkv.shape, by_pair=runs_kernel)
    if runs_kernel:
        tensors, settings = operator_arguments(qkv, qk_norm, rope)
        return _kernel((qkv, *tensors), settings[:2], settings[2:])[0]
    return reference.qk_norm_rope(qkv, qk_norm, rope)


def operator_arguments(like: Tensor, qk_norm: QkNorm | None, rope: Rope | None) -> tuple[QkTensors, QkSettings]:
    """Returns qk-norm and rotation as operator arguments."""
    cos, sin, prefix, layout = rope or (None, None, 0, "half")
    tensors, settings = QkTensors(cos=cos, sin=sin), QkSettings(prefix=prefix, layout=layout)
    if qk_norm is not None:
        q, k, over = qk_norm
        tensors = QkTensors(q.weight, q.bias, k.weight, k.bias, cos, sin)
        settings = QkSettings(q.eps, prefix, q.kind, over, layout)
    reasons = []
    for name, tensor in zip(_ARGUMENTS, tensors):
        if tensor is None:
            continue
        if tensor.device != like.device:  # torch itself would not report different devices
            reasons.append(f"{name} must be on the input's device {like.device}, got {tensor.device}")
        if name.startswith("rope") and tensor.requires_grad and torch.is_grad_enabled():
            reasons.append(f"{name} must not require a gradient: call .detach()")
    raise_unsupported(f"{_WHAT} with backend='triton'", reasons)
    return tensors, settings


def _readable(what: str, head_dim: int, tensors: QkTensors, reasons: Sequence[str] = ()) -> QkTensors:
    """Returns tensors that the kernels can read, or raises UnsupportedInputError with `reasons` and its own."""
    reasons = [*reasons, *([f"head_dim must be even, got {head_dim}"] if head_dim % 2 else [])]
    for name, tensor in zip(_ARGUMENTS, tensors):
        if tensor is not None and tensor.dtype not in DTYPES:
            reasons.append(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
    raise_unsupported(f"{what} with backend='triton'", reasons)
    from ..kernels.rotary import can_be_read

    *vectors, cos, sin = tensors
    if cos is not None and sin is not None and not can_be_read(cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
    return QkTensors._make((*(each if each is None else each.contiguous() for each in vectors), cos, sin))


def _forward(tensors: Sequence[Any], s: QkSettings) -> list[Tensor]:
    from ..kernels import rotary

    qkv, *others = tensors
    reasons = list(triton_unavailable_reasons(qkv.device))
    if (tokens := qkv.shape[0] * qkv.shape[1]) > MAX_TOKENS:
        reasons.append(f"qkv must have at most {MAX_TOKENS} tokens, got {tokens}")
    if qkv.dtype not in DTYPES:
        reasons.append(f"qkv must be float32, float16 or bfloat16, got {qkv.dtype}")
    readable = _readable(_WHAT, qkv.shape[-1], QkTensors(*others), reasons)
    return [rotary.qk_norm_rope(qkv.contiguous(), readable, s)]


def _backward(grad_output: Tensor, tensors: Sequence[Any], outputs: Any, s: QkSettings) -> dict[str, Tensor]:
    from ..kernels import rotary

    qk, x = QkTensors(*tensors[1:]), None if tensors[0] is None else tensors[0].contiguous()
    readable = _readable(_WHAT, grad_output.shape[-1], qk)
    dx, sums = rotary.qk_norm_rope_gradients(grad_output.contiguous(), x, readable, s)
    return {"qkv": dx} | norm_gradients(sums, qk)


def norm_gradients(sums: Tensor | None, tensors: QkTensors) -> dict[str, Tensor]:
    """Returns the gradients of the norms' parameters by name; `sums`: fp32 [2 (q, k), 2 (weight, bias), D or H * D]."""
    if sums is None:
        return {}
    parameters = zip(QkTensors._fields, tensors, sums.flatten(0, 1))
    return {name: row.to(each.dtype, copy=True) for name, each, row in parameters if each is not None}


_kernel = operator(
    _WHAT, ("qkv", *QkTensors._fields), QkSettings, _forward, _backward, what=_WHAT, flop=lambda *_: (0, 0),
    fake=lambda tensors, s: [tensors[0].new_empty(tensors[0].shape)],
    with_gradient=lambda s: ("qkv", *QkTensors._fields[:4]),
    saved=lambda tensors, outputs, s: (None if s.norm == "none" else tensors[0], *tensors[1:]),
)  # fmt: skip


class QkvStep(NamedTuple):
    """Norms and rotation of q and k in one block."""

    tensors: QkTensors
    settings: QkSettings
    # the last arguments of `rotary_epilogue`; None if a separate kernel runs norms and rotation, or there are none
    head_step: tuple[QkTensors, QkSettings, int, int] | None = None
    rope_head: int = 0  # head_dim if the matmul rotates layout "half", else 0; see `kernels/linear/folding.py`

    @property
    def is_empty(self) -> bool:
        return self.settings.norm == "none" and self.tensors.cos is None

    def forward(self, packed: Tensor, saves: bool) -> tuple[Tensor, Tensor | None]:
        """Applies norms and rotation to `packed`, the output [B, N, 3, H, D] of the qkv matmul.

        Skips both if the matmul already applied them. Returns qkv for attention, and the input of the norms if saved
        for the backward, else None. May change `packed`.
        """
        from ..kernels import rotary

        if self.is_empty or self.head_step is not None:
            return packed, None
        if saves and self.settings.norm != "none":
            return rotary.qk_norm_rope(packed, self.tensors, self.settings), packed
        rotary.qk_norm_rope_launch(packed, packed, self.tensors, self.settings).run()
        return packed, None

    def backward(self, grad: Tensor, saved: Tensor | None) -> Tensor | None:
        """Converts `grad` in place from the gradient of attention's input to the gradient of the qkv matmul's output.

        If rope_head > 0, the matmul's weight was permuted. `grad` then gets the order of the original weight: channels
        2j and 2j + 1 move to j and j + D/2. Returns `sums` for `norm_gradients`.
        """
        from ..kernels import rotary

        tensors, settings, adjacent = self.tensors, self.settings, self.rope_head > 0
        if self.is_empty:
            return None
        if settings.norm != "none":
            return rotary.qk_norm_rope_gradients(grad, saved, tensors, settings, grad)[1]
        if adjacent:
            settings = settings._replace(layout="interleaved_half")
        rotary.qk_norm_rope_launch(grad, grad, tensors, settings, inverse=True, separate=adjacent).run()
        return None


def qkv_step(
    tensors: QkTensors, settings: QkSettings, tokens: int, head_dim: int, is_folded: bool,
    norm_dtype: torch.dtype | None = None,
) -> QkvStep:  # fmt: skip
    """Builds a `QkvStep` for images of `tokens` tokens from the results of `operator_arguments`.

    `is_folded` is True if `fold` folded the qkv weight earlier. With `is_folded` and layout "half", the matmul does not
    rotate: `fold` ran with rope_head 0, so the channels of a pair are not adjacent. norm_dtype is the matmul's dtype,
    or None in training and FP8. If norm_dtype is None, the matmul does not run the norms.
    """
    from ..kernels.matmul.matmul_policy import NORMED_HEADS

    if (step := QkvStep(tensors, settings)).is_empty:
        return step
    in_matmul = True
    if settings.norm != "none":
        half = norm_dtype is not None and norm_dtype.itemsize == 2
        in_matmul = settings.over == "head" and half and head_dim in NORMED_HEADS
    if tensors.cos is not None:
        in_matmul = in_matmul and tensors.cos.shape[1] == 1 and (settings.layout != "half" or not is_folded)
    tensors = _readable("a block", head_dim, tensors)
    rotates = in_matmul and tensors.cos is not None and settings.layout == "half"
    head_step = (tensors, settings, tokens, head_dim) if in_matmul else None
    return QkvStep(tensors, settings, head_step, head_dim if rotates else 0)
