"""The LayerNorm + MLP kernels as torch operators: schema, checks, fake implementations, autograd, FLOP formulas.

- `vit_fast::layer_norm_mlp` for inference;
- `vit_fast::layer_norm_mlp_training`, which also returns what `vit_fast::layer_norm_mlp_backward` needs.

Statistics are (mean, rstd) of rows as one tensor fp32 [2, M]. They are a function of their rows, handed from one
operator to the next so that they need not be computed twice: the gradient through them is part of the LayerNorm's own.

Only torch is needed to register and trace them; Triton and the kernels are imported when one first runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import (
    contiguous_rows,
    in_dtype,
    like_parameter,
    new_statistics,
    no_tensor,
    refuse_double_backward,
    refuse_vmap,
    require_supported,
    rows_of,
    statistics_pair,
)
from .flops import register_flop_formula
from .transforms import transformable


@torch.library.custom_op("vit_fast::layer_norm_mlp", mutates_args=())
def layer_norm_mlp_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, residual: bool, next_eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[x +] ls (act(LN(x) W1^T + b1) W2^T + b2) [..., C], and with `next_eps` the statistics of its rows."""
    parameters = {
        "norm_weight": norm_weight, "norm_bias": norm_bias, "fc1_weight": fc1_weight, "fc1_bias": fc1_bias,
        "fc2_weight": fc2_weight, "fc2_bias": fc2_bias, "layer_scale": layer_scale,
    }  # fmt: skip
    require_supported("layer_norm_mlp", x, parameters)
    from ..kernels import layer_norm, linear

    rows = contiguous_rows(x)
    folded = layer_norm.fold_linear(fc1_weight, norm_weight, norm_bias, fc1_bias, x.dtype)
    second = in_dtype(fc2_weight, x.dtype)
    known = layer_norm.row_statistics(rows, eps, statistics_pair(statistics))
    h = linear.layer_norm_linear(known, folded, activation)
    y, emitted = linear.linear_residual(h, second, fc2_bias, layer_scale, rows if residual else None, next_eps)
    return y.view(x.shape), no_tensor(x) if emitted is None else torch.stack(emitted)


@layer_norm_mlp_op.register_fake
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, residual: bool, next_eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), new_statistics(x, next_eps is not None)


@torch.library.custom_op("vit_fast::layer_norm_mlp_training", mutates_args=())
def layer_norm_mlp_training_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, residual: bool, next_eps: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `layer_norm_mlp`, and fc1's output z [M, F] and the statistics of x, which the backward needs."""
    parameters = {
        "norm_weight": norm_weight, "norm_bias": norm_bias, "fc1_weight": fc1_weight, "fc1_bias": fc1_bias,
        "fc2_weight": fc2_weight, "fc2_bias": fc2_bias, "layer_scale": layer_scale,
    }  # fmt: skip
    require_supported("layer_norm_mlp", x, parameters)
    from ..kernels import layer_norm, linear

    rows = contiguous_rows(x)
    folded = layer_norm.fold_linear(fc1_weight, norm_weight, norm_bias, fc1_bias, x.dtype)
    known = layer_norm.row_statistics(rows, eps, statistics_pair(statistics))
    h, z = linear.layer_norm_linear_keeping(known, folded, activation)
    second = in_dtype(fc2_weight, x.dtype)
    y, emitted = linear.linear_residual(h, second, fc2_bias, layer_scale, rows if residual else None, next_eps)
    return (
        y.view(x.shape),
        no_tensor(x) if emitted is None else torch.stack(emitted),
        z,
        known.as_tensor(),
    )


@layer_norm_mlp_training_op.register_fake
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, residual: bool, next_eps: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    M = x.numel() // x.shape[-1]
    z = x.new_empty((M, fc1_weight.shape[0]))
    return x.new_empty(x.shape), new_statistics(x, next_eps is not None), z, new_statistics(x, True)


@torch.library.custom_op("vit_fast::layer_norm_mlp_backward", mutates_args=())
def layer_norm_mlp_backward_op(
    grad_output: Tensor, x: Tensor, z: Tensor, statistics: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the seven parameters; of an absent one an empty tensor."""
    from ..kernels import layer_norm, linear

    rows, dy = contiguous_rows(x), contiguous_rows(grad_output)
    first, second = fc1_weight.contiguous(), fc2_weight.contiguous()
    folded = layer_norm.fold_linear(first, norm_weight, norm_bias, fc1_bias, x.dtype)
    known = layer_norm.row_statistics(rows, eps, statistics_pair(statistics))
    gradient, h = linear.activation_gradient(dy, second, layer_scale, z, known, folded, activation)
    d_second, d_bias2, d_scale = linear.residual_gradients(dy, h, second, fc2_bias, layer_scale)
    del h
    dx = linear.input_gradient(gradient, known, folded, dy if residual else None)
    d_first, d_gamma, d_beta, d_bias1 = linear.folded_gradients(gradient, known, first, norm_weight, norm_bias)
    return (
        dx.view(x.shape), like_parameter(d_gamma, norm_weight, x), like_parameter(d_beta, norm_bias, x),
        d_first, like_parameter(d_bias1, fc1_bias, x), d_second, like_parameter(d_bias2, fc2_bias, x),
        like_parameter(d_scale, layer_scale, x),
    )  # fmt: skip


@layer_norm_mlp_backward_op.register_fake
def _(
    grad_output: Tensor, x: Tensor, z: Tensor, statistics: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parameters = (norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)
    gradients = (no_tensor(x) if p is None else p.new_empty(p.shape) for p in parameters)
    return (x.new_empty(x.shape), *gradients)  # type: ignore[return-value]  # seven parameters, seven gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, *parameters, ctx.eps, ctx.activation, ctx.residual, _ = inputs
    _, emitted, z, statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(emitted, z, statistics)
    ctx.save_for_backward(x, z, statistics, *parameters)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, z, statistics, *parameters = ctx.saved_tensors
    if grad_output is None:
        return (None,) * 13
    dx, *gradients = _backward_kernels(
        grad_output, x, z, statistics, *parameters, ctx.eps, ctx.activation, ctx.residual
    )
    present = [None if parameter is None else gradient for parameter, gradient in zip(parameters, gradients)]
    return (dx, None, *present, None, None, None, None)


layer_norm_mlp_training_op.register_autograd(_backward, setup_context=_save)
layer_norm_mlp_backward_op.register_autograd(refuse_double_backward("layer_norm_mlp"))
layer_norm_mlp_training = transformable("layer_norm_mlp", layer_norm_mlp_training_op, _save, _backward)
_backward_kernels = transformable("layer_norm_mlp", layer_norm_mlp_backward_op)
for _operator in (layer_norm_mlp_op, layer_norm_mlp_training_op, layer_norm_mlp_backward_op):
    _operator.register_vmap(refuse_vmap("layer_norm_mlp"))


def layer_norm_mlp_flop(rows: int, width: int, hidden: int) -> int:
    """FLOP of a forward, 2 a multiply-add: two matmuls. A backward has four."""
    return 4 * rows * width * hidden


@register_flop_formula([torch.ops.vit_fast.layer_norm_mlp, torch.ops.vit_fast.layer_norm_mlp_training])
def _(x: Any, statistics: Any, norm_weight: Any, norm_bias: Any, fc1_weight: Any, *args: Any, **kwargs: Any) -> int:
    return layer_norm_mlp_flop(rows_of(x), int(x[-1]), int(fc1_weight[0]))


@register_flop_formula(torch.ops.vit_fast.layer_norm_mlp_backward)
def _(grad_output: Any, x: Any, z: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * layer_norm_mlp_flop(rows_of(x), int(x[-1]), int(z[1]))
