"""Training by several processes of torchrun, with DistributedDataParallel or fully_shard."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..model import Block

Strategy = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Processes:
    """The processes that train together, seen from this one; `mesh` are the processes, if there are several.

    With the strategy "ddp" each has all parameters, with "fsdp" parameters are sharded (FSDP2).
    """

    rank: int = 0
    world: int = 1
    strategy: Strategy = "ddp"
    mesh: DeviceMesh | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Returns the module to call instead of the model."""
        if self.world == 1:
            return model
        if self.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        for module in list(model.modules()):
            if isinstance(module, Block):
                fully_shard(module, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    @contextlib.contextmanager
    def synchronising(self, forward: Any, *, last: bool) -> Iterator[None]:
        """Exchanges gradients only for the last part of a batch."""
        if self.world == 1:
            yield
        elif self.strategy == "ddp":
            with contextlib.nullcontext() if last else forward.no_sync():
                yield
        else:
            forward.set_requires_gradient_sync(last)
            yield

    def sum(self, values: Tensor) -> Tensor:
        """Sums over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Waits for all other processes."""
        if self.world > 1:
            dist.barrier()


ALONE = Processes()


@contextlib.contextmanager
def joined(strategy: str) -> Iterator[Processes]:
    """Joins the processes that torchrun started; no model of theirs may outlive the block.

    Raises:
        ValueError: the strategy is unknown.
    """
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"--parallel must be ddp or fsdp, got {strategy}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world,))
    try:
        yield Processes(dist.get_rank(), world, strategy, mesh)  # type: ignore[arg-type]  # checked above
    finally:
        # The group's threads end with the last reference to it, and crash the process if they outlive the interpreter.
        # Models refer to it in cycles, and so does the mesh, which DTensor caches.
        gc.collect()
        getattr(mesh, "_pg_registry", {}).clear()
        dist.destroy_process_group()
