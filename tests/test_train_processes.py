"""Training by two processes under torchrun, with the kernels inside, against one process that takes the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit_fast import create_model, load
from vit_fast.apps.datasets import open_data
from vit_fast.apps.training import TrainConfig, train

HERE = Path(__file__).parent
OPTIONS = {"epochs": 2, "batch_size": 4, "warmup_epochs": 0.0, "augment": False, "ema_decay": 0.5, "accumulation": 2}


def _images(path: Path, count: int) -> Path:
    rng = np.random.default_rng(count)
    for i in range(count):
        (path / "ab"[i % 2]).mkdir(exist_ok=True, parents=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path / "ab"[i % 2] / f"{i}.png")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "backend"),
    [("ddp", "sdpa"), ("ddp", "triton"), ("fsdp", "triton")],
)
def test_two_processes_train_as_one_does(tmp_path: Path, parallel: str, backend: str) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    images, held_out = _images(tmp_path / "images", 8), _images(tmp_path / "held out", 3)  # one has an image less
    given = [f"--set={name}={json.dumps(value)}" for name, value in OPTIONS.items()]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "vit_fast.cli",
            "train", str(images), "--validation", str(held_out), "--out", str(together), "--model", "vit_test",
            "--img-size", "16", *given, "--parallel", parallel, "--backend", backend,
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("epoch 2/2") == 1, "the first process alone speaks"

    torch.manual_seed(0)
    model = create_model("vit_test", img_size=16, num_classes=2, backend="eager")
    data, config = open_data(images, held_out), TrainConfig(**OPTIONS)
    rows = train(model, data, alone, config)
    found = [json.loads(line) for line in (together / "log.jsonl").read_text().splitlines()]
    for row, expected in zip(found, rows, strict=True):
        assert row["accuracy"] == expected["accuracy"], "all three count, each once"
        assert row["lr"] == expected["lr"]
        for name in ("loss", "held_out_loss"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name
    resumed = create_model("vit_test", img_size=16, num_classes=2, backend="eager")
    assert train(resumed, data, together, config, resume=True) == found, "one process takes over"
    for (name, kept), mine in zip(load(together / "model.safetensors").named_parameters(), resumed.parameters()):
        assert torch.equal(kept, mine), name
