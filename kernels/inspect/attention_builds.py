"""Builds of the attention kernels: launches recorded for the layouts that the launch policy distinguishes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.attention import attention_backward, attention_forward
from ..device import has_fp8, matrix_instruction
from . import offline
from .offline import Build

# (tokens, head_dim) of ViT at 224 and 384 pixels, ViT-H and SigLIP So400m, and of each remaining tile width.
_HALF_SHAPES = (
    (197, 64), (256, 64), (577, 64), (197, 80), (257, 80), (256, 72), (729, 72),
    (197, 32), (197, 48), (577, 48), (577, 96), (577, 128),
)  # fmt: skip
_FP32_SHAPES = ((197, 64), (257, 80), (577, 128))
_CORE_SHAPES = ((197, 64), (577, 64), (257, 80))
# (mean length of packed sequences, head_dim) of Qwen-VL (images, windows), SigLIP 2, and each remaining tile width.
_PACKED_SHAPES = (
    (1024, 80), (64, 80), (1024, 64), (1024, 72), (1024, 128), (64, 128), (1024, 96), (1024, 48), (1024, 32),
)  # fmt: skip
_MASKED_SHAPES = ((256, 72), (1024, 64), (1024, 128))
_E4M3_SHAPES = ((197, 64, "tma"), (577, 64, "tma"), (257, 80, "tma"), (729, 72, "vector"))
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"}
_HEADS = 4


@dataclass(frozen=True)
class _Case:
    tokens: int
    head_dim: int
    access: str = "tma"
    dtype: torch.dtype = torch.bfloat16
    batch: int = 256  # several waves on every GPU
    queries: int | None = None  # None: equal to tokens; other values e.g. for attention pooling
    form: str = "fixed"
    to_e4m3: bool = False

    @property
    def name(self) -> str:
        lengths = f"N{self.tokens}" if self.queries is None else f"Nq{self.queries} N{self.tokens}"
        ending = "" if self.form == "fixed" else f" {self.form}"
        ending += " to e4m3" if self.to_e4m3 else ""
        return f"{_NAMES[self.dtype]} {lengths} D{self.head_dim} B{self.batch} {self.access}{ending}"

    def is_core(self, arch: str) -> bool:
        if self.access != "tma" or self.to_e4m3 or self.dtype != torch.bfloat16:
            return False
        hopper = arch == "sm_90"
        if self.form != "fixed":
            large = (self.tokens, self.head_dim, self.form) == (1024, 80, "packed")
            return large or (hopper and self.head_dim == 72)
        if arch == "sm_120" and self.head_dim in (96, 128):
            return True  # because these kernels would spill with the tile sizes of sm_80
        return (self.tokens, self.head_dim) in _CORE_SHAPES and (hopper or self.tokens == 197)

    def tensors(self) -> list[torch.Tensor]:
        """Returns q, k, v, their gradients, o and its gradient [B, H, N, D], for which the policy selects `access`.

        For "vector", the batch stride is 0. For "scalar", the storage offset is one element.
        """
        n_q, most = self.queries or self.tokens, max(self.queries or 0, self.tokens)
        shape = (1 if self.access == "vector" else self.batch, most, 3, _HEADS, self.head_dim)
        flat = torch.empty(torch.Size(shape).numel() + 1, dtype=self.dtype, device="meta")
        flat = flat[1:] if self.access == "scalar" else flat[:-1]
        q, k, v = flat.view(shape).expand(self.batch, -1, -1, -1, -1).transpose(1, 3).unbind(2)
        inputs = [q[:, :, :n_q], k[:, :, : self.tokens], v[:, :, : self.tokens]]
        o, do = torch.empty(2, self.batch, n_q, _HEADS, self.head_dim, dtype=self.dtype, device="meta").transpose(2, 3)
        tensors = [*inputs, *inputs, o, do]
        if self.form == "packed":  # concatenate all images along the tokens
            tensors = [tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for tensor in tensors]
        return tensors

    def builds(self, arch: str) -> Iterator[Build]:
        q, k, v, dq, dk, dv, o, do = self.tensors()
        lse, scale = torch.empty(q.shape[:3], dtype=torch.float32, device="meta"), self.head_dim**-0.5
        form: dict[str, Any] = {}
        if self.form == "masked":
            form["key_mask"] = torch.empty((self.batch, self.tokens), dtype=torch.bool, device="meta")
        elif self.form == "packed":
            form = {"sequences": torch.empty(self.batch + 1, dtype=torch.int32, device="meta"), "longest": self.tokens}
        with offline.recorded(offline.gpu(arch)) as launches:
            if self.to_e4m3:
                o8 = torch.empty_like(o, dtype=torch.float8_e4m3fn)
                attention_forward(q, k, v, o8, lse, scale, torch.empty(1, device="meta"))
            else:
                attention_forward(q, k, v, o, lse, scale, **form)
                attention_backward(q, k, v, o, do, lse, dq, dk, dv, scale, **form)
        for launch in launches:
            yield Build(
                launch.kernel.__name__.strip("_").removesuffix("_kernel"), self.name, launch,
                core=self.is_core(arch), needs=self._needs(arch, launch.constants["TMA"]),
            )  # fmt: skip

    def _needs(self, arch: str, tma: bool) -> tuple[str, ...]:
        if self.dtype == torch.float32 or self.access == "scalar" or self.to_e4m3:
            return ()
        stores = ("tma_stores",) if self.form == "fixed" else ()  # masked stores do not use TMA
        return (matrix_instruction(arch), *(("tma_loads", *stores) if tma else ()))


def attention_builds(arch: str) -> Iterator[Build]:
    """Yields a build for each kernel, shape class, dtype and access of the launch policy."""
    for case in _cases(arch):
        yield from case.builds(arch)


def _cases(arch: str) -> Iterator[_Case]:
    for access in ("tma", "vector", "scalar"):
        yield from (_Case(*shape, access) for shape in _HALF_SHAPES)
    yield _Case(197, 64, batch=1)
    yield _Case(196, 64, queries=1)  # attention pooling of SigLIP: one query per image
    yield from (_Case(*shape, dtype=torch.float16) for shape in _CORE_SHAPES)
    for form, shapes in (("packed", _PACKED_SHAPES), ("masked", _MASKED_SHAPES)):
        yield from (_Case(*shape, access, form=form) for shape in shapes for access in ("tma", "scalar"))
    for form in ("fixed", "packed", "masked"):
        yield from (_Case(*shape, dtype=torch.float32, form=form) for shape in _FP32_SHAPES)
    if has_fp8(arch):
        yield from (_Case(*shape, to_e4m3=True) for shape in _E4M3_SHAPES)
