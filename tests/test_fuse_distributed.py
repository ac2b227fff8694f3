"""Fused models trained by two processes, under DDP and FSDP2, compared with an unfused model on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_processes_train_as_one_does() -> None:
    """Trains a model of each library under DDP and FSDP2, with gloo."""
    for library in ("timm", "transformers", "torchvision"):
        pytest.importorskip(library)
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(HERE / "fused_distributed.py"),
        ],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.gpu
def test_a_second_device_has_its_own_backend() -> None:
    from fused_models import SUBJECTS

    import vit_fast

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    subject = SUBJECTS["timm-vit"]
    model, inputs = subject.build().eval(), subject.inputs()
    vit_fast.fuse(model)
    expected = subject.run(model, inputs)
    for device in ("cuda:0", "cuda:1"):
        model.to(device)
        moved = {name: tensor.to(device) for name, tensor in inputs.items()}
        torch.testing.assert_close(subject.run(model, moved).cpu(), expected, rtol=1e-2, atol=1e-2)
