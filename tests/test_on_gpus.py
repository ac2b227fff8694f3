"""GPU code on a pretend machine: graphs, timing, memory and generators on the first and on another GPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import group_of, plan, rows_by_candidate
from command_line import run as run_command
from digits import write_digits
from packed_towers import FAMILIES, MIXED
from pretend_gpu import Machine

import vit_fast
from vit_fast import ops
from vit_fast.benchmarks import operators, preparation, runner, verify
from vit_fast.benchmarks.candidates import CANDIDATES, NAMES
from vit_fast.benchmarks.preparation import TrainingStep
from vit_fast.benchmarks.records import Journal, read_record
from vit_fast.export import ProviderError
from vit_fast.measure import cache, candidate, clock, search, trials
from vit_fast.measure.candidate import ORIGINAL, PRECISIONS, Candidate, Reference
from vit_fast.measure.trials import Trials
from vit_fast.ops.backends import triton_unavailable_reasons
from vit_fast.run.runtime import capture


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in (runner.MATMUL_SIZE, runner.COPY_BYTES):
        monkeypatch.setitem(sizes, "cuda", 2**8)


def build(device: str, backend: str = "triton", **options: Any) -> Any:
    return vit_fast.create_model("vit_test", backend=backend, depth=1, device=device, **options).eval()


def test_graph_runners_on_two_gpus_follow_their_inputs(gpus: Machine) -> None:
    """torch's own capture stream would be on the first GPU for both."""
    for device in ("cuda:0", "cuda:1"):
        model = build(device)
        runner = vit_fast.GraphRunner(model, torch.zeros(1, 3, 32, 32, device=device), batch_sizes=(1, 2))
        with torch.no_grad():
            for batch in (1, 2, 3):
                images = torch.randn(batch, 3, 32, 32, device=device)
                torch.testing.assert_close(runner(images).cpu(), model(images).cpu(), rtol=1e-3, atol=1e-3)
    assert all(capture.steps and not capture.outside for capture in gpus.captures) and len(gpus.captures) == 4
    assert {capture.mode for capture in gpus.captures} == {"thread_local"}
    assert len({(capture.at, capture.pool) for capture in gpus.captures}) == 2, "graphs of a runner share memory"
    with pytest.raises(ValueError, match=r"on cuda:1 like the example, got .* on cuda:0"):
        runner(torch.zeros(1, 3, 32, 32, device="cuda:0"))


def test_another_thread_may_allocate_while_a_runner_captures(gpus: Machine) -> None:
    def allocate() -> torch.Tensor:
        return torch.ones(2**22, device="cuda")

    model, threads = build("cuda:0", "eager"), ThreadPoolExecutor(1)
    forward = model.blocks[0].forward
    with threads:
        model.blocks[0].forward = lambda x: (threads.submit(allocate).result(), forward(x))[1]
        runner = vit_fast.GraphRunner(model, torch.zeros(1, 3, 32, 32, device="cuda:0"), batch_sizes=(1,))
    assert runner.captured


def test_optimize_times_the_gpu_of_the_example(gpus: Machine) -> None:
    model, x = torch.nn.Linear(8, 8).to("cuda:1").eval(), torch.randn(4, 8, device="cuda:1")

    def forward(x: torch.Tensor) -> torch.Tensor:
        gpus.work(1, 5.0, "long")
        return x * 1

    model.forward = forward
    with torch.no_grad():
        timed = Trials(model, x)
        timed.prepare(ORIGINAL, 60)
        assert timed.call_ms(ORIGINAL, 0) == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize(
    ("typical_s", "reason"),
    [(150.0, "not tried: needs about "), (0.1, "not tried: preparation took more than ")],
    ids=["plan", "stop"],
)
@pytest.mark.usefixtures("own_cache")
def test_a_long_compilation_is_not_started_or_ends(
    typical_s: float, reason: str, gpus: Machine, only, monkeypatch
) -> None:
    """Not started if it probably exceeds the budget; ended if it takes much longer than expected."""
    only(Candidate(engine="max-autotune"))
    monkeypatch.setitem(trials.ENGINE_S, "max-autotune", typical_s)
    monkeypatch.setattr(search, "LONG", 1e-3)
    gpus.compile_s = 1e4
    model, x = torch.nn.Linear(8, 8).to("cuda:1").eval(), torch.randn(4, 8, device="cuda:1")
    result = vit_fast.optimize(model, x, budget_s=100 if typical_s == 150 else 1e4)
    assert [row.reason and row.reason[: len(reason)] for row in result.table] == [None, reason]
    assert result.cached.figures["tried"] == 1 and result.cached.figures["finish_s"] > typical_s


def test_the_seconds_of_a_measurement_include_the_host(gpus: Machine) -> None:
    def call(number: int) -> None:
        gpus.work(0, 0.005, "short")

    start, protocol = gpus.host_ms, clock.Protocol(10**9, 0.02, least_repeats=3, warmup_repeats=0, launch="hidden")
    found = clock.time_interleaved({"a": call}, "cuda", protocol)["a"]
    assert 10 < len(found) < 1000 and gpus.host_ms - start < 40 and found.ms == pytest.approx(0.005)


def test_backward_alone_times_no_forward(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if every call gets another batch, and keeps no graph alive."""
    group = dataclasses.replace(group_of("mlp:5x16x32", "fp32", True), device=torch.device("cuda"))
    batches = [torch.randn(5, *group.model.shape, device="cuda") for _ in range(8)]
    eager, steps = ops.layer_norm_mlp, list[Any]()

    def slow(*args: Any, **options: Any) -> torch.Tensor:
        gpus.work(0, 50.0, "forward")
        return eager(*args, **options)

    monkeypatch.setitem(operators.FUNCTIONS["mlp"], "eager", partial(slow, backend="eager"))
    monkeypatch.setattr(TrainingStep, "__init__", watch_init(steps, TrainingStep.__init__))
    _, call, _ = preparation.callers(CANDIDATES["eager"], group, batches)
    found = clock.time_interleaved({"a": call}, "cuda", clock.Protocol(8, 9.0, 8, 1, launch="hidden"))["a"]
    assert len(found) == 8 and max(found) < 1 and gpus.counts["forward"] > 8
    assert not steps[0]._forwards


def watch_init(made: list[Any], init: Any) -> Any:
    return lambda self, *args: (made.append(self), init(self, *args))[1]


def test_memory_in_use_includes_graph_pools_and_other_libraries(gpus: Machine) -> None:
    mib, device = 2**20, torch.device("cuda:0")
    x, start = torch.zeros(mib, dtype=torch.uint8, device=device), clock.memory_in_use(device)
    big = torch.zeros(8 * mib, dtype=torch.uint8, device=device)
    del big  # cached by torch
    assert clock.memory_in_use(device) == start == mib
    with torch.no_grad():
        replay = capture(lambda: (x + 1) + 1, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
    gpus.reserved[0, gpus.captures[0].pool] += 3 * mib  # of the graph, which other graphs of the pool may use
    gpus.foreign[0] = 64 * mib  # the arena of another library
    assert clock.memory_in_use(device) == start + 5 * mib + 64 * mib and replay() is not None
    assert clock.peak_memory_of_call(lambda: torch.zeros(4 * mib, dtype=torch.uint8, device=device), device) == 4 * mib


def test_memory_of_a_candidate_does_not_depend_on_earlier_garbage(gpus: Machine) -> None:
    garbage: list[Any] = [torch.zeros(2**22, dtype=torch.uint8, device="cuda")]
    garbage.append(garbage)
    del garbage

    def build() -> Any:
        function = [torch.zeros(2**20, dtype=torch.uint8, device="cuda")]
        gpus.foreign[0] += 2**20  # of a runtime
        gc.collect()
        return function, lambda number: x, None

    x = torch.ones(4, device="cuda")
    reference = Reference([x.double().cpu()], [{"largest": 0.0}], [(4,)], [""], range(4))
    assert candidate.prepare(Candidate(), build, reference, x.device).own_bytes == 2**21


def test_verify_leaves_all_generators_unchanged(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = verify._cases
    monkeypatch.setattr(verify, "_cases", lambda small: [*cases(True)][::9])
    torch.manual_seed(3)  # verify seeds with 0
    for device in ("cuda:1", "cpu"):
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, range(2))]
        assert all(row["passed"] for row in verify.verify(["sdpa"], device)["rows"])
        assert all(map(torch.equal, before, [torch.get_rng_state(), *map(torch.cuda.get_rng_state, range(2))]))


def test_lowered_clocks_are_counted_between_two_readings(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1_000_000, 0), (1_000_000, 500_000)])

    def text(device: torch.device, *query: str) -> str:
        assert query == ("-q", "-d", "PERFORMANCE")
        thermal, brake = next(readings)
        return (
            "    Clocks Event Reasons\n        SW Thermal Slowdown : Not Active\n    Clocks Event Reasons Counters\n"
            f"        SW Power Capping : 91403239 us\n        SW Thermal Slowdown   : {thermal} us\n"
            f"        HW Power Braking : {brake} us\n"
        )

    monkeypatch.setattr(runner, "nvidia_smi", text)
    monkeypatch.setattr(runner.time, "perf_counter", iter([50.0, 60.0]).__next__)
    monkeypatch.setattr(runner, "_busy_seconds", lambda: (0.0, 0))
    found = runner.Conditions(torch.device("cuda")).summary()
    assert found["busy"] == ["heat or power delivery lowered the GPU's clocks for 5% of the time"]


def test_compiled_training_compiles_one_graph(gpus: Machine) -> None:
    rows = rows_by_candidate(
        runner.run(plan("eager+compile", dtypes=["fp32"], train=True, device="cuda", batch_sizes=(1,)))
    )
    assert rows["eager+compile"]["status"] == "measured" and len(gpus.compiled) == 1


def test_the_slower_mode_of_a_compiler_leaves_no_row(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, every prepared candidate has a row that was timed alone."""
    monkeypatch.setitem(NAMES, "mlp", "eager eager+compile:reduce-overhead eager+compile:max-autotune")

    def compiled(candidate: Candidate, function: Any, **_: Any) -> Any:
        slow = {"max-autotune": 40.0, "reduce-overhead": 20.0}.get(candidate.compile_mode, 0.0)
        return lambda x: (gpus.work(0, slow, "slow"), function(x))[1]

    monkeypatch.setattr(Candidate, "compiled", compiled)
    made = plan(models=["mlp:5x16x32"], device="cuda", batch_sizes=(1, 2))
    journal = Journal(header=runner.header_of(made))
    assert made.is_limited
    for rows in (runner.run(made, journal=journal)["rows"], runner.run(made, journal=journal)["rows"]):
        assert [row["candidate"] for row in rows] == ["eager", "eager+compile:reduce-overhead"] * 2
        assert {row["status"] for row in rows} == {"measured"} and not any(row.get("alone") for row in rows)


@pytest.mark.usefixtures("small_ceilings")
def test_a_missing_provider_is_unsupported(add: Any) -> None:
    def unavailable(group: Any) -> Any:
        raise ProviderError("TensorrtExecutionProvider is not available: pip install tensorrt")

    add("without provider", unavailable)
    (row,) = runner.run(plan("without provider"))["rows"]
    assert row["status"] == "unsupported" and row["reason"].endswith("pip install tensorrt")


def test_a_fault_in_one_candidate_leaves_the_rows_of_the_others(gpus: Machine, tmp_path: Path) -> None:
    """Another process resumes the run; the pretend machine is repaired instead."""
    options = {"models": ["attention:5x2x16"], "dtypes": ["fp16"], "device": "cuda"}
    made, folder = plan("eager", "triton", "sdpa", **options), tmp_path / "run"
    journal = Journal.begin(folder, runner.header_of(made))
    assert not triton_unavailable_reasons(torch.device("cuda"))  # the test kernel passes
    gpus.fault = "attention"
    record = runner.run(made, journal=journal)
    rows = rows_by_candidate(record)
    assert record["gpu_failed"] and record["interrupted"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "eager": "measured", "triton": "failed", "sdpa": "interrupted"
    }  # fmt: skip
    assert rows["eager"]["alone"] and rows["eager"]["ms"] > 0 and rows["eager"]["verdict"] is None
    assert "illegal memory access" in rows["triton"]["reason"] and "during triton" in rows["sdpa"]["reason"]
    on_disk = rows_by_candidate(read_record(folder))
    assert {name: row["status"] for name, row in on_disk.items()} == {"eager": "measured", "triton": "failed"}
    assert run_command("report", f"{folder}/", "--out", str(tmp_path / "page.html")) == 0
    gpus.fault = gpus.broken = ""
    record = runner.run(made, journal=Journal.resume(folder))
    statuses = [(row["candidate"], row["status"]) for row in record["rows"]]
    assert statuses == [("eager", "measured"), ("triton", "failed"), ("sdpa", "measured")]
    assert not record["gpu_failed"] and not any(row.get("alone") for row in record["rows"])


@pytest.mark.usefixtures("gpus")
def test_a_candidate_has_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    @contextlib.contextmanager
    def at_most(seconds: float) -> Iterator[Any]:
        limits.append(seconds)
        yield lambda: None

    monkeypatch.setattr(preparation, "at_most", at_most)
    runner.run(plan("eager", models=["mlp:5x16x32"], device="cuda", time_budget_s=50))
    assert len(limits) == 1 and limits[0] < 50


def test_info_and_verify_cover_every_gpu(gpus: Machine, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cases = verify._cases
    monkeypatch.setattr(verify, "_cases", lambda small: list(cases(True))[-1:])
    assert run_command("info") == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"triton\s+{device}\s+yes", printed) for device in ("cuda:0", "cuda:1"))
    assert f"{gpus.properties.name}, compute capability 9.0, 132 SMs, 80 GiB" in printed
    assert run_command("verify", "--backend", "sdpa,triton") == 0
    assert "passed on cuda" in capsys.readouterr().out and "layer_norm_mlp" not in gpus.launches
    assert {device for _, device, _ in gpus.launches} == {0, 1}, "info tests every GPU"


def test_train_and_predict_on_the_second_gpu(gpus: Machine, tmp_path: Path, capsys: Any) -> None:
    data, out = write_digits(tmp_path / "data", 0, 8), tmp_path / "out"
    options = ("--epochs", "1", "--batch-size", "4", "--set", "dtype=bf16", "--backend", "triton")
    assert (
        run_command("train", str(data), "--model", "vit_test", "--device", "cuda:1", "--out", str(out), *options) == 0
    )
    assert {device for _, device, _ in gpus.launches} == {1}
    assert any("attention_bwd" in kernel for kernel, *_ in gpus.launches)
    capsys.readouterr()
    weights, copies = str(out / "model.safetensors"), gpus.counts["copy"]
    assert run_command("predict", str(data), "--weights", weights, "--device", "cuda:1", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 8 and gpus.counts["copy"] > copies
    assert gpus.peak[1] > 0 == gpus.peak[0]


def test_the_test_kernel_needs_memory_and_no_capture(gpus: Machine) -> None:
    """Neither reason is cached."""
    device = torch.device("cuda:1")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
        assert "must run a test kernel on cuda:1 first" in triton_unavailable_reasons(device)[0]
    gpus.foreign[1] = gpus.memory
    with torch.cuda.device(1):  # "cuda" is the current GPU
        assert all("out of memory" in triton_unavailable_reasons(one)[0] for one in (device, torch.device("cuda")))
    gpus.foreign[1] = 0
    assert not triton_unavailable_reasons(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
        assert not triton_unavailable_reasons(device)


def test_fp8_is_calibrated_and_emulated_on_the_second_gpu(gpus: Machine) -> None:
    model, x = build("cuda:1", dtype=torch.bfloat16), torch.randn(2, 3, 32, 32).to("cuda:1", torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        vit_fast.calibrate(model, x)
        assert vit_fast.fuse(model, precision="fp8").fused
        output = model(x)
    assert output.device == x.device and not torch.equal(output.cpu(), expected.cpu())
    assert torch.cosine_similarity(output.float(), expected.float()).min() > 0.98
    assert {device for _, device, _ in gpus.launches} == {1}


def test_packed_towers_replay_graphs_on_two_gpus(gpus: Machine) -> None:
    pytest.importorskip("transformers.vision_utils")
    for device, name in (("cuda:0", "qwen2_5_vl"), ("cuda:1", "siglip2")):
        family = FAMILIES[name]
        tower = family.build(depth=1).half().eval()
        plain = copy.deepcopy(tower)
        vit_fast.fuse(tower.to(device), "triton")
        runner = vit_fast.GraphRunner(tower, budgets=(64,), max_images=4)
        for sizes in (MIXED, ((4, 4),)):
            inputs = family.call(sizes)
            patches, *_ = inputs
            inputs[patches] = inputs[patches].half()
            with torch.no_grad():
                expected = family.real(plain(**inputs), sizes)
            found = runner(**{key: tensor.to(device) for key, tensor in inputs.items()})
            for one, other in zip(family.real(found, sizes), expected, strict=True):
                torch.testing.assert_close(one.cpu(), other, rtol=0, atol=2e-2 * float(other.abs().max()))
        assert runner.captured and runner.stats().graphs == 1
        assert runner.stats().hits == {64: 3}, "the first images need two runs"
    assert len({(capture.at, capture.pool) for capture in gpus.captures}) == len(gpus.captures) == 2


@pytest.mark.usefixtures("gpus", "own_cache")
@pytest.mark.slow
def test_optimize_finds_graphs_on_the_second_gpu(capsys: Any, only: Any) -> None:
    only(Candidate(attention="triton", mlp="triton", frozen=True, graphs=True))
    names = {one.name for one in trials.candidates(torch.device("cuda:1"), PRECISIONS)}
    assert names > {"fused triton, fp8, graphs", "fused triton, torch.compile max-autotune"}
    assert run_command("optimize", "vit_test", "--batch", "2", "--budget", "600", "--device", "cuda:1") == 0
    assert "fused triton, frozen, graphs" in capsys.readouterr().out
    model = vit_fast.create_model("vit_test", backend="eager", device="cuda:1")
    ((path, _),) = cache.all_results()
    assert vit_fast.load_optimized(path, model)(torch.zeros(2, 3, 32, 32, device="cuda:1")).device.index == 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--data", "host", "--batch-sizes", "2"), ["sdpa"]),
        pytest.param(("--data", "host", "--batch-sizes", "2", "--explain"), ["triton-graphs"], marks=pytest.mark.slow),
        pytest.param(("--latency",), ["sdpa"], marks=pytest.mark.slow),  # at least 100 calls
    ],
)
def test_bench_writes_a_record(options: tuple[str, ...], names: list[str], gpus: Machine, tmp_path: Path) -> None:
    limits = ("--seconds", "0.002", "--dtypes", "fp16", "--device", "cuda", "--candidates", ",".join(names))
    assert run_command("bench", "--models", "vit_test", *options, *limits, "--out", str(tmp_path / "run")) == 0
    record = read_record(tmp_path / "run")
    assert [(row["candidate"], row["status"]) for row in record["rows"]] == [(name, "measured") for name in names]
    assert all(row["host_ms"] > 0 and row["peak_MiB"] > 0 for row in record["rows"])
    assert {(row["ms_p99"] is not None, row["data"]) for row in record["rows"]} == {
        (False, "host") if "host" in options else (True, "device")
    }
    assert gpus.counts["copy"] > 0
