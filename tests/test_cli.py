"""The command line: every command answers, and every bad input is one line and status 2."""

from __future__ import annotations

import json

import pytest

import vit_fast
from vit_fast import cli


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(args))
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


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
    assert "vit_test" in run(capsys, "models")[1]


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


def test_a_defect_of_ours_is_not_dressed_as_bad_input(monkeypatch):
    def broken() -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(cli, "make_app", lambda: lambda **_: broken())
    with pytest.raises(KeyError):
        cli.main(["info"])
