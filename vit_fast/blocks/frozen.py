"""Cached folded weights, which are recomputed in the same memory when the parameters change.

A change is detected if a parameter is replaced or moved, or if its version counter increments. Fused optimizers do not
increment the counter, so a step of a torch optimizer also counts as a change. For other writes, see `vit_fast.freeze`.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ops.descriptions import BlockTensors
from ..ops.folded import fold
from ..ops.registration import CACHED
from .parts import block_tensors, sources
from .plain import PLAIN

Weights = tuple[Tensor, Tensor | None, Tensor | None]  # weight, bias and LayerScale of a linear layer


class ReshapedError(RuntimeError):
    """Cached weights cannot be updated in the same memory."""


class Frozen:
    """The folded linear layers of one block, for matmuls of one dtype; see `fold` in `ops/folded.py` for rope_head.

    `tensors` contains weight, bias and row sums of qkv, of fc1, and of fc2 if a norm precedes fc2. The weights of proj
    and fc2 follow if their dtype was converted, and the terms of the scores that are computed from other tensors.
    """

    every_source = False  # see `sources`
    marked_static = False  # True if the tensors are marked with mark_static_address

    # only `Packed` supports a single half, an AttentionParts or MlpParts beside None
    def __init__(self, attention: Any, mlp: Any, dtype: torch.dtype, rope_head: int) -> None:
        self.attention, self.mlp, self.dtype, self.rope_head = attention, mlp, dtype, rope_head
        self._sources = sources(attention, mlp, self.every_source)
        self.tensors: list[Tensor] = []
        self._lock = threading.Lock()
        self._snapshots: list[_Snapshot] = []
        self.refresh()
        _follow_optimizers()
        CACHED[self.tensors[0].data_ptr() if self.tensors else id(self)] = self

    def refresh(self) -> None:
        """Recomputes the cached tensors in the same memory; raises ReshapedError if a shape or device changed."""
        # inference tensors cannot be updated in place outside of inference mode
        with self._lock, torch.inference_mode(False), torch.no_grad():
            snapshots = [_snapshot(owner, name) for owner, name in self._sources]
            self._recompute()
            if self.tensors and self.tensors[0].is_cuda:
                if torch.cuda.is_current_stream_capturing():
                    snapshots = []
                else:  # wait until the GPU has written the tensors, because other streams read them
                    torch.cuda.current_stream(self.tensors[0].device).synchronize()
            self._snapshots = snapshots

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
        block, inner = block_tensors(self.attention, self.mlp), self.mlp.inner_norm
        t = fold(block, self.dtype, self.mlp.norm.kind, self.rope_head, "none" if inner is None else inner.kind)
        tensors: list[Any] = [t.qkv_weight, t.qkv_bias, t.qkv_sum, t.fc1_weight, t.fc1_bias, t.fc1_sum]
        tensors += [] if t.fc2_sum is None else [t.fc2_weight, t.fc2_bias, t.fc2_sum]
        if block.proj_weight.dtype != self.dtype or block.fc2_weight.dtype != self.dtype:
            tensors += [t.proj_weight, t.fc2_weight]
        terms = self.attention.terms
        return tensors + ([] if terms is None else [terms.term(name).contiguous() for name in terms.derived])

    def block_tensors(self, proj: Weights, fc2: Weights) -> tuple[BlockTensors, list[Tensor]]:
        """Returns the folded parameters, and the computed terms of the scores, see `TermParts.now`."""
        qkv_weight, qkv_bias, qkv_sum, fc1_weight, fc1_bias, fc1_sum, *cast = self.tensors
        terms, fc2_sum = self.attention.terms, None
        computed = [cast.pop() for _ in terms.derived][::-1] if terms is not None else []
        if self.mlp.inner_norm is not None:
            weight, bias, fc2_sum, *cast = cast
            fc2 = weight, bias, fc2[2]
        if cast:
            proj, fc2 = (cast[0], *proj[1:]), (cast[1], *fc2[1:])  # if a norm precedes fc2, cast[1] is folded
        folded = BlockTensors(
            None, None, qkv_weight, qkv_bias, *proj, None, None, fc1_weight, fc1_bias, *fc2,
            qkv_sum=qkv_sum, fc1_sum=fc1_sum, fc2_sum=fc2_sum,
        )  # fmt: skip
        return folded, computed

    def ensure_current(self) -> None:
        """Refreshes the tensors if a change of the weights is detected."""
        for own, place, name, held, version, address, _ in self._snapshots:
            now = own[name] if name in own else place.get(name, _GONE)
            if now is held:
                if held is None:
                    continue
                if (version < 0 or held._version == version) and held.data_ptr() == address:
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


def _snapshot(owner: nn.Module, name: str) -> _Snapshot:
    own: dict[str, Any] = owner.__dict__
    place: dict[str, Any] = next((each for each in (own, owner._parameters, owner._buffers) if name in each), {})
    tensor = place.get(name)
    if tensor is None:
        return own, place, name, None, 0, 0, None
    version = -1 if tensor.is_inference() else tensor._version
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
