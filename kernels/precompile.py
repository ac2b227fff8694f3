"""Compiles kernels before their launch, in parallel processes.

    with collect() as requests:     # collects the kernels that are not compiled yet, and skips their launches
        model(images)
    compile_all(requests)           # compiles them into triton's cache on disk, and loads them into this process

Before triton compiles a kernel, it passes a description of the kernel to a hook. From this description, another process
can compile the kernel, even without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from .launch import compiling

Progress = Callable[[int, int], None]

# Minimum number of kernels per process. Each process first imports torch and triton, which takes seconds.
KERNELS_A_PROCESS = 4


@dataclass(frozen=True)
class Request:
    """A kernel to compile: its function, triton's description of its specialization, and its GPU."""

    module: str
    name: str
    data: str
    backend: str
    arch: int
    warp_size: int

    def compile(self) -> bool:
        """Compiles the kernel, or loads it from triton's cache on disk. Returns True if it was not in the cache."""
        function = getattr(importlib.import_module(self.module), self.name)
        compiled = []

        def listen(*, cache_hit: bool, **_: Any) -> None:
            compiled.append(not cache_hit)

        with compiling:
            before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, listen
            try:
                function.preload(self.data)
            except Exception as error:  # compilers may raise any exception
                reason = " ".join(str(error).split())[-300:]
                raise RuntimeError(f"{self.name} does not compile: {type(error).__name__}: {reason}") from error
            finally:
                triton.knobs.compilation.listener = before
        return any(compiled)


@contextlib.contextmanager
def collect() -> Iterator[list[Request]]:
    """Collects the vit-fast kernels that this thread would compile, in the order of their launches.

    The yielded list is empty until the context ends. The collected kernels are not launched, so their outputs are
    undefined. All other kernels, and other threads, run as usual, but without launch plans (`plan.py`).
    """
    runtime, thread = triton.knobs.runtime, threading.get_ident()
    before = runtime.jit_cache_hook
    collected: dict[Request, None] = {}
    requests: list[Request] = []

    def hook(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool | None:
        if threading.get_ident() != thread or not fn.module.startswith(f"{__package__}."):
            return before(fn=fn, compile=compile, **rest) if before is not None else None
        target = triton.runtime.driver.active.get_current_target()
        data = compile["specialization_data"]
        collected[Request(fn.module, fn.name, data, target.backend, target.arch, target.warp_size)] = None
        return True

    runtime.jit_cache_hook = hook
    runtime.launch_enter_hook.add(_prevent_plans)
    try:
        yield requests
    finally:
        runtime.launch_enter_hook.remove(_prevent_plans)
        runtime.jit_cache_hook = before
        requests += collected


def _prevent_plans(*_: Any) -> None:
    """Does nothing. While any launch hook is registered, launch plans are disabled (`launch.is_watched`)."""


def compile_all(requests: Sequence[Request], progress: Progress | None = None) -> int:
    """Compiles kernels, in several processes if there are many. Returns how many were not in triton's cache on disk.

    Args:
        requests: The result of `collect`.
        progress: Called with (number of finished kernels, number of all kernels).
    Raises:
        RuntimeError: a kernel does not compile, or a process ended early.
    """
    compiled = here = 0
    tell = progress if progress is not None else lambda done, total: None
    for request in requests:  # compile here until one was not cached; then start processes if enough kernels remain
        if compiled and _processes(len(requests) - here) > 1:
            break
        compiled += request.compile()
        here += 1
        tell(here, len(requests))
    waiting = requests[here:]
    for done, was_compiled in enumerate(_compile_beside(waiting), start=here + 1):
        compiled += was_compiled
        tell(done, len(requests))
    for request in waiting:  # load the kernels from the cache on disk into this process
        request.compile()
    return compiled


def _processes(kernels: int) -> int:
    return min(len(os.sched_getaffinity(0)), kernels // KERNELS_A_PROCESS)


def _compile_beside(requests: Sequence[Request]) -> Iterator[bool]:
    """Compiles kernels in several processes that run `serve`. Yields True per uncached kernel, False per cached one."""
    if not requests:
        return
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def compile_elsewhere(request: Request) -> bool:
        process = idle.get()
        try:
            process.stdin.write(json.dumps(asdict(request)) + "\n")
            process.stdin.flush()
            reply = json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{request.name} was not compiled: a compiler process died; retry") from error
        finally:
            idle.put(process)
        if not isinstance(reply, bool):
            raise RuntimeError(reply)
        return reply

    with contextlib.ExitStack() as stack:
        for _ in range(count := _processes(len(requests))):
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            idle.put(process := stack.enter_context(subprocess.Popen(command, env=environment, text=True, **pipes)))
            stack.callback(process.terminate)
        yield from stack.enter_context(ThreadPoolExecutor(count)).map(compile_elsewhere, requests)


def serve() -> None:
    """Compiles requests from stdin, one per line. Replies on stdout: true (compiled), false (cached), or an error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects stdout to stderr, because compilers may print to stdout
    for line in sys.stdin:
        request = Request(**json.loads(line))
        target = GPUTarget(request.backend, request.arch, request.warp_size)
        # replaces triton's driver, which needs a GPU
        driver = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda target=target: target)
        triton.runtime.driver.set_active(driver)
        try:
            reply: bool | str = request.compile()
        except RuntimeError as error:
            reply = str(error)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
