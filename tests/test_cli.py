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
    assert status == 0 and "backends" in out


def test_models(capsys):
    status, out, _ = run(capsys, "models", "vit_base_patch16_*", "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert status == 0
    assert rows["vit_base_patch16_224"]["parameters"] == 86_567_656
    assert round(rows["vit_base_patch16_224"]["gflop_per_image"], 1) == 35.1
    assert rows["vit_base_patch16_384"]["tokens"] == 577
    assert "vit_test" in run(capsys, "models", "vit_t*")[1]


def test_bad_input_ends_in_one_line_and_in_a_traceback_on_request(capsys):
    status, out, err = run(capsys, "models", "vit_bse_patch16_224")
    assert (status, out, err.count("\n")) == (2, "", 1) and "vit_base_patch16_224" in err
    with pytest.raises(ValueError, match="unknown model"):
        cli.main(["--traceback", "models", "nothing_like_it"])


def test_every_command_has_help(capsys):
    out = run(capsys, "--help")[1]
    for command in cli.COMMANDS:
        assert command.replace("_", "-") in out
        assert run(capsys, command.replace("_", "-"), "--help")[0] == 0
    for registered in cli.make_app().registered_commands:
        assert registered.help and "\n" not in registered.help.replace("\n\n", ""), "no break within a paragraph"


def test_a_defect_of_ours_is_not_dressed_as_bad_input(monkeypatch):
    def broken() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(cli, "make_app", lambda *_: lambda **_: broken())
    with pytest.raises(KeyError):
        cli.main(["info"])


def test_help_does_not_wait_for_torch() -> None:
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


def test_export_is_imported_without_the_libraries_that_it_needs_later() -> None:
    libraries = {"onnx", "onnxscript", "onnxruntime", "timm", "transformers"}
    python(f"import sys, vit_fast.export; assert vit_fast.export.__all__; assert not {libraries} & set(sys.modules)")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import vit_fast", "import torch, vit_fast; torch.ops.vit_fast.attention"])
def test_the_package_is_whole_whether_torch_came_before_it_or_not(first: str) -> None:
    """Every public name; the operators are registered where torch is there already."""
    python(f"{first}; assert all(hasattr(vit_fast, name) for name in vit_fast.__all__)")


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
