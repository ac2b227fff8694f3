"""Inputs of attention, and launches of the attention kernels: memory access, TMA descriptors, arguments.

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
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import gpu_of, matmul_kind
from ..launch import Launch, ceil_div, unspecialized
from .attention_policy import AttentionConfig, Problem, cover, split_head_dim

_LOG2_E = 1.4426950408889634
_ALIGNMENT = 16  # in bytes, of addresses and strides: required by TMA and by vector loads
_TMA_MAX_STRIDE = 2**40  # bytes
_MAX_TILE_ROWS = 256


class AttentionCall(NamedTuple):
    """The inputs of a call of attention, and lse, which the forward computes and the backward reads.

    Inputs are packed (with `sequences`), masked (with `key_mask`) or fixed (with neither); see attention_tiles.py. The
    last stride of q, k and v is 1, other strides are arbitrary, e.g. of views of the qkv layer's output.

    Attributes:
        q: Queries [B, H, N_q, D], D from 16 to 128; fp32, fp16 or bf16. B is 1 for packed inputs.
        k, v: Keys and values [B, H, N_kv, D], N_kv at least 1.
        lse: log2(sum(exp(scores))) per query, fp32 [B, H, N_q], contiguous. A query without keys gets +inf instead of
            -inf, for which the backward computes a weight of 0.
        scale: Multiplier of q k^T, positive and finite. `terms.scale` replaces it.
        sequences: cu_seqlens of packed inputs: int32 [S + 1], contiguous, on the device.
        longest: Length of the longest packed sequence, or 0 if unknown; affects only the choice of tiles.
        key_mask: bool [B, N_kv], False for masked keys; last stride 1.
        terms: `ScoreTerms` of ops/descriptions.py for inputs that are not packed. All terms are contiguous, except that
            the bias has 4 dimensions, the last one with stride 1. With groups, N_q = N_kv is the number of tokens of an
            image, lse is [B * W, H, n] for groups of n tokens, and key_mask is None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    scale: float
    sequences: Tensor | None = None
    longest: int = 0
    key_mask: Tensor | None = None
    terms: Any = None

    @property
    def form(self) -> str:
        return "packed" if self.sequences is not None else "fixed" if self.key_mask is None else "masked"

    def problem(self, *others: Tensor) -> Problem:
        """Returns the input of the launch policy for a kernel with q, k, v and `others`, all [B, H, N, D].

        For packed inputs, n_q and n_kv are the mean sequence length, limited to `longest`.
        """
        (batch, heads, n_q, head_dim), n_kv, gpu = self.q.shape, self.k.shape[2], gpu_of(self.q.device)
        if self.sequences is not None:
            n_q = n_kv = min(self.longest or n_q, ceil_div(n_q, max(self.sequences.shape[0] - 1, 1)))
        access = access_of(self.q, self.k, self.v, *others)
        element, form = matmul_kind(self.q.dtype), self.form
        return Problem(gpu.arch, gpu.sm_count, element, head_dim, n_q, n_kv, batch * heads, access, form)


def access_of(*tensors: Tensor) -> str:
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


def tma_allows(tensor: Tensor) -> bool:
    """True if a tensor [B, H, N, D] can have TMA descriptors."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1]):
        # _blocks replaces the stride of a dimension of length 1 by a legal stride
        if length > 1 and (stride <= 0 or stride * size % _ALIGNMENT or stride * size >= _TMA_MAX_STRIDE):
            return False
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(0 < length < 2**31 for length in tensor.shape)


def _blocks(tensor: Tensor, rows: int, tma: bool) -> tuple[Any, Any]:
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


def needs_wide_offsets(*tensors: Tensor, rows: int = _MAX_TILE_ROWS) -> bool:
    """True if offsets within a tile, whose rows are at most `rows` apart, may exceed int32."""
    return any(rows * abs(tensor.stride(2)) >= 2**31 for tensor in tensors)


def addressing(tensors: Sequence[Tensor], rows: int = _MAX_TILE_ROWS) -> tuple[Any, Any]:
    """Returns the argument `strides` and the constant FORM (attention_tiles.py); `rows`: see `needs_wide_offsets`."""
    head_dim, align = tensors[0].shape[-1], _common_alignment(*tensors)
    strides = tuple(tuple(16 * (step // align) for step in tensor.stride()[:3]) for tensor in tensors)
    return strides, (head_dim, *split_head_dim(head_dim), needs_wide_offsets(*tensors, rows=rows), align)


def _common_alignment(*tensors: Tensor) -> int:
    """Returns the largest power of two up to 16 that divides the strides of B, H and N; skips dimensions of size 1."""
    used = (stride for tensor in tensors for length, stride in zip(tensor.shape[:3], tensor.stride()[:3]) if length > 1)
    return math.gcd(16, *used)


def tiled_launch(
    kernel: Any, call: AttentionCall, own: Mapping[str, Tensor], streamed: Mapping[str, Tensor],
    config: AttentionConfig, args: Mapping[str, Any], *, block: int, pieces: Sequence[int], matmuls: int,
    tiles: int = 1, **constants: Any,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that processes tiles of `own` (e.g. q, o) with all rows of `streamed` (e.g. k, v).

    Args:
        args: Arguments of the kernel in addition to those that all kernels have; `constants` likewise.
        block: Rows per tile of `own`.
        pieces: Rows per tile of `streamed`, for the arguments with _a, _b and _c.
        matmuls: Number of matmuls as large as q k^T.
        tiles: Tiles of `own` per program, only for fixed inputs.
    """
    tensors, rows, fixed = {**own, **streamed}, next(iter(own.values())), call.form == "fixed"
    tma = config.tma and all(map(tma_allows, (tensors if fixed else streamed).values()))
    strides, form = addressing(tuple(tensors.values()))
    blocks = {name: _blocks(tensor, block, tma and fixed) for name, tensor in own.items()}
    for name, tensor in streamed.items():
        for letter, piece in zip("abc", pieces):
            last = letter == "b" and not fixed  # `over_tiles` loads this tile through masked pointers
            blocks[f"{name}_{letter}"] = _blocks(tensor, block if last else piece, tma and not last)
    (batch, heads, n_q, head_dim), n_kv = call.q.shape, call.k.shape[2]
    per_head = ceil_div(ceil_div(rows.shape[2], block), tiles)
    if call.sequences is not None:
        per_head = rows.shape[2] // block + call.sequences.shape[0]
    args = {
        **{f"{name}_{part}": block for name, pair in blocks.items() for part, block in zip(("lo", "hi"), pair)},
        "strides": strides, "sizes": tuple(map(unspecialized, (heads, n_q, n_kv))), "lse_ptr": call.lse,
        "qk_scale": call.scale * _LOG2_E, **args,
    }  # fmt: skip
    return Launch(
        kernel, batch * heads * per_head, args, {"FORM": form, **constants}, num_warps=config.num_warps,
        num_stages=config.num_stages, maxnreg=config.maxnreg, flop=2.0 * matmuls * call.lse.numel() * n_kv * head_dim,
        device=rows.device,
    )  # fmt: skip


def looped_launch(
    kernel: Any, call: AttentionCall, own: Mapping[str, Tensor], streamed: Mapping[str, Tensor],
    config: AttentionConfig, args: Mapping[str, Any], *, matmuls: int, tails: int = 1, **constants: Any,
) -> Launch:  # fmt: skip
    """Returns the launch of a kernel that loops over tiles of `streamed`. For the arguments, see `tiled_launch`.

    For fixed inputs, the loop takes full tiles, and at most `tails` tiles cover the remaining rows.
    """
    block, step = (config.block_m, config.block_n) if "q" in own else (config.block_n, config.block_m)
    length, fixed = next(iter(streamed.values())).shape[2], call.form == "fixed"
    rest = length % step if fixed else 0
    tail = (*cover(rest, step, tails), 0, 0)[:2]
    loop = block, step, length >= step and fixed, *tail, sum(tail) != rest, config.num_stages
    limits = (
        call.sequences, None if call.sequences is None else unspecialized(call.sequences.shape[0]),
        call.key_mask, None if call.key_mask is None else 16 * call.key_mask.stride(0),
    )  # fmt: skip
    return tiled_launch(
        kernel, call, own, streamed, config, {**args, "limits": limits}, block=block, pieces=(step, *tail[:tails]),
        matmuls=matmuls, LOOP=loop, **constants,
    )  # fmt: skip
