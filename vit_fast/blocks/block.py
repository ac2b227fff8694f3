"""Runs a pre-norm encoder block, given by its parts (`parts.py`), as a sequence of fused kernels.

qkv = LN(x) Wqkv^T + b              LayerNorm folded into the matmul
a   = attention(qkv)
x   = x + ls (a Wproj^T + b)        LayerScale ls, residual and the statistics for the next LayerNorm in the epilogue
h   = act(LN(x) W1^T + b1)          LayerNorm folded into the matmul
x   = x + ls (h W2^T + b2)          epilogue as above, with the statistics for the next block
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import qk_norm_rope, reference
from ..ops.attention import attention_among
from ..ops.backends import resolve_backend
from ..ops.block import fused_block
from ..ops.descriptions import BlockTensors, Keys, Rope, interleave
from ..ops.registration import constant_to_compiler, is_exporting, matmul_dtype, needs_gradient
from .fp8_scales import PLACE
from .frozen import Frozen, ReshapedError
from .outlines import Outline, built, outline
from .packed import Packed, packed_for, packing_reasons, run_packed
from .parts import NO_NORM, AttentionParts, BlockParts, Half, MlpParts, block_tensors, keys_at, options_of, tensor_of
from .plain import is_touched
from .token_facts import NOTHING, TokenFacts, VersionsCounted, recall, remember


def parts_of(block: Any) -> BlockParts:
    """Returns the block's cached parts, and re-reads the block if it changed."""
    return built(block, _outline(id(block))) if torch.compiler.is_compiling() else _current_parts(block)


@constant_to_compiler
def _outline(address: int) -> Outline:
    # torch.compile calls this while it traces, and guards the id; torch 2.11 does not support a module as the argument
    block: Any = ctypes.cast(address, ctypes.py_object).value
    parts = _current_parts(block)
    if parts.fp8 is not None and runs_whole(parts):
        parts.fp8.reader(parts)  # quantizes outside of the graph
    return outline(block, parts)


def _current_parts(block: Any) -> BlockParts:
    parts: BlockParts | None = block.__dict__.get("vit_fast_parts")
    return _read(block) if parts is None or not parts.watch.holds(block) else parts


def _read(block: Any) -> BlockParts:
    before: BlockParts | None = block.__dict__.get("vit_fast_parts")
    parts: BlockParts = block.read()
    if PLACE in block._modules and block._modules[PLACE].active:
        parts.fp8 = block._modules[PLACE]
    elif before is not None and before.watch.owner is block:
        # cached weights may match again once a hook that prevents fusion is removed
        frozen = before.frozen
        held = (frozen.attention, frozen.mlp) if type(frozen) in (Frozen, Packed) else (None, None)
        if any(half is None is not own for half, own in zip(parts.halves, held)) or parts.halves == held:
            parts.frozen = frozen
    block.__dict__["vit_fast_parts"] = parts
    return parts


def runs_whole(parts: BlockParts, backend: str | None = None) -> bool:
    """True if one operator can run both halves now, with this backend (None: any backend)."""
    attention, mlp = parts.attention, parts.mlp
    if attention is None or mlp is None or not parts.is_pre_norm:
        return False
    if backend is not None:
        emulated = parts.fp8 is not None and parts.fp8.emulated  # runs on any device
        if attention.module.vit_fast_backend != backend or (backend != "triton" and not emulated):
            return False
    return not (is_exporting() or attention.drops() or mlp.drops())


def run_block(
    parts: BlockParts, x: Tensor, facts: TokenFacts = NOTHING, *, rope: Rope | None = None, keys: Keys | None = None,
    backend: str = "triton", attend: Callable[[Tensor], Tensor] | None = None, reader: Any = None,
    next_statistics: bool = False,
) -> tuple[Tensor, TokenFacts]:  # fmt: skip
    """Runs a block without active dropout on x [B, N, C] or packed x [total, C]; `parts.mlp` must not be None.

    If `attend` is given, it computes x + attention(x) with the block's modules. `facts` are those of x, and `reader`
    contains the cached weights of the next block if that block reads e4m3. Returns the output and facts about it.
    """
    attention, mlp = parts.halves
    if attend is not None:
        x, facts = attend(x), NOTHING
    elif parts.fp8 is not None and keys is None:
        return parts.fp8.run(parts, x, facts, rope, reader)
    elif not attention.drops_path() and not mlp.drops_path():
        tensors, computed, rope = _tensors_for(attention, mlp, parts.frozen, x, rope)
        return _run_fused(attention, mlp, tensors, x, facts, rope, keys, next_statistics, computed)
    else:
        x, facts = _run_fused(attention, None, block_tensors(attention, None), x, facts, rope, keys, True)
    if backend != "triton" or is_exporting():
        return run_mlp(mlp, x, backend), NOTHING
    return _run_fused(None, mlp, block_tensors(None, mlp), x, facts, None, None, next_statistics)


def _run_fused(
    attention: AttentionParts | None, mlp: MlpParts | None, tensors: BlockTensors, x: Tensor, facts: TokenFacts,
    rope: Rope | None, keys: Keys | None, next_statistics: bool, computed: Sequence[Tensor] = (),
) -> tuple[Tensor, TokenFacts]:  # fmt: skip
    """Runs one operator for the given halves. For a single half, also applies its drop path."""
    half: Any = (attention or mlp) if attention is None or mlp is None else None
    dropping = half is not None and half.drops_path()
    y, emitted, _ = fused_block(
        x if x.dim() == 3 else x[None], facts.statistics, tensors, rope=rope, keys=keys, residual=not dropping,
        next_statistics=next_statistics, **options_of(attention, mlp, x.device, computed),
    )  # fmt: skip
    y = y if x.dim() == 3 else y[0]
    if dropping:
        return x + half.drop_path(y), NOTHING
    return y, NOTHING if emitted is None else TokenFacts(emitted)


def run_attention(parts: AttentionParts, x: Tensor, backend: str, frozen: Any = None) -> Tensor:
    """Runs an attention half on [B, N, C] with the rotary embeddings of its parts, and cached weights or None."""
    x, parts, inside = _begun(parts, x)
    rope, keys = None if parts.rope is None else parts.rope.now(), keys_at(parts.cu_seqlens, x)
    by_kernels = resolve_backend(backend, x.device, x.dtype) == "triton" and not is_exporting()
    if by_kernels and (parts.norm.kind != "none" or type(frozen) is Frozen):
        tensors, computed, rotates = _tensors_for(parts, None, frozen, x, rope)
        if parts.norm.kind != "none" or tensors.qkv_sum is not None:  # the operator has no gradients without a norm
            options = options_of(parts, None, x.device, computed)
            y = fused_block(x, None, tensors, rope=rotates, keys=keys, residual=inside, **options)[0]
            return _ended(parts, x, y, inside)
    options = options_of(parts, None, x.device)
    normed = reference.normalize(x, parts.norm.now())
    qkv = F.linear(normed, *parts.qkv.tensors()).unflatten(-1, (3, parts.num_heads, -1))
    if parts.qk_norm is not None or rope is not None:
        qkv = qk_norm_rope(qkv, qk_norm=options["qk_norm"], rope=rope, backend=backend)
    mixed = attention_among(qkv, keys, scale=parts.scale, terms=options["terms"], backend=backend).flatten(2)
    weight, bias, layer_scale = parts.with_scale(parts.proj)
    y = F.linear(mixed, weight, bias)
    y = y if layer_scale is None else y * layer_scale
    return _ended(parts, x, x + y if inside else y, inside)


def run_mlp(parts: MlpParts, x: Tensor, backend: str, frozen: Any = None) -> Tensor:
    """Runs an MLP half, [..., C] -> [..., C], with cached weights or None."""
    x, parts, inside = _begun(parts, x)
    options = options_of(None, parts, x.device)
    if resolve_backend(backend, x.device, x.dtype) == "triton" and not is_exporting():
        y = fused_block(x, None, _tensors_for(None, parts, frozen, x, None)[0], residual=inside, **options)[0]
    else:
        options["eps"] = parts.norm.eps
        y = reference.layer_norm_mlp(x, block_tensors(None, parts), residual=inside, **options)
    return _ended(parts, x, y, inside)


def run_halves(
    attention: AttentionParts | None, mlp: MlpParts | None, x: Tensor, backend: str, frozen: Any = None
) -> Tensor:
    """Runs halves on [B, N, C], with cached weights or None."""
    y = x if attention is None else run_attention(attention, x, backend, frozen)
    if mlp is None:
        return y
    if mlp.residual == "attention":
        return y + run_mlp(mlp, x, backend, frozen)
    return run_mlp(mlp, y, backend, frozen)


def _begun(parts: Any, x: Tensor) -> tuple[Tensor, Any, bool]:
    """Returns the tokens to add, the half without a norm that is already applied, and True if the operator adds."""
    inside = parts.residual in ("tokens", "normed") and parts.branch_norm.kind == "none" and not parts.drops_path()
    if parts.residual == "normed":
        return reference.normalize(x, parts.norm.now()), replace(parts, norm=NO_NORM), inside
    return x, parts, inside


def _ended(parts: Half, x: Tensor, y: Tensor, inside: bool) -> Tensor:
    """Applies norms, drop path and residual to the branch y; the operator has added x if `inside`."""
    y = reference.normalize(y, parts.branch_norm.now())
    if parts.drops_path():
        y = parts.drop_path(y)
    y = x + y if parts.residual in ("tokens", "normed") and not inside else y
    return reference.normalize(y, parts.end_norm.now())


def _tensors_for(
    attention: AttentionParts | None, mlp: MlpParts | None, cached: Any, x: Tensor, rope: Rope | None
) -> tuple[BlockTensors, Sequence[Tensor], Rope | None]:
    """Returns the parameters, folded if possible, `computed` terms, and rotary embeddings in the same channel order."""
    frozen = cached if type(cached) is Frozen else None  # not Packed or FrozenFp8
    # folding reorders channels of q and k, but not the weights of their norms; only a call with `rope` supports this
    apart = attention is not None and rope is None and attention.qk_norm is not None and attention.rope_head
    if frozen is not None and frozen.dtype == matmul_dtype(x) and not apart:
        proj = None if attention is None else attention.with_scale(attention.proj)
        fc2 = None if mlp is None else mlp.with_scale(mlp.fc2)
        # read the weights only if gradients are possible, because this runs in every forward
        if not torch.is_grad_enabled() or not needs_gradient(
            x, *(proj or ()), *(fc2 or ()), *(tensor_of(*slot) for slot in frozen.slots)
        ):
            if frozen.rope_head and rope is not None:
                rope = interleave(rope, frozen.rope_head)
            return *frozen.block_tensors(proj, fc2), rope
    return block_tensors(attention, mlp), (), rope


def freeze_block(block: Any) -> list[str]:
    """Folds or packs the weights of a block, or updates the cached weights in place. Returns reasons if unsupported."""
    parts = parts_of(block)
    if reasons := _freeze_reasons(parts, block.vit_fast_backend):
        return reasons
    attention, mlp = parts.halves
    weight = tensor_of(*(attention.qkv if mlp is None else mlp.fc1).weights[0])
    folds = parts.fp8 is not None or block.vit_fast_backend == "triton"
    kind, dtype = (Frozen, matmul_dtype(weight)) if folds else (Packed, weight.dtype)
    if parts.fp8 is not None:
        parts.fp8.cached_of(parts)
    elif type(parts.frozen) is not kind or parts.frozen.dtype != dtype:
        parts.frozen = kind(attention, mlp, dtype, attention.rope_head if folds and attention is not None else 0)
        if kind is Packed and not block.gains_by_packing():
            parts.frozen = None
            return ["packed weights are not measurably faster on this CPU"]
        return []
    try:
        parts.frozen.refresh()
    except ReshapedError:  # CUDA graphs still read the old memory, and must be rebuilt
        parts.frozen = None
        return freeze_block(block)
    return []


def _freeze_reasons(parts: BlockParts, backend: str) -> list[str]:
    attention, mlp = parts.halves
    halves = (("attention", attention, parts.attention_reasons), ("norm + MLP", mlp, parts.mlp_reasons))
    why = [f"{name} runs as modules: {'; '.join(own)}" for name, half, own in halves if half is None and own]
    if why or (None in parts.halves and not parts.watch.owner.stands_alone):
        return why or ["fuse does not run the attention of this class as part of a block"]
    if runs_whole(parts, backend):
        return []
    reasons = [] if backend != "eager" else ["the backend must be 'triton' or 'sdpa', got 'eager'"]
    if attention is not None and attention.module.vit_fast_backend != backend:
        reasons.append(f"attention runs with backend {attention.module.vit_fast_backend}, norm + MLP with {backend}")
    elif backend == "triton" and not parts.watch.owner.stands_alone:
        reasons.append("with backend 'triton', it must be a pre-norm block with norms of one kind")
    if any(half is not None and half.drops() for half in parts.halves):
        reasons.append("dropout must be inactive: call eval() first")
    if parts.fp8 is not None:
        reasons.append("a block in FP8 must run on a GPU, or emulated")
    return reasons if backend == "triton" else reasons or packing_reasons(attention, mlp)


def run_as_block(
    block: Any, parts: BlockParts, x: Tensor, attend: Callable[[Tensor], Tensor], ordinary: bool = True,
    rope: Rope | None = None, keys: Keys | None = None,
) -> Tensor:  # fmt: skip
    """Runs a fused block on x [B, N, C] or [total, C]; `attend` computes x + attention(x) with the block's modules."""
    backend = block.vit_fast_backend
    if ordinary and backend == "sdpa" and (packed := packed_for(parts, x)) is not None:
        return run_packed([packed], x, rope, keys)
    by_modules = None if ordinary and runs_whole(parts, backend) else attend
    run = functools.partial(run_block, parts, x, rope=rope, keys=keys, backend=backend, attend=by_modules)
    if backend != "triton" or parts.attention is None or torch.compiler.is_compiling() or is_touched(block):
        return run()[0]
    facts = recall(x) if by_modules is None else NOTHING
    with VersionsCounted():
        if facts.maker is not None and parts.fp8 is not None and keys is None:
            facts.maker.reader = parts.fp8.reader(parts)  # in later calls, the previous block writes e4m3
        y, facts = run(facts=facts, reader=parts.reader, next_statistics=True)
    remember(y, facts)
    return y


def run_blocks(blocks: Sequence[nn.Module] | nn.Sequential, x: Tensor, *rope: Tensor) -> Tensor:
    """Runs blocks in order on [B, N, C] with the same rotary arguments, as modules if kernels cannot run all blocks."""
    if not torch.compiler.is_compiling() and (output := run_packed_blocks(blocks, x, *rope)) is not None:
        return output
    ready: list[Any] = []
    for block in blocks:
        touched = block._forward_hooks or is_touched(block)  # is_touched ignores output recorders
        ready.append(None if touched or not hasattr(block, "whole") else block.whole())  # type: ignore[operator]
        if ready[-1] is None:
            for each in blocks:
                x = each(x, *rope)
            return x
    tables = ready[0].attention.module.rope_of(*rope) if rope and ready else None
    facts = NOTHING
    for parts, following in zip_longest(ready, ready[1:]):
        reader = following.fp8.reader(following) if following is not None and following.fp8 is not None else None
        x, facts = run_block(parts, x, facts, rope=tables, reader=reader, next_statistics=True)
    return x


def run_packed_blocks(blocks: Iterable[Any], x: Tensor, *rope: Tensor, outputs: int | None = None) -> Tensor | None:
    """Runs blocks with packed linear layers; returns None if a block is not packed or does not support this call."""
    ready: list[Packed] = []
    for block in blocks:
        held: BlockParts | None = block.__dict__.get("vit_fast_parts")
        if held is None or type(held.frozen) is not Packed or block._forward_hooks or is_touched(block):
            return None
        packed = packed_for(parts_of(block), x) if block.vit_fast_backend == "sdpa" else None
        if packed is None:
            return None
        ready.append(packed)
    if not ready:
        return None
    tables = ready[0].attention.module.rope_of(*rope) if rope else None
    return run_packed(ready, x, tables, None, outputs)
