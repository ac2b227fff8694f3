"""Fused models trained by two processes, under DDP and FSDP2, against the same step on one process, unfused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_models import LIBRARIES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two processes left what they found."""
    for library in ("timm", "transformers", "torchvision"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("distributed")
    start = "import runpy, torchvision_cpu; torchvision_cpu.install_import_hook(); "
    run = start + "runpy.run_module('fused_distributed', run_name='__main__')"
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", run, str(rank), str(folder)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_ddp", "check_fsdp2"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_processes_train_as_one_does(findings: Path, library: str, check: str) -> None:
    for rank in range(2):
        assert (findings / f"{library}.{check}.{rank}").read_text() == ""


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
