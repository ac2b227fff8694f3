"""Runs a pre-norm encoder block, described by its parts (`parts.py`), as a sequence of fused kernels.

qkv = LN(x) Wqkv^T + b              LayerNorm folded into the matmul
a   = attention(qkv)
x   = x + ls (a Wproj^T + b)        residual and LayerScale in the epilogue, which also returns LayerNorm statistics
h   = act(LN(x) W1^T + b1)          this LayerNorm uses them
x   = x + ls (h W2^T + b2)          as for proj, for the LayerNorm of the next block
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..ops.attention import is_exporting
from ..ops.backends import constant_to_compiler
from ..ops.block import fused_block
from ..ops.checks import in_transform, matmul_dtype, needs_gradient
from ..ops.descriptions import BlockTensors, Keys, Rope, neighbours
from ..ops.frozen import Frozen
from ..ops.layer_norm_mlp import fused_layer_norm_mlp, layer_norm_mlp
from ..ops.packed import Packed, run_packed
from .fp8_scales import scales_of
from .packing import packed_for, packing_of
from .parts import (
    AttentionParts,
    BlockParts,
    MlpParts,
    block_tensors,
    drops,
    drops_path,
    frozen_sources,
    scale_of,
    tensor_of,
    tensors_of,
)
from .plain import is_touched
from .row_statistics import NOTHING, RowFacts, counted, recall, remember
from .traced_parts import Outline, built, outline


def parts_of(block: Any) -> BlockParts:
    """Returns the block's cached parts and re-reads the block if it changed."""
    if torch.compiler.is_compiling():
        found = _outline(id(block))
        if found is not None:
            return built(block, found)
        compiled: BlockParts = block.vit_fast_parts
        compiled.watch.guard()
        return compiled
    parts: BlockParts | None = block.__dict__.get("vit_fast_parts")
    if parts is None or not parts.watch.holds(block):
        parts = _read(block)
    return parts


@constant_to_compiler
def _outline(address: int) -> Outline | None:
    """Returns the outline of a block, given by id(block), because torch 2.11 accepts no module as a constant argument.

    torch.compile guards id(block), calls this while it traces, and holds a reference to the block meanwhile.
    """
    block: Any = ctypes.cast(address, ctypes.py_object).value
    parts = block.__dict__.get("vit_fast_parts")
    if parts is None or not parts.watch.holds(block):
        parts = _read(block)
    if parts.fp8 is not None and runs_whole(parts, "triton"):
        parts.fp8.reader(parts)  # quantize now, outside the graph
    return outline(block, parts)


def _read(block: Any) -> BlockParts:
    before: BlockParts | None = block.__dict__.get("vit_fast_parts")
    parts: BlockParts = block.read()
    scales = scales_of(block)
    if scales is not None and scales.active:
        parts.fp8 = scales
    elif before is not None and before.watch.owner is block and _still_fits(before.frozen, parts):
        parts.frozen = before.frozen
    block.__dict__["vit_fast_parts"] = parts
    return parts


def runs_whole(parts: BlockParts, backend: str) -> bool:
    """Returns True if kernels can run the whole block now: both halves were read, without dropout or export."""
    simulated = parts.fp8 is not None and parts.fp8.simulated  # which any device can do
    if (backend != "triton" and not simulated) or parts.attention is None or parts.mlp is None or is_exporting():
        return False
    if parts.attention.norm.kind != parts.mlp.norm.kind:
        return False
    return not (drops(parts.attention.dropouts) or drops(parts.mlp.dropouts))


def run_block(
    parts: BlockParts,
    x: Tensor,
    statistics: Tensor | None = None,
    *,
    rope: Rope | None = None,
    keys: Keys | None = None,
    backend: str = "triton",
    attend: Callable[[Tensor], Tensor] | None = None,
    next_statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Runs a block whose second half is fused, with LayerNorm statistics passed in and out.

    Args:
        parts: Parts of the block. Dropout must be inactive.
        x: [B, N, C], or [total, C] for packed sequences.
        statistics: LayerNorm statistics of x from the previous block; None computes them.
        rope: Rotary positions of q and k, if the first half is fused.
        keys: Keys that queries attend to; None means all keys of an image.
        backend: Backend of the second half.
        attend: Maps x to x + attention with the original modules; None if the first half is fused.
        next_statistics: True to return the LayerNorm statistics of the output.
    Returns:
        A tensor with the shape of x; and its LayerNorm statistics, or None if they were not requested, x is fp32, or a
        drop path followed the last matmul.
    """
    mlp: Any = parts.mlp
    attention: Any = parts.attention
    in_one = attend is None and backend == "triton"
    if in_one and not drops_path(attention.drop_path) and not drops_path(mlp.drop_path):
        tensors, rope = _tensors_for(parts, x, rope)
        y, emitted = fused_block(
            x if x.dim() == 3 else x[None], statistics, tensors, heads=attention.num_heads,
            attention_scale=attention.scale, eps=(attention.norm.eps, mlp.norm.eps), norm=mlp.norm.kind,
            activation=mlp.activation, qk_norm=attention.qk_norm and attention.qk_norm.now(), rope=rope, keys=keys,
            inner_norm=_inner_norm(mlp),
            next_statistics=next_statistics,
        )  # fmt: skip
        return (y if x.dim() == 3 else y[0]), emitted
    if attend is not None:
        x, statistics = attend(x), None
    else:
        x, statistics = _run_attention(attention, x, statistics, rope, keys)
    if backend != "triton" or is_exporting():
        return run_mlp(mlp, x, backend), None
    dropping = drops_path(mlp.drop_path)
    y, emitted = fused_layer_norm_mlp(
        x, statistics, *mlp.tensors(), **mlp.options(), residual=not dropping,
        next_statistics=next_statistics and not dropping,
    )  # fmt: skip
    return (x + mlp.drop_path(y), None) if dropping else (y, emitted)


def run_mlp(parts: MlpParts, x: Tensor, backend: str) -> Tensor:
    """Runs the second half of a block alone on [..., C]."""
    dropping = drops_path(parts.drop_path)
    branch_or_sum = layer_norm_mlp(
        x, *parts.tensors(), **parts.options(), residual=not dropping, backend=backend
    )  # fmt: skip
    return x + parts.drop_path(branch_or_sum) if dropping else branch_or_sum


def _run_attention(
    parts: AttentionParts, x: Tensor, statistics: Tensor | None, rope: Rope | None, keys: Keys | None
) -> tuple[Tensor, Tensor | None]:
    """Runs the first half of a block alone on [B, N, C] or [total, C]."""
    dropping, absent = drops_path(parts.drop_path), cast(Any, (None,) * 7)
    tensors = BlockTensors(
        *parts.norm.tensors(), *parts.qkv.tensors(), *tensors_of(parts.proj), scale_of(parts), *absent
    )
    y, emitted = fused_block(
        x if x.dim() == 3 else x[None], statistics, tensors, heads=parts.num_heads, attention_scale=parts.scale,
        eps=(parts.norm.eps, 0.0), norm=parts.norm.kind, rope=rope, keys=keys, residual=not dropping,
        qk_norm=None if parts.qk_norm is None else parts.qk_norm.now(), next_statistics=not dropping,
    )  # fmt: skip
    y = y if x.dim() == 3 else y[0]
    return (x + parts.drop_path(y), None) if dropping else (y, emitted)


def _tensors_for(parts: BlockParts, x: Tensor, rope: Rope | None) -> tuple[BlockTensors, Rope | None]:
    """Returns the tensors of a block: cached folded weights if they have the matmuls' dtype and no gradient is needed.

    Also returns the rotary positions for the channel order of these weights.
    """
    attention: Any = parts.attention
    mlp: Any = parts.mlp
    frozen = parts.frozen if type(parts.frozen) is Frozen else None  # in FP8, something else is cached
    apart = (
        rope is None and attention.qk_norm is not None and attention.paired_head
    )  # the norms use the original order of channels
    if frozen is not None and frozen.dtype == matmul_dtype(x) and not apart:
        proj, fc2 = (*tensors_of(attention.proj), scale_of(attention)), (*tensors_of(mlp.fc2), scale_of(mlp))
        # gathered only where gradients can be wanted at all: this runs in every forward
        if not (torch.is_grad_enabled() or in_transform()) or not needs_gradient(
            x, *proj, *fc2, *(tensor_of(*slot) for slot in frozen_sources(attention, mlp))
        ):
            if frozen.paired_head and rope is not None:
                rope = neighbours(rope, frozen.paired_head)
            return frozen.with_others(proj, fc2), rope
    return block_tensors(attention, mlp), rope


def freeze_parts(parts: BlockParts) -> None:
    """Folds the LayerNorms of a whole block and caches the result; reuses the memory of an existing cache."""
    attention: Any = parts.attention
    mlp: Any = parts.mlp
    dtype = matmul_dtype(tensor_of(*mlp.fc1.weights[0]))
    if parts.fp8 is not None:
        parts.fp8.kept_of(parts).refresh()
    elif type(parts.frozen) is not Frozen or parts.frozen.dtype != dtype:
        folding = sources, norm, pairs, inner_norm, _ = _folding_of(attention, mlp)
        tensors = partial(block_tensors, attention, mlp)
        parts.frozen = Frozen(sources, tensors, dtype, norm, pairs, inner_norm)
        parts.frozen.folding = folding
    else:
        parts.frozen.refresh()


def _run_packed_blocks(blocks: nn.Sequential, x: Tensor, *rope: Tensor) -> Tensor | None:
    """Runs all blocks with their packed linear layers; returns None unless every block has them for this call."""
    ready: list[Packed] = []
    first: BlockParts | None = None
    for block in blocks:
        held: BlockParts | None = block.__dict__.get("vit_fast_parts")
        if held is None or type(held.frozen) is not Packed or block._forward_hooks or is_touched(block):
            return None
        parts = parts_of(block)
        packed = packed_for(parts, x) if block.vit_fast_backend == "sdpa" else None
        if packed is None:
            return None
        first = first or parts
        ready.append(packed)
    return None if first is None else run_packed(ready, x, _tables_of(first, rope), None)


def _folding_of(attention: Any, mlp: Any) -> tuple[Any, ...]:
    """Returns everything that cached weights depend on: their sources and settings."""
    return frozen_sources(attention, mlp), mlp.norm.kind, attention.paired_head, _inner_norm(mlp)[0], mlp.fc1.chunk


def _still_fits(frozen: Any, parts: BlockParts) -> bool:
    """Returns True if cached weights belong to the block, or will again once a hook that prevents fusion is removed."""
    if parts.attention is None or parts.mlp is None:
        return True
    if type(frozen) is Packed:
        return bool(frozen.folding == packing_of(parts.attention, parts.mlp))
    return type(frozen) is Frozen and frozen.folding == _folding_of(parts.attention, parts.mlp)


def _inner_norm(mlp: MlpParts) -> tuple[str, float]:
    """Returns kind and epsilon of the inner norm."""
    return ("none", 0.0) if mlp.inner_norm is None else (mlp.inner_norm.kind, mlp.inner_norm.eps)


def forward_block(
    block: Any,
    parts: BlockParts,
    x: Tensor,
    *,
    rope: Rope | None = None,
    keys: Keys | None = None,
    backend: str,
    attend: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Runs `run_block` for a block that its library's own loop calls, [B, N, C] -> [B, N, C].

    Reuses the LayerNorm statistics of the previous block if `x` is its unmodified output.
    """
    in_fp8 = parts.fp8 is not None and attend is None and keys is None
    if in_fp8 and (torch.compiler.is_compiling() or is_touched(block)):
        y, _ = parts.fp8.run(parts, x, NOTHING, rope)
        return y
    if in_fp8:
        rows = recall(x)
        if rows.maker is not None:
            rows.maker.reader = parts.fp8.reader(
                parts
            )  # from now on, the previous block writes the operand of this one
        with counted():
            y, made = parts.fp8.run(parts, x, rows, rope, parts.reader)
        remember(y, made)
        return y
    if backend != "triton" or parts.attention is None or torch.compiler.is_compiling() or is_touched(block):
        return run_block(parts, x, rope=rope, keys=keys, backend=backend, attend=attend)[0]
    statistics = recall(x).statistics if attend is None else None
    with counted():
        y, emitted = run_block(
            parts, x, statistics, rope=rope, keys=keys, backend=backend, attend=attend, next_statistics=True
        )
    remember(y, NOTHING if emitted is None else RowFacts(emitted))
    return y


def run_blocks(blocks: nn.Sequential, x: Tensor, *rope: Tensor) -> Tensor:
    """Runs a Sequential of blocks, [B, N, C] -> [B, N, C].

    If all blocks run whole, each one receives its first LayerNorm statistics from the previous one. The last block also
    returns some, so that it uses the same kernels and launch plan as the others. If a block is wrapped, replaced or has
    hooks, all blocks are called as modules.

    Args:
        rope: Rotary positions for each block, if it has any.
    """
    if not torch.compiler.is_compiling() and (output := _run_packed_blocks(blocks, x, *rope)) is not None:
        return output
    ready: list[Any] = []
    for block in blocks:
        touched = block._forward_hooks or is_touched(block)  # the former for hooks of transformers
        known: Any = block if hasattr(block, "whole") and not touched else None
        ready.append(known and known.whole())
        if ready[-1] is None:
            break
    if None in ready or not ready:
        for block in blocks:
            x = block(x, *rope)
        return x
    tables = _tables_of(ready[0], rope)
    rows = NOTHING
    for parts, following in zip_longest(ready, ready[1:]):
        if parts.fp8 is None:
            x, statistics = run_block(parts, x, rows.statistics, rope=tables, next_statistics=True)
            rows = RowFacts(statistics)
        else:
            reader = following.fp8.reader(following) if following is not None and following.fp8 is not None else None
            x, rows = parts.fp8.run(parts, x, rows, tables, reader)
    return x


def _tables_of(parts: BlockParts, rope: tuple[Tensor, ...]) -> Rope | None:
    """Returns the rotary positions of a block as the operators expect them."""
    attention: Any = parts.attention
    return attention.module.rope_of(*rope) if rope else None
