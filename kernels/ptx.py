"""PTX instructions for the kernels. In Triton's interpreter, they are skipped or replaced.

Programmatic dependent launch: a kernel with the constant DEPENDENT may start before the previous kernel in the stream
has ended. With small batches, this hides the time to launch a kernel and to load its weights. A kernel first computes
only addresses, and prefetches weights into L2. This is safe even while an earlier kernel writes the weights, because a
prefetch returns no values. Then, `wait_for_previous` waits until the previous kernel has ended, and allows the next
kernel to start. The previous kernel has also waited for the kernel before it. Therefore, all earlier kernels have ended
when `wait_for_previous` returns.

FP8 (e4m3: 4 exponent bits, 3 mantissa bits): an FP8 linear layer reads x8 = e4m3(x / scale). The kernel that computes x
or its LayerNorm statistics also writes x8. Instead of dividing by the scale, kernels multiply by 1 / scale. Arguments
named `out_scale` or `o_scale` contain this reciprocal. Divisions would add 8 % to the instructions of the longest
epilogue.

Sources: CUDA C++ Programming Guide, Programmatic Dependent Launch; PTX ISA, griddepcontrol (sm_90 and newer); FP8
Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def reciprocal(x):
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits for the end of the previous kernel, then allows the next to start. Does nothing without DEPENDENT."""
    if DEPENDENT and not _INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(pointer, row, first, last, rows, columns, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Prefetches columns [first, last) of rows [row, row + ROWS) into L2: per row, one instruction per STEP columns."""
    if _INTERPRETED:
        return
    index = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    start = pointer + index.to(tl.int64) * columns
    for column in tl.range(first, last, STEP):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [start + column], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Rounds an fp32 tile to DTYPE. For bf16, the PTX instruction converts two values.

    Triton's own conversion takes one instruction per value if the kernel also uses the fp32 tile later.
    """
    if _INTERPRETED or DTYPE != tl.bfloat16:
        return value.to(DTYPE)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def in_layout_of(tile, anchor):
    """Returns `tile` in the register layout of `anchor`; ptxas removes the mov instruction."""
    if _INTERPRETED:
        return tile
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [tile, anchor], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def to_e4m3(value):
    """Rounds fp32 to e4m3. On a GPU, ties round to even, values saturate at 448, and NaN is preserved.

    Triton's own conversion first truncates to fp16 on sm_89, and it is not documented whether it saturates.
    """
    if _INTERPRETED:
        return value.to(tl.float8e4nv)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 first, second;"
            " cvt.rn.satfinite.e4m3x2.f32 first, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 second, $4, $3;"
            " mov.b32 $0, {first, second}; }",
            "=r,f,f,f,f",
            [value],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=4,
        )


@triton.jit
def divided(value, scale_ptr):
    """Multiplies fp32 `value` by a reciprocal scale, fp32 [1], and rounds to e4m3. Without a scale, returns `value`."""
    if scale_ptr is None:
        return value
    else:
        return to_e4m3(value * tl.load(scale_ptr))


@triton.jit
def divided_columns(value, scale_ptr, col, N, COLS: tl.constexpr):
    """Multiplies `value`, columns [col, col + COLS) of N, by reciprocal scales, fp32 [N], and rounds to e4m3."""
    cols = col + tl.arange(0, COLS)
    return to_e4m3(value.to(tl.float32) * tl.load(scale_ptr + cols, mask=cols < N, other=1.0)[None, :])
