"""`vit-fast optimize` and `vit-fast cache`; ONNX files as models, and runtimes of ONNX files as candidates."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import onnx
import pytest
import torch
from bench_support import plan, rows_by_candidate
from command_line import run

import vit_fast
from vit_fast.benchmarks import runner
from vit_fast.commands.optimize import open_model
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner
from vit_fast.export.runtime.metadata import copy_model
from vit_fast.measure import cache, runtimes, trials
from vit_fast.measure.build import build
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.optimization import FIGURES, deploy
from vit_fast.measure.runtimes import OnnxFile, open_file

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FUSED = Candidate(attention="sdpa", mlp="sdpa")
ROUNDED = dataclasses.replace(FUSED, precision="bf16")
OPTIMIZE = ("optimize", "vit_test", "--batch", "2", "--budget", "600")
BF16 = ("--allow", "bf16", "--min-agreement", "0")


def test_table_progress_and_cache(capsys: pytest.CaptureFixture[str], only) -> None:
    only(FUSED)
    assert run(*OPTIMIZE) == 0
    out, progress = capsys.readouterr()
    assert "original" in out and "fused sdpa" in out and "speedup" in out
    lines = [line.partition(" of 600 s: ")[2] for line in progress.splitlines() if " of 600 s: " in line]
    assert lines == ["the reference in fp64", "original", "fused sdpa", "timing 2 candidates, interleaved"]

    assert run(*OPTIMIZE) == 0
    assert "cached result, checked again" in capsys.readouterr().out
    assert run("cache") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("cached results in") and first.endswith(": 1")
    assert "throughput, 2x3x32x32 torch.float32" in second and "fused sdpa" in second
    (path,) = cache.folder().glob("*.json")
    assert path.stem in second
    assert vit_fast.load_optimized(path, vit_fast.create_model("vit_test")).candidate == FUSED
    assert run("cache", "--clear") == 0 and list(cache.all_results()) == []


def test_json_and_errors_with_brackets(capsys: pytest.CaptureFixture[str], only, monkeypatch) -> None:
    only(ROUNDED)
    assert run(*OPTIMIZE, *BF16, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == "fused sdpa, bf16" == found["table"][1]["name"]
    assert found["key"]["request"]["allow"] == ["bf16"] and found["figures"]["speedup"] > 1
    assert 0 <= found["table"][1]["checked"]["agreement"] <= 1

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("[/usr/lib/so] of [int8]")

    cache.clear()
    monkeypatch.setattr("vit_fast.measure.build.fuse", failing)
    assert run(*OPTIMIZE, *BF16) == 0
    assert "RuntimeError: [/usr/lib/so] of [int8]" in capsys.readouterr().out


@pytest.mark.fast_cases("fused sdpa, bf16")
@pytest.mark.parametrize("choice", [Candidate("onnxruntime"), ROUNDED, Candidate("default")], ids=lambda c: c.name)
def test_exported_folder(choice: Candidate, only, tmp_path: Path) -> None:
    only(choice)
    folder = tmp_path / "deployed"
    assert run(*OPTIMIZE, *(BF16 if choice.precision else ()), "--budget", "600", "--export", str(folder)) == 0
    described = json.loads((folder / FIGURES).read_text())
    assert Candidate.from_dict(described["candidate"]) == choice
    opened, path = open_model("vit_test", 2, ()), folder / described["file"]
    if choice.engine == "onnxruntime":
        output = OnnxRunner(path, "cpu")(opened.example)
    elif choice.engine == "default":
        output = torch._inductor.aoti_load_package(str(path))(opened.example)
    else:
        output = torch.export.load(path).module()(opened.example.bfloat16()).float()
    tolerance = {"atol": 0.3, "rtol": 0.1} if choice.precision else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(output, opened.module(opened.example), **tolerance)
    assert run("optimize", "vit_test", "--export", str(folder)) == 2, "a folder that is not empty"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vit_tst",), "vit_test"),
        (("vit_*_patch16_224",), "MODEL must match one model"),
        (("missing.onnx",), "missing.onnx"),
        (("vit_test", "--img-size", "big"), "got big"),
        (("vit_test", "--export", __file__), "must be a new or empty folder"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("optimize", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
def test_bench_measures_the_cached_result(only) -> None:
    candidates = ("eager", "optimized", "optimized-bf16")
    record = runner.run(plan(*candidates, batch_sizes=(2,)))
    _, *found = rows_by_candidate(record).values()
    assert [row["status"] for row in found] == ["unsupported"] * 2
    assert "run vit-fast optimize vit_test --batch 2 --img-size 32x32 --allow bf16" in found[1]["reason"]

    for choice, allow in ((FUSED, ()), (Candidate(precision="bf16"), BF16)):
        only(choice)
        assert run(*OPTIMIZE, *allow) == 0
    rows = rows_by_candidate(runner.run(plan(*candidates, batch_sizes=(2,))))
    assert [rows[name]["status"] for name in candidates] == ["measured"] * 3
    assert [rows[name]["precision"] for name in candidates] == ["fp32", "fp32", "bf16"]
    assert rows["optimized"]["max_error"] < 1e-4 < rows["optimized-bf16"]["max_error"]


def test_location_of_the_cache(model, images, one_engine, monkeypatch, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("VIT_FAST_CACHE", str(tmp_path / "taken"))
    with pytest.warns(UserWarning, match="not cached: .*taken"):
        found = vit_fast.optimize(model, images, budget_s=1)
    assert found.model(images).shape == (4, 10) and not found.from_cache
    monkeypatch.delenv("VIT_FAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "vit_fast" / "answers"


def test_a_larger_budget_searches_again(model, images, only) -> None:
    only(FUSED)
    first = vit_fast.optimize(model, images, budget_s=1e-3)
    figures = first.cached.figures
    assert not first.from_cache and (figures["tried"], figures["candidates"]) == (1, 2) and figures["finish_s"] > 1e-3
    told = "1 of 2 candidates tried, budget 0.001 s; a budget of about "
    assert told in str(first) and "s would finish the search" in str(first)
    same = vit_fast.optimize(model, images, budget_s=1e-3)
    assert same.from_cache and told in str(same)
    whole = vit_fast.optimize(model, images, budget_s=600)
    assert not whole.from_cache and whole.candidate == FUSED
    assert whole.cached.figures["finish_s"] is None and "(2 of 2 candidates tried, budget 600 s)" in str(whole)
    for budget_s in (1e-3, 6000):
        assert vit_fast.optimize(model, images, budget_s=budget_s).from_cache, "a finished search is never repeated"


def test_unreadable_entries_are_ignored(model, images, one_engine) -> None:
    vit_fast.optimize(model, images, budget_s=1e-3)
    (path,) = cache.folder().glob("*.json")
    good = json.loads(path.read_text())
    foreign = [good | {"figures": {}}, good | {"key": {}}, good | {"candidate": {"threads": [3]}}]
    for text in (b"", b"[1]", b'{"format": 99}', b"\xff", *(json.dumps(each).encode() for each in foreign)):
        path.write_bytes(text)
        with pytest.warns(UserWarning, match="ignored"):
            assert not vit_fast.optimize(model, images, budget_s=1e-3).from_cache
    (cache.folder() / "folder.json").mkdir()
    os.mkfifo(cache.folder() / "pipe.json")  # reading it would wait
    assert cache.clear() == 1 and list(cache.all_results()) == []


@pytest.mark.slow
def test_a_file_is_optimized_cached_saved_and_exported(exported, images, tmp_path: Path) -> None:
    path = tmp_path / "beside.onnx"
    copy_model(exported("beside"), path)
    found = vit_fast.optimize(path, images, budget_s=600)
    names = [row.candidate.name for row in found.table]
    assert "original" in names and any(name.endswith(", 1 images per call") for name in names), names
    assert all(row.ms is not None for row in found.table if row.candidate.split == 1), "opening a file takes no time"
    before = found.model(images)
    assert before.shape == (4, 10)
    assert vit_fast.optimize(str(path), images, budget_s=600).from_cache
    assert not vit_fast.optimize(exported("plain"), images, budget_s=1).from_cache, "another file"
    found.save(tmp_path / "fast.json")
    assert vit_fast.load_optimized(tmp_path / "fast.json", path).candidate == found.candidate
    with pytest.raises(ValueError, match="another"):
        vit_fast.load_optimized(tmp_path / "fast.json", exported("plain"))
    written = deploy(found.cached, OnnxFile(path), images, tmp_path / "deployed")
    assert {path.name for path in written} == {"model.onnx", "beside.onnx.data", FIGURES}
    torch.testing.assert_close(OnnxRunner(tmp_path / "deployed" / "model.onnx", "cpu")(images), before)
    with (tmp_path / "beside.onnx.data").open("r+b") as file:  # ONNX Runtime maps external weights
        file.write(bytes((tmp_path / "beside.onnx.data").stat().st_size))
    assert torch.equal(found.model(images), before)


# Means of the channels of images in fp16.
HALF = """<ir_version: 10, opset_import: ["": 20]> half (float16[b, 3, 32, 32] x) => (float16[b, 3] y)
{ means = GlobalAveragePool(x) y = Flatten(means) }"""


@pytest.mark.fast_cases("plain-torch.float32")
@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.float32), ("pixels", torch.uint8), ("half", torch.float16)], ids=str
)
def test_the_command_takes_files(exported, name: str, dtype, tmp_path: Path, capsys) -> None:
    path = tmp_path / "half.onnx"
    onnx.save(onnx.parser.parse_model(HALF), path)
    path = path if name == "half" else exported(name)
    assert run("optimize", str(path), "--batch", "2", "--budget", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["table"][0]["name"] == "original" and found["figures"]["images_per_s"] > 0
    assert open_model(str(path), 2, ()).example.dtype == dtype


def test_openvino(exported, images) -> None:
    """Also with images in bf16."""
    pytest.importorskip("openvino")
    assert runtimes._core() is runtimes._core(), "if one of several is deleted, the next signal ends the process"
    plain, rounded = Candidate("openvino"), Candidate("openvino", precision="bf16")
    for tried in (trials.candidates, trials.candidates_of_file):
        assert {plain, rounded} <= set(tried(torch.device("cpu"), ["bf16"]))
    path, images = exported("plain"), images.bfloat16()
    exact = OnnxFile(path)(images.float())
    found = build(Candidate("openvino", threads=1, split=3), OnnxFile(path), images.float(), exact, ())(images.float())
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
    try:
        run = open_file(rounded, path, images, None)
    except UnsupportedInputError as error:
        pytest.skip(str(error))
    expected = open_file(rounded, path, images.float(), None)(images.float())
    for given in (images, images.contiguous(memory_format=torch.channels_last)):
        found = run(given)
        assert found.dtype == torch.float32
        # the error of images in fp32, doubled because OpenVINO converts them elsewhere in the graph
        assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()
