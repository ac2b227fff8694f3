"""A run: what its record holds, and that nothing which goes wrong with one subject loses or flatters another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch

from vit_fast.benchmarks import runner, subjects
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
        assert row["ceiling_share"] == pytest.approx(row["TFLOP_per_s"] / ceiling)
        assert row["max_error"] <= row["allowed_error"] < 1e-3
        assert 0.3 < row["peak_MiB"] < 20
        rivals = [r for r in record["rows"] if r["batch"] == row["batch"] and r["subject"] in ("timm", "transformers")]
        best = max(rivals, key=lambda rival: rival["images_per_s"])
        assert row["best_peer"] == best["subject"]
        assert row["ratio_to_best_peer"] == pytest.approx(row["images_per_s"] / best["images_per_s"])
    assert notes.steps == pytest.approx(notes.total)
    assert not record["interrupted"]


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
    expect = runner.expect

    def only_batch_1(task: Task, *rest: object) -> object:
        if task.batch_size > 1:
            raise RuntimeError("not implemented for this")
        return expect(task, *rest)

    monkeypatch.setattr(runner, "expect", only_batch_1)
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
