"""Code of each of the two processes of test_fuse_distributed.py: fused models under DDP and FSDP2, over gloo."""

from __future__ import annotations

import copy
import gc
import sys
import traceback
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from fused_models import LIBRARIES, SUBJECTS, gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import vit_fast
from vit_fast.blocks.fused import FusedNormMlp


def run(rank: int, world: int, folder: Path) -> None:
    """Trains one step of every library's model, sharded over processes, against the same step on one, unfused.

    What a check found wrong is left in folder, in a file named after it; an empty file says that it passed.
    """
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder / 'rendezvous'}")
    mesh = init_device_mesh("cpu", (world,))
    for library, name in LIBRARIES.items():
        subject = SUBJECTS[name]
        original, inputs = subject.build(), subject.inputs()
        ((argument, pictures),) = inputs.items()
        _, expected = gradients(subject, original, inputs)
        for check in (check_ddp, check_fsdp2):
            model = copy.deepcopy(original)
            vit_fast.fuse(model, backend="sdpa").require_all()
            try:
                check(library, model, {argument: pictures[rank : rank + 1]}, expected, mesh)
                problem = ""
            except AssertionError:
                problem = traceback.format_exc()
            (folder / f"{library}.{check.__name__}.{rank}").write_text(problem)
    del model
    end(mesh)


def end(mesh: DeviceMesh) -> None:
    """Destroys the process group together with its threads, once no model of it is left.

    destroy_process_group only drops its own reference: the threads are joined when the last one goes. Models refer to
    the group, in cycles, and so does the mesh, which the caches of DTensor keep until the interpreter ends. A thread
    that outlives the group and is late in freeing the tensors of its last collective asks for the interpreter's lock
    while the interpreter shuts down; Python then unwinds that thread through C++ that must not throw, and the process
    ends with "terminate called without an active exception".

    Raises:
        RuntimeError: Something still refers to the group.
    """
    group = weakref.ref(dist.group.WORLD)
    gc.collect()
    mesh._pg_registry.clear()
    dist.destroy_process_group()
    if group() is not None:
        raise RuntimeError("the process group is still referred to, so its threads run on")


def check_ddp(library: str, model: nn.Module, share: dict, expected: dict, mesh: DeviceMesh) -> None:
    subject = SUBJECTS[LIBRARIES[library]]
    wrapped = DistributedDataParallel(model)
    subject.run(wrapped, share).square().sum().backward()
    compare(model, expected)


def check_fsdp2(library: str, model: nn.Module, share: dict, expected: dict, mesh: DeviceMesh) -> None:
    subject = SUBJECTS[LIBRARIES[library]]
    for block in list(model.modules()):
        if isinstance(block, FusedNormMlp):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    subject.run(model, share).square().sum().backward()
    compare(model, expected)
    subject.run(model, share)  # gathers, runs and frees once more
    assert vit_fast.fuse(model, backend="sdpa").skipped == ()
    try:
        vit_fast.unfuse(model)
    except vit_fast.UnsupportedInputError as error:
        assert "FSDP" in str(error)
    else:
        raise AssertionError("unfuse below fully_shard was not refused")


def compare(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Both wrappers average gradients over processes; the loss is a sum, so the sum is twice that."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = 2 * (grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in found.items():  # the gradient of a key's bias is zero but for rounding: no tolerance of its own
        bound = 1e-4 * expected[name].abs().max().item() + 1e-6 * largest
        torch.testing.assert_close(
            grad, expected[name], rtol=1e-4, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


if __name__ == "__main__":
    run(int(sys.argv[1]), 2, Path(sys.argv[2]))
