"""Builds of the kernels of qk-norm and rotary embeddings, for the static checks.

Shapes: DINOv3-B (head_dim 64, 5 prefix tokens), head_dim 72 with one table per image, RMSNorm over head_dim 128, and
InternViT-6B (RMSNorm over all 25 heads of head_dim 128).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..launch import Launch
from ..rotary import QkvSettings, qk_norm_rope_grad_launch, qk_norm_rope_launch
from .offline import Build, meta

_B, _T = 64, 196


def _cases(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, QkvSettings]]:
    def qkv(tokens: int, heads: int, head_dim: int) -> Tensor:
        return meta(_B, tokens, 3, heads, head_dim, dtype=dtype)

    def both(*shape: int, of: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
        return meta(*shape, dtype=of), meta(*shape, dtype=of)

    shared, single = both(1, 1, _T, 32, of=torch.float32), both(_B, 1, _T, 36, of=torch.float32)
    yield "rope D64", qkv(_T + 5, 12, 64), QkvSettings(tables=shared, prefix=5)
    yield "rope D72 interleaved", qkv(_T, 16, 72), QkvSettings(tables=single, layout="interleaved")
    normed = QkvSettings(both(64), both(64), shared, "layer_norm", prefix=5)
    yield "layer_norm, rope D64", qkv(_T + 5, 12, 64), normed
    yield "rms_norm D128", qkv(_T, 16, 128), QkvSettings(weights=both(128), norm="rms_norm")
    yield "rms_norm of 25x128", qkv(_T, 25, 128), QkvSettings(weights=both(25 * 128), norm="rms_norm", wide=True)


def _launches(dtype: torch.dtype) -> Iterator[tuple[str, str, Launch]]:
    for what, x, settings in _cases(dtype):
        yield "qk_norm_rope", f"{what} in place", qk_norm_rope_launch(x, x, settings)
        if settings.norm == "none":
            yield "qk_norm_rope", f"{what} back", qk_norm_rope_launch(x, torch.empty_like(x), settings, inverse=True)
            continue
        part = meta(264, 2, 2, x.shape[-2] * x.shape[-1] if settings.wide else x.shape[-1])
        grad = torch.empty_like(x)
        yield "qk_norm_rope_grad", what, qk_norm_rope_grad_launch(grad, x, torch.empty_like(x), part, settings)


def offline_builds(arch: str) -> Iterator[Build]:
    """Yields the builds for an architecture."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for kernel, what, launch in _launches(dtype):
            core = arch == "sm_90" and name == "bf16" and what.startswith("layer_norm, rope")
            yield Build(kernel, f"{name} {what}", launch, core=core)
