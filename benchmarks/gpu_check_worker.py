"""The process that fills rows: it keeps what is compiled from row to row, and is replaced when a row breaks it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from .gpu_check_rows import Context, Found, Row

# Of a row's time; after it no peer is begun and timing ends, so that the row answers before it is ended.
_SOFT_SHARE = 0.8


class Worker:
    """Fills rows in a process of its own; what it prints goes to a log.

    Args:
        log: The file, appended to.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None

    def fill(self, row: Row, ceilings: dict[str, Any] | None, seconds: float) -> Found:
        """What the row finds, or its "error"; never raises for what the row does, and takes no longer than seconds."""
        end = time.monotonic() + seconds
        connection = self._connection or self._start()
        try:
            connection.send((row.fill, ceilings, seconds))
            if connection.poll(max(end - time.monotonic(), 0)):
                found: Found
                found, sound = connection.recv()
                if not sound:
                    self.stop()
                return found
            problem = f"more than {seconds:.0f} s"
        except (EOFError, OSError):
            problem = "the process died; see " + self.log.name
        self.stop()
        return {"error": problem}

    def _start(self) -> Connection[Any, Any]:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.log))
        self._process.start()
        theirs.close()
        return self._connection

    def stop(self) -> None:
        """Ends the process and what it has started; the next row gets a new one."""
        if self._process is None or self._process.pid is None or self._connection is None:
            return
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):  # before it leads a group of its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process = self._connection = None


def _serve(connection: Connection[Any, Any], log: Path) -> None:
    os.setsid()
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    while True:
        try:
            fill, ceilings, seconds = connection.recv()
        except EOFError:
            return
        try:
            found = fill(Context(device, ceilings, time.monotonic() + _SOFT_SHARE * seconds))
        except Exception as error:  # a row that fails is a result, and the others go on
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        sys.stdout.flush()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # after a few shapes of one function the compiler would quietly stay eager
        gc.collect()
        sound = True
        if device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # a kernel has broken the device's context, for every row after it too
                found, sound = {"error": f"after the row: {error}"[:300]} | found, False
        connection.send((found, sound))
