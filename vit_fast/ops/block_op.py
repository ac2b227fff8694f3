"""A pre-norm encoder block, or one of its halves, as one operator: `vit_fast::block`.

    x = x + scale1 * proj(attention(qkv(norm1(x))))
    x = x + scale2 * fc2(activation(fc1(norm2(x))))

The whole block is one call of torch's dispatcher. One launch folds the norms into qkv and fc1, and one launch of the
backward computes the matmuls of all weight gradients. With `keep`, the operator also returns the tensors for
`vit_fast::block_backward` (`block_backward.py`). If `qkv_sum` and `fc1_sum` are passed, the norms are already folded
(`fold` in `block.py`).

Blocks pass LayerNorm statistics to each other per piece of columns, fp32 [M, 2, row_parts(C)]. The next layer combines
them and adds its own epsilon (`kernels/row_parts.py`). The backward needs the input of each norm: fp32 tokens are saved
normalised, in the dtype of the matmuls, with rstd as fp32 [1, M]; half-precision tokens are saved unchanged, with
(mean, rstd) as fp32 [2, M].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError
from ..kernels.row_parts import row_parts
from .attention_op import attention_forward
from .block_backward import (
    SETTINGS,
    BlockSettings,
    block_backward_kernel,
    block_flop,
    gradient_names,
    saved_names,
    tensors_of,
)
from .checks import contiguous_rows, require_supported
from .descriptions import BlockTensors, is_rms
from .operators import Gradient, operator
from .rotary import QkTensors, QkvStep, qkv_step

if TYPE_CHECKING:
    from ..kernels.linear.folding import FoldedLinear
    from ..kernels.matmul.matmul_launch import HeadStep


def block_forward(x: Tensor, statistics: Tensor | None, tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    """Runs a block on x [B, N, C], or its second half on x [..., C].

    Args:
        tensors: The tensors of `BlockTensors` and `QkTensors` that are present.
        settings: See `BlockSettings.read`.
    Returns:
        The output; with `next_statistics` its LayerNorm statistics; and with `keep` the tensors that `saved_names`
            lists.
    """
    from ..kernels.linear.linear import linear_residual

    s = BlockSettings.read(settings)
    t, qk = tensors_of(tensors, s)
    saved: dict[str, Tensor] = {}
    rows, step = contiguous_rows(x), None
    if t.qkv_weight is not None:
        head_dim = t.qkv_weight.shape[0] // (3 * s.heads)
        step = qkv_step(qk, s.qk, s.prefix, head_dim, t.qkv_sum is not None, None if s.keep else s.dtype)
    folded = _folded(x, t, 0 if step is None else step.rope_head, s)
    weights = _plain_weights(t, s)
    y, emitted = rows, statistics
    if step is not None:
        flat = _qkv(y, emitted, folded["qkv"], step.of_heads(x.shape[-2]), saved, s)
        packed = flat.view(*x.shape[:-1], 3, s.heads, step.head_dim)
        mixed = _attend(packed, step, qk, saved, s)
        # the norm before fc1 computes the statistics of fp32 tokens itself
        statistics_too = s.next_statistics if t.fc1_weight is None else x.dtype != torch.float32
        base = rows if s.residual else None
        dtype = _branch_dtype(s.dtype, t.scale1) if base is None else base.dtype
        y, emitted = linear_residual(mixed, weights["proj"], t.proj_bias, t.scale1, base, statistics_too, dtype)
    if t.fc1_weight is not None:
        y, emitted = _mlp(y, emitted, folded, weights.get("fc2"), t, saved, s)
    outputs = [y.view(x.shape), *([] if emitted is None or not s.next_statistics else [emitted])]
    return outputs + [saved[name] for name in _new_names(x, s)]


def _qkv(
    rows: Tensor, statistics: Tensor | None, qkv: FoldedLinear, head_step: HeadStep | None, saved: dict[str, Tensor],
    s: BlockSettings,
) -> Tensor:  # fmt: skip
    from ..kernels import layer_norm
    from ..kernels.linear import linear

    norm_input = layer_norm.input_rows(rows, s.eps1, statistics, s.dtype, qkv.weight_sum is None)
    if not s.keep:
        return linear.layer_norm_linear(norm_input, qkv, head_step=head_step)
    flat, _, normed = linear.layer_norm_linear_keeping(norm_input, qkv, head_step=head_step)
    saved |= {"rows1": normed.source, "statistics1": normed.statistics}
    return flat


def _attend(packed: Tensor, step: QkvStep, qk: QkTensors, saved: dict[str, Tensor], s: BlockSettings) -> Tensor:
    step.check(packed)
    ready, before = step.forward(packed, s.keep)
    mixed, lse = attention_forward([ready], qk.cu_seqlens, qk.key_mask, s.longest, s.scale)
    saved |= {"qkv": ready, "mixed": mixed, "lse": lse} | ({} if before is None else {"before_norm": before})
    return contiguous_rows(mixed.flatten(2))


def _mlp(
    rows: Tensor, statistics: Tensor | None, folded: dict[str, FoldedLinear], fc2: Tensor | None, t: BlockTensors,
    saved: dict[str, Tensor], s: BlockSettings,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    from ..kernels import layer_norm
    from ..kernels.linear import hidden_norm, linear

    fc1, inner = folded["fc1"], folded.get("fc2")
    gated = fc1.shift.shape[0] != t.fc2_weight.shape[1]
    norm_input = layer_norm.input_rows(rows, s.eps2, statistics, s.dtype, fc1.weight_sum is None)
    part = None  # LayerNorm statistics of the hidden layer, if a norm of half-precision tokens follows
    if inner is not None and s.dtype != torch.float32:
        part = layer_norm.new_statistics(rows.shape[0], t.fc2_weight.shape[1], rows.device)
    if s.keep:
        h, z, normed = linear.layer_norm_linear_keeping(norm_input, fc1, s.activation, gated, out_part=part)
        saved |= {"rows2": normed.source, "statistics2": normed.statistics, "z": z}
    else:
        h = linear.layer_norm_linear(norm_input, fc1, s.activation, gated, out_part=part)
    dtype, base = _mlp_dtype(rows.dtype, t.scale2, s), rows if s.residual else None
    if fc2 is not None:
        return linear.linear_residual(h, fc2, t.fc2_bias, t.scale2, base, s.next_statistics, dtype)
    assert inner is not None, "fc2 must be passed, or folded with its norm"
    emitted = layer_norm.new_statistics(rows.shape[0], rows.shape[1], rows.device) if s.next_statistics else None
    second = hidden_norm.HiddenLinear(inner, s.inner_eps)
    y, hidden = hidden_norm.hidden_linear_residual(h, part, second, t.scale2, base, emitted, dtype, s.keep)
    if hidden is not None:
        saved |= {"branch": hidden.branch, "hidden": hidden.statistics}
    return y, emitted


def _branch_dtype(dtype: torch.dtype, layer_scale: Tensor | None) -> torch.dtype:
    """Returns the dtype of a branch without residual: fp32 if LayerScale is, because fp16 cannot hold 1e-6."""
    return dtype if layer_scale is None else torch.promote_types(dtype, layer_scale.dtype)


def _mlp_dtype(stream: torch.dtype, layer_scale: Tensor | None, s: BlockSettings) -> torch.dtype:
    """Returns the dtype under autocast: the matmul dtype, unless x is added or LayerScale is fp32."""
    return stream if s.residual or (layer_scale is not None and layer_scale.dtype == stream) else s.dtype


_MLP_NAMES = {
    "norm2_weight": "norm_weight", "norm2_bias": "norm_bias", "scale2": "layer_scale",
    "inner_weight": "inner_norm.weight", "inner_bias": "inner_norm.bias",
}  # fmt: skip


def named(t: Any) -> tuple[str, dict[str, Tensor | None]]:
    """Returns the names of the operator and of its parameters in errors."""
    if t.qkv_weight is not None:
        return "a block", t._asdict()
    return "layer_norm_mlp", {_MLP_NAMES.get(name, name): tensor for name, tensor in t._asdict().items()}


def _folded(x: Tensor, t: Any, rope_head: int, s: BlockSettings) -> dict[str, FoldedLinear]:
    """Returns the folded qkv, fc1 and, with a norm before it, fc2; folds them if they are not folded yet."""
    from ..kernels.linear.folding import FoldedLinear, NormedLinear, fold_linears

    require_supported(*named(t), x, s.dtype)
    rms = is_rms(s.norm)
    if t.qkv_sum is not None:
        if t.qkv_weight.dtype != s.dtype:
            reason = f"the weights must be folded in {s.dtype}, got {t.qkv_weight.dtype}: fold them again"
            raise UnsupportedInputError("a block of folded weights", [reason])
        folded: Any = {"qkv": (t.qkv_weight, t.qkv_sum, t.qkv_bias), "fc1": (t.fc1_weight, t.fc1_sum, t.fc1_bias)}
        folded |= {} if s.inner_norm == "none" else {"fc2": (t.fc2_weight, t.fc2_sum, t.fc2_bias)}
        return {
            name: FoldedLinear(weight, sums if sums.numel() else None, shift)
            for name, (weight, sums, shift) in folded.items()
        }
    linears = {}
    if t.qkv_weight is not None:
        linears["qkv"] = NormedLinear(t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias, rms, rope_head=rope_head)
    if t.fc1_weight is not None:
        linears["fc1"] = NormedLinear(
            t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias, rms, t.gate_weight, t.gate_bias
        )
        if s.inner_norm != "none":
            linears["fc2"] = NormedLinear(t.fc2_weight, t.fc2_bias, t.inner_weight, t.inner_bias, is_rms(s.inner_norm))
    return dict(zip(linears, fold_linears(list(linears.values()), s.dtype)))


def _plain_weights(t: Any, s: BlockSettings) -> dict[str, Tensor]:
    """Casts proj, and fc2 unless it is folded with its norm, to the dtype of the matmuls, by one launch."""
    from ..kernels.linear.scaled_weights import in_dtype

    weights = {} if t.proj_weight is None else {"proj": t.proj_weight}
    if t.fc2_weight is not None and s.inner_norm == "none":
        weights["fc2"] = t.fc2_weight
    return dict(zip(weights, in_dtype(s.dtype, *weights.values())))


def _new_names(x: Tensor, s: BlockSettings) -> list[str]:
    """Returns the fields of `Saved` that the operator returns: all but x itself, which an operator must not return."""
    names = saved_names(s) if s.keep else []
    return names[1:] if names and x.dtype != torch.float32 else names


def _fake(x: Tensor, statistics: Tensor | None, tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    s = BlockSettings.read(settings)
    t, _ = tensors_of(tensors, s)
    M, C, fp32 = x.numel() // max(x.shape[-1], 1), x.shape[-1], x.dtype == torch.float32
    if t.fc1_weight is None and not s.residual:
        out = x.new_empty(x.shape, dtype=_branch_dtype(s.dtype, t.scale1))
    else:
        out = x.new_empty(x.shape, dtype=x.dtype if t.fc1_weight is None else _mlp_dtype(x.dtype, t.scale2, s))
    outputs = [out, *([x.new_empty((M, 2, row_parts(C)), dtype=torch.float32)] if s.next_statistics else [])]
    if not s.keep:
        return outputs
    saved: dict[str, Tensor] = {}
    for half in "12":
        saved[f"rows{half}"] = x.new_empty((M, C), dtype=s.dtype)
        saved[f"statistics{half}"] = x.new_empty((1 if fp32 else 2, M), dtype=torch.float32)
    if t.qkv_weight is not None:
        (B, N, _), D = x.shape, t.qkv_weight.shape[0] // (3 * s.heads)
        saved["qkv"], saved["before_norm"] = (x.new_empty((B, N, 3, s.heads, D), dtype=s.dtype) for _ in range(2))
        saved["mixed"] = x.new_empty((B, N, s.heads, D), dtype=s.dtype)
        saved["lse"] = x.new_empty((B, s.heads, N), dtype=torch.float32)
    if t.fc1_weight is not None:
        saved["z"] = x.new_empty((M, t.fc1_weight.shape[0] * (1 if t.gate_weight is None else 2)), dtype=s.dtype)
        saved["branch"], saved["hidden"] = out.new_empty((M, C)), x.new_empty((2, M), dtype=torch.float32)
    return outputs + [saved[name] for name in _new_names(x, s)]


def _save(args: Sequence[Any], output: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Any]:
    x, _, tensors, *rest = args
    s = BlockSettings.read(rest)
    new = output[len(output) - len(_new_names(x, s)) :]
    return (*(() if x.dtype == torch.float32 else (x,)), *new, *tensors), rest


def _backward(grad_output: Tensor, saved: Sequence[Tensor], rest: Any) -> Sequence[Tensor | None]:
    dx, *gradients = block_backward_kernel(grad_output, list(saved), *rest)
    remaining = iter(gradients)
    return dx, None, *(next(remaining) if name else None for name in gradient_names(BlockSettings.read(rest)))


def _flop(x: Any, statistics: Any, tensors: Any, *settings: Any) -> int:
    s = BlockSettings.read(settings)
    t, qk = tensors_of(tensors, s)
    return sum(block_flop(x, t, 0 if qk.cu_seqlens is None else s.longest))


block_kernel = operator(
    "vit_fast::block", f"(Tensor x, Tensor? statistics, Tensor[] tensors, {SETTINGS}) -> Tensor[]", block_forward,
    what="a block or layer_norm_mlp", fake=_fake, flop=_flop, gradient=Gradient(_save, _backward), cached=2,
)  # fmt: skip
