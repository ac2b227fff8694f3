"""The gpu-check's frame: a row that fails, hangs or kills its process loses nothing of the others, and all fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import vit_fast
from vit_fast.benchmarks import gpu_check, gpu_check_models, gpu_check_rows, operators
from vit_fast.benchmarks.gpu_check_rows import Context, Cost, Found, Row
from vit_fast.benchmarks.timing import Protocol, Timing

CPU = Context(torch.device("cpu"), None, float("inf"))
CHEAP = Cost(1.0, 0.5, 0.5)
ROWS_CODE = """
import os, time

MEASURED = {
    "correct": True, "ms": 0.1, "host_ms": 0.02, "host_bound": False, "TFLOP_per_s": 300.0, "GB_per_s": 3000.0,
    "share_of_floor": 0.7, "ratio": 1.5, "best_peer": "cudnn",
}

def works(context): return MEASURED | {"pid": os.getpid()}
def raises(context): raise ValueError("no such kernel")
def hangs(context): time.sleep(900)
def dies(context): os._exit(3)
def gives_what_cannot_be_sent(context): return {"correct": lambda: True}
def is_wrong(context): return {"correct": False, "correctness": "error 1, allowed 0"}
"""


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of rows that another process can import."""
    (tmp_path / "made_up_rows.py").write_text(ROWS_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import made_up_rows

    monkeypatch.setitem(sys.modules, "made_up_rows", made_up_rows)
    return made_up_rows


def _row(fill: Callable[[Context], Found], name: str | None = None) -> Row:
    return Row("machine", name or fill.__name__, CHEAP, fill, on_gpu=torch.cuda.is_available())


def _command(name: str, code: str) -> Row:
    return Row("machine", name, CHEAP, command=(sys.executable, "-c", code), on_gpu=torch.cuda.is_available())


def _run(rows: tuple[Row, ...], out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[Found]]:
    monkeypatch.setattr(gpu_check, "ROWS", rows)
    status = gpu_check.main(["--out", str(out), *arguments])
    return status, json.loads((out / "summary.json").read_text())["rows"]


def test_every_row_is_reported(
    made_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process fills the rows until one breaks it, and then another does."""
    monkeypatch.setattr(gpu_check, "LEAST_LIMIT_S", 120)
    rows = (
        _command("breaks", "raise SystemExit('out of memory')"),
        _row(made_up.works, "works"),
        _row(made_up.raises),
        _row(made_up.works, "works still"),
        _row(made_up.dies),
        _row(made_up.works, "works again"),
        _row(made_up.gives_what_cannot_be_sent),
        _row(made_up.is_wrong),
        _command("passes", "print('3 passed')"),
    )
    status, found = _run(rows, tmp_path / "records", monkeypatch)
    assert status == 5
    assert [row["name"] for row in found] == [row.name for row in rows]
    assert [row["outcome"].split(":")[0] for row in found] == [
        "failed", "measured", "failed", "measured", "failed", "measured", "failed", "WRONG", "passed",
    ]  # fmt: skip
    assert found[1]["pid"] == found[3]["pid"] != found[5]["pid"]
    printed = capsys.readouterr().out
    assert "exit status 1" in printed and "no such kernel" in printed and printed.count("1.50x cudnn") == 3


def test_a_row_that_hangs_is_ended(made_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "LEAST_LIMIT_S", 0)
    cost = Cost(0.5, 0.5, 0.0)
    rows = (
        replace(_row(made_up.hangs), cost=cost),
        replace(_command("hangs too", "import time; time.sleep(60)"), cost=cost),
        replace(_row(made_up.works), cost=Cost(20.0, 0.0, 0.0)),
    )
    _, found = _run(rows, tmp_path, monkeypatch)
    assert [row["outcome"] for row in found] == ["failed: more than 3 s"] * 2 + ["measured"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the question is what happens without a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in gpu_check.ROWS if row.on_gpu)
    status, found = _run(rows, tmp_path, monkeypatch)
    assert status == 0 and {row["outcome"] for row in found} == {"not measured: no GPU"}


def test_a_row_whose_packages_are_absent_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(_command("bench", "raise SystemExit(1)"), packages=("torch", "no_such_package"))
    status, (found,) = _run((row,), tmp_path, monkeypatch)
    assert status == 0 and found["outcome"] == "not measured: no_such_package is not installed"


def test_the_rows_fit_into_the_time_and_the_important_ones_come_first() -> None:
    rows = [row for row in gpu_check.ROWS if row.on_gpu]
    assert sum(row.cost.total for row in rows) <= gpu_check.TOTAL_SECONDS <= 480
    important = [row.important for row in rows]
    assert important == sorted(important, reverse=True)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    first = [row.name for row in rows if row.important]
    for what in (
        "tests, first", "attention ViT-B/16 B256 N197 H12 D64 backward",
        "layer_norm_mlp ViT-B/16 B256 M50432 C768 F3072 backward", "vit_base_patch16_224 B256 inference",
        "vit_base_patch16_224 B1 inference", "vit_base_patch16_224 B128 training step",
    ):  # fmt: skip
        assert what in first


def _simulate(seconds: Callable[[Row], float]) -> tuple[dict[str, Found], float]:
    """The real rows on a machine where each takes so many seconds; gives the rows by name and the end."""
    now = 0.0

    def run(row: Row, limit: float) -> Found:
        nonlocal now
        now += min(seconds(row), limit)
        return {"error": "ended"} if seconds(row) > limit else {"correct": True, "ms": 1.0}

    rows = [row for row in gpu_check.ROWS if row.on_gpu]
    found = gpu_check.run_rows(rows, run, lambda: now, lambda rows, running: None)
    assert [row["name"] for row in found] == [row.name for row in rows]
    return {row["name"]: row for row in found}, now


@pytest.mark.parametrize("factor", [1.0, 3.0, 10.0])
def test_the_record_is_complete_however_slow_the_machine_is(factor: float) -> None:
    found, end = _simulate(lambda row: factor * row.cost.total)
    assert end <= gpu_check.TOTAL_SECONDS
    missed = [name for name, row in found.items() if row["outcome"] != "measured"]
    important = {row.name for row in gpu_check.ROWS if row.important}
    assert (factor == 1) == (not missed)
    if factor <= 3:
        assert not important & set(missed)
        assert all(found[name]["outcome"].startswith("no time left") for name in missed)


def test_rows_that_hang_leave_the_important_ones_their_time() -> None:
    """Every second of the important rows hangs."""
    hanging = {row.name for row in gpu_check.ROWS if row.important and row.on_gpu}
    hanging = set(sorted(hanging)[::2])
    found, end = _simulate(lambda row: 1e6 if row.name in hanging else row.cost.total)
    assert end <= gpu_check.TOTAL_SECONDS
    for row in gpu_check.ROWS:
        if row.important and row.on_gpu:
            assert found[row.name]["outcome"].startswith("failed" if row.name in hanging else "measured"), row.name


def test_a_dry_run_prints_the_plan_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    total = sum(row.cost.total for row in gpu_check.ROWS if row.on_gpu)
    assert f"sum {total:.0f} s of 480 s" in printed
    assert all(row.name in printed for row in gpu_check.ROWS if row.on_gpu)
    assert gpu_check.main(["--dry-run", "--parts", "mlp"]) == 0
    assert "attention" not in capsys.readouterr().out


def test_the_compiled_tests_are_there(request: pytest.FixtureRequest) -> None:
    """Every file exists, and each expression selects tests of every file; the MLP's are among them."""
    commands = {row.name: row.command for row in gpu_check.ROWS if row.part == "tests"}
    files = {name: [word for word in command if word.startswith("tests/")] for name, command in commands.items()}
    root = gpu_check.ROOT
    assert all((root / file).is_file() for names in files.values() for file in names)
    assert set(gpu_check._MLP_FILES) == set(files["tests of the MLP, compiled"])
    from _pytest.mark.expression import Expression

    for name in ("tests, first", "tests of the MLP, compiled", "tests of attention, compiled"):
        command = commands[name]
        expression = Expression.compile(command[command.index("-k") + 1])
        for file in files[name]:
            defined = [line for line in (root / file).read_text().splitlines() if line.startswith("def test_")]
            ids = ("197-torch.bfloat16", "torch.float16", "bf16", "")
            cases = [f"{line[4:].partition('(')[0]}[{values}]" for line in defined for values in ids]
            assert any(expression.evaluate(lambda word, case=case: word in case) for case in cases), (name, file)


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run", "--parts", "attention,nonsense"])
    assert "--parts has nonsense: accepted are machine, tests, attention, mlp, models" in capsys.readouterr().err


def test_a_row_starts_in_a_folder_of_its_own_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run of it left, finished or ended, is not in its way."""
    code = "import pathlib, sys; [pathlib.Path(sys.argv[1] + end).mkdir() for end in ('', '.partial')]"
    row = replace(_command("a row", code), command=(sys.executable, "-c", code, "{folder}"))
    for _ in range(2):
        status, (found,) = _run((row,), tmp_path, monkeypatch)
        assert status == 0 and found["outcome"] == "passed"
        assert (tmp_path / "a_row").is_dir() and (tmp_path / "a_row.partial").is_dir()


def test_rows_of_other_parts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(replace(_command(part, "pass"), part=part) for part in ("attention", "mlp"))
    _run(rows, tmp_path, monkeypatch, "--parts", "attention")
    _, found = _run(rows, tmp_path, monkeypatch, "--parts", "mlp")
    assert [row["name"] for row in found] == ["attention", "mlp"]
    monkeypatch.setattr(gpu_check, "_describe", lambda: {"device": "another", "commit": None})
    _, found = _run(rows, tmp_path, monkeypatch, "--parts", "mlp")
    assert [row["name"] for row in found] == ["mlp"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("task", "size"),
    [(operators.Attention("small", 5, 20, 2, 16), 5), (operators.LayerNormMlp("small", 70, 64, 128), 70)],
    ids=["attention", "mlp"],
)
def test_ours_is_checked_at_the_size_that_is_timed_and_to_its_end(task, size, backward, monkeypatch) -> None:
    """The last image, or the last row, alone goes wrong."""
    sizes, factors, entrants = [], torch.ones(size), type(task).entrants

    def with_faults(self: operators.Operator) -> dict[str, operators.Function]:
        eager = entrants(self)["eager"]

        def ours(*leaves: torch.Tensor) -> torch.Tensor:
            sizes.append(len(leaves[0]))
            out = eager(*leaves)
            return out * factors.to(out.dtype).view(-1, *[1] * (out.ndim - 1))

        return entrants(self) | {"triton": ours}

    monkeypatch.setattr(type(task), "entrants", with_faults)
    assert operators.check(task, "triton", backward, CPU.device, CPU.dtype)["correct"]
    factors[-1] = 1.1
    assert not operators.check(task, "triton", backward, CPU.device, CPU.dtype)["correct"]
    assert sizes == [size, size]


def test_nan_is_wrong() -> None:
    truth = [torch.ones(3, dtype=torch.float64)]
    for value, correct in ((1.0, True), (float("nan"), False)):
        found = gpu_check_rows.judge([torch.full((3,), value)], truth, truth, factor=2)
        assert found["correct"] == correct


def _measure(monkeypatch: pytest.MonkeyPatch, makers: dict[str, Any], end: float = float("inf")) -> Found:
    """gpu_check_rows.measure where each call says how long it takes, by name."""
    monkeypatch.setattr(gpu_check_rows, "peak_memory_of_call", lambda call, device: 2**20)
    monkeypatch.setattr(
        gpu_check_rows,
        "time_interleaved",
        lambda calls, *_, **__: {name: Timing(call(0), 0.5, 2.0, 50, 0.25) for name, call in calls.items()},
    )
    ceilings = {"copy_GB_per_s": 4000.0, "matmul_TFLOP_per_s": {"bf16": 800.0}}
    context = Context(torch.device("cuda"), ceilings, end)
    return gpu_check_rows.measure(makers, context, Protocol(), flop=8 * 10**11, moved=2 * 10**9)


def test_figures_agree_and_who_is_ours_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise ValueError("head_dim=72")

    times = {"ours": 2.0, "ours eager": 1.5, "flash": 4.0, "cudnn": 3.0}
    makers = {name: lambda ms=ms: lambda _: ms for name, ms in times.items()} | {"efficient": refuses}
    found = _measure(monkeypatch, makers)
    assert (found["ms"], found["host_ms"], found["host_bound"]) == (2.0, 0.25, False)
    assert (found["best_peer"], found["ratio"]) == ("cudnn", 1.5)
    assert (found["TFLOP_per_s"], found["GB_per_s"]) == (400.0, 1000.0)
    assert (found["floor_ms"], found["share_of_floor"]) == (1.0, 0.5)
    assert {name: subject["ms"] for name, subject in found["subjects"].items()} == times
    assert found["missing"] == {"efficient": "ValueError: head_dim=72"}


def test_a_late_row_gives_what_it_has_and_needs_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> Callable[[int], float]:
        monkeypatch.setattr(Context, "is_late", lambda self: True)
        return lambda _: 1.0

    found = _measure(monkeypatch, {"ours": slow, "timm": lambda: lambda _: 2.0})
    assert found["missing"] == {"timm": "no time left"} and found["ratio"] is None
    with pytest.raises(RuntimeError, match="no time left"):
        _measure(monkeypatch, {"ours": slow}, end=0.0)


@pytest.mark.parametrize(("training", "compiled"), [(False, False), (True, False), (False, True)])
def test_a_model_is_served_once_captured_and_compared(
    training: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row as it is, but for the capture and the clock: every call that needs no compiler runs."""
    monkeypatch.setattr(gpu_check_models, "served", lambda model, images: lambda given: model(given))
    monkeypatch.setattr(gpu_check_models, "_timm_model", lambda name, context: vit_fast.create_model(name).half())
    made: dict[str, object] = {}

    def measure(makers: dict[str, Any], *_: object, **__: object) -> Found:
        for name, make in makers.items():
            made[name] = None if "compiled" in name else make()(0)
        return {"ms": 4.0, "missing": {}}

    monkeypatch.setattr(gpu_check_models, "measure", measure)
    found = gpu_check_models._fill("vit_test", 2, training, compiled, CPU)
    assert found["correct"] and found["images_per_s"] == 500
    ours = {"ours"} if training else {"ours", "ours eager"}
    assert set(made) == ours | ({"timm compiled"} if compiled else {"timm", "sdpa"})
    if not training:
        assert torch.equal(made["ours"], made["ours eager"])
    else:
        assert all(out is None for out in made.values())  # what an optimizer's step gives


def test_a_wrong_model_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured graph is held to the rule too."""
    monkeypatch.setattr(gpu_check_models, "served", lambda model, images: lambda given: model(given) * 1.1)
    monkeypatch.delattr(gpu_check_models, "measure")
    assert not gpu_check_models._fill("vit_test", 2, False, False, CPU)["correct"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"name": "a", "error": "RuntimeError: x"}, "failed: RuntimeError"),
        ({"name": "a", "correct": False, "correctness": "error 1, allowed 0", "ms": 1.0}, "WRONG"),
        ({"name": "a", "correct": True}, "right, not measured"),
    ],
)
def test_a_speed_is_shown_only_for_what_is_right(row: dict[str, object], text: str) -> None:
    table = gpu_check.table({"machine": {"device": "a GPU"}, "rows": [row | {"outcome": gpu_check._outcome(row)}]})
    assert text in table and " ms " not in table
