"""Packs the linear layers of blocks for the CPU if possible, and runs calls that support packed layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops.descriptions import Keys, Rope
from ..ops.operators import needs_gradient
from ..ops.packed import Packed, Settings, pack_reasons, run_packed
from .parts import BlockParts, Slot, block_tensors, drops, drops_path, linear_sources, tensor_of


def pack_parts(parts: BlockParts) -> None:
    """Packs the linear layers of a block that `is_packable`."""
    dtype = tensor_of(*parts.mlp.fc1.weights[0]).dtype  # type: ignore[union-attr]  # a packable block has both halves
    if type(parts.frozen) is Packed and parts.frozen.dtype is dtype:
        parts.frozen.refresh()
        return
    sources, settings = folding = packing_of(parts.attention, parts.mlp)
    qk_norm: Any = parts.attention.qk_norm  # type: ignore[union-attr]  # likewise
    tensors = partial(block_tensors, parts.attention, parts.mlp)
    parts.frozen = Packed(sources, tensors, dtype, settings, qk_norm and qk_norm.now)
    parts.frozen.folding = folding


def is_packable(parts: BlockParts, backend: str) -> bool:
    """True if both halves were read, the backend is sdpa, and this CPU can pack the dtype of the weights."""
    if backend != "sdpa" or parts.attention is None or parts.mlp is None or parts.fp8 is not None:
        return False
    tensors = [tensor_of(*slot) for slot in packing_of(parts.attention, parts.mlp)[0]]
    dtype = tensor_of(*parts.mlp.fc1.weights[0]).dtype
    if parts.attention.norm.kind != parts.mlp.norm.kind:
        return False
    alike = all(tensor is None or (tensor.device.type == "cpu" and tensor.dtype is dtype) for tensor in tensors)
    return alike and not pack_reasons(dtype)


def run_packed_block(parts: BlockParts, x: Tensor, rope: Rope | None = None, keys: Keys | None = None) -> Tensor | None:
    """Runs a block with its packed linear layers; returns None if it has none for this call."""
    packed = packed_for(parts, x)
    return None if packed is None else run_packed([packed], x, rope, keys)


def packed_for(parts: BlockParts, x: Tensor) -> Packed | None:
    """Returns the packed linear layers of a block for a call with these tokens, or None."""
    packed = parts.frozen
    if not isinstance(packed, Packed) or parts.fp8 is not None or not packed.takes(x):
        return None
    for half in (parts.attention, parts.mlp):  # a block that must run as modules has no parts
        if half is None or drops(half.dropouts) or drops_path(half.drop_path):
            return None
    needs_grad = torch.is_grad_enabled() and needs_gradient(x, *parts.watch.owner.parameters())
    return None if needs_grad else packed


def packing_of(attention: Any, mlp: Any) -> tuple[list[Slot], Settings]:
    """Returns everything that packed weights depend on: parameters and settings."""
    qk_norms = () if attention.qk_norm is None else (attention.qk_norm.q, attention.qk_norm.k)
    norms = [norm for norm in (attention.norm, *qk_norms, mlp.norm, mlp.inner_norm) if norm is not None]
    scales = [parts.layer_scale for parts in (attention, mlp) if parts.layer_scale is not None]
    sources = [*(slot for norm in norms for slot in norm.slots), *linear_sources(attention, mlp), *scales]
    inner = mlp.inner_norm
    return sources, Settings(
        attention.num_heads, attention.scale, attention.norm.kind, inner and inner.kind,
        (attention.norm.eps, mlp.norm.eps, inner.eps if inner else 0.0), mlp.activation,
    )  # fmt: skip
