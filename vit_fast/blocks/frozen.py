"""Cached folded weights, which are recomputed in the same memory when the parameters change.

A change is detected if a parameter is replaced or moved, or if its version counter increments. Fused optimizers do not
increment the counter, so a step of a torch optimizer also counts as a change. For other writes, see `vit_fast.freeze`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ops.descriptions import BlockTensors
from ..ops.folded import fold
from ..ops.registration import CACHED
from .parts import NO_NORM, block_tensors, sources
from .plain import PLAIN

Weights = tuple[Any, Tensor | None, Tensor | None]  # weight, bias and LayerScale of a linear layer
_NO_WEIGHTS, _ABSENT = (None, None, None), BlockTensors()


class ReshapedError(RuntimeError):
    """Cached weights cannot be updated in the same memory."""


class Frozen:
    """The folded linear layers of a block or half for matmuls of one dtype; `fold` in `ops/folded.py` uses rope_head.

    `layers` contains weight, bias and row sums of qkv, of fc1, and of fc2 if a norm precedes fc2. It also contains the
    weights of proj and fc2 if their dtype was converted. `tensors` contains the tensors of `layers`, then the terms of
    the scores that are computed from other tensors.
    """

    marked_static = False  # True if the tensors are marked with mark_static_address
    layers: Any = None
    in_place: Collection[int] = ()  # ids of tensors that are read in each call, so that changes in place have an effect

    # an AttentionParts and an MlpParts, or one of them and None; only `FrozenFp8` needs both
    def __init__(self, attention: Any, mlp: Any, dtype: torch.dtype, rope_head: int) -> None:
        self.attention, self.mlp, self.dtype, self.rope_head = attention, mlp, dtype, rope_head
        self.slots = sources(attention, mlp)
        self.tensors: list[Tensor] = []
        self._lock = threading.Lock()
        self._snapshots: list[_Snapshot] = []
        self.refresh()
        _follow_optimizers()
        firsts = () if self.layers is None else (self.layers.qkv_weight, self.layers.fc1_weight)  # halves may run apart
        for key in [tensor.data_ptr() for tensor in firsts if tensor is not None] or [id(self)]:
            CACHED[key] = self

    def refresh(self) -> None:
        """Recomputes the cached tensors in the same memory; raises ReshapedError if a shape or device changed."""
        # inference tensors cannot be updated in place outside of inference mode
        with self._lock, torch.inference_mode(False), torch.no_grad():
            snapshots = [_snapshot(owner, name) for owner, name in self.slots]
            self._recompute()
            if self.tensors and self.tensors[0].is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    snapshots = []
                else:  # wait until the GPU has written the tensors, because other streams read them
                    torch.cuda.current_stream(self.tensors[0].device).synchronize()
            self._snapshots = [
                (*each[:4], IN_PLACE, *each[5:]) if id(each[3]) in self.in_place else each for each in snapshots
            ]

    def _recompute(self) -> None:
        computed = self._computed()
        if not self.tensors:
            self.tensors = computed
        elif [(each.shape, each.device) for each in computed] != [(each.shape, each.device) for each in self.tensors]:
            advice = "call vit_fast.freeze(model) again, then rebuild any GraphRunner of the model"
            raise ReshapedError(f"the shape or device of a frozen model's weights changed: {advice}")
        else:
            torch._foreach_copy_(self.tensors, computed)

    def _computed(self) -> list[Tensor]:
        kept: dict[str, Tensor] = {}
        for halves in ((self.attention, None), (None, self.mlp)):
            half: Any = halves[0] or halves[1]
            if half is None:
                continue
            if half.residual == "normed":  # then the norm is not folded, because its output is added too
                half = replace(half, norm=NO_NORM)
            block = block_tensors(*(each and half for each in halves))
            inner = "none" if halves[1] is None or half.inner_norm is None else half.inner_norm.kind
            folded = fold(block, self.dtype, half.norm.kind, self.rope_head, inner)._asdict()
            for name in ("qkv", "fc1", "fc2"):
                if folded[f"{name}_sum"] is not None:
                    kept |= {key: folded[key] for key in (f"{name}_weight", f"{name}_bias", f"{name}_sum")}
            last = block.proj_weight if halves[1] is None else block.fc2_weight
            if last.dtype != self.dtype:
                name = "fc2_weight" if halves[0] is None else "proj_weight"
                kept[name] = folded[name]
        layers = BlockTensors(**kept)
        if self.layers is None:
            self.layers = layers
        terms = None if self.attention is None else self.attention.terms
        computed = [] if terms is None else [terms.term(name).contiguous() for name in terms.derived]
        return [tensor for tensor in layers if tensor is not None] + computed

    def block_tensors(self, proj: Weights | None, fc2: Weights | None) -> tuple[BlockTensors, list[Tensor]]:
        """Returns the folded parameters, and the computed terms of the scores, see `TermParts.now`.

        Leaves out a half whose last linear layer is None.
        """
        first, second = (_ABSENT if last is None else self.layers for last in (proj, fc2))
        proj, fc2, terms = proj or _NO_WEIGHTS, fc2 or _NO_WEIGHTS, self.attention and self.attention.terms
        tensors = BlockTensors(
            None, None, first.qkv_weight, first.qkv_bias,
            proj[0] if first.proj_weight is None else first.proj_weight, *proj[1:],
            None, None, second.fc1_weight, second.fc1_bias,
            fc2[0] if second.fc2_weight is None else second.fc2_weight,
            fc2[1] if second.fc2_sum is None else second.fc2_bias, fc2[2],
            qkv_sum=first.qkv_sum, fc1_sum=second.fc1_sum, fc2_sum=second.fc2_sum,
        )  # fmt: skip
        return tensors, [] if terms is None else self.tensors[len(self.tensors) - len(terms.derived) :]

    def ensure_current(self) -> None:
        """Refreshes the tensors if a change of the weights is detected."""
        for own, place, name, held, version, address, _ in self._snapshots:
            now = own[name] if name in own else place.get(name, _GONE)
            if now is held:
                if held is None or version == IN_PLACE:
                    continue
                if (version == INFERENCE or held._version == version) and held.data_ptr() == address:
                    continue
            self.refresh()
            return
        if not self._snapshots:
            self.refresh()

    def invalidate(self, stepped: set[int] | None) -> None:
        """Marks the tensors as outdated if the id of a source is in `stepped`, or if `stepped` is None."""
        if stepped is None or any(id(held) in stepped for _, _, _, held, *_ in self._snapshots):
            self._snapshots = []


# A module's __dict__, the dictionary that contains the tensor, then name, tensor, version, address and storage. The
# references to tensor and storage prevent another tensor from getting the same id or address.
_Snapshot = tuple[dict[str, Any], dict[str, Any], str, Tensor | None, int, int, torch.UntypedStorage | None]
_GONE = object()
INFERENCE, IN_PLACE = -1, -2  # instead of a version: an inference tensor has none, and changes in place have an effect


def _snapshot(owner: nn.Module, name: str) -> _Snapshot:
    own: dict[str, Any] = owner.__dict__
    place: dict[str, Any] = next((each for each in (own, owner._parameters, owner._buffers) if name in each), {})
    tensor = place.get(name)
    if tensor is None:
        return own, place, name, None, 0, 0, None
    version = INFERENCE if tensor.is_inference() else tensor._version
    return own, place, name, tensor, version, tensor.data_ptr(), tensor.untyped_storage()


@functools.cache
def _follow_optimizers() -> None:
    def invalidate(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # with FSDP, a step updates shards, and gathering the weights does not increment version counters
        stepped = {id(p) for p in parameters} if all(type(p) in PLAIN for p in parameters) else None
        for frozen in list(CACHED.values()):
            frozen.invalidate(stepped)

    register_optimizer_step_post_hook(invalidate)
