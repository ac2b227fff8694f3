"""Distributed training under torchrun, with DistributedDataParallel or fully_shard."""

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
    """Rank, world size, strategy and device mesh of this process; mesh is None in a single process.

    "ddp" replicates the parameters, "fsdp" shards them (FSDP2).
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
    def synchronizing(self, forward: Any, *, last: bool) -> Iterator[None]:
        """Synchronizes gradients only in the backward pass of the last part of a batch."""
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
    """Initializes the process group under torchrun. Free all wrapped models before the context ends.

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
        # The threads of the process group stop when its last reference is freed. If they still run when the
        # interpreter exits, the process crashes. Models and the mesh (cached by DTensor) refer to the group in cycles.
        gc.collect()
        getattr(mesh, "_pg_registry", {}).clear()
        dist.destroy_process_group()
