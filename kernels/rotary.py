"""qk-norm and rotary embeddings on packed qkv [B, N, 3, H, D], forward and backward, for any even D.

Let x be one head of q or k of a token, or all heads if they are normalized together. The norm has weight w and bias b:
y = n w + b, with n = (x - mean) rstd and rstd = 1 / sqrt(variance + eps). Each pair of channels (y_1, y_2) is rotated
by an angle, given by tables cos and sin:

    out_1 = y_1 cos - y_2 sin,  out_2 = y_2 cos + y_1 sin

A pair is channels j and j + D/2, or 2j and 2j + 1. The first `prefix` tokens of an image are not rotated. In the
backward, dy is dout rotated by the opposite angle. With dn = dy w, and means over all channels of x:

    dx = rstd (dn - mean(dn) - n mean(dn n)),  dw = sum dy n,  db = sum dy

The sums for the norm of q run over all x of q, those for the norm of k over all x of k. For RMSNorm, mean and mean(dn)
are replaced by 0, so the variance is mean(x^2). Each program sums dw and db over its own heads. torch adds these sums
in a fixed order, so results are deterministic.

A program processes ROWS heads at once as two tiles [ROWS, BLOCK], BLOCK >= D / 2: the first and the second channel of
each pair. The kernels also copy v, unless they work in place.

The functions take `tensors` and `s`, a `QkTensors` and a `QkSettings` of vit_fast/ops/rotary.py. Weights and biases are
contiguous, and the tables pass `can_be_read`.

Sources: rotary embeddings, arXiv 2104.09864; qk-norm, arXiv 2302.05442.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import gpu_of
from .launch import Launch, ceil_div

_TILE = 1024  # elements per tile, unless a norm spans all heads


@triton.jit
def _load_pairs(pointer, offsets, pairs, inside, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads both channels of pairs in fp32; `offsets` are the offsets of the heads, in elements."""
    if INTERLEAVED:
        first = tl.load(pointer + (offsets + 2 * pairs), mask=inside, other=0.0)
        second = tl.load(pointer + (offsets + 2 * pairs + 1), mask=inside, other=0.0)
    else:
        first = tl.load(pointer + (offsets + pairs), mask=inside, other=0.0)
        second = tl.load(pointer + (offsets + pairs + D // 2), mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(pointer, first, second, offsets, pairs, inside, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    first = first.to(pointer.dtype.element_ty)
    second = second.to(pointer.dtype.element_ty)
    if INTERLEAVED:
        tl.store(pointer + (offsets + 2 * pairs), first, mask=inside)
        tl.store(pointer + (offsets + 2 * pairs + 1), second, mask=inside)
    else:
        tl.store(pointer + (offsets + pairs), first, mask=inside)
        tl.store(pointer + (offsets + pairs + D // 2), second, mask=inside)


@triton.jit
def _load_affine(vectors, which, head, pairs, inside, D: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads the weight or bias of the norm of q (which = 0) or k."""
    start = head * D if WIDE else head * 0
    if which == 0:
        first, second = _load_pairs(vectors[0], start, pairs, inside, D, INTERLEAVED)
    else:
        first, second = _load_pairs(vectors[1], start, pairs, inside, D, INTERLEAVED)
    return first, second


@triton.jit
def _load_angles(
    tables, token, head, pairs, inside, N, prefix, image_rows, head_rows,
    ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr,
):  # fmt: skip
    """Loads cos and sin [ROWS, BLOCK]; 1 and 0 for tokens that are not rotated."""
    position = token % N - prefix
    row = (token // N).to(tl.int64) * image_rows + head * head_rows + position
    offsets = row * ROW_STEP + pairs * PAIR_STEP
    rotated = inside & (position >= 0)
    cos = tl.load(tables[0] + offsets, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(tables[1] + offsets, mask=rotated, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _mean(first, second, H, D: tl.constexpr, WIDE: tl.constexpr):
    """Returns the mean of each head [ROWS, 1]; if WIDE, one mean over all heads of the token."""
    sums = tl.sum(first + second, 1)
    if WIDE:
        return tl.sum(sums, 0) / (H * D)
    else:
        return sums[:, None] / D


@triton.jit
def _normalize(first, second, inside, eps, H, D: tl.constexpr, RMS: tl.constexpr, WIDE: tl.constexpr):
    """Returns the normalized pairs and rstd."""
    if not RMS:
        mean = _mean(first, second, H, D, WIDE)
        first = tl.where(inside, first - mean, 0.0)
        second = tl.where(inside, second - mean, 0.0)
    rstd = tl.math.rsqrt(_mean(first * first, second * second, H, D, WIDE) + eps)
    return first * rstd, second * rstd, rstd


@triton.jit
def normed_pairs(
    first, second, weights, biases, which, head, pairs, inside, eps, H,
    D: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Applies the norm of q (which = 0) or k. INTERLEAVED: the channels of a pair are adjacent in weight and bias."""
    first, second, _ = _normalize(first, second, inside, eps, H, D, NORM == "rms_norm", WIDE)
    if weights[0] is not None:
        weight1, weight2 = _load_affine(weights, which, head, pairs, inside, D, WIDE, INTERLEAVED)
        first *= weight1
        second *= weight2
    if biases[0] is not None:
        bias1, bias2 = _load_affine(biases, which, head, pairs, inside, D, WIDE, INTERLEAVED)
        first += bias1
        second += bias2
    return first, second


@triton.jit
def _heads(block, M, H, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Returns token, head and validity of each row of the `block`-th pair of tiles, [ROWS, 1]."""
    step = tl.arange(0, ROWS)[:, None]
    if WIDE:
        return block + step * 0, step, (step < H) & (block < M)
    else:
        row = tl.cast(block, tl.int64) * ROWS + step
        return (row // H).to(tl.int32), (row % H).to(tl.int32), row < tl.cast(M, tl.int64) * H


@triton.jit(do_not_specialize=["M", "N", "H", "prefix", "image_rows", "head_rows"])
def _qk_norm_rope_kernel(
    x_ptr,  # [M, 3, H, D], M = B N
    out_ptr,  # output: like x, or x itself
    weights, biases,  # of the norms of q and k: two vectors [D], or [H * D] if WIDE; (None, None): no weights or biases
    tables,  # cos and sin [B or 1, H or 1, N - prefix, D / 2]; (None, None): no rotation
    M, N, H, prefix, eps,
    image_rows, head_rows,  # strides of images and heads in the tables, in rows; 0 if shared
    ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr,  # strides of rows and pairs in the tables, in elements
    D: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, LAYOUT: tl.constexpr,  # `QkSettings`; WIDE: over
    SEPARATE: tl.constexpr,  # in place only: moves the channels of a pair from adjacent places to places D / 2 apart
    INVERSE: tl.constexpr,  # rotate by the opposite angle
    PARTS: tl.constexpr,  # 2: processes q and k; 3: also copies v
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    INTERLEAVED: tl.constexpr = LAYOUT != "half"
    which = tl.program_id(0) % PARTS
    token, head, is_row = _heads(tl.program_id(0) // PARTS, M, H, ROWS, WIDE)
    pairs = tl.arange(0, BLOCK)[None, :]
    inside = is_row & (pairs < D // 2)
    offsets = ((token.to(tl.int64) * 3 + which) * H + head) * D
    first, second = _load_pairs(x_ptr, offsets, pairs, inside, D, INTERLEAVED)
    if which < 2:
        if NORM != "none":
            first, second = normed_pairs(
                first, second, weights, biases, which, head, pairs, inside, eps, H, D, NORM, WIDE,
                LAYOUT == "interleaved",
            )  # fmt: skip
        if tables[0] is not None:
            cos, sin = _load_angles(
                tables, token, head, pairs, inside, N, prefix, image_rows, head_rows, ROW_STEP, PAIR_STEP
            )
            if INVERSE:
                sin = -sin
            turned = second * cos + first * sin
            first = first * cos - second * sin
            second = turned
    if SEPARATE:  # in place, a thread overwrites elements that other threads load
        tl.debug_barrier()
    _store_pairs(out_ptr, first, second, offsets, pairs, inside, D, INTERLEAVED and not SEPARATE)


@triton.jit(do_not_specialize=["M", "N", "H", "prefix", "image_rows", "head_rows", "blocks"])
def _qk_norm_rope_grad_kernel(
    grad_ptr,  # [M, 3, H, D]
    x_ptr,  # [M, 3, H, D], input of the forward
    out_ptr,  # output: dx [M, 3, H, D], or grad itself
    weights, tables,  # as in the forward
    part_ptr,  # output: partial sums, fp32 [programs / PARTS, 2 (q, k), 2 (dw, db), D or H * D]; or None
    M, N, H, prefix, eps, image_rows, head_rows,
    blocks,  # number of pairs of tiles of q; k and v have as many
    ROW_STEP: tl.constexpr, PAIR_STEP: tl.constexpr,
    D: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, LAYOUT: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    INTERLEAVED: tl.constexpr = LAYOUT != "half"
    which = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    pairs = tl.arange(0, BLOCK)[None, :]
    zeros = tl.zeros((ROWS, BLOCK), tl.float32)
    weight_sum1, weight_sum2, bias_sum1, bias_sum2 = zeros, zeros, zeros, zeros
    for block in tl.range(program, blocks, tl.num_programs(0) // PARTS):
        token, head, is_row = _heads(block, M, H, ROWS, WIDE)
        inside = is_row & (pairs < D // 2)
        offsets = ((token.to(tl.int64) * 3 + which) * H + head) * D
        grad1, grad2 = _load_pairs(grad_ptr, offsets, pairs, inside, D, INTERLEAVED)
        if which < 2:
            if tables[0] is not None:
                cos, sin = _load_angles(
                    tables, token, head, pairs, inside, N, prefix, image_rows, head_rows, ROW_STEP, PAIR_STEP
                )
                turned = grad2 * cos - grad1 * sin
                grad1 = grad1 * cos + grad2 * sin
                grad2 = turned
            x1, x2 = _load_pairs(x_ptr, offsets, pairs, inside, D, INTERLEAVED)
            x1, x2, rstd = _normalize(x1, x2, inside, eps, H, D, NORM == "rms_norm", WIDE)
            if part_ptr is not None:
                weight_sum1 += grad1 * x1
                weight_sum2 += grad2 * x2
                bias_sum1 += grad1
                bias_sum2 += grad2
            if weights[0] is not None:
                weight1, weight2 = _load_affine(weights, which, head, pairs, inside, D, WIDE, INTERLEAVED)
                grad1 *= weight1
                grad2 *= weight2
            along = _mean(grad1 * x1, grad2 * x2, H, D, WIDE)
            shift = along * 0.0 if NORM == "rms_norm" else _mean(grad1, grad2, H, D, WIDE)
            grad1 = rstd * (grad1 - shift - x1 * along)
            grad2 = rstd * (grad2 - shift - x2 * along)
        _store_pairs(out_ptr, grad1, grad2, offsets, pairs, inside, D, INTERLEAVED)
    if part_ptr is not None:
        if which < 2:
            if WIDE:
                head = tl.arange(0, ROWS)[:, None]
                start, width, own = head * D, H * D, (head < H) & (pairs < D // 2)
                weight_grad1, weight_grad2, bias_grad1, bias_grad2 = weight_sum1, weight_sum2, bias_sum1, bias_sum2
            else:
                start, width, own = 0, D, pairs < D // 2
                weight_grad1, weight_grad2 = tl.sum(weight_sum1, 0)[None, :], tl.sum(weight_sum2, 0)[None, :]
                bias_grad1, bias_grad2 = tl.sum(bias_sum1, 0)[None, :], tl.sum(bias_sum2, 0)[None, :]
            base = part_ptr + tl.cast(program * 2 + which, tl.int64) * (2 * width)
            _store_pairs(base, weight_grad1, weight_grad2, start, pairs, own, D, INTERLEAVED)
            _store_pairs(base + width, bias_grad1, bias_grad2, start, pairs, own, D, INTERLEAVED)


def can_be_read(cos: Tensor, sin: Tensor) -> bool:
    """True if the kernels can read the tables [..., T, D / 2] without a copy.

    cos and sin must have equal strides. The stride of T must be positive, and must divide the strides of all outer
    dimensions of size > 1.
    """
    *outer, row, _ = cos.stride()
    whole = row > 0 and not any(step % row for step, size in zip(outer, cos.shape) if size > 1)
    return whole and cos.stride() == sin.stride()


def shared_arguments(tensors: Any, s: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns arguments and constants that these kernels have in common with the epilogue of the qkv matmul."""
    image_rows = head_rows = row = pair = 0
    if tensors.cos is not None:
        *outer, row, pair = tensors.cos.stride()
        image_rows, head_rows = (step // row if size > 1 else 0 for step, size in zip(outer, tensors.cos.shape))
    args = {
        "weights": (tensors.q_weight, tensors.k_weight), "tables": (tensors.cos, tensors.sin), "prefix": s.prefix,
        "image_rows": image_rows, "head_rows": head_rows,
    }  # fmt: skip
    return args, {"NORM": s.norm, "ROW_STEP": row, "PAIR_STEP": pair}


def _arguments(x: Tensor, tensors: Any, s: Any) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Returns arguments and constants of forward and backward, the number of pairs of tiles of q, and warps."""
    B, N, _, H, D = x.shape
    block, wide = triton.next_power_of_2(D // 2), s.over == "width"
    rows = triton.next_power_of_2(H) if wide else max(1, _TILE // block)
    args, constants = shared_arguments(tensors, s)
    args |= {"x_ptr": x, "M": B * N, "N": N, "H": H, "eps": s.eps}
    constants |= {"D": D, "WIDE": wide, "LAYOUT": s.layout, "ROWS": rows, "BLOCK": block}
    return args, constants, B * N if wide else ceil_div(B * N * H, rows), 4 if rows * block <= _TILE else 8


def qk_norm_rope_launch(
    x: Tensor, out: Tensor, tensors: Any, s: Any, inverse: bool = False, separate: bool = False
) -> Launch:
    """Returns the launch that normalizes and rotates q and k of x [B, N, 3, H, D] into `out`, which may be x.

    Args:
        inverse: Rotate by the opposite angle. Without norms, the inverse rotation is the backward.
        separate: Also move the channels of a pair from 2j and 2j + 1 to j and j + D/2. `out` must be x.
    """
    args, constants, blocks, warps = _arguments(x, tensors, s)
    parts = 2 if out is x else 3
    args |= {"out_ptr": out, "biases": (tensors.q_bias, tensors.k_bias)}
    constants |= {"SEPARATE": separate, "INVERSE": inverse, "PARTS": parts}
    return Launch(_qk_norm_rope_kernel, blocks * parts, args, constants, num_warps=warps, device=x.device)


def qk_norm_rope(x: Tensor, tensors: Any, s: Any) -> Tensor:
    """Returns a copy of the contiguous x [B, N, 3, H, D] with q and k normalized and rotated."""
    out = torch.empty_like(x)
    qk_norm_rope_launch(x, out, tensors, s).run()
    return out


def qk_norm_rope_gradients(
    grad: Tensor, x: Tensor | None, tensors: Any, s: Any, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns dx, and one tensor of dw and db: fp32 [2 (q, k), 2 (dw, db), D or H * D], or None without w and b.

    Args:
        grad: Gradient of the output of `qk_norm_rope`, [B, N, 3, H, D], contiguous.
        x: Input of the forward, contiguous; None without norms.
        out: Tensor for dx; may be `grad`. None allocates a tensor.
    """
    out = torch.empty_like(grad) if out is None else out
    if x is None:
        qk_norm_rope_launch(grad, out, tensors, s, inverse=True).run()
        return out, None
    args, constants, blocks, warps = _arguments(x, tensors, s)
    part, parts, programs = None, 2 if out is grad else 3, blocks
    if tensors.q_weight is not None or tensors.q_bias is not None:
        programs = max(1, min(blocks, 2 * gpu_of(x.device).sm_count))
        width = x.shape[-2] * x.shape[-1] if s.over == "width" else x.shape[-1]
        part = torch.empty(programs, 2, 2, width, dtype=torch.float32, device=x.device)
    args |= {"grad_ptr": grad, "out_ptr": out, "part_ptr": part, "blocks": blocks}
    # on sm_100, ptxas by itself limits the kernel to 96 registers, which causes spills
    Launch(
        _qk_norm_rope_grad_kernel, programs * parts, args, constants | {"PARTS": parts}, num_warps=warps,
        maxnreg=128, device=x.device,
    ).run()  # fmt: skip
    return out, None if part is None else part.sum(0)
