"""Builds of the matmul and of the kernels of linear layers, for the static checks.

Shapes: ViT-B/16 at batch 256 (50,432 tokens, C = 768, F = 3072); in FP8, ViT-L/16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..activations import ACTIVATIONS
from ..device import has_fp8, matrix_instruction, starts_early
from ..launch import Launch
from ..layer_norm import RowStatistics, normalise_launch, row_statistics_launch
from ..linear.folding import FoldedLinear, NormedLinear, fold_launch
from ..linear.gradients import layer_norm_grad_launch, new_column_sums
from ..linear.hidden_norm import along_launch
from ..linear.scaled_weights import ScaledWeight, scaled_weights_launch
from ..linear.split_k import finish_residual_launch
from ..linear.weight_gradients import FoldedProducts, ResidualProducts, room_for, vector_grad_launch, weight_grad_launch
from ..linear.weight_products import weight_products_launch
from ..matmul.matmul_launch import EPILOGUES, HeadStep, MatmulConfig, Operands, matmul_launch
from ..matmul.matmul_policy import NORMED_HEADS, config_table, is_usable
from ..rotary import QkvSettings
from ..row_parts import row_parts
from .offline import Build, meta

_M, _C, _F = 50_432, 768, 3072
_C8, _F8 = 1024, 4096
_HALF, _FULL, _E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
_KINDS = {"half": _HALF, "tf32": _FULL, "fp8": _E4M3}
# (epilogue, name of the case, operands, activation, split_k)
_Case = tuple[str, str, Operands, str, int]


def _normed(
    dtype: torch.dtype, keep: bool = False, normalised: bool = False, gated: bool = False, C: int = _C, N: int = _F,
    result: torch.dtype | None = None, head_step: HeadStep | None = None,
) -> Operands:  # fmt: skip
    """Returns operands of a matmul after a norm. `keep`: store z and statistics; `normalised`: A is normalized."""
    statistics = keep and not normalised
    return Operands(
        meta(_M, C, dtype=dtype), meta(N, C, dtype=dtype), meta(_M, N // 2 if gated else N, dtype=result or dtype),
        b_is_nk=True, z=meta(_M, N, dtype=dtype) if keep and head_step is None else None,
        row_part=None if normalised else meta(_M, 2, row_parts(C)), mean=meta(_M) if statistics else None,
        rstd=meta(_M) if statistics else None, bias=meta(N), weight_sum=meta(N), eps=1e-6,
        scale=meta(N) if dtype == _E4M3 else None, out_scale=meta(1) if result == _E4M3 else None, head_step=head_step,
    )  # fmt: skip


def _heads(
    dtype: torch.dtype, head_dim: int, settings: QkvSettings, keep: bool = False, C: int = _C,
    result: torch.dtype | None = None,
) -> Operands:  # fmt: skip
    step = HeadStep(settings, 197, head_dim)
    return _normed(dtype, keep, dtype == _FULL, C=C, N=3 * C, result=result, head_step=step)


def _tables(head_dim: int, images: int = 1) -> tuple[Tensor, Tensor]:
    table = meta(images, 1, 196, head_dim // 2)
    return table, table


def _normed_heads(dtype: torch.dtype, head_dim: int, norm: str, rotated: bool) -> Operands:
    weights = meta(head_dim, dtype=dtype), meta(head_dim, dtype=dtype)
    tables = _tables(head_dim) if rotated else None
    biases = None if norm == "rms_norm" else weights
    return _heads(dtype, head_dim, QkvSettings(weights, biases, tables, norm, 1e-6, prefix=int(rotated)))


def _residual(
    dtype: torch.dtype, stream: torch.dtype, C: int = _C, F: int = _F, out8: bool = False
) -> Operands:  # fmt: skip
    narrow, vector = meta(_M, C, dtype=stream), meta(C, dtype=_FULL if dtype == _E4M3 else dtype)
    return Operands(
        meta(_M, F, dtype=dtype), meta(C, F, dtype=dtype), narrow, b_is_nk=True, residual=narrow, bias=vector,
        scale=vector, out_part=meta(_M, 2, row_parts(C)) if stream.itemsize == 2 else None,
        out8=meta(_M, C, dtype=_E4M3) if out8 else None, out_scale=meta(C) if out8 else None,
    )  # fmt: skip


def _partial(whole: Operands) -> Operands:
    return Operands(whole.a, whole.b, meta(5, *whole.out.shape), b_is_nk=True)


def _before_norm(operands: Operands) -> Operands:
    """Adds the tensors that an activation epilogue (forward or backward) needs if a norm of h follows."""
    if operands.column_part is not None:
        return replace(operands, hidden=meta(2, _M), along=meta(_M))
    return replace(operands, out_part=meta(_M, 2, row_parts(operands.out.shape[1])))


def _behind_norm(dtype: torch.dtype, keep: bool) -> Operands:
    kept: dict[str, Any] = {"z": meta(_M, _C, dtype=dtype), "mean": meta(_M), "rstd": meta(_M)} if keep else {}
    return replace(
        _residual(dtype, dtype), row_part=meta(_M, 2, row_parts(_F)), weight_sum=meta(_C), bias=meta(_C), scale=None,
        eps=1e-6, **kept,
    )  # fmt: skip


def _activation_grad(
    dtype: torch.dtype, config: MatmulConfig, factor: Tensor | None = None, normalised: bool = False, wider: int = 1
) -> Operands:
    h, z = meta(_M, _F, dtype=dtype), meta(_M, wider * _F, dtype=dtype)
    return Operands(
        meta(_M, _C, dtype=dtype), meta(_C, _F, dtype=dtype), z, z=z, h=h,
        mean=None if normalised or dtype == _FULL else meta(_M), rstd=meta(_M), bias=meta(wider * _F), scale=factor,
        row_part=meta(_M, config.row_parts(_F)), column_part=meta(config.column_parts(_M), 2, wider * _F),
    )  # fmt: skip


def _layer_norm_grad(dtype: torch.dtype, stream: torch.dtype, rounded: bool = False) -> Operands:
    narrow = meta(_M, _C, dtype=stream)
    return Operands(
        meta(_M, _F, dtype=dtype), meta(_F, _C, dtype=dtype), narrow, x=narrow, residual=narrow,
        mean=meta(_M) if stream.itemsize == 2 else None, rstd=meta(_M), row_part=meta(_M, 48),
        h=meta(_M, _C, dtype=dtype) if rounded else None,
    )  # fmt: skip


def _forward_cases(dtype: torch.dtype, widest: bool) -> Iterator[_Case]:
    half, full = dtype.itemsize == 2, dtype == _FULL
    for name, gated, activation in (("layer_norm", False, "gelu"), ("gated", True, "silu")):
        kept = _normed(dtype, True, full, gated)
        without_mean = replace(kept, weight_sum=None)
        yield name, activation, _normed(dtype, False, full, gated), activation, 1
        yield name, f"{activation} keeping z", kept, activation, 1
        yield name, "gelu keeping z behind an RMSNorm", without_mean, "gelu", 1
    yield "layer_norm", "no activation", _normed(dtype, False, full), "identity", 1
    for activation in ACTIVATIONS[1:] if widest else ():
        yield "layer_norm", f"{activation} keeping z", _normed(dtype, True, full), activation, 1
    shared, single = (QkvSettings(tables=tables, prefix=1) for tables in (_tables(64), _tables(72, 256)))
    yield "rotary", "q and k of 64", _heads(dtype, 64, shared), "identity", 1
    yield (
        "rotary",
        "q and k of 72, a table an image, keeping statistics",
        _heads(dtype, 72, single, True),
        "identity",
        1,
    )
    for head_dim in NORMED_HEADS:
        operands = _normed_heads(dtype, head_dim, "layer_norm", True)
        yield "qk_norm", f"layer_norm of {head_dim}, rotated", operands, "identity", 1
    if widest:
        yield "qk_norm", "rms_norm of 64", _normed_heads(dtype, 64, "rms_norm", False), "identity", 1
    yield "residual", "bias, LayerScale, residual, statistics", _residual(dtype, dtype), "identity", 1
    product = Operands(meta(_M, _C, dtype=dtype), meta(_C, _C, dtype=dtype), meta(_M, _C, dtype=dtype))
    yield "residual", "product alone", product, "identity", 1
    yield "partial", "5 parts", _partial(_residual(dtype, dtype)), "identity", 5
    if half:
        yield "layer_norm", "gelu of normalised rows", _normed(dtype, True, True), "gelu", 1
        yield "gated", "silu before a norm", _before_norm(_normed(dtype, False, gated=True)), "silu", 1
        yield "gated", "silu keeping z before a norm", _before_norm(_normed(dtype, True, gated=True)), "silu", 1
        autocast = _residual(dtype, _FULL)
        yield "residual", "bias, LayerScale, residual, statistics in fp32", autocast, "identity", 1
        yield "residual", "behind a norm, residual, statistics", _behind_norm(dtype, False), "identity", 1
        yield "residual", "behind a norm, residual, statistics, kept", _behind_norm(dtype, True), "identity", 1


def _backward_cases(dtype: torch.dtype, config: MatmulConfig, widest: bool) -> Iterator[_Case]:
    for activation in ACTIVATIONS if widest else ACTIVATIONS[:1]:
        yield "activation_grad", activation, _activation_grad(dtype, config), activation, 1
    for activation in ("silu", "gelu") if widest else ("silu",):
        yield "gated_grad", activation, _activation_grad(dtype, config, wider=2), activation, 1
    for name, wider, activation in (("activation_grad", 1, "gelu"), ("gated_grad", 2, "silu")):
        before = _before_norm(_activation_grad(dtype, config, wider=wider))
        yield name, f"{activation} before a norm", before, activation, 1
        if dtype == _HALF:
            normalised = _activation_grad(dtype, config, normalised=True, wider=wider)
            yield name, f"{activation} of normalised rows", normalised, activation, 1
    yield "layer_norm_grad", "residual", _layer_norm_grad(dtype, dtype), "identity", 1
    if dtype == _HALF:
        with_factor = _activation_grad(torch.float16, config, meta(1))
        yield "activation_grad", "gelu with a factor", with_factor, "gelu", 1
        what = "residual in fp32"  # the residual stream under autocast
        yield "layer_norm_grad", what, _layer_norm_grad(dtype, _FULL), "identity", 1
        yield "layer_norm_grad", f"{what}, rounded beside it", _layer_norm_grad(dtype, _FULL, True), "identity", 1


def _fp8_cases(dtype: torch.dtype) -> Iterator[_Case]:
    """Yields cases with e4m3 operands if `dtype` is e4m3; else with half-precision operands and e4m3 outputs."""
    eight = dtype == _E4M3

    def normed(result: torch.dtype, N: int = _F8, gated: bool = False) -> Operands:
        return _normed(dtype, gated=gated, C=_C8, N=N, result=result)

    yield "layer_norm", "gelu, all e4m3" if eight else "gelu to e4m3", normed(_E4M3), "gelu", 1
    yield "gated", "silu to e4m3", normed(_E4M3, gated=True), "silu", 1
    yield "residual", "statistics and e4m3", _residual(dtype, _HALF, _C8, _F8, out8=True), "identity", 1
    if eight:
        turned = QkvSettings(tables=_tables(64), prefix=1)
        whole = _residual(dtype, _HALF, _C8, _F8)
        yield "layer_norm", "no activation", normed(_HALF, 3 * _C8), "identity", 1
        yield "layer_norm", "gelu", normed(_HALF), "gelu", 1
        yield "gated", "silu", normed(_HALF, gated=True), "silu", 1
        yield "rotary", "q and k of 64", _heads(dtype, 64, turned, C=_C8, result=_HALF), "identity", 1
        yield "residual", "statistics", whole, "identity", 1
        yield "partial", "5 parts", _partial(whole), "identity", 5


# Cases that are core builds with the first configuration of the table.
_CORE = {
    "sm_80": ("gelu",),
    "sm_90": (
        "gelu",
        "gelu keeping z",
        "bias, LayerScale, residual, statistics",
        "residual",
        "silu before a norm",
        "5 parts",
        "four products",
    ),
    "sm_100": ("gelu",),
    "sm_120": ("gelu",),
}
_CORE_FP8 = {"sm_90": ("gelu, all e4m3", "statistics and e4m3")}


def _instructions(arch: str, kind: str, tma: bool) -> tuple[str, ...]:
    transfers = ("UTMALDG",) if tma else ()
    return ("E4M3" if kind == "fp8" else matrix_instruction(arch), *transfers)


def _cases(arch: str, kind: str, epilogue: str, config: MatmulConfig, widest: bool) -> Iterator[_Case]:
    dtype = _KINDS[kind]
    if kind != "fp8":
        yield from _forward_cases(dtype, widest)
        yield from _backward_cases(dtype, config, widest)
    if kind != "tf32" and has_fp8(arch):
        yield from _fp8_cases(dtype)


def _matmul_builds(arch: str) -> Iterator[Build]:
    for kind in _KINDS:
        core = (_CORE_FP8 if kind == "fp8" else _CORE).get(arch, ()) if kind != "tf32" else ()
        for epilogue in EPILOGUES:
            tables = [config_table(arch, kind, epilogue, tma) for tma in (True, False)]
            configs = list(dict.fromkeys(config for table in tables for config in table))
            for index, config in enumerate(configs):
                for name, what, operands, activation, parts in _cases(arch, kind, epilogue, config, index == 0):
                    if name != epilogue or not is_usable(config, operands, epilogue):
                        continue
                    launch = matmul_launch(
                        operands, epilogue=epilogue, config=config, activation=activation, split_k=parts
                    )
                    yield Build(
                        # "partial" is the first launch of a "residual" matmul with split-K
                        "matmul_residual" if epilogue == "partial" else f"matmul_{epilogue}",
                        f"{kind} {_tile(config)} {what}",
                        launch,
                        core=index == 0 and what in core,
                        needs=_instructions(arch, kind, config.tma),
                    )


def _product_builds(arch: str) -> Iterator[Build]:
    """Yields builds of `weight_products_launch` for one linear layer, the two of an MLP, and the four of a block."""
    for kind in ("half", "tf32"):
        wide, narrow = meta(_M, _F, dtype=_KINDS[kind]), meta(_M, _C, dtype=_KINDS[kind])
        pairs, out = [(wide, narrow), (narrow, wide)] * 2, [meta(5, _F, _C), meta(5, _C, _F)] * 2
        for config in dict.fromkeys(config_table(arch, kind, "weight_products", tma)[0] for tma in (True, False)):
            for count, what in ((1, "one product"), (2, "two products"), (4, "four products")):
                yield Build(
                    "weight_products",
                    f"{kind} {_tile(config)} {what}",
                    weight_products_launch(pairs[:count], out[:count], config),
                    core=kind == "half" and config.tma and what in _CORE.get(arch, ()),
                    needs=_instructions(arch, kind, config.tma),
                )


def _tile(config: MatmulConfig) -> str:
    paths = "TMA" if config.tma else "pointers"
    return f"{config.block_m}x{config.block_n}x{config.block_k} {paths}"


def _other_launches(arch: str, dtype: torch.dtype, stream: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yields all other launches of linear layers. Matmuls use `dtype`; x and the parameters have dtype `stream`."""
    x, rows = meta(_M, _C, dtype=stream), meta(_M, _C, dtype=dtype)
    weight, vector, bias = meta(_F, _C, dtype=stream), meta(_C, dtype=stream), meta(_F, dtype=stream)
    normalised = stream == torch.float32
    known = RowStatistics(rows, meta(1 if normalised else 2, _M))
    part = None
    if normalised:
        yield "normalise", normalise_launch(x, 1e-6, known.statistics, rows)
        if dtype == stream:
            kept = meta(2, _M)
            yield "normalise and mean", normalise_launch(x, 1e-6, kept[1], rows, mean=kept[0])
    else:
        part = meta(_M, 2, row_parts(_C))
        yield "row_statistics", row_statistics_launch(x, part)
    early = starts_early(arch)
    yield "finish_residual", finish_residual_launch(meta(5, _M, _C), vector, vector, x, x, part, dependent=early)
    linear = NormedLinear(weight, bias, vector, vector)
    folded = FoldedLinear(meta(_F, _C, dtype=dtype), meta(_F), meta(_F))
    yield "fold of one", fold_launch([linear], [folded])
    yield "fold of two", fold_launch([linear] * 2, [folded] * 2)
    yield from _weight_launches(dtype, stream)
    wide = meta(_M, _F, dtype=dtype)
    for what, residual in (("layer_norm_grad", None), ("layer_norm_grad and residual", x)):
        normal = None if normalised else rows
        yield what, layer_norm_grad_launch(rows, vector, known, residual, x, normal, wide, new_column_sums(wide))
    yield "along", along_launch(rows, x, vector, _F, meta(_M), new_column_sums(rows))
    branch = ResidualProducts(meta(5, _C, _F), rows, meta(_C, _F, dtype=stream), vector, vector)
    second = [(branch, room_for(branch))]
    for what, sums in (("fc1", meta(394, 2, _F)), ("qkv", meta(198, _F))):
        products = FoldedProducts(meta(5, _F, _C), sums, linear)
        first = [(products, room_for(products))]
        yield f"weight_grad of {what}", weight_grad_launch(first, [])
        yield f"weight_grad of {what} and another", weight_grad_launch(first, second)
    both = [*first, (FoldedProducts(meta(5, _F, _C), meta(394, 2, _F), linear), first[0][1])]
    yield "weight_grad of a block", weight_grad_launch(both, second * 2)
    yield "weight_grad before a residual", weight_grad_launch([], second)
    yield "vector_grad of one", vector_grad_launch(first, [])
    yield "vector_grad before a residual", vector_grad_launch([], second)
    yield "vector_grad of a block", vector_grad_launch(both, second * 2)


def _weight_launches(dtype: torch.dtype, stream: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yields launches that convert weights to `dtype`, or scale them by LayerScale for the backward."""
    weight, scale = meta(_F, _C, dtype=stream), meta(_F, dtype=stream)
    made, factored = ScaledWeight(meta(_F, _C, dtype=dtype), None), meta(_C)
    plain = int(dtype != stream)
    if plain:
        yield "weights", scaled_weights_launch([(weight, None)] * 2, [made] * 2)
        half = ScaledWeight(meta(_F, _C, dtype=torch.float16), factored)
        yield "scaled weights in fp16", scaled_weights_launch([(weight, scale)] * 2, [half] * 2)
    pairs: list[tuple[Tensor, Tensor | None]] = [(weight, scale)] * 2
    yield "scaled weights", scaled_weights_launch(pairs + [(weight, None)] * plain, [made] * (2 + plain))


def offline_builds(arch: str) -> Iterator[Build]:
    """Yields the builds for an architecture."""
    yield from _matmul_builds(arch)
    yield from _product_builds(arch)
    for name, dtype, stream in (("bf16", _HALF, _HALF), ("fp32", _FULL, _FULL), ("autocast", _HALF, _FULL)):
        for kernel, launch in _other_launches(arch, dtype, stream):
            yield Build(kernel, name, launch)
    if has_fp8(arch):
        x, x8 = meta(_M, _C8, dtype=_HALF), meta(_M, _C8, dtype=_E4M3)
        part, scale = meta(_M, 2, row_parts(_C8)), meta(_C8)
        yield Build("row_statistics", "bf16 and e4m3", row_statistics_launch(x, part, x8, scale))
        finish = finish_residual_launch(meta(5, _M, _C8), scale, scale, x, x, part, x8, scale, starts_early(arch))
        yield Build("finish_residual", "bf16 and e4m3", finish)
