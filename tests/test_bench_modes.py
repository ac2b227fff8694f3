"""Modes of a run: latency, search for the best batch size, several image sizes, location of the data."""

from __future__ import annotations

import dataclasses
import json
import math
from unittest.mock import Mock

import pytest
import torch
from bench_support import QUICK, build, samples_of

from vit_fast.apps.data import sample_image
from vit_fast.benchmarks import configuration, preparation, rendering, report, runner
from vit_fast.benchmarks.candidates import parse_candidate
from vit_fast.benchmarks.configuration import LATENCY, Configuration, make_configuration
from vit_fast.benchmarks.models import Task
from vit_fast.benchmarks.records import PERCENTILE_REPEATS, add_timing, compare_records, finish, make_row
from vit_fast.measure.clock import Timing, percentile

pytestmark = pytest.mark.usefixtures("small_ceilings")

VIT_TEST = {"models": ["vit_test"], "dtypes": ["fp32"], "device": "cpu"}


def test_latency_is_of_one_image_and_says_its_99th_percentile() -> None:
    plan = make_configuration(candidates=["sdpa"], latency=True, **VIT_TEST)
    assert plan.batch_sizes == (1,) and plan.protocol == LATENCY
    assert "--latency" in report.command({"configuration": plan.to_dict()})
    assert "--batch-sizes" not in report.command({"configuration": plan.to_dict()})
    with pytest.raises(ValueError, match="must be 1 or absent with --latency"):
        make_configuration(latency=True, batch_sizes=[1, 8], **VIT_TEST)
    (group,) = plan.groups()
    rows = [make_row(group, parse_candidate("sdpa"), "measured") for _ in range(2)]
    samples = [1 + number % 97 / 10 for number in range(PERCENTILE_REPEATS)]
    for row, taken in zip(rows, (samples, samples[1:]), strict=True):
        add_timing(row, Timing.from_samples(taken), group)
    assert [rows[0][key] for key in ("ms_p90", "ms_p99")] == pytest.approx(
        [percentile(samples, x) for x in (0.9, 0.99)]
    )
    assert rows[1]["ms_p90"] is rows[1]["ms_p99"] is None, "too few"
    titles = {column.title for column in report.filled_columns({"rows": rows, "controls": []})}
    assert {"p90 ms", "p99 ms"} <= titles


class Simulated:
    """A machine on which a call takes so many ms by its batch."""

    def __init__(self, ms: dict[int, float]) -> None:
        self.ms, self.asked = ms, []

    def measure(self, run: object, group: object, selections: object) -> list[object]:
        self.asked.append(group.batch_size)
        for selection in selections:
            row = make_row(group, selection, "measured")
            ms = self.ms[group.batch_size] * (1 if selection.name == "eager" else 2)
            run.journal.add(
                "row", row | {"images_per_s": 1e3 * group.batch_size / ms, "ms": ms, "samples_ms": [ms] * 4}
            )
        return []


@pytest.mark.fast_cases("ms1-asked1")
@pytest.mark.parametrize(
    ("ms", "asked"),
    [
        ({1: 1.0, 2: 1.5, 4: 2.5, 8: 5.0, 16: 10.0}, [1, 2, 4, 8]),  # 8 gains nothing over 4
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0}, [1, 2, 4, 8, 16, 32, 64]),
        ({1: 1.0, 2: 3.0}, [1, 2]),
    ],
)
def test_the_batch_is_doubled_as_long_as_that_gains(ms, asked, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(ms)
    monkeypatch.setattr(runner, "make_problem", lambda *_: None)
    monkeypatch.setattr(runner._Run, "_measure_group", lambda self, *given: simulated.measure(self, *given))
    plan = make_configuration(candidates=["eager", "sdpa"], batch_sizes="best", protocol=QUICK, **VIT_TEST)
    record = runner.run(plan)
    assert simulated.asked == asked
    assert sorted({row["requested_batch"] for row in record["rows"]}) == asked
    best = max(asked, key=lambda batch: batch / ms[batch])
    lines = [line for line in report.remarks(record) if "highest throughput" in line]
    assert len(lines) == 2 and all(f"at batch {best}, " in line for line in lines)
    assert "--batch-sizes best" in report.command(record)


def test_a_search_goes_no_further_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vit_fast.benchmarks.configuration.memory_bytes", lambda _: 2**20)
    sizes = make_configuration(batch_sizes="best", **VIT_TEST).batch_sizes
    assert sizes[0] == 1 and 1 < sizes[-1] < 64


def test_several_image_sizes_are_contests_of_their_own() -> None:
    plan = make_configuration(
        candidates=["eager", "sdpa"], batch_sizes=[2], img_size=[[32], [64, 32]], protocol=QUICK, **VIT_TEST
    )
    record = runner.run(plan)
    assert [(row["img_size"], row["tokens"], row["status"]) for row in record["rows"]] == [
        (size, tokens, "measured") for size, tokens in (([32, 32], 17), ([64, 32], 33)) for _ in range(2)
    ]
    assert [control["img_size"] for control in record["controls"]] == [[32, 32], [64, 32]]
    assert list(report.groups(record)) == ["vit_test, fp32, batch 2, 32x32", "vit_test, fp32, batch 2, 64x32"]
    assert "--img-size 32,64x32" in report.command(record)


def test_tf32_rounds_products_of_that_group_alone(add) -> None:
    """Asked for on a GPU; what the definition, the ceiling and a candidate see is told by torch itself."""
    with pytest.raises(ValueError, match="must be one of fp32, fp16, bf16 on cpu, got 'tf32'"):
        make_configuration(candidates=["eager"], **VIT_TEST | {"dtypes": ["tf32"]})
    seen: dict[str, set[str]] = {}

    def watched(task: Task) -> object:
        model = build("sdpa", task)

        def answer(images: torch.Tensor) -> torch.Tensor:
            seen.setdefault(str(task.batch_size), set()).add(torch.get_float32_matmul_precision())
            return model(images)

        return answer

    add("watched", watched)
    before = torch.get_float32_matmul_precision()
    plan = make_configuration(candidates=["watched"], batch_sizes=[2], protocol=QUICK, **VIT_TEST)
    record = runner.run(dataclasses.replace(plan, dtypes=("fp32", "tf32")))
    assert [(row["dtype"], row["status"]) for row in record["rows"]] == [("fp32", "measured"), ("tf32", "measured")]
    assert seen == {"2": {before, "high"}} and torch.get_float32_matmul_precision() == before
    assert set(record["ceilings"]["matmul_TFLOP_per_s"]) == {"fp32", "tf32"}


def on_host(monkeypatch: pytest.MonkeyPatch, **asked: object) -> Configuration:
    """Simulates --data host on a CPU, because pinned memory needs CUDA."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: batch.clone())
    made = make_configuration(candidates=["eager", "timm"], batch_sizes=[2], protocol=QUICK, **VIT_TEST, **asked)
    return dataclasses.replace(made, data="host", request=made.request | {"data": "host"})


def test_data_on_the_host_is_said_by_rows_titles_labels_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    record = runner.run(on_host(monkeypatch))
    assert [(row["status"], row["data"]) for row in record["rows"]] == [("measured", "host")] * 2
    assert record["controls"][0]["data"] == record["configuration"]["data"] == "host"
    assert record["rows"][0]["best_peer"] == "timm" and record["rows"][0]["ratio_interval"] is not None
    assert list(report.groups(record)) == ["vit_test, fp32, batch 2, 32x32, data on the host"]
    page, table = rendering.render({"host": record}), report.markdown(record)
    for text in (page, table):
        assert "timm (data on the host)" in text and "--data host" in text


@pytest.mark.parametrize("training", [False, True])
def test_the_timed_call_copies_from_pinned_memory(training: bool, add, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches stay on the host; what is called, and what is checked, is given them on the device, here torch's meta."""
    pinned, given = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: pinned.append(batch) or batch)

    class Noting(torch.nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            given.append(images.device.type)
            return super().forward(images.flatten(1))

    add("noting", lambda task: Noting(3072, 10, device=task.device))
    (group,) = make_configuration(candidates=["noting"], batch_sizes=[2], train=training, **VIT_TEST).groups()
    group, meta = dataclasses.replace(group, data="host"), torch.device("meta")
    task, batches = preparation.make_task(group, [sample_image()], meta)
    assert len(pinned) == len(batches) >= 2 and {batch.device.type for batch in batches} == {"cpu"}
    step = lambda _, __, function: Mock(side_effect=function, gradients=lambda x, *_: function(x))  # noqa: E731  # short
    monkeypatch.setattr(preparation, "TrainingStep", step)
    _, call, check = preparation._callers(parse_candidate("noting"), task, batches)
    for number in range(3):
        call(number)
    check()
    assert given == ["meta"] * 4


def test_seconds_last_as_long_as_said_and_are_not_cut_short() -> None:
    plan = make_configuration(candidates=["sdpa"], batch_sizes=[1], seconds=0.2, **VIT_TEST)
    assert plan.time_budget_s == math.inf and make_configuration(**plan.request).to_dict() == plan.to_dict()
    assert "--seconds 0.2" in report.command({"configuration": plan.to_dict()})
    share_of = plan.protocol.share_of
    assert share_of(samples_of([0.05] * 1000)) < 1 == share_of(samples_of([0.05] * 4000))
    for refused in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="seconds must be a number of seconds >= 0"):
            make_configuration(seconds=refused, **VIT_TEST)


def test_a_plan_for_a_gpu_takes_data_on_the_host_of_images_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(configuration, "memory_bytes", lambda device: None)
    asked = {"dtypes": ["fp32"], "candidates": ["eager"], "batch_sizes": [2], "data": "host"}
    made = make_configuration(models=["vit_test"], **asked)
    assert [group.data for group in made.groups()] == ["host"]
    assert make_configuration(**made.request).to_dict() == made.to_dict()
    assert "--data host" in report.command({"configuration": made.to_dict()})
    with pytest.raises(ValueError, match="--data must be device, or host for a model that takes images on a GPU"):
        make_configuration(models=["attention:20x2x16"], **asked)


def test_rows_of_other_data_paths_are_no_pair(monkeypatch) -> None:
    first = runner.run(on_host(monkeypatch))
    second = json.loads(json.dumps(first))
    for row in [*second["rows"], *second["controls"]]:
        row["data"] = "device"
    assert not compare_records(first, second)["pairs"] and len(compare_records(first, second)["unpaired"]) == 4
    assert len(compare_records(second, second)["pairs"]) == 2
    ours = [row | {"best_peer": None, "ratio_to_best_peer": None} for row in first["rows"] if not row["peer"]]
    mixed = [*ours, *second["rows"]]  # a peer of the other path is no rival
    finish(mixed, {}, first["controls"])
    assert [row["best_peer"] for row in mixed] == [None, "timm", "timm"]
    assert len(report.groups(first | {"rows": mixed})) == 2
