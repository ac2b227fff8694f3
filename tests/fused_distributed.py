"""Code of each of the two processes of test_fuse_distributed.py: fused models under DDP and FSDP2, over gloo."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
import torch.distributed as dist
from fused_models import LIBRARIES, SUBJECTS, gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchvision_cpu
import vit_fast
from vit_fast.blocks.fused import FusedNormMlp


def main() -> None:
    """Trains one step of every library's model on two processes, against the same step on one, unfused."""
    torchvision_cpu.install_import_hook()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for library, name in LIBRARIES.items():
        subject = SUBJECTS[name]
        original, inputs = subject.build(), subject.inputs()
        ((argument, pixels),) = inputs.items()
        share = {argument: pixels[dist.get_rank()][None]}
        _, expected = gradients(subject, original, inputs)
        for check in (check_ddp, check_fsdp2):
            model = copy.deepcopy(original)
            vit_fast.fuse(model, backend="sdpa").require_all()
            check(library, model, share, expected, mesh)
    del model
    end(mesh)


def end(mesh: DeviceMesh) -> None:
    """Destroys the process group together with its threads, which must not outlive the interpreter.

    destroy_process_group drops its own reference alone: models refer to the group in cycles, and so does the mesh.
    """
    group = weakref.ref(dist.group.WORLD)
    gc.collect()
    mesh._pg_registry.clear()
    dist.destroy_process_group()
    assert group() is None, "its threads run on"


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
    main()
