"""Epilogues, operands, configurations and launches of the matmul kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import gpu_of
from ..launch import Launch, ceil_div
from .matmul import _matmul_kernel


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
class Epilogue:
    """Describes an epilogue: its device function (`matmul.py`), the arguments, and what the launch policy must know."""

    name: str  # key of the tables in matmul_policy.py
    function: Any
    matrices: tuple[Tensor | None, ...]  # up to four, the first is an output; their columns are multiples of sub-tiles
    arguments: tuple[Any, ...] = ()
    settings: tuple[Any, ...] = ()
    activation: str = "identity"
    instructions: int = 0  # per element that a thread holds, counted in SASS of sm_90
    # With the operand A and the configuration: 0, or a setting for early loads. If it is not 0, the matrices with the
    # indices `by_pointer` are pointers even with TMA.
    early: Callable[[Tensor, MatmulConfig], int] = lambda *_: 0
    by_pointer: tuple[int, ...] = ()
    narrowest: int = 0  # minimum columns of a tile: `row_parts.py` needs whole pieces of 64 stored columns
    largest: int = 2**31  # maximum elements of a tile that does not spill
    head: int = 0  # required columns of a sub-tile; 0: any


@dataclass(frozen=True)
class Matmul:
    """A matmul A B with its epilogue; all tensors are contiguous."""

    a: Tensor  # [M, K]
    b: Tensor  # [K, N], or [N, K] if b_is_nk
    epilogue: Epilogue
    b_is_nk: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        M, K = self.a.shape
        return M, self.b.shape[0] if self.b_is_nk else self.b.shape[1], K

    def tiled(self) -> list[Tensor]:
        return [tensor for tensor in (self.a, self.b, *self.epilogue.matrices) if tensor is not None]


def fits_tma(tensors: Iterable[Tensor]) -> bool:
    """True if TMA supports all tensors: none is empty, and rows and addresses are aligned to 16 bytes."""
    return all(t.numel() > 0 and t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def tiled(tensor: Tensor | None, rows: int, cols: int, tma: bool) -> Any:
    """Returns the kernel argument for a tensor: a descriptor for tiles [rows, cols] if `tma`, else the tensor."""
    if tensor is None or not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])


def matmul_launch(matmul: Matmul, config: MatmulConfig, splits: int | None = None) -> Launch:
    """Returns the launch of a matmul. `config.tma` requires `fits_tma(matmul.tiled())`. `splits`: parts of K."""
    a, b, epilogue = matmul.a, matmul.b, matmul.epilogue
    M, N, K = matmul.sizes
    dependent = config.dependent and matmul.b_is_nk  # B is then a weight, which may be prefetched (ptx.py)
    rows, cols, depth = config.block_m, config.block_n, config.block_k
    early = epilogue.early(a, config)

    def matrix(index: int) -> Any:
        tensor = epilogue.matrices[index] if index < len(epilogue.matrices) else None
        if tensor is None or (early and index in epilogue.by_pointer):
            return tensor
        return tiled(tensor, rows, config.sub_tile_width * tensor.shape[-1] // N, config.tma)

    args = {
        "a": tiled(a, rows, depth, config.tma),
        "b": tiled(b, *((cols, depth) if matmul.b_is_nk else (depth, cols)), config.tma),
        **{f"matrix{index + 1}": matrix(index) for index in range(4)}, "arguments": epilogue.arguments,
        "b_ptr": b if dependent else None, "M": M, "N": N, "K": K, "splits": splits,
    }  # fmt: skip
    constants = {
        "settings": (*epilogue.settings, early), "EPILOGUE": epilogue.function,
        "B_IS_NK": matmul.b_is_nk, "TMA": config.tma, "FLATTEN": config.flatten and splits is None,
        "BLOCK_M": rows, "BLOCK_N": cols, "BLOCK_K": depth, "SUB_TILES": config.sub_tiles if splits is None else 1,
        "ALIGN": math.gcd(16, *(tensor.shape[-1] for tensor in matmul.tiled())), "DEPENDENT": dependent,
    }  # fmt: skip
    units = config.tiles(M, N) * (splits or 1)
    programs = min(units, gpu_of(a.device).sm_count * config.ctas_per_sm)
    details = (epilogue.name,) if epilogue.activation == "identity" else (epilogue.name, epilogue.activation)
    return Launch(
        _matmul_kernel, programs, args, constants, num_warps=config.num_warps, num_stages=config.num_stages,
        maxnreg=config.maxnreg, details=details, flop=2.0 * M * N * K, units=units,
        device=a.device,
    )  # fmt: skip
