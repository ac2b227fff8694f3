"""Batches from processes that read images, which may be killed: for want of memory, or by an image in the decoder."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import signal
import threading
from collections.abc import Generator
from typing import Any

from torch.utils.data import DataLoader

from ..errors import VitFastError


class ReaderLostError(VitFastError, RuntimeError):
    """A process that reads images ended before its work did."""


def batches_of(loader: DataLoader[Any]) -> Generator[Any]:
    """What a loader gives.

    Where a process of a DataLoader ends, torch raises from a signal's handler, wherever this process is just then. Here
    the signal is left alone: the loader notices, too, when it is asked for the next batch, or cannot take that.

    Raises:
        ReaderLostError: such a process ended before its work did.
    """
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    readers = [process for process in multiprocessing.active_children() if process not in others]
    handled = bool(readers) and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handled else None
    ended: list[multiprocessing.process.BaseProcess] = []
    try:
        while not ended:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception:  # torch's of a lost process, or whatever the connection to it gives
                gone = multiprocessing.connection.wait([process.sentinel for process in readers], timeout=1.0)
                for process in readers:
                    if process.sentinel in gone:
                        process.join()  # its end of the pipe closes a moment before it has an exit code
                ended = [process for process in readers if process.exitcode]
                if not ended:
                    raise
            else:
                yield batch
    finally:
        del batches  # ends the others, and waits for them
        if handled:
            signal.signal(signal.SIGCHLD, before)
    raise ReaderLostError(f"a process that reads images has ended, with exit code {ended[0].exitcode}")
