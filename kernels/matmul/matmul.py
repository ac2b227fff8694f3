"""One matmul, out = epilogue(A B), with the pointwise work around it done while the product is still in registers.

A program walks over output tiles (persistent), each accumulated in fp32 over K. A and B come through TMA descriptors,
or by pointers where the device or the layout has no TMA. B may lie transposed as [N, K], the layout of torch's Linear.

The epilogues, with acc = A B of row m and column n:

- "layer_norm":      out = act(z), z = rstd (acc - mean weight_sum) + bias; LayerNorm folded into a linear layer. Mean
                     and rstd are combined here from the statistics of pieces of A's rows, and kept where wanted.
- "rotary":          like "layer_norm" without activation, with q and k, the first two thirds of the columns, turned by
                     rotary positions: the members of a pair are neighbours, as `folding.py` lays the rows of B.
- "qk_norm":         like "rotary", with the heads of q and k normalised first; a piece of a tile is a head.
- "gated":           out = act(g) u, half as wide: the columns of z are g and u by turns, as `folding.py` lays the rows
                     of B; otherwise like "layer_norm".
- "residual":        out = [residual +] [scale] (acc + bias), optionally with such statistics of its rows, and with
                     out8, the same in e4m3. Where a norm of A's rows is folded into B, rstd (acc - mean weight_sum),
                     kept as z, takes the place of acc.
- "activation_grad": h = act(z), out = rstd acc act'(z), with partial sums for the gradients of LayerNorm and biases.
- "gated_grad":      the same behind "gated", with acc the gradient of h = act(g) u [M, N]: z and out are twice as wide.
                     In both, where a norm of h comes next: acc is that of the normalised h^ but for the norm's own way
                     back, which takes h^ along = h^ mean(acc h^) from it, and h^ is stored in place of h.
- "layer_norm_grad": out = [residual +] acc - (x - mean) coefficient, the LayerNorm backward of a row, and h the same in
                     the dtype of A; coefficient = rstd^2 / N times its sum of dz (z - c), parts by "activation_grad".
- "partial":         out[split] = acc over one of `splits` parts of K, fp32, summed later in a fixed order.

Operands of e4m3 (`fp8.py`) carry scales: of "residual" they are in `scale` and `bias`, of "layer_norm" and those
like it acc is multiplied by `scale`. What is written in e4m3 is multiplied by out_scale. Products of e4m3 are added by
sm_90's tensor cores in about 14 bits, throughout K: every 32 of them cost up to 2^-13 of the sum, where operands have
an error of 2^-4 each; what fp32 sums every 128 products would cost are registers that 128 x 256 tiles do not have.

Of an RMSNorm folded in there is no weight_sum, and mean is 0. Rows that were normalised beforehand have no mean: rstd
is then 1 throughout, but in "layer_norm_grad": out = [residual +] rstd acc - x coefficient.

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

from ..activations import activate, activate_with_slope
from ..fp8 import divided, divided_columns
from ..launch import is_interpreted
from ..layer_norm import combine_statistics, merge_next, piece_statistics, store_statistics
from .matmul_tiles import (
    accumulate,
    cut,
    load_pieces,
    load_rows,
    load_tile,
    rounded,
    store_tile,
    sum_row_parts,
    tile_position,
)
from .qk_epilogue import normed_columns, turned_columns

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def _normed(acc, weight_sum_ptr, scale_ptr, row_scale, row_shift, col, N, COLS: tl.constexpr):
    """The product of normalised rows, from that of the rows as they lie; `scale_ptr` is that of e4m3 weights."""
    cols = col + tl.arange(0, COLS)
    value = acc * row_scale[:, None]
    if scale_ptr is not None:
        value *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if weight_sum_ptr is not None:
        value += row_shift[:, None] * tl.load(weight_sum_ptr + cols, mask=cols < N, other=0.0)[None, :]
    return value


@triton.jit
def _layer_norm_epilogue(
    acc, out, z, weight_sum_ptr, bias_ptr, scale_ptr, out_scale_ptr, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr,
    qk_eps, cos_ptr, sin_ptr, tokens, prefix, image_rows, row_scale, row_shift, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HEAD: tl.constexpr,
    NORM: tl.constexpr, HALVES: tl.constexpr, ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores what the epilogue makes of acc, and returns it as stored."""
    cols = col + tl.arange(0, COLS)
    value = _normed(acc, weight_sum_ptr, scale_ptr, row_scale, row_shift, col, N, COLS)
    value += tl.load(bias_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if NORM != "none":
        if col < 2 * (N // 3):
            value = normed_columns(
                value, q_weight_ptr, k_weight_ptr, q_bias_ptr, k_bias_ptr, qk_eps, col // (N // 3), ROWS, HEAD, NORM,
                HALVES,
            )  # fmt: skip
    if cos_ptr is not None:
        if col < 2 * (N // 3):
            value = turned_columns(
                value, cos_ptr, sin_ptr, tokens, prefix, image_rows, row, col, M, N,
                ROWS, COLS, HEAD, ROW_STEP, PAIR_STEP,
            )  # fmt: skip
    if z is not None:
        # the activation of what the backward will read, so that both see the same hidden layer
        kept = rounded(value, DTYPE)
        store_tile(z, kept, row, col, M, N, ROWS, COLS, TMA)
        value = kept.to(tl.float32)
    if GATED:
        gate, up = tl.split(value.reshape(ROWS, COLS // 2, 2))
        value = divided(activate(gate, ACTIVATION, DTYPE == tl.float32) * up, out_scale_ptr)
        stored = value.to(DTYPE)
        store_tile(out, stored, row, col // 2, M, N // 2, ROWS, COLS // 2, TMA)
    else:
        stored = divided(activate(value, ACTIVATION, DTYPE == tl.float32), out_scale_ptr).to(DTYPE)
        store_tile(out, stored, row, col, M, N, ROWS, COLS, TMA)
    return stored


@triton.jit
def _residual_epilogue(
    acc, out, z, addend, bias_ptr, scale_ptr, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores what the epilogue makes of acc, and returns it as stored."""
    cols = col + tl.arange(0, COLS)
    if z is not None:
        store_tile(z, acc.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if addend is not None:
        acc += addend.to(tl.float32)
    value = rounded(acc, DTYPE)
    store_tile(out, value, row, col, M, N, ROWS, COLS, TMA)
    return value


@triton.jit
def _in_layout_of(tile, anchor):
    """Ties a tile to the registers of `anchor`, so that the compiler does not compute the activation twice: where the
    product lies, and where the store of h wants it. The assembler removes the move.
    """
    if _INTERPRETED:
        return tile
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [tile, anchor], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _through_norm(
    acc, hidden, statistics_ptr, along_ptr, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The gradient of the hidden layer before its norm, and that normalised, from the gradient of the latter."""
    mean = load_rows(statistics_ptr, row, M, ROWS)
    rstd = load_rows(statistics_ptr + M, row, M, ROWS)
    along = load_rows(along_ptr, row, M, ROWS)
    inside = (col + tl.arange(0, COLS) < N)[None, :]
    hidden = tl.where(inside, hidden.to(DTYPE).to(tl.float32) - mean[:, None], 0.0)
    normalised = hidden * tl.maximum(rstd, 0.0)[:, None]
    return (acc - normalised * along[:, None]) * tl.abs(rstd)[:, None], normalised


@triton.jit
def _activation_grad_epilogue(
    acc, out, z, h, bias_ptr, scale_ptr, row_part_ptr, column_part_ptr, hidden_ptr, along_ptr, rstd, mean,
    row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDER: tl.constexpr = 2 if GATED else 1
    COLS_Z: tl.constexpr = WIDER * COLS
    wide = WIDER * col
    cols = wide + tl.arange(0, COLS_Z)
    rows = row + tl.arange(0, ROWS)
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr)
    anchor = tl.join(acc, acc).reshape(ROWS, COLS_Z) if GATED else acc
    pre = load_tile(z, row, wide, M, WIDER * N, ROWS, COLS_Z, TMA and EARLY == 0)
    pre = _in_layout_of(pre.to(tl.float32), anchor)
    if GATED:
        gate, up = tl.split(pre.reshape(ROWS, COLS, 2))
        value, slope = activate_with_slope(gate, ACTIVATION, DTYPE == tl.float32)
        if along_ptr is not None:
            acc, hidden = _through_norm(acc, value * up, hidden_ptr, along_ptr, row, col, M, N, ROWS, COLS, DTYPE)
        grad = tl.join(acc * up * slope, acc * value).reshape(ROWS, COLS_Z)
        value *= up
    else:
        value, slope = activate_with_slope(pre, ACTIVATION, DTYPE == tl.float32)
        if along_ptr is not None:
            acc, hidden = _through_norm(acc, value, hidden_ptr, along_ptr, row, col, M, N, ROWS, COLS, DTYPE)
    if h is not None:
        if along_ptr is not None:
            value = hidden
        store_tile(h, value.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
    if not GATED:  # not before h is on its way: it takes 178 registers in place of 236
        grad = acc * slope
    width = WIDER * N
    bias = tl.load(bias_ptr + cols, mask=cols < width, other=0.0)
    # rows past M have a zero gradient; columns past N have one as well, so the bias loaded there is of no account
    along_row = tl.sum(grad * (pre - bias[None, :]), 1)
    part = row_part_ptr + tl.cast(row, tl.int64) * PARTS + col // COLS + tl.arange(0, ROWS) * PARTS
    tl.store(part, along_row, mask=(rows < M) & (col < N))
    scaled = rounded(grad * rstd[:, None], DTYPE)
    store_tile(out, scaled, row, wide, M, width, ROWS, COLS_Z, TMA)
    # of the rounded values: the weight gradient subtracts mean times exactly what its matmul summed
    along_column = tl.sum(grad, 0)
    shifted = tl.sum(scaled.to(tl.float32) * mean[:, None], 0)
    parts = column_part_ptr + tl.cast(row // ROWS, tl.int64) * (2 * width) + cols
    tl.store(parts, along_column, mask=cols < width)
    tl.store(parts + width, shifted, mask=cols < width)


@triton.jit
def _layer_norm_grad_epilogue(
    acc, out, h, x, residual, coefficient, row_scale, mean, row, col, M, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, DTYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    value = load_tile(x, row, col, M, N, ROWS, COLS, TMA and EARLY == 0)
    if residual is not None and TMA and EARLY > 0:  # both under way at once; descriptors are waited for one by one
        addend = load_tile(residual, row, col, M, N, ROWS, COLS, False)
    acc = acc * row_scale[:, None] - (value.to(tl.float32) - mean[:, None]) * coefficient[:, None]
    if residual is not None:
        if not (TMA and EARLY > 0):
            addend = load_tile(residual, row, col, M, N, ROWS, COLS, TMA)
        acc += addend.to(tl.float32)
    store_tile(out, acc.to(DTYPE), row, col, M, N, ROWS, COLS, TMA)
    if h is not None:
        store_tile(h, acc.to(h.dtype if TMA else h.dtype.element_ty), row, col, M, N, ROWS, COLS, TMA)


@triton.jit
def weight_gradient_scale(rstd):
    """The factor of dz in dz~: rstd [ROWS], or 1 of a constant row."""
    return tl.where(rstd < 0.0, 1.0, rstd)


# Nothing that goes with the number of rows is compiled anew: not where the second half of [2, M] statistics begins.
@triton.jit(
    do_not_specialize=["M", "N", "K", "splits", "tokens", "prefix", "image_rows"],
    do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "hidden_ptr"],
)
def _matmul_kernel(
    a,  # [M, K]
    b,  # [K, N], or [N, K] where B_IS_NK
    out,  # [M, N]; "partial": fp32 [splits, M, N]
    z,  # [M, N] pre-activation: stored by "layer_norm" and "residual" unless None, read by "activation_grad"
    h,  # [M, N] activation, or that normalised, stored by "activation_grad" unless None; see "layer_norm_grad"
    x,  # [M, N] input of the LayerNorm, read by "layer_norm_grad"
    residual,  # [M, N] added to the result unless None; a pointer where EARLY, as x and z
    mean_ptr,  # fp32 [M], stored by who reads row statistics unless None; else None: rows were normalised beforehand
    rstd_ptr,  # fp32 [M], negative for a constant row (see layer_norm.py); stored likewise unless None
    bias_ptr,  # [N]
    weight_sum_ptr,  # fp32 [N], or None: RMSNorm in place of LayerNorm
    scale_ptr,  # "residual": [N]; "layer_norm": fp32 [N] or None; "activation_grad": fp32, of which the first divided B
    out8,  # [M, N] e4m3: `out` times out_scale, stored by "residual" unless None
    out_scale_ptr,  # fp32 [N]; of "layer_norm" [1], what `out`, e4m3 then, is multiplied by; or None
    row_part_ptr,  # fp32: statistics of A's rows, read by "layer_norm", by "residual" unless None; sums over pieces of
    # the columns, [M, PARTS], stored by "activation_grad", read by "layer_norm_grad"
    out_part_ptr,  # fp32: statistics of the rows of out, stored by "residual" and "gated" unless None
    column_part_ptr,  # fp32 [M / BLOCK_M, 2, N]
    hidden_ptr,  # "activation_grad": fp32 [2, M], mean and rstd of the rows of h, where a norm of them comes next
    along_ptr,  # fp32 [M], the means of the product of their normalised rows and its gradient; None: there is no norm
    q_weight_ptr, k_weight_ptr,  # "qk_norm": [HEAD]; both None: ones
    q_bias_ptr, k_bias_ptr,  # likewise; both None: zeros
    cos_ptr, sin_ptr,  # "rotary", "qk_norm": [images or 1, tokens - prefix, HEAD / 2]; None: nothing is turned
    M, N, K, eps, splits, qk_eps,
    tokens, prefix, image_rows,  # of an image, of them not turned, and rows of the tables, 0 where shared
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr,  # DTYPE: of out, z and h
    B_IS_NK: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUB_TILES: tl.constexpr, GROUP_M: tl.constexpr,
    EARLY: tl.constexpr,  # "residual": pieces under way at once; gradients: unless 0, x, z and it are pointers
    PARTS: tl.constexpr,  # of a row in row_part_ptr
    OUT_PARTS: tl.constexpr,  # of a row in out_part_ptr
    TIMES: tl.constexpr,  # pieces of a tile, as they are stored, make one of those
    WHOLE: tl.constexpr,  # no such piece passes the last column
    HEAD: tl.constexpr,  # "rotary", "qk_norm": channels of a head; of the latter as many as a piece of a tile
    NORM: tl.constexpr,  # of q and k: "layer_norm", "rms_norm" or "none"
    HALVES: tl.constexpr,  # to the norms' vectors pairs that are turned are channels j and j + HEAD / 2
    ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr,  # elements of the tables from row to row, pair to pair
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
    OF_HEADS: tl.constexpr = EPILOGUE == "rotary" or EPILOGUE == "qk_norm"
    FOLDED: tl.constexpr = EPILOGUE == "layer_norm" or EPILOGUE == "gated" or OF_HEADS
    COLS: tl.constexpr = BLOCK_N // SUB_TILES
    WIDTH: tl.constexpr = COLS // 2 if EPILOGUE == "gated" else COLS  # of what is stored of them
    units = tiles * splits if EPILOGUE == "partial" else tiles
    for tile in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_position(tile % tiles if EPILOGUE == "partial" else tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        k_start = 0
        k_stop = K
        if EPILOGUE == "partial":
            steps = tl.cdiv(k_steps, splits) * BLOCK_K
            k_start = tile // tiles * steps
            k_stop = min(K, k_start + steps)
        acc = accumulate(
            a, b, row, col, k_start, k_stop, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, False, B_IS_NK, TMA,
        )  # fmt: skip

        if EPILOGUE == "partial":
            base = out + tl.cast(tile // tiles, tl.int64) * M * N
            store_tile(base, acc, row, col, M, N, BLOCK_M, BLOCK_N, False)
        if FOLDED or EPILOGUE == "residual":
            row_scale = tl.full((BLOCK_M,), 1.0, tl.float32)
            row_shift = tl.zeros((BLOCK_M,), tl.float32)
            if row_part_ptr is not None:
                mean, rstd = combine_statistics(row_part_ptr, row, M, K, eps, BLOCK_M, PARTS, weight_sum_ptr is None)
                row_scale = tl.maximum(rstd, 0.0)
                row_shift = -row_scale * mean
                if mean_ptr is not None:
                    rows = row + tl.arange(0, BLOCK_M)
                    once = (rows < M) & (tile_n == 0)
                    tl.store(mean_ptr + rows, mean, mask=once)
                    tl.store(rstd_ptr + rows, rstd, mask=once)
        if EPILOGUE == "activation_grad" or EPILOGUE == "gated_grad":
            rstd = tl.full((BLOCK_M,), 1.0, tl.float32)
            if mean_ptr is not None:
                rstd = weight_gradient_scale(load_rows(rstd_ptr, row, M, BLOCK_M))
        if EPILOGUE == "layer_norm_grad":
            row_scale = load_rows(rstd_ptr, row, M, BLOCK_M)
            coefficient = sum_row_parts(row_part_ptr, row, M, BLOCK_M, PARTS) * row_scale / N
            if mean_ptr is not None:
                coefficient *= row_scale
                row_scale = tl.where(row_scale < 0.0, -row_scale, 1.0)
        if EPILOGUE == "activation_grad" or EPILOGUE == "gated_grad" or EPILOGUE == "layer_norm_grad":
            mean = tl.zeros((BLOCK_M,), tl.float32)
            if mean_ptr is not None:
                mean = load_rows(mean_ptr, row, M, BLOCK_M)

        if EPILOGUE == "residual" and residual is not None:
            added = load_pieces(residual, row, col, M, N, BLOCK_M, COLS, EARLY)
        if EPILOGUE != "partial":
            pieces = cut(acc, BLOCK_M, BLOCK_N, SUB_TILES)
            for i in tl.static_range(SUB_TILES):
                if FOLDED:
                    value = _layer_norm_epilogue(
                        pieces[i], out, z, weight_sum_ptr, bias_ptr, scale_ptr, out_scale_ptr, q_weight_ptr,
                        k_weight_ptr, q_bias_ptr, k_bias_ptr, qk_eps, cos_ptr, sin_ptr, tokens, prefix, image_rows,
                        row_scale, row_shift, row, col + i * COLS, M, N, BLOCK_M, COLS, ACTIVATION,
                        EPILOGUE == "gated", HEAD, NORM, HALVES, ROW_STEP, PAIR_STEP, TMA, DTYPE,
                    )  # fmt: skip
                elif EPILOGUE == "residual":
                    addend = added[i] if residual is not None else None
                    if residual is not None and i + EARLY < SUB_TILES:
                        later = col + (i + EARLY) * COLS
                        added = added + load_pieces(residual, row, later, M, N, BLOCK_M, COLS, 1)
                    piece = pieces[i]
                    if row_part_ptr is not None:
                        piece = _normed(piece, weight_sum_ptr, None, row_scale, row_shift, col + i * COLS, N, COLS)
                    value = _residual_epilogue(
                        piece, out, z, addend, bias_ptr, scale_ptr, row, col + i * COLS, M, N,
                        BLOCK_M, COLS, TMA, DTYPE,
                    )  # fmt: skip
                elif EPILOGUE == "activation_grad" or EPILOGUE == "gated_grad":
                    _activation_grad_epilogue(
                        pieces[i], out, z, h, bias_ptr, scale_ptr, row_part_ptr, column_part_ptr,
                        hidden_ptr, along_ptr, rstd, mean, row, col + i * COLS, M, N,
                        BLOCK_M, COLS, ACTIVATION, EPILOGUE == "gated_grad", TMA, DTYPE, PARTS, EARLY,
                    )  # fmt: skip
                else:
                    tl.static_assert(EPILOGUE == "layer_norm_grad", "unknown epilogue")
                    _layer_norm_grad_epilogue(
                        pieces[i], out, h, x, residual, coefficient, row_scale, mean, row, col + i * COLS, M, N,
                        BLOCK_M, COLS, TMA, DTYPE, EARLY,
                    )  # fmt: skip
                if out_part_ptr is not None:
                    width = N // 2 if EPILOGUE == "gated" else N
                    start = col // 2 if EPILOGUE == "gated" else col
                    found = piece_statistics(value.to(tl.float32), start + i * WIDTH, width, WIDTH, WHOLE)
                    first = start + i // TIMES * TIMES * WIDTH
                    if i % TIMES == 0:
                        merged = found
                    else:
                        merged = merge_next(merged, found, first, width, i % TIMES * WIDTH, WIDTH)
                    if i % TIMES == TIMES - 1:
                        store_statistics(out_part_ptr, merged[0], merged[1], row, first, M, width, BLOCK_M, OUT_PARTS)
                if out8 is not None:  # after the statistics: fewer registers
                    narrow = divided_columns(value, out_scale_ptr, col + i * COLS, N, COLS)
                    store_tile(out8, narrow, row, col + i * COLS, M, N, BLOCK_M, COLS, TMA)
