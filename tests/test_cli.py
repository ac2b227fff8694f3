"""Tests of the command line: every command has help, and invalid input ends with one line and status 2; `verify`."""

from __future__ import annotations

import json

import kernel_support  # sets the interpreter up, as every kernel test does
import pytest
import torch
from children import environment, run_python
from command_line import run

import vit_fast
from vit_fast import cli, version
from vit_fast.benchmarks import operators, verify


def python(code: str, **variables: str) -> str:
    return run_python(["-c", code], environment() | variables)


def test_info_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vit_fast"] == vit_fast.__version__ and facts["packages"]["torch"]
    assert {row["backend"] for row in facts["backends"]} == {"eager", "sdpa", "triton"}
    assert all(row["available"] or row["reasons"] for row in facts["backends"])
    assert "instructions: " in facts["devices"][0]["description"]
    assert run("info") == 0 and "backends" in capsys.readouterr().out
    assert run("models", "vit_base_patch16_[23]*") == 0
    rows = {row[0]: row[1:] for row in map(str.split, capsys.readouterr().out.splitlines()) if row}
    assert rows["vit_base_patch16_224"] == ["86.6", "35.1", "197", "768", "12", "12", "224x224"]
    assert rows["vit_base_patch16_384"][2] == "577"


def test_instruction_sets_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "processor : 0\nmodel name\t: A CPU\nflags\t\t: fpu amx_bf16 avx512_vnni avx2 avx\nflags : sve\n"
    monkeypatch.setattr(version.Path, "read_text", lambda path: lines)
    assert version.cpu_name() == "A CPU"
    assert version.cpu_instructions() == ["avx2", "avx512_vnni", "amx_bf16"]


@pytest.mark.parametrize(("family", "kind"), [("25", "family 25, AVX2"), ("26", "family 26, AVX512"), ("", "AVX512")])
def test_records_distinguish_cpus_of_equal_name(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines hide the model."""
    fields = {"model name": "AMD EPYC", "cpu family": family}
    monkeypatch.setattr(version, "_cpuinfo", lambda *names: fields.get(names[0], ""))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind.split(", ")[-1])
    machine = version.describe("cpu")
    assert machine["device"] == f"AMD EPYC ({kind}, {torch.get_num_threads()} threads)"


def test_errors_are_one_line_or_a_traceback(capsys, monkeypatch) -> None:
    assert run("models", "vit_bse_patch16_224") == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1) and "vit_base_patch16_224" in error
    with pytest.raises(ValueError, match="unknown model"):
        cli.main(["--traceback", "models", "nothing_like_it"])

    def defect(*_: str) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(cli, "make_app", defect)
    with pytest.raises(KeyError):  # is not reported as invalid input
        cli.main(["info"])


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for registered in cli.make_app().registered_commands:
        assert registered.help and "\n" not in registered.help.replace("\n\n", ""), "no break within a paragraph"
    assert all(name in out and run(name, "--help") == 0 for name in cli.COMMANDS)


def test_help_does_not_import_torch() -> None:
    code = """
import sys
from vit_fast import cli
for arguments in (["--help"], ["bench", "--help"], ["--version"]):
    try:
        cli.main(arguments)
    except SystemExit:
        pass
assert not {"torch", "numpy", "triton", "timm"} & set(sys.modules)
"""
    assert vit_fast.__version__ in python(code)


def test_the_shell_completes_commands() -> None:
    asked = {"_VIT_FAST_COMPLETE": "complete_bash", "COMP_WORDS": "vit-fast be", "COMP_CWORD": "1"}
    assert python("from vit_fast import cli; cli.main([])", **asked).split() == ["bench"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--model vit_base_patch16_224 --arch sm_75", ["arch must be one of"]),
        ("--model vit_bse", ["unknown model"]),
        ("--warm-up vit_test --batch-sizes 1,x", ["--batch-sizes"]),
        ("--warm-up vit_test --json", ["--json must not be used with --warm-up"]),
        # this and the next would be ignored
        ("--batch-sizes 4", ["--batch-sizes must not be used without --warm-up or --model"]),
        ("--host --tune", ["--host", "--tune"]),
        ("--warm-up m --arch sm_90", ["--warm-up", "--arch"]),
        ("--tune --json", ["--tune", "--json"]),
    ],
)
def test_kernels_rejects_invalid_options(options: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernels", *options.split()) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts)


def test_verify_passes_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["interpreted"] is (kernel_support.DEVICE.type == "cpu")
    assert {row["dtype"] for row in result["rows"]} >= {"fp16"}
    cases = {row["case"].partition(":")[0] for row in result["rows"]}
    assert cases == {"attention", "mlp", "vit_test, token pooling", "vit_test, map pooling"}
    assert all(row["passed"] and row["max_error"] <= row["allowed_error"] for row in result["rows"])


@pytest.mark.parametrize("wrong", [1.01, float("nan"), None])
def test_verify_notices_an_incorrect_operator(wrong: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, cases = operators.FUNCTIONS["attention"]["sdpa"], verify._cases

    def broken(*args: torch.Tensor) -> torch.Tensor:
        if wrong is None:
            raise RuntimeError("out of order")
        return attention(*args) * wrong

    monkeypatch.setattr(verify, "_cases", lambda small: cases(True))
    monkeypatch.setitem(operators.FUNCTIONS["attention"], "sdpa", broken)
    result = verify.verify(["sdpa"], "cpu")
    failed = [row for row in result["rows"] if not row["passed"]]
    assert {row["case"] for row in failed} == {row["case"] for row in result["rows"] if "attention:" in row["case"]}
    assert all((wrong is None) == ("out of order" in str(row["reason"])) for row in failed)


@pytest.mark.parametrize(
    ("backends", "device", "message"),
    [([], "cpu", "backends must contain at least one"), (["sdpa"], "tpu", "device must be"), (["x"], "cpu", "backend")],
)
def test_verify_rejects_invalid_arguments(backends: list[str], device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify.verify(backends, device)
