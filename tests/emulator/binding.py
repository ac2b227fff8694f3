"""Python binding of the emulator: reports, profiles, and orders of execution."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Report(NamedTuple):
    """A defect, as first seen at an instruction; `count` is the number of times."""

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
    """Counts of one instruction; those of memory are from the first CTA of each launch."""

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
    """The executed instructions of a kernel."""

    kernel: str
    launches: int
    ctas: int
    rows: list[Row]


class Schedule(NamedTuple):
    """An order of execution.

    Args:
        seed: 0 runs one warp after another, each until it waits; else, warps run random portions in random order.
        early: Asynchronous copies complete 0 as late as allowed, 1 at once, 2 at either time at random.
        reverse: Run CTAs from the last to the first.
    """

    seed: int = 0
    early: int = 0
    reverse: bool = False


class Emulator:
    """The emulator in a shared library from `build`. `reports` and `profile` clear what they return."""

    def __init__(self, library: Path) -> None:
        self.binding = ctypes.CDLL(str(library))
        for name in ("reports", "profile", "find"):
            getattr(self.binding, f"emulator_{name}").restype = ctypes.c_char_p

    def _ask(self, name: str, *arguments: bytes) -> Any:
        return json.loads(getattr(self.binding, f"emulator_{name}")(*arguments).decode(errors="replace"))

    def schedule(self, schedule: Schedule) -> None:
        self.binding.emulator_schedule(*map(int, schedule))

    def shorten_fp8_sums(self, bits: int) -> None:
        """Truncates the sums of 8-bit wgmma to `bits` significant bits; 0 restores fp32."""
        self.binding.emulator_set_fp8_bits(bits)

    def reports(self) -> list[Report]:
        return [Report(*row) for row in self._ask("reports")]

    def profile(self) -> list[Profile]:
        return [Profile(*kernel, [Row(*row) for row in rows]) for *kernel, rows in self._ask("profile")]

    def find(self, word: str) -> list[Found]:
        """Returns the instructions of loaded kernels whose opcode contains a word."""
        return [Found(*row) for row in self._ask("find", word.encode())]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records launches without executing them, as a CUDA graph does. Memory that is freed meanwhile stays valid."""
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
