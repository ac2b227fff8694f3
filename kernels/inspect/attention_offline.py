"""Builds of the attention kernels, for the static checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..attention.attention_backward import backward_launches
from ..attention.attention_forward import forward_launch
from ..attention.attention_policy import ROW_CHUNKS, Problem, dkdv_config, dq_config, forward_config
from ..device import REFERENCE_GPU, has_fp8, matrix_instruction
from .offline import Build, meta

# (tokens, head_dim) of ViT at 224 and 384 pixels, ViT-H and SigLIP So400m, and of each remaining tile width.
_HALF_SHAPES = (
    (197, 64), (256, 64), (577, 64), (197, 80), (257, 80), (256, 72), (729, 72),
    (197, 32), (197, 48), (577, 48), (577, 96), (577, 128),
)  # fmt: skip
_FP32_SHAPES = ((197, 64), (257, 80), (577, 128))
_TUNED_SHAPES = ((197, 64), (256, 72), (197, 80))
_CORE_SHAPES = ((197, 64), (577, 64), (257, 80))
# (mean length of packed sequences, head_dim) of Qwen-VL (images, windows), SigLIP 2, and each remaining tile width.
_PACKED_SHAPES = (
    (1024, 80), (64, 80), (1024, 64), (1024, 72), (1024, 128), (64, 128), (1024, 96), (1024, 48), (1024, 32),
)  # fmt: skip
_E4M3_SHAPES = ((197, 64, "tma"), (577, 64, "tma"), (257, 80, "tma"), (729, 72, "vector"))
_MASKED_SHAPES = ((256, 72), (1024, 64), (1024, 128))
_HEADS = 4
_FULL_BATCH = 256  # several waves on every GPU
_SMALL_BATCH = 1


@dataclass(frozen=True)
class _Case:
    arch: str
    dtype: torch.dtype
    element: str
    tokens: int
    head_dim: int
    batch: int
    access: str
    queries: int | None = None  # None: equal to tokens; other values e.g. for attention pooling
    form: str = "fixed"

    @property
    def n_q(self) -> int:
        return self.tokens if self.queries is None else self.queries

    @property
    def name(self) -> str:
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype, self.element)
        lengths = f"N{self.tokens}" if self.queries is None else f"Nq{self.queries} N{self.tokens}"
        form = "" if self.form == "fixed" else f" {self.form}"
        return f"{kind} {lengths} D{self.head_dim} B{self.batch} {self.access}{form}"

    @property
    def core(self) -> bool:
        if self.form != "fixed":
            large = (self.tokens, self.head_dim, self.form) == (1024, 80, "packed")
            return self.access == "tma" and (large or (self.arch == "sm_90" and self.head_dim == 72))
        if self.arch == "sm_120" and self.access == "tma" and self.head_dim in (96, 128):
            return self.element == "half"  # because these kernels would spill with the tile sizes of sm_80
        return (
            (self.tokens, self.head_dim) in _CORE_SHAPES
            and self.dtype == torch.bfloat16
            and self.access == "tma"
            and (self.arch == "sm_90" or self.tokens == 197)
        )

    def problem(self) -> Problem:
        return Problem(
            arch=self.arch,
            sm_count=REFERENCE_GPU.sm_count,
            element=self.element,
            head_dim=self.head_dim,
            n_q=self.n_q,
            n_kv=self.tokens,
            batch_heads=self.batch * _HEADS,
            access=self.access,
            form=self.form,
        )

    def packed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k, v as views of a packed tensor, for which the launch policy selects `access`.

        For "vector", the batch stride is 0. For "scalar", the storage offset is one element.
        """
        tokens = max(self.n_q, self.tokens)
        shape = (1 if self.access == "vector" else self.batch, tokens, 3, _HEADS, self.head_dim)
        flat = torch.empty(torch.Size(shape).numel() + 1, dtype=self.dtype, device="meta")
        flat = flat[1:] if self.access == "scalar" else flat[:-1]
        packed = flat.view(shape).expand(self.batch, -1, -1, -1, -1)
        q, k, v = packed.transpose(1, 3).unbind(2)
        return q[:, :, : self.n_q], k[:, :, : self.tokens], v[:, :, : self.tokens]

    def output(self) -> torch.Tensor:
        shape = (self.batch, self.n_q, _HEADS, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device="meta").transpose(1, 2)

    def row_values(self) -> torch.Tensor:
        return torch.empty((self.batch, _HEADS, self.n_q), dtype=torch.float32, device="meta")

    def needs(self, tma: bool) -> tuple[str, ...]:
        if self.element != "half" or self.access == "scalar":
            return ()
        matrix = matrix_instruction(self.arch)
        return (matrix, "UTMALDG", "UTMASTG") if tma else (matrix,)


def offline_builds(arch: str) -> Iterator[Build]:
    """Yields builds for each kernel, shape class, dtype and access of the launch policy, and for tuner candidates."""
    for case in _cases(arch):
        yield from _builds(case)
    yield from _tuned_builds(arch)
    for case in _varlen_cases(arch):
        yield from _builds(case)
    yield from _fp8_builds(arch)


def _cases(arch: str) -> Iterator[_Case]:
    for tokens, head_dim in _HALF_SHAPES:
        for access in ("tma", "vector", "scalar"):
            yield _Case(arch, torch.bfloat16, "half", tokens, head_dim, _FULL_BATCH, access)
    yield _Case(arch, torch.bfloat16, "half", 197, 64, _SMALL_BATCH, "tma")
    # attention pooling of SigLIP: one query per image
    yield _Case(arch, torch.bfloat16, "half", 196, 64, _FULL_BATCH, "tma", queries=1)
    for tokens, head_dim in _CORE_SHAPES:
        yield _Case(arch, torch.float16, "half", tokens, head_dim, _FULL_BATCH, "tma")
    for tokens, head_dim in _FP32_SHAPES:
        yield _Case(arch, torch.float32, "tf32", tokens, head_dim, _FULL_BATCH, "tma")


def builds_of_lengths(arch: str, lengths: Iterable[tuple[int, int]]) -> Iterator[Build]:
    """Yields builds with bf16 and head_dim 64 for each (n_q, n_kv)."""
    for n_q, n_kv in lengths:
        yield from _builds(_Case(arch, torch.bfloat16, "half", n_kv, 64, _FULL_BATCH, "tma", queries=n_q))


def _fp8_builds(arch: str) -> Iterator[Build]:
    for tokens, head_dim, access in _E4M3_SHAPES if has_fp8(arch) else ():
        case = _Case(arch, torch.bfloat16, "half", tokens, head_dim, _FULL_BATCH, access)
        (q, k, v), config = case.packed(), forward_config(case.problem())
        o = torch.empty_like(case.output(), dtype=torch.float8_e4m3fn)
        launch = forward_launch(q, k, v, o, case.row_values(), head_dim**-0.5, config, o_scale=meta(1))
        yield Build(f"attention_fwd_{config.scheme}", f"{case.name} to e4m3", launch)


def _tuned_builds(arch: str) -> Iterator[Build]:
    """Yields builds of the row kernel with the other chunks that the tuner tries, on architectures with TMA."""
    for tokens, head_dim in _TUNED_SHAPES:
        case = _Case(arch, torch.bfloat16, "half", tokens, head_dim, _FULL_BATCH, "tma")
        problem, (q, k, v) = case.problem(), case.packed()
        if not problem.uses_tma:
            return
        for block_n, chunks in ROW_CHUNKS[1:]:
            config = replace(forward_config(problem), block_n=block_n, chunks=chunks)
            launch = forward_launch(q, k, v, case.output(), case.row_values(), head_dim**-0.5, config)
            name = f"{case.name} {chunks} x {block_n}"
            yield Build("attention_fwd_row", name, launch, needs=case.needs(tma=True))


def _varlen_cases(arch: str) -> Iterator[_Case]:
    for form, shapes in (("packed", _PACKED_SHAPES), ("masked", _MASKED_SHAPES)):
        for tokens, head_dim in shapes:
            for access in ("tma", "scalar"):
                yield _Case(arch, torch.bfloat16, "half", tokens, head_dim, _FULL_BATCH, access, form=form)
        for tokens, head_dim in _FP32_SHAPES:
            yield _Case(arch, torch.float32, "tf32", tokens, head_dim, _FULL_BATCH, "tma", form=form)


def _builds(case: _Case) -> Iterator[Build]:
    problem, scale = case.problem(), case.head_dim**-0.5
    tensors = [*case.packed(), *case.packed(), case.output(), case.output()]
    sequences = keep = None
    if case.form == "masked":
        keep = torch.empty((case.batch, case.tokens), dtype=torch.bool, device="meta")
    elif case.form == "packed":  # concatenate all images along the tokens
        tensors = [tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for tensor in tensors]
        sequences = torch.empty(case.batch + 1, dtype=torch.int32, device="meta")
    q, k, v, dq, dk, dv, o, do = tensors
    lse, delta = (torch.empty(q.shape[:3], dtype=torch.float32, device="meta") for _ in range(2))
    forward, for_dq, for_dkdv = forward_config(problem), dq_config(problem), dkdv_config(problem)
    form: dict[str, Any] = {"sequences": sequences, "keep": keep}
    launches = (
        forward_launch(q, k, v, o, lse, scale, forward, **form),
        *backward_launches(q, k, v, o, do, lse, dq, dk, dv, delta, scale, for_dq, for_dkdv, **form),
    )
    fixed = case.form == "fixed"
    names = (f"fwd_{forward.scheme}", "bwd_dq", "bwd_dkdv") if fixed else ("varlen_fwd", "varlen_dq", "varlen_dkdv")
    for name, launch in zip(names, launches):
        needs = case.needs(launch.constants["TMA"])
        if not fixed:
            needs = tuple(need for need in needs if need != "UTMASTG")  # masked stores do not use TMA
        yield Build(f"attention_{name}", case.name, launch, core=case.core, needs=needs)
