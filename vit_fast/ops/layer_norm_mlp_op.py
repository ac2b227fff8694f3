"""The LayerNorm + MLP kernels as torch operators: schema, checks, fake implementations, autograd, FLOP formulas.

- `vit_fast::layer_norm_mlp` for inference;
- `vit_fast::layer_norm_mlp_training`, which also returns what `vit_fast::layer_norm_mlp_backward` needs.

Statistics are as in `kept_rows.py`: a function of their rows, handed from one operator to the next so that they need
not be computed twice. The gradient through them is part of the LayerNorm's own.

Only torch is needed to register and trace them; Triton and the kernels are imported when one first runs.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from .hidden_norm import HiddenGradient, hidden_gradient
from .kept_rows import fake_made_rows, fake_statistics, input_dtype, made_rows, rows_to_keep
from .linear_op import branch_gradients, branch_products, folded_gradients, gate_gradients, normed_rows
from .operators import differentiable, fake, operator
from .transforms import transformable

if TYPE_CHECKING:
    from ..kernels.layer_norm import RowStatistics
    from ..kernels.linear.folding import FoldedLinear, NormedLinear
    from ..kernels.linear.hidden_norm import HiddenLinear, HiddenRows
    from ..kernels.linear.linear import FoldedGradient
    from ..kernels.linear.scaled_weights import ScaledWeight


@operator("vit_fast::layer_norm_mlp")
def layer_norm_mlp_op(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
    inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str, inner_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[x +] ls (act(LN(x) W1^T + b1) W2^T + b2) [..., C] by matmuls of `dtype`, and with `next_statistics` those
    of its rows, which are of half precision."""
    from ..kernels.linear import folding

    normed = normed_mlp(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, gate_weight, gate_bias,
        norm, dtype,
    )  # fmt: skip
    second = normed_hidden(x, inner_weight, inner_bias, fc2_weight, fc2_bias, inner_norm, dtype)
    folded, *rest = folding.fold_linears([normed, *second], dtype)
    return folded_mlp(
        x, statistics, folded, fc2_weight, fc2_bias, layer_scale,
        eps, activation, gate_weight is not None, residual, next_statistics, dtype, hidden_linear(rest, inner_eps),
    )  # fmt: skip


@fake(layer_norm_mlp_op)
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
    inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str, inner_eps: float,
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
    inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str, inner_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `layer_norm_mlp`, and for the backward fc1's output z [M, F], with a gate [M, 2 F] of both by turns, the rows
    and statistics that it made, and with a norm inside what `hidden_norm.py` keeps."""
    from ..kernels.linear import folding

    normed = normed_mlp(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, gate_weight, gate_bias,
        norm, dtype,
    )  # fmt: skip
    second = normed_hidden(x, inner_weight, inner_bias, fc2_weight, fc2_bias, inner_norm, dtype)
    folded, *rest = folding.fold_linears([normed, *second], dtype)
    return folded_mlp_training(
        x, statistics, folded, fc2_weight, fc2_bias, layer_scale,
        eps, activation, gate_weight is not None, residual, next_statistics, dtype, hidden_linear(rest, inner_eps),
    )  # fmt: skip


@fake(layer_norm_mlp_training_op)
def _(
    x: Tensor, statistics: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None, eps: float, norm: str,
    activation: str, residual: bool, next_statistics: bool, dtype: torch.dtype,
    inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str, inner_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(x.shape, dtype=_output_dtype(x, layer_scale, residual, dtype))
    hidden = fc1_weight.shape[0] * (1 if gate_weight is None else 2)
    z = x.new_empty((x.numel() // x.shape[-1], hidden), dtype=dtype)
    hidden_rows = fake_hidden_rows(y, inner_norm)
    return y, fake_statistics(x, x.shape[-1], next_statistics), z, *fake_made_rows(x, dtype), *hidden_rows


def fake_hidden_rows(y: Tensor, inner_norm: str) -> tuple[Tensor, Tensor]:
    """Room for what the backward needs of a norm inside, where the result is y [..., C]."""
    if inner_norm == "none":
        return no_tensor(y), no_tensor(y)
    M = y.numel() // y.shape[-1]
    return y.new_empty((M, y.shape[-1])), y.new_empty((2, M), dtype=torch.float32)


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
    from ..kernels.linear.folding import NormedLinear

    return NormedLinear(fc1_weight, fc1_bias, norm_weight, norm_bias, is_rms(norm), gate_weight, gate_bias)


def normed_hidden(
    x: Tensor, inner_weight: Tensor | None, inner_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None,
    inner_norm: str, dtype: torch.dtype,
) -> list[NormedLinear]:  # fmt: skip
    """The norm inside, checked, and fc2, to be folded; nothing where there is none."""
    if inner_norm == "none":
        return []
    require_supported("layer_norm_mlp", x, {"inner_norm.weight": inner_weight, "inner_norm.bias": inner_bias}, dtype)
    from ..kernels.linear.folding import NormedLinear

    return [NormedLinear(fc2_weight, fc2_bias, inner_weight, inner_bias, is_rms(inner_norm))]


def hidden_linear(folded: Sequence[FoldedLinear], eps: float) -> HiddenLinear | None:
    """What was folded of `normed_hidden`, with the norm's epsilon."""
    from ..kernels.linear.hidden_norm import HiddenLinear

    return HiddenLinear(folded[0], eps) if folded else None


def folded_mlp(
    x: Tensor, statistics: Tensor | None, folded: FoldedLinear, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, gated: bool, residual: bool, next_statistics: bool,
    dtype: torch.dtype, inner: HiddenLinear | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`layer_norm_mlp` of an fc1 that is folded already; where `inner` is given, of such an fc2 as well."""
    from ..kernels import layer_norm
    from ..kernels.linear import linear

    rows = contiguous_rows(x)
    known = layer_norm.input_rows(rows, eps, statistics, dtype, folded.weight_sum is None)
    part = _hidden_part(rows, fc2_weight, dtype, inner)
    h = linear.layer_norm_linear(known, folded, activation, gated, out_part=part)
    y, emitted, _ = _fc2_residual(
        x, h, part, fc2_weight, fc2_bias, layer_scale, rows if residual else None, next_statistics, dtype, inner, False
    )
    return y, emitted


def folded_mlp_training(
    x: Tensor, statistics: Tensor | None, folded: FoldedLinear, fc2_weight: Tensor, fc2_bias: Tensor | None,
    layer_scale: Tensor | None, eps: float, activation: str, gated: bool, residual: bool, next_statistics: bool,
    dtype: torch.dtype, inner: HiddenLinear | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`layer_norm_mlp_training` of an fc1 that is folded already; where `inner` is given, of such an fc2 as well."""
    from ..kernels import layer_norm
    from ..kernels.linear import linear

    rows = contiguous_rows(x)
    known = layer_norm.input_rows(rows, eps, statistics, dtype, folded.weight_sum is None)
    part = _hidden_part(rows, fc2_weight, dtype, inner)
    h, z, kept = linear.layer_norm_linear_keeping(known, folded, activation, gated, out_part=part)
    y, emitted, hidden = _fc2_residual(
        x, h, part, fc2_weight, fc2_bias, layer_scale, rows if residual else None, next_statistics, dtype, inner, True
    )
    of_hidden = (no_tensor(x), no_tensor(x)) if hidden is None else (hidden.branch, hidden.statistics)
    return y, emitted, z, *made_rows(x, kept), *of_hidden


def _hidden_part(rows: Tensor, fc2_weight: Tensor, dtype: torch.dtype, inner: HiddenLinear | None) -> Tensor | None:
    """Room for the statistics of the hidden layer's rows, where a norm of half-precision ones comes next."""
    from ..kernels import layer_norm

    if inner is None or dtype == torch.float32:
        return None
    return layer_norm.new_statistics(rows.shape[0], fc2_weight.shape[1], rows.device)


def _fc2_residual(
    x: Tensor, h: Tensor, part: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, layer_scale: Tensor | None,
    base: Tensor | None, next_statistics: bool, dtype: torch.dtype, inner: HiddenLinear | None, keep: bool,
) -> tuple[Tensor, Tensor, HiddenRows | None]:  # fmt: skip
    """The result like x, statistics of its rows, and with `keep` what the backward of a norm inside needs."""
    from ..kernels import layer_norm
    from ..kernels.linear import hidden_norm, linear, scaled_weights

    sum_dtype, hidden = _output_dtype(x, layer_scale, base is not None, dtype), None
    emitted: Tensor | None
    if inner is None:
        (weight,) = scaled_weights.in_dtype(dtype, fc2_weight)
        y, emitted = linear.linear_residual(h, weight, fc2_bias, layer_scale, base, next_statistics, sum_dtype)
    else:
        emitted = layer_norm.new_statistics(h.shape[0], x.shape[-1], x.device) if next_statistics else None
        y, hidden = hidden_norm.hidden_linear_residual(h, part, inner, layer_scale, base, emitted, sum_dtype, keep)
    return y.view(x.shape), no_tensor(x) if emitted is None else emitted, hidden


@operator("vit_fast::layer_norm_mlp_backward")
def layer_norm_mlp_backward_op(
    grad_output: Tensor, rows: Tensor, statistics: Tensor, z: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor,
    fc2_bias: Tensor | None, layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None,
    norm: str, activation: str, residual: bool,
    branch: Tensor, hidden: Tensor, inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Gradients of x, of the nine parameters and the two of a norm inside; of an absent one an empty tensor."""
    from ..kernels.linear import scaled_weights, vector_gradients, weight_products
    from ..kernels.linear.weight_gradients import FoldedProducts

    known, first = normed_rows(
        rows, statistics, norm_weight, norm_bias, fc1_weight, fc1_bias, norm, gate_weight, gate_bias
    )
    inner = hidden_gradient(branch, hidden, inner_weight, inner_bias, fc2_weight, fc2_bias, layer_scale, inner_norm)
    second, stream = fc2_weight.contiguous(), contiguous_rows(grad_output)
    scaled = None if inner is not None else scaled_weights.scaled_weights([(second, layer_scale)], z.dtype)[0]
    (dx, _), gradient, dy, h = mlp_gradient(stream, known, z, first, scaled, activation, residual, inner)
    part, last = weight_products.weight_products((gradient.scaled, known.source), (dy, h))
    of_first = FoldedProducts(part, gradient.column_part, first)
    if inner is None:
        of_second = branch_products(last, dy, second, fc2_bias, layer_scale)
        (found,), (made,) = vector_gradients.parameter_gradients([of_first], [of_second])
        of_branch, of_inner = branch_gradients(made, rows), (no_tensor(rows), no_tensor(rows))
    else:
        (found, behind), _ = vector_gradients.parameter_gradients([of_first, inner.products(last)], [])
        of_branch, of_inner = inner.gradients(behind, rows)
    of_linears = *folded_gradients(found, rows), *of_branch
    return dx.view(grad_output.shape), *of_linears, *gate_gradients(found, rows), *of_inner


def mlp_gradient(
    stream: Tensor, known: RowStatistics, z: Tensor, first: NormedLinear, second: ScaledWeight | None, activation: str,
    residual: bool, inner: HiddenGradient | None = None, rounded: bool = False,
) -> tuple[tuple[Tensor, Tensor], FoldedGradient, Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of fc1's output, that of fc2's in the dtype of the matmuls, and fc2's input; rows [M, *].

    Args:
        stream: The gradient of the result [M, C].
        second: fc2's weight [C, F] with its LayerScale; None where `inner` has both.
        inner: Of a norm between h and fc2, if there is one; fc2's input is then what it makes without its affine.
        rounded: Whether the second gradient of x is in the dtype of the matmuls; else it is the first.
    """
    from ..kernels.linear import folding, linear, scaled_weights

    dy, linears, hidden, along = stream.to(z.dtype), [first], None, None
    if inner is not None:
        linears, hidden, along = [first, inner.linear], inner.statistics, inner.along(dy)
    folded, *behind = folding.fold_linears(linears, z.dtype)
    if inner is not None:
        (second,) = scaled_weights.scaled_weights([(behind[0].weight, inner.scale)], z.dtype)
    assert second is not None, "fc2's weight is given, or folded with its norm"
    gated = first.gate is not None
    gradient, h = linear.activation_gradient(dy, second, z, known, folded, activation, gated, hidden, along)
    dx = linear.input_gradient(gradient, known, folded, stream if residual else None, rounded)
    return dx, gradient, dy, h


@fake(layer_norm_mlp_backward_op)
def _(
    grad_output: Tensor, rows: Tensor, statistics: Tensor, z: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor,
    fc2_bias: Tensor | None, layer_scale: Tensor | None, gate_weight: Tensor | None, gate_bias: Tensor | None,
    norm: str, activation: str, residual: bool,
    branch: Tensor, hidden: Tensor, inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    parameters = (
        norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, gate_weight, gate_bias,
        inner_weight, inner_bias,
    )  # fmt: skip
    gradients = (no_tensor(rows) if p is None else p.new_empty(p.shape) for p in parameters)
    dx = rows.new_empty(grad_output.shape, dtype=input_dtype(rows, statistics))
    return (dx, *gradients)  # type: ignore[return-value]  # eleven parameters, eleven gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, *parameters, _, norm, activation, residual, _, _, inner_weight, inner_bias, inner_norm, _ = inputs
    _, emitted, z, rows, statistics, branch, hidden = output
    ctx.settings, ctx.inner_norm = (norm, activation, residual), inner_norm
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(emitted, z, rows, statistics, branch, hidden)
    kept = rows_to_keep(x, rows, statistics)
    ctx.save_for_backward(*kept, z, *parameters, branch, hidden, inner_weight, inner_bias)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_output is None:
        return (None,) * 21
    dx, *gradients = _backward_kernels(grad_output, *saved[:-4], *ctx.settings, *saved[-4:], ctx.inner_norm)
    given = (*saved[3:-4], *saved[-2:])
    present = [None if parameter is None else gradient for parameter, gradient in zip(given, gradients)]
    return (dx, None, *present[:-2], *(None,) * 6, *present[-2:], None, None)


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
