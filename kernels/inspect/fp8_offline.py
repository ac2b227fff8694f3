"""What a block in FP8 launches beside the half-precision kernels, for compiling without a GPU.

The shapes are ViT-L/16's at batch 256, as those of `matmul_offline.py` are ViT-B/16's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention.attention_forward import forward_launch
from ..layer_norm import row_statistics_launch
from ..linear.split_k import finish_residual_launch
from ..matmul.matmul_launch import HeadStep, MatmulConfig, Operands, matmul_launch
from ..matmul.matmul_policy import config_table
from ..rotary import QkvSettings
from ..row_parts import row_parts
from .attention_offline import forward_case
from .matmul_offline import kernel_name
from .offline import Build

_M, _C, _F = 50_432, 1024, 4096
_HALF, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_ATTENTION_SHAPES = ((197, 64, "tma"), (577, 64, "tma"), (257, 80, "tma"), (729, 72, "vector"))
_CORE = ("gelu, all e4m3", "statistics and e4m3")


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def _normed(operand: torch.dtype, result: torch.dtype, columns: int = _F, wide: int = 1, turned: int = 0) -> Operands:
    table = _meta(1, 1, 196, turned // 2)
    return Operands(
        _meta(_M, _C, dtype=operand), _meta(columns, _C, dtype=operand), _meta(_M, columns // wide, dtype=result),
        b_is_nk=True, row_part=_meta(_M, 2, row_parts(_C)), bias=_meta(columns), weight_sum=_meta(columns), eps=1e-6,
        scale=_meta(columns) if operand == _E4M3 else None, out_scale=_meta(1) if result == _E4M3 else None,
        head_step=HeadStep(QkvSettings(tables=(table, table), prefix=1), 197, turned) if turned else None,
    )  # fmt: skip


def _residual(operand: torch.dtype, with_e4m3: bool) -> Operands:
    stream, vector = _meta(_M, _C, dtype=_HALF), _meta(_C, dtype=torch.float32 if operand == _E4M3 else _HALF)
    return Operands(
        _meta(_M, _F, dtype=operand), _meta(_C, _F, dtype=operand), stream, b_is_nk=True, residual=stream, bias=vector,
        scale=vector, out_part=_meta(_M, 2, row_parts(_C)), out8=_meta(_M, _C, dtype=_E4M3) if with_e4m3 else None,
        out_scale=_meta(_C) if with_e4m3 else None,
    )  # fmt: skip


def _cases(operand: torch.dtype) -> Iterator[tuple[str, str, Operands, str, int]]:
    """(epilogue, what, operands, activation, parts of K) of operands in e4m3; of half precision what e4m3 adds."""
    quantised = operand == _E4M3
    yield "layer_norm", "gelu, all e4m3" if quantised else "gelu to e4m3", _normed(operand, _E4M3), "gelu", 1
    yield "gated", "silu to e4m3", _normed(operand, _E4M3, wide=2), "silu", 1
    yield "residual", "statistics and e4m3", _residual(operand, True), "identity", 1
    if not quantised:
        return
    yield "layer_norm", "no activation", _normed(operand, _HALF, 3 * _C), "identity", 1
    yield "layer_norm", "gelu", _normed(operand, _HALF), "gelu", 1
    yield "gated", "silu", _normed(operand, _HALF, wide=2), "silu", 1
    yield "rotary", "q and k of 64", _normed(operand, _HALF, 3 * _C, turned=64), "identity", 1
    yield "residual", "statistics", _residual(operand, False), "identity", 1
    whole = _residual(operand, False)
    yield "partial", "5 parts", Operands(whole.a, whole.b, _meta(5, _M, _C), b_is_nk=True), "identity", 5


def _name(config: MatmulConfig, operand: torch.dtype, what: str) -> str:
    tile = f"{config.block_m}x{config.block_n}x{config.block_k} {'TMA' if config.tma else 'pointers'}"
    return f"{'fp8' if operand == _E4M3 else 'half'} {tile} {what}"


def _matmul_builds(arch: str) -> Iterator[Build]:
    for operand, kind in ((_E4M3, "fp8"), (_HALF, "half")):
        for epilogue, what, operands, activation, parts in _cases(operand):
            tables = [config_table(arch, kind, epilogue, tma) for tma in (True, False)]
            configs = list(dict.fromkeys(config for table in tables for config in table))
            for index, config in enumerate(configs):
                launch = matmul_launch(
                    operands, epilogue=epilogue, config=config, activation=activation, split_k=parts
                )  # fmt: skip
                needs = ("E4M3",) if operand == _E4M3 else ()
                yield Build(
                    kernel_name(epilogue), _name(config, operand, what), launch,
                    core=arch == "sm_90" and operand == _E4M3 and index == 0 and what in _CORE,
                    needs=(*needs, *(("UTMALDG",) if config.tma else ())),
                )  # fmt: skip


def offline_builds(arch: str) -> Iterator[Build]:
    """Of architectures that have products of e4m3."""
    if int(arch.removeprefix("sm_")) < 89:
        return
    yield from _matmul_builds(arch)
    x, x8, part, scale = _meta(_M, _C, dtype=_HALF), _meta(_M, _C, dtype=_E4M3), _meta(_M, 2, row_parts(_C)), _meta(_C)
    yield Build("row_statistics", "bf16 and e4m3", row_statistics_launch(x, part, x8, scale))
    finish = finish_residual_launch(_meta(5, _M, _C), scale, scale, x, x, part, x8, scale)
    yield Build("finish_residual", "bf16 and e4m3", finish)
    for tokens, head_dim, access in _ATTENTION_SHAPES:
        name, (q, k, v), o, lse, config = forward_case(arch, tokens, head_dim, access)
        launch = forward_launch(
            q, k, v, torch.empty_like(o, dtype=_E4M3), lse, head_dim**-0.5, config, o_scale=_meta(1)
        )
        yield Build(f"attention_fwd_{config.scheme}", f"{name} to e4m3", launch)
