"""The processes that train one model together: torchrun's, by torch's own DistributedDataParallel or fully_shard."""

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
    """This process among those that train together.

    Attributes:
        rank: Its number.
        world: How many there are.
        strategy: "ddp": each has all parameters; "fsdp": each has a share of every one (FSDP2).
        mesh: All of them, where there are several.
    """

    rank: int = 0
    world: int = 1
    strategy: Strategy = "ddp"
    mesh: DeviceMesh | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """What is called in place of the model."""
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
        """Gradients are exchanged by a batch's last part alone."""
        if self.world == 1:
            yield
        elif self.strategy == "ddp":
            with contextlib.nullcontext() if last else forward.no_sync():
                yield
        else:
            forward.set_requires_gradient_sync(last)
            yield

    def sum(self, values: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """For all the others to come here."""
        if self.world > 1:
            dist.barrier()


ALONE = Processes()


@contextlib.contextmanager
def joined(strategy: str) -> Iterator[Processes]:
    """The processes that torchrun started, this one alone without it; no model of theirs may outlive the block.

    Raises:
        ValueError: the strategy is unknown.
    """
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"--parallel {strategy}: accepted are 'ddp', 'fsdp'")
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
        # The group's threads end with the last reference to it; one that outlives the interpreter ends the process.
        # Models refer to it in cycles, and so does the mesh, which DTensor's caches keep.
        gc.collect()
        getattr(mesh, "_pg_registry", {}).clear()
        dist.destroy_process_group()
