"""A pre-norm encoder block, or one of its halves, as one operator: `vit_fast::block`.

    x = x + scale1 * proj(attention(qkv(norm1(x))))
    x = x + scale2 * fc2(activation(fc1(norm2(x))))

The norms are folded into the weights of qkv and fc1: in every call by a kernel, or once by `folded.py`. For drop path,
run each half with residual=False, and compute x + drop_path(output).

With half-precision x, a block can return LayerNorm statistics of its output for the next block. `kernels/row_parts.py`
describes their layout. `saved_outputs` in `block_backward.py` lists the outputs for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedInputError, raise_unsupported
from ..kernels.row_parts import row_parts
from . import block_backward
from .attention_bias import checked_terms
from .attention_operator import attention_forward, inputs_of
from .backends import fp8_reasons, kernel_reasons
from .block_backward import BlockSettings, normed_linears, residual_linears, saved_outputs, tensors_of
from .descriptions import (
    DTYPES,
    E4M3,
    MAX_TOKENS,
    NO_TERMS,
    BlockTensors,
    Keys,
    QkNorm,
    Rope,
    ScoreTerms,
    as_matrix,
    check_keys,
    check_qk_norm,
    checked_rope,
)
from .registration import matmul_dtype, needs_gradient, operator
from .rotary import QkSettings, QkTensors, operator_arguments, qkv_step

if TYPE_CHECKING:
    from ..kernels.layer_norm import NormInput
    from ..kernels.linear.folding import FoldedLinear
    from ..kernels.matmul.forward_epilogues import BranchOutput

_NO_QK, _NO_SETTINGS, _NO_INPUTS = QkTensors(), QkSettings(), inputs_of(None, None)


def fused_block(
    x: Tensor, statistics: Tensor | None, tensors: BlockTensors, *, eps: tuple[float, float], norm: str = "layer_norm",
    heads: int = 0, attention_scale: float | None = None, qk_norm: QkNorm | None = None, rope: Rope | None = None,
    keys: Keys | None = None, terms: ScoreTerms | None = None, activation: str = "gelu",
    inner_norm: tuple[str, float] | None = None, residual: bool = True, next_statistics: bool = False,
    x8: Tensor | None = None, next_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Runs a block or one of its halves: attention or MLP.

    Args:
        x: [B, N, C], or [..., C] for the MLP half alone. fp16 or bf16; in a block without FP8 layers also fp32.
        statistics: LayerNorm statistics of x from the previous block; None to compute them. Ignored if x is fp32.
        tensors: The parameters, in fp32 or the dtype of the matmuls (`registration.matmul_dtype`). A half whose
            parameters are None is skipped. For inference, `fold` can fold the parameters first.
        eps, norm: Epsilons and kind of norm1 and norm2. A half alone also supports "none", without a norm; the
            attention half then has no gradients.
        inner_norm: Kind and epsilon of a norm before fc2.
        terms: Bias, window mask, rel and windows of the attention; a scale per head replaces attention_scale.
        residual: True adds x to the output of a half; must be True for a whole block.
        next_statistics: True to return LayerNorm statistics of the output, for the next block.
        x8: For FP8: x times tensors.qkv_factor (reciprocal scales) in e4m3. If x8 or statistics is None, both are
            computed.
        next_factor: The qkv_factor of the next block if its qkv layer reads e4m3, else None. Must be None with
            inner_norm, or without the MLP half.
    Returns:
        The output, with x's shape and the dtype from `_output_dtype`; its LayerNorm statistics or None; and the output
        times next_factor in e4m3 or None. The statistics require next_statistics, residual and half-precision x.
    Raises:
        ValueError: qk_norm, rope, keys or next_factor is invalid. UnsupportedInputError: the kernels cannot run this
            input.
    """
    dtype = matmul_dtype(x)
    if x.dtype not in (torch.float32, dtype):  # do not cast fp32 x: under autocast, the residual stream is fp32
        x = x.to(dtype)
    emit_statistics = next_statistics and residual and x.dtype != torch.float32
    of_qk, qk, attended, max_seqlen = _NO_QK, _NO_SETTINGS, _NO_INPUTS, 0
    if tensors.qkv_weight is not None:
        head_dim = tensors.qkv_weight.shape[0] // (3 * heads)
        if attention_scale is None:
            attention_scale = head_dim**-0.5
        if qk_norm is not None:
            check_qk_norm(qk_norm, heads, head_dim)
        if rope is not None:
            rope = checked_rope(rope, (x.shape[0], x.shape[1], 3, heads, head_dim), tensors.qkv_sum is not None)
        if qk_norm is not None or rope is not None:
            of_qk, qk = operator_arguments(x, qk_norm, rope)
        if keys is not None:
            check_keys(keys, x.shape[0], x.shape[1], x.device)
            if keys.mask is None and x.shape[0] != 1:
                raise ValueError(f"x must have shape [1, total, C] with packed sequences, got {tuple(x.shape)}")
            max_seqlen = keys.max_seqlen
        if terms is not None:
            terms = checked_terms(terms, keys, (x.shape[0], heads, x.shape[1], x.shape[1], head_dim), x.device, dtype)
            if tensors.is_fp8:
                raise UnsupportedInputError("a block in FP8", [NO_TERMS])
        if keys is not None or terms is not None:
            attended = inputs_of(keys, terms)
    if next_factor is not None and (inner_norm is not None or tensors.fc1_weight is None):
        got = "inner_norm" if inner_norm is not None else "no MLP half"
        raise ValueError(f"next_factor must be None with inner_norm or without the MLP half, got a tensor with {got}")
    given = (x, *tensors, *of_qk, *attended, statistics, x8, next_factor)
    saves = needs_gradient(*given)
    if saves and (tensors.qkv_sum is not None or tensors.fc1_sum is not None):
        reason = "folded weights have no gradients: pass the parameters, or use torch.no_grad()"
        raise UnsupportedInputError("a block of folded weights with gradients enabled", [reason])
    inner, inner_eps = inner_norm or ("none", 0.0)
    scale = 1.0 if attention_scale is None else attention_scale
    words = norm, activation, qk.norm, qk.over, qk.layout, inner, residual, emit_statistics, saves, dtype
    outputs = _kernel(given, (heads, scale, qk.prefix, max_seqlen, *eps, qk.eps, inner_eps), words)
    y8 = None if next_factor is None else outputs[1 + emit_statistics]
    return outputs[0], outputs[1] if emit_statistics else None, y8


def _block_forward(tensors: Sequence[Any], s: BlockSettings) -> list[Tensor]:
    """Returns the output; if requested, also its LayerNorm statistics, its e4m3 copy and tensors for the backward."""
    from ..kernels.linear import linear, scaled_weights

    x, t, qk, keys, terms, statistics, x8, next_factor = tensors_of(tensors, s)
    _require_supported(t, x, s.dtype)
    saved: dict[str, Any] = {}
    tokens, step = as_matrix(x), None
    if t.qkv_weight is not None:
        head_dim = t.qkv_weight.shape[0] // (3 * s.heads)
        norm_dtype = None if s.saves or t.is_fp8 else s.dtype
        step = qkv_step(qk, s.qk, x.shape[-2], head_dim, t.qkv_sum is not None, norm_dtype)
    folded = _folded(t, 0 if step is None else step.rope_head, s)
    weights = {name: layer.weight for name, layer in residual_linears(t, folded).items()}
    wide = {name: weight for name, weight in weights.items() if weight.dtype != E4M3}
    weights |= dict(zip(wide, scaled_weights.in_dtype(s.dtype, *wide.values())))  # at most one launch for all
    y, emitted = tokens, statistics
    y8 = None if x8 is None else as_matrix(x8)
    if step is not None:
        norm_input = _norm_input(tokens, statistics, y8, t.qkv_factor, s.eps1, folded["qkv"], s)
        flat, _, normed = linear.layer_norm_linear(
            norm_input, folded["qkv"], head_step=step.head_step, dtype=s.dtype, saves=s.saves
        )
        if s.saves:
            saved |= {"norm1_input": normed.source, "statistics1": normed.statistics}
        ready, before = step.forward(flat.view(*x.shape[:-1], 3, s.heads, head_dim), s.saves)
        mixed, lse = attention_forward([ready], keys, s.scale, terms, t.proj_factor)
        saved |= {"qkv": ready, "mixed": mixed, "lse": lse, "before_norm": before}
        # before fc1, fp32 tokens need no statistics, because a separate kernel normalizes them
        statistics_too = s.next_statistics if t.fc1_weight is None else x.dtype != torch.float32
        dtype = _output_dtype(x.dtype, t._replace(fc1_weight=None), s)
        output = _branch_output(tokens, t.proj_bias, t.scale1, statistics_too, dtype, t.fc1_factor, s)
        linear.linear_residual(as_matrix(mixed.flatten(2)), weights["proj"], output)
        y, emitted, y8 = output.out, output.out_part, output.out8
    if t.fc1_weight is not None:
        norm_input = _norm_input(y, emitted, y8, t.fc1_factor, s.eps2, folded["fc1"], s)
        output = _mlp(y, norm_input, folded, weights.get("fc2"), t, next_factor, saved, s)
        y, emitted, y8 = output.out, output.out_part, output.out8
    outputs = [y.view(x.shape), *([] if emitted is None or not s.next_statistics else [emitted])]
    outputs += [] if next_factor is None or y8 is None else [y8.view(x.shape)]
    return outputs + [saved[name] for name in _for_backward(x, t, s)]


def _branch_output(
    tokens: Tensor, bias: Tensor | None, scale: Tensor | None, statistics: bool, dtype: torch.dtype,
    next_factor: Tensor | None, s: BlockSettings,
) -> BranchOutput:  # fmt: skip
    from ..kernels import layer_norm
    from ..kernels.matmul.forward_epilogues import BranchOutput

    M, C = tokens.shape
    out, residual = torch.empty_like(tokens, dtype=dtype), tokens if s.residual else None
    part = layer_norm.new_statistics(M, C, tokens.device) if statistics else None
    out8 = None if next_factor is None else torch.empty_like(tokens, dtype=E4M3)
    bias, scale = (vector if vector is None else vector.contiguous() for vector in (bias, scale))
    return BranchOutput(out, residual, part, out8, bias, scale, next_factor)


def _norm_input(
    tokens: Tensor, statistics: Tensor | None, tokens_fp8: Tensor | None, factor: Tensor | None, eps: float,
    linear: FoldedLinear, s: BlockSettings,
) -> NormInput:  # fmt: skip
    from ..kernels import layer_norm

    if s.norm == "none":  # like normalized fp32 tokens, which the epilogue of the matmul does not normalize
        ones = torch.ones(1, tokens.shape[0], dtype=torch.float32, device=tokens.device)
        return layer_norm.NormInput(tokens.to(s.dtype), ones)
    if factor is None:
        return layer_norm.norm_input(tokens, eps, statistics, s.dtype, linear.weight_sum is None)
    if tokens_fp8 is None or statistics is None:
        tokens_fp8 = torch.empty_like(tokens, dtype=E4M3)
        statistics = layer_norm.new_statistics(tokens.shape[0], tokens.shape[1], tokens.device)
        layer_norm.layer_norm_statistics_launch(tokens, statistics, tokens_fp8, factor).run()
    return layer_norm.NormInput(tokens_fp8, statistics, eps)


def _mlp(
    tokens: Tensor, norm_input: NormInput, folded: dict[str, FoldedLinear], fc2: Tensor | None, t: BlockTensors,
    next_factor: Tensor | None, saved: dict[str, Any], s: BlockSettings,
) -> BranchOutput:  # fmt: skip
    from ..kernels import layer_norm
    from ..kernels.linear import hidden_norm, linear

    fc1, F = folded["fc1"], t.fc2_weight.shape[1]
    gated, part = fc1.shift.shape[0] != F, None
    if fc2 is None and s.dtype != torch.float32:  # a norm before fc2
        part = layer_norm.new_statistics(tokens.shape[0], F, tokens.device)
    h, z, normed = linear.layer_norm_linear(
        norm_input, fc1, s.activation, gated, out_part=part, dtype=s.dtype if t.fc2_factor is None else E4M3,
        out_scale=t.fc2_factor, saves=s.saves,
    )  # fmt: skip
    if s.saves:
        saved |= {"norm2_input": normed.source, "statistics2": normed.statistics, "z": z}
    dtype = _output_dtype(tokens.dtype, t, s)
    output = _branch_output(tokens, t.fc2_bias, t.scale2, s.next_statistics, dtype, next_factor, s)
    if fc2 is not None:
        linear.linear_residual(h, fc2, output)
    else:
        branch, hidden = hidden_norm.hidden_linear_residual(h, part, folded["fc2"], s.inner_eps, output, s.saves)
        saved |= {"branch": branch, "hidden": hidden} if s.saves else {}
    return output


def _output_dtype(stream: torch.dtype, t: BlockTensors, s: BlockSettings) -> torch.dtype:
    """Returns the dtype of the output. `stream` is the dtype of x after the cast in `fused_block`.

    With a residual, the output has x's dtype. Without a residual, it has the dtype of the matmuls, except if LayerScale
    is fp32. Then the output of the attention half is fp32, and the output of the MLP half has x's dtype.
    """
    if s.residual:
        return stream
    if t.fc1_weight is None:  # fp32 for fp32 LayerScale: an output scaled by 1e-6 would be subnormal in fp16
        return s.dtype if t.scale1 is None or t.scale1.dtype != torch.float32 else torch.float32
    return stream if t.scale2 is not None and t.scale2.dtype == stream else s.dtype


def _require_supported(t: BlockTensors, x: Tensor, dtype: torch.dtype) -> None:
    """Raises UnsupportedInputError with all reasons why the kernels cannot run on x with matmuls of `dtype`."""
    first, what = t.qkv_weight, "a block in FP8" if t.is_fp8 else "a block"
    if first is None:
        first, what = t.fc1_weight, "layer_norm_mlp"
    reasons = fp8_reasons(x.device) if t.is_fp8 else kernel_reasons(x.device, dtype)
    accepted = DTYPES[1:] if t.is_fp8 else DTYPES
    if x.dtype not in accepted:
        names = [str(each).removeprefix("torch.") for each in accepted]
        reasons.append(f"x must be {', '.join(names[:-1])} or {names[-1]}, got {x.dtype}")
    if first.shape[1] != x.shape[-1]:
        reasons.append(f"x must have {first.shape[1]} channels like the weight of the first layer, got {x.shape[-1]}")
    if (tokens := x.numel() // max(x.shape[-1], 1)) > MAX_TOKENS:
        reasons.append(f"x must have at most {MAX_TOKENS} tokens, got {tokens}")
    dtypes = (dtype, torch.float32, E4M3) if t.is_fp8 else (dtype, torch.float32)
    for name, tensor in t._asdict().items():
        if tensor is None or (tensor.device == x.device and tensor.dtype in dtypes):
            continue
        if what == "layer_norm_mlp":  # its arguments have other names
            name = name.replace("norm2", "norm").replace("scale2", "layer_scale").replace("inner_", "inner_norm.")
        if tensor.device != x.device:
            reasons.append(f"{name} must be on {x.device} like x, got {tensor.device}")
        if tensor.dtype not in dtypes:
            whose = "of x" if dtype == x.dtype else "of autocast"
            half = f" or {dtype} (the dtype {whose})" if dtype.itemsize == 2 else ""
            reasons.append(f"{name} must be torch.float32{half}, got {tensor.dtype}")
    raise_unsupported(f"{what} with backend='triton'", reasons)


def _folded(t: Any, rope_head: int, s: BlockSettings) -> dict[str, FoldedLinear]:
    """Returns the folded layers: qkv, fc1 and, after an inner norm, fc2. Folds them here if `fold` has not."""
    from ..kernels.linear.folding import FoldedLinear, fold_linears

    if t.qkv_sum is None and t.fc1_sum is None:
        linears = normed_linears(t, s.norm, s.inner_norm, rope_head)
        return dict(zip(linears, fold_linears(list(linears.values()), s.dtype)))
    folded = {}
    for name in ("qkv", "fc1", "fc2"):
        weight, sums, shift = (getattr(t, f"{name}_{part}") for part in ("weight", "sum", "bias"))
        if sums is None:
            continue
        rows = getattr(t, f"{name}_row_scale", None)
        if rows is None and weight.dtype != s.dtype:
            required = f"{weight.dtype} like the cached weights"
            reason = f"the dtype of x, or of autocast if it is enabled, must be {required}, got {s.dtype}"
            raise UnsupportedInputError("a block with cached weights", [reason])
        folded[name] = FoldedLinear(weight, sums if sums.numel() else None, shift, rows)
    return folded


def _for_backward(x: Tensor, t: BlockTensors, s: BlockSettings) -> dict[str, Any]:
    if not s.saves:
        return {}
    return saved_outputs(x.shape, x.dtype == torch.float32, _output_dtype(x.dtype, t, s), t, s)


def _fake(tensors: Sequence[Any], s: BlockSettings) -> list[Tensor]:
    x, t, *_, next_factor = tensors_of(tensors, s)
    outputs: list[Any] = [(x.shape, _output_dtype(x.dtype, t, s))]
    if s.next_statistics:
        outputs.append(((math.prod(x.shape[:-1]), 2, row_parts(x.shape[-1])), torch.float32))
    if next_factor is not None:
        outputs.append((x.shape, E4M3))
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in (*outputs, *_for_backward(x, t, s).values())]


def _saved(tensors: Sequence[Any], outputs: Sequence[Tensor], s: BlockSettings) -> Sequence[Any]:
    x, t, *_ = tensors_of(tensors, s)
    new = outputs[len(outputs) - len(_for_backward(x, t, s)) :]
    return None if x.dtype == torch.float32 else x, *tensors[1:-3], None, None, None, *new


_kernel = operator(
    "block", block_backward.NAMES, BlockSettings, _block_forward, block_backward.block_gradient,
    what="a block or layer_norm_mlp", fake=_fake, flop=block_backward.block_flop,
    with_gradient=lambda s: block_backward.WITH_GRADIENT, saved=_saved, unsaved_dtype=torch.float32, cached=1,
)  # fmt: skip
