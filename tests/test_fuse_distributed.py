"""Fused models trained by two processes, under DDP and FSDP2, compared with an unfused model on one process."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_models import LIBRARIES, SUBJECTS, Subject, assert_same_results, gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import vit_fast
from vit_fast.blocks.fused import FusedNormMlp

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_processes_train_as_one_does() -> None:
    for library in ("timm", "transformers", "torchvision"):
        pytest.importorskip(library)
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launch], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def train() -> None:
    """Compares the gradients of every library's model with those of one process; runs in both processes."""
    import torchvision_cpu

    torchvision_cpu.install_import_hook()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in LIBRARIES:
        subject = SUBJECTS[name]
        original, inputs = subject.build(), subject.inputs()
        ((argument, pixels),) = inputs.items()
        share = {argument: pixels[dist.get_rank()][None]}
        _, expected = gradients(subject, original, inputs)
        for sharded in (False, True):
            model = copy.deepcopy(original)
            vit_fast.fuse(model, backend="sdpa").require_all()
            check(subject, model, share, expected, mesh if sharded else None)
    del model
    # models and the mesh refer to the process group, whose threads must not outlive the interpreter
    group = weakref.ref(dist.group.WORLD)
    gc.collect()
    mesh._pg_registry.clear()
    dist.destroy_process_group()
    assert group() is None, "the threads of the process group must end"


def check(subject: Subject, model: nn.Module, share: Any, expected: dict[str, Tensor], mesh: DeviceMesh | None) -> None:
    """Compares gradients under DDP, or with a mesh under FSDP2."""
    if mesh is None:
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        for block in list(model.modules()):
            if isinstance(block, FusedNormMlp):
                fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    subject.run(wrapped, share).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    # both average gradients over processes, but the loss is a sum
    found = {name: 2 * (grad.full_tensor() if hasattr(grad, "full_tensor") else grad) for name, grad in grads.items()}
    assert_same_results((torch.zeros(()), found), (torch.zeros(()), expected))
    if mesh is not None:
        subject.run(model, share)  # gathers, runs and frees once more
        assert vit_fast.fuse(model, backend="sdpa").skipped == ()
        with pytest.raises(vit_fast.UnsupportedInputError, match="FSDP"):
            vit_fast.unfuse(model)


if __name__ == "__main__":
    train()
