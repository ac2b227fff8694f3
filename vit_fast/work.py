"""Lower bounds on FLOP, memory traffic and time of a model at peak FLOP/s and memory bandwidth.

Counts matmuls, convolutions and attention: 2 FLOP per multiply-add, and one access per element of operands and
outputs. Does not count norms, activations and residuals, because they can be fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .config import ViTConfig
from .model import VisionTransformer


@dataclass(frozen=True)
class Work:
    """FLOP, and memory traffic in elements instead of bytes, so that neither number depends on the dtype."""

    flop: int = 0
    elements: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.flop + other.flop, self.elements + other.elements)

    def __mul__(self, times: int) -> Work:
        return Work(times * self.flop, times * self.elements)

    def floor_ms(self, itemsize: int, tflops: float, gb_per_s: float) -> float:
        """Returns the larger of compute time and memory time in milliseconds, at the given peaks."""
        return max(self.flop / tflops / 1e9, self.elements * itemsize / gb_per_s / 1e6)


def work(config: ViTConfig, batch: int) -> dict[str, Work]:
    """Returns the work of a forward pass with `batch` images, by part of the model."""
    B, C, F, N = batch, config.embed_dim, config.hidden_dim, config.seqlen
    M = B * N
    up = _linear(M, C, 2 * F if config.mlp_layer == "swiglu" else F)
    linears = [_linear(M, C, 3 * C, config.qkv_bias), _linear(M, C, C), up, _linear(M, F, C)]
    return {
        "embedding": total(_embedding(config, B)),
        "linears": total(config.depth * linears),
        "attention": total(config.depth * [Work(4 * B * N * N * C, 4 * M * C)]),
        "head": total(_head(config, B)),
    }


def total(works: Iterable[Work]) -> Work:
    return sum(works, Work())


def parameter_count(config: ViTConfig) -> int:
    """Returns the number of parameters of a model. Builds one block, because all blocks have the same shapes."""
    with torch.device("meta"):
        model = VisionTransformer(replace(config, depth=1))
    block, every = (sum(p.numel() for p in module.parameters()) for module in (model.blocks, model))
    return every + (config.depth - 1) * block


def _linear(M: int, K: int, N: int, bias: bool = True) -> Work:
    return Work(2 * M * K * N, M * K + K * N + M * N + (N if bias else 0))


def _embedding(config: ViTConfig, B: int) -> Iterator[Work]:
    channels, (height, width) = config.in_chans, config.image_hw
    for out in config.stem_channels:
        before, height, width = height * width, height // 2, width // 2
        flop = 2 * B * height * width * 9 * channels * out
        yield Work(flop, B * channels * before + 9 * channels * out + B * out * height * width)
        channels = out
    patch, C = config.patch_hw[0] * config.patch_hw[1], config.embed_dim
    positions = B * config.num_patches
    bias = 0 if config.pre_norm else C
    moved = B * channels * height * width + channels * patch * C + bias + positions * C
    yield Work(2 * positions * channels * patch * C, moved)


def _head(config: ViTConfig, B: int) -> Iterator[Work]:
    ratio = config.mlp_ratio if config.pool_mlp_ratio is None else config.pool_mlp_ratio
    C, F = config.embed_dim, int(config.embed_dim * ratio)
    P = config.seqlen if config.pool_include_prefix else config.num_patches
    if config.global_pool == "map":
        yield _linear(1, C, C)  # the query, once per batch
        yield _linear(B * P, C, 2 * C)
        yield Work(4 * B * P * C, 2 * B * C + 2 * B * P * C)
        yield from (_linear(B, C, C), _linear(B, C, F), _linear(B, F, C))
    if config.num_classes:
        rows = B * config.seqlen if config.global_pool == "" else B
        yield from (1 + config.distilled) * [_linear(rows, C, config.num_classes)]


class Counter(TorchDispatchMode):
    """Context that counts the work of operators that have a FLOP formula in torch; does not support inference_mode."""

    work = Work()

    def __enter__(self) -> Any:
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path is one operator without a FLOP formula
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]  # torch's
        torch.backends.mha.set_fastpath_enabled(self._fast)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            flop = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif "scaled_dot_product" in str(packet):  # torch has no formula for the CPU operator
            flop = sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        else:
            return out
        result = out[0] if isinstance(out, tuple) else out
        moved = sum(tensor.numel() for tensor in (*args, result) if isinstance(tensor, Tensor))
        self.work += Work(flop, moved)
        return out
