"""The other linear layers of a block by the same matmul: LayerNorm + qkv, and proj + LayerScale + residual.

- `vit_fast::layer_norm_linear` for inference, `..._training`, and `..._backward`;
- `vit_fast::linear_residual` and `vit_fast::linear_residual_backward`.

Statistics are as in `kept_rows.py`. Only torch is needed to register and trace these operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import (
    contiguous_rows,
    no_tensor,
    present,
    refuse_double_backward,
    refuse_vmap,
    require_supported,
    rows_of,
)
from .descriptions import is_rms
from .flops import flop_formula
from .kept_rows import fake_made_rows, fake_statistics, input_dtype, made_rows, rows_to_keep
from .operators import differentiable, fake, operator
from .transforms import transformable

if TYPE_CHECKING:
    from ..kernels.layer_norm import RowStatistics
    from ..kernels.linear.folding import FoldedLinear, NormedLinear
    from ..kernels.linear.weight_gradients import ResidualProducts
    from ..kernels.matmul.matmul_launch import HeadStep


@operator("vit_fast::layer_norm_linear")
def layer_norm_linear_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    weight: Tensor, bias: Tensor | None, eps: float, norm: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """norm(x) W^T + b: x [..., C], W [F, C] -> [..., F] in `dtype`; `norm` is one of `descriptions.NORMS`."""
    from ..kernels.linear import folding

    normed = normed_linear(x, norm_weight, norm_bias, weight, bias, norm, dtype)
    return folded_linear(x, statistics, folding.fold_linear(normed, dtype), eps, dtype)


@fake(layer_norm_linear_op)
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    weight: Tensor, bias: Tensor | None, eps: float, norm: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


@operator("vit_fast::layer_norm_linear_training")
def layer_norm_linear_training_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    weight: Tensor, bias: Tensor | None, eps: float, norm: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `layer_norm_linear`, and the rows and statistics that it made for the backward."""
    from ..kernels.linear import folding

    normed = normed_linear(x, norm_weight, norm_bias, weight, bias, norm, dtype)
    return folded_linear_training(x, statistics, folding.fold_linear(normed, dtype), eps, dtype)


@fake(layer_norm_linear_training_op)
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    weight: Tensor, bias: Tensor | None, eps: float, norm: str, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)
    return out, *fake_made_rows(x, dtype)


def normed_linear(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    norm: str, dtype: torch.dtype, paired_head: int = 0,
) -> NormedLinear:  # fmt: skip
    """The parameters of `layer_norm_linear`, checked, to be folded."""
    parameters = {"norm_weight": norm_weight, "norm_bias": norm_bias, "weight": weight, "bias": bias}
    require_supported("layer_norm_linear", x, parameters, dtype)
    from ..kernels.linear.folding import NormedLinear

    return NormedLinear(weight, bias, norm_weight, norm_bias, is_rms(norm), paired_head=paired_head)


def folded_linear(
    x: Tensor, statistics: Tensor | None, folded: FoldedLinear, eps: float, dtype: torch.dtype,
    head_step: HeadStep | None = None,
) -> Tensor:  # fmt: skip
    """`layer_norm_linear` of parameters that are folded already; `head_step` is what is done to q and k."""
    from ..kernels import layer_norm
    from ..kernels.linear import linear

    rows = layer_norm.input_rows(contiguous_rows(x), eps, statistics, dtype, folded.weight_sum is None)
    return linear.layer_norm_linear(rows, folded, head_step=head_step).view(*x.shape[:-1], folded.shift.shape[0])


def folded_linear_training(
    x: Tensor, statistics: Tensor | None, folded: FoldedLinear, eps: float, dtype: torch.dtype,
    head_step: HeadStep | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`layer_norm_linear_training` of parameters that are folded already."""
    from ..kernels import layer_norm
    from ..kernels.linear import linear

    rows = layer_norm.input_rows(contiguous_rows(x), eps, statistics, dtype, folded.weight_sum is None)
    out, _, known = linear.layer_norm_linear_keeping(rows, folded, head_step=head_step)
    return out.view(*x.shape[:-1], folded.shift.shape[0]), *made_rows(x, known)


@operator("vit_fast::layer_norm_linear_backward")
def layer_norm_linear_backward_op(
    grad_output: Tensor, rows: Tensor, statistics: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, norm_weight, norm_bias, weight, bias; of an absent one an empty tensor."""
    from ..kernels.linear import linear, scaled_weights, vector_gradients, weight_products
    from ..kernels.linear.weight_gradients import FoldedProducts

    grad = contiguous_rows(grad_output)
    known, normed = normed_rows(rows, statistics, norm_weight, norm_bias, weight, bias, norm)
    (plain,) = scaled_weights.in_dtype(grad.dtype, normed.weight)
    dx, normalised, sums = linear.layer_norm_linear_gradient(grad, known, normed, plain)
    (part,) = weight_products.weight_products((grad, normalised))
    (found,), _ = vector_gradients.parameter_gradients([FoldedProducts(part, sums, normed)], [])
    return dx.view(*grad_output.shape[:-1], weight.shape[1]), *folded_gradients(found, rows)


def normed_rows(
    rows: Tensor, statistics: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, norm: str,
    gate: Tensor | None = None, gate_bias: Tensor | None = None,
) -> tuple[RowStatistics, NormedLinear]:  # fmt: skip
    """What a backward reads of a LayerNorm and the linear layer behind it."""
    from ..kernels import layer_norm
    from ..kernels.linear import folding

    normed = folding.NormedLinear(weight, bias, norm_weight, norm_bias, is_rms(norm), gate, gate_bias).contiguous()
    return layer_norm.RowStatistics(contiguous_rows(rows), statistics), normed


def folded_gradients(found: Any, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of norm_weight, norm_bias, weight, bias from `FoldedGradients`; of an absent one an empty tensor."""
    return present(found.gamma, like), present(found.beta, like), found.weight, present(found.bias, like)


def gate_gradients(found: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a gate's weight and bias from `FoldedGradients`; without a gate empty tensors."""
    return present(found.gate, like), present(found.gate_bias, like)


@fake(layer_norm_linear_backward_op)
def _(
    grad_output: Tensor, rows: Tensor, statistics: Tensor,
    norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx = rows.new_empty((*grad_output.shape[:-1], rows.shape[-1]), dtype=input_dtype(rows, statistics))
    gradients = (no_tensor(rows) if p is None else p.new_empty(p.shape) for p in (norm_weight, norm_bias, weight, bias))
    return (dx, *gradients)  # type: ignore[return-value]  # four parameters, four gradients


@operator("vit_fast::linear_residual")
def linear_residual_op(
    h: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, residual: Tensor | None,
    next_statistics: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[residual +] ls (h W^T + b): h [..., F], W [C, F] -> [..., C] in `sum_dtype`.

    With `next_statistics` also the statistics of its rows, which are of half precision.
    """
    parameters = {"weight": weight, "bias": bias, "layer_scale": layer_scale, "residual": residual}
    require_supported("linear_residual", h, parameters, h.dtype)
    from ..kernels.linear import linear, scaled_weights

    (second,) = scaled_weights.in_dtype(h.dtype, weight)
    base = None if residual is None else contiguous_rows(residual)
    dtype = sum_dtype(h, layer_scale, residual)
    y, emitted = linear.linear_residual(contiguous_rows(h), second, bias, layer_scale, base, next_statistics, dtype)
    return y.view(*h.shape[:-1], weight.shape[0]), no_tensor(h) if emitted is None else emitted


@fake(linear_residual_op)
def _(
    h: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, residual: Tensor | None,
    next_statistics: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = weight.shape[0]
    y = h.new_empty((*h.shape[:-1], width), dtype=sum_dtype(h, layer_scale, residual))
    return y, fake_statistics(h, width, next_statistics)


def sum_dtype(h: Tensor, layer_scale: Tensor | None, residual: Tensor | None) -> torch.dtype:
    """That of the residual; without one what torch gives, fp32 where LayerScale is: 1e-6 would round away in fp16."""
    if residual is not None:
        return residual.dtype
    return h.dtype if layer_scale is None else torch.promote_types(h.dtype, layer_scale.dtype)


@operator("vit_fast::linear_residual_backward")
def linear_residual_backward_op(
    grad_output: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of h, weight, bias, layer_scale; of an absent one an empty tensor."""
    from ..kernels.linear import linear, scaled_weights, vector_gradients, weight_products

    dy, dense = contiguous_rows(grad_output).to(h.dtype), weight.contiguous()
    (scaled,) = scaled_weights.scaled_weights([(dense, layer_scale)], h.dtype)
    dh = linear.product_gradient(dy, scaled)
    (part,) = weight_products.weight_products((dy, contiguous_rows(h)))
    _, (found,) = vector_gradients.parameter_gradients([], [branch_products(part, dy, dense, bias, layer_scale)])
    return dh.view(h.shape), *branch_gradients(found, h)


def branch_products(
    part: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None
) -> ResidualProducts:
    """What the gradients of a linear layer before a residual are made of: dy^T h in parts, dy [M, C] and its
    parameters."""
    from ..kernels.linear.weight_gradients import ResidualProducts

    bias, scale = (vector if vector is None else vector.contiguous() for vector in (bias, layer_scale))
    return ResidualProducts(part, dy, weight, bias, scale)


def branch_gradients(found: Any, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weight, bias and LayerScale from `ResidualGradients`; of an absent one an empty tensor."""
    return found.weight, present(found.bias, like), present(found.scale, like)


@fake(linear_residual_backward_op)
def _(
    grad_output: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias, d_scale = (no_tensor(h) if p is None else p.new_empty(p.shape) for p in (bias, layer_scale))
    return h.new_empty(h.shape), weight.new_empty(weight.shape), d_bias, d_scale


def _save_layer_norm_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, _, *parameters, _, ctx.norm, _ = inputs
    _, *made = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*made)
    ctx.save_for_backward(*rows_to_keep(x, *made), *parameters)


def _layer_norm_linear_backward(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 9
    saved = ctx.saved_tensors  # once: under checkpointing a second look is an error
    dx, *gradients = _linear_backward(grad_output, *saved, ctx.norm)
    present = [None if parameter is None else gradient for parameter, gradient in zip(saved[2:], gradients)]
    return (dx, None, *present, None, None, None)


def _save_linear_residual(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, weight, bias, layer_scale, residual, _ = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(h, weight, bias, layer_scale)


def _linear_residual_backward(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 6
    h, weight, bias, layer_scale = ctx.saved_tensors
    dh, d_weight, d_bias, d_scale = _residual_backward(grad_output, h, weight, bias, layer_scale)
    d_residual = None if ctx.residual_dtype is None else grad_output.to(ctx.residual_dtype)
    return (
        dh, d_weight, None if bias is None else d_bias, None if layer_scale is None else d_scale, d_residual, None,
    )  # fmt: skip


differentiable(layer_norm_linear_training_op, _save_layer_norm_linear, _layer_norm_linear_backward)
differentiable(linear_residual_op, _save_linear_residual, _linear_residual_backward)
differentiable(layer_norm_linear_backward_op, None, refuse_double_backward("layer_norm_linear"))
differentiable(linear_residual_backward_op, None, refuse_double_backward("linear_residual"))
layer_norm_linear_training = transformable(
    "layer_norm_linear", layer_norm_linear_training_op, _save_layer_norm_linear, _layer_norm_linear_backward
)
linear_residual_kernel = transformable(
    "linear_residual", linear_residual_op, _save_linear_residual, _linear_residual_backward
)
_linear_backward = transformable("layer_norm_linear", layer_norm_linear_backward_op)
_residual_backward = transformable("linear_residual", linear_residual_backward_op)
for _operator in (
    layer_norm_linear_op,
    layer_norm_linear_training_op,
    layer_norm_linear_backward_op,
    linear_residual_op,
    linear_residual_backward_op,
):
    torch.library.register_vmap(_operator, refuse_vmap("a fused linear layer"))


@flop_formula([torch.ops.vit_fast.layer_norm_linear, torch.ops.vit_fast.layer_norm_linear_training])
def _(x: Any, statistics: Any, norm_weight: Any, norm_bias: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * rows_of(x) * int(x[-1]) * int(weight[0])


@flop_formula(torch.ops.vit_fast.layer_norm_linear_backward)
def _(grad_output: Any, rows: Any, *args: Any, **kwargs: Any) -> int:
    return 4 * rows_of(rows) * int(rows[-1]) * int(grad_output[-1])


@flop_formula(torch.ops.vit_fast.linear_residual)
def _(h: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * rows_of(h) * int(h[-1]) * int(weight[0])


@flop_formula(torch.ops.vit_fast.linear_residual_backward)
def _(grad_output: Any, h: Any, *args: Any, **kwargs: Any) -> int:
    return 4 * rows_of(h) * int(h[-1]) * int(grad_output[-1])
