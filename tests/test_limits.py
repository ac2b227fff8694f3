"""Limits of time and Ctrl-C: both end what hangs, also if other code swallows them, and restore other handlers."""

from __future__ import annotations

import contextlib
import signal
import time
import weakref

import pytest

from vit_fast.measure import limits
from vit_fast.measure.limits import at_most, patient_interrupt


def test_the_second_ctrl_c_is_ignored_and_the_handler_of_the_caller_runs() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with patient_interrupt(signal.SIGINT):
        for ignored in (False, True, False):
            with contextlib.nullcontext() if ignored else pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 4


def test_a_limit_restores_the_alarm_of_the_caller() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 1000.0, 7.0)
    try:
        with pytest.raises(TimeoutError, match=r"more than 0\.01 s"), at_most(0.01):
            time.sleep(1000)
        left, every = signal.getitimer(signal.ITIMER_REAL)
        assert 500 < left <= 1000 and every == 7 and not heard
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with at_most(1000.0):
            time.sleep(0.02)
        while not heard:
            time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_is_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a weakref callback, whose errors Python ignores, and by a handler."""
    monkeypatch.setattr(limits, "REPEAT_S", 0.1)
    with pytest.raises(TimeoutError, match=r"more than 0\.01 s"), at_most(0.01):
        held: set[int] = set()
        reference = weakref.ref(held, lambda _: time.sleep(1000))
        del held
        assert reference() is None
        with contextlib.suppress(Exception):
            time.sleep(1000)
        time.sleep(1000)
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0, "what repeats has ended"


def test_a_limit_that_a_compiler_wraps_is_still_one() -> None:
    with pytest.raises(TimeoutError, match="more than 1000 s"), at_most(1000.0):
        try:
            signal.raise_signal(signal.SIGALRM)
        except TimeoutError as error:
            raise RuntimeError("did not complete within None s") from error
    with pytest.raises(KeyError), at_most(1000.0):
        {}["no limit"]
