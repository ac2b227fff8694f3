"""What ends a call that hangs, and what tells memory that ran out from other failures."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[Callable[[], None]]:
    """Ends what hangs, wherever Python gets to run; outside the main thread, where no signal comes, nothing is ended.

    Yields:
        What gives as much time again.
    Raises:
        TimeoutError: in the block, after so many seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    (left, every), start = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()
    before = signal.signal(signal.SIGALRM, end)
    again()
    try:
        yield again
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # somebody else's time goes on; where it has ended meanwhile, they hear of it now
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), every)


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
