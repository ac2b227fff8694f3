"""Folded weights that are cached across calls and updated when their sources change.

Weights are folded again, into the same memory, if a source is replaced, moved, or written to in a way that torch
counts; and after a step of any torch optimizer, because the fused ones are not counted. Other writes (through `.data`,
by numpy, by collectives, by another library) are not detected, see `vit_fast.freeze`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .block import fold
from .block_op import KEPT
from .descriptions import BlockTensors

PLAIN = (nn.Parameter, Tensor, type(None))  # subclasses may override how they compute


class Frozen:
    """The folded linear layers of one block.

    Args:
        sources: Modules and attribute names of all parameters.
        block: Returns all parameters of the block.
        dtype: Dtype of the matmuls.
        norm: Kind of the norms.
        paired_head, inner_norm: See `fold`.
    Attributes:
        dtype, paired_head: The arguments.
        tensors: Folded weight, bias and row sums of qkv, of fc1, and of fc2 with an inner norm; then proj and fc2 if
            they had to be cast. These tensors are never replaced.
        folding: Set by the caller, to detect whether the block has changed since.
    """

    folding: Any = None

    def __init__(
        self,
        sources: Sequence[tuple[nn.Module, str]],
        block: Callable[[], BlockTensors],
        dtype: torch.dtype,
        norm: str = "layer_norm",
        paired_head: int = 0,
        inner_norm: str = "none",
    ) -> None:
        self.dtype, self.paired_head, self._norm, self._inner_norm = dtype, paired_head, norm, inner_norm
        self.tensors: list[Tensor] = []
        self._sources, self._block = sources, block
        self._lock = threading.Lock()
        self._made_of: list[_Source] = []
        self.refresh()
        _follow_optimizers()
        KEPT[self.tensors[0].data_ptr() if self.tensors else id(self)] = self

    def refresh(self) -> None:
        """Folds the current weights into the existing memory.

        Raises:
            RuntimeError: their shape or device changed.
        """
        # inference tensors cannot be written to outside inference mode
        with self._lock, torch.inference_mode(False), torch.no_grad():
            made_of = [_look(owner, name) for owner, name in self._sources]
            self.make()
            self._made_of = made_of if not self.tensors or _has_run(self.tensors[0]) else []

    def make(self) -> None:
        """Computes `tensors` from the current weights, in the existing memory.

        Raises:
            RuntimeError: their shape or device changed.
        """
        found = self._made()
        if not self.tensors:
            self.tensors = found
        elif any(new.shape != old.shape or new.device != old.device for new, old in zip(found, self.tensors)):
            raise RuntimeError(
                "frozen weights must keep their shape and device: call vit_fast.freeze again, and rebuild graph runners"
            )
        else:
            torch._foreach_copy_(self.tensors, found)

    def _made(self) -> list[Tensor]:
        block = self._block()
        t = fold(block, self.dtype, self._norm, self.paired_head, self._inner_norm)
        found: list[Any] = [t.qkv_weight, t.qkv_bias, t.qkv_sum, t.fc1_weight, t.fc1_bias, t.fc1_sum]
        found += [] if t.fc2_sum is None else [t.fc2_weight, t.fc2_bias, t.fc2_sum]
        if block.proj_weight.dtype != self.dtype or block.fc2_weight.dtype != self.dtype:
            found += [t.proj_weight, t.fc2_weight]
        return found

    def with_others(
        self, proj: tuple[Tensor, Tensor | None, Tensor | None], fc2: tuple[Tensor, Tensor | None, Tensor | None]
    ) -> BlockTensors:
        """Returns a block of the cached tensors, and the current weight, bias and LayerScale of proj and fc2."""
        qkv_weight, qkv_bias, qkv_sum, fc1_weight, fc1_bias, fc1_sum, *cast = self.tensors
        fc2_sum = None
        if self._inner_norm != "none":
            weight, bias, fc2_sum, *cast = cast
            fc2 = weight, bias, fc2[2]
        if cast:
            proj, fc2 = (cast[0], *proj[1:]), (cast[1], *fc2[1:])  # with an inner norm, fc2 stays the folded weight
        return BlockTensors(
            None, None, qkv_weight, qkv_bias, *proj, None, None, fc1_weight, fc1_bias, *fc2,
            qkv_sum=qkv_sum, fc1_sum=fc1_sum, fc2_sum=fc2_sum,
        )  # fmt: skip

    def ensure_current(self) -> None:
        """Calls `refresh` if the weights have changed."""
        for own, place, name, held, version, address, _ in self._made_of:
            now = own[name] if name in own else place.get(name, _GONE)
            if now is held:
                if held is None:
                    continue
                counts = -1 if held.is_inference() else held._version
                if counts == version and held.data_ptr() == address:
                    continue
            self.refresh()
            return
        if not self._made_of:
            self.refresh()

    @property
    def bytes(self) -> int:
        """Memory of the cached tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def forget(self, stepped: set[int] | None) -> None:
        """Forces a refresh before the next use if it depends on one of these tensors (ids); None means any tensor."""
        if stepped is None or any(id(held) in stepped for _, _, _, held, *_ in self._made_of):
            self._made_of = []


# A module's __dict__, the dictionary that holds the parameter, its name, and the tensor at the last refresh with its
# version, address and storage. The references keep other tensors from reusing the id or the address, for example if a
# parameter is converted to another dtype and back. Every forward checks this, so it bypasses nn.Module's slow
# __getattr__.
_Source = tuple[dict[str, Any], dict[str, Any], str, Tensor | None, int, int, torch.UntypedStorage | None]
_GONE = object()


def _look(owner: nn.Module, name: str) -> _Source:
    own: dict[str, Any] = owner.__dict__
    place: dict[str, Any] = next((each for each in (own, owner._parameters, owner._buffers) if name in each), {})
    tensor = place.get(name)
    if tensor is None:
        return own, place, name, None, 0, 0, None
    version = -1 if tensor.is_inference() else tensor._version
    return own, place, name, tensor, version, tensor.data_ptr(), tensor.untyped_storage()


def _has_run(tensor: Tensor) -> bool:
    """Waits until a tensor is written, since other streams read it without waiting; returns False during a capture."""
    if not tensor.is_cuda:
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.current_stream(tensor.device).synchronize()
    return True


@functools.cache
def _follow_optimizers() -> None:
    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # FSDP steps its shards and gathers them without increasing the version counter
        stepped = {id(p) for p in parameters} if all(type(p) in PLAIN for p in parameters) else None
        for frozen in list(KEPT.values()):
            frozen.forget(stepped)

    register_optimizer_step_post_hook(stepped)
