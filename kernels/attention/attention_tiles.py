"""Device functions of the attention kernels. They find a program's rows, and load, store and multiply tiles of a head.

Inputs come in three forms:

- fixed: q [B, H, N_q, D], k and v [B, H, N_kv, D]. Every query attends to every key of its head.
- packed: q, k, v [1, H, total, D], and `sequences` (cu_seqlens), int32 [S + 1]: the start of each sequence and the end
  of the last sequence. Rows after the last sequence have no keys; their outputs and gradients are 0.
- masked: like fixed, with `key_mask`, bool [B, N_kv], False for masked keys. Loops over keys end at the last unmasked
  key. The output of a query without keys is 0, as in torch's scaled_dot_product_attention.

Each program computes the results of one tile of BLOCK rows. For packed inputs, `sequences` is on the device, so the
host does not know the number of tiles. It launches enough programs per head: total // BLOCK + S + 1. The number of a
program within its head is its slot. Sequence i has the slots from sequences[i] // BLOCK + i to sequences[i + 1] //
BLOCK + i, at least one per tile. Superfluous programs do nothing. Each program searches `sequences` for its sequence.

A tile holds ROWS rows of one head, [ROWS, D]. Triton's blocks have power-of-two sizes. A tile is therefore a tuple of
one or two blocks, LO and HI columns wide (80 = 64 + 16). One block of 128 columns would need more loads and MMAs.

Related arguments are grouped. `attention_launch.py` makes the arguments of the kernels:

- FORM: constants (D, LO, HI, WIDE, ALIGN). HI is 0 if there is no second block. WIDE: offsets within a tile need int64.
- tensor: (lo, hi, image, head, strides) of a tensor [B, H, N, D] with last stride 1. lo and hi are TMA descriptors of
  the blocks, or lo points to the tensor and hi is not used. strides: of images, heads and rows, times 16 / ALIGN, where
  ALIGN is the largest power of two, up to 16, that divides all strides. A sixth element, if any, points to the numbers
  of the rows in the image: row i of the tensor is then row numbers[i] of the image (windows, bias_tiles.py).
- LOOP: constants (rows of a program, rows of a loop step, FULL, TAIL_B, TAIL_C, MASKED, STAGES); see `over_tiles`.
- sizes: (heads, N_q, N_kv). limits: (sequences, their length, key_mask, its stride times 16), or None.

The launcher encodes sizes with `unspecialized` (launch.py). Strides, which may exceed int32, are times 16 instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import decoded

_TF32 = tl.constexpr("tf32")  # triton 3.6 fails if the default of an argument is a string
_WAYS = tl.constexpr(128)  # entries of `sequences` compared at once; two comparisons search 16,384 entries
_KEYS_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _slots_begun(sequences, index, inside, slot, BLOCK: tl.constexpr):
    """Counts the sequences whose first slot is at most `slot`, among sequences `index` where `inside` is True."""
    first = tl.load(sequences + index, mask=inside, other=0) // BLOCK + index
    return tl.sum((inside & (first <= slot)).to(tl.int32), 0)


@triton.jit
def _find_rows(sequences, n_sequences, n_rows, slot, BLOCK: tl.constexpr):
    """Returns (start, begin, end, others_end): first row of the tile, begin and end of the sequence, end of the loop.

    Query tiles loop over keys begin .. others_end, key tiles over queries. After the last sequence, the loop is empty.
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
def rows_of_program(limits, n_heads, n_rows, n_others, BLOCK: tl.constexpr):
    """Returns (b, h, bh, start, begin, end, others_end): image, head, b * n_heads + h; the rest as in `_find_rows`.

    Programs of one head are adjacent on the grid, so that the tensors over which they loop stay in L2.
    """
    if limits[0] is not None:
        n_sequences = decoded(limits[1]) - 1
        slots = n_rows // BLOCK + n_sequences + 1
        b = 0
        h = tl.program_id(0) // slots
        bh = h
        start, begin, end, others_end = _find_rows(limits[0], n_sequences, n_rows, tl.program_id(0) % slots, BLOCK)
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
def row_of_mask(limits, b):
    """Returns the offset of image b in the key mask, if there is one. Triton 3.6 cannot return tuples with None."""
    offset = tl.cast(0, tl.int64)
    if limits[2] is not None:
        offset = tl.cast(b, tl.int64) * (limits[3] >> 4)
    return offset


@triton.jit
def real_keys(mask, start, n_kv, KEYS: tl.constexpr):
    """Returns a mask [KEYS], True for keys start .. start + KEYS that exist and are not masked.

    mask: (key_mask or None, offset of the image).
    """
    key = start + tl.arange(0, KEYS)
    real = key < n_kv
    if mask[0] is not None:
        real = real & (tl.load(mask[0] + mask[1] + key, mask=real, other=0) != 0)
    return real


@triton.jit
def last_unmasked(mask, n_keys):
    """Returns the index after the last unmasked key; 0 if all are masked."""
    end = 0
    for first in range(0, n_keys, _KEYS_AT_ONCE):
        key = first + tl.arange(0, _KEYS_AT_ONCE)
        real = tl.load(mask[0] + mask[1] + key, mask=key < n_keys, other=0) != 0
        end = tl.maximum(end, tl.max(tl.where(real, key + 1, 0), 0))
    return end


@triton.jit
def _pointers(tensor, start, n_rows, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FORM):
    """Returns pointers [ROWS, COLS] to a block; the offset of the tile is int64."""
    pointer, b, h, strides = tensor[0], tl.cast(tensor[2], tl.int64), tl.cast(tensor[3], tl.int64), tensor[4]
    stride_n = strides[2] >> 4
    ALIGN: tl.constexpr = FORM[4]
    row = tl.arange(0, ROWS)
    if len(tensor[4:]) > 1:  # triton 3.6 cannot count a tuple that contains None
        row = tl.load(tensor[5] + (start + row), mask=start + row < n_rows, other=0)
        start = 0
    if FORM[3]:
        row = row.to(tl.int64)
    # LLVM ignores tt.divisibility; it must see the factor ALIGN to add columns with fewer registers
    offsets = row[:, None] * (stride_n * ALIGN) + (tl.arange(0, COLS) + COLUMN)[None, :]
    pointer += (b * (strides[0] >> 4) + h * (strides[1] >> 4)) * ALIGN
    return pointer + (tl.cast(start, tl.int64) * stride_n * ALIGN + offsets)


@triton.jit
def _mask(start, n_rows, COLUMN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FORM):
    """Returns a mask [ROWS, COLS] of a block, True for elements with row < n_rows and column < D."""
    mask = (tl.arange(0, ROWS) + start)[:, None] < n_rows
    if COLUMN + COLS > FORM[0]:
        mask = mask & ((tl.arange(0, COLS) + COLUMN)[None, :] < FORM[0])
    return mask


@triton.jit
def _load_block(tensor, start, n_rows, INDEX: tl.constexpr, ROWS: tl.constexpr, FORM, MASKED: tl.constexpr):
    """Loads the LO (INDEX 0) or HI (INDEX 1) block of a tile; see `load_tile`."""
    COLS: tl.constexpr = FORM[1 + INDEX]
    COLUMN: tl.constexpr = FORM[1] * INDEX
    if isinstance(tensor[0], tl.tensor_descriptor):
        block = tensor[INDEX].load([tensor[2], tensor[3], start, COLUMN]).reshape(ROWS, COLS)
    else:
        pointers = _pointers(tensor, start, n_rows, COLUMN, ROWS, COLS, FORM)
        if MASKED:
            block = tl.load(pointers, mask=_mask(start, n_rows, COLUMN, ROWS, COLS, FORM), other=0.0)
        elif COLUMN + COLS > FORM[0]:
            block = tl.load(pointers, mask=(tl.arange(0, COLS) + COLUMN)[None, :] < FORM[0], other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit
def load_tile(tensor, start, n_rows, ROWS: tl.constexpr, FORM, MASKED: tl.constexpr):
    """Loads rows start .. start + ROWS of one head. Rows past n_rows (MASKED) or past the tensor's end (TMA) are 0."""
    lo = _load_block(tensor, start, n_rows, 0, ROWS, FORM, MASKED)
    if FORM[2] > 0:
        return lo, _load_block(tensor, start, n_rows, 1, ROWS, FORM, MASKED)
    else:
        return (lo,)


@triton.jit
def _store_block(tensor, values, start, n_rows, INDEX: tl.constexpr, ROWS: tl.constexpr, FORM):
    COLS: tl.constexpr = FORM[1 + INDEX]
    COLUMN: tl.constexpr = FORM[1] * INDEX
    if isinstance(tensor[0], tl.tensor_descriptor):
        block = values.to(tensor[INDEX].dtype).reshape(1, 1, ROWS, COLS)
        tensor[INDEX].store([tensor[2], tensor[3], start, COLUMN], block)
    else:
        pointers = _pointers(tensor, start, n_rows, COLUMN, ROWS, COLS, FORM)
        values = values.to(tensor[0].dtype.element_ty)
        tl.store(pointers, values, mask=_mask(start, n_rows, COLUMN, ROWS, COLS, FORM))


@triton.jit
def store_tile(tensor, tile, start, n_rows, ROWS: tl.constexpr, FORM):
    """Stores rows start .. start + ROWS of one head; skips rows past n_rows (with TMA, past the end of the tensor)."""
    for i in tl.static_range(len(tile)):
        _store_block(tensor, tile[i], start, n_rows, i, ROWS, FORM)


@triton.jit
def zero_tile(ROWS: tl.constexpr, FORM):
    lo = tl.zeros((ROWS, FORM[1]), tl.float32)
    if FORM[2] > 0:
        return lo, tl.zeros((ROWS, FORM[2]), tl.float32)
    else:
        return (lo,)


@triton.jit
def scaled(tile, factor):
    """Multiplies a tile by a scalar, or by one factor per row [ROWS, 1]."""
    if len(tile) > 1:
        return tile[0] * factor, tile[1] * factor
    else:
        return (tile[0] * factor,)


@triton.jit
def chosen(tile, rows):
    """Zeros the rows of a tile where `rows` [ROWS, 1] is False."""
    if len(tile) > 1:
        return tl.where(rows, tile[0], 0.0), tl.where(rows, tile[1], 0.0)
    else:
        return (tl.where(rows, tile[0], 0.0),)


@triton.jit
def row_dot(a, b):
    """Returns the sum over the columns of a * b, fp32 [ROWS], for two tiles."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) > 1:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def dot_transposed(a, b, PRECISION: tl.constexpr = _TF32):
    """Returns a b^T, fp32 [ROWS_A, ROWS_B], for tiles a and b."""
    product = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    if len(a) > 1:
        product = tl.dot(a[1], b[1].T, product, input_precision=PRECISION)
    return product


@triton.jit
def dot_add(weights, tile, acc, PRECISION: tl.constexpr = _TF32):
    """Returns acc + weights @ tile, with `weights` rounded to the dtype of `tile`; None in `acc` stands for 0."""
    weights = weights.to(tile[0].dtype)
    lo = tl.dot(weights, tile[0], acc[0], input_precision=PRECISION)
    if len(tile) > 1:
        return lo, tl.dot(weights, tile[1], acc[1], input_precision=PRECISION)
    else:
        return (lo,)


@triton.jit
def over_tiles(step: tl.constexpr, full, tails, shared, state, begin, end, FIXED: tl.constexpr, FORM, LOOP):
    """Calls `step` for each tile of rows begin .. end of two streamed tensors; returns the final `state`.

    For fixed inputs, the full tiles (if FULL) are followed by tiles of TAIL_B and TAIL_C rows (if > 0). Only the last
    tile may need a mask (MASKED). For packed and masked inputs with TMA, the last, partial tile is loaded through
    masked pointers. TMA would also load rows past `end`. A NaN there would spread, as 0 * NaN = NaN. Without TMA, one
    loop masks all tiles of these inputs, because separate loops for full and last tiles would spill.

    Args:
        step: Function (pair, start, end, shared, state, ROWS, MASKED, FIRST, FORM) that returns the new state. FIRST:
            True only if `state` is the initial state.
        full: Pair of tensors, for full tiles.
        tails: One or two pairs of tensors: the last tiles, or pointers for masked tiles.
    """
    STEP: tl.constexpr = LOOP[1]
    FULL: tl.constexpr = LOOP[2]
    TAIL_B: tl.constexpr = LOOP[3]
    TAIL_C: tl.constexpr = LOOP[4]
    MASKED: tl.constexpr = LOOP[5]
    STAGES: tl.constexpr = LOOP[6]
    TMA: tl.constexpr = isinstance(full[0][0], tl.tensor_descriptor)
    full_end = begin + (end - begin) // STEP * STEP
    if FIXED and FULL and TMA:
        # If the loop could be empty, the compiler would merge the accumulators of asynchronous wgmma with zeros, and
        # ptxas would serialize wgmma (warning C7515). This happens only in loops with TMA loads.
        tl.assume(full_end > 0)
    if FULL or (TMA and not FIXED):
        for start in tl.range(begin, full_end, STEP, num_stages=STAGES):
            state = step(full, start, end, shared, state, STEP, False, False, FORM)
    if FIXED:
        if TAIL_B > 0:
            state = step(tails[0], full_end, end, shared, state, TAIL_B, MASKED and TAIL_C == 0, not FULL, FORM)
        if TAIL_C > 0:
            state = step(tails[1], full_end + TAIL_B, end, shared, state, TAIL_C, MASKED, False, FORM)
    elif TMA:
        if full_end < end:
            state = step(tails[0], full_end, end, shared, state, STEP, True, False, FORM)
    else:
        for start in tl.range(begin, end, STEP, num_stages=STAGES):
            state = step(tails[0], start, end, shared, state, STEP, True, False, FORM)
    return state
