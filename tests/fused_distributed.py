"""Code of each of the two processes of test_fuse_distributed.py: fused models under DDP and FSDP2, over gloo."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from fused_models import LIBRARIES, SUBJECTS, Subject, assert_same_results, gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchvision_cpu
import vit_fast
from vit_fast.blocks.fused import FusedNormMlp


def main() -> None:
    """Trains one step of every library's model on two processes, against the same step on one, unfused."""
    torchvision_cpu.install_import_hook()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in LIBRARIES.values():
        subject = SUBJECTS[name]
        original, inputs = subject.build(), subject.inputs()
        ((argument, pixels),) = inputs.items()
        share = {argument: pixels[dist.get_rank()][None]}
        _, expected = gradients(subject, original, inputs)
        for check in (check_ddp, check_fsdp2):
            model = copy.deepcopy(original)
            vit_fast.fuse(model, backend="sdpa").require_all()
            check(subject, model, share, expected, mesh)
    del model
    # models and the mesh refer to the process group, whose threads must not outlive the interpreter
    group = weakref.ref(dist.group.WORLD)
    gc.collect()
    mesh._pg_registry.clear()
    dist.destroy_process_group()
    assert group() is None, "its threads run on"


def check_ddp(subject: Subject, model: nn.Module, share: dict, expected: dict, mesh: DeviceMesh) -> None:
    wrapped = DistributedDataParallel(model)
    subject.run(wrapped, share).square().sum().backward()
    compare(model, expected)


def check_fsdp2(subject: Subject, model: nn.Module, share: dict, expected: dict, mesh: DeviceMesh) -> None:
    for block in list(model.modules()):
        if isinstance(block, FusedNormMlp):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    subject.run(model, share).square().sum().backward()
    compare(model, expected)
    subject.run(model, share)  # gathers, runs and frees once more
    assert vit_fast.fuse(model, backend="sdpa").skipped == ()
    with pytest.raises(vit_fast.UnsupportedInputError, match="FSDP"):
        vit_fast.unfuse(model)


def compare(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Both wrappers average gradients over processes; the loss is a sum, so the sum is twice that."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = {name: 2 * (grad.full_tensor() if hasattr(grad, "full_tensor") else grad) for name, grad in found.items()}
    assert_same_results((torch.zeros(()), found), (torch.zeros(()), expected))


if __name__ == "__main__":
    main()
