"""The LayerNorm + MLP kernels as torch operators: schema, checks, fake implementations, autograd, FLOP formulas.

- `vit_fast::layer_norm_mlp` for inference;
- `vit_fast::layer_norm_mlp_training`, which also returns what `vit_fast::layer_norm_mlp_backward` needs.

Statistics are as in `kept_rows.py`: a function of their rows, handed from one operator to the next so that they need
not be computed twice. The gradient through them is part of the LayerNorm's own.

Only torch is needed to register and trace them; Triton and the kernels are imported when one first runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import (
    contiguous_rows,
    no_tensor,
    refuse_double_backward,
    refuse_vmap,
    require_supported,
    rows_of,
)
from .descriptions import is_rms
from .flops import flop_formula
from .kept_rows import fake_made_rows, fake_statistics, input_dtype, made_rows, rows_to_keep
from .linear_op import branch_gradients, branch_products, folded_gradients, gate_gradients, normed_rows
from .operators import differentiable, fake, operator
from .transforms import transformable

if TYPE_CHECKING:
    from ..kernels.folding import FoldedLinear, NormedLinear
    from ..kernels.layer_norm import RowStatistics
    from ..kernels.linear import FoldedGradient
    from ..kernels.scaled_weights import ScaledWeight


@operator("vit_fast::layer_norm_mlp")
def layer_norm_mlp_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[x +] ls (act(LN(x) W1^T + b1) W2^T + b2) [..., C] by matmuls of `dtype`, and with `next_statistics` those
    of its rows, which are of half precision."""
    from ..kernels import folding

    normed = normed_mlp(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, gate_weight, gate_bias,
        norm, dtype,
    )  # fmt: skip
    return folded_mlp(
        x, statistics, folding.fold_linear(normed, dtype), fc2_weight, fc2_bias, layer_scale,
        eps, activation, gate_weight is not None, residual, next_statistics, dtype,
    )  # fmt: skip


@fake(layer_norm_mlp_op)
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(x.shape, dtype=_output_dtype(x, layer_scale, residual, dtype))
    return y, fake_statistics(x, x.shape[-1], next_statistics)


def _output_dtype(x: Tensor, layer_scale: Tensor | None, residual: bool, dtype: torch.dtype) -> torch.dtype:
    """What autocast gives: that of the matmuls, unless x is added or an fp32 LayerScale multiplied."""
    if residual or (layer_scale is not None and layer_scale.dtype == x.dtype):
        return x.dtype
    return dtype


@operator("vit_fast::layer_norm_mlp_training")
def layer_norm_mlp_training_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `layer_norm_mlp`, and for the backward fc1's output z [M, F], with a gate [M, 2 F] of both by turns, and the
    rows and statistics that it made."""
    from ..kernels import folding

    normed = normed_mlp(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, gate_weight, gate_bias,
        norm, dtype,
    )  # fmt: skip
    return folded_mlp_training(
        x, statistics, folding.fold_linear(normed, dtype), fc2_weight, fc2_bias, layer_scale,
        eps, activation, gate_weight is not None, residual, next_statistics, dtype,
    )  # fmt: skip


@fake(layer_norm_mlp_training_op)
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(x.shape, dtype=_output_dtype(x, layer_scale, residual, dtype))
    hidden = fc1_weight.shape[0] * (1 if gate_weight is None else 2)
    z = x.new_empty((x.numel() // x.shape[-1], hidden), dtype=dtype)
    return y, fake_statistics(x, x.shape[-1], next_statistics), z, *fake_made_rows(x, dtype)


def normed_mlp(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None,
    fc2_weight: Tensor, fc2_bias: Tensor | None, layer_scale: Tensor | None, gate_weight: Tensor | None,
    gate_bias: Tensor | None, norm: str, dtype: torch.dtype,
) -> NormedLinear:  # fmt: skip
    """LayerNorm and fc1 of `layer_norm_mlp`, to be folded; all its parameters are checked."""
    parameters = {
        "norm_weight": norm_weight, "norm_bias": norm_bias, "fc1_weight": fc1_weight, "fc1_bias": fc1_bias,
        "fc2_weight": fc2_weight, "fc2_bias": fc2_bias, "layer_scale": layer_scale, "gate_weight": gate_weight,
        "gate_bias": gate_bias,
    }  # fmt: skip
    require_supported("layer_norm_mlp", x, parameters, dtype)
    from ..kernels.folding import NormedLinear

    return NormedLinear(fc1_weight, fc1_bias, norm_weight, norm_bias, is_rms(norm), gate_weight, gate_bias)


def folded_mlp(
    x: Tensor, statistics: Tensor | None, folded: FoldedLinear, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, gated: bool, residual: bool, next_statistics: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`layer_norm_mlp` of an fc1 that is folded already."""
    from ..kernels import layer_norm, linear, scaled_weights

    rows, (second,) = contiguous_rows(x), scaled_weights.in_dtype(dtype, fc2_weight)
    known = layer_norm.input_rows(rows, eps, statistics, dtype, folded.weight_sum is None)
    h = linear.layer_norm_linear(known, folded, activation, gated)
    y, emitted = linear.linear_residual(
        h, second, fc2_bias, layer_scale, rows if residual else None, next_statistics,
        _output_dtype(x, layer_scale, residual, dtype),
    )  # fmt: skip
    return y.view(x.shape), no_tensor(x) if emitted is None else emitted


def folded_mlp_training(
    x: Tensor, statistics: Tensor | None, folded: FoldedLinear, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, gated: bool, residual: bool, next_statistics: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`layer_norm_mlp_training` of an fc1 that is folded already."""
    from ..kernels import layer_norm, linear, scaled_weights

    rows, (second,) = contiguous_rows(x), scaled_weights.in_dtype(dtype, fc2_weight)
    known = layer_norm.input_rows(rows, eps, statistics, dtype, folded.weight_sum is None)
    h, z, kept = linear.layer_norm_linear_keeping(known, folded, activation, gated)
    y, emitted = linear.linear_residual(
        h, second, fc2_bias, layer_scale, rows if residual else None, next_statistics,
        _output_dtype(x, layer_scale, residual, dtype),
    )  # fmt: skip
    return y.view(x.shape), no_tensor(x) if emitted is None else emitted, z, *made_rows(x, kept)


@operator("vit_fast::layer_norm_mlp_backward")
def layer_norm_mlp_backward_op(
    grad_output: Tensor, rows: Tensor, statistics: Tensor, z: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor,
    fc2_bias: Tensor | None, layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None,
    norm: str, activation: str, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the nine parameters; of an absent one an empty tensor."""
    from ..kernels import scaled_weights, vector_gradients, weight_products
    from ..kernels.weight_gradients import FoldedProducts

    known, first = normed_rows(
        rows, statistics, norm_weight, norm_bias, fc1_weight, fc1_bias, norm, gate_weight, gate_bias
    )
    second, stream = fc2_weight.contiguous(), contiguous_rows(grad_output)
    (scaled,) = scaled_weights.scaled_weights([(second, layer_scale)], z.dtype)
    dx, gradient, dy, h = mlp_gradient(stream, known, z, first, scaled, activation, residual)
    part, last = weight_products.weight_products((gradient.scaled, known.source), (dy, h))
    (found,), (made,) = vector_gradients.parameter_gradients(
        [FoldedProducts(part, gradient.column_part, first)],
        [branch_products(last, dy, second, fc2_bias, layer_scale)],
    )
    of_linears = *folded_gradients(found, rows), *branch_gradients(made, rows)
    return dx.view(grad_output.shape), *of_linears, *gate_gradients(found, rows)


def mlp_gradient(
    stream: Tensor, known: RowStatistics, z: Tensor, first: NormedLinear, second: ScaledWeight, activation: str,
    residual: bool,
) -> tuple[Tensor, FoldedGradient, Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of fc1's output, that of fc2's in the dtype of the matmuls, and fc2's input; rows [M, *].

    Args:
        stream: The gradient of the result [M, C].
        second: fc2's weight [C, F] with its LayerScale.
    """
    from ..kernels import folding, linear

    dy, folded = stream.to(z.dtype), folding.fold_linear(first, z.dtype)
    gradient, h = linear.activation_gradient(dy, second, z, known, folded, activation, first.gate is not None)
    return linear.input_gradient(gradient, known, folded, stream if residual else None), gradient, dy, h


@fake(layer_norm_mlp_backward_op)
def _(
    grad_output: Tensor, rows: Tensor, statistics: Tensor, z: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor,
    fc2_bias: Tensor | None, layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None,
    norm: str, activation: str, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parameters = (
        norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, gate_weight, gate_bias
    )  # fmt: skip
    gradients = (no_tensor(rows) if p is None else p.new_empty(p.shape) for p in parameters)
    dx = rows.new_empty(grad_output.shape, dtype=input_dtype(rows, statistics))
    return (dx, *gradients)  # type: ignore[return-value]  # nine parameters, nine gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, *parameters, _, ctx.norm, ctx.activation, ctx.residual, _, _ = inputs
    _, emitted, z, *made = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(emitted, z, *made)
    ctx.save_for_backward(*rows_to_keep(x, *made), z, *parameters)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_output is None:
        return (None,) * 17
    dx, *gradients = _backward_kernels(grad_output, *saved, ctx.norm, ctx.activation, ctx.residual)
    present = [None if parameter is None else gradient for parameter, gradient in zip(saved[3:], gradients)]
    return (dx, None, *present, *(None,) * 6)


differentiable(layer_norm_mlp_training_op, _save, _backward)
differentiable(layer_norm_mlp_backward_op, None, refuse_double_backward("layer_norm_mlp"))
layer_norm_mlp_training = transformable("layer_norm_mlp", layer_norm_mlp_training_op, _save, _backward)
_backward_kernels = transformable("layer_norm_mlp", layer_norm_mlp_backward_op)
for _operator in (layer_norm_mlp_op, layer_norm_mlp_training_op, layer_norm_mlp_backward_op):
    torch.library.register_vmap(_operator, refuse_vmap("layer_norm_mlp"))


def layer_norm_mlp_flop(rows: int, width: int, hidden: int, gated: bool = False) -> int:
    """FLOP of a forward, 2 a multiply-add: two matmuls, three with a gate. A backward has twice as many."""
    return (6 if gated else 4) * rows * width * hidden


@flop_formula([torch.ops.vit_fast.layer_norm_mlp, torch.ops.vit_fast.layer_norm_mlp_training])
def _(x: Any, statistics: Any, norm_weight: Any, norm_bias: Any, fc1_weight: Any, *args: Any, **kwargs: Any) -> int:
    return layer_norm_mlp_flop(rows_of(x), int(x[-1]), int(fc1_weight[0]), args[4] is not None)


@flop_formula(torch.ops.vit_fast.layer_norm_mlp_backward)
def _(grad_output: Any, rows: Any, statistics: Any, z: Any, *args: Any, **kwargs: Any) -> int:
    hidden = int(args[4][1])  # of fc2
    return 2 * layer_norm_mlp_flop(rows_of(rows), int(rows[-1]), hidden, int(z[1]) != hidden)
