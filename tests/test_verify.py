"""`vit-fast verify`: passes on this machine, and fails if an output is incorrect."""

from __future__ import annotations

import json

import kernel_support  # sets the interpreter up, as every kernel test does
import pytest
import torch
from command_line import run

from vit_fast import ops
from vit_fast.apps import verify


def test_triton_passes_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["interpreted"] is (kernel_support.DEVICE.type == "cpu")
    assert {row["dtype"] for row in result["rows"]} >= {"fp16"}
    cases = {row["case"].split()[0] for row in result["rows"]}
    assert cases >= {"attention", "attention_qkvpacked", "layer_norm_mlp", "VisionTransformer,"}
    assert all(row["passed"] for row in result["rows"])


@pytest.mark.parametrize("wrong", [1.01, float("nan"), None])
def test_an_incorrect_operator_fails(wrong: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, cases = ops.attention, verify._cases

    def broken(*args: torch.Tensor, backend: str) -> torch.Tensor:
        if backend != "eager" and wrong is None:
            raise RuntimeError("out of order")
        return attention(*args, backend=backend) * (1 if backend == "eager" else wrong)

    monkeypatch.setattr(verify, "_cases", lambda device, small: cases(device, True))
    monkeypatch.setattr(ops, "attention", broken)
    result = verify.verify(["sdpa"], "cpu")
    failed = [row for row in result["rows"] if not row["passed"]]
    assert {row["case"].split()[0] for row in failed} == {"attention"}
    assert all((wrong is None) == ("out of order" in str(row["problem"])) for row in failed)


@pytest.mark.parametrize(
    ("backends", "device", "message"),
    [([], "cpu", "backends must contain at least one"), (["sdpa"], "tpu", "device must be"), (["x"], "cpu", "backend")],
)
def test_invalid_arguments(backends: list[str], device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify.verify(backends, device)
