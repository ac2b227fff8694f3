"""The builds (`offline.Build`) of the kernels of encoder blocks, with each configuration of matmul_policy.py.

`_BLOCKS` and `_FP8_BLOCKS` list the blocks. The widths are from ViT-B/16, in FP8 from ViT-L/16. The numbers of images
and tokens do not change a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from vit_fast.ops import backends, rotary
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors, Norm, QkNorm, Rope, interleave

from ..activations import ACTIVATIONS
from ..device import has_fp8, matmul_kind, matrix_instruction
from ..launch import Launch
from ..linear import weight_matmuls
from ..matmul import matmul_policy
from ..matmul.matmul_launch import MatmulConfig
from . import offline
from .offline import Build

_PARTS = 5  # parts of K in split-K; any number above 1 gives the same kernel
_IMAGES, _TOKENS, _PREFIX = 2, 200, 1
_C, _F, _C8, _F8 = 768, 3072, 1024, 4096
_HALF, _FULL, _E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# (dtype of the residual stream and the parameters, dtype of the matmuls)
_DTYPES = {
    "bf16": (_HALF, _HALF), "fp32": (_FULL, _FULL), "autocast": (_FULL, _HALF), "fp16": (torch.float16, torch.float16),
}  # fmt: skip

_MLP, _ATTENTION = {"halves": ("mlp",)}, {"halves": ("attention",)}
_HEADS72, _HEADS128 = {"head_dim": 72, "heads": 16}, {"head_dim": 128, "heads": 6}
# (name, keys of `_DTYPES`, arguments of `_block`). With "first", only the first configuration is built.
_BLOCKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("gelu", "bf16 fp32 autocast", {}),
    ("gelu alone", "fp16", {**_MLP, "first": True}),
    ("gated silu", "bf16 fp32 autocast", {**_MLP, "activation": "silu", "gated": True}),
    *((name, "bf16 fp32", {**_MLP, "activation": name, "first": True}) for name in ACTIVATIONS[1:]),
    ("gated gelu", "bf16", {**_MLP, "gated": True, "first": True}),
    ("RMSNorm", "bf16", {**_MLP, "norm": "rms_norm"}),
    ("gated RMSNorm", "bf16", {**_MLP, "norm": "rms_norm", "gated": True}),
    ("norm before fc2", "bf16 fp32", {**_MLP, "inner": True}),
    ("gated silu, norm before fc2", "bf16", {**_MLP, "inner": True, "activation": "silu", "gated": True}),
    ("MLP without residual", "bf16", {**_MLP, "residual": False, "first": True}),
    ("attention without residual", "bf16", {**_ATTENTION, "residual": False, "first": True}),
    ("rope D64", "bf16 fp32", {**_ATTENTION, "rope": "half"}),
    ("rope D72 of each image", "bf16 fp32", {**_ATTENTION, **_HEADS72, "rope": "half", "tables": _IMAGES}),
    ("interleaved rope D72", "bf16 fp32", {**_ATTENTION, **_HEADS72, "rope": "interleaved", "first": True}),
    ("layer_norm, rope D64", "bf16 fp32", {**_ATTENTION, "rope": "half", "qk_norm": "layer_norm"}),
    ("layer_norm, rope D128", "bf16", {**_ATTENTION, **_HEADS128, "rope": "half", "qk_norm": "layer_norm"}),
    ("rms_norm D64", "bf16", {**_ATTENTION, "qk_norm": "rms_norm", "first": True}),
    ("rms_norm D128", "bf16 fp32", {**_ATTENTION, **_HEADS128, "qk_norm": "rms_norm", "first": True}),
    ("rms_norm of 25x128", "bf16 fp32",
     {**_ATTENTION, "head_dim": 128, "heads": 25, "qk_norm": "rms_norm", "over": "width", "first": True}),
)  # fmt: skip
_CORE = ("bf16 gelu", "bf16 gelu, training", "fp8 gelu")  # names in `_calls` with core builds (`Build.core`)
_SPLIT = ("bf16 gelu", "fp32 gelu", "fp8 gelu")  # names in `_calls` whose proj and fc2 are also built with split-K
_ALL = ("qkv", "proj", "fc1", "fc2")
# Arguments of `_fp8_block` by name.
_FP8_BLOCKS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "gated silu": {"gated": True},
    "rope D64": {"rope": True},
    "qkv and fc1, gelu": {"quantized": ("qkv", "fc1")},
    "qkv and fc1, gated silu": {"quantized": ("qkv", "fc1"), "gated": True},
    "proj and fc2, gelu": {"quantized": ("proj", "fc2")},
    "proj and fc2, gated silu": {"quantized": ("proj", "fc2"), "gated": True},
}

_Call = Callable[[], Any]


def _block(
    stream: torch.dtype, training: bool, *, halves: tuple[str, ...] = ("attention", "mlp"), norm: str = "layer_norm",
    activation: str = "gelu", gated: bool = False, inner: bool = False, residual: bool = True, heads: int = 12,
    head_dim: int = 64, rope: str = "", tables: int = 1, qk_norm: str = "", over: str = "head",
) -> _Call:  # fmt: skip
    """Returns a function that calls `fused_block`, and its backward if `training`, on uninitialized tensors."""
    inside = heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if "attention" in halves:
        shapes |= {"norm1_weight": (_C,), "qkv_weight": (3 * inside, _C), "qkv_bias": (3 * inside,)}
        shapes |= {"proj_weight": (_C, inside), "proj_bias": (_C,), "scale1": (_C,)}
    if "mlp" in halves:
        shapes |= {"norm2_weight": (_C,), "fc1_weight": (_F, _C), "fc1_bias": (_F,)}
        shapes |= {"fc2_weight": (_C, _F), "fc2_bias": (_C,), "scale2": (_C,)}
    if norm == "layer_norm":
        shapes |= {name.replace("weight", "bias"): (_C,) for name in shapes if name.startswith("norm")}
    shapes |= {"gate_weight": (_F, _C), "gate_bias": (_F,)} if gated else {}
    shapes |= {"inner_weight": (_F,), "inner_bias": (_F,)} if inner else {}
    empty = partial(torch.empty, dtype=stream, requires_grad=training)
    options: dict[str, Any] = {"inner_norm": ("layer_norm", 1e-6)} if inner else {}
    if qk_norm:
        size = inside if over == "width" else head_dim
        norms = [Norm(empty(size), empty(size) if qk_norm == "layer_norm" else None, kind=qk_norm) for _ in range(2)]
        options["qk_norm"] = QkNorm(norms[0], norms[1], over)
    if rope:
        options["rope"] = _rope(head_dim, rope, tables)
    x, block = empty(_IMAGES, _TOKENS, _C), BlockTensors(**{name: empty(shape) for name, shape in shapes.items()})
    call = partial(
        fused_block, x, None, block, heads=heads, eps=(1e-6, 1e-6), norm=norm, activation=activation,
        residual=residual, next_statistics=True, **options,
    )  # fmt: skip
    return partial(_with_backward, call, x) if training else call


def _rope(head_dim: int, layout: str = "half", images: int = 1) -> Rope:
    cos, sin = torch.empty(2, images, 1, _TOKENS - _PREFIX, head_dim // 2)
    return Rope(cos, sin, _PREFIX, layout)


def _with_backward(call: _Call, x: Tensor) -> None:
    result = call()
    y = result if isinstance(result, Tensor) else result[0]
    torch.autograd.grad(y, x, torch.empty_like(y))


def _qk_norm_rope(dtype: torch.dtype, norm: str) -> _Call:
    """Returns a function that calls the operator of qk-norm and rotary embeddings, and its backward."""
    empty = partial(torch.empty, dtype=dtype, requires_grad=True)
    qkv, one = empty(_IMAGES, _TOKENS, 3, 12, 64), Norm(empty(64), empty(64), kind=norm)
    qk_norm = QkNorm(one, one) if norm else None
    return partial(
        _with_backward, partial(rotary.qk_norm_rope, qkv, qk_norm=qk_norm, rope=_rope(64), backend="triton"), qkv
    )


def _fp8_block(*, quantized: tuple[str, ...] = _ALL, gated: bool = False, rope: bool = False) -> _Call:
    given: dict[str, Tensor] = {}
    rows = {"qkv": 3 * _C8, "proj": _C8, "fc1": 2 * _F8 if gated else _F8, "fc2": _C8}
    for name, out in rows.items():
        columns, after_norm = _F8 if name == "fc2" else _C8, name in ("qkv", "fc1")
        per_row = ["bias", "sum"] if after_norm else ["bias"]
        if name in quantized:
            per_row += ["row_scale"] if after_norm else []
            given[f"{name}_factor"] = torch.empty(columns if after_norm else 1)
        given |= {f"{name}_{kind}": torch.empty(out) for kind in per_row}
        given[f"{name}_weight"] = torch.empty(out, columns, dtype=_E4M3 if name in quantized else _HALF)
    given |= {"scale1": torch.empty(_C8), "scale2": torch.empty(_C8)}
    return partial(
        fused_block, torch.empty(_IMAGES, _TOKENS, _C8, dtype=_HALF), None, BlockTensors(**given), heads=16,
        eps=(1e-6, 1e-6), activation="silu" if gated else "gelu", rope=interleave(_rope(64), 64) if rope else None,
        next_statistics=True, next_factor=given.get("qkv_factor"),
    )  # fmt: skip


def _calls(arch: str) -> Iterator[tuple[str, torch.dtype, bool, _Call]]:
    """Yields (name, autocast dtype, "first" of `_BLOCKS`, call); fp32 disables autocast."""
    for name, dtypes, options in _BLOCKS:
        given = {key: value for key, value in options.items() if key != "first"}
        for one, training in product(dtypes.split(), (False, True)):
            stream, dtype = _DTYPES[one]
            full = f"{one} {name}, training" if training else f"{one} {name}"
            yield full, dtype, "first" in options, _block(stream, training, **given)
    for name, options in _FP8_BLOCKS.items() if has_fp8(arch) else ():
        yield f"fp8 {name}", _HALF, False, _fp8_block(**options)
    for one, norm in product(("bf16", "fp32"), ("", "layer_norm")):
        dtype = _DTYPES[one][0]
        yield f"{one} {norm or 'rope'} alone, training", dtype, True, _qk_norm_rope(dtype, norm)


class _Configurations:
    """Replaces the launch policy: chooses configuration `number` of a matmul's table, or the last if it has fewer.

    `splits` adds configurations of split-K to the tables of matmuls that the policy may split along K.
    """

    def __init__(self, arch: str, splits: bool) -> None:
        self.arch, self.splits = arch, splits
        self.number, self.count = 0, 1  # the caller sets `number`; `count` is the length of the longest table so far

    def _table(self, kind: str, epilogue: str) -> list[MatmulConfig]:
        """Lists the configurations for tensors with and without TMA descriptors."""
        tables = (matmul_policy.config_table(self.arch, kind, epilogue, tma) for tma in (True, False))
        return list(dict.fromkeys(config for table in tables for config in table))

    def _take(self, table: list[tuple[MatmulConfig, int]]) -> tuple[MatmulConfig, int]:
        self.count = max(self.count, len(table))
        return table[min(self.number, len(table) - 1)]

    def best(self, problem: matmul_policy.Problem, most: int = 1) -> tuple[MatmulConfig, int]:
        whole = [config for config in self._table(problem.kind, problem.epilogue) if problem.allows(config)]
        parts = self._table(problem.kind, "partial") if most > 1 and self.splits else []
        return self._take([*((config, 1) for config in whole), *((config, _PARTS) for config in parts)])

    def matmuls_config(self, pairs: Any) -> tuple[MatmulConfig, int]:
        table = self._table(matmul_kind(pairs[0][0].dtype), "weight_matmuls")
        return self._take([(config, _PARTS) for config in table])


def block_builds(arch: str, core: bool = False) -> Iterator[Build]:
    """Yields builds of all kernels except attention. `core`: only the first configuration of the calls in `_CORE`."""
    for name, dtype, first_only, call in _calls(arch):
        if core and name not in _CORE:
            continue
        configurations = _Configurations(arch, splits=name in _SPLIT)
        while configurations.number < configurations.count:
            with (
                mock.patch.object(backends, "_tf32_is_allowed", lambda: True),
                torch.autocast("cpu", dtype, enabled=dtype != _FULL),
                mock.patch.object(matmul_policy, "best", configurations.best),
                mock.patch.object(matmul_policy, "best_head", lambda problem: problem.sizes[0]),
                mock.patch.object(weight_matmuls, "matmuls_config", configurations.matmuls_config),
                offline.recorded(offline.gpu(arch)) as launches,
            ):
                call()
            for launch in launches:
                if "attention" not in launch.kernel.__name__:  # see attention_builds.py
                    yield _build(arch, name, launch, core=configurations.number == 0 and name in _CORE)
            configurations.number += 1
            if core or first_only:
                break


def _build(arch: str, name: str, launch: Launch, core: bool) -> Build:
    kernel, needs = "_".join((launch.name, *launch.details[:1])), ()
    if launch.units:
        a, tma = launch.args["a"], launch.constants["TMA"]
        dtype = getattr(a, "base", a).dtype
        needs = ("e4m3" if dtype == _E4M3 else matrix_instruction(arch), *(("tma_loads",) if tma else ()))
        name = " ".join((name, launch.tile, "TMA" if tma else "pointers", *launch.details[1:]))
    core &= arch == "sm_90" or (kernel == "matmul_layer_norm" and name.endswith("gelu"))
    return Build(kernel, name, launch, core=core, needs=needs)
