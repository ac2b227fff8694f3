"""Conversion to e4m3 (four bits of exponent, three of mantissa).

The kernel that writes the operand of a quantised linear layer divides it by its scale and rounds it: the epilogue that
writes the residual stream, the attention, the activation. Kernels get the reciprocals of scales and multiply: a
division per column and tile would be 8 % of the longest epilogue's instructions.

Source: FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import is_interpreted

_INTERPRETED = tl.constexpr(is_interpreted())


@triton.jit
def to_e4m3(value):
    """Rounds fp32 to e4m3, ties to even; saturates at 448 and preserves NaN.

    Uses the instruction directly: on sm_89 the compiler's conversion goes through fp16, rounded to zero, and its
    documentation does not state whether it saturates.
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
    """Multiplies fp32 by the reciprocal scale in memory and rounds to e4m3; returns the value if there is none."""
    if scale_ptr is None:
        return value
    else:
        return to_e4m3(value * tl.load(scale_ptr))


@triton.jit
def divided_columns(value, scale_ptr, col, N, COLS: tl.constexpr):
    """Multiplies a tile [ROWS, COLS], columns col .. col + COLS of N, by reciprocal scales fp32 [N]; rounds to e4m3."""
    cols = col + tl.arange(0, COLS)
    return to_e4m3(value.to(tl.float32) * tl.load(scale_ptr + cols, mask=cols < N, other=1.0)[None, :])
