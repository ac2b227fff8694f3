"""Every shipped configuration of the matmul and of the kernels around it, as data for the offline compiler.

The shapes are ViT-B/16's at batch 256: 50,432 rows, C = 768, F = 3072.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..activations import ACTIVATIONS
from ..device import matrix_instruction
from ..launch import Launch
from ..layer_norm import (
    RowStatistics,
    normalise_launch,
    row_statistics_launch,
)
from ..linear.folding import FoldedLinear, NormedLinear, fold_launch
from ..linear.gradients import layer_norm_grad_launch, new_column_sums
from ..linear.hidden_norm import along_launch
from ..linear.scaled_weights import ScaledWeight, scaled_weights_launch
from ..linear.split_k import finish_residual_launch
from ..linear.vector_gradients import vector_grad_launch
from ..linear.weight_gradients import FoldedProducts, ResidualProducts, room_for, weight_grad_launch
from ..linear.weight_products import weight_products_launch
from ..matmul.matmul_launch import EPILOGUES, HeadStep, MatmulConfig, Operands, matmul_launch
from ..matmul.matmul_policy import NORMED_HEADS, config_table, is_usable
from ..rotary import QkvSettings
from ..row_parts import row_parts
from .offline import Build

_M, _C, _F = 50_432, 768, 3072
_KINDS = {"half": torch.bfloat16, "tf32": torch.float32}


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def _layer_norm(dtype: torch.dtype, keep_z: bool, stream: torch.dtype | None = None, gated: bool = False) -> Operands:
    half = (stream or dtype).itemsize == 2  # fp32 rows were normalised beforehand
    out = _meta(_M, _F // 2 if gated else _F, dtype=dtype)
    return Operands(
        _meta(_M, _C, dtype=dtype), _meta(_F, _C, dtype=dtype), out, b_is_nk=True,
        z=_meta(_M, _F, dtype=dtype) if keep_z else None, row_part=_meta(_M, 2, row_parts(_C)) if half else None,
        mean=_meta(_M) if half and keep_z else None, rstd=_meta(_M) if half and keep_z else None,
        bias=_meta(_F), weight_sum=_meta(_F), eps=1e-6,
    )  # fmt: skip


def _residual(dtype: torch.dtype, stream: torch.dtype) -> Operands:
    narrow = _meta(_M, _C, dtype=stream)
    return Operands(
        _meta(_M, _F, dtype=dtype), _meta(_C, _F, dtype=dtype), narrow, b_is_nk=True,
        residual=narrow, bias=_meta(_C, dtype=dtype), scale=_meta(_C, dtype=dtype),
        out_part=_meta(_M, 2, row_parts(_C)) if stream.itemsize == 2 else None,
    )  # fmt: skip


def _before_norm(operands: Operands) -> Operands:
    """With what the activation's epilogues leave, or read, where a norm of the hidden layer comes next."""
    if operands.column_part is not None:
        return replace(operands, hidden=_meta(2, _M), along=_meta(_M))
    return replace(operands, out_part=_meta(_M, 2, row_parts(operands.out.shape[1])))


def _behind_norm(dtype: torch.dtype, keep: bool) -> Operands:
    plain = _residual(dtype, dtype)
    return replace(
        plain, row_part=_meta(_M, 2, row_parts(_F)), weight_sum=_meta(_C), bias=_meta(_C), scale=None, eps=1e-6,
        z=_meta(_M, _C, dtype=dtype) if keep else None, mean=_meta(_M) if keep else None,
        rstd=_meta(_M) if keep else None,
    )  # fmt: skip


def _product(dtype: torch.dtype) -> Operands:
    return Operands(_meta(_M, _C, dtype=dtype), _meta(_C, _C, dtype=dtype), _meta(_M, _C, dtype=dtype))


def _activation_grad(
    dtype: torch.dtype, config: MatmulConfig, factor: Tensor | None = None, stream: torch.dtype | None = None
) -> Operands:
    hidden, half = _meta(_M, _F, dtype=dtype), (stream or dtype).itemsize == 2
    return Operands(
        _meta(_M, _C, dtype=dtype), _meta(_C, _F, dtype=dtype), hidden, z=hidden, h=hidden,
        mean=_meta(_M) if half else None, rstd=_meta(_M), bias=_meta(_F), scale=factor,
        row_part=_meta(_M, config.row_parts(_F)), column_part=_meta(config.column_parts(_M), 2, _F),
    )  # fmt: skip


def _heads(dtype: torch.dtype, head_dim: int, settings: QkvSettings, keep: bool = False) -> Operands:
    return replace(
        _layer_norm(dtype, keep), b=_meta(3 * _C, _C, dtype=dtype), out=_meta(_M, 3 * _C, dtype=dtype), z=None,
        bias=_meta(3 * _C), weight_sum=_meta(3 * _C), head_step=HeadStep(settings, 197, head_dim),
    )  # fmt: skip


def _tables(head_dim: int, images: int = 1) -> tuple[Tensor, Tensor]:
    table = _meta(images, 1, 196, head_dim // 2)
    return table, table


def _normed_heads(dtype: torch.dtype, head_dim: int, norm: str, rotated: bool) -> Operands:
    weights = _meta(head_dim, dtype=dtype), _meta(head_dim, dtype=dtype)
    tables = _tables(head_dim) if rotated else None
    biases = None if norm == "rms_norm" else weights
    return _heads(dtype, head_dim, QkvSettings(weights, biases, tables, norm, 1e-6, prefix=int(rotated)))


def _gated_grad(dtype: torch.dtype, config: MatmulConfig) -> Operands:
    plain, wide = _activation_grad(dtype, config), _meta(_M, 2 * _F, dtype=dtype)
    return replace(plain, z=wide, out=wide, bias=_meta(2 * _F), column_part=_meta(config.column_parts(_M), 2, 2 * _F))


def _layer_norm_grad(dtype: torch.dtype, stream: torch.dtype) -> Operands:
    narrow = _meta(_M, _C, dtype=stream)
    return Operands(
        _meta(_M, _F, dtype=dtype), _meta(_F, _C, dtype=dtype), narrow, x=narrow, residual=narrow,
        mean=_meta(_M) if stream.itemsize == 2 else None, rstd=_meta(_M), row_part=_meta(_M, 48),
    )  # fmt: skip


def _matmul_cases(
    epilogue: str, dtype: torch.dtype, config: MatmulConfig, widest: bool
) -> Iterator[tuple[str, Operands, str, int]]:
    """(what, operands, activation, parts of K) of everything an epilogue is launched with."""
    streams = dict.fromkeys((dtype, torch.float32))  # autocast keeps the residual stream in fp32
    if epilogue == "layer_norm":
        yield "gelu", _layer_norm(dtype, False), "gelu", 1
        yield "gelu keeping z", _layer_norm(dtype, True), "gelu", 1
        yield "no activation", _layer_norm(dtype, False), "identity", 1
        yield "gelu keeping z behind an RMSNorm", replace(_layer_norm(dtype, True), weight_sum=None), "gelu", 1
        if dtype.itemsize == 2:
            yield "gelu of normalised rows", _layer_norm(dtype, True, torch.float32), "gelu", 1
        for activation in ACTIVATIONS[1:] if widest else ():
            yield f"{activation} keeping z", _layer_norm(dtype, True), activation, 1
    elif epilogue == "rotary":
        shared, single = (QkvSettings(tables=tables, prefix=1) for tables in (_tables(64), _tables(72, 256)))
        yield "q and k of 64", _heads(dtype, 64, shared), "identity", 1
        yield "q and k of 72, a table an image, keeping statistics", _heads(dtype, 72, single, True), "identity", 1
    elif epilogue == "qk_norm":
        for head_dim in NORMED_HEADS:
            what, operands = f"layer_norm of {head_dim}, rotated", _normed_heads(dtype, head_dim, "layer_norm", True)
            yield what, operands, "identity", 1
        if widest:
            yield "rms_norm of 64", _normed_heads(dtype, 64, "rms_norm", False), "identity", 1
    elif epilogue == "gated":
        yield "silu", _layer_norm(dtype, False, gated=True), "silu", 1
        yield "silu keeping z", _layer_norm(dtype, True, gated=True), "silu", 1
        yield (
            "gelu keeping z behind an RMSNorm",
            replace(_layer_norm(dtype, True, gated=True), weight_sum=None),
            "gelu",
            1,
        )
        if dtype.itemsize == 2:
            yield "silu before a norm", _before_norm(_layer_norm(dtype, False, gated=True)), "silu", 1
            yield "silu keeping z before a norm", _before_norm(_layer_norm(dtype, True, gated=True)), "silu", 1
    elif epilogue == "gated_grad":
        yield "silu before a norm", _before_norm(_gated_grad(dtype, config)), "silu", 1
        for activation in ("silu", "gelu") if widest else ("silu",):
            yield activation, _gated_grad(dtype, config), activation, 1
        if dtype.itemsize == 2:
            yield "silu of normalised rows", replace(_gated_grad(dtype, config), mean=None), "silu", 1
    elif epilogue == "residual":
        for stream in streams:
            what = "bias, LayerScale, residual, statistics" + (" in fp32" if stream != dtype else "")
            yield what, _residual(dtype, stream), "identity", 1
        yield "product alone", _product(dtype), "identity", 1
        if dtype.itemsize == 2:
            yield "behind a norm, residual, statistics", _behind_norm(dtype, False), "identity", 1
            yield "behind a norm, residual, statistics, kept", _behind_norm(dtype, True), "identity", 1
    elif epilogue == "partial":
        whole = _residual(dtype, dtype)
        yield "5 parts", Operands(whole.a, whole.b, _meta(5, _M, _C), b_is_nk=True), "identity", 5
    elif epilogue == "activation_grad":
        for activation in ACTIVATIONS if widest else ACTIVATIONS[:1]:
            yield activation, _activation_grad(dtype, config), activation, 1
        yield "gelu before a norm", _before_norm(_activation_grad(dtype, config)), "gelu", 1
        if dtype.itemsize == 2:
            yield "gelu with a factor", _activation_grad(torch.float16, config, _meta(1)), "gelu", 1
            yield "gelu of normalised rows", _activation_grad(dtype, config, None, torch.float32), "gelu", 1
    elif epilogue == "layer_norm_grad":
        for stream in streams:
            yield "residual" + (" in fp32" if stream != dtype else ""), _layer_norm_grad(dtype, stream), "identity", 1
            if stream != dtype:
                wide = replace(_layer_norm_grad(dtype, stream), h=_meta(_M, _C, dtype=dtype))
                yield "residual in fp32, rounded beside it", wide, "identity", 1


# What the static test compiles on every run, of the widest half-precision configuration; elsewhere nothing.
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


def _instructions(arch: str, kind: str, tma: bool) -> tuple[str, ...]:
    transfers = ("UTMALDG",) if tma else ()
    return (matrix_instruction(arch), *transfers)


def _matmul_builds(arch: str) -> Iterator[Build]:
    for kind, dtype in _KINDS.items():
        for epilogue in EPILOGUES:
            tables = [config_table(arch, kind, epilogue, tma) for tma in (True, False)]
            configs = list(dict.fromkeys(config for table in tables for config in table))
            for index, config in enumerate(configs):
                for what, operands, activation, parts in _matmul_cases(epilogue, dtype, config, index == 0):
                    if not is_usable(config, operands, epilogue):
                        continue
                    launch = matmul_launch(
                        operands, epilogue=epilogue, config=config, activation=activation, split_k=parts
                    )
                    yield Build(
                        kernel_name(epilogue),
                        f"{kind} {_tile(config)} {what}",
                        launch,
                        core=kind == "half" and index == 0 and what in _CORE.get(arch, ()),
                        needs=_instructions(arch, kind, config.tma),
                    )


def _product_builds(arch: str) -> Iterator[Build]:
    """The matmuls of weight gradients: of one linear layer, of the two of an MLP, of the four of a block."""
    for kind, dtype in _KINDS.items():
        wide, narrow = _meta(_M, _F, dtype=dtype), _meta(_M, _C, dtype=dtype)
        pairs, out = [(wide, narrow), (narrow, wide)] * 2, [_meta(5, _F, _C), _meta(5, _C, _F)] * 2
        for config in dict.fromkeys(config_table(arch, kind, "weight_products", tma)[0] for tma in (True, False)):
            for count, what in ((1, "one product"), (2, "two products"), (4, "four products")):
                yield Build(
                    "weight_products",
                    f"{kind} {_tile(config)} {what}",
                    weight_products_launch(pairs[:count], out[:count], config),
                    core=kind == "half" and config.tma and what in _CORE.get(arch, ()),
                    needs=_instructions(arch, kind, config.tma),
                )


def kernel_name(epilogue: str) -> str:
    """Returns a build's name; those of a "residual" matmul that is cut along K have its name."""
    return "matmul_residual" if epilogue == "partial" else f"matmul_{epilogue}"


def _tile(config: MatmulConfig) -> str:
    paths = "TMA" if config.tma else "pointers"
    return f"{config.block_m}x{config.block_n}x{config.block_k} {paths}"


def _small_launches(dtype: torch.dtype, stream: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Around matmuls of `dtype`; x and the parameters in the dtype of the residual stream."""
    x, rows = _meta(_M, _C, dtype=stream), _meta(_M, _C, dtype=dtype)
    weight, vector, bias = _meta(_F, _C, dtype=stream), _meta(_C, dtype=stream), _meta(_F, dtype=stream)
    normalised = stream == torch.float32
    known = RowStatistics(rows, _meta(1 if normalised else 2, _M))
    part = None
    if normalised:
        yield "normalise", normalise_launch(x, 1e-6, known.statistics, rows)
        if dtype == stream:
            kept = _meta(2, _M)
            yield "normalise and mean", normalise_launch(x, 1e-6, kept[1], rows, mean=kept[0])
    else:
        part = _meta(_M, 2, row_parts(_C))
        yield "row_statistics", row_statistics_launch(x, part)
    yield "finish_residual", finish_residual_launch(_meta(5, _M, _C), vector, vector, x, x, part)
    linear = NormedLinear(weight, bias, vector, vector)
    folded = FoldedLinear(_meta(_F, _C, dtype=dtype), _meta(_F), _meta(_F))
    yield "fold of one", fold_launch([linear], [folded])
    yield "fold of two", fold_launch([linear] * 2, [folded] * 2)
    yield from _weight_launches(dtype, stream)
    wide = _meta(_M, _F, dtype=dtype)
    for what, residual in (("layer_norm_grad", None), ("layer_norm_grad and residual", x)):
        normal = None if normalised else rows
        yield what, layer_norm_grad_launch(rows, vector, known, residual, x, normal, wide, new_column_sums(wide))
    yield "along", along_launch(rows, x, vector, _F, _meta(_M), new_column_sums(rows))
    branch = ResidualProducts(_meta(5, _C, _F), rows, _meta(_C, _F, dtype=stream), vector, vector)
    second = [(branch, room_for(branch))]
    for what, sums in (("fc1", _meta(394, 2, _F)), ("qkv", _meta(198, _F))):
        products = FoldedProducts(_meta(5, _F, _C), sums, linear)
        first = [(products, room_for(products))]
        yield f"weight_grad of {what}", weight_grad_launch(first, [])
        yield f"weight_grad of {what} and another", weight_grad_launch(first, second)
    both = [*first, (FoldedProducts(_meta(5, _F, _C), _meta(394, 2, _F), linear), first[0][1])]
    yield "weight_grad of a block", weight_grad_launch(both, second * 2)
    yield "weight_grad before a residual", weight_grad_launch([], second)
    yield "vector_grad of one", vector_grad_launch(first, [])
    yield "vector_grad before a residual", vector_grad_launch([], second)
    yield "vector_grad of a block", vector_grad_launch(both, second * 2)


def _weight_launches(dtype: torch.dtype, stream: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """The weights of a forward and of a backward with LayerScale, where they do not lie ready."""
    weight, scale = _meta(_F, _C, dtype=stream), _meta(_F, dtype=stream)
    made, factored = ScaledWeight(_meta(_F, _C, dtype=dtype), None), _meta(_C)
    plain = int(dtype != stream)
    if plain:
        yield "weights", scaled_weights_launch([(weight, None)] * 2, [made] * 2)
        half = ScaledWeight(_meta(_F, _C, dtype=torch.float16), factored)
        yield "scaled weights in fp16", scaled_weights_launch([(weight, scale)] * 2, [half] * 2)
    pairs: list[tuple[Tensor, Tensor | None]] = [(weight, scale)] * 2
    yield "scaled weights", scaled_weights_launch(pairs + [(weight, None)] * plain, [made] * (2 + plain))


def offline_builds(arch: str) -> Iterator[Build]:
    """The shipped builds of the matmul and of the kernels around it for one architecture."""
    yield from _matmul_builds(arch)
    yield from _product_builds(arch)
    half, full = torch.bfloat16, torch.float32
    for name, dtype, stream in (("bf16", half, half), ("fp32", full, full), ("autocast", half, full)):
        for kernel, launch in _small_launches(dtype, stream):
            yield Build(kernel, name, launch)
