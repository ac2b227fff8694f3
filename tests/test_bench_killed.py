"""Killed, hanging, interrupted and failing runs: finished rows stay, and the other candidates run."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench_support import QUICK, Notes, assert_no_speed, breaking, build, plan, rows_by_candidate

from vit_fast.benchmarks import machine, records, runner
from vit_fast.benchmarks.configuration import make_configuration

pytestmark = pytest.mark.usefixtures("small_ceilings")


def run_out() -> None:
    """Memory runs out, wrapped, as a compiler does it."""
    try:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("backend failed") from error


def press() -> None:
    raise KeyboardInterrupt


def hang() -> None:
    """The limit is long, and never waited for: the hanging one lets the clock strike itself."""
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    time.sleep(600)


def test_out_of_memory_halves_the_batch_says_so_and_loses_nobody_else(add) -> None:
    add("greedy", breaking(run_out, after=0, above=2))
    add("hopeless", breaking(run_out, after=0))
    add("later", breaking(run_out, after=6, above=2))  # while it is timed: four calls are before that
    notes = Notes()
    rows = rows_by_candidate(runner.run(plan("greedy", "hopeless", "later", "timm", batch_sizes=(4,)), notes))
    for name in ("greedy", "later"):
        assert (rows[name]["batch"], rows[name]["requested_batch"], rows[name]["status"]) == (2, 4, "measured"), name
    assert rows["greedy"]["best_peer"] == "timm"
    assert (rows["timm"]["batch"], rows["timm"]["status"]) == (4, "measured")
    assert rows["hopeless"]["status"] == "out of memory"
    assert_no_speed(rows["hopeless"])
    retried = [text.partition("retrying with ")[2] for text in notes.said if "retrying" in text]
    assert retried == ["batch 2: greedy, hopeless, later", "batch 1: hopeless"]


def test_ctrl_c_keeps_what_was_measured(add) -> None:
    add("pressed", breaking(press, above=1))
    record = runner.run(plan("eager", "pressed", batch_sizes=(1, 2, 4)), Notes())
    assert record["interrupted"]
    assert [(row["batch"], row["candidate"]) for row in record["rows"]] == [
        (batch, candidate) for batch in (1, 2, 4) for candidate in ("eager", "pressed")
    ]
    assert [row["status"] for row in record["rows"]] == ["measured"] * 2 + ["interrupted"] * 4
    for row in record["rows"][2:]:
        assert_no_speed(row)


KILLED = """
import os, sys
from pathlib import Path
from vit_fast.benchmarks import builders, candidates, configuration, machine, records, runner
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Protocol

machine.MATMUL_SIZE["cpu"], machine.COPY_BYTES["cpu"] = 64, 2**16

def deadly(candidate, task):
    if task.batch_size == 2:
        os.kill(os.getpid(), 9)
    return builders.build(candidates.CANDIDATES["sdpa"], task)

candidates.CANDIDATES["deadly"] = Candidate(base="deadly", builder=deadly)
chosen = configuration.make_configuration(models=["vit_test"], batch_sizes=[1, 2], dtypes=["fp32"],
    candidates=["eager", "deadly"], device="cpu",
    protocol=Protocol(repeats=4, seconds=60.0, least_repeats=3, warmup_repeats=1))
journal = records.Journal.begin(Path(sys.argv[1]), chosen.request, machine.describe("cpu"))
runner.run(chosen, None, journal)
"""


@pytest.mark.slow
def test_kill_9_keeps_the_rows_and_the_run_can_go_on(add, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not folder.exists()
    with pytest.raises(ValueError, match=r"run\.partial contains an unfinished run; add --resume"):
        records.check_folder(folder)
    with (tmp_path / "run.partial" / "rows.jsonl").open("a") as file:
        file.write('{"kind": "row", "val')  # cut in the middle of a line
    add("deadly", lambda task: build("sdpa", task))
    journal = records.Journal.resume(folder)
    before = list(journal.found["row"])
    done = [(row["candidate"], row["batch"], row["status"]) for row in before]
    assert done == [("eager", 1, "measured"), ("deadly", 1, "measured")]
    again = dataclasses.replace(make_configuration(**journal.header["request"]), protocol=QUICK)
    record = runner.run(again, None, journal)
    assert [(row["batch"], row["candidate"], row["status"]) for row in record["rows"]] == [
        (batch, candidate, "measured") for batch in (1, 2) for candidate in ("eager", "deadly")
    ]
    assert [row["ms"] for row in record["rows"][:2]] == [row["ms"] for row in before]
    assert record["ceilings"]["taken"] >= 4
    journal.finish({"record.json": records.to_json(record)}, keep=False)
    assert records.read_record(folder)["rows"] == record["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(ValueError, match="must contain an unfinished run"):
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
    found = records.Journal.resume(folder).found["row"]
    assert {(row["candidate"], row["batch"]): row["status"] for row in found} == {
        ("eager", 1): "measured",
        ("deadly", 1): "measured",
        ("eager", 2): "measured",
        ("deadly", 2): "failed",
    }
    assert any("the process ended twice" in (row["reason"] or "") for row in found)


@pytest.mark.fast_cases("while it is timed")
@pytest.mark.parametrize("calls_before", [0, 9], ids=["while it is checked", "while it is timed"])
def test_what_hangs_is_ended_and_leaves_the_others(calls_before: int, add) -> None:
    add("hanging", breaking(hang, after=calls_before))
    rows = rows_by_candidate(runner.run(plan("hanging", "eager")))
    assert rows["hanging"]["status"] == "failed" and "TimeoutError: more than 900 s" in rows["hanging"]["reason"]
    assert_no_speed(rows["hanging"])
    assert rows["eager"]["status"] == "measured"


def test_a_run_is_not_gone_on_with_on_another_machine(tmp_path: Path) -> None:
    journal = records.Journal.begin(tmp_path / "run", {}, machine.describe("cpu"))
    journal.check_machine(machine.describe("cpu"))
    with pytest.raises(ValueError, match=r"commit must be .* got another"):
        journal.check_machine(machine.describe("cpu") | {"commit": "another"})
