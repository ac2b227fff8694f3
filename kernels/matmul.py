"""One matmul, out = epilogue(A B), with the pointwise work around it done while the product is still in registers.

A program walks over output tiles (persistent), each accumulated in fp32 over K. A and B come through TMA descriptors,
or by pointers where the device or the layout has no TMA. B may lie transposed as [N, K], the layout of torch's Linear.

The epilogues, with acc = A B of row m and column n:

- "layer_norm":      out = act(z), z = rstd (acc - mean weight_sum) + bias; LayerNorm folded into a linear layer. Mean
                     and rstd are combined here from the statistics of pieces of A's rows, and kept where wanted.
- "residual":        out = [residual +] [scale] (acc + bias), optionally with such statistics of its rows.
- "activation_grad": h = act(z), out = rstd acc act'(z), with partial sums for the gradients of LayerNorm and biases.
- "layer_norm_grad": out = [residual +] acc - (x - mean) coefficient; the LayerNorm backward of a row, with
                     coefficient = rstd^2 / N times its sum of dz (z - c), which "activation_grad" left in parts.
- "partial":         out[split] = acc over one of `splits` parts of K, fp32, summed later in a fixed order.

Rows that were normalised beforehand have no mean: rstd is then 1 throughout, but for the end of the way back, where
"layer_norm_grad" takes it: out = [residual +] rstd acc - x coefficient.

A constant row (rstd < 0, see `layer_norm.py`) takes 1 in place of rstd in "activation_grad" and its magnitude in
"layer_norm_grad": its weight gradient, dz~ (x - mean), then cancels between numbers a thousand times smaller.

In "residual" and "layer_norm_grad" the residual stream, that is out, x and residual, may be fp32 beside half-precision
A and B, as autocast keeps it; each is read and written in its own dtype.

An absent argument is None. Wide tiles are cut into SUB_TILES pieces along N before the epilogue, which keeps its
registers small. Every sum has a fixed order: no atomics, the same bits each run.

Source of the folding: vit-fast's own derivation, stated in `layer_norm.py`; of the tile walk: triton's matmul tutorial.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activate, activate_with_slope
from .launch import is_interpreted
from .layer_norm import combine_statistics, merge_halves, piece_statistics, store_statistics
from .row_parts import PIECE

_INTERPRETED = tl.constexpr(is_interpreted())
_PIECE = tl.constexpr(PIECE)


@triton.jit
def _tile_position(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the `tile`-th tile; GROUP_M rows of tiles share the columns that are in L2."""
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    inside = tile - group * (GROUP_M * tiles_n)
    return first + inside % rows, inside // rows


@triton.jit
def _offsets(row, col, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Element offsets of a tile of a row-major [*, columns] tensor: int64 up to the tile, int32 inside it."""
    base = tl.cast(row, tl.int64) * columns + col
    return base + (tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLS)[None, :])


@triton.jit
def _inside(row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    return ((row + tl.arange(0, ROWS)) < rows)[:, None] & ((col + tl.arange(0, COLS)) < columns)[None, :]


@triton.jit
def _load_tile(source, row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLS] from a row-major [rows, columns] tensor; zeros outside (TMA fills them itself)."""
    if TMA:
        return source.load([row, col])
    else:
        pointers = source + _offsets(row, col, columns, ROWS, COLS)
        return tl.load(pointers, mask=_inside(row, col, rows, columns, ROWS, COLS), other=0.0)


@triton.jit
def _store_tile(target, values, row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Write [ROWS, COLS] of a row-major [rows, columns] tensor; what lies outside is dropped."""
    if TMA:
        target.store([row, col], values)
    else:
        pointers = target + _offsets(row, col, columns, ROWS, COLS)
        tl.store(pointers, values, mask=_inside(row, col, rows, columns, ROWS, COLS))


@triton.jit
def _accumulate(
    a, b, row, col, k_start, k_stop, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_IS_KM: tl.constexpr, B_IS_NK: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] in fp32 over k_start .. k_stop, which lies on multiples of BLOCK_K or ends at K."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(k_start, k_stop, BLOCK_K):
        if A_IS_KM:
            a_tile = _load_tile(a, k, row, K, M, BLOCK_K, BLOCK_M, TMA).T
        else:
            a_tile = _load_tile(a, row, k, M, K, BLOCK_M, BLOCK_K, TMA)
        if B_IS_NK:
            b_tile = _load_tile(b, col, k, N, K, BLOCK_N, BLOCK_K, TMA).T
        else:
            b_tile = _load_tile(b, k, col, K, N, BLOCK_K, BLOCK_N, TMA)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of a tile [ROWS, COLS]."""
    return tl.split(tile.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))


@triton.jit
def _pieces(tile, ROWS: tl.constexpr, COLS: tl.constexpr, PIECES: tl.constexpr):
    """A tile [ROWS, COLS] cut along its columns into a tuple of 1, 2 or 4 pieces, from left to right."""
    if PIECES == 1:
        return (tile,)
    elif PIECES == 2:
        return _halves(tile, ROWS, COLS)
    else:
        tl.static_assert(PIECES == 4, "a tile is cut into 1, 2 or 4 pieces")
        left, right = _halves(tile, ROWS, COLS)
        first, second = _halves(left, ROWS, COLS // 2)
        third, fourth = _halves(right, ROWS, COLS // 2)
        return first, second, third, fourth


@triton.jit
def _load_pieces(source, row, col, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr, PIECES: tl.constexpr):
    """What `_pieces` would cut a tile of `source` into, by pointers, all under way before the first is waited for."""
    pieces = ()
    for i in tl.static_range(PIECES):
        piece = _load_tile(source, row, col + i * COLS, rows, columns, ROWS, COLS, False)
        pieces = pieces + (piece,)  # type: ignore[assignment]  # not python's, but triton's tuple
    return pieces


@triton.jit
def _layer_norm_epilogue(
    acc, out, z, weight_sum_ptr, bias_ptr, row_scale, row_shift, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    cols = col + tl.arange(0, COLS)
    weight_sum = tl.load(weight_sum_ptr + cols, mask=cols < N, other=0.0)
    value = acc * row_scale[:, None] + row_shift[:, None] * weight_sum[None, :]
    value += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if z is not None:
        _store_tile(z, value.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
        # the activation of what the backward will read, so that both see the same hidden layer
        value = value.to(DTYPE).to(tl.float32)
    value = activate(value, ACTIVATION, DTYPE == tl.float32)
    _store_tile(out, value.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)


@triton.jit
def _residual_epilogue(
    acc, out, addend, bias_ptr, scale_ptr, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores what the epilogue makes of acc, and returns it as stored."""
    cols = col + tl.arange(0, COLS)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if addend is not None:
        acc += addend.to(tl.float32)
    value = acc.to(DTYPE)
    _store_tile(out, value, row, col, M, N, ROWS, COLS, TMA)
    return value


@triton.jit
def _in_layout_of(tile, anchor):
    """The same tile, tied to the registers that hold `anchor`.

    Without it the compiler computes the activation twice, once where the product lies and once where the store of h
    wants it. The move costs nothing: the assembler removes it.
    """
    if _INTERPRETED:
        return tile
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [tile, anchor], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _activation_grad_epilogue(
    acc, out, z, h, bias_ptr, scale_ptr, row_part_ptr, column_part_ptr, rstd, mean, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    cols = col + tl.arange(0, COLS)
    rows = row + tl.arange(0, ROWS)
    pre = _in_layout_of(_load_tile(z, row, col, M, N, ROWS, COLS, TMA).to(tl.float32), acc)
    value, slope = activate_with_slope(pre, ACTIVATION, DTYPE == tl.float32)
    if h is not None:
        _store_tile(h, value.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
    if scale_ptr is not None:
        slope *= tl.load(scale_ptr)
    grad = acc * slope
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    # rows past M have a zero gradient; columns past N have one as well, so the bias loaded there is of no account
    along_row = tl.sum(grad * (pre - bias[None, :]), 1)
    part = row_part_ptr + tl.cast(row, tl.int64) * PARTS + col // COLS + tl.arange(0, ROWS) * PARTS
    tl.store(part, along_row, mask=(rows < M) & (col < N))
    scaled = (grad * rstd[:, None]).to(DTYPE)
    _store_tile(out, scaled, row, col, M, N, ROWS, COLS, TMA)
    # of the rounded values: the weight gradient subtracts mean times exactly what its matmul summed
    along_column = tl.sum(grad, 0)
    shifted = tl.sum(scaled.to(tl.float32) * mean[:, None], 0)
    parts = column_part_ptr + tl.cast(row // ROWS, tl.int64) * (2 * N) + cols
    tl.store(parts, along_column, mask=cols < N)
    tl.store(parts + N, shifted, mask=cols < N)


@triton.jit
def _layer_norm_grad_epilogue(
    acc, out, x, residual, coefficient, row_scale, mean, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    value = _load_tile(x, row, col, M, N, ROWS, COLS, TMA).to(tl.float32)
    acc = acc * row_scale[:, None] - (value - mean[:, None]) * coefficient[:, None]
    if residual is not None:
        acc += _load_tile(residual, row, col, M, N, ROWS, COLS, TMA).to(tl.float32)
    _store_tile(out, acc.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)


@triton.jit
def weight_gradient_scale(rstd):
    """What dz is multiplied by to give dz~: rstd [ROWS], or 1 of a constant row."""
    return tl.where(rstd < 0.0, 1.0, rstd)


@triton.jit
def _load_rows(pointer, row, M, ROWS: tl.constexpr):
    """[ROWS] of a per-row fp32 vector [M], zeros past its end."""
    rows = row + tl.arange(0, ROWS)
    return tl.load(pointer + rows, mask=rows < M, other=0.0)


@triton.jit
def _sum_row_parts(pointer, row, M, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS] sums of the rows of fp32 [M, PARTS]; along the first axis for the reason given in `combine_statistics`."""
    step = tl.arange(0, ROWS)
    base = pointer + tl.cast(row, tl.int64) * PARTS
    total = tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, PARTS, 16):
        parts = first + tl.arange(0, 16)
        mask = (parts < PARTS)[:, None] & (row + step < M)[None, :]
        total += tl.sum(tl.load(base + (step[None, :] * PARTS + parts[:, None]), mask=mask, other=0.0), 0)
    return total


# Nothing that goes with the number of rows is compiled anew: not where the second half of [2, M] statistics begins.
@triton.jit(do_not_specialize=["M", "N", "K", "splits"], do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr"])
def _matmul_kernel(
    a,  # [M, K]
    b,  # [K, N], or [N, K] where B_IS_NK
    out,  # [M, N]; "partial": fp32 [splits, M, N]
    z,  # [M, N] pre-activation: stored by "layer_norm" unless None, read by "activation_grad"
    h,  # [M, N] activation, stored by "activation_grad" unless None
    x,  # [M, N] input of the LayerNorm, read by "layer_norm_grad"
    residual,  # [M, N] added to the result unless None; of "residual" always a pointer
    mean_ptr,  # fp32 [M], stored by "layer_norm" unless None; else None: the rows were normalised beforehand
    rstd_ptr,  # fp32 [M], negative for a constant row (see layer_norm.py); stored by "layer_norm" unless None
    bias_ptr,  # [N]
    weight_sum_ptr,  # fp32 [N]
    scale_ptr,  # "residual": [N]; "activation_grad": fp32 [1], what B was divided by
    row_part_ptr,  # fp32: row statistics, stored by "residual", read by "layer_norm"; sums over pieces of the columns,
    # [M, PARTS], stored by "activation_grad", read by "layer_norm_grad"
    column_part_ptr,  # fp32 [M / BLOCK_M, 2, N]
    M, N, K, eps, splits,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,  # DTYPE: of out, z and h
    PRECISION: tl.constexpr,
    B_IS_NK: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUB_TILES: tl.constexpr, GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,  # of a row in row_part_ptr
    ALIGN: tl.constexpr,  # divides the length of every row that is read or written by tiles
):  # fmt: skip
    # The sizes are not specialised: a K of 1 as a constant would fold its loop away and have the compiler pipeline the
    # tile loop instead, in more shared memory than there is. What vector loads need to know is said here.
    N = N // ALIGN * ALIGN
    K = K // ALIGN * ALIGN
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    k_steps = tl.cdiv(K, BLOCK_K)
    COLS: tl.constexpr = BLOCK_N // SUB_TILES
    units = tiles * splits if EPILOGUE == "partial" else tiles
    for tile in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _tile_position(tile % tiles if EPILOGUE == "partial" else tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        k_start = 0
        k_stop = K
        if EPILOGUE == "partial":
            steps = tl.cdiv(k_steps, splits) * BLOCK_K
            k_start = tile // tiles * steps
            k_stop = min(K, k_start + steps)
        acc = _accumulate(
            a, b, row, col, k_start, k_stop, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, False, B_IS_NK, TMA, PRECISION,
        )  # fmt: skip

        if EPILOGUE == "partial":
            base = out + tl.cast(tile // tiles, tl.int64) * M * N
            _store_tile(base, acc, row, col, M, N, BLOCK_M, BLOCK_N, False)
        if EPILOGUE == "layer_norm":
            row_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
            row_shift = tl.zeros((BLOCK_M,), tl.float32)
            if row_part_ptr is not None:
                mean, rstd = combine_statistics(row_part_ptr, row, M, K, eps, BLOCK_M, PARTS)
                row_scale = tl.maximum(rstd, 0.0)
                row_shift = -row_scale * mean
                if mean_ptr is not None:
                    rows = row + tl.arange(0, BLOCK_M)
                    once = (rows < M) & (tile_n == 0)
                    tl.store(mean_ptr + rows, mean, mask=once)
                    tl.store(rstd_ptr + rows, rstd, mask=once)
        if EPILOGUE == "activation_grad":
            rstd = tl.full((BLOCK_M,), 1.0, tl.float32)
            if mean_ptr is not None:
                rstd = weight_gradient_scale(_load_rows(rstd_ptr, row, M, BLOCK_M))
        if EPILOGUE == "layer_norm_grad":
            row_scale = _load_rows(rstd_ptr, row, M, BLOCK_M)
            coefficient = _sum_row_parts(row_part_ptr, row, M, BLOCK_M, PARTS) * row_scale / N
            if mean_ptr is not None:
                coefficient *= row_scale
                row_scale = tl.where(row_scale < 0.0, -row_scale, 1.0)
        if EPILOGUE == "activation_grad" or EPILOGUE == "layer_norm_grad":
            mean = tl.zeros((BLOCK_M,), tl.float32)
            if mean_ptr is not None:
                mean = _load_rows(mean_ptr, row, M, BLOCK_M)

        if EPILOGUE == "residual" and residual is not None:
            added = _load_pieces(residual, row, col, M, N, BLOCK_M, COLS, SUB_TILES)
        if EPILOGUE != "partial":
            pieces = _pieces(acc, BLOCK_M, BLOCK_N, SUB_TILES)
            for i in tl.static_range(SUB_TILES):
                if EPILOGUE == "layer_norm":
                    _layer_norm_epilogue(
                        pieces[i], out, z, weight_sum_ptr, bias_ptr, row_scale, row_shift, row, col + i * COLS, M, N,
                        BLOCK_M, COLS, ACTIVATION, TMA, DTYPE,
                    )  # fmt: skip
                elif EPILOGUE == "residual":
                    addend = added[i] if residual is not None else None
                    value = _residual_epilogue(
                        pieces[i], out, addend, bias_ptr, scale_ptr, row, col + i * COLS, M, N,
                        BLOCK_M, COLS, TMA, DTYPE,
                    )  # fmt: skip
                    if row_part_ptr is not None:
                        found = piece_statistics(value.to(tl.float32), col + i * COLS, N, COLS)
                        first = col + i * COLS
                        if COLS < _PIECE:
                            tl.static_assert(2 * COLS == _PIECE, "an epilogue works on a piece of the columns or half")
                            if i % 2 == 0:
                                left = found
                            else:
                                first -= COLS
                                found = merge_halves(left, found, first, N, COLS)
                        if COLS == _PIECE or i % 2 == 1:
                            store_statistics(row_part_ptr, found[0], found[1], row, first, M, N, BLOCK_M, PARTS)
                elif EPILOGUE == "activation_grad":
                    _activation_grad_epilogue(
                        pieces[i], out, z, h, bias_ptr, scale_ptr, row_part_ptr, column_part_ptr, rstd, mean,
                        row, col + i * COLS, M, N, BLOCK_M, COLS, ACTIVATION, TMA, DTYPE, PARTS,
                    )  # fmt: skip
                else:
                    tl.static_assert(EPILOGUE == "layer_norm_grad", "unknown epilogue")
                    _layer_norm_grad_epilogue(
                        pieces[i], out, x, residual, coefficient, row_scale, mean, row, col + i * COLS, M, N,
                        BLOCK_M, COLS, TMA, DTYPE,
                    )  # fmt: skip
