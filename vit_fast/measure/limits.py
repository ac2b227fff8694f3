"""Time limits, and interrupts after which results are still written."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# The alarm repeats at this interval, because a weakref callback or a handler may swallow its exception.
REPEAT_S = 2.0


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block after `seconds`, and cancels the compilations that Inductor has queued.

    An alarm of the caller is delayed until the block ends. Outside the main thread, there is no limit. C code is not
    interrupted before it returns to Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    expired = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        raise TimeoutError(f"took more than {seconds:.4g} s")

    (left, every), start = signal.setitimer(signal.ITIMER_REAL, 0), time.monotonic()
    outer = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), REPEAT_S)
    try:
        yield
    except Exception as error:
        if not expired:
            raise
        raise TimeoutError(f"took more than {seconds:.4g} s") from error  # a compiler may have wrapped the TimeoutError
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # an alarm may arrive during this cleanup, too
            signal.signal(signal.SIGALRM, outer)
            if expired:
                _cancel_compilations()
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), every)


def _cancel_compilations() -> None:
    """Cancels Inductor's queue and ends its workers, which would disturb the next timing."""
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is None:
        return
    pool = inductor.AsyncCompile.pool
    if pool.cache_info().currsize:
        pool().shutdown(wait=False, cancel_futures=True)
        pool.cache_clear()
    for processes in inductor._pool_set:
        if (worker := getattr(processes, "process", None)) is not None:
            worker.kill()  # its child processes end, too
    inductor.after_fork()  # the next compilation starts new workers


@contextlib.contextmanager
def patient_interrupt(*signals: signal.Signals) -> Iterator[Callable[[], None]]:
    """Raises KeyboardInterrupt at the first signal, but not at the second, so that results are still written.

    The third and later signals raise again. Before each signal is handled, the caller's handler runs. Yields a function
    that raises KeyboardInterrupt if there was a signal: other code may have swallowed the first exception. Outside the
    main thread, nothing changes. Ignored signals stay ignored.
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

    heard = signals if threading.current_thread() is threading.main_thread() else ()
    ignored = signal.SIG_IGN, None
    before = {which: signal.signal(which, handle) for which in heard if signal.getsignal(which) not in ignored}
    try:
        yield check
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
