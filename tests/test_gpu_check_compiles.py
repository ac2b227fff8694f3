"""gpu-check compiles kernels and graphs in parallel processes first, and measures even if that takes too long."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import children
import pytest
import torch
from bench_support import shortened

from vit_fast.benchmarks import candidates, gpu_check, preparation
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import Group
from vit_fast.measure import candidate

RUN = {"models": ["mlp:5x16x32"], "candidates": ["eager"], "batch_sizes": [2], "dtypes": ["fp32"], "device": "cpu"}


def count_compilations(*names: str) -> None:
    """Prints the kernels that jobs compile in parallel and, under the stand-in driver, those that they need later."""
    from vit_fast.kernels import precompile
    from vit_fast.kernels.inspect import stand_in_driver

    stand_in_driver.install("sm_90")

    def zeroed(empty: Any) -> Any:  # a calibration needs finite outputs
        return lambda *given, **options: empty(*given, **options).zero_()

    ahead: set[precompile.Request]
    torch.empty, torch.empty_like = map(zeroed, (torch.empty, torch.empty_like))
    candidates.fuse = partial(candidates.fuse, backend="triton")  # as on a GPU
    precompile.compile_all = lambda requests, progress: ahead.update(requests)
    gpu_check.cold_start, candidate.judge = Mock(), Mock(return_value=candidate.Verdict(0.0, 1.0, None))
    for job in (shortened(job) for job in gpu_check.JOBS if job.runs and (job.name in names or not names)):
        ahead, late = set(), dict[str, list[str]]()
        for request in job.runs:
            made = make_configuration(**request, device="cpu")
            gpu_check.compile_ahead(made, 1e6)
            for group in made.groups():
                reference = candidate.Reference([], [], [], [], [])
                problem = preparation.Problem(preparation.make_batches(group, made.images), reference)
                for each in made.candidates[group.model.kind]:
                    if each.compile_mode == "none" and not each.peer:
                        with precompile.collect() as requests:
                            preparation.prepare(each, group, problem)
                        late[each.name] = [request.name for request in {*requests} - ahead]
        print(json.dumps([job.name, len(ahead), late]))


@pytest.mark.parametrize("names", [("fused models",), pytest.param((), marks=pytest.mark.slow)], ids=len)
def test_no_job_compiles_one_kernel_at_a_time(names: tuple[str, ...], tmp_path: Path) -> None:
    environment = children.environment(str(tmp_path)) | {"VIT_FAST_EXECUTE": "sm_90"}
    code = f"from test_gpu_check_compiles import count_compilations; count_compilations(*{names})"
    printed = children.run_python(["-c", code], environment)
    found = list(map(json.loads, printed.splitlines()))
    assert [name for name, *_ in found] == [j.name for j in gpu_check.JOBS if j.runs and (j.name in names or not names)]
    for name, ahead, late in found:
        assert ahead and not any(late.values()), (name, late)


def test_graphs_are_compiled_in_parallel_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, str]] = []
    both = threading.Barrier(2)

    def cold_start(request: object, group: Group, name: str, seconds: float) -> None:
        both.wait()
        started.append((group.batch_size, name))

    monkeypatch.setattr(gpu_check, "cold_start", cold_start)
    made = RUN | {"candidates": ["eager", "eager+compile"], "batch_sizes": [2, 1]}
    gpu_check.compile_ahead(make_configuration(**made), 1.0)
    assert sorted(started) == [(1, "eager+compile"), (2, "eager+compile")]


@pytest.mark.usefixtures("small_ceilings")
def test_a_slow_compilation_leaves_time_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_launches(call: Callable[[], object], progress: object) -> None:
        time.sleep(20)
        compiled.append(call)

    monkeypatch.setattr(gpu_check, "compile_launches", compile_launches)
    monkeypatch.setattr(gpu_check, "triton_unavailable_reasons", lambda _: ())
    monkeypatch.setattr(gpu_check, "interpreter_is_active", lambda: False)
    monkeypatch.setattr(gpu_check, "COMPILE_SHARE", 1e-6)
    monkeypatch.setattr(gpu_check, "JOBS", [gpu_check.Job("mlp", "mlp", 60.0, runs=(RUN,))])
    gpu_check.measure("mlp", str(tmp_path), time.time() + 6000)
    (row,) = json.loads((tmp_path / "0" / "record.json").read_bytes())["rows"]
    assert row["status"] == "measured" and not compiled
