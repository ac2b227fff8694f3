"""Rounding of matmul inputs to e4m3 (4 exponent bits, 3 mantissa bits): x8 = e4m3(x / scale).

The kernel that computes the input of an FP8 linear layer also rounds this input. Kernels multiply by reciprocal scales:
divisions would add 8 % to the instructions of the longest epilogue.

Source: FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def to_e4m3(value):
    """Rounds fp32 to e4m3, with ties to even; saturates at 448 and preserves NaN.

    Uses inline PTX, because Triton's conversion truncates to fp16 first on sm_89, and Triton does not document whether
    the conversion saturates.
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
    """Multiplies a tile [ROWS, COLS] that starts at column `col` by reciprocal scales fp32 [N]; rounds to e4m3."""
    cols = col + tl.arange(0, COLS)
    return to_e4m3(value.to(tl.float32) * tl.load(scale_ptr + cols, mask=cols < N, other=1.0)[None, :])
