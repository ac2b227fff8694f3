"""The command line: every command answers, and every bad input is one line and status 2."""

from __future__ import annotations

import json

import pytest
import typer
from children import environment, run_python

import vit_fast
from vit_fast import cli


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(args))
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


def python(code: str, **variables: str) -> str:
    return run_python(["-c", code], environment() | variables)


def test_info(capsys):
    status, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["vit_fast"] == vit_fast.__version__
    assert facts["packages"]["torch"]
    assert {row["backend"] for row in facts["backends"]} == {"eager", "sdpa", "triton"}
    assert all(row["available"] or row["reasons"] for row in facts["backends"])
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert "backends" in out


def test_models(capsys):
    status, out, _ = run(capsys, "models", "vit_base_patch16_*", "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert status == 0
    assert rows["vit_base_patch16_224"]["parameters"] == 86_567_656
    assert round(rows["vit_base_patch16_224"]["gflop_per_image"], 1) == 35.1
    assert rows["vit_base_patch16_384"]["tokens"] == 577
    assert "vit_test" in run(capsys, "models", "vit_t*")[1]


def test_unknown_model_ends_in_one_line(capsys):
    status, out, err = run(capsys, "models", "vit_bse_patch16_224")
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "vit_base_patch16_224" in err


def test_traceback_on_request():
    with pytest.raises(ValueError, match="unknown model"):
        cli.main(["--traceback", "models", "nothing_like_it"])


def test_every_command_has_help(capsys):
    out = run(capsys, "--help")[1]
    for command in cli.COMMANDS:
        assert command.replace("_", "-") in out
        assert run(capsys, command.replace("_", "-"), "--help")[0] == 0


def test_help_has_no_line_breaks_within_a_paragraph():
    for command in cli.make_app().registered_commands:
        assert command.help and "\n" not in command.help.replace("\n\n", "")


def test_a_defect_of_ours_is_not_dressed_as_bad_input(monkeypatch):
    def broken() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(cli, "make_app", lambda *_: lambda **_: broken())
    with pytest.raises(KeyError):
        cli.main(["info"])


def test_version(capsys):
    status, out, _ = run(capsys, "--version")
    assert (status, out) == (0, f"vit-fast {vit_fast.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["--version"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from vit_fast import cli\n"
        f"try: cli.main({arguments!r})\n"
        "finally: print(sorted({'torch', 'numpy', 'triton', 'timm'} & set(sys.modules)))"
    )
    assert python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import vit_fast; {everything}", marks=pytest.mark.slow),
        pytest.param("import torch, vit_fast; torch.ops.vit_fast.attention; {everything}", marks=pytest.mark.slow),
        "import sys, vit_fast.export; assert vit_fast.export.__all__; found = set(sys.modules) & "
        "{{'onnx', 'onnxscript', 'onnxruntime', 'timm', 'transformers'}}; assert not found, found",
    ],
    ids=["alone", "after torch", "export"],
)
def test_the_package_is_whole_in_any_order_and_brings_no_optional_library(code: str) -> None:
    """Every public name; the operators are registered where torch is there already."""
    python(code.format(everything="assert all(hasattr(vit_fast, name) for name in vit_fast.__all__)"))


def test_the_shell_completes_commands() -> None:
    asked = {"_VIT_FAST_COMPLETE": "complete_bash", "COMP_WORDS": "vit-fast be", "COMP_CWORD": "1"}
    assert python("from vit_fast import cli; cli.main([])", **asked).split() == ["bench"]


def test_a_thing_has_one_name_in_all_commands() -> None:
    """All commands write to --out, and call precisions fp32, fp16 and bf16."""
    app = typer.main.get_command(cli.make_app())
    for name, command in app.commands.items():
        for parameter in command.params:
            assert "--output" not in parameter.opts, name
            if "dtype" in (parameter.name or "") or parameter.name == "precision":
                assert parameter.default in ("fp32", None), name
                assert "float32" not in parameter.help, name


def test_an_old_name_of_a_precision_is_refused(capsys, tmp_path):
    (tmp_path / "images").mkdir()
    status, _, err = run(
        capsys, "train", str(tmp_path / "images"), "--model", "vit_test", "--out", str(tmp_path / "out"),
        "--set", "dtype=float32",
    )  # fmt: skip
    assert status == 2 and "dtype must be one of 'fp32', 'bf16'" in err
