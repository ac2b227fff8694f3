"""Holds choices against the model as it was given, and times them: the search's shop on a real machine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedInputError
from .build import build, shape_classes
from .candidate import AS_FILE, GIVEN, Candidate, variations
from .check import Expected, Rule
from .clock import Protocol, Samples, peak_memory_of_call, synchronise
from .limits import Interruption, at_most, describe_error, is_out_of_memory
from .optimized import Optimized, call, first_batch, tensors_in
from .runtimes import OnnxFile
from .search import OutOfTime, Refused

# About how long a runtime takes to open a file.
OPENING_S = 1.0


@dataclass(frozen=True)
class Checked:
    """Errors, agreement, first call and memory of a candidate that gave outputs.

    Attributes:
        error: Largest against fp64; allowed is what the rule of accuracy allows, None where loss is allowed.
        agreement: The share of images whose answer is the model's own: the same largest output, or where the outputs
            are no classes the same direction.
        first_call_s: Building and the first call, compilation with it.
        peak_bytes: What a call allocates at its highest, and weights of its own.
    """

    error: float
    allowed: float | None
    agreement: float
    first_call_s: float
    peak_bytes: int


class Trials:
    """The search's shop: builds choices for a model, checks and times them.

    Args:
        model: As it was given, in evaluation mode.
        example: What it is called with.
        expected: What it gives.
        photographs: To calibrate int8 with.
        rule: What a choice must keep.
        tell: Told what is being done, and after how many seconds.
        interruption: What ends the search.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        expected: Expected,
        photographs: Sequence[str | Path],
        rule: Rule,
        tell: Callable[[str, float], None] | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self.model, self.example, self.expected = model, example, expected
        self.photographs, self.rule, self.tell = photographs, rule, tell
        self.interruption = interruption or Interruption()
        self.device = device_of_example(example)
        self.checked: dict[Candidate, Checked] = {}
        self.took: dict[Candidate, float] = {}  # seconds, of what was prepared or ran out of time
        self.prepared: dict[Candidate, tuple[Optimized, Samples]] = {}
        self.classes = {} if isinstance(model, OnnxFile) else shape_classes(model, example)
        self.start = time.perf_counter()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def seconds(self, candidate: Candidate) -> float:
        """The longest time of its kind so far; for the first of a kind, an estimate for a machine this slow."""

        def kind(choice: Candidate) -> tuple[object, ...]:
            return choice.engine, choice.precision, choice.frozen

        took = [seconds for choice, seconds in self.took.items() if kind(choice) == kind(candidate)]
        if isinstance(self.model, OnnxFile) and candidate.precision is None:
            took.append(OPENING_S)
        if took:
            return max(took)
        slow = [seconds / choice.seconds for choice, seconds in self.took.items() if choice.engine == candidate.engine]
        checks_s = self.took.get(GIVEN, 0.0) if candidate.engine != GIVEN.engine else 0.0
        return checks_s + candidate.seconds * max([1.0, *slow])

    def prepare(self, candidate: Candidate, seconds: float) -> None:
        """Builds, checks, and weighs a choice."""
        self.interruption.check()
        self._tell(candidate.name)
        start = time.perf_counter()
        try:
            # what was given is measured however long it takes
            with contextlib.nullcontext() if candidate == GIVEN else at_most(max(seconds, 1.0)):
                optimized, self.checked[candidate] = self._build_and_check(candidate)
        except Exception as error:  # a choice may fail in any way it likes; the others are tried all the same
            self._forget()
            if candidate == GIVEN or isinstance(error, Refused):
                raise
            if isinstance(error, TimeoutError):
                self.took[candidate] = time.perf_counter() - start
                raise OutOfTime(str(error)) from None
            raise Refused(_in_words(error)) from None
        self.took[candidate] = time.perf_counter() - start
        one = lambda number: call(optimized, self.example)  # noqa: E731  # a name would say no more
        self.prepared[candidate] = optimized, Samples(one, self.device, Protocol())

    def _build_and_check(self, choice: Candidate) -> tuple[Optimized, Checked]:
        start = time.perf_counter()
        before = _own_bytes(self.device)
        what = self.model, self.example, self.expected.output, self.photographs
        optimized = build(choice, *what, self.rule.min_agreement)
        call(optimized, self.example)
        synchronise(self.device)
        first_call_s = time.perf_counter() - start
        error, allowed, agreement = self.expected.check(optimized, choice, self.rule)
        peak = peak_memory_of_call(lambda: call(optimized, self.example), self.device)
        peak += max(0, _own_bytes(self.device) - before)
        limit = self.rule.memory_limit
        if limit is not None and peak > limit and choice != GIVEN:
            raise Refused(f"takes {peak / 2**20:.3g} MiB, memory_limit is {limit / 2**20:.3g} MiB")
        return optimized, Checked(error, allowed, agreement, first_call_s, peak)

    def call_ms(self, candidate: Candidate, number: int) -> float:
        self.interruption.check()
        samples = self.prepared[candidate][1]
        try:
            samples.take(number)
        except Exception as error:
            if candidate == GIVEN:
                raise
            raise Refused(_in_words(error)) from None
        return samples[-1]

    def compare(self, candidates: Sequence[Candidate]) -> None:
        self._tell(f"timing the {len(candidates)} that are left, interleaved")

    def _tell(self, what: str) -> None:
        if self.tell is not None:
            self.tell(what, self.elapsed_s())

    def release(self, candidate: Candidate) -> None:
        self.prepared.pop(candidate, None)
        self._forget()

    def variations(self, candidate: Candidate) -> Sequence[Candidate]:
        base = AS_FILE if isinstance(self.model, OnnxFile) and candidate == GIVEN else candidate
        return variations(base, self.device, first_batch(self.example), set(self.classes.values()))

    def _forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def device_of_example(example: Any) -> torch.device:
    """Returns the device of the example's tensors.

    Raises:
        ValueError: there is none, or they are not all on one device with images in them.
    """
    tensors = tensors_in(example)
    if not tensors or any(not tensor.numel() for tensor in tensors) or not tensors[0].dim():
        raise ValueError(
            "example: expected images [B, channels, height, width] with B >= 1, a tuple of arguments, or a mapping "
            f"of keyword arguments, got {type(example).__name__}"
        )
    devices = {tensor.device for tensor in tensors}
    if torch.device("meta") in devices:
        raise ValueError("example lies on meta: expected tensors that hold numbers")
    if len(devices) > 1:
        raise ValueError(f"example lies on {', '.join(map(str, devices))}: expected one device")
    return devices.pop()


def _own_bytes(device: torch.device) -> int:
    """Memory in use: torch's on CUDA, the process's on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    fields = Path("/proc/self/statm")
    return int(fields.read_text().split()[1]) * 4096 if fields.exists() else 0


def _in_words(error: Exception) -> str:
    if isinstance(error, UnsupportedInputError):
        return "; ".join(error.reasons)
    return "out of memory" if is_out_of_memory(error) else describe_error(error)[:200]
