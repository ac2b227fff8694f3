"""Run of a configuration: builds and checks each candidate, times the correct ones interleaved, returns the record.

A candidate that is missing, unsupported, incorrect, broken or too large becomes a row with the reason, and the run
continues. After Ctrl-C, the record contains the rows so far. If the process is killed, the journal contains the rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vit_fast.measure import clock
from vit_fast.measure.candidate import Candidate, Prepared, Status, describe_error, why_failed
from vit_fast.measure.clock import Call, Interleaved, Protocol, Samples, time_interleaved
from vit_fast.measure.limits import at_most
from vit_fast.version import describe, nvidia_smi

from . import preparation, records
from .allocation import estimate, is_enough
from .configuration import Configuration, make_configuration
from .models import DTYPES, Group
from .preparation import OUT_OF_TIME, RULE, cold_start, make_problem, matmul_precision, prepare
from .records import Journal, Record, Row, key_of, make_row

# The name of the second timing of the fastest full-precision candidate in a group.
AGAIN = "again"
ROUNDS_BETWEEN = 5  # rounds between two checks of the noise
LEAST_SECONDS = 5.0  # to prepare a candidate when the time is nearly over
GPU_FAILED = "CUDA failed in this process during"
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
CEILING_PROTOCOL = Protocol(repeats=50, seconds=0.25, least_repeats=5, warmup_repeats=3)
# A run is busy above these shares of CPU time: used by other processes; throttled by the cgroup's quota.
BUSY_SHARE, THROTTLED_SHARE = 0.10, 0.01
# Counters of nvidia-smi for clocks that were lowered because of heat or power delivery, not because of the power cap.
GPU_SLOWDOWNS = re.compile(r"(?:Thermal Slowdown|Power Brak\w+)\s*:\s*(\d+) us")


def run(
    configuration: Configuration, tell: Callable[[str], object] = lambda step: None, journal: Journal | None = None
) -> Record:
    """Runs a configuration, and returns the record: plain data with a row per candidate and group.

    `tell` is called with the name of each step. Rows that the journal contains are not measured again.
    """
    return _Run(configuration, tell, journal or Journal(header=header_of(configuration))).record()


def header_of(configuration: Configuration) -> dict[str, Any]:
    return {
        "request": configuration.request, "machine": describe(configuration.device),
        "configuration": configuration.to_dict(), "correctness_rule": RULE,
    }  # fmt: skip


def reopen(folder: Path) -> tuple[Configuration, Journal]:
    """Opens an interrupted run to resume it; raises ValueError if the machine, versions or code differ."""
    journal = Journal.resume(folder)
    try:
        configuration = make_configuration(**journal.header["request"])
    except TypeError as error:
        message = f"{journal.folder}: the run was started by another version of vit-fast ({error}): start a new run"
        raise ValueError(message) from None
    before, machine = journal.header["machine"], describe(configuration.device)
    for name in ("device", "threads", "packages", "commit"):
        if before.get(name) != machine[name]:
            raise ValueError(f"{journal.folder}: {name} must be {before.get(name)} to resume, got {machine[name]}")
    return configuration, journal


class _Run:
    def __init__(self, configuration: Configuration, tell: Callable[[str], object], journal: Journal) -> None:
        self.configuration, self.tell, self.journal, self.device = configuration, tell, journal, configuration.device
        self.start, self.ceilings_s = time.perf_counter(), 0.0
        self.planned = {group: configuration.candidates[group.model.kind] for group in configuration.groups()}

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _left_s(self) -> float:
        """Returns the seconds until the last measurement of the ceilings."""
        return self.configuration.time_budget_s - self.elapsed_s() - self.ceilings_s

    def record(self) -> Record:
        configuration, journal, ended = self.configuration, self.journal, ""
        try:
            self._take_ceilings()
            for group in list(self.planned):
                if configuration.search and not records.may_gain(group, journal.found("row")):
                    del self.planned[group]
                elif (remaining := self._remaining(group)) and self.elapsed_s() <= configuration.time_budget_s:
                    try:
                        with matmul_precision(group.dtype_name):
                            self._measure_group(group, remaining)
                    finally:
                        torch.compiler.reset()
                        with contextlib.suppress(RuntimeError):  # of a GPU that failed
                            clock.free_memory(self.device)
                    self._take_ceilings()
        except KeyboardInterrupt:
            ended = "not started"
            self.tell("interrupted: writing what was measured")
        except GpuFailed as error:
            ended = str(error)
            self.tell(ended)
        why_not: tuple[Status, str] = ("interrupted", ended) if ended else ("skipped", OUT_OF_TIME)
        alone = {(key_of(row), row["candidate"]) for row in journal.found("alone")}
        for group in self.planned:
            missing = [one for one in self._remaining(group) if (group.key, one.name) not in alone]
            self._refuse(group, missing, *why_not)
        order = [(group.key, candidate.name) for group, found in self.planned.items() for candidate in found]
        found = journal.record(bool(ended))
        found["rows"].sort(key=lambda row: order.index((key_of(row), row["candidate"])))
        return found | {"gpu_failed": ended.startswith(GPU_FAILED), "seconds": round(self.elapsed_s(), 1)}

    def _refuse(self, group: Group, candidates: Sequence[Candidate], status: Status, reason: str) -> None:
        for candidate in candidates:
            self.journal.add("row", make_row(group, candidate, status, reason))

    def _remaining(self, group: Group) -> list[Candidate]:
        """Returns the planned candidates of a group that have no row yet; for torch.compile, in the selected mode."""
        rows = self.journal.found("row")
        known = {row["candidate"] for row in rows if key_of(row) == group.key}
        found = [candidate for candidate in self.planned.get(group, ()) if candidate.name not in known]
        measured = records.measured(self._rows_like(group)) if self.configuration.is_limited else ()
        modes = {row["candidate"].partition("+compile")[0]: row["compile_mode"] for row in measured}
        return [one for one in found if one.compile_mode in ("none", modes.get(one.base, one.compile_mode))]

    def _is_optional(self, other: Group, group: Group) -> bool:
        """Returns True for a later group in a dtype that the user did not name, such as bf16 after fp32."""
        if self.configuration.request["dtypes"] is not None or any(
            key_of(r) == other.key for r in self._rows_like(other)
        ):
            return False
        return other.dtype_name != group.dtype_name == self.configuration.dtypes[0]

    def _rows_like(self, group: Group) -> list[Row]:
        """Returns the rows so far that differ from the group's rows at most in the batch size."""
        return [row for row in self.journal.found("row") if key_of(row | {"batch": group.batch_size}) == group.key]

    def _take_ceilings(self) -> None:
        """Measures the ceilings: before, between and after the groups, because other load lowers them."""
        self.tell("speed of a large matmul and copy (the ceilings)")
        every = [candidate.precision for found in self.configuration.candidates.values() for candidate in found]
        lower = ["bf16"] if "bf16" in every or "amp" in self.configuration.dtypes else []  # amp multiplies in bf16
        started_s = self.elapsed_s()
        self.journal.add("ceilings", measure_ceilings(self.device, [*self.configuration.dtypes, *lower]))
        self.ceilings_s = self.elapsed_s() - started_s

    def _measure_group(self, group: Group, candidates: Sequence[Candidate]) -> None:
        """Adds a row for every candidate, except for modes of torch.compile that are not selected."""
        self.tell(f"{group}: images and the fp64 reference")
        started_s = self.elapsed_s()
        try:
            problem = make_problem(group, self.configuration.images)
        except Exception as error:  # e.g. a dtype that an operator does not support
            status, reason = why_failed(error)
            self._refuse(group, candidates, status, f"in the reference: {reason}")
            return
        prepared: dict[str, Prepared] = {}
        spent_s = {"": self.elapsed_s() - started_s + self.ceilings_s}
        limited, groups = self.configuration.is_limited, list(self.planned)
        later = groups[groups.index(group) + 1 :] if limited else []
        required = [other for other in later if not self._is_optional(other, group)]
        ran_out = {row["candidate"] for row in self._rows_like(group) if row["reason"] == OUT_OF_TIME}
        for candidate in candidates:
            self.tell(f"{group}: {candidate.name}")
            started_s, begun = self.elapsed_s(), [*group.key, candidate.name]
            others = _other_modes(candidate, prepared) if limited else []
            _, timing_s, preparing_s = estimate(group, later if others else required, prepared, spent_s)
            spare_s = self._left_s() - timing_s - preparing_s
            ready = None
            if missing := candidate.missing_packages():
                row = make_row(group, candidate, "not installed", f"pip install {' '.join(missing)}")
            elif any(spent_s[name] > spare_s for name in others):
                continue
            elif spare_s < 0 or candidate.name in ran_out:
                row = make_row(group, candidate, "skipped", OUT_OF_TIME)
            elif self.journal.entries.count(("resumed", begun)) > 1:
                row = make_row(group, candidate, "failed", "the process ended twice while preparing this candidate")
            else:
                self.journal.add("begun", begun)
                left_s = spare_s if limited else max(self._left_s(), LEAST_SECONDS)
                seconds, explained = min(left_s, preparation.CANDIDATE_SECONDS), self.configuration.request["explain"]
                ready, row = prepare(candidate, group, problem, explained=explained, seconds=seconds)
            if ready is not None:
                prepared[candidate.name] = ready
                spent_s[candidate.name] = 0.0 if others else self.elapsed_s() - started_s  # later groups use one mode
                if row["ms"] is not None:  # in case the process ends before all candidates are timed interleaved
                    self.journal.add("alone", row | {"alone": True})
                if self.configuration.request["cold"]:
                    row.update(cold_start(self.configuration.request, group, candidate.name))
                continue
            self.journal.add("row", row)
            self._check_gpu(candidate.name)
        self.journal.add("begun", None)  # from here on, no candidate is in preparation
        timing_s, all_timing_s, preparing_s = estimate(group, later, prepared, spent_s)
        if self._left_s() < all_timing_s + preparing_s:
            for other in set(later) - set(required):
                self.tell(f"{other}: left out for lack of time")
                del self.planned[other]
            timing_s, all_timing_s, preparing_s = estimate(group, required, prepared, spent_s)
        share_s = (self._left_s() - preparing_s) * timing_s / all_timing_s if prepared else 0.0
        self._time(group, prepared, self.elapsed_s() + share_s)

    def _time(self, group: Group, prepared: dict[str, Prepared], end_s: float) -> None:
        # at batch size 1, the host's launch time counts, as for a single request
        launch: Any = "counted" if group.batch_size == 1 and group.model.data is not None else "hidden"
        protocol, limited = (
            dataclasses.replace(self.configuration.protocol, launch=launch),
            self.configuration.is_limited,
        )
        while prepared:
            clock.free_memory(self.device)  # of failed candidates
            self.tell(f"{group}: timing {len(prepared)} candidates, interleaved")
            alike = [name for name, ready in prepared.items() if not records.is_lower(ready.row)] or list(prepared)
            best = min(alike, key=lambda name: prepared[name].call_s)
            calls = {name: ready.call for name, ready in prepared.items()} | {AGAIN: prepared[best].call}
            timed, conditions = Interleaved(calls, self.device, protocol), Conditions(self.device)
            add = partial(self._add_timed, group, prepared, best, conditions)
            try:
                rounds, is_done = timed.rounds(), False
                while not is_done:
                    with at_most(preparation.CANDIDATE_SECONDS):
                        number = next(rounds)
                    is_late = self.elapsed_s() >= end_s
                    is_done = _is_done(number, timed, best, limited) or (is_late and is_enough(*timed.values()))
            except KeyboardInterrupt:
                add({name: taken for name, taken in timed.items() if is_enough(taken)}, "interrupted")
                raise
            except Exception as error:
                broken = prepared.pop(best if timed.running == AGAIN else timed.running)
                status, reason = why_failed(error)
                without = dict.fromkeys(records.SPEED_FIELDS)
                broken.row.update(without, status=status, reason=f"during timing: {reason}")
                self.journal.add("row", broken.row)
                self._check_gpu(broken.candidate.name)
            else:
                add(timed, "skipped")
                break

    def _add_timed(
        self, group: Group, prepared: Mapping[str, Prepared], best: str, conditions: Conditions,
        timings: Mapping[str, Samples], otherwise: Status,
    ) -> None:  # fmt: skip
        if best in timings and AGAIN in timings:
            first, again = timings[best], timings[AGAIN]
            control = clock.control(first, again) | {"ms": [first.ms, again.ms], "conditions": conditions.summary()}
            self.journal.add("control", group.about(best) | control)
        for name, ready in prepared.items():
            others = _other_modes(ready.candidate, prepared) if self.configuration.is_limited else []
            if any(name in timings and one in timings and timings[one].ms < timings[name].ms for one in others):
                self.journal.add("omitted", [*group.key, name])
                continue
            if name in timings:
                records.add_timing(ready.row, timings[name], group)
            else:
                if ready.row["ms"] is not None:
                    continue  # the journal contains a row that was timed alone
                ready.row.update(status=otherwise, reason="timing ended after too few repeats")
            self.journal.add("row", ready.row)

    def _check_gpu(self, name: str) -> None:
        """Raises GpuFailed if a candidate broke the CUDA context of this process, e.g. by an invalid address."""
        if self.device.type == "cuda":
            try:
                torch.ones(1, device=self.device).item()
            except RuntimeError as error:
                raise GpuFailed(f"{GPU_FAILED} {name}: {describe_error(error)}") from None


def _is_done(number: int, timed: Interleaved, best: str, limited: bool) -> bool:
    """Returns True if the protocol is satisfied and, in a limited run, noise does not prevent a ranking."""
    is_done = timed.protocol.is_satisfied(timed)
    if is_done and limited:
        is_done = number % ROUNDS_BETWEEN == 0
        is_done &= clock.control(timed[best], timed[AGAIN])["resolution"] <= clock.UNRANKABLE
    return is_done


def _other_modes(candidate: Candidate, prepared: Mapping[str, Prepared]) -> list[str]:
    """Returns the prepared candidates that differ only in their mode of torch.compile."""
    alike = [name for name, ready in prepared.items() if ready.candidate.base == candidate.base != name]
    return [name for name in alike if name != candidate.name] if candidate.compile_mode != "none" else []


class GpuFailed(Exception):
    """No more CUDA calls are possible in this process; another process can resume the run."""


def measure_ceilings(device: torch.device | str, dtypes: Sequence[str]) -> dict[str, Any]:
    """Measures the device's ceilings: a large copy in GB/s (read and written), a square matmul in TFLOP/s per dtype.

    On a CPU in fp32, the faster matmul of torch and oneDNN counts.
    """
    device = torch.device(device)
    size, nbytes = MATMUL_SIZE[device.type], COPY_BYTES[device.type]

    def fastest_ms(call: Call) -> float:
        return min(time_interleaved({"call": call}, device, CEILING_PROTOCOL)["call"])

    def matmul(name: str) -> float:
        left, right = (torch.randn(size, size, device=device).to(DTYPES[name]) for _ in range(2))
        calls: list[Call] = [lambda _: left @ right]
        if device.type == "cpu" and left.dtype is torch.float32 and torch.backends.mkldnn.is_available():
            # torch uses MKL for fp32, which takes twice as long as oneDNN on CPUs from AMD
            packed = torch.ops.mkldnn._reorder_linear_weight(right)
            calls.append(lambda _: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""))
        with matmul_precision(name):
            return 2 * size**3 / (min(map(fastest_ms, calls)) * 1e9)

    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "copy_GB_per_s": 2 * nbytes / (fastest_ms(lambda _: target.copy_(source)) * 1e6),
        "copy_bytes": nbytes,
        "matmul_TFLOP_per_s": {name: matmul(name) for name in dict.fromkeys(dtypes)},
        "matmul_size": size,
    }


class Conditions:
    """The state of the machine since this object was created: other processes, throttling."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        """Returns the time, seconds of other processes per CPU, withheld by the quota, and with lowered GPU clocks."""
        (busy_s, processors), times, slowed_us = _busy_seconds(), os.times(), 0
        own_s = times.user + times.system + times.children_user + times.children_system
        if self._device.type == "cuda":
            slowed_us = sum(map(int, GPU_SLOWDOWNS.findall(nvidia_smi(self._device, "-q", "-d", "PERFORMANCE") or "")))
        others_s = (busy_s - own_s) / processors if processors else 0.0
        return time.perf_counter(), others_s, _throttled_seconds(), slowed_us / 1e6

    def summary(self) -> dict[str, Any]:
        """Returns plain data for the record; `busy` lists reasons not to trust the figures."""
        (start, *before), (end, *after) = self._before, self._read()
        others, throttled, slowed = (max(b - a, 0.0) / max(end - start, 1e-9) for a, b in zip(before, after))
        checks = (
            (others > BUSY_SHARE, f"other processes used {others:.0%} of the CPU time"),
            (throttled > THROTTLED_SHARE, f"the cgroup's quota throttled this process for {throttled:.0%} of the time"),
            (slowed > THROTTLED_SHARE, f"heat or power delivery lowered the GPU's clocks for {slowed:.0%} of the time"),
        )
        busy = [reason for is_so, reason in checks if is_so]
        return {"others_share": round(others, 4), "throttled_share": round(throttled, 4), "busy": busy}


def _busy_seconds() -> tuple[float, int]:
    """Returns busy seconds of the CPUs that this process may use, and their number; zeros if unknown."""
    try:
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        # excludes idle and iowait
        ticks = [map(float, (*fields[1:4], *fields[6:9])) for fields in lines if allowed & {*fields[:1]}]
        return sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK"), len(ticks)
    except (OSError, AttributeError, ValueError):
        return 0.0, 0


def _throttled_seconds() -> float:
    try:
        fields = dict(line.split() for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines())
        return float(fields.get("throttled_usec", 0)) / 1e6
    except (OSError, ValueError):
        return 0.0
