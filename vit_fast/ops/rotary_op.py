"""qk-norm and rotary positions by a kernel as torch operators: schema, checks, fake implementations, autograd.

- `vit_fast::qk_norm_rope`, and `vit_fast::qk_norm_rope_backward`.

They form no products, so they count no FLOP. Only torch is needed to register and trace them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .backends import triton_unavailable_reasons
from .checks import DTYPES, MAX_ROWS, no_tensor, refuse_double_backward, refuse_vmap
from .descriptions import QkNorm, Rope
from .flops import flop_formula
from .operators import differentiable, fake, operator
from .transforms import transformable

if TYPE_CHECKING:
    from ..kernels.rotary import QkvSettings

_WHAT = "qk_norm_rope"


@operator("vit_fast::qk_norm_rope")
def qk_norm_rope_op(
    qkv: Tensor, q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, norm: str, eps: float, over: str, prefix: int, layout: str,
) -> Tensor:  # fmt: skip
    """q and k of [B, N, 3, H, D] normalised (`norm` "none": not) and rotated by [B or 1, H or 1, T, D/2]."""
    from ..kernels import rotary

    tensors = {
        "q_weight": q_weight, "q_bias": q_bias, "k_weight": k_weight, "k_bias": k_bias, "cos": cos, "sin": sin,
    }  # fmt: skip
    require_qkv_supported(_WHAT, qkv, tensors)
    settings = qkv_settings(q_weight, q_bias, k_weight, k_bias, cos, sin, norm, eps, over, prefix, layout)
    return rotary.qk_norm_rope(qkv.contiguous(), settings)


@fake(qk_norm_rope_op)
def _(qkv: Tensor, *args: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def require_qkv_supported(what: str, qkv: Tensor, tensors: dict[str, Tensor | None]) -> None:
    """Raises UnsupportedInputError with every reason why the kernel cannot run on qkv [B, N, 3, H, D] with these."""
    B, N, _, _, D = qkv.shape
    reasons = list(triton_unavailable_reasons(qkv.device))
    if qkv.dtype not in DTYPES:
        reasons.append(f"qkv is {qkv.dtype}: accepted are float32, float16, bfloat16")
    if D % 2:
        reasons.append(f"heads have {D} channels: accepted is an even number")
    if B * N > MAX_ROWS:
        reasons.append(f"qkv has {B * N} tokens: accepted are at most {MAX_ROWS}")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != qkv.device:
            reasons.append(f"{name} is on {tensor.device}, qkv is on {qkv.device}: they must agree")
        if tensor.dtype not in DTYPES:
            reasons.append(f"{name} is {tensor.dtype}: accepted are float32, float16, bfloat16")
    if reasons:
        raise UnsupportedInputError(f"{what} with backend='triton'", reasons)


def qkv_settings(
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, norm: str, eps: float, over: str, prefix: int, layout: str,
) -> QkvSettings:  # fmt: skip
    """The same as the kernels take it."""
    from ..kernels.rotary import QkvSettings, can_be_read

    def dense(q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor] | None:
        return None if q is None or k is None else (q.contiguous(), k.contiguous())

    tables = (cos, sin) if cos is not None and sin is not None and can_be_read(cos, sin) else dense(cos, sin)
    return QkvSettings(
        dense(q_weight, k_weight), dense(q_bias, k_bias), tables, norm, eps, over == "width", prefix, layout
    )  # fmt: skip


@operator("vit_fast::qk_norm_rope_backward")
def qk_norm_rope_backward_op(
    grad_output: Tensor, qkv: Tensor, q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None,
    k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, norm: str, eps: float, over: str, prefix: int,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and of the norms' four parameters; of an absent one an empty tensor.

    Args:
        qkv: The forward's; no tensor where there are no norms.
    """
    from ..kernels import rotary

    settings = qkv_settings(q_weight, q_bias, k_weight, k_bias, cos, sin, norm, eps, over, prefix, layout)
    x = None if norm == "none" else qkv.contiguous()
    dx, sums = rotary.qk_norm_rope_gradients(grad_output.contiguous(), x, settings)
    return dx, *norm_gradients(sums, (q_weight, q_bias, k_weight, k_bias), grad_output)


def norm_gradients(
    sums: Tensor | None, parameters: tuple[Tensor | None, ...], like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the norms' parameters from fp32 [2, 2, D or H D]; of an absent one an empty tensor."""
    places = ((0, 0), (0, 1), (1, 0), (1, 1))
    return tuple(  # type: ignore[return-value]  # four parameters, four gradients
        no_tensor(like) if parameter is None or sums is None else sums[place].to(parameter.dtype, copy=True)
        for parameter, place in zip(parameters, places)
    )


@fake(qk_norm_rope_backward_op)
def _(grad_output: Tensor, qkv: Tensor, *args: Any) -> tuple[Tensor, ...]:
    gradients = (no_tensor(grad_output) if p is None else p.new_empty(p.shape) for p in args[:4])
    return grad_output.new_empty(grad_output.shape), *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, *tensors = inputs[:7]
    ctx.settings = inputs[7:]
    ctx.save_for_backward(qkv if inputs[7] != "none" else no_tensor(qkv), *tensors)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dx, *gradients = _backward_kernel(grad_output, *saved, *ctx.settings)
    present = [None if parameter is None else gradient for parameter, gradient in zip(saved[1:5], gradients)]
    return (dx, *present, *(None,) * 7)


differentiable(qk_norm_rope_op, _save, _backward)
differentiable(qk_norm_rope_backward_op, None, refuse_double_backward(_WHAT))
_forward_kernel = transformable(_WHAT, qk_norm_rope_op, _save, _backward)
_backward_kernel = transformable(_WHAT, qk_norm_rope_backward_op)
for _operator in (qk_norm_rope_op, qk_norm_rope_backward_op):
    torch.library.register_vmap(_operator, refuse_vmap(_WHAT))


def qk_norm_rope_kernel(qkv: Tensor, qk_norm: QkNorm | None, rope: Rope | None) -> Tensor:
    """`qk_norm_rope` by the kernel, of what is checked, tables [B or 1, H or 1, T, D/2].

    Raises:
        UnsupportedInputError: it cannot run this input; lists all reasons.
    """
    out: Tensor = _forward_kernel(qkv, *flat_settings(qkv, qk_norm, rope))
    return out


def flat_settings(like: Tensor, qk_norm: QkNorm | None, rope: Rope | None) -> tuple[Any, ...]:
    """qk-norm and rotation as operators take them, behind qkv.

    Raises:
        UnsupportedInputError: the tables require gradients, or lie elsewhere than `like`.
    """
    cos, sin, prefix, layout = rope or (None, None, 0, "half")
    norms: tuple[Any, ...] = (None, None, None, None)
    kind, eps, over = "none", 0.0, "head"
    if qk_norm is not None:
        q, k, over = qk_norm
        norms, kind, eps = (q.weight, q.bias, k.weight, k.bias), q.kind, q.eps
    reasons = []
    for name, table in (("rope.cos", cos), ("rope.sin", sin)):
        if table is not None and table.requires_grad and torch.is_grad_enabled():
            reasons.append(f"{name} requires a gradient: accepted are tables that do not")
    tensors = (*norms, cos, sin)
    # torch would choose a device before the operator sees its inputs
    reasons += [
        f"a table or norm is on {tensor.device}, qkv is on {like.device}: they must agree"
        for tensor in tensors
        if tensor is not None and tensor.device != like.device
    ]
    if reasons:
        raise UnsupportedInputError(f"{_WHAT} with backend='triton'", reasons)
    return (*tensors, kind, eps, over, prefix, layout)


@flop_formula([torch.ops.vit_fast.qk_norm_rope, torch.ops.vit_fast.qk_norm_rope_backward])
def _(*args: Any, **kwargs: Any) -> int:
    return 0
