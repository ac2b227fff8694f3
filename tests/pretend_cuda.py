"""The functions of torch.cuda on a pretend machine (`pretend_gpu.py`), and Python commands that run on one.

python tests/pretend_cuda.py [-c CODE | -m MODULE | FILE] ...      # like python; PRETEND_GPU='{"count": 2}'
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from pretend_gpu import DEVICE_MS, Capture, CudaError, Machine, tensors_in
from pretend_modes import compiler, without_modes
from torch import Tensor
from torch.autograd import DeviceType

CYCLES_PER_MS = 1.98e6


def cuda_of(machine: Machine) -> dict[str, Any]:
    """Returns the functions and classes of torch.cuda by name."""

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, *, at: tuple[int, int] | None = None) -> None:
            self.at = at or (machine.index(device), next(machine.numbers))
            self.device, self.cuda_stream = torch.device("cuda", self.at[0]), self.at[1]

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.at == other.at

        def __hash__(self) -> int:
            return hash(self.at)

        def wait_event(self, event: Event) -> None:
            machine.call("wait_event")
            machine.idle_ms[self.at] = max(machine.idle_ms.get(self.at, 0.0), event.ms or 0.0)

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(other.record_event())

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            self.record_event().synchronize()

        def query(self) -> bool:
            return self.record_event().query()

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self.timing, self.ms, self.at = enable_timing, None, None

        def record(self, stream: Stream | None = None) -> None:
            machine.call("event.record")
            self.at = machine.stream(machine.here.device) if stream is None else stream.at
            self.ms = max(machine.host_ms, machine.idle_ms.get(self.at, 0.0))

        def query(self) -> bool:
            machine.call("event.query", waits=True)
            return self.ms is None or machine.host_ms >= self.ms

        def synchronize(self) -> None:
            machine.call("event.synchronize", waits=True)
            machine.host_ms = max(machine.host_ms, self.ms or 0.0)

        def elapsed_time(self, end: Event) -> float:
            if not (self.timing and end.timing and self.at and end.at) or self.at[0] != end.at[0]:
                raise CudaError("invalid resource handle")
            if not (self.query() and end.query()):
                raise CudaError("device not ready")
            return end.ms - self.ms

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self.captured: Capture | None = None

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
            at = machine.stream(machine.here.device)
            if at[1] == 0:
                raise CudaError("operation not permitted: graphs must be captured on a non-default stream")
            machine.call("capture_begin", waits=True)
            pool = pool or graph_pool_handle()
            machine.pools.setdefault(pool, weakref.WeakSet()).add(self)
            self.captured = machine.capture = Capture(at, pool, capture_error_mode)

        def capture_end(self) -> None:
            capture, machine.capture = machine.capture, None
            machine.captures.append(capture)
            if capture.broken:
                raise CudaError(capture.broken)
            with without_modes(), torch.inference_mode():
                for tensor in capture.made:  # a capture runs nothing
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))

        def replay(self) -> None:
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                for step in self.captured.steps:
                    step()
            machine.work(self.captured.at[0], self.captured.ms, "graph")

        def reset(self) -> None:
            self.captured = None

        def pool(self) -> Any:
            return self.captured.pool

    def graph_pool_handle() -> tuple[int, int]:
        return 0, next(machine.numbers)

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:  # also makes its device current, as in torch
            machine.here.device, machine.here.streams[stream.at[0]] = stream.at[0], stream.at[1]

    def manual_seed_all(seed: int) -> None:
        machine.seeds[:] = [torch.Generator().manual_seed(seed).get_state()] * machine.count

    def set_rng_state(state: Tensor, device: Any = "cuda") -> None:
        machine.seeds[machine.index(device)] = state.clone()

    def on(of_index: Callable[[int], Any]) -> Callable[..., Any]:
        return lambda device=None: of_index(machine.index(device))

    gpu = machine.properties
    return {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph_pool_handle": graph_pool_handle,
        "set_stream": set_stream, "manual_seed_all": manual_seed_all, "set_rng_state": set_rng_state,
        "is_available": lambda: True, "is_initialized": lambda: True, "_lazy_init": lambda: None,
        "device_count": lambda: machine.count, "current_device": lambda: machine.here.device,
        "set_device": lambda device: machine.exchange(machine.index(device)) and None,
        "_exchange_device": lambda index: machine.exchange(index),
        "_maybe_exchange_device": lambda index: machine.exchange(index),
        "get_device_properties": on(lambda index: gpu), "get_device_name": on(lambda index: gpu.name),
        "get_device_capability": on(lambda index: (gpu.major, gpu.minor)),
        "get_rng_state": on(lambda index: machine.seeds[index].clone()),
        "synchronize": on(lambda index: machine.wait(index, "synchronize")),
        "current_stream": on(lambda index: Stream(at=machine.stream(index))),
        "default_stream": on(lambda index: Stream(at=(index, 0))),
        "is_current_stream_capturing": lambda: machine.is_capturing(machine.here.device),
        "_sleep": lambda cycles: machine.work(machine.here.device, cycles / CYCLES_PER_MS, "sleep"),
        "memory_allocated": on(machine.allocated), "max_memory_allocated": on(lambda index: machine.peak[index]),
        "memory_reserved": on(lambda index: machine.used(index) - machine.foreign[index]),
        "reset_peak_memory_stats": on(machine.reset_peak),
        "mem_get_info": on(lambda index: (machine.memory - machine.used(index), machine.memory)),
        "memory_snapshot": machine.snapshot, "empty_cache": machine.empty_cache,
        "get_allocator_backend": lambda: "native",
    }  # fmt: skip


class Profiler:
    """Replaces torch.profiler.profile for CUDA."""

    def __init__(self, machine: Machine, **_: Any) -> None:
        self.machine = machine

    def __enter__(self) -> Profiler:
        self.machine.trace = []
        return self

    def __exit__(self, *raised: object) -> None:
        self.trace, self.machine.trace = self.machine.trace, None

    def events(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                key=name, name=name, count=1, device_type=DeviceType.CUDA, self_device_time_total=1e3 * ms,
                self_cpu_time_total=0.0, time_range=SimpleNamespace(start=number),
            )
            for number, (name, ms) in enumerate(self.trace)
        ]  # fmt: skip

    key_averages = events


@contextlib.contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from vit_fast.blocks.frozen import Frozen
    from vit_fast.kernels import device as kernel_device
    from vit_fast.kernels import launch
    from vit_fast.measure import clock
    from vit_fast.ops import backends, registration

    launch_now, run_thread, profile = launch.Launch._run_by_triton, threading.Thread.run, torch.profiler.profile
    ensure_current, autocast, run_backward = Frozen.ensure_current, torch.autocast, torch.autograd._engine_run_backward

    def launched(self: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves([*self.args.values()])
        bases = [leaf.base if isinstance(leaf, TensorDescriptor) else leaf for leaf in leaves]
        on = {machine.device_of(one) for one in tensors_in(bases)}

        def step() -> None:
            with without_modes():
                launch_now(self)

        if on <= {None}:
            return step()
        device, name = machine.here.device, self.kernel.__name__
        if on != {device}:
            raise CudaError(f"an illegal memory access was encountered ({name} on cuda:{device}, tensors on {on})")
        machine.launches[name, *machine.stream(device)] += 1
        step()
        machine.work(device, DEVICE_MS, name, step)
        return None

    def planless(function: Callable[..., Any], arguments: Any) -> Any:
        with machine.modes():  # which the dispatcher disabled
            return function(*arguments)

    def ensured(frozen: Frozen) -> None:
        with without_modes(), machine.modes():  # as above, but graph runners call it with modes
            ensure_current(frozen)

    def in_thread(thread: threading.Thread) -> None:
        with machine.modes():
            run_thread(thread)

    def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with machine.allocating(machine.device_of(outputs[0])):
            return run_backward(outputs, *args, **kwargs)

    class Autocast(autocast):
        """Also casts the operators of CPU tensors."""

        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(device_type, *args, **kwargs)
            self.twin = autocast("cpu", *args, **kwargs) if device_type == "cuda" else contextlib.nullcontext()

        def __enter__(self) -> Any:
            self.twin.__enter__()
            return super().__enter__()

        def __exit__(self, *raised: Any) -> Any:
            super().__exit__(*raised)
            return self.twin.__exit__(*raised)

    def profiler(activities: Any = (), **options: Any) -> Any:
        if torch.profiler.ProfilerActivity.CUDA in activities:
            return Profiler(machine)
        return profile(activities=activities, **options)

    caches = kernel_device._real_gpu, backends._static_reasons, clock.cycles_per_ms
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        changes: list[tuple[Any, str, Any]] = [
            *((torch.cuda, name, value) for name, value in cuda_of(machine).items()),
            (torch.cuda.graph, "default_capture_stream", None),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: machine.here.streams[index]),
            (torch._C, "_cuda_getDriverVersion", lambda: 13000),
            (torch._C, "_host_emptyCache", lambda: None),
            (torch._C, "_accelerator_getAccelerator", lambda: None),  # builds with CUDA ask the driver for streams
            (torch.autograd, "has_torch_function", lambda *_: False),  # it would disable the modes in a backward
            (torch.autograd, "_engine_run_backward", backward),
            (Tensor, "backward", _backward),
            (torch, "compile", partial(compiler, machine)),
            (torch, "autocast", Autocast),
            (torch.profiler, "profile", profiler),
            (threading.Thread, "run", in_thread),
            (launch.Launch, "_run_by_triton", launched),
            (registration, "_run_by_plan", lambda: planless),
            (Frozen, "ensure_current", ensured),
            (clock, "host_ms", lambda: machine.host_ms),
        ]
        for owner, name, value in changes:
            stack.enter_context(patch(owner, name, value, create=owner is torch._C))
        stack.enter_context(mock.patch.dict(backends._probed))
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        stack.enter_context(machine.modes())
        yield machine


def _backward(
    self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


def write_python(folder: Path) -> Path:
    """Writes a program that behaves like python, on the machine that PRETEND_GPU describes."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPRETEND_PYTHON=$0 exec {sys.executable} {__file__} "$@"\n')
    path.chmod(0o755)
    return path


def main(arguments: list[str]) -> None:
    import interpreter

    import torchvision_cpu

    torchvision_cpu.install_import_hook()
    interpreter.correct()
    interpreter.accelerate()
    sys.executable = os.environ["PRETEND_PYTHON"]
    with Machine(**json.loads(os.environ["PRETEND_GPU"])).installed():
        how, *rest = [one for one in arguments if one != "-u"]  # of workers of xdist
        sys.path.insert(0, "")
        if how == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    if "TRITON_INTERPRET" in os.environ:
        main(sys.argv[1:])
    else:  # a process without a GPU
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
