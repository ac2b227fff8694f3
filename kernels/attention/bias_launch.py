"""Attention with terms added to the scores: launch configurations, and the functions that the operators call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import generation, gpu_of
from ..launch import Launch, ceil_div
from .attention_policy import MIN_BLOCK, split_head_dim
from .bias_backward import (
    _attention_bias_bwd_dkdv_kernel,
    _attention_bias_bwd_dq_kernel,
    _attention_bias_bwd_tile_kernel,
)
from .bias_forward import _attention_bias_fwd_kernel

MAX_GRID_WIDTH = 64  # Kw: a tile of keys is one row of the grid
_PROGRAMS = 8  # per multiprocessor; more windows than that share programs
_MOST_WINDOWS = 64  # per program


class BiasedAttention(NamedTuple):
    """The inputs of a call with n_batch windows, or images without windows.

    Attributes:
        q, k, v: [B, H, N, D] with last stride 1. With groups, N is the number of tokens of an image.
        lse: fp32 [n_batch, H, n], contiguous, for windows of n tokens: log2(sum(exp(scores))); +inf without keys.
        scale: Multiplier of q k^T, unless terms.scale replaces it.
        terms: `ScoreTerms` of ops/descriptions.py, with a bias of four dimensions.
        key_mask: bool [n_batch, N_kv] or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    scale: float
    terms: Any
    key_mask: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The shape of the scores."""
        return (*self.lse.shape, self.k.shape[2] if self.terms.groups is None else self.lse.shape[2])

    @property
    def width(self) -> int:
        """Columns of a tile, including padding."""
        return sum(split_head_dim(self.q.shape[3]))

    @property
    def largest(self) -> int:
        """The most rows or columns of a tile of scores; a row of the grid of rel may be longer."""
        return 64 if self.q.dtype.itemsize == 2 else 32

    def area(self, whole: bool) -> int:
        """Returns the most elements of a tile of scores that does not spill; `whole`: in the one-tile forward."""
        if self.q.dtype.itemsize > 2:
            return 32 * 32
        ampere = generation(gpu_of(self.q.device).arch) == "ampere"
        return 64 * 32 if self.width > 64 or (ampere and not whole) else 64 * 64

    def one_tile(self, area: int) -> bool:
        """True if one tile of scores covers a window."""
        n_q, n_kv = map(_power_of_two, self.sizes[2:])
        return n_q * n_kv <= area and max(n_q, n_kv) <= self.largest and self.terms.rel_h is None


def _power_of_two(length: int) -> int:
    return max(MIN_BLOCK, 1 << (length - 1).bit_length())


def _launch(
    kernel: Any, call: BiasedAttention, args: dict[str, Any], area: int, warps: int, per_rows: bool, per_keys: bool,
    shares: bool, **constants: Any,
) -> tuple[Launch, int]:  # fmt: skip
    """Returns the launch and the number of groups of windows.

    A program has a tile of queries if `per_rows`, a tile of keys if `per_keys`, and several windows if `shares`.
    """
    q, terms, (n_batch, heads, n_q, n_kv) = call.q, call.terms, call.sizes
    most_rows = min(call.largest, _power_of_two(n_q))
    step = block_n = min(_power_of_two(n_kv), call.largest, area // (most_rows if per_rows else MIN_BLOCK))
    if terms.rel_w is not None:
        step = terms.rel_w.shape[3]
        block_n = _power_of_two(step)
    block_m = min(most_rows, area // block_n)
    n_steps, masks = ceil_div(n_kv, step), 1 if terms.window_mask is None else terms.window_mask.shape[0]
    programs = heads * (ceil_div(n_q, block_m) if per_rows else 1) * (n_steps if per_keys else 1)
    group, chunks, per_mask = 1, n_batch, ceil_div(n_batch, masks)
    if shares and (terms.bias is None or terms.bias.shape[0] == 1):
        group = n_batch * programs // (_PROGRAMS * gpu_of(q.device).sm_count)
        group = max(1, min(group, _MOST_WINDOWS, per_mask))
        chunks = masks * ceil_div(per_mask, group)
    lo, hi = split_head_dim(q.shape[3])
    sources = {name: (value, *value.stride()[:3]) for name, value in args.items() if not name.endswith("_ptr")}
    n_groups = 1 if terms.groups is None else terms.groups.shape[0]
    args = args | sources | {
        "lse_ptr": call.lse, "terms": _terms(terms, call.key_mask), "scale": call.scale,
        "sizes": (n_batch, heads, n_q, n_kv, masks, n_groups, group, step, n_steps),
    }  # fmt: skip
    constants |= {
        "D": q.shape[3], "LO": lo, "HI": hi, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": 2,
        "WIDE": any(value.shape[2] * abs(value.stride(2)) >= 2**31 for value, *_ in sources.values()),
    }  # fmt: skip
    # a warp per 16 rows, e.g. wgmma needs four warps for 64 rows; tf32 spills with 512 scores per warp
    scores = 512 if q.dtype.itemsize == 2 else 256
    warps = min(warps, max(max(block_m, block_n) // 16, block_m * block_n // scores))
    return Launch(kernel, (programs * chunks,), args, constants, num_warps=warps, device=q.device), chunks


def _terms(terms: Any, key_mask: Tensor | None) -> tuple[Any, ...]:
    """Returns the tuple `terms` of the kernels: tensors (None if absent) and their strides."""
    bias, strides = terms.bias, [0, 0, 0]
    if bias is not None:
        bias = bias if bias.stride(3) == 1 else bias.contiguous()
        strides = [0 if size == 1 else stride for size, stride in zip(bias.shape[:3], bias.stride())]
    mask, rel_h, rel_w, groups, scale = (
        None if each is None else each.contiguous()
        for each in (terms.window_mask, terms.rel_h, terms.rel_w, terms.groups, terms.scale)
    )
    if key_mask is not None and key_mask.stride(1) != 1:
        key_mask = key_mask.contiguous()
    grid = (0, 0) if rel_h is None or rel_w is None else (rel_h.shape[3], rel_w.shape[3])
    return (
        bias, *strides,
        mask,  # [W, N_q, N_kv]
        key_mask, 0 if key_mask is None else key_mask.stride(0),
        rel_h, rel_w, *grid,  # [n_batch, H, N_q, Kh], [n_batch, H, N_q, Kw], Kh, Kw
        groups,  # [W, n]
        scale,  # [H]
    )  # fmt: skip


def attention_bias_forward(call: BiasedAttention, o: Tensor) -> None:
    """Computes the output o [B, H, N, D], and call.lse."""
    args, area = {"q": call.q, "k": call.k, "v": call.v, "o": o}, call.area(True)
    one = call.one_tile(area)
    area = area if one else call.area(False)
    _launch(_attention_bias_fwd_kernel, call, args, area, 4, True, False, one, ONE_TILE=one)[0].run()


def attention_bias_backward(
    call: BiasedAttention, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, bias_grad: bool
) -> dict[str, Tensor]:
    """Computes dq, dk and dv; returns the gradients of rel_h, rel_w, scale and, if `bias_grad`, bias.

    The returned gradients are fp32. The gradient of the bias has shape [n_batch or 1, H, N_q, N_kv].
    """
    terms, lse = call.terms, call.lse
    delta, dscale = torch.empty_like(lse), None if terms.scale is None else torch.empty_like(lse)
    gradients = {
        name: torch.empty(tensor.shape, dtype=torch.float32, device=lse.device)
        for name, tensor in (("rel_h", terms.rel_h), ("rel_w", terms.rel_w)) if tensor is not None
    }  # fmt: skip
    args: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v, "do": do}
    rows = args | {"dq": dq, "delta_ptr": delta, "dscale_ptr": dscale}
    area = call.area(False)
    whole = call.one_tile(area)
    if not whole:
        drel = {f"d{name}_ptr": gradients.get(name) for name in ("rel_h", "rel_w")}
        _launch(_attention_bias_bwd_dq_kernel, call, rows | drel | {"o": o}, area, 4, True, False, False)[0].run()
        keys = args | {"dk": dk, "dv": dv, "delta_ptr": delta}
        _launch(_attention_bias_bwd_dkdv_kernel, call, keys, area, 4, False, True, False)[0].run()
    if whole or bias_grad:
        everything = rows | {"dk": dk, "dv": dv, "parts_ptr": None}
        launch, chunks = _launch(
            _attention_bias_bwd_tile_kernel, call, everything, area, 8, True, True, True, WHOLE=whole
        )
        if bias_grad:
            parts = lse.new_empty((chunks, *call.sizes[1:]))
            launch = replace(launch, args={**launch.args, "parts_ptr": parts})
        launch.run()
        if bias_grad:
            gradients["bias"] = parts.sum(0, keepdim=True) if terms.bias.shape[0] == 1 else parts
    if dscale is not None:
        gradients["scale"] = dscale.sum((0, 2))
    return gradients
