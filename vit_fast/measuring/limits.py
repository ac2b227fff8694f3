"""What ends a call that hangs, and what tells memory that ran out from other failures."""

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


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[Callable[[], None]]:
    """Ends a block after so many seconds, and the compilers that it left running.

    The alarm repeats until the block ends: what a weakref callback, a `__del__` or a handler swallows is raised again.
    While the exception unwinds, cleanup gets CLEANUP_S. Code that never returns to Python is not ended, nor is any
    outside the main thread, where no signal arrives.

    Yields:
        A function that restarts the limit.
    Raises:
        TimeoutError: in the block, after so many seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    raised: list[tuple[TimeoutError, float]] = []

    def end(number: int, frame: FrameType | None) -> None:
        now, handled = time.monotonic(), sys.exception()
        while handled is not None:
            if any(handled is alarm and now < when + CLEANUP_S for alarm, when in raised):
                return
            handled = handled.__context__
        raised.append((TimeoutError(f"more than {seconds:g} s"), now))
        raise raised[-1][0]

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)

    (left, every), start = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()
    before, children = signal.signal(signal.SIGALRM, end), _descendants()
    again()
    try:
        yield again
    except Exception as error:
        if not raised or any(error is alarm for alarm, _ in raised):
            raise
        raise TimeoutError(f"more than {seconds:g} s") from error  # a compiler wraps it in its own
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # an alarm may arrive here, too
            signal.signal(signal.SIGALRM, before)
            if raised:
                _end_compilers(children)
            if left:  # somebody else's time goes on; where it has ended meanwhile, they hear of it now
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), every)


def _descendants(pid: int | str = "self") -> set[int]:
    """The processes below one, on Linux; elsewhere none."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found.update(map(int, path.read_text().split()))
    return found.union(*map(_descendants, found))


def _end_compilers(before: Collection[int]) -> None:
    """Ends the compilers that this process started since, which would slow down whatever is measured next."""
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        threads = inductor.AsyncCompile.pool
        if threads.cache_info().currsize:
            threads().shutdown(wait=False, cancel_futures=True)
            threads.cache_clear()
        for pool in inductor._pool_set:
            if (worker := getattr(pool, "process", None)) is not None:
                worker.kill()  # its own workers end with it
        inductor.after_fork()  # the next compilation starts others
    for pid in _descendants().difference(before):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in COMPILERS:
                os.kill(pid, signal.SIGKILL)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, also where a compiler or a runtime wrapped the exception in its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(error)
        if any(sign in text for sign in ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: Exception) -> str:
    """An exception in one line of reasonable length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
