"""Position embeddings: learned, fixed (sine and cosine) and rotary."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import RopeConfig, Size


def frequencies(count: int, temperature: float, like: Tensor) -> Tensor:
    """Returns temperature^(-i / count) for i = 0, ..., count - 1, with the dtype and device of `like`."""
    return temperature ** (-torch.arange(count, dtype=like.dtype, device=like.device) / count)


def fixed_pos_embed(kind: str, grid: Size, dim: int, device: torch.device | None = None) -> Tensor:
    """Returns the fixed position embedding [1, rows * columns, dim] of a patch grid, in fp32.

    "sincos1d" encodes the number of the patch in reading order. "sincos2d" encodes the column in the first half of the
    channels and the row in the second half. Source: arXiv 1706.03762, section 3.5.
    """

    def encode(count: int, width: int) -> Tensor:
        positions = torch.arange(count, dtype=torch.float64, device=device)
        angles = positions[:, None] * frequencies(width // 2, 10000.0, positions)
        return torch.cat([angles.sin(), (angles + math.pi / 2).sin()], dim=1)  # ONNX Runtime 1.23 has no fp64 Cos

    rows, columns = grid
    if kind == "sincos1d":
        return encode(rows * columns, dim)[None].float()
    planes = encode(columns, dim // 2).expand(rows, -1, -1), encode(rows, dim // 2)[:, None].expand(-1, columns, -1)
    return torch.cat(planes, dim=2).flatten(0, 1)[None].float()


def resample_pos_embed(pos_embed: Tensor, old_grid: Size, new_grid: Size, num_prefix_tokens: int) -> Tensor:
    """Interpolates the patch positions of a learned embedding [1, prefix + old patches, C] (bicubic, in fp32)."""
    is_known = all(type(size) is int for size in new_grid)  # comparing a symbolic size would specialize the graph
    if is_known and old_grid == new_grid:
        return pos_embed
    prefix, patches = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    plane = patches.float().reshape(1, old_grid[0], old_grid[1], -1).permute(0, 3, 1, 2)
    plane = F.interpolate(plane, size=new_grid, mode="bicubic", antialias=True, align_corners=False)
    patches = plane.permute(0, 2, 3, 1).flatten(1, 2).to(pos_embed.dtype)
    return torch.cat([prefix, patches], dim=1)


def rope_of(config: RopeConfig, grid: Size, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines [rows * columns, head_dim / 2] of the rotary embedding of a patch grid.

    The tables are on the device of `like`, in fp64 if `like` is fp64, otherwise in fp32.
    Sources: RoFormer (arXiv 2104.09864), and in two dimensions EVA-02 (2303.11331) and DINOv3 (2508.10104).
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    known = isinstance(grid[0], int) and isinstance(grid[1], int) and not torch.compiler.is_compiling()
    tables = _cached_tables if known and like.device.type != "meta" else _rope_tables
    return tables(config, grid, head_dim, like.device, dtype)


def pairs(x: Tensor, layout: str) -> Sequence[Tensor]:
    """Returns the first and the second channels of all pairs, see `rotate`."""
    return (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotates pairs (a, b) of channels of x [..., N, D] to (a cos - b sin, b cos + a sin); returns x's dtype.

    cos and sin are [N, D/2], or [N, D] with a value for each result. Layout "half" pairs channels j and j + D/2,
    "interleaved" pairs 2j and 2j + 1.
    """
    a, b = pairs(x, layout)
    by_pair = cos.shape[-1] < x.shape[-1]
    (cos_a, cos_b), (sin_a, sin_b) = ((table, table) if by_pair else pairs(table, layout) for table in (cos, sin))
    turned = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    joined = torch.stack(turned, -1).flatten(-2) if layout == "interleaved" else torch.cat(turned, -1)
    return joined.to(x.dtype)


def _rope_tables(
    config: RopeConfig, grid: Size, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, columns = (torch.arange(n, dtype=torch.float32, device=device) for n in grid)
    if config.coordinates == "centred":
        rows, columns = (2 * math.pi * (2 * ((axis + 0.5) / n) - 1) for axis, n in zip((rows, columns), grid))
    else:
        old = config.reference_grid or (1.0, 1.0)
        new = grid if config.reference_grid else (1, 1)
        rows, columns = ((axis + config.offset) / n * scale for axis, n, scale in zip((rows, columns), new, old))
    planes = [rows[:, None].expand(grid), columns[None].expand(grid)]
    if config.columns_first:
        planes.reverse()
    turns = torch.stack(planes, dim=-1)[..., None] * frequencies(head_dim // 4, config.temperature, rows)
    angles = turns.flatten(2).flatten(0, 1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


# not inference tensors, because later calls may need autograd
_cached_tables = functools.lru_cache(maxsize=32)(torch.inference_mode(False)(_rope_tables))
