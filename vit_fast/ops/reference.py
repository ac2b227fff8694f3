"""Eager PyTorch functions in fp16, bf16, fp32 and fp64: the reference for every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import ACTIVATIONS as ACTIVATIONS
from ..positions import rotate
from .descriptions import BlockScales, BlockTensors, Norm, QkNorm, Rope, ScoreTerms


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None,
    terms: ScoreTerms | None = None,
) -> Tensor:  # fmt: skip
    """Computes softmax(scale * q k^T + terms) v for q [B, H, N_q, D] and k, v [B, H, N_kv, D]; see ops.attention."""
    return attention_weights(q, k, scale=scale, key_mask=key_mask, terms=terms).to(v.dtype) @ v


def attention_weights(
    q: Tensor, k: Tensor, *, scale: float | None = None, key_mask: Tensor | None = None,
    terms: ScoreTerms | None = None,
) -> Tensor:  # fmt: skip
    """Computes softmax(scale * q k^T + terms), [B, H, N_q, N_kv]; each row sums to 1, or to 0 if all keys are masked.

    terms.bias must have four dimensions, and terms.groups must be None.
    """
    factor: Tensor | float = q.shape[-1] ** -0.5 if scale is None else scale
    if terms is not None and terms.scale is not None:
        factor = terms.scale[:, None, None]
    scores = (q * factor).to(q.dtype) @ k.transpose(-2, -1)
    added = None if terms is None else score_bias(terms, q.shape[0])
    valid = None if key_mask is None else key_mask[:, None, None, :]
    if added is not None:
        scores = scores + added
        valid = added != -torch.inf if valid is None else valid & (added != -torch.inf)
    if valid is None:
        return scores.softmax(dim=-1)
    return scores.masked_fill(~valid, -torch.inf).softmax(dim=-1).masked_fill(~valid, 0)


def score_bias(terms: ScoreTerms, batch: int) -> Tensor | None:
    """Returns the sum of bias, window mask and rel, broadcastable to [batch, H, N_q, N_kv]; None if all are absent."""
    parts = [] if terms.bias is None else [terms.bias]
    if terms.window_mask is not None:
        rows = torch.arange(batch, device=terms.window_mask.device) % terms.window_mask.shape[0]
        parts.append(terms.window_mask[rows][:, None])
    if terms.rel_h is not None and terms.rel_w is not None:
        parts.append((terms.rel_h[..., :, None] + terms.rel_w[..., None, :]).flatten(-2))
    return functools.reduce(torch.add, parts) if parts else None


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Computes LayerNorm or RMSNorm over the last dimension; returns x for the kind "none"."""
    if norm.kind == "none":
        return x
    if norm.kind == "rms_norm":
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)
    return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)


def qk_norm_rope(qkv: Tensor, qk_norm: QkNorm | None, rope: Rope | None) -> Tensor:
    """Normalizes and rotates q and k of qkv [B, N, 3, H, D]; rope's tables are [B or 1, H or 1, N - prefix, D/2]."""
    qk, v = qkv[:, :, :2], qkv[:, :, 2:]
    if qk_norm is not None:
        start = -1 if qk_norm.over == "head" else -2
        normed = [
            normalize(x.flatten(start), norm).view(x.shape).to(qkv.dtype)
            for x, norm in zip(qk.unbind(2), (qk_norm.q, qk_norm.k))
        ]
        if rope is None:
            return torch.stack((*normed, qkv[:, :, 2]), 2)
        qk = torch.stack(normed, 2)
    if rope is not None:
        cos, sin = (table.transpose(1, 2).unsqueeze(2) for table in (rope.cos, rope.sin))
        rotated = rotate(qk[:, rope.prefix :], cos, sin, rope.layout)
        none = isinstance(rope.prefix, int) and rope.prefix == 0  # comparing a symbolic prefix would specialize it
        qk = rotated if none else torch.cat((qk[:, : rope.prefix], rotated), 1)
    return torch.cat((qk, v), 2)


def layer_norm_mlp(
    x: Tensor, t: BlockTensors, *, eps: float, norm: str, activation: str, residual: bool,
    inner_norm: tuple[str, float] | None,
) -> Tensor:  # fmt: skip
    """Computes [x +] layer_scale * fc2(act(fc1(norm(x)))); see ops.layer_norm_mlp."""
    normed = normalize(x, Norm(t.norm2_weight, t.norm2_bias, eps, norm))
    hidden, activate = F.linear(normed, t.fc1_weight, t.fc1_bias), ACTIVATIONS[activation]
    if t.gate_weight is None:
        hidden = activate(hidden)
    else:
        hidden = activate(F.linear(normed, t.gate_weight, t.gate_bias)) * hidden
    if inner_norm is not None:
        hidden = normalize(hidden, Norm(t.inner_weight, t.inner_bias, inner_norm[1], inner_norm[0]))
    branch = F.linear(hidden, t.fc2_weight, t.fc2_bias)
    has_fp32_scale = t.scale2 is not None and t.scale2.dtype == torch.float32
    dtype = torch.float32 if x.dtype == torch.float32 and (residual or has_fp32_scale) else branch.dtype
    if t.scale2 is not None:
        branch = branch * t.scale2
    out = x + branch if residual else branch
    return out if out.dtype == dtype else out.to(dtype)


E4M3_MAX = 448.0


def quantize_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Rounds x / scale to the nearest e4m3 number (ties to even), returned as fp64; clamps to +-448 and preserves NaN.

    From 2^e to 2^(e + 1) with e >= -6, e4m3 numbers have a spacing of 2^(e - 3). Below 2^-6, the spacing is 2^-9.
    Source: FP8 Formats for Deep Learning, arXiv 2209.05433.
    """
    value = (x.double() / scale.double()).clamp(-E4M3_MAX, E4M3_MAX)
    exponent = torch.frexp(value).exponent.clamp(min=-5)  # e + 1, with |value| < 2^(e + 1)
    step = torch.ldexp(torch.ones_like(value), exponent - 4)
    return (value / step).round() * step


def fp8_weight(weight: Tensor, scale: Tensor, norm_weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantizes a weight [F, K] to e4m3; returns the values as fp64 [F, K], and one scale per row, fp32 [F].

    The weight is first multiplied by norm_weight [K], the gamma of the norm before the layer, and by `scale` ([K] or
    []), because the layer's input is divided by `scale`. Unlike `kernels/linear/folding.py`, the function does not
    subtract the mean of each row, because this would increase the rounding errors of small weights. A row scale below
    2^-100 is replaced by 1, so that `ops/folded.py` can divide the bias by it without overflow. Such rows round to 0.
    """
    folded = weight.double() if norm_weight is None else weight.double() * norm_weight.double()
    folded = folded * scale.double()
    rows = (folded.abs().amax(1) / E4M3_MAX).float()
    rows = rows.masked_fill(rows < 2.0**-100, 1)
    return quantize_e4m3(folded, rows[:, None]), rows


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """Computes a linear layer, optionally after a norm, in x.dtype; rounds input and weight to e4m3.

    `scale` ([K] or []) divides x before rounding. If `scale` is None, nothing is rounded. Otherwise, the norm reads the
    rounded input, but mean and variance are those of the unrounded x. If the variance is 0, the norm returns its bias.
    """
    dtype = x.dtype
    bias = None if bias is None else bias.to(dtype)
    if scale is None:
        if norm is not None:
            gamma, beta = (tensor if tensor is None else tensor.to(dtype) for tensor in norm[:2])
            x = normalize(x, norm._replace(weight=gamma, bias=beta))
        return F.linear(x, weight.to(dtype), bias)
    values, rows = fp8_weight(weight, scale, None if norm is None else norm.weight)
    rounded_weight = (values * rows[:, None] / scale.double()).to(dtype)
    rounded = quantize_e4m3(x, scale) * scale.double()
    if norm is None:
        return F.linear(rounded.to(dtype), rounded_weight, bias)
    exact = x.double()
    mean = exact.mean(-1, keepdim=True) if norm.kind == "layer_norm" else torch.zeros_like(exact[..., :1])
    variance = (exact - mean).square().mean(-1, keepdim=True)
    rstd = torch.where(variance == 0, 0, (variance + norm.eps).rsqrt())
    out = F.linear(((rounded - mean) * rstd).to(dtype), rounded_weight, bias)
    return out if norm.bias is None else out + F.linear(norm.bias.to(dtype), weight.to(dtype))


def fp8_block(
    x: Tensor, tensors: BlockTensors, scales: BlockScales, *, heads: int, attention_scale: float | None = None,
    eps: tuple[float, float] = (1e-6, 1e-6), norm: str = "layer_norm", activation: str = "gelu",
    qk_norm: QkNorm | None = None, rope: Rope | None = None, linear: Callable[..., Tensor] = fp8_linear,
) -> Tensor:  # fmt: skip
    """Computes `fused_block` in FP8 from the unquantized `tensors`. With fp64 x, this is the reference for the kernels.

    `linear` is called for qkv, proj, fc1, the gate (if any) and fc2, in this order.
    """
    t = tensors
    first = Norm(t.norm1_weight, t.norm1_bias, eps[0], norm)
    second = Norm(t.norm2_weight, t.norm2_bias, eps[1], norm)
    qkv = linear(x, t.qkv_weight, t.qkv_bias, scales.qkv, first).unflatten(-1, (3, heads, -1))
    q, k, v = qk_norm_rope(qkv, qk_norm, rope).transpose(1, 3).unbind(2)
    mixed = attention(q, k, v, scale=attention_scale).transpose(1, 2).flatten(2)
    branch = linear(mixed, t.proj_weight, t.proj_bias, scales.proj)
    x = x + (branch if t.scale1 is None else branch * t.scale1.to(x.dtype))
    hidden, activate = linear(x, t.fc1_weight, t.fc1_bias, scales.fc1, second), ACTIVATIONS[activation]
    if t.gate_weight is None:
        hidden = activate(hidden)
    else:
        hidden = activate(linear(x, t.gate_weight, t.gate_bias, scales.fc1, second)) * hidden
    branch = linear(hidden, t.fc2_weight, t.fc2_bias, scales.fc2)
    return x + (branch if t.scale2 is None else branch * t.scale2.to(x.dtype))
