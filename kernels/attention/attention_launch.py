"""Launches of the attention kernels: memory access, TMA descriptors, arguments.

A program computes a tile of some tensors, for which it needs all rows of others:

| kernel | tiles of | all rows of |
|---|---|---|
| row, looped | q, o | k, v |
| dq | q, do, o, dq | k, v |
| dkdv | k, v, dk, dv | q, do |

The resulting `Launch` is what `Launch.run` runs, what `inspect/attention_builds.py` compiles, and what a plan replays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import Launch, ceil_div, unspecialized
from .attention_policy import BackwardConfig, ForwardConfig, cover, split_head_dim

LOG2_E = 1.4426950408889634
_ALIGNMENT = 16  # in bytes, of addresses and strides: required by TMA and by vector loads
_TMA_MAX_STRIDE = 2**40  # bytes
_MAX_TILE_ROWS = 256


def access_of(*tensors: torch.Tensor) -> str:
    """Returns the fastest access that the layout of these tensors [B, H, N, D] allows (see `Problem.access`).

    "vector" requires addresses and strides aligned to 16 bytes. For strides in e4m3, 8 bytes suffice (head_dim 72).
    """
    if all(map(tma_allows, tensors)):
        return "tma"
    aligned = all(
        tensor.data_ptr() % _ALIGNMENT == 0 and _common_alignment(tensor) * max(2, tensor.element_size()) >= _ALIGNMENT
        for tensor in tensors
    )
    return "vector" if aligned else "scalar"


def tma_allows(tensor: torch.Tensor) -> bool:
    """True if a tensor [B, H, N, D] can have TMA descriptors."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]):
        # _blocks replaces the stride of a dimension of length 1 by a legal stride
        if length > 1 and (stride <= 0 or stride * size % _ALIGNMENT or stride * size >= _TMA_MAX_STRIDE):
            return False
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(0 < length < 2**31 for length in tensor.shape)


def _blocks(tensor: torch.Tensor, rows: int, tma: bool) -> tuple[Any, Any]:
    """Returns the arguments for the LO and HI blocks of a tile (attention_tiles.py); None if there is no such block."""
    if not tma or not rows:
        return tensor if rows else None, None
    legal = _ALIGNMENT // tensor.element_size()
    strides = [step if length > 1 else legal for length, step in zip(tensor.shape[:-1], tensor.stride()[:-1])]
    lo, hi = (
        TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width]) if width else None
        for width in split_head_dim(tensor.shape[-1])
    )
    return lo, hi


def needs_wide_offsets(*tensors: torch.Tensor, rows: int = _MAX_TILE_ROWS) -> bool:
    """True if offsets within a tile, whose rows are at most `rows` apart, may exceed int32."""
    return any(rows * abs(tensor.stride(2)) >= 2**31 for tensor in tensors)


def addressing(tensors: Sequence[torch.Tensor], rows: int = _MAX_TILE_ROWS) -> tuple[Any, Any]:
    """Returns the argument `strides` and the constant FORM (attention_tiles.py); `rows`: see `needs_wide_offsets`."""
    head_dim, align = tensors[0].shape[-1], _common_alignment(*tensors)
    strides = tuple(tuple(16 * (step // align) for step in tensor.stride()[:3]) for tensor in tensors)
    return strides, (head_dim, *split_head_dim(head_dim), needs_wide_offsets(*tensors, rows=rows), align)


def _common_alignment(*tensors: torch.Tensor) -> int:
    """Returns the largest power of two up to 16 that divides the strides of B, H and N; skips dimensions of size 1."""
    used = (stride for tensor in tensors for length, stride in zip(tensor.shape[:3], tensor.stride()[:3]) if length > 1)
    return math.gcd(16, *used)


def looped_launch(
    kernel: Any, own: Mapping[str, torch.Tensor], streamed: Mapping[str, torch.Tensor],
    config: ForwardConfig | BackwardConfig, args: Mapping[str, Any], constants: Mapping[str, Any],
    sequences: torch.Tensor | None, key_mask: torch.Tensor | None, tails: int = 1,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that loops over tiles of `streamed`. For `own` and `streamed`, see `tiled_launch`.

    Without sequences and key_mask, the loop takes full tiles, and at most `tails` tiles cover the remaining rows.
    """
    block, step = (config.block_m, config.block_n) if "q" in own else (config.block_n, config.block_m)
    length, fixed = next(iter(streamed.values())).shape[2], sequences is None and key_mask is None
    rest = length % step if fixed else 0
    tail = (*cover(rest, step, tails), 0, 0)[:2]
    limits = (
        sequences, None if sequences is None else unspecialized(sequences.shape[0]),
        key_mask, None if key_mask is None else 16 * key_mask.stride(0),
    )  # fmt: skip
    loop = block, step, length >= step and fixed, *tail, sum(tail) != rest, config.num_stages
    args, constants = {**args, "limits": limits}, {**constants, "LOOP": loop}
    tiles = ceil_div(next(iter(own.values())).shape[2], block)
    return tiled_launch(kernel, own, streamed, config, args, constants, block, (step, *tail[:tails]), tiles)


def tiled_launch(
    kernel: Any, own: Mapping[str, torch.Tensor], streamed: Mapping[str, torch.Tensor],
    config: ForwardConfig | BackwardConfig, args: Mapping[str, Any], constants: Mapping[str, Any], block: int,
    pieces: Sequence[int], tiles: int,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that processes tiles of `own` (e.g. q, o) with all rows of `streamed` (e.g. k, v).

    `block`: rows per tile of `own`. `pieces`: rows per tile of `streamed`, for the arguments with _a, _b and _c.
    `tiles`: programs per head; ignored for packed inputs (`sequences`).
    """
    tensors = {**own, **streamed}
    rows, (sequences, _, key_mask, _) = next(iter(own.values())), args.get("limits", (None,) * 4)
    fixed = sequences is None and key_mask is None
    tma = config.tma and all(map(tma_allows, (tensors if fixed else streamed).values()))
    strides, form = addressing(tuple(tensors.values()))
    blocks = {name: _blocks(tensor, block, tma and fixed) for name, tensor in own.items()}
    for name, tensor in streamed.items():
        for letter, piece in zip("abc", pieces):
            last = letter == "b" and not fixed  # `over_tiles` loads this tile through masked pointers
            blocks[f"{name}_{letter}"] = _blocks(tensor, block if last else piece, tma and not last)
    sizes = tensors["q"].shape[1], tensors["q"].shape[2], tensors["k"].shape[2]
    programs = rows.shape[0] * rows.shape[1] * tiles
    if sequences is not None:
        programs = rows.shape[1] * (rows.shape[2] // block + sequences.shape[0])
    args = {
        **{f"{name}_{part}": block for name, pair in blocks.items() for part, block in zip(("lo", "hi"), pair)},
        "strides": strides, "sizes": tuple(map(unspecialized, sizes)), **args,
    }  # fmt: skip
    return Launch(
        kernel, (programs,), args, {"FORM": form, **constants},
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg, device=rows.device,
    )  # fmt: skip
