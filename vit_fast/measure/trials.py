"""Builds, checks and times candidates for `optimize`: the search's shop on a real machine."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..accuracy import allowed_error, error_of, size_of
from ..errors import UnsupportedInputError
from ..fusion.fuse import unfuse
from .build import build
from .candidate import AS_FILE, GIVEN, Candidate, variations
from .check import Reference, errors_of, judge, same_answers
from .clock import Protocol, Samples, peak_memory_of_call, synchronise
from .limits import Interruption, at_most, describe_error, is_out_of_memory
from .optimized import Optimized, call, first_batch, tensors_in, version_of
from .runtimes import OnnxFile, unrewritten
from .search import OutOfTime, Refused

# About how long a runtime takes to open a file.
OPENING_S = 1.0
# Images of the example that fp64 is computed of, where images do not look at one another.
MOST_IN_FP64 = 8
# How far off a file is by its own rounding, of its outputs' size: there is no fp64 of it. TF32 is beyond it.
FILE_ROUNDING = 2e-5


@dataclass(frozen=True)
class Rule:
    """Limits of a candidate.

    Attributes:
        min_agreement: Where loss is allowed; see trials.Checked.
        memory_limit: Bytes, of weights of its own and the peak of a call; None means any.
    """

    min_agreement: float
    memory_limit: int | None = None


class Expected:
    """The answers that choices are held against.

    Args:
        model: In evaluation mode.
        example: What is timed.
        others: More batches like it, to hold answers against the model's.
    Raises:
        ValueError: the model writes into its inputs or its own tensors, gives other answers each time, none that are
            finite, or no floating ones: no other way to run it could be told right from wrong.
        UnsupportedInputError: it cannot be copied and run in fp64.
        Exception: whatever the model itself raises for the example.
    """

    def __init__(self, model: nn.Module, example: Any, others: Sequence[Any] = ()) -> None:
        self.batches = [example, *others]
        with torch.no_grad():
            self.output = _untouched(model, example)
            first, second = leaves_of(self.output), leaves_of(call(model, example))
            if not first:
                given = type(self.output).__name__
                raise ValueError(f"the model gives {given}: expected tensors of floating numbers")
            if not all(bool(leaf.isfinite().all()) for leaf in first):
                raise ValueError("the model gives NaN or infinity for the example: expected finite answers")
            for one, other in zip(first, second):
                if one.shape != other.shape or error_of(one, other) > torch.finfo(one.dtype).eps ** 0.5 * size_of(one):
                    raise ValueError("the model gives another answer each time: expected models without chance")
            self.answers = [first, *(leaves_of(call(model, batch)) for batch in others)]
            self.reference = self._reference(model, example)

    def _reference(self, model: nn.Module, example: Any) -> Reference:
        """Computed of a few images; of the whole example, where these give other outputs than among the others."""
        batch, outputs = first_batch(example), self.answers[0]
        exact_model, rounding = _definition(model)
        few = min(MOST_IN_FP64, batch)

        def cut(value: Any) -> Any:
            return value[:few] if isinstance(value, Tensor) and value.dim() and value.shape[0] == batch else value

        some = pytree.tree_map(cut, example)
        exact, checked = leaves_of(call(exact_model, some)), [cut(leaf) for leaf in outputs]
        if few < batch and not _are_alike(checked, exact, leaves_of(call(model, some))):
            exact, checked = leaves_of(call(exact_model, example)), outputs
        errors = [
            {
                measure: max(error, rounding * size_of(right, measure))
                for measure, error in errors_of(leaf, right).items()
            }
            for leaf, right in zip(checked, exact, strict=True)
        ]
        shapes = [tuple(leaf.shape) for leaf in outputs]
        return Reference(exact, errors, [leaf.dtype for leaf in outputs], shapes, range(few))

    def check(self, function: Callable[..., Any], choice: Candidate, rule: Rule) -> tuple[float, float | None, float]:
        """Returns the largest error, the allowed one (None where loss is allowed) and the agreement of a candidate.

        Raises:
            Refused: it fails the check.
        """
        given = choice == GIVEN  # whose outputs are known
        outputs = [self.output] if given else [call(function, batch) for batch in self.batches]
        found = self.answers if given else [leaves_of(output) for output in outputs]
        if type(outputs[0]) is not type(self.output):
            raise Refused(f"gives {type(outputs[0]).__name__} instead of {type(self.output).__name__}")
        lossy = choice.precision is not None
        verdict = judge(found[0], self.reference, tolerance=float("inf") if lossy else None)
        if verdict.reason is not None:
            raise Refused(verdict.reason)
        same = [same_answers(mine[0], theirs[0]) for mine, theirs in zip(found, self.answers)]
        agreement = float(torch.cat(same).double().mean())
        if lossy and agreement < rule.min_agreement:
            raise Refused(f"{agreement:.1%} of the answers are the model's own, asked for are {rule.min_agreement:.1%}")
        return verdict.max_error, None if lossy else verdict.allowed_error, agreement


def _are_alike(checked: list[Tensor], exact: list[Tensor], alone: list[Tensor]) -> bool:
    """True if images among others give about the outputs that they give alone."""
    return [leaf.shape for leaf in checked] == [leaf.shape for leaf in exact] and all(
        error_of(leaf, right, "rms") <= 4 * allowed_error(error_of(one, right, "rms"), right, leaf.dtype, measure="rms")
        for leaf, right, one in zip(checked, exact, alone)
    )


def leaves_of(output: Any) -> list[Tensor]:
    """The floating tensors in what a model gives."""
    return [leaf for leaf in tensors_in(output) if leaf.is_floating_point()]


def _untouched(model: nn.Module, example: Any) -> Any:
    """Returns the model's output and checks that it writes nowhere else; restores what it wrote to.

    Raises:
        ValueError: it writes into its inputs, its parameters or its buffers.
    """
    watched: dict[str, tuple[Tensor, ...]] = {"its input": tuple(tensors_in(example))}
    watched |= {name: (buffer,) for name, buffer in model.named_buffers()}
    kept = {name: [tensor.clone() for tensor in tensors] for name, tensors in watched.items()}
    watched["its parameters"] = tuple(model.parameters())  # too large to keep
    before = {name: _versions(tensors) for name, tensors in watched.items()}
    output = call(model, example)
    written = [name for name, tensors in watched.items() if _versions(tensors) != before[name]]
    for name in written:
        for tensor, value in zip(watched[name], kept.get(name, ())):
            tensor.copy_(value)
    if written:
        raise ValueError(f"the model writes into {', '.join(written[:3])} when called: expected models that do not")
    return output


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


def _definition(model: nn.Module) -> tuple[Callable[..., Any], float]:
    """Returns the reference model, and the share of its output that the model itself may be off by."""
    if isinstance(model, OnnxFile):
        return unrewritten(model.path, model.image_hw), FILE_ROUNDING
    try:
        exact = copy.deepcopy(model)
        unfuse(exact)
        exact = exact.double()
    except Exception as error:
        raise _no_fp64(error) from None

    def computed(*args: Any, **kwargs: Any) -> Any:
        some, named = pytree.tree_map(_double, (args, kwargs))
        try:
            return exact(*some, **named)
        except Exception as error:
            raise _no_fp64(error) from None

    return computed, 0.0


def _no_fp64(error: Exception) -> UnsupportedInputError:
    reason = f"a copy of it in fp64, which answers are held against, fails: {describe_error(error)[:200]}"
    return UnsupportedInputError("optimizing this model", [reason])


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


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
        return variations(base, self.device, first_batch(self.example))

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
