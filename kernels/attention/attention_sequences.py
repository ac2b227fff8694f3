"""Device helpers of the attention kernels: the rows and keys of a program.

Inputs come in three forms:

- fixed: q [B, H, N_q, D], k and v [B, H, N_kv, D]. Every query attends to every key of its head.
- packed: q, k, v [1, H, total, D], and `sequences` (cu_seqlens), int32 [S + 1] on the device: the start of each
  sequence and the end of the last one. The host does not know the lengths, so it launches total // BLOCK + S + 1
  programs per head, each for one slot. A slot has room for one tile. The slots from sequences[i] // BLOCK + i on belong
  to sequence i, and always suffice for all tiles of the sequence. Each program searches for the sequence of its slot.
  Rows after the last sequence have no keys, and results of 0.
- masked: like fixed, with a key mask `keep`, bool [B, N_kv]. Loops over keys end at the last unmasked key. The output
  of a query without keys is 0, as in torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WAYS = tl.constexpr(128)  # entries of `sequences` compared at once; two comparisons search 16,384 entries
_KEYS_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _slots_begun(sequences, index, inside, slot, BLOCK: tl.constexpr):
    """Counts the sequences `index` with `inside` True whose first slot is at or before `slot`."""
    first = tl.load(sequences + index, mask=inside, other=0) // BLOCK + index
    return tl.sum((inside & (first <= slot)).to(tl.int32), 0)


@triton.jit
def _find_rows(sequences, n_sequences, n_rows, slot, BLOCK: tl.constexpr):
    """Returns (start, begin, end, others_end) of a slot: first row of the tile, begin and end of the sequence.

    `others_end` is where the program's loop over keys or queries ends: `end`, or `begin` after the last sequence.
    """
    stride = tl.cdiv(n_sequences + 1, _WAYS)
    index = tl.arange(0, _WAYS) * stride
    low = tl.maximum(_slots_begun(sequences, index, index <= n_sequences, slot, BLOCK) - 1, 0) * stride
    begun = 0
    for step in range(low, low + stride, _WAYS):
        index = step + tl.arange(0, _WAYS)
        inside = (index < low + stride) & (index <= n_sequences)
        begun += _slots_begun(sequences, index, inside, slot, BLOCK)
    found = low + tl.maximum(begun - 1, 0)
    begin = tl.load(sequences + found)
    end = tl.load(sequences + tl.minimum(found + 1, n_sequences))
    behind = found == n_sequences
    start = begin + (slot - begin // BLOCK - found) * BLOCK
    # invalid `sequences` must not cause accesses outside the tensors
    begin = tl.minimum(tl.maximum(begin, 0), n_rows)
    end = tl.minimum(tl.where(behind, n_rows, end), n_rows)
    return tl.maximum(start, begin), begin, end, tl.where(behind, begin, end)


@triton.jit
def rows_of_program(sequences, n_sequences, n_heads, n_rows, n_others, BLOCK: tl.constexpr):
    """Returns (b, h, bh, start, begin, end, others_end): image, head, b n_heads + h, and the results of `_find_rows`.

    Programs of one head are adjacent on the grid, so that they share the streamed tensors of the head in L2.
    """
    if sequences is not None:
        slots = n_rows // BLOCK + n_sequences + 1
        b = 0
        h = tl.program_id(0) // slots
        bh = h
        start, begin, end, others_end = _find_rows(sequences, n_sequences, n_rows, tl.program_id(0) % slots, BLOCK)
    else:
        tiles = tl.cdiv(n_rows, BLOCK)
        bh = tl.program_id(0) // tiles
        b = bh // n_heads
        h = bh % n_heads
        start = tl.program_id(0) % tiles * BLOCK
        begin = 0
        end = n_rows
        others_end = n_others
    return b, h, bh, start, begin, end, others_end


@triton.jit
def real_keys(keep, start, n_kv, KEYS: tl.constexpr):
    """Returns a mask [KEYS], True for keys start .. start + KEYS that exist and are not masked by `keep`."""
    key = start + tl.arange(0, KEYS)
    real = key < n_kv
    if keep is not None:
        real = real & (tl.load(keep + key, mask=real, other=0) != 0)
    return real


@triton.jit
def last_kept(kept, n_keys):
    """Returns the index after the last unmasked key; 0 if all are masked."""
    end = 0
    for first in range(0, n_keys, _KEYS_AT_ONCE):
        key = first + tl.arange(0, _KEYS_AT_ONCE)
        real = tl.load(kept + key, mask=key < n_keys, other=0) != 0
        end = tl.maximum(end, tl.max(tl.where(real, key + 1, 0), 0))
    return end
