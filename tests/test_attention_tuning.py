"""Tuning chooses the fastest configuration with correct output, and the policy then uses the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_support import DEVICE, HAS_GPU

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.cli import main
from vit_fast.kernels.attention import attention_policy
from vit_fast.kernels.attention.attention_policy import ForwardConfig
from vit_fast.kernels.inspect import attention_tuning
from vit_fast.kernels.launch import Launch

SHAPE = (1, 33, 1, 16)
FAST = ForwardConfig("looped", 64, 64, num_stages=2, tma=True)


def test_the_fastest_correct_configuration_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 48 queries does not compile; an empty grid writes nothing."""
    task = next(attention_tuning.tasks(*SHAPE, device=DEVICE))
    tried = [task.by_rule, FAST, ForwardConfig("looped", 48, 64)]
    monkeypatch.setattr(attention_tuning, "candidates", lambda task: iter(tried))

    def measure(launch: Launch) -> float:
        return 0.5 if launch.constants.get("BLOCK_N") == FAST.block_n else 1.0

    def launch_wrong(config: ForwardConfig) -> Launch:
        launch = task.launch(config)
        return launch if config == task.by_rule else replace(launch, grid=(0,))

    assert attention_tuning.fastest(task, measure) == (FAST, 0.5)
    assert attention_tuning.fastest(replace(task, launch=launch_wrong), measure)[0] == task.by_rule


def test_the_policy_uses_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"note": "", "architectures": {}}))
    task = next(attention_tuning.tasks(*SHAPE, device=DEVICE))
    attention_tuning.write_entry(path, task.problem, "forward", FAST)
    monkeypatch.setattr(attention_policy, "TABLE_PATH", path)
    attention_policy._table.cache_clear()
    try:
        found = attention_policy.forward_config(task.problem)
        assert replace(found, dependent=False) == FAST
    finally:
        attention_policy._table.cache_clear()


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_tuning_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["kernels", "--tune"])
    assert caught.value.code == 2 and "GPU" in capsys.readouterr().err
