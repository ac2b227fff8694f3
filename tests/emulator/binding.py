"""Binding of the emulator: what it executed and found, how it orders warps, and planted defects."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Report(NamedTuple):
    """A defect, the first time that it was seen at an instruction."""

    kind: str
    kernel: str
    line: str
    instruction: str
    text: str
    count: int

    def __str__(self) -> str:
        where = f"{self.kernel} at {self.line or '?'} ({self.count} times)"
        return f"{self.kind} in {where}: {self.text}\n    {self.instruction}"


class Found(NamedTuple):
    """An instruction of a loaded kernel."""

    kernel: int
    name: str
    index: int
    opcode: str
    line: str
    executed: int


class Row(NamedTuple):
    """Counts of one instruction; the figures of memory are those of the first CTA of each launch."""

    index: int
    opcode: str
    line: str
    executed: int
    lanes: int
    accesses: int
    wavefronts: int
    ideal_wavefronts: int
    bytes: int
    sectors: int


class Profile(NamedTuple):
    """A kernel's instructions."""

    kernel: str
    launches: int
    ctas: int
    rows: list[Row]


class Schedule(NamedTuple):
    """An order of execution; the default is one warp after another, each until it waits, and copies as late as allowed.

    Args:
        seed: Nonzero for a random order of warps in random portions.
        early: Asynchronous copies arrive 0 as late as allowed, 1 at once, 2 at a random one of both.
        reverse: Run CTAs from the last to the first.
    """

    seed: int = 0
    early: int = 0
    reverse: bool = False


class Emulator:
    """The emulator in a shared library that `build` made. `reports` and `profile` also clear what they return."""

    def __init__(self, library: Path) -> None:
        self.binding = ctypes.CDLL(str(library))
        for name in ("reports", "profile", "find"):
            getattr(self.binding, f"emulator_{name}").restype = ctypes.c_char_p

    def _ask(self, name: str, *arguments: bytes) -> Any:
        return json.loads(getattr(self.binding, f"emulator_{name}")(*arguments).decode(errors="replace"))

    def schedule(self, schedule: Schedule) -> None:
        self.binding.emulator_schedule(*map(int, schedule))

    def shorten_fp8_sums(self, bits: int) -> None:
        """Keep as many significant bits of the sums of 8-bit wgmma; 0 for fp32."""
        self.binding.emulator_set_fp8_bits(bits)

    def reports(self) -> list[Report]:
        return [Report(*row) for row in self._ask("reports")]

    def profile(self) -> list[Profile]:
        return [Profile(*kernel, [Row(*row) for row in rows]) for *kernel, rows in self._ask("profile")]

    def find(self, word: str) -> list[Found]:
        """The instructions of the kernels loaded so far whose opcode contains a word."""
        return [Found(*row) for row in self._ask("find", word.encode())]

    @contextmanager
    def without(self, instruction: Found) -> Iterator[None]:
        """Leaves an instruction out: a planted defect."""
        self.binding.emulator_leave_out(instruction.kernel, instruction.index, 1)
        try:
            yield
        finally:
            self.binding.emulator_leave_out(instruction.kernel, instruction.index, 0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records launches as a CUDA graph does, without executing them. Memory freed meanwhile stays valid."""
        process = ctypes.CDLL(None)
        process.emulator_hold_memory(1)
        self.binding.emulator_record(1)
        try:
            yield
        finally:
            self.binding.emulator_record(0)

    def replay(self) -> None:
        """Executes the recorded launches."""
        self.binding.emulator_replay()

    def release(self) -> None:
        """Frees the memory of a recording."""
        ctypes.CDLL(None).emulator_hold_memory(0)
