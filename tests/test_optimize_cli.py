"""`vit-fast optimize`, `vit-fast cache`, and the cache: its location, ignored entries, and concurrent writers."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from bench_support import plan, rows_by_candidate
from command_line import run

import vit_fast
from vit_fast.benchmarks import runner
from vit_fast.commands.optimize import open_model
from vit_fast.measure import cache, optimization, trials
from vit_fast.measure.candidate import Candidate
from vit_fast.weights.source import weights_digest

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


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
        said.startswith("1 cached result in") and "throughput, 2x3x32x32 torch.float32" in said and "fused sdpa" in said
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
    described = json.loads((folder / optimization.FIGURES).read_text())
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
        (("vit_*_patch16_224",), "the name must match one model"),
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
    monkeypatch.setattr(trials, "installed", lambda name: None)
    engines = {choice.engine for choice in trials.candidates(torch.device("cpu"), ["bf16", "int8"])}
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


def test_weights_of_any_kind_have_a_digest() -> None:
    norm = torch.nn.BatchNorm2d(3)
    before = weights_digest(norm)
    norm.num_batches_tracked += 1
    assert weights_digest(norm) != before == weights_digest(torch.nn.BatchNorm2d(3))


def test_where_answers_are_kept(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("VIT_FAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "vit_fast" / "answers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "vit_fast" / "answers"


def test_auto_does_not_depend_on_what_was_found(model, images, only) -> None:
    only(Candidate(attention="eager", mlp="eager"))
    assert vit_fast.optimize(model, images, budget_s=600).candidate.attention == "eager"
    assert vit_fast.fuse(model).backend == "sdpa"
    assert vit_fast.create_model("vit_test").blocks[0].vit_fast_backend == "sdpa"


def _no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VIT_FAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)


def _a_file_for_a_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "taken").write_text("a file")
    monkeypatch.setenv("VIT_FAST_CACHE", str(folder / "taken"))


@pytest.mark.parametrize(
    ("prevent", "reason"), [(_no_home, "home directory.*VIT_FAST_CACHE"), (_a_file_for_a_folder, "taken")]
)
def test_a_search_is_not_lost_where_nothing_can_be_kept(
    prevent, reason, model, images, one_engine, monkeypatch, tmp_path
) -> None:
    prevent(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match=f"not cached: .*{reason}"):
        found = vit_fast.optimize(model, images, budget_s=1)
    assert found.model(images).shape == (4, 10) and not found.from_cache


def test_what_cannot_be_read_is_no_answer(monkeypatch) -> None:
    """A folder, a pipe, which would be waited for, and what nobody may look at."""
    (cache.folder() / "folder.json").mkdir(parents=True)
    os.mkfifo(cache.folder() / "pipe.json")
    assert list(cache.all_results()) == [] and cache.clear() == 0

    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    (cache.folder() / "one.json").touch()
    monkeypatch.setattr(Path, "is_file", forbidden)
    assert list(cache.all_results()) == []


def test_a_search_that_was_cut_off_is_repeated_where_there_is_more_time(model, images, only) -> None:
    only(Candidate(attention="sdpa", mlp="sdpa"))
    first = vit_fast.optimize(model, images, budget_s=1e-3)
    figures = first.cached.figures
    assert not first.from_cache and (figures["tried"], figures["candidates"]) == (1, 2) and figures["finish_s"] > 1e-3
    told = "1 of 2 candidates tried in 0.001 s; about "
    assert told in str(first) and "s would finish the search" in str(first)
    same = vit_fast.optimize(model, images, budget_s=1e-3)
    assert same.from_cache and told in str(same), "as much time finds as much"
    whole = vit_fast.optimize(model, images, budget_s=600)
    assert not whole.from_cache and whole.candidate == Candidate(attention="sdpa", mlp="sdpa")
    long = dataclasses.replace(first.cached, figures=figures | {"finish_s": 460.2, "images_per_s": 12345.6})
    assert "12,346 images/s" in (text := str(dataclasses.replace(first, cached=long))) and "about 460 s" in text
    assert whole.cached.figures["finish_s"] is None and "(2 of 2 candidates tried in 600 s)" in str(whole)
    for budget_s in (1e-3, 6000):
        assert vit_fast.optimize(model, images, budget_s=budget_s).from_cache, "a whole search is never repeated"


def test_foreign_answers_are_ignored_with_a_word(model, images, one_engine) -> None:
    vit_fast.optimize(model, images, budget_s=1e-3)
    (path,) = cache.folder().glob("*.json")
    good = json.loads(path.read_text())
    foreign = [good | {"figures": {}}, good | {"key": {}}, good | {"candidate": {"x": 1}}]
    foreign += [good | {"candidate": {"threads": [3]}}]
    for text in (b"", b"[1]", b'{"format": 99}', b"\xff", *(json.dumps(each).encode() for each in foreign)):
        path.write_bytes(text)
        with pytest.warns(UserWarning, match="ignored"):
            assert not vit_fast.optimize(model, images, budget_s=1e-3).from_cache
    assert cache.clear() == 1 and list(cache.all_results()) == []


RACED = {"machine": {}, "model": "m", "example": [], "request": {}}


def _keep_many(number: int) -> None:
    for turn in range(20):
        cache.store(cache.CachedResult(RACED, Candidate(split=number + 1), dict.fromkeys(cache.FIGURES) | {"ms": turn}))


def test_processes_may_race_for_an_answer() -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_keep_many, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = cache.look_up(RACED)
    assert found is not None and found.figures["ms"] == 19
    assert [path.name for path in cache.folder().iterdir()] == [path.name for path in cache.folder().glob("*.json")]
