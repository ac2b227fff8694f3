"""What kills, hangs, interrupts or fills up a run: the rows stay, and the others go on."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_support import QUICK, Notes, assert_no_speed, plan, rows_by_subject

from vit_fast.benchmarks import machine, records, runner
from vit_fast.benchmarks.plan import make_plan
from vit_fast.benchmarks.subjects import Task
from vit_fast.benchmarks.subjects_models import build

pytestmark = pytest.mark.usefixtures("small_ceilings")


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


@pytest.mark.slow
def test_running_out_of_memory_while_timing_loses_nobody_else(add) -> None:
    def later(task: Task) -> object:
        model, calls = build("sdpa", task), []

        def answer(images: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(images) > 1 and len(calls) > 9:
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
            if len(images) == 2 and len(calls) > 9:
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


KILLED = """
import os, sys
from pathlib import Path
from vit_fast.benchmarks import machine, plan, records, runner, subjects
from vit_fast.benchmarks.subjects_models import build
from vit_fast.measure.clock import Protocol

machine.MATMUL_SIZE["cpu"], machine.COPY_BYTES["cpu"] = 64, 2**16

def deadly(task):
    if task.batch_size == 2:
        os.kill(os.getpid(), 9)
    return build("sdpa", task)

subjects.register("deadly", "for a test", deadly)
chosen = plan.make_plan(models=["vit_test"], batch_sizes=[1, 2], dtypes=["fp32"], subjects=["eager", "deadly"],
    device="cpu", protocol=Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1))
journal = records.Journal.begin(Path(sys.argv[1]), chosen.request, machine.describe("cpu"))
runner.run(chosen, None, journal)
"""


@pytest.mark.slow
def test_kill_9_keeps_the_rows_and_the_run_can_go_on(add, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not folder.exists()
    with pytest.raises(ValueError, match=r"run\.partial: holds an unfinished run; expected --resume"):
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


@pytest.mark.slow
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


@pytest.mark.fast_cases("while it is timed")
@pytest.mark.parametrize("calls_before", [0, 9], ids=["while it is checked", "while it is timed"])
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
