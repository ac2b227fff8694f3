"""Which tiles a matmul runs with: a table by architecture, product precision and size, no search at the first call.

Every row compiles without spills for its architecture (`vit-fast kernels`). The sizes at which a row takes over are
estimates from tile counts, not measurements.
"""

from __future__ import annotations

import torch

from .launch import arch_of, ceil_div, generation, is_interpreted, sm_count_of
from .matmul_launch import MatmulConfig, Operands, fits_tma, matmul_precision

# Epilogues that hold more of a tile in registers than the others.
_HEAVY = ("activation_grad", "partial")
_MAX_SPLITS = 16


def precision_kind(dtype: torch.dtype) -> str:
    """The column of the table: "half" for fp16 and bf16, else "tf32" or "ieee" by torch's setting."""
    return "half" if dtype.itemsize == 2 else matmul_precision(dtype)


def config_table(arch: str, kind: str, epilogue: str, tma: bool) -> tuple[MatmulConfig, ...]:
    """Configurations from the widest tile to the smallest.

    Args:
        arch: e.g. "sm_90"; sm_120 and unknown ones take the pointer tables, which every architecture runs.
        kind: "half", "tf32" or "ieee".
        epilogue: One of `EPILOGUES`.
        tma: Whether the operands can go through tensor descriptors.
    """
    hopper, blackwell = (generation(arch) == name for name in ("hopper", "blackwell"))
    table: tuple[MatmulConfig, ...]
    if kind == "ieee":
        table = _IEEE
    elif not tma or not (hopper or blackwell):
        table = _pointer_table(arch, kind, epilogue)
    elif kind == "tf32":
        table = _TF32_BLACKWELL if blackwell else _TF32_HOPPER
    elif hopper:
        table = _HALF_HOPPER
    else:
        table = _HALF_BLACKWELL_HEAVY if epilogue in _HEAVY else _HALF_BLACKWELL
    # a weight gradient is as large as its weight: splitting K, not small tiles, fills the multiprocessors
    return table[:1] if epilogue == "partial" else table


# Products on the CUDA cores: they, not the epilogue, fill the registers.
_IEEE = (MatmulConfig(64, 64, 16, num_warps=8, num_stages=2, ctas_per_sm=2),)

_HALF_HOPPER = (
    MatmulConfig(128, 256, 64, sub_tiles=4, num_warps=8, num_stages=3, tma=True, flatten=True),
    MatmulConfig(64, 128, 64, sub_tiles=2, num_warps=4, num_stages=4, tma=True, ctas_per_sm=2),
    MatmulConfig(64, 64, 64, num_warps=4, num_stages=4, tma=True, ctas_per_sm=2),
)
_HALF_BLACKWELL = (
    MatmulConfig(128, 256, 64, sub_tiles=4, num_warps=8, num_stages=3, tma=True),
    MatmulConfig(128, 128, 64, sub_tiles=4, num_warps=4, num_stages=3, tma=True, ctas_per_sm=2),
    MatmulConfig(64, 64, 64, num_warps=4, num_stages=4, tma=True, ctas_per_sm=2),
)
_HALF_BLACKWELL_HEAVY = (
    MatmulConfig(128, 128, 64, sub_tiles=2, num_warps=8, num_stages=3, tma=True),
    MatmulConfig(64, 64, 64, num_warps=4, num_stages=4, tma=True, ctas_per_sm=2),
)
_TF32_HOPPER = (
    MatmulConfig(128, 128, 32, sub_tiles=2, num_warps=8, num_stages=3, tma=True),
    MatmulConfig(64, 64, 32, num_warps=4, num_stages=3, tma=True, ctas_per_sm=2),
)
_TF32_BLACKWELL = (MatmulConfig(64, 64, 32, num_warps=4, num_stages=3, tma=True, ctas_per_sm=2),)


def _pointer_table(arch: str, kind: str, epilogue: str) -> tuple[MatmulConfig, ...]:
    """Tiles loaded by pointers: sm_80, 86, 89 and 120, and layouts that tensor descriptors cannot describe."""
    hopper, blackwell = (generation(arch) == name for name in ("hopper", "blackwell"))
    if kind == "tf32" and blackwell:
        return (MatmulConfig(64, 64, 32, num_warps=8, num_stages=3, ctas_per_sm=2),)
    width = 64 if kind == "tf32" and not hopper else 128
    depth = 64 if kind == "half" and hopper else 32
    small = 64 if kind == "half" and not blackwell else 32
    spills = arch == "sm_120"  # in whole small tiles of tf32 and in halves of wide ones of some activations' gradients
    return (
        MatmulConfig(
            128, width, depth, sub_tiles=4 if spills and (kind, epilogue) == ("half", "activation_grad") else 2,
            num_warps=8, num_stages=3,
        ),
        MatmulConfig(
            64, 64, small, sub_tiles=2 if spills and kind == "tf32" else 1, num_warps=4, num_stages=3, ctas_per_sm=2
        ),
    )  # fmt: skip


def matmul_config(operands: Operands, epilogue: str) -> MatmulConfig:
    """The configuration for these operands: the widest tile that gives every multiprocessor one, else the smallest.

    The interpreter, whose time goes by the number of tiles and not by their size, always takes the widest there is.
    """
    device = operands.a.device
    if is_interpreted():
        return config_table("sm_90", "half", epilogue, fits_tma(operands))[0]
    table = config_table(arch_of(device), precision_kind(operands.a.dtype), epilogue, fits_tma(operands))
    M, N, _ = operands.sizes
    for config in table[:-1]:
        if config.tiles(M, N) >= sm_count_of(device):
            return config
    return table[-1]


def split_count(operands: Operands, config: MatmulConfig) -> int:
    """Parts of K for a weight gradient: the fewest that keep the multiprocessors at least 90 % as busy as the best.

    Each part has at least four steps of K, and at most 16 parts are written.
    """
    M, N, K = operands.sizes
    programs = sm_count_of(operands.a.device) * config.ctas_per_sm
    most = max(1, min(_MAX_SPLITS, ceil_div(K, config.block_k) // 4))

    def busy(splits: int) -> float:
        units = config.tiles(M, N) * splits
        return units / (ceil_div(units, programs) * programs)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= 0.9 * best)
