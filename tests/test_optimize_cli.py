"""`vit-fast optimize` and `vit-fast cache`, and what they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench_support import plan, rows_by_candidate
from command_line import run

import vit_fast
from vit_fast.benchmarks import runner
from vit_fast.commands.words import open_model
from vit_fast.measure import cache, candidate, deployable
from vit_fast.measure.candidate import Candidate

pytestmark = pytest.mark.usefixtures("own_cache")


def test_table_answer_and_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path, only) -> None:
    only(Candidate(attention="sdpa", mlp="sdpa"))
    saved = tmp_path / "fast.json"
    assert run("optimize", "vit_test", "--batch", "2", "--budget", "60", "--save", str(saved)) == 0
    said, told = capsys.readouterr()
    assert "original" in said and "fused sdpa" in said and "speedup" in said
    lines = [line.partition(" of 60 s: ")[2] for line in told.splitlines() if " of 60 s: " in line]
    assert lines == ["the reference in fp64", "original", "fused sdpa", "timing 2 candidates, interleaved"]
    model = vit_fast.create_model("vit_test")
    assert vit_fast.load_optimized(saved, model).candidate == Candidate(attention="sdpa", mlp="sdpa")

    assert run("optimize", "vit_test", "--batch", "2", "--budget", "60") == 0
    assert "cached result, checked again" in capsys.readouterr().out
    assert run("cache") == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("cached results: 1, in")
        and "throughput, 2x3x32x32 torch.float32" in said
        and "fused sdpa" in said
    )
    assert run("cache", "--json") == 0
    (kept,) = json.loads(capsys.readouterr().out)
    assert kept["candidate"] == {"attention": "sdpa", "mlp": "sdpa"}
    assert run("cache", "--clear") == 0 and list(cache.all_results()) == []


def test_json(capsys: pytest.CaptureFixture[str], only) -> None:
    only(Candidate(precision="bf16", attention="sdpa", mlp="sdpa"))
    assert run("optimize", "vit_test", "--allow", "bf16", "--min-agreement", "0", "--budget", "60", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "fused sdpa, bf16" == found["table"][1]["name"]
    assert found["key"]["request"]["allow"] == ["bf16"] and found["figures"]["speedup"] > 1
    assert 0 <= found["table"][1]["checked"]["agreement"] <= 1


@pytest.mark.slow
def test_what_an_error_says_in_brackets_is_no_markup(capsys: pytest.CaptureFixture[str], only, monkeypatch) -> None:
    only(Candidate(attention="sdpa", mlp="sdpa"))

    def failing(*how: object) -> None:
        raise RuntimeError("[/usr/lib/so] of [int8]")

    monkeypatch.setattr("vit_fast.measure.build.fuse", failing)
    assert run("optimize", "vit_test", "--budget", "60") == 0
    assert "RuntimeError: [/usr/lib/so] of [int8]" in capsys.readouterr().out


@pytest.mark.fast_cases("fused sdpa, bf16")
@pytest.mark.parametrize(
    "choice",
    [Candidate("onnxruntime"), Candidate(attention="sdpa", mlp="sdpa", precision="bf16")],
    ids=lambda choice: choice.name,
)
def test_export_writes_what_runs_elsewhere(choice: Candidate, only, tmp_path: Path) -> None:
    only(choice)
    folder = tmp_path / "deployed"
    allow = ["--allow", "bf16", "--min-agreement", "0"] if choice.precision else []
    assert run("optimize", "vit_test", "--batch", "2", "--budget", "600", *allow, "--export", str(folder)) == 0
    described = json.loads((folder / deployable.FIGURES).read_text())
    assert Candidate.from_dict(described["candidate"]) == choice
    opened = open_model("vit_test", 2, ())
    expected = opened.module(opened.example)
    if choice.engine == "onnxruntime":
        from vit_fast.export import OnnxRunner

        output = OnnxRunner(folder / described["file"], "cpu")(opened.example)
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    else:
        program = torch.export.load(folder / described["file"])
        output = program.module()(opened.example.bfloat16())
        torch.testing.assert_close(output.float(), expected, atol=0.3, rtol=0.1)
    assert run("optimize", "vit_test", "--export", str(folder)) == 2, "a folder that is not empty"


@pytest.mark.slow
def test_export_of_what_torch_compiles(only, tmp_path: Path) -> None:
    only(Candidate("compile"))
    folder = tmp_path / "deployed"
    assert run("optimize", "vit_test", "--batch", "2", "--budget", "200", "--export", str(folder)) == 0
    opened = open_model("vit_test", 2, ())
    compiled = torch._inductor.aoti_load_package(str(folder / "model.pt2"))
    torch.testing.assert_close(compiled(opened.example), opened.module(opened.example), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vit_tst",), "vit_test"),
        (("vit_*_patch16_224",), "the model must be one of"),
        (("missing.onnx",), "missing.onnx"),
        (("vit_test", "--allow", "int4"), "int4"),
        (("vit_test", "--img-size", "big"), "got big"),
        (("vit_test", "--images", "missing.jpg"), "missing.jpg"),
        (("vit_test", "--save", f"{__file__}/fast.json"), "is a file, must be a folder"),
        (("vit_test", "--save", "."), "is a folder"),
    ],
)
def test_bad_words(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("optimize", *arguments) == 2
    assert message in capsys.readouterr().err


def test_candidates_are_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "installed", lambda name: None)
    engines = {choice.engine for choice in candidate.candidates(torch.device("cpu"), ["bf16", "int8"])}
    assert engines == {"torch", "compile"}


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
def test_the_bench_has_what_was_found_as_a_row(only) -> None:
    candidates = ("eager", "optimized", "optimized-bf16")
    record = runner.run(plan(*candidates, batch_sizes=(2,)))
    _, *found = rows_by_candidate(record).values()
    assert [row["status"] for row in found] == ["unsupported"] * 2
    assert "run vit-fast optimize vit_test --batch 2 --allow bf16" in found[1]["reason"]

    only(Candidate(attention="sdpa", mlp="sdpa"))
    assert run("optimize", "vit_test", "--batch", "2", "--budget", "60") == 0
    only(Candidate(precision="bf16"))
    assert run("optimize", "vit_test", "--batch", "2", "--budget", "60", "--allow", "bf16", "--min-agreement", "0") == 0
    rows = rows_by_candidate(runner.run(plan(*candidates, batch_sizes=(2,))))
    assert [rows[name]["status"] for name in candidates] == ["measured"] * 3
    assert [rows[name]["precision"] for name in candidates] == ["fp32", "fp32", "bf16"]
    assert rows["optimized"]["max_error"] < 1e-4 < rows["optimized-bf16"]["max_error"]
