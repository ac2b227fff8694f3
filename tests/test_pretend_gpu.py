"""The pretend GPU: refuses what CUDA refuses, lets time pass as a GPU does, counts memory, and fails as told."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import CYCLES_PER_MS, write_python
from pretend_gpu import DEVICE_MS, HOST_MS, CudaError, Machine
from torch import nn

import vit_fast


def ones(device: str = "cuda:0", size: int = 4) -> torch.Tensor:
    return torch.ones(size, device=device)


def capture(run: Callable[[], Any], mode: str = "global") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
        run()
    return graph


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: ones("cuda:0") + ones("cuda:1"), "same device, but found cuda:0, cuda:1 in aten::add"),
        (lambda: ones() + ones("cpu"), "same device, but found cuda:0, cpu"),
        (lambda: ones("cpu")[torch.tensor([0], device="cuda")], "same device"),
        (lambda: nn.Linear(4, 4).cuda(1)(ones()), "same device"),
        (lambda: ones("cuda:2"), "invalid device ordinal"),
        (lambda: ones().numpy(), "can't convert cuda:0 device type tensor to numpy"),
        (lambda: torch.cuda.CUDAGraph().capture_begin(), "non-default stream"),
        (lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()), "invalid resource handle"),
        *(
            (lambda wait=wait: capture(lambda: wait(ones())), "a previous error during capture")
            for wait in (
                lambda x: x.sum().item(),
                torch.Tensor.tolist,
                torch.Tensor.nonzero,
                torch.Tensor.cpu,
                lambda _: torch.cuda.synchronize(),
                lambda _: torch.cuda.current_stream().synchronize(),
                lambda _: torch.zeros(3).cuda(),
                lambda _: torch.tensor([1.0], device="cuda"),
            )
        ),
    ],
)
def test_refused_as_by_cuda(run: Callable[[], object], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        run()


@pytest.mark.usefixtures("gpus")
def test_tensors_and_modules_move_between_devices() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to(device="cuda:1", dtype=torch.float64)
    again = copy.deepcopy(module).requires_grad_()
    for parameter in (*module.parameters(), *again.parameters()):
        assert parameter.device == torch.device("cuda:1") and parameter.is_cuda and parameter.get_device() == 1
    loss = again(torch.randn(2, 4, dtype=torch.float64).to(again[0].weight)).square().sum()
    loss.backward()
    assert again[0].weight.grad.device == loss.device == torch.device("cuda:1")
    host = torch.arange(4)
    on_gpu = torch.as_tensor(host, device="cuda")
    assert not host.is_cuda and on_gpu.is_cuda and on_gpu[torch.tensor([1, 2])].tolist() == [1, 2]
    assert on_gpu.to("cpu", torch.float32).numpy().dtype == "float32" and on_gpu.to(host).device.type == "cpu"
    host.copy_(on_gpu + 1)
    assert not host.is_cuda and host.tolist() == [1, 2, 3, 4]
    with torch.device("cuda:1"):
        assert torch.zeros(3).device == torch.empty_like(loss).device == torch.device("cuda:1")


def test_the_clock_counts_host_time_and_the_queues_of_streams(gpus: Machine) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x, began = ones(), gpus.host_ms
    start.record()
    for _ in range(5):
        torch.cuda._sleep(int(CYCLES_PER_MS))
    end.record()
    assert gpus.host_ms - began == pytest.approx(5 * HOST_MS) and not end.query()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    assert side.query() is False and gpus.idle_ms[side.at] < gpus.host_ms + 2 * DEVICE_MS, "streams run in parallel"
    side.wait_stream(torch.cuda.current_stream())
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(5, rel=0.01)
    assert gpus.host_ms == pytest.approx(began + 5, abs=0.1) and gpus.idle_ms[side.at] == gpus.idle_ms[0, 0]
    before = gpus.counts["copy"], gpus.host_ms
    torch.zeros(2**20).pin_memory().to("cuda:1", non_blocking=True)
    assert gpus.host_ms - before[1] == pytest.approx(HOST_MS), "the host does not wait"
    torch.zeros(2**20).to("cuda:1", non_blocking=True)  # pageable
    assert gpus.counts["copy"] == before[0] + 2 and gpus.host_ms >= gpus.idle_ms[1, 0]


def test_a_graph_repeats_its_steps_in_the_same_memory(gpus: Machine) -> None:
    x, other, made = ones(), ones("cuda:1"), []
    with torch.no_grad():
        graph = capture(lambda: made.append((x * 2).add_(1)))
    assert made[0].isnan().all(), "a capture runs nothing"
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        assert made[0].tolist() == [2 * value + 1] * 4
    capture(lambda: other.add_(1))  # on the default stream of another GPU
    assert [(len(one.steps), one.outside) for one in gpus.captures] == [(2, 0), (0, 1)]


@pytest.mark.parametrize(("mode", "works"), [("global", False), ("thread_local", True)])
def test_allocations_of_other_threads_during_a_capture(mode: str, works: bool, gpus: Machine) -> None:
    def allocate() -> None:
        ones(size=2**20)

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(allocate).result()

    if works:
        capture(run, mode)
    else:
        with pytest.raises(CudaError, match=r"a previous error during capture .cudaMalloc"):
            capture(run, mode)
    assert gpus.captures and bool(gpus.captures[0].broken) is not works


def test_memory_is_counted_by_device_and_pool(gpus: Machine) -> None:
    mib = 2**20
    x = torch.zeros(mib, dtype=torch.uint8, device="cuda")
    del x
    y = torch.zeros(3 * mib, dtype=torch.uint8, device="cuda")
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (3 * mib, 3 * mib)
    with torch.no_grad():
        graph = capture(lambda: (y + 1) + 1)
    segments = {one["segment_pool_id"] != (0, 0): one for one in torch.cuda.memory_snapshot()}
    assert segments[True]["total_size"] == 6 * mib and torch.cuda.memory_reserved() == 9 * mib
    assert torch.cuda.mem_get_info()[0] == gpus.memory - 9 * mib and torch.cuda.memory_allocated(1) == 0
    del graph
    gpus.captures.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 3 * mib
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 81920\.00 MiB"):
        gpus.own(torch.empty(80 * 2**30, dtype=torch.uint8, device="meta"), 0)
    assert torch.cuda.memory_allocated() == 3 * mib


def test_each_gpu_has_a_generator(gpus: Machine) -> None:
    state = torch.cuda.get_rng_state(0)
    torch.manual_seed(3)
    host, drawn = torch.get_rng_state(), torch.randn(4, device="cuda:1")
    assert torch.equal(host, torch.get_rng_state()) and not torch.equal(state, torch.cuda.get_rng_state(0))
    torch.cuda.set_rng_state(torch.cuda.get_rng_state(0), 1)
    assert torch.equal(torch.empty(4, device="cuda:1").normal_(), drawn)


def test_threads_start_on_the_first_gpu(gpus: Machine) -> None:
    with torch.cuda.device(1), ThreadPoolExecutor(1) as pool:
        assert torch.cuda.current_device() == 1
        assert pool.submit(torch.cuda.current_device).result() == 0 and pool.submit(ones, "cuda:1").result().is_cuda


def test_kernels_run_and_a_fault_breaks_all_later_calls(gpus: Machine) -> None:
    model = vit_fast.create_model("vit_test", backend="triton", depth=1, device="cuda:1").eval()
    expected = vit_fast.create_model("vit_test", backend="sdpa", depth=1).eval()
    expected.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images.to("cuda:1")).cpu(), expected(images), rtol=1e-4, atol=1e-4)
        assert {place[1:] for place in gpus.launches} == {(1, 0)}
        gpus.fault = "attention"
        with pytest.raises(CudaError, match="an illegal memory access"):  # CUDA reports it later
            model(images.to("cuda:1"))
            torch.cuda.synchronize(1)
    for call in (ones, torch.cuda.synchronize, torch.cuda.Event().record, images.cuda):
        with pytest.raises(CudaError, match="an illegal memory access"):
            call()
    assert torch.cuda.is_available() and torch.cuda.get_device_name() == gpus.properties.name


def test_compiled_graphs_run_on_the_gpu_and_are_counted(gpus: Machine) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.eye(4, device=x.device) + torch.arange(4, device=x.device)

    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for device, size in (("cuda:0", 2), ("cuda:0", 2), ("cuda:0", 3)):
        assert compiled(torch.ones(size, 4, device=device)).device == torch.device(device)
    assert gpus.compiled == [[(size, 4, torch.float32, False)] for size in (2, 3)]


def test_a_python_command_runs_on_a_pretend_machine_until_it_is_killed(tmp_path: Path) -> None:
    code = "import torch, sys; print(torch.cuda.device_count(), sys.argv, torch.ones(2, device='cuda').device, flush=1)"
    settings = {"TRITON_INTERPRET": "1", "PRETEND_GPU": json.dumps({"count": 3, "kill_after": 3})}
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    command = [write_python(tmp_path), "-c", f"{code}; torch.cuda.synchronize(); print('alive')", "a"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "3 ['-c', 'a'] cuda:0\n"), done.stderr
