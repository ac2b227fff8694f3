"""Kernels compiled before they are launched: what some code would have triton compile, and that in parallel processes.

    with collect() as requests:     # our kernels that are not compiled yet are neither compiled nor launched
        model(images)
    compile_all(requests)           # into triton's cache on disk, and into this process

Triton describes to a hook what it is about to compile, as data from which any process makes the same binary, without a
device. So what is compiled here is what the launch asks for, whatever decides that.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

Progress = Callable[[int, int], None]

# What a process has to compile to be worth its start, in which it imports torch and triton.
KERNELS_A_PROCESS = 4


@dataclass(frozen=True)
class Request:
    """A kernel to compile: where the function is, how it is specialised, in the words of triton, and for what GPU."""

    module: str
    name: str
    data: str
    backend: str
    arch: int
    warp_size: int

    def compile(self) -> bool:
        """Take it from triton's cache on disk, or compile it; whether the latter."""
        function = getattr(importlib.import_module(self.module), self.name)
        compiled = []

        def listen(*, cache_hit: bool, **_: Any) -> None:
            compiled.append(not cache_hit)

        before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, listen
        try:
            function.preload(self.data)
        finally:
            triton.knobs.compilation.listener = before
        return any(compiled)


@contextlib.contextmanager
def collect() -> Iterator[list[Request]]:
    """Collects what this thread would have triton compile of our kernels, in the order of its launches.

    None of that is launched: its results stay what memory held. Of other threads and other kernels nothing changes, but
    that their launches go triton's own way, and no launch plan is recorded.
    """
    runtime, thread = triton.knobs.runtime, threading.get_ident()
    before = runtime.jit_cache_hook
    found: dict[Request, None] = {}
    requests: list[Request] = []

    def hook(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool | None:
        if threading.get_ident() != thread or not fn.module.startswith(f"{__package__}."):
            return before(fn=fn, compile=compile, **rest) if before is not None else None
        target = triton.runtime.driver.active.get_current_target()
        data = compile["specialization_data"]
        found[Request(fn.module, fn.name, data, target.backend, target.arch, target.warp_size)] = None
        return True

    runtime.jit_cache_hook = hook
    runtime.launch_enter_hook.add(_listen)
    try:
        yield requests
    finally:
        runtime.launch_enter_hook.remove(_listen)
        runtime.jit_cache_hook = before
        requests += found


def _listen(*_: Any) -> None:
    """While someone listens to launches, none is planned or replayed: see `launch.is_watched`."""


def compile_all(requests: Sequence[Request], progress: Progress | None = None) -> int:
    """Compile, in processes beside this one where there is enough to do; how many were not in triton's cache yet.

    Args:
        requests: Of `collect`.
        progress: Called with how many are done, and of how many.
    Raises:
        RuntimeError: a kernel does not compile, in the words of triton.
    """
    total, compiled, here = len(requests), 0, 0
    tell = progress if progress is not None else lambda done, total: None
    for request in requests:  # here, as long as they come from the cache
        if compiled and _processes(total - here) > 1:
            break
        compiled += _compile_here(request)
        here += 1
        tell(here, total)
    waiting = requests[here:]
    for done, was_compiled in enumerate(_compile_beside(waiting), start=here + 1):
        compiled += was_compiled
        tell(done, total)
    for request in waiting:  # from the cache on disk into this process
        _compile_here(request)
    return compiled


def _processes(kernels: int) -> int:
    return min(len(os.sched_getaffinity(0)), kernels // KERNELS_A_PROCESS)


def _compile_here(request: Request) -> bool:
    try:
        return request.compile()
    except Exception as error:  # whatever the compiler raises
        raise RuntimeError(_failure(request, error)) from error


def _failure(request: Request, error: Exception) -> str:
    return f"{request.name} does not compile: {type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def _compile_beside(requests: Sequence[Request]) -> Iterator[bool]:
    """Yields whether each was compiled; every process takes the next request when it is ready."""
    if not requests:
        return
    left: SimpleQueue[Request] = SimpleQueue()
    results: SimpleQueue[bool | RuntimeError] = SimpleQueue()
    for request in requests:
        left.put(request)
    count = _processes(len(requests))
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(_feed, left, results)
        try:
            for _ in requests:
                result = results.get()
                if isinstance(result, RuntimeError):
                    raise result
                yield result
        finally:  # after a failure or an interruption what is under way is finished, nothing more begun
            list(_rest(left))


def _rest(queue: SimpleQueue[Request]) -> Iterator[Request]:
    """Takes from a queue, which others take from too, until it is empty."""
    with contextlib.suppress(Empty):
        while True:
            yield queue.get_nowait()


def _feed(left: SimpleQueue[Request], results: SimpleQueue[bool | RuntimeError]) -> None:
    """Has one process compile what is left, one after another."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for request in _rest(left):
            try:
                process.stdin.write(json.dumps(asdict(request)) + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                answer = f"{request.name} was not compiled: the process that should have is gone"
            results.put(answer if isinstance(answer, bool) else RuntimeError(answer))
        process.stdin.close()


class _Driver:
    """All that compiling asks of a driver, for a process that leaves the device alone."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def serve() -> None:
    """In a process of `_feed`: compile the requests on stdin, a line each; answer whether each was, or why not."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer
    for line in sys.stdin:
        request = Request(**json.loads(line))
        target = GPUTarget(request.backend, request.arch, request.warp_size)
        triton.runtime.driver.set_active(_Driver(target))
        try:
            answer: bool | str = request.compile()
        except Exception as error:  # whatever the compiler raises
            answer = _failure(request, error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
