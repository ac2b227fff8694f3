"""Limits: time limits of calls, exhausted memory, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

import torch

# After a limit: how often the alarm repeats, and how long cleanup may take before it is interrupted, too.
REPEAT_S, CLEANUP_S = 0.1, 5.0
COMPILERS = ("g++", "c++", "clang++", "cc1plus", "clang", "as", "ld", "ptxas")


class _Alarm(TimeoutError):
    """The error of a limit, with the monotonic time of its alarm."""

    def __init__(self, seconds: float, when: float) -> None:
        super().__init__(f"more than {seconds:g} s")
        self.when = when


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[Callable[[], None]]:
    """Raises TimeoutError in a block after `seconds`, and ends the compilers that the block started.

    The alarm repeats until the block ends, because a weakref callback, a `__del__` or a handler may swallow the error.
    While it unwinds, cleanup gets CLEANUP_S. An alarm of the caller is delayed until the block ends. Code that never
    returns to Python is not interrupted, nor is code outside the main thread.

    Yields:
        A function that restarts the limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    raised: list[_Alarm] = []

    def end(number: int, frame: FrameType | None) -> None:
        now, handled = time.monotonic(), sys.exception()
        while handled is not None:
            if isinstance(handled, _Alarm) and now < handled.when + CLEANUP_S:
                return
            handled = handled.__context__
        raised.append(_Alarm(seconds, now))
        raise raised[-1]

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_S)

    (left, every), start = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()
    outer, children = signal.signal(signal.SIGALRM, end), _descendants()
    again()
    try:
        yield again
    except Exception as error:
        if not raised:
            raise
        raise TimeoutError(f"more than {seconds:g} s") from error  # also if a compiler wrapped it
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # an alarm may arrive here, too
            signal.signal(signal.SIGALRM, outer)
            if raised:
                _end_compilers(children)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), every)


def _descendants(pid: int | str = "self", thread: int | str | None = "*") -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/task").glob(f"{thread}/children"):
            found.update(map(int, path.read_text().split()))
    return found.union(*map(_descendants, found))


def _end_compilers(before: Collection[int]) -> None:
    """Ends the compilers that this thread and Inductor's have started since: they would disturb the next timing."""
    threads: set[int | None] = {threading.get_native_id()}
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        pool = inductor.AsyncCompile.pool
        if pool.cache_info().currsize:
            threads.update(thread.native_id for thread in pool()._threads)
            pool().shutdown(wait=False, cancel_futures=True)
            pool.cache_clear()
        for processes in inductor._pool_set:
            if (worker := getattr(processes, "process", None)) is not None:
                worker.kill()  # its own workers end with it
        inductor.after_fork()  # the next compilation starts others
    started = {pid for thread in threads for pid in _descendants(thread=thread)}
    for pid in started.difference(before):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in COMPILERS:
                os.kill(pid, signal.SIGKILL)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if memory ran out, also if a compiler or a runtime wrapped the exception."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(error)
        if any(sign in text for sign in ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: Exception) -> str:
    """Returns an exception in one line of at most 500 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


@contextlib.contextmanager
def patient_interrupt(*signals: signal.Signals) -> Iterator[Callable[[], None]]:
    """Raises KeyboardInterrupt at the first of these signals and ignores the second, so that results are still written.

    The third one raises again, in case a library swallowed the first. The caller's own handler runs before that. Does
    nothing outside the main thread, nor for a signal that this process ignores.

    Yields:
        A function that raises KeyboardInterrupt again, if other code has swallowed it.
    """
    pressed = 0

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        own = before[signal.Signals(number)]
        if callable(own) and own is not signal.default_int_handler:
            own(number, frame)
        if pressed != 2:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    heard = [which for which in signals if is_main and signal.getsignal(which) not in (signal.SIG_IGN, None)]
    before = {which: signal.signal(which, handle) for which in heard}
    try:
        yield check
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
