"""Operands, configurations and launches of the matmul kernel."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import gpu_of
from ..launch import Launch, ceil_div
from ..rotary import QkvSettings, shared_arguments
from ..row_parts import PIECE
from .matmul import _matmul_kernel

_POINTERS = (
    "mean", "rstd", "bias", "weight_sum", "scale", "out_scale", "row_part", "out_part", "column_part", "hidden",
    "along",
)  # fmt: skip
_POINTER_ARGUMENTS, _pointers_of = [f"{name}_ptr" for name in _POINTERS], operator.attrgetter(*_POINTERS)
# Widths of tensors as multiples of N, by epilogue and tensor. All other tensors are N wide.
_WIDER = {("gated", "out"): 0.5, ("gated_grad", "out"): 2, ("gated_grad", "z"): 2}
TL_DTYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}  # fmt: skip


@dataclass(frozen=True)
class MatmulConfig:
    """Configuration of a matmul launch.

    With `flatten`, the loops over tiles and over K are pipelined as one loop: the loads of the next tile overlap the
    epilogue of the current tile. The kernel of `weight_matmuls.py` and the epilogue "partial" ignore `flatten`.
    """

    block_m: int
    block_n: int
    block_k: int
    sub_tiles: int = 1  # parts of a tile along N that the epilogue processes one after another: 1, 2 or 4
    num_warps: int = 4
    num_stages: int = 3
    tma: bool = False
    flatten: bool = False
    ctas_per_sm: int = 1  # programs per multiprocessor of the persistent grid
    maxnreg: int | None = None
    dependent: bool = False  # start before the previous kernel has ended (ptx.py), if B is a weight [N, K]

    @property
    def sub_tile_width(self) -> int:
        return self.block_n // self.sub_tiles

    def tiles(self, M: int, N: int) -> int:
        return ceil_div(M, self.block_m) * ceil_div(N, self.block_n)


@dataclass(frozen=True)
class HeadStep:
    """Norms and rotary embeddings of q and k in the epilogue of a qkv matmul."""

    settings: QkvSettings  # not `wide`; tables [B or 1, 1, tokens - prefix, head_dim / 2] pass `can_be_read`
    tokens: int  # per image
    head_dim: int

    @property
    def epilogue(self) -> str:
        return "rotary" if self.settings.norm == "none" else "qk_norm"

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        s = self.settings
        args, constants = shared_arguments(s)
        del args["head_rows"]  # 0, because all heads share the tables
        args |= {"norm_weights": args.pop("weights"), "norm_biases": s.biases or (None, None)}
        args |= {"qk_eps": s.eps, "tokens": self.tokens}
        halves = s.tables is not None and s.layout != "interleaved"
        return args, constants | {"HEAD": self.head_dim, "HALVES": halves}


_NO_STEP = HeadStep(QkvSettings(), 0, 0).arguments()


@dataclass(frozen=True)
class Operands:
    """Tensors of a matmul; the parameters of `_matmul_kernel` describe their use by each epilogue.

    `residual` and `out` have the same dtype: fp32 or half precision. `x` has the dtype of `a` if it is normalized,
    else the dtype of `out`. With `head_step`, N is 3 * heads * head_dim.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    b_is_nk: bool = False
    z: Tensor | None = None
    h: Tensor | None = None
    x: Tensor | None = None
    residual: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    bias: Tensor | None = None
    weight_sum: Tensor | None = None
    scale: Tensor | None = None
    out8: Tensor | None = None
    out_scale: Tensor | None = None
    row_part: Tensor | None = None
    column_part: Tensor | None = None
    out_part: Tensor | None = None
    hidden: Tensor | None = None
    along: Tensor | None = None
    eps: float = 0.0
    head_step: HeadStep | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        M, K = self.a.shape
        return M, self.b.shape[0] if self.b_is_nk else self.b.shape[1], K

    def of_rows(self, rows: slice) -> Operands:
        """Returns the operands of a "residual" matmul for a slice of its rows."""
        names = ("a", "out", "residual", "out_part", "out8")
        given = {name: getattr(self, name) for name in names}
        return replace(self, **{name: tensor[rows] for name, tensor in given.items() if tensor is not None})

    def tiled(self) -> list[Tensor]:
        tiled = (self.a, self.b, self.out, self.z, self.h, self.x, self.residual, self.out8)
        return [tensor for tensor in tiled if tensor is not None]


def fits_tma(tensors: Iterable[Tensor]) -> bool:
    """True if TMA supports all tensors: none is empty, and rows and addresses are aligned to 16 bytes."""
    return all(t.numel() > 0 and t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def tiled(tensor: Tensor | None, rows: int, cols: int, tma: bool) -> Any:
    """Returns the kernel argument for a tensor: a descriptor for tiles [rows, cols] if `tma`, else the tensor."""
    if tensor is None or not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])


def matmul_launch(
    operands: Operands, *, epilogue: str, config: MatmulConfig, activation: str = "identity", split_k: int = 1
) -> Launch:
    """Returns the launch that computes `operands.out`; all operands must be contiguous.

    Args:
        config: `config.tma` requires `fits_tma(operands.tiled())`.
        activation: "identity" or one of `ACTIVATIONS`, for "layer_norm", "activation_grad" and the gated epilogues.
        split_k: Parts of K, for "partial".
    """
    o = operands
    head_args, head_constants = o.head_step.arguments() if o.head_step else _NO_STEP
    M, N, K = o.sizes
    dependent = config.dependent and o.b_is_nk  # B is then a weight, which may be prefetched (ptx.py)
    rows, cols, depth = config.block_m, config.block_n, config.block_k

    # Early loads (EARLY of the kernel) need registers. With e4m3, only one sub-tile of the residual is loaded early. x
    # is not loaded early if x is fp32, or if h stores a copy of out.
    early = 1 if o.out8 is not None or o.a.dtype == torch.float8_e4m3fn else config.sub_tiles
    if o.x is not None:
        early = int(o.x.element_size() == 2 and o.h is None)
    reads_z = epilogue in ("activation_grad", "gated_grad")
    if reads_z:  # with gelu_tanh, the widest tiles leave no registers for early loads
        early = int(o.a.element_size() == 2 and not (activation == "gelu_tanh" and cols == 256))

    def by_sub_tiles(name: str) -> Any:
        width = int(config.sub_tile_width * _WIDER.get((epilogue, name), 1))
        return tiled(getattr(o, name), rows, width, config.tma)

    args = {
        "a": tiled(o.a, rows, depth, config.tma),
        "b": tiled(o.b, *((cols, depth) if o.b_is_nk else (depth, cols)), config.tma),
        "out": o.out if epilogue == "partial" else by_sub_tiles("out"),
        "z": o.z if reads_z and early else by_sub_tiles("z"), "h": by_sub_tiles("h"),
        "x": o.x if early else by_sub_tiles("x"), "residual": o.residual if early else by_sub_tiles("residual"),
        "out8": by_sub_tiles("out8"), **dict(zip(_POINTER_ARGUMENTS, _pointers_of(o))),
        "M": M, "N": N, "K": K, "eps": o.eps, "b_ptr": o.b if dependent else None, "splits": split_k, **head_args,
    }  # fmt: skip
    constants = {
        "EPILOGUE": epilogue, "ACTIVATION": activation, "DTYPE": TL_DTYPES[o.out.dtype],
        "B_IS_NK": o.b_is_nk, "TMA": config.tma, "FLATTEN": config.flatten and epilogue != "partial",
        "BLOCK_M": rows, "BLOCK_N": cols, "BLOCK_K": depth,
        "SUB_TILES": config.sub_tiles, "EARLY": early,
        "PARTS": 0 if o.row_part is None else o.row_part.shape[-1],
        "OUT_PARTS": 0 if o.out_part is None else o.out_part.shape[-1],
        "TIMES": 1 if o.out_part is None else PIECE // int(config.sub_tile_width * _WIDER.get((epilogue, "out"), 1)),
        "WHOLE": o.out_part is not None and o.out.shape[-1] % PIECE == 0,
        **head_constants,
        "ALIGN": math.gcd(16, *(tensor.shape[-1] for tensor in o.tiled())),
        "DEPENDENT": dependent,
    }  # fmt: skip
    programs = min(config.tiles(M, N) * split_k, gpu_of(o.a.device).sm_count * config.ctas_per_sm)
    return Launch(
        _matmul_kernel, (programs,), args, constants,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.maxnreg, device=o.a.device,
    )  # fmt: skip
