"""Launches of the attention kernels: memory access, TMA descriptors, arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import Launch, ceil_div
from .attention_policy import BackwardConfig, ForwardConfig, cover, split_head_dim

LOG2_E = 1.4426950408889634
# Sizes and strides: Triton must not specialize on them. The constant ALIGN shows the compiler the strides' alignment.
UNSPECIALIZED = ["n_sequences", "n_heads", "n_q", "n_kv", "key_mask_stride_b"] + [
    f"{name}_stride_{axis}" for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for axis in "bhn"
]
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
        # _tile_arguments replaces the stride of a dimension of length 1 by a legal stride
        if length > 1 and (stride <= 0 or stride * size % _ALIGNMENT or stride * size >= _TMA_MAX_STRIDE):
            return False
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(0 < length < 2**31 for length in tensor.shape)


def _tile_arguments(name: str, tensor: torch.Tensor, rows: int, tma: bool) -> dict[str, Any]:
    """Returns the arguments `name` and `name`_hi for the LO and HI blocks of a tile (attention_tiles.py)."""
    if rows == 0:
        return {name: None, f"{name}_hi": None}
    widths = split_head_dim(tensor.shape[-1])
    blocks: list[Any] = [tensor, tensor if widths[1] else None]
    if tma:
        legal = _ALIGNMENT // tensor.element_size()
        strides = [step if length > 1 else legal for length, step in zip(tensor.shape[:-1], tensor.stride()[:-1])]
        blocks = [
            TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width]) if width else None
            for width in widths
        ]
    return {name: blocks[0], f"{name}_hi": blocks[1]}


def needs_wide_offsets(*tensors: torch.Tensor) -> bool:
    """True if offsets within a tile may exceed int32."""
    return any(_MAX_TILE_ROWS * abs(tensor.stride(2)) >= 2**31 for tensor in tensors)


def _common_alignment(*tensors: torch.Tensor) -> int:
    """Returns the largest power of two up to 16 that divides the strides of B, H and N; skips dimensions of size 1."""
    used = (stride for tensor in tensors for length, stride in zip(tensor.shape[:3], tensor.stride()[:3]) if length > 1)
    return math.gcd(16, *used)


def looped_launch(
    kernel: Any, own: Mapping[str, torch.Tensor], streamed: Mapping[str, torch.Tensor],
    config: ForwardConfig | BackwardConfig, args: Mapping[str, Any], sequences: torch.Tensor | None,
    key_mask: torch.Tensor | None, tails: int = 1, constants: Mapping[str, Any] | None = None,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that loops over tiles of `streamed`. For `own` and `streamed`, see `tiled_launch`.

    Without sequences and key_mask, the loop takes full tiles, and at most `tails` tiles cover the remaining rows.
    """
    block, step = (config.block_m, config.block_n) if "q" in own else (config.block_n, config.block_m)
    length, fixed = next(iter(streamed.values())).shape[2], sequences is None and key_mask is None
    rest = length % step if fixed else 0
    tail = (*cover(rest, step, tails), 0, 0)[:tails]
    mask = {
        "sequences": sequences, "n_sequences": None if sequences is None else sequences.shape[0] - 1,
        "key_mask": key_mask, "key_mask_stride_b": None if key_mask is None else key_mask.stride(0),
    }  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "FULL": length >= step and fixed,
        **dict(zip(("TAIL_B", "TAIL_C"), tail)), "MASKED": sum(tail) != rest, **(constants or {}),
    }  # fmt: skip
    tiles = ceil_div(next(iter(own.values())).shape[2], block)
    return tiled_launch(
        kernel, own, streamed, block, (step, *tail), tiles, config, {**args, **mask}, constants, fixed, sequences
    )


def tiled_launch(
    kernel: Any, own: Mapping[str, torch.Tensor], streamed: Mapping[str, torch.Tensor], block: int,
    pieces: Sequence[int], tiles: int, config: ForwardConfig | BackwardConfig, args: dict[str, Any],
    constants: Mapping[str, Any], fixed: bool = True, sequences: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that processes tiles of `own` (e.g. q, o) with all rows of `streamed` (e.g. k, v).

    `block`: rows per tile of `own`. `pieces`: rows per tile of `streamed`, for the arguments with suffix _a, _b and _c.
    `tiles`: programs per head; ignored for packed inputs (`sequences`).
    """
    tensors = {**own, **streamed}
    rows, q = next(iter(own.values())), tensors["q"]
    tma = config.tma and all(map(tma_allows, (tensors if fixed else streamed).values()))
    align = _common_alignment(*tensors.values())
    args |= {"n_heads": q.shape[1], "n_q": q.shape[2], "n_kv": tensors["k"].shape[2]}
    for name, tensor in own.items():
        args |= _tile_arguments(name, tensor, block, tma and fixed)
    for name, tensor in streamed.items():
        for letter, piece in zip("abc", pieces):
            last = letter == "b" and not fixed  # `over_tiles` loads this tile through masked pointers
            args |= _tile_arguments(f"{name}_{letter}", tensor, block if last else piece, tma and not last)
    for name, tensor in tensors.items():
        args |= {f"{name}_stride_{axis}": tensor.stride(i) // align for i, axis in enumerate("bhn")}
    programs = rows.shape[0] * rows.shape[1] * tiles
    if sequences is not None:
        programs = rows.shape[1] * (rows.shape[2] // block + sequences.shape[0])
    lo, hi = split_head_dim(rows.shape[-1])
    wide = needs_wide_offsets(*tensors.values())
    constants = {
        "D": rows.shape[-1], "LO": lo, "HI": hi, "TMA": tma, "WIDE": wide, "ALIGN": align, "STAGES": config.num_stages,
        **constants,
    }  # fmt: skip
    return Launch(
        kernel, (programs,), args, constants,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg, device=q.device,
    )  # fmt: skip
