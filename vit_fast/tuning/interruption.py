"""Ctrl-C that is remembered: compilers and callbacks from C may swallow the exception that it raises."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Whether Ctrl-C was pressed.

    Attributes:
        asked: It was.
    """

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Ends what goes on although it was.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self.asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def remembered() -> Iterator[Interruption]:
    """Notes Ctrl-C in the block, and then does what is done without; only the main thread gets any."""
    seen = Interruption()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield seen
        return
    handle = before

    def note(number: int, frame: FrameType | None) -> None:
        seen.asked = True
        handle(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
