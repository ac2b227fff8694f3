"""The matmul kernel: out = epilogue(A B), with the surrounding pointwise operations fused into the epilogue.

The kernel is persistent: a program loops over output tiles, and accumulates each tile in fp32 over K. A and B are
loaded through TMA descriptors if GPU and layout allow this, else by pointers. B may be [N, K], like the weight of
torch.nn.Linear. For split-K, a program accumulates one of `splits` parts of K.

The kernel knows no epilogue. It passes each tile of A B to the device function EPILOGUE, which has these parameters:

- sub_tiles: the tile of A B, fp32, cut along N, because an epilogue of a whole wide tile would need too many registers
- matrices: up to four, which the epilogue reads and writes by tiles: descriptors, pointers or None
- arguments: its vectors and numbers: pointers, None, floats, and integers encoded by `unspecialized` (launch.py)
- settings: a tuple of its constants; the last one is the setting for early loads, `Epilogue.early` (matmul_launch.py)
- where: (row, col, M, N, K, part): start of the tile, sizes of A and B, and the number of the part of K
- ROWS, COLS: size of a sub-tile
- TMA: the matrices are descriptors

`forward_epilogues.py` and `gradient_epilogues.py` contain the epilogues, each with its formula. `matmul_launch.py`
launches the kernel, and `matmul_policy.py` chooses tile sizes. Every sum has a fixed order, without atomics, so results
are deterministic.

If A and B are e4m3 (`ptx.py`), the tensor cores of sm_90 accumulate in about 14 bits: each MMA over 32 elements of K
adds a relative error of up to 2^-13. For comparison, rounding an operand to e4m3 has a relative error of up to 2^-4.
Adding partial sums in fp32 every 128 elements would be more precise, but 128 x 256 tiles would spill.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import device_function
from ..ptx import prefetch_rows, wait_for_previous
from .matmul_tiles import accumulate, cut, tile_position


@triton.jit
def _unit(unit, tiles_m, tiles_n, K, splits, BLOCK_K: tl.constexpr):
    """Returns (tile row, tile column, part, start and end along K) of a unit: a tile, or with splits, a part of one."""
    if splits is None:
        tile_m, tile_n = tile_position(unit, tiles_m, tiles_n)
        return tile_m, tile_n, 0, 0, K
    else:
        tiles = tiles_m * tiles_n
        tile_m, tile_n = tile_position(unit % tiles, tiles_m, tiles_n)
        steps = tl.cdiv(tl.cdiv(K, BLOCK_K), splits) * BLOCK_K
        part = unit // tiles
        return tile_m, tile_n, part, part * steps, min(K, part * steps + steps)


@triton.jit(do_not_specialize=["M", "N", "K", "splits"])
def _matmul_kernel(
    a,  # [M, K]
    b,  # [K, N], or [N, K] if B_IS_NK
    # of the epilogue: see above; the matrices may be descriptors, which must not be in a tuple (launch.py)
    matrix1, matrix2, matrix3, matrix4, arguments, settings,
    b_ptr,  # B [N, K] as a pointer if DEPENDENT, else None
    M, N, K,
    splits,  # number of parts of K, or None
    EPILOGUE: tl.constexpr,  # name of the epilogue's device function (launch.py)
    B_IS_NK: tl.constexpr, TMA: tl.constexpr,
    FLATTEN: tl.constexpr,  # pipelines the loops over tiles and over K as one loop
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUB_TILES: tl.constexpr,  # 1, 2 or 4 per tile
    ALIGN: tl.constexpr,  # divides the length of every row that is read or written by tiles
    DEPENDENT: tl.constexpr,  # starts before the previous kernel ends, and prefetches B (ptx.py)
):  # fmt: skip
    # Triton must not specialize on sizes. For K = 1, Triton would remove the loop over K and pipeline the loop over
    # tiles, which takes too much shared memory. The next two lines state the alignment that vector loads need.
    N = N // ALIGN * ALIGN
    K = K // ALIGN * ALIGN
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    units = tiles_m * tiles_n
    if splits is not None:
        units *= splits
    epilogue: tl.constexpr = device_function(EPILOGUE)
    if DEPENDENT:
        _, tile_n, _, k_start, k_stop = _unit(tl.program_id(0), tiles_m, tiles_n, K, splits, BLOCK_K)
        prefetch_rows(b_ptr, tile_n * BLOCK_N, k_start, k_stop, N, K, BLOCK_N, BLOCK_K)
    wait_for_previous(DEPENDENT)
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n, part, k_start, k_stop = _unit(unit, tiles_m, tiles_n, K, splits, BLOCK_K)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = accumulate(
            a, b, row, col, k_start, k_stop, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, A_IS_KM=False, B_IS_NK=B_IS_NK, TMA=TMA,
        )  # fmt: skip
        epilogue(
            cut(acc, BLOCK_M, BLOCK_N, SUB_TILES), (matrix1, matrix2, matrix3, matrix4), arguments, settings,
            (row, col, M, N, K, part), BLOCK_M, BLOCK_N // SUB_TILES, TMA,
        )  # fmt: skip
