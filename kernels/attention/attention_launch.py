"""Launches of the attention kernels: memory access, TMA descriptors, arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import Launch
from .attention_policy import BackwardConfig, ForwardConfig, split_head_dim

LOG2_E = 1.4426950408889634
# Integers on which Triton must not specialize: sizes and strides. The constant ALIGN contains the strides' alignment.
UNSPECIALIZED = ["n_sequences", "n_heads", "n_q", "n_kv", "key_mask_stride_b"] + [
    f"{name}_stride_{axis}" for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv") for axis in "bhn"
]
_VECTOR_BYTES = 16
_TMA_ALIGNMENT = 16  # bytes, of the address and of every stride
_TMA_MAX_STRIDE = 2**40  # bytes
_MAX_TILE_ROWS = 256


def access_of(*tensors: torch.Tensor) -> str:
    """Returns the fastest access that the layout of these tensors [B, H, N, D] allows (see `Problem.access`).

    Rows of e4m3 tensors, which are only outputs, may be aligned to 8 instead of 16 bytes, e.g. with 72 channels.
    """
    if all(map(tma_allows, tensors)):
        return "tma"
    aligned = all(
        tensor.storage_offset() * tensor.element_size() % _VECTOR_BYTES == 0
        and tensor.data_ptr() % _VECTOR_BYTES == 0
        and _common_alignment(tensor) * max(2, tensor.element_size()) >= _VECTOR_BYTES
        for tensor in tensors
    )
    return "vector" if aligned else "scalar"


def tma_allows(tensor: torch.Tensor) -> bool:
    """True if a tensor [B, H, N, D] can have TMA descriptors."""
    size = tensor.element_size()
    if tensor.data_ptr() % _TMA_ALIGNMENT or tensor.storage_offset() * size % _TMA_ALIGNMENT:
        return False
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]):
        # the stride of a dimension of length 1 does not matter: _descriptor replaces it by a legal stride
        if length > 1 and (stride <= 0 or stride * size % _TMA_ALIGNMENT or stride * size >= _TMA_MAX_STRIDE):
            return False
    return all(0 < length < 2**31 for length in tensor.shape)


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a TMA descriptor for boxes [rows, columns] of one head."""
    legal = _TMA_ALIGNMENT // tensor.element_size()
    strides = [stride if length > 1 else legal for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1])]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, columns])


def _tile_arguments(name: str, tensor: torch.Tensor, rows: int, tma: bool) -> dict[str, Any]:
    """Returns the arguments `name` and `name`_hi for the LO and HI blocks of a tile (attention_tiles.py)."""
    lo, hi = split_head_dim(tensor.shape[-1])
    if rows == 0:
        return {name: None, f"{name}_hi": None}
    if not tma:
        return {name: tensor, f"{name}_hi": tensor if hi else None}
    return {name: _descriptor(tensor, rows, lo), f"{name}_hi": _descriptor(tensor, rows, hi) if hi else None}


def needs_wide_offsets(*tensors: torch.Tensor) -> bool:
    """True if offsets within a tile may exceed int32."""
    return any(_MAX_TILE_ROWS * abs(tensor.stride(2)) >= 2**31 for tensor in tensors)


def _common_alignment(*tensors: torch.Tensor) -> int:
    """Returns the largest power of two up to 16 that divides all strides but the last."""
    used = (stride for tensor in tensors for length, stride in zip(tensor.shape[:3], tensor.stride()[:3]) if length > 1)
    return math.gcd(16, *used)


def tiled_launch(
    kernel: Any, own: Mapping[str, torch.Tensor], streamed: Mapping[str, torch.Tensor], block: int,
    pieces: Sequence[int], tiles: int, config: ForwardConfig | BackwardConfig, args: dict[str, Any],
    constants: Mapping[str, Any], sequences: torch.Tensor | None, key_mask: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """Returns the launch of an attention kernel. A program owns tiles of `own`, and loops over `streamed`.

    Args:
        own, streamed: Tensors [B, H, N, D] by argument name.
        block: Rows of an own tile.
        pieces: Rows of the streamed tiles, up to three sizes; 0 if absent.
        tiles: Programs per head. Ignored for packed inputs.
    """
    fixed = sequences is None and key_mask is None
    tensors = {**own, **streamed}
    rows, q = next(iter(own.values())), tensors["q"]
    tma = config.tma and all(map(tma_allows, (tensors if fixed else streamed).values()))
    align = _common_alignment(*tensors.values())
    args |= {"n_heads": q.shape[1], "n_q": q.shape[2], "n_kv": tensors["k"].shape[2]}
    if not isinstance(config, ForwardConfig) or config.scheme == "looped":
        args |= {"sequences": sequences, "key_mask": key_mask}
        args["key_mask_stride_b"] = None if key_mask is None else key_mask.stride(0)
        args["n_sequences"] = None if sequences is None else sequences.shape[0] - 1
    for name, tensor in own.items():
        args |= _tile_arguments(name, tensor, block, tma and fixed)
    for name, tensor in streamed.items():
        for letter, piece in zip("abc", pieces):
            if letter == "b" and not fixed:  # the last tile of a sequence
                args |= _tile_arguments(f"{name}_b", tensor, block, tma=False)
            else:
                args |= _tile_arguments(f"{name}_{letter}", tensor, piece, tma)
    for name, tensor in tensors.items():
        args |= {f"{name}_stride_{axis}": tensor.stride(i) // align for i, axis in enumerate("bhn")}
    programs = rows.shape[0] * rows.shape[1] * tiles
    if sequences is not None:
        programs = rows.shape[1] * (rows.shape[2] // block + sequences.shape[0])
    lo, hi = split_head_dim(rows.shape[-1])
    wide = needs_wide_offsets(*tensors.values())
    constants = {"D": rows.shape[-1], "LO": lo, "HI": hi, "TMA": tma, "WIDE": wide, "ALIGN": align, **constants}
    return Launch(
        kernel, (programs,), args, constants,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg, device=q.device,
    )  # fmt: skip
