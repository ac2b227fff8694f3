"""A whole encoder block as one operator: what four operators do one after another, for one call of torch's dispatcher.

- `vit_fast::block` for inference;
- `vit_fast::block_training`, which also returns what `vit_fast::block_backward` needs.

Each is made of the functions of the operators in `linear_op.py`, `attention_op.py` and `layer_norm_mlp_op.py`, so that
they are the definition: the same kernels, the same bits. Where several operators would do the same, one launch does it
for all: folding, the products of the weight gradients, the gradients of the parameters. Statistics are as there. With
`qkv_sum` and `fc1_sum` the LayerNorms are folded already, as `fold` in `block.py` does.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from .attention_op import attention_flop
from .attention_varlen_op import attention_forward, attention_gradient
from .checks import contiguous_rows, no_tensor, refuse_double_backward, refuse_vmap, rows_of
from .flops import flop_formula
from .hidden_norm import hidden_gradient
from .kept_rows import fake_made_rows, fake_statistics, input_dtype, rows_to_keep
from .layer_norm_mlp_op import (
    fake_hidden_rows,
    folded_mlp,
    folded_mlp_training,
    hidden_linear,
    layer_norm_mlp_flop,
    mlp_gradient,
    normed_hidden,
    normed_mlp,
)
from .linear_op import (
    branch_gradients,
    branch_products,
    folded_gradients,
    folded_linear,
    folded_linear_training,
    gate_gradients,
    linear_residual_op,
    normed_linear,
    normed_rows,
)
from .operators import differentiable, fake, function_of, operator
from .qkv import qkv_step
from .rotary_op import norm_gradients
from .transforms import transformable

if TYPE_CHECKING:
    from ..kernels.linear.folding import FoldedLinear

_residual = function_of(linear_residual_op)


class Kept(Protocol):
    """A folding that is kept from call to call."""

    def ensure_current(self) -> None:
        """Folds again, into the same memory, where the weights are seen to have changed."""

    def forget(self, stepped: set[int] | None) -> None:
        """Is not current, if it is made of one of these tensors, by id; None stands for all."""


KEPT: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
"""By the address of the folded weight of qkv."""


def _ensure_current(x: Tensor, statistics: Tensor | None, *tensors: Any) -> None:
    """Runs before every launch, also of a compiled graph, where nobody else could look."""
    if KEPT and (kept := KEPT.get(tensors[2].data_ptr())) is not None:
        kept.ensure_current()


@operator("vit_fast::block", before=_ensure_current)
def block_op(
    x: Tensor, statistics: Tensor | None, norm1_weight: Tensor | None, norm1_bias: Tensor | None,
    qkv_weight: Tensor, qkv_bias: Tensor | None, proj_weight: Tensor, proj_bias: Tensor | None,
    scale1: Tensor | None, norm2_weight: Tensor | None, norm2_bias: Tensor | None, fc1_weight: Tensor,
    fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, scale2: Tensor | None,
    gate_weight: Tensor | None, gate_bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    cu_seqlens: Tensor | None, key_mask: Tensor | None, qkv_sum: Tensor | None, fc1_sum: Tensor | None,
    heads: int, attention_scale: float, eps1: float, eps2: float, norm: str, activation: str, qk_norm: str,
    qk_eps: float, over: str, prefix: int, layout: str, longest: int, next_statistics: bool, dtype: torch.dtype,
    inner_weight: Tensor | None, inner_bias: Tensor | None, fc2_sum: Tensor | None, inner_norm: str, inner_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The block's output [B, N, C] for x [B, N, C], and with `next_statistics` those of its rows, which are of half
    precision. `cu_seqlens` and `longest` as in `attention_varlen` make x a packed batch [1, total, C]."""
    from ..kernels.linear.scaled_weights import in_dtype

    step = qkv_step(
        q_weight, q_bias, k_weight, k_bias, cos, sin, qk_norm, qk_eps, over, prefix, layout,
        qkv_weight.shape[0] // (3 * heads), qkv_sum is not None, dtype,
    )  # fmt: skip
    first, second, *third = _folded(
        x, norm1_weight, norm1_bias, qkv_weight, qkv_bias, norm2_weight, norm2_bias, fc1_weight, fc1_bias, fc2_weight,
        fc2_bias, scale2, gate_weight, gate_bias, step.paired_head, norm, dtype,
        inner_weight, inner_bias, inner_norm, qkv_sum, fc1_sum, fc2_sum,
    )  # fmt: skip
    qkv = folded_linear(x, statistics, first, eps1, dtype, step.of_heads(x.shape[1])).unflatten(-1, (3, heads, -1))
    step.check(qkv)
    mixed, _ = attention_forward(step.forward(qkv)[0], cu_seqlens, key_mask, longest, attention_scale)
    if not third:  # both in one launch; with a norm inside fc2 is folded
        proj_weight, fc2_weight = in_dtype(dtype, proj_weight, fc2_weight)
    wanted = x.dtype != torch.float32  # fp32 rows are normalised by who reads them
    x, between = _residual(mixed.flatten(2), proj_weight, proj_bias, scale1, x, wanted)
    known = between if wanted else None
    gated = second.shift.shape[0] != fc2_weight.shape[1]
    return folded_mlp(
        x, known, second, fc2_weight, fc2_bias, scale2, eps2, activation, gated, True, next_statistics, dtype,
        hidden_linear(third, inner_eps),
    )  # fmt: skip


def _folded(
    x: Tensor, norm1_weight: Tensor | None, norm1_bias: Tensor | None, qkv_weight: Tensor, qkv_bias: Tensor | None,
    norm2_weight: Tensor | None, norm2_bias: Tensor | None, fc1_weight: Tensor, fc1_bias: Tensor | None,
    fc2_weight: Tensor, fc2_bias: Tensor | None, scale2: Tensor | None,
    gate_weight: Tensor | None, gate_bias: Tensor | None, paired_head: int, norm: str, dtype: torch.dtype,
    inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str,
    qkv_sum: Tensor | None = None, fc1_sum: Tensor | None = None, fc2_sum: Tensor | None = None,
) -> list[FoldedLinear]:  # fmt: skip
    """qkv and fc1 with the norms before them, and fc2 where there is one inside: folded already where the sums are
    there, else in one launch for every two."""
    from ..kernels.linear.folding import FoldedLinear, fold_linears

    qkv = normed_linear(x, norm1_weight, norm1_bias, qkv_weight, qkv_bias, norm, dtype, paired_head)
    fc1 = normed_mlp(
        x, norm2_weight, norm2_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, scale2, gate_weight, gate_bias,
        norm, dtype,
    )  # fmt: skip
    fc2 = normed_hidden(x, inner_weight, inner_bias, fc2_weight, fc2_bias, inner_norm, dtype)
    if qkv_sum is None:
        return fold_linears([qkv, fc1, *fc2], dtype)
    if qkv_weight.dtype != dtype:
        reason = f"its weights were folded for {qkv_weight.dtype}, the matmuls are of {dtype}: fold them again"
        raise UnsupportedInputError("a block of folded weights", [reason])
    folded: Any = [(qkv_weight, qkv_sum, qkv_bias), (fc1_weight, fc1_sum, fc1_bias)]
    folded += [(fc2_weight, fc2_sum, fc2_bias)] if fc2 else []
    return [FoldedLinear(weight, sums if sums.numel() else None, shift) for weight, sums, shift in folded]


@fake(block_op)
def _(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    wanted = args[39]
    return x.new_empty(x.shape), fake_statistics(x, x.shape[-1], wanted)


@operator("vit_fast::block_training")
def block_training_op(
    x: Tensor, statistics: Tensor | None, norm1_weight: Tensor | None, norm1_bias: Tensor | None,
    qkv_weight: Tensor, qkv_bias: Tensor | None, proj_weight: Tensor, proj_bias: Tensor | None,
    scale1: Tensor | None, norm2_weight: Tensor | None, norm2_bias: Tensor | None, fc1_weight: Tensor,
    fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, scale2: Tensor | None,
    gate_weight: Tensor | None, gate_bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    cu_seqlens: Tensor | None, key_mask: Tensor | None,
    heads: int, attention_scale: float, eps1: float, eps2: float, norm: str, activation: str, qk_norm: str,
    qk_eps: float, over: str, prefix: int, layout: str, longest: int, next_statistics: bool, dtype: torch.dtype,
    inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str, inner_eps: float,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """As `block`, and for the backward: the rows and statistics that the first LayerNorm made, qkv [B, N, 3, H, D], the
    attention's output [B, N, H, D] and log-sum-exp, rows and statistics of the second LayerNorm, fc1's output, qkv
    before its norms, where it has any, and what `kernels/linear/hidden_norm.py` keeps of a norm inside the MLP."""
    from ..kernels.linear.scaled_weights import in_dtype

    step = qkv_step(
        q_weight, q_bias, k_weight, k_bias, cos, sin, qk_norm, qk_eps, over, prefix, layout,
        qkv_weight.shape[0] // (3 * heads), False,
    )  # fmt: skip
    folded = _folded(
        x, norm1_weight, norm1_bias, qkv_weight, qkv_bias, norm2_weight, norm2_bias, fc1_weight, fc1_bias, fc2_weight,
        fc2_bias, scale2, gate_weight, gate_bias, step.paired_head, norm, dtype,
        inner_weight, inner_bias, inner_norm,
    )  # fmt: skip
    flat, *first = folded_linear_training(x, statistics, folded[0], eps1, dtype, step.of_heads(x.shape[1]))
    qkv = flat.unflatten(-1, (3, heads, -1))
    step.check(qkv)
    qkv, before_norm = step.forward(qkv, keep=True)
    mixed, lse = attention_forward(qkv, cu_seqlens, key_mask, longest, attention_scale)
    if not folded[2:]:  # both in one launch; with a norm inside fc2 is folded
        proj_weight, fc2_weight = in_dtype(dtype, proj_weight, fc2_weight)
    wanted = x.dtype != torch.float32
    x, between = _residual(mixed.flatten(2), proj_weight, proj_bias, scale1, x, wanted)
    known = between if wanted else None
    y, emitted, z, *made, branch, hidden = folded_mlp_training(
        x, known, folded[1], fc2_weight, fc2_bias, scale2, eps2, activation, gate_weight is not None, True,
        next_statistics, dtype, hidden_linear(folded[2:], inner_eps),
    )  # fmt: skip
    second, rest = rows_to_keep(x, *made), (z, before_norm, branch, hidden)
    return y, emitted, *first, qkv, mixed, lse, *second, *rest  # type: ignore[return-value]  # thirteen


@fake(block_training_op)
def _(x: Tensor, statistics: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    qkv_weight, fc1_weight, gate_weight = args[2], args[9], args[14]
    heads, _, _, _, _, _, qk_norm, *_, wanted, dtype, _, _, inner_norm, _ = args[24:]
    (B, N, _), width = x.shape, qkv_weight.shape[0] // 3
    qkv = x.new_empty((B, N, 3, heads, width // heads), dtype=dtype)
    mixed = x.new_empty((B, N, heads, width // heads), dtype=dtype)
    lse = x.new_empty((B, heads, N), dtype=torch.float32)
    second = fake_made_rows(x, dtype)
    if x.dtype != torch.float32:
        second = x.new_empty(x.shape), second[1]
    hidden = fc1_weight.shape[0] * (1 if gate_weight is None else 2)
    return (
        x.new_empty(x.shape), fake_statistics(x, x.shape[-1], wanted), *fake_made_rows(x, dtype),
        qkv, mixed, lse, *second, x.new_empty((B * N, hidden), dtype=dtype),
        no_tensor(qkv) if qk_norm == "none" else torch.empty_like(qkv), *fake_hidden_rows(x, inner_norm),
    )  # fmt: skip


@operator("vit_fast::block_backward")
def block_backward_op(
    grad_output: Tensor, rows1: Tensor, statistics1: Tensor, qkv: Tensor, mixed: Tensor, lse: Tensor, rows2: Tensor,
    statistics2: Tensor, z: Tensor, before_norm: Tensor, branch: Tensor, hidden: Tensor,
    norm1_weight: Tensor | None, norm1_bias: Tensor | None, qkv_weight: Tensor, qkv_bias: Tensor | None,
    proj_weight: Tensor, proj_bias: Tensor | None, scale1: Tensor | None,
    norm2_weight: Tensor | None, norm2_bias: Tensor | None,
    fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, scale2: Tensor | None,
    gate_weight: Tensor | None, gate_bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    cu_seqlens: Tensor | None, key_mask: Tensor | None,
    attention_scale: float, norm: str, activation: str, qk_norm: str, qk_eps: float, over: str, prefix: int,
    layout: str, longest: int, inner_weight: Tensor | None, inner_bias: Tensor | None, inner_norm: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Gradients of x, of the twenty parameters and the two of a norm inside the MLP; of an absent one an empty
    tensor."""
    from ..kernels.linear import linear, scaled_weights, vector_gradients, weight_products
    from ..kernels.linear.weight_gradients import FoldedProducts

    step = qkv_step(
        q_weight, q_bias, k_weight, k_bias, cos, sin, qk_norm, qk_eps, over, prefix, layout, qkv.shape[-1], False
    )  # fmt: skip
    proj, fc2 = proj_weight.contiguous(), fc2_weight.contiguous()
    known1, qkv_parts = normed_rows(rows1, statistics1, norm1_weight, norm1_bias, qkv_weight, qkv_bias, norm)
    known2, fc1_parts = normed_rows(
        rows2, statistics2, norm2_weight, norm2_bias, fc1_weight, fc1_bias, norm, gate_weight, gate_bias
    )
    inner = hidden_gradient(branch, hidden, inner_weight, inner_bias, fc2_weight, fc2_bias, scale2, inner_norm)
    # with a norm inside, fc2 is folded first
    scaled_proj, plain_qkv, *scaled_fc2 = scaled_weights.scaled_weights(
        [(proj, scale1), (qkv_parts.weight, None), *([(fc2, scale2)] if inner is None else [])], z.dtype
    )
    second = scaled_fc2[0] if scaled_fc2 else None
    (stream, d_proj), d_fc1, d_fc2, h = mlp_gradient(
        contiguous_rows(grad_output), known2, z, fc1_parts, second, activation, True, inner, rounded=True
    )  # fmt: skip
    d_mixed = linear.product_gradient(d_proj, scaled_proj).view(mixed.shape)
    d_packed = attention_gradient(d_mixed, qkv, mixed, lse, cu_seqlens, key_mask, longest, attention_scale)
    norm_sums = step.backward(d_packed, before_norm)
    d_qkv = contiguous_rows(d_packed.flatten(2))
    dx, normalised, sums = linear.layer_norm_linear_gradient(d_qkv, known1, qkv_parts, plain_qkv.weight, stream)
    qkv_part, proj_part, fc1_part, fc2_part = weight_products.weight_products(
        (d_qkv, normalised), (d_proj, contiguous_rows(mixed.flatten(2))), (d_fc1.scaled, known2.source), (d_fc2, h)
    )
    of_proj = branch_products(proj_part, d_proj, proj, proj_bias, scale1)
    of_fc2 = [] if inner is not None else [branch_products(fc2_part, d_fc2, fc2, fc2_bias, scale2)]
    folded, branches = vector_gradients.parameter_gradients(
        [FoldedProducts(qkv_part, sums, qkv_parts), FoldedProducts(fc1_part, d_fc1.column_part, fc1_parts)],
        [of_proj, *of_fc2],
    )
    if inner is None:
        behind, of_inner = branch_gradients(branches[1], rows1), (no_tensor(rows1), no_tensor(rows1))
    else:
        (found,), _ = vector_gradients.parameter_gradients([inner.products(fc2_part)], [])
        behind, of_inner = inner.gradients(found, rows1)
    of_attention = *folded_gradients(folded[0], rows1), *branch_gradients(branches[0], rows1)
    of_mlp = *folded_gradients(folded[1], rows1), *behind, *gate_gradients(folded[1], rows1)
    of_qk = norm_gradients(norm_sums, (q_weight, q_bias, k_weight, k_bias), rows1)
    return dx.view(grad_output.shape), *of_attention, *of_mlp, *of_qk, *of_inner


@fake(block_backward_op)
def _(grad_output: Tensor, rows1: Tensor, statistics1: Tensor, *args: Any) -> tuple[Tensor, ...]:
    parameters = *args[9:29], *args[-3:-1]
    gradients = (no_tensor(rows1) if p is None else p.new_empty(p.shape) for p in parameters)
    return rows1.new_empty(grad_output.shape, dtype=input_dtype(rows1, statistics1)), *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, *tensors = inputs[:26]
    _, attention_scale, _, _, norm, activation, *of_attention, _, _ = inputs[26:40]
    *inner, ctx.inner_norm, _ = inputs[40:]
    ctx.settings = attention_scale, norm, activation, *of_attention
    _, emitted, rows, statistics, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(emitted, rows, statistics, *kept)
    ctx.save_for_backward(*rows_to_keep(x, rows, statistics), *kept, *tensors, *inner)


def _backward(ctx: Any, grad_output: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 44
    saved = ctx.saved_tensors  # once: under checkpointing a second look is an error
    dx, *gradients = _backward_kernels(grad_output, *saved[:-2], *ctx.settings, *saved[-2:], ctx.inner_norm)
    given = *saved[11:31], *saved[-2:]
    present = [None if parameter is None else gradient for parameter, gradient in zip(given, gradients)]
    return (dx, None, *present[:20], *(None,) * 18, *present[20:], None, None)


differentiable(block_training_op, _save, _backward)
differentiable(block_backward_op, None, refuse_double_backward("a block"))
block_training = transformable("a block", block_training_op, _save, _backward)
_backward_kernels = transformable("a block", block_backward_op)
for _operator in (block_op, block_training_op, block_backward_op):
    torch.library.register_vmap(_operator, refuse_vmap("a block"))


def _block_flop(rows: int, keys: int, width: int, inner: int, hidden: int, gated: bool) -> tuple[int, int]:
    """FLOP of the matmuls and of the attention of a forward.

    Args:
        rows: Of all images.
        keys: That a query meets; of packed sequences at most: the shapes tell no more.
        inner: H D.
    """
    matmuls = 2 * rows * width * (3 * inner + inner) + layer_norm_mlp_flop(rows, width, hidden, gated)
    return matmuls, attention_flop(1, 1, rows, keys, inner)


@flop_formula([torch.ops.vit_fast.block, torch.ops.vit_fast.block_training])
def _(x: Any, statistics: Any, *args: Any, **kwargs: Any) -> int:
    inner, hidden = int(args[2][0]) // 3, int(args[11][1])  # of qkv; of fc2, as fc1 may be folded with its gate
    gated = args[14] is not None or int(args[9][0]) != hidden
    longest = args[-8] if len(args) == 45 else args[-7]  # inference has three sums of folded weights more
    keys = int(x[-2]) if args[22] is None else longest
    return sum(_block_flop(rows_of(x), keys, int(x[-1]), inner, hidden, gated))


@flop_formula(torch.ops.vit_fast.block_backward)
def _(grad_output: Any, *args: Any, **kwargs: Any) -> int:
    inner, hidden, gated = int(args[13][0]) // 3, int(args[22][1]), args[25] is not None
    keys, width = int(grad_output[-2]) if args[33] is None else args[-4], int(grad_output[-1])
    matmuls, attention = _block_flop(rows_of(grad_output), keys, width, inner, hidden, gated)
    return 2 * matmuls + attention * 5 // 2
