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
    assert {row["dtype"] for row in result["rows"]} >= {"fp32", "fp16"}
    cases = {row["case"].split()[0] for row in result["rows"]}
    assert all(row["subject"] == row["case"] for row in result["rows"]), "former name"
    assert cases >= {"attention", "attention_qkvpacked", "layer_norm_mlp", "VisionTransformer,"}
    assert all(row["passed"] for row in result["rows"])


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = verify._operators
    monkeypatch.setattr(verify, "_operators", lambda device, small: operators(device, True))


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_operator_fails(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.attention
    factors = {"eager": 1, "sdpa": wrong}
    monkeypatch.setattr(ops, "attention", lambda *args, backend: right(*args, backend=backend) * factors[backend])
    result = verify.verify(["sdpa"], "cpu")
    failed = {row.case.split()[0] for row in result.rows if not row.passed}
    assert not result.passed and failed == {"attention"}


@pytest.mark.usefixtures("small_shapes")
def test_an_operator_that_raises_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.layer_norm_mlp

    def broken(*args: torch.Tensor, backend: str) -> torch.Tensor:
        if backend != "eager":
            raise RuntimeError("out of order")
        return right(*args, backend=backend)

    monkeypatch.setattr(ops, "layer_norm_mlp", broken)
    result = verify.verify(["sdpa"], "cpu")
    problems = [row.problem for row in result.rows if not row.passed]
    assert problems and all("out of order" in str(problem) for problem in problems)


def test_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--backend", "cuda") == 2 and "backend must be one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backends", "device", "message"),
    [([], "cpu", "backends must contain at least one"), (["sdpa"], "tpu", "device must be"), (["x"], "cpu", "backend")],
)
def test_what_is_not_there_does_not_pass(backends: list[str], device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify.verify(backends, device)
