"""A run: what its record holds, and that nothing which goes wrong with one subject loses or flatters another."""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vit_fast.benchmarks import machine, preparation, records, runner, subjects
from vit_fast.benchmarks.machine import best_ceilings
from vit_fast.benchmarks.plan import DEFAULT_BATCH_SIZES, Plan, make_plan
from vit_fast.benchmarks.rows import SPEED_FIELDS
from vit_fast.benchmarks.subjects import Subject, Task, choose, parse_label
from vit_fast.benchmarks.subjects_ours import build
from vit_fast.benchmarks.timing import Protocol
from vit_fast.errors import UnsupportedInputError

QUICK = Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1)


class Notes:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.total, self.steps, self.said, self.doing = 0, 0.0, [], []

    def start(self, steps: int) -> None:
        self.total = steps

    def now(self, what: str) -> None:
        self.doing.append(what)

    def done(self, steps: float) -> None:
        self.steps += steps

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runner.measure_ceilings.__globals__["MATMUL_SIZE"], "cpu", 64)
    monkeypatch.setitem(runner.measure_ceilings.__globals__["COPY_BYTES"], "cpu", 2**16)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers a subject for the time of a test."""

    def add(name: str, build: Callable[[Task], object], **fields: object) -> None:
        subjects.all_subjects()
        monkeypatch.setitem(subjects._SUBJECTS, name, Subject(name, "for a test", build, **fields))

    return add


def plan(*labels: str, batch_sizes: tuple[int, ...] = (2,), **fields: object) -> Plan:
    return make_plan(
        models=["vit_test"],
        batch_sizes=batch_sizes,
        dtypes=["fp32"],
        subjects=labels,
        device="cpu",
        protocol=QUICK,
        **fields,
    )


def rows_by_subject(record: dict) -> dict[str, dict]:
    return {row["subject"]: row for row in record["rows"]}


def assert_no_speed(row: dict) -> None:
    assert all(row[field] is None for field in SPEED_FIELDS), row


def test_a_record_holds_every_figure_and_they_agree() -> None:
    notes = Notes()
    record = runner.run(plan("eager", "sdpa", "timm", "transformers", batch_sizes=(1, 4)), notes)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert [(row["subject"], row["batch"]) for row in record["rows"]] == [
        (subject, batch) for batch in (1, 4) for subject in ("eager", "sdpa", "timm", "transformers")
    ]
    ceiling = record["ceilings"]["matmul_TFLOP_per_s"]["fp32"]
    flops = 2 * 2 * 17 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 4 * 17 * 17 * 64 + 2 * 16 * 3 * 64 * 64 + 2 * 64 * 10
    for row in record["rows"]:
        assert row["status"] == "measured", row
        assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row["repeats"] == 4
        assert row["images_per_s"] == pytest.approx(row["batch"] / row["ms"] * 1000)
        assert row["TFLOP_per_s"] == pytest.approx(row["images_per_s"] * flops / 1e12)
        if row["TFLOP_per_s"] <= ceiling:
            assert row["ceiling_share"] == pytest.approx(row["TFLOP_per_s"] / ceiling)
        assert row["max_error"] <= row["allowed_error"] < 1e-3
        assert 0.3 < row["peak_MiB"] < 20
        rivals = [r for r in record["rows"] if r["batch"] == row["batch"] and r["subject"] in ("timm", "transformers")]
        best = max(rivals, key=lambda rival: rival["images_per_s"])
        assert row["best_peer"] == best["subject"]
        assert len(row["samples_ms"]) == 4
        if row is not best:
            low, high = row["ratio_interval"]
            assert low <= high and row["verdict"] in ("faster", "slower", "no difference", "cannot be ranked")
        turns = [theirs / ours for theirs, ours in zip(best["samples_ms"], row["samples_ms"], strict=True)]
        assert row["ratio_to_best_peer"] == pytest.approx(statistics.median(turns))
    assert notes.steps == pytest.approx(notes.total)
    assert not record["interrupted"]
    assert [(control["batch"], len(control["ms"])) for control in record["controls"]] == [(1, 2), (4, 2)]
    assert all(
        control["resolution"] >= 0 and control["conditions"]["busy"] is not None for control in record["controls"]
    )
    assert record["ceilings"]["taken"] == 3  # before, between and after


def test_a_wrong_subject_gets_no_speed_and_the_right_ones_keep_theirs(add) -> None:
    def zero_bias(task: Task) -> object:
        weights = {**task.weights, "head.bias": torch.zeros_like(task.weights["head.bias"])}
        return build("sdpa", dataclasses.replace(task, weights=weights))

    add("wrong", zero_bias)
    notes = Notes()
    rows = rows_by_subject(runner.run(plan("wrong", "sdpa"), notes))
    assert rows["wrong"]["status"] == "wrong"
    assert rows["wrong"]["max_error"] > rows["wrong"]["allowed_error"]
    assert_no_speed(rows["wrong"])
    assert rows["sdpa"]["status"] == "measured"
    assert any("wrong is WRONG" in text for text in notes.said)


def test_a_subject_that_is_right_only_at_first_is_wrong(add) -> None:
    """What a replayed graph on stale inputs would do: the same answer whatever comes in."""

    def stale(task: Task) -> object:
        model, kept = build("sdpa", task), []

        def answer(images: torch.Tensor) -> torch.Tensor:
            kept.append(model(images))
            return kept[0] if len(kept) == 1 else kept[1]

        return answer

    add("stale", stale)
    row = rows_by_subject(runner.run(plan("stale")))["stale"]
    assert row["status"] == "wrong"
    assert_no_speed(row)


def test_missing_refused_and_broken_subjects_are_rows_with_reasons(add) -> None:
    def refuse(task: Task) -> object:
        raise UnsupportedInputError("this library", ["one reason", "another reason"])

    def break_down(task: Task) -> object:
        raise RuntimeError("it broke\nin two lines")

    add("missing", build, packages=("a_package_that_is_not_there",))
    add("refused", refuse)
    add("broken", break_down)
    rows = rows_by_subject(runner.run(plan("missing", "refused", "broken", "eager")))
    assert (rows["missing"]["status"], rows["missing"]["reason"]) == (
        "not installed",
        "pip install a_package_that_is_not_there",
    )
    assert rows["refused"]["status"] == "unsupported"
    assert "one reason; another reason" in rows["refused"]["reason"]
    assert (rows["broken"]["status"], rows["broken"]["reason"]) == ("failed", "RuntimeError: it broke in two lines")
    for name in ("missing", "refused", "broken"):
        assert_no_speed(rows[name])
    assert rows["eager"]["status"] == "measured"
    assert rows["eager"]["ratio_to_best_peer"] is None


def test_a_subject_that_breaks_while_it_is_timed_is_failed_and_the_others_are_timed(add) -> None:
    def later(task: Task) -> object:
        model, calls = build("sdpa", task), []

        def answer(images: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 6:
                raise RuntimeError("worn out")
            return model(images)

        return answer

    add("later", later)
    rows = rows_by_subject(runner.run(plan("later", "eager")))
    assert rows["later"]["status"] == "failed"
    assert "worn out" in rows["later"]["reason"]
    assert_no_speed(rows["later"])
    assert rows["eager"]["status"] == "measured"


def test_a_definition_that_cannot_run_fails_its_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expect = preparation.expect

    def only_batch_1(task: Task, *rest: object) -> object:
        if task.batch_size > 1:
            raise RuntimeError("not implemented for this")
        return expect(task, *rest)

    monkeypatch.setattr(preparation, "expect", only_batch_1)
    record = runner.run(plan("eager", batch_sizes=(1, 2)))
    assert [row["status"] for row in record["rows"]] == ["measured", "failed"]
    assert "definition: RuntimeError: not implemented" in record["rows"][1]["reason"]


def greedy(most: int) -> Callable[[Task], object]:
    """A subject that runs out of memory above a batch size; wrapped, as a compiler does it."""

    def make(task: Task) -> object:
        model = build("sdpa", task)

        def answer(images: torch.Tensor) -> torch.Tensor:
            if len(images) > most:
                try:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
                except torch.OutOfMemoryError as error:
                    raise RuntimeError("backend failed") from error
            return model(images)

        return answer

    return make


def test_out_of_memory_halves_the_batch_says_so_and_goes_on(add) -> None:
    add("greedy", greedy(2))
    add("hopeless", greedy(0))
    notes = Notes()
    rows = rows_by_subject(runner.run(plan("greedy", "hopeless", "timm", batch_sizes=(8,)), notes))
    assert (rows["greedy"]["batch"], rows["greedy"]["requested_batch"]) == (2, 8)
    assert rows["greedy"]["status"] == "measured"
    assert rows["greedy"]["best_peer"] == "timm"
    assert (rows["timm"]["batch"], rows["timm"]["status"]) == (8, "measured")
    assert rows["hopeless"]["status"] == "out of memory"
    assert_no_speed(rows["hopeless"])
    assert [text.partition("going on with ")[2] for text in notes.said if "going on" in text] == [
        "batch 4: greedy, hopeless",
        "batch 2: greedy, hopeless",
        "batch 1: hopeless",
    ]


def test_running_out_of_memory_while_timing_loses_nobody_else(add) -> None:
    def later(task: Task) -> object:
        model, calls = build("sdpa", task), []

        def answer(images: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(images) > 1 and len(calls) > 6:
                raise torch.OutOfMemoryError("out")
            return model(images)

        return answer

    add("later", later)
    rows = rows_by_subject(runner.run(plan("later", "eager", batch_sizes=(2,))))
    assert (rows["later"]["status"], rows["later"]["batch"]) == ("measured", 1)
    assert (rows["eager"]["status"], rows["eager"]["batch"]) == ("measured", 2)


def test_ctrl_c_keeps_what_was_measured(add) -> None:
    def pressed(task: Task) -> object:
        model, calls = build("sdpa", task), []

        def answer(images: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(images) == 2 and len(calls) > 6:
                raise KeyboardInterrupt
            return model(images)

        return answer

    add("pressed", pressed)
    record = runner.run(plan("eager", "pressed", batch_sizes=(1, 2, 4)), Notes())
    assert record["interrupted"]
    assert [(row["batch"], row["subject"], row["status"]) for row in record["rows"]] == [
        (1, "eager", "measured"),
        (1, "pressed", "measured"),
        (2, "eager", "interrupted"),
        (2, "pressed", "interrupted"),
        (4, "eager", "interrupted"),
        (4, "pressed", "interrupted"),
    ]
    for row in record["rows"][2:]:
        assert_no_speed(row)


def test_a_spent_time_budget_starts_nothing_new_and_says_so() -> None:
    record = runner.run(plan("eager", "sdpa", batch_sizes=(1, 2), time_budget_s=1e-6))
    assert [row["status"] for row in record["rows"]] == ["skipped"] * 4
    assert all("time budget" in row["reason"] for row in record["rows"])


def test_a_compiled_subject_is_checked_and_timed_like_any_other() -> None:
    record = runner.run(plan("sdpa+compile"))
    row = record["rows"][0]
    assert (row["status"], row["compile_mode"]) == ("measured", "default"), row
    assert row["first_call_s"] > row["ms"] / 1e3


def test_labels_carry_compile_modes() -> None:
    cpu = torch.device("cpu")
    assert parse_label("timm+compile:max-autotune").label == "timm+compile:max-autotune"
    assert parse_label("timm").mode == "none"
    assert [s.label for s in choose(["eager", "timm+compile"], ["none", "default"], cpu)] == [
        "eager",
        "eager+compile",
        "timm+compile",
    ]
    for device in (cpu, torch.device("cuda")):
        labels = {selection.label for selection in choose(None, None, device)}
        assert {"eager", "sdpa", "eager+compile", "sdpa+compile", "timm", "transformers"} <= labels
    assert DEFAULT_BATCH_SIZES == {"cpu": (1, 8), "cuda": (1, 32, 256)}


@pytest.mark.parametrize(
    ("labels", "modes", "message"),
    [
        (["tim"], None, "unknown subject 'tim': did you mean timm"),
        (["eager+compile:fast"], None, "unknown compile mode 'fast'"),
        (["eager+compiled"], None, "accepted behind \\+compile"),
        (["eager"], ["quick"], "unknown compile mode 'quick'"),
    ],
)
def test_unknown_subjects_and_modes_are_refused(labels, modes, message) -> None:
    with pytest.raises(ValueError, match=message):
        choose(labels, modes, torch.device("cpu"))


def test_a_row_above_its_ceiling_is_a_named_defect_and_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    low = {"copy_GB_per_s": 1.0, "copy_bytes": 1, "matmul_TFLOP_per_s": {"fp32": 1e-9}, "matmul_size": 1}
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: low)
    row = runner.run(plan("sdpa"))["rows"][0]
    assert row["ceiling_share"] is None and row["defect"].endswith("x the matmul ceiling of this run")


def test_the_best_ceiling_of_a_run_counts() -> None:
    taken = [
        {"copy_GB_per_s": copy, "copy_bytes": 1, "matmul_TFLOP_per_s": {"fp32": matmul}, "matmul_size": 1}
        for copy, matmul in ((1.0, 5.0), (3.0, 2.0), (2.0, 4.0))
    ]
    best = best_ceilings(taken)
    assert (best["copy_GB_per_s"], best["matmul_TFLOP_per_s"], best["taken"]) == (3.0, {"fp32": 5.0}, 3)


def test_a_batch_that_no_memory_holds_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match=r"batch size 99999999999: needs at least [\d,]+ GiB, cpu has [\d,]+ GiB"):
        plan("eager", batch_sizes=(1, 99999999999))


KILLED = """
import os, sys
from pathlib import Path
from vit_fast.benchmarks import machine, plan, records, runner, subjects
from vit_fast.benchmarks.subjects_ours import build
from vit_fast.benchmarks.timing import Protocol

machine.MATMUL_SIZE["cpu"], machine.COPY_BYTES["cpu"] = 64, 2**16

def deadly(task):
    if task.batch_size == 2:
        os.kill(os.getpid(), 9)
    return build("sdpa", task)

subjects.register(subjects.Subject("deadly", "for a test", deadly))
chosen = plan.make_plan(models=["vit_test"], batch_sizes=[1, 2], dtypes=["fp32"], subjects=["eager", "deadly"],
    device="cpu", protocol=Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1))
journal = records.Journal.begin(Path(sys.argv[1]), chosen.request, machine.describe("cpu"))
runner.run(chosen, None, journal)
"""


def test_kill_9_keeps_the_rows_and_the_run_can_go_on(add, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not folder.exists()
    with pytest.raises(ValueError, match=r"run\.partial: holds an unfinished run; accepted is --resume"):
        records.check_folder(folder)
    with (tmp_path / "run.partial" / "rows.jsonl").open("a") as file:
        file.write('{"kind": "row", "val')  # cut in the middle of a line
    add("deadly", lambda task: build("sdpa", task))
    journal = records.Journal.resume(folder)
    before = [value for kind, value in journal.entries if kind == "row"]
    assert [(row["subject"], row["batch"], row["status"]) for row in before] == [
        ("eager", 1, "measured"),
        ("deadly", 1, "measured"),
    ]
    again = dataclasses.replace(make_plan(**journal.header["request"]), protocol=QUICK)
    record = runner.run(again, None, journal)
    assert [(row["batch"], row["subject"], row["status"]) for row in record["rows"]] == [
        (batch, subject, "measured") for batch in (1, 2) for subject in ("eager", "deadly")
    ]
    assert [row["ms"] for row in record["rows"][:2]] == [row["ms"] for row in before]
    assert record["ceilings"]["taken"] >= 4
    journal.finish({"record.json": records.to_json(record)}, keep=False)
    assert records.read_record(folder)["rows"] == record["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(ValueError, match="no unfinished run is there"):
        records.Journal.resume(folder)


AGAIN = KILLED.replace("records.Journal.begin(Path(sys.argv[1]), chosen.request, machine.describe(\"cpu\"))",
                       "records.Journal.resume(Path(sys.argv[1]))")  # fmt: skip


def test_what_ends_the_process_twice_is_failed_and_leaves_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for script in (KILLED, AGAIN):
        ended = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    ended = subprocess.run([sys.executable, "-c", AGAIN, str(folder)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = [value for kind, value in records.Journal.resume(folder).entries if kind == "row"]
    assert {(row["subject"], row["batch"]): row["status"] for row in found} == {
        ("eager", 1): "measured",
        ("deadly", 1): "measured",
        ("eager", 2): "measured",
        ("deadly", 2): "failed",
    }
    assert any("the process ended while this was prepared" in (row["reason"] or "") for row in found)


@pytest.mark.parametrize("calls_before", [0, 6], ids=["while it is checked", "while it is timed"])
def test_what_hangs_is_ended_and_leaves_the_others(calls_before: int, add, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is long for all others, and never waited for: the hanging one lets the clock strike itself."""

    def hanging(task: Task) -> object:
        model, calls = build("sdpa", task), []

        def answer(images: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > calls_before:
                signal.setitimer(signal.ITIMER_REAL, 1e-3)
                time.sleep(600)
            return model(images)

        return answer

    add("hanging", hanging)
    rows = rows_by_subject(runner.run(plan("hanging", "eager")))
    assert rows["hanging"]["status"] == "failed" and "TimeoutError: more than 900 s" in rows["hanging"]["reason"]
    assert_no_speed(rows["hanging"])
    assert rows["eager"]["status"] == "measured"


def test_a_run_is_not_gone_on_with_on_another_machine(tmp_path: Path) -> None:
    journal = records.Journal.begin(tmp_path / "run", {}, machine.describe("cpu"))
    journal.check_machine(machine.describe("cpu"))
    with pytest.raises(ValueError, match=r"commit was .* is another"):
        journal.check_machine(machine.describe("cpu") | {"commit": "another"})
