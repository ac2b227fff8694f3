"""qk-norm and rotary embeddings, between the qkv matmul and attention.

Operators: `vit_fast::qk_norm_rope` and its backward. In a block, `qkv_step` selects a kernel for norms and rotation:
- The epilogue of the qkv matmul runs norms and rotation if possible. For rotation, all heads must share cos and sin,
  and the channels of a rotated pair must be adjacent in the matmul's output (`kernels/linear/folding.py`). Norms
  require `QkNorm.over` "head", head_dim 64 or 128, fp16 or bf16, and a block without FP8 and without a backward.
- Otherwise, a separate kernel runs norms and rotation: in place, or into a new tensor if the backward needs the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from . import reference
from .backends import resolve_backend, triton_unavailable_reasons
from .descriptions import DTYPES, MAX_TOKENS, QkNorm, Rope, check_qk_norm, check_tensors, checked_rope
from .registration import is_exporting, operator

if TYPE_CHECKING:
    from ..kernels.rotary import QkvSettings

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
    """Kind (or "none") and epsilon of the q and k norms, `over` of `QkNorm`, `layout` and `prefix` of `Rope`."""

    norm: str = "none"
    eps: float = 0.0
    over: str = "head"
    layout: str = "half"
    prefix: int = 0


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
        out: Tensor = _forward_kernel(qkv, list(tensors), *settings)
        return out
    return reference.qk_norm_rope(qkv, qk_norm, rope)


def operator_arguments(like: Tensor, qk_norm: QkNorm | None, rope: Rope | None) -> tuple[QkTensors, QkSettings]:
    """Returns qk-norm and rotation as operator arguments."""
    cos, sin, prefix, layout = rope or (None, None, 0, "half")
    tensors, settings = QkTensors(cos=cos, sin=sin), QkSettings(layout=layout, prefix=prefix)
    if qk_norm is not None:
        q, k, over = qk_norm
        tensors = QkTensors(q.weight, q.bias, k.weight, k.bias, cos, sin)
        settings = QkSettings(q.kind, q.eps, over, layout, prefix)
    reasons = []
    for name, tensor in zip(_ARGUMENTS, tensors):
        if tensor is None:
            continue
        if tensor.device != like.device:  # torch itself would not report different devices
            reasons.append(f"{name} must be on the input's device {like.device}, got {tensor.device}")
        if name.startswith("rope") and tensor.requires_grad and torch.is_grad_enabled():
            reasons.append(f"{name} must not require a gradient: call .detach()")
    if reasons:
        raise UnsupportedInputError(f"{_WHAT} with backend='triton'", reasons)
    return tensors, settings


def _kernel_settings(
    what: str, head_dim: int, tensors: QkTensors, settings: QkSettings, reasons: Sequence[str] = ()
) -> QkvSettings:
    """Returns `QkvSettings`. Raises UnsupportedInputError if `reasons` is not empty or an argument is unsupported."""
    reasons = [*reasons, *([f"head_dim must be even, got {head_dim}"] if head_dim % 2 else [])]
    for name, tensor in zip(_ARGUMENTS, tensors):
        if tensor is not None and tensor.dtype not in DTYPES:
            reasons.append(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")
    if reasons:
        raise UnsupportedInputError(f"{what} with backend='triton'", reasons)
    from ..kernels.rotary import QkvSettings, can_be_read

    def contiguous(a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor] | None:
        return None if a is None or b is None else (a.contiguous(), b.contiguous())

    q_weight, q_bias, k_weight, k_bias, cos, sin = tensors
    norm, eps, over, layout, prefix = settings
    tables = (cos, sin) if cos is not None and sin is not None and can_be_read(cos, sin) else contiguous(cos, sin)
    weights, biases = contiguous(q_weight, k_weight), contiguous(q_bias, k_bias)
    return QkvSettings(weights, biases, tables, norm, eps, over == "width", prefix, layout)


def _forward(qkv: Tensor, tensors: Sequence[Tensor | None], *settings: Any) -> Tensor:
    from ..kernels import rotary

    reasons = list(triton_unavailable_reasons(qkv.device))
    if (tokens := qkv.shape[0] * qkv.shape[1]) > MAX_TOKENS:
        reasons.append(f"qkv must have at most {MAX_TOKENS} tokens, got {tokens}")
    if qkv.dtype not in DTYPES:
        reasons.append(f"qkv must be float32, float16 or bfloat16, got {qkv.dtype}")
    made = _kernel_settings(_WHAT, qkv.shape[-1], QkTensors(*tensors), QkSettings(*settings), reasons)
    return rotary.qk_norm_rope(qkv.contiguous(), made)


def _backward(
    grad_output: Tensor, qkv: Tensor | None, tensors: Sequence[Tensor | None], *settings: Any
) -> list[Tensor]:
    """Returns the gradients of qkv and of the norms' parameters. `qkv` is None without norms."""
    from ..kernels import rotary

    qk = QkTensors(*tensors)
    x = None if qkv is None else qkv.contiguous()
    made = _kernel_settings(_WHAT, grad_output.shape[-1], qk, QkSettings(*settings))
    dx, sums = rotary.qk_norm_rope_gradients(grad_output.contiguous(), x, made)
    return [dx, *norm_gradients(sums, qk).values()]


def norm_gradients(sums: Tensor | None, tensors: QkTensors) -> dict[str, Tensor]:
    """Returns the gradients of the norms' parameters by name; `sums`: fp32 [2 (q, k), 2 (weight, bias), D or H * D]."""
    if sums is None:
        return {}
    parameters = zip(QkTensors._fields, tensors, sums.flatten(0, 1))
    return {name: row.to(each.dtype, copy=True) for name, each, row in parameters if each is not None}


def _save(args: Sequence[Any], output: Tensor) -> tuple[Sequence[Tensor | None], Any]:
    qkv, tensors, *rest = args
    return (None if rest[0] == "none" else qkv, *tensors), rest


def _gradients(grad_output: Tensor, saved: Sequence[Tensor | None], rest: Any) -> Sequence[Tensor | None]:
    qkv, *tensors = saved
    dx, *gradients = _backward_kernel(grad_output, qkv, tensors, *rest)
    remaining = iter(gradients)
    return dx, *(None if tensor is None else next(remaining) for tensor in tensors[:4])


_SETTINGS = "Tensor?[] tensors, str norm, float eps, str over, str layout, SymInt prefix"
_forward_kernel = operator(
    "qk_norm_rope", f"(Tensor qkv, {_SETTINGS}) -> Tensor", _forward, what=_WHAT,
    fake=lambda qkv, *_: qkv.new_empty(qkv.shape), flop=lambda *_: 0, save=_save, backward=_gradients,
)  # fmt: skip
_backward_kernel = operator(
    "qk_norm_rope_backward", f"(Tensor grad_output, Tensor? qkv, {_SETTINGS}) -> Tensor[]", _backward,
    what=_WHAT, flop=lambda *_: 0,
    fake=lambda grad, qkv, tensors, *_: [t.new_empty(t.shape) for t in (grad, *tensors[:4]) if t is not None],
)  # fmt: skip


class QkvStep(NamedTuple):
    """Norms and rotation of q and k in one block."""

    settings: QkvSettings | None  # None without norms and rotation
    # of `rotary_epilogue`: settings, tokens per image and head_dim; None if a separate kernel runs norms and rotation
    head_step: tuple[QkvSettings, int, int] | None
    rope_head: int  # head_dim if the matmul rotates layout "half", else 0; see `kernels/linear/folding.py`

    def forward(self, packed: Tensor, saves: bool) -> tuple[Tensor, Tensor | None]:
        """Applies norms and rotation to `packed`, the output [B, N, 3, H, D] of the qkv matmul.

        Skips both if the matmul already applied them. Returns qkv for attention, and the input of the norms if saved
        for the backward, else None. May change `packed`.
        """
        from ..kernels import rotary

        if self.settings is None or self.head_step is not None:
            return packed, None
        if saves and self.settings.norm != "none":
            return rotary.qk_norm_rope(packed, self.settings), packed
        rotary.qk_norm_rope_launch(packed, packed, self.settings).run()
        return packed, None

    def backward(self, grad: Tensor, saved: Tensor | None) -> Tensor | None:
        """Converts `grad` in place from the gradient of attention's input to the gradient of the qkv matmul's output.

        If rope_head > 0, the matmul's weight was permuted. `grad` then gets the order of the original weight: channels
        2j and 2j + 1 move to j and j + D/2. Returns `sums` for `norm_gradients`.
        """
        from ..kernels import rotary

        settings, adjacent = self.settings, self.rope_head > 0
        if settings is None:
            return None
        if settings.norm != "none":
            return rotary.qk_norm_rope_gradients(grad, saved, settings, grad)[1]
        if adjacent:
            settings = replace(settings, layout="interleaved_half")
        rotary.qk_norm_rope_launch(grad, grad, settings, inverse=True, separate=adjacent).run()
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

    norm, _, over, layout, _ = settings
    if norm == "none" and tensors.cos is None:
        return QkvStep(None, None, 0)
    in_matmul = True
    if norm != "none":
        half = norm_dtype is not None and norm_dtype.itemsize == 2
        in_matmul = over == "head" and half and head_dim in NORMED_HEADS
    if tensors.cos is not None:
        in_matmul = in_matmul and tensors.cos.shape[1] == 1 and (layout != "half" or not is_folded)
    made = _kernel_settings("a block", head_dim, tensors, settings)
    rotates = in_matmul and tensors.cos is not None and layout == "half"
    return QkvStep(made, (made, tokens, head_dim) if in_matmul else None, head_dim if rotates else 0)
