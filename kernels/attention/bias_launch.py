"""Launches of attention with terms added to the scores, and their configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..device import generation, gpu_of
from ..launch import Launch, ceil_div
from .attention_launch import AttentionCall, addressing
from .attention_policy import MIN_BLOCK, split_head_dim
from .bias_backward import (
    _attention_bias_bwd_dkdv_kernel,
    _attention_bias_bwd_dq_kernel,
    _attention_bias_bwd_tile_kernel,
)
from .bias_forward import _attention_bias_fwd_kernel

_GRID_TILE = 64  # most keys of a tile in a row of the grid of rel
_STAGES = 2
_PROGRAMS = 8  # per multiprocessor; more windows than that share programs
_MOST_WINDOWS = 64  # per program


class _Scores(AttentionCall):
    """The scores of a call with n_batch windows, or images without windows, and the limits of their tiles."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The shape of the scores: n_batch, heads, N_q and N_kv."""
        return (*self.lse.shape, self.k.shape[2] if self.terms.groups is None else self.lse.shape[2])

    @property
    def masks(self) -> int:
        """Rows of the window mask."""
        return 1 if self.terms.window_mask is None else self.terms.window_mask.shape[0]

    @property
    def pieces(self) -> int:
        """Tiles of keys per row of the grid of rel."""
        return 1 if self.terms.rel_w is None else ceil_div(self.terms.rel_w.shape[3], _GRID_TILE)

    @property
    def largest(self) -> int:
        """The most rows or columns of a tile of scores, except of a row of the grid of rel."""
        return 64 if self.q.dtype.itemsize == 2 else 32

    @property
    def kind(self) -> str:
        return generation(gpu_of(self.q.device).arch)

    @property
    def columns(self) -> int:
        """Columns of a tile of q, k or v, including padding."""
        return sum(split_head_dim(self.q.shape[3]))

    def area(self, whole: bool = False, backward: bool = False) -> int:
        """Returns the most elements of a tile of scores that does not spill; `whole`: in the one-tile forward."""
        if self.q.dtype.itemsize > 2:
            return 32 * 32
        ampere = self.kind == "ampere"
        if ampere and backward and self.columns > 32:
            return 64 * 16
        return 64 * 32 if self.columns > 64 or (ampere and not whole) else 64 * 64

    def one_tile(self, area: int) -> bool:
        """True if one tile of scores covers a window."""
        n_q, n_kv = map(_power_of_two, self.sizes[2:])
        return n_q * n_kv <= area and max(n_q, n_kv) <= self.largest and self.terms.rel_h is None


def _power_of_two(length: int) -> int:
    return max(MIN_BLOCK, 1 << (length - 1).bit_length())


class _Tiling(NamedTuple):
    """Tiles of scores, and the programs that compute them; see bias_tiles.py for step, height and width."""

    rows: int
    keys: int
    step: int
    height: int
    width: int
    programs: int  # per group of windows
    group: int  # windows per program
    chunks: int  # groups of windows


def _tiling(call: _Scores, area: int, per_rows: bool, per_keys: bool, shares: bool) -> _Tiling:
    """A program has a tile of queries if `per_rows`, a tile of keys if `per_keys`, and several windows if `shares`."""
    terms, (n_batch, heads, n_q, n_kv) = call.terms, call.sizes
    rows = min(call.largest, _power_of_two(n_q))
    width = step = keys = min(_power_of_two(n_kv), call.largest, area // (rows if per_rows else MIN_BLOCK))
    if terms.rel_w is not None:
        width = terms.rel_w.shape[3]
        step = ceil_div(width, call.pieces)
        keys = _power_of_two(step)
    rows, height = min(rows, area // keys), ceil_div(n_kv, width)
    programs = heads * (ceil_div(n_q, rows) if per_rows else 1) * (height * call.pieces if per_keys else 1)
    group, chunks, masks = 1, n_batch, call.masks
    if shares and (terms.bias is None or terms.bias.shape[0] == 1):
        per_mask = ceil_div(n_batch, masks)
        group = n_batch * programs // (_PROGRAMS * gpu_of(call.q.device).sm_count)
        group = max(1, min(group, _MOST_WINDOWS, per_mask))
        chunks = masks * ceil_div(per_mask, group)
    return _Tiling(rows, keys, step, height, width, programs, group, chunks)


def _launch(
    kernel: Any, call: _Scores, tiling: _Tiling, tensors: Mapping[str, Tensor | None], args: dict[str, Any],
    matmuls: int, warps: int | None = None, maxnreg: int | None = None, **constants: Any,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel with the `tensors` [B, H, N, D] and `matmuls` matmuls as large as q k^T."""
    t, terms, key_mask, (n_batch, heads, n_q, n_kv) = tiling, call.terms, call.key_mask, call.sizes
    bias_strides = [0, 0, 0]
    if terms.bias is not None:
        bias_strides = [0 if size == 1 else step for size, step in zip(terms.bias.shape, terms.bias.stride()[:3])]
    align = math.gcd(16, n_kv, t.step, t.width, *bias_strides)
    n_groups = 1 if terms.groups is None else terms.groups.shape[0]
    sizes = (
        n_batch, heads, n_q, n_kv // align, call.masks, n_groups, t.group, t.step // align, t.height, t.width // align
    )  # fmt: skip
    args = args | {
        "lse_ptr": call.lse, "scale": call.scale, "sizes": tuple(16 * size for size in sizes),
        "terms": (
            terms.bias, tuple(16 * (step // align) for step in bias_strides),  # [B or 1, H or 1, N_q, N_kv]
            terms.window_mask,  # [W, N_q, N_kv]
            key_mask, 0 if key_mask is None else 16 * key_mask.stride(0),  # [n_batch, N_kv]
            terms.rel_h, terms.rel_w,  # [n_batch, H, N_q, Kh], [n_batch, H, N_q, Kw]
            terms.groups,  # [W, n]
            terms.scale,  # [H]
        ),
    }  # fmt: skip
    # the rows of a window may lie anywhere in an image
    given = [tensor for tensor in tensors.values() if tensor is not None]
    strides, form = addressing(given, rows=max(tensor.shape[2] for tensor in given))
    constants |= {"FORM": form, "TILE": (t.rows, t.keys, _STAGES, align, 0 if terms.rel_w is None else call.pieces)}
    # a warp per 16 rows, e.g. wgmma needs four warps for 64 rows; more warps where kernels would spill
    tf32, kind = call.q.dtype.itemsize == 4, call.kind
    crowded = call.columns > (64 if kind == "ampere" else 80) and kind != "hopper" and not tf32
    scores = (128 if kind == "ampere" else 256) if crowded else 256 if tf32 else 512
    warps = min(warps or (8 if crowded else 4), max(max(t.rows, t.keys) // 16, t.rows * t.keys // scores))
    args = {**tensors, "strides": strides, **args}
    return Launch(
        kernel, t.programs * t.chunks, args, constants, num_warps=warps, maxnreg=maxnreg, device=call.q.device,
        flop=2.0 * matmuls * math.prod(call.sizes) * call.q.shape[3],
    )  # fmt: skip


def bias_forward_launch(call: AttentionCall, o: Tensor) -> Launch:
    """Returns the launch that computes the output o [B, H, N, D], and call.lse."""
    scores, tensors = _Scores(*call), {"q": call.q, "k": call.k, "v": call.v, "o": o}
    area = scores.area(whole=True)
    one = scores.one_tile(area)
    tiling = _tiling(scores, area if one else scores.area(), True, False, one)
    # without it, ptxas uses 136 registers for tiles of 16 keys on sm_90, and only three programs fit
    few = tiling.keys == MIN_BLOCK and call.q.dtype.itemsize == 2 and scores.columns <= 64
    limit = 128 if few and scores.kind == "hopper" else None
    return _launch(_attention_bias_fwd_kernel, scores, tiling, tensors, {}, 2, maxnreg=limit, ONE_TILE=one)


def bias_backward(
    call: AttentionCall, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, bias_grad: bool
) -> dict[str, Tensor]:
    """Computes dq, dk and dv; returns the gradients of rel_h, rel_w, scale and, if `bias_grad`, bias, if present.

    The returned gradients are fp32. The gradient of the bias has shape [n_batch or 1, H, N_q, N_kv].
    """
    call = _Scores(*call)
    bias_grad &= call.terms.bias is not None
    terms, lse, area = call.terms, call.lse, call.area(backward=True)
    whole = call.one_tile(area)
    delta, dscale = None if whole else torch.empty_like(lse), None if terms.scale is None else torch.empty_like(lse)
    gradients: dict[str, Tensor] = {}
    inputs: dict[str, Tensor | None] = {"q": call.q, "k": call.k, "v": call.v}
    rows = {"delta_ptr": delta, "dscale_ptr": dscale}
    if not whole:
        drel_h = drel_w = None
        if terms.rel_h is not None:
            drel_h = lse.new_empty((*lse.shape, call.pieces, terms.rel_h.shape[3]))
            drel_w = torch.empty_like(terms.rel_w, dtype=torch.float32)
            gradients = {"rel_h": drel_h, "rel_w": drel_w}
        tensors, args = {**inputs, "o": o, "do": do, "dq": dq}, {"drel_h_ptr": drel_h, "drel_w_ptr": drel_w}
        tiling = _tiling(call, area, True, False, False)
        _launch(_attention_bias_bwd_dq_kernel, call, tiling, tensors, rows | args, 3).run()
        if drel_h is not None:
            gradients["rel_h"] = drel_h.sum(3) if call.pieces > 1 else drel_h[:, :, :, 0]
        tensors, tiling = {**inputs, "do": do, "dk": dk, "dv": dv}, _tiling(call, area, False, True, False)
        # without it, ptxas uses 168 registers for tf32, and spills; with it, tiles of 32 columns spill on sm_120
        limit = 255 if call.q.dtype.itemsize == 4 and call.columns > 32 else None
        _launch(_attention_bias_bwd_dkdv_kernel, call, tiling, tensors, {"delta_ptr": delta}, 4, maxnreg=limit).run()
    if whole or bias_grad:
        outputs = {"dq": dq, "dk": dk, "dv": dv} if whole else dict.fromkeys(("dq", "dk", "dv"))
        tensors, tiling = {**inputs, "do": do, **outputs}, _tiling(call, area, True, True, True)
        parts = lse.new_empty((tiling.chunks, *call.sizes[1:])) if bias_grad else None
        args, matmuls = rows | {"parts_ptr": parts}, 5 if whole else 2
        warps = 4 if call.kind == "ampere" and not whole else 8  # 8 spill on sm_80 with 128 columns
        _launch(_attention_bias_bwd_tile_kernel, call, tiling, tensors, args, matmuls, warps, WHOLE=whole).run()
        if parts is not None:
            gradients["bias"] = parts.sum(0, keepdim=True) if terms.bias.shape[0] == 1 else parts
    if dscale is not None:
        gradients["scale"] = dscale.sum((0, 2))
    return gradients
