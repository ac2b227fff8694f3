"""Holds choices against the model as it was given, and times them: the planner's shop on a real machine."""

from __future__ import annotations

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

from ..accuracy import Measure, allowed_error, error_of
from ..errors import UnsupportedInputError
from ..fusion import unfuse
from ..measuring.limits import at_most, describe_error, is_out_of_memory
from ..measuring.timing import Protocol, Samples, peak_memory_of_call, synchronise
from .build import arguments, build
from .choices import GIVEN, Choice, variations
from .drop_in import Optimized
from .planner import Refused

MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs without classes agree where they point in the same direction as far as this cosine says.
SAME_DIRECTION = 0.99


@dataclass(frozen=True)
class Checked:
    """What is known of a choice that gave outputs.

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


@dataclass(frozen=True)
class Rule:
    """What a choice must keep.

    Attributes:
        min_agreement: Where loss is allowed; see Checked.
        memory_limit: Bytes, of weights of its own and the peak of a call; None means any.
    """

    min_agreement: float
    memory_limit: int | None = None


class Expected:
    """What the model gives: in fp64 for a few images, and in its own dtype for all.

    Args:
        model: In evaluation mode.
        example: What is timed.
        others: More batches like it, to hold answers against the model's.
        most: Images of the example that fp64 is computed of.
    """

    def __init__(self, model: nn.Module, example: Any, others: Sequence[Tensor], most: int = 8) -> None:
        self.batches = [arguments(example), *((batch,) for batch in others)]
        few = pytree.tree_map(lambda v: v[:most] if isinstance(v, Tensor) and v.dim() else v, arguments(example))
        with torch.no_grad():
            self.output = model(*arguments(example))
            self.answers = [leaves_of(model(*batch)) for batch in self.batches]
            self.exact = leaves_of(_in_fp64(model)(*pytree.tree_map(_double, few)))
        if not self.exact:
            raise ValueError(f"the model gives {type(self.output).__name__}: accepted are tensors of floating numbers")
        eager = [leaf[: len(exact)] for leaf, exact in zip(self.answers[0], self.exact)]
        self.eager_errors = [
            {measure: error_of(leaf, exact, measure) for measure in MEASURES} for leaf, exact in zip(eager, self.exact)
        ]
        self.dtypes = [leaf.dtype for leaf in eager]

    def check(self, function: Callable[..., Any], choice: Choice, rule: Rule) -> tuple[float, float | None, float]:
        """Error, what is allowed, and agreement of a choice's outputs.

        Raises:
            Refused: they are wrong.
        """
        found = [leaves_of(function(*batch)) for batch in self.batches]
        shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in (found[0], self.answers[0])]
        if shapes[0] != shapes[1]:
            raise Refused(f"gives {shapes[0]} instead of {shapes[1]}")
        worst = 0.0
        limit: float | None = None
        for leaf, exact, eager, dtype in zip(found[0], self.exact, self.eager_errors, self.dtypes):
            errors = {measure: error_of(leaf[: len(exact)], exact, measure) for measure in MEASURES}
            worst = max(worst, errors["largest"])
            if errors["largest"] == float("inf"):
                raise Refused("gives NaN or infinity")
            if choice.precision is None:
                limits = {measure: allowed_error(eager[measure], exact, dtype, measure=measure) for measure in MEASURES}
                limit = max(limit or 0.0, limits["largest"])
                for measure in MEASURES:
                    if errors[measure] > limits[measure]:
                        raise Refused(f"off by {errors[measure]:.3g}, allowed is {limits[measure]:.3g}")
        agreement = _agreement(found, self.answers)
        if choice.precision is not None and agreement < rule.min_agreement:
            raise Refused(f"{agreement:.1%} of the answers are the model's own, asked for are {rule.min_agreement:.1%}")
        return worst, limit, agreement


class Trials:
    """The planner's shop: builds choices for a model, checks and times them.

    Args:
        model: As it was given, in evaluation mode.
        example: What it is called with.
        expected: What it gives.
        photographs: To calibrate int8 with.
        rule: What a choice must keep.
        tell: Told what is being done, and after how many seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        expected: Expected,
        photographs: Sequence[str | Path],
        rule: Rule,
        tell: Callable[[str, float], None] | None = None,
    ) -> None:
        self.model, self.example, self.expected = model, example, expected
        self.photographs, self.rule, self.tell = photographs, rule, tell
        self.device = device_of_example(example)
        self.checked: dict[Choice, Checked] = {}
        self.prepared: dict[Choice, tuple[Optimized, Samples]] = {}
        self.start = time.perf_counter()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def prepare(self, candidate: Choice, seconds: float) -> None:
        """Builds, checks, and weighs a choice."""
        if self.tell is not None:
            self.tell(candidate.name, self.elapsed_s())
        try:
            with at_most(max(seconds, 1.0)):
                optimized, self.checked[candidate] = self._build_and_check(candidate)
        except Refused:
            self._forget()
            raise
        except Exception as error:  # a choice may fail in any way it likes; the others are tried all the same
            self._forget()
            if candidate == GIVEN:
                raise
            raise Refused(_in_words(error)) from None
        call = lambda number: optimized(*arguments(self.example))  # noqa: E731  # a name would say no more
        self.prepared[candidate] = optimized, Samples(call, self.device, Protocol())

    def _build_and_check(self, choice: Choice) -> tuple[Optimized, Checked]:
        start = time.perf_counter()
        before = _own_bytes(self.device)
        optimized = build(choice, self.model, self.example, self.expected.output, self.photographs)
        optimized(*arguments(self.example))
        synchronise(self.device)
        first_call_s = time.perf_counter() - start
        error, allowed, agreement = self.expected.check(optimized, choice, self.rule)
        peak = peak_memory_of_call(lambda: optimized(*arguments(self.example)), self.device)
        peak += max(0, _own_bytes(self.device) - before)
        limit = self.rule.memory_limit
        if limit is not None and peak > limit and choice != GIVEN:
            raise Refused(f"takes {peak / 2**20:.0f} MiB, memory_limit is {limit / 2**20:.0f} MiB")
        return optimized, Checked(error, allowed, agreement, first_call_s, peak)

    def call_ms(self, candidate: Choice, number: int) -> float:
        samples = self.prepared[candidate][1]
        try:
            samples.take(number)
        except Exception as error:
            if candidate == GIVEN:
                raise
            raise Refused(_in_words(error)) from None
        return samples[-1]

    def release(self, candidate: Choice) -> None:
        self.prepared.pop(candidate, None)
        self._forget()

    def variations(self, candidate: Choice) -> Sequence[Choice]:
        images = next(leaf for leaf in pytree.tree_leaves(self.example) if isinstance(leaf, Tensor))
        return variations(candidate, self.device, images.shape[0])

    def _forget(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def device_of_example(example: Any) -> torch.device:
    """Where the example's tensors are.

    Raises:
        ValueError: there is none, or they are not all on one device with images in them.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(not tensor.numel() for tensor in tensors):
        raise ValueError(
            "example: accepted are images [B, channels, height, width] with B >= 1, or a tuple of arguments"
        )
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"example lies on {', '.join(map(str, devices))}: accepted is one device")
    return devices.pop()


def leaves_of(output: Any) -> list[Tensor]:
    """The floating tensors in what a model gives."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _agreement(found: list[list[Tensor]], expected: list[list[Tensor]]) -> float:
    """The share of images with the same answer, by the first output of a batch's."""
    same = []
    for mine, theirs in zip(found, expected):
        one, other = mine[0].float(), theirs[0].float()
        if one.dim() == 2 and one.shape[1] > 1:
            same.append(one.argmax(1) == other.argmax(1))
        else:
            same.append(torch.cosine_similarity(one.flatten(1), other.flatten(1)) >= SAME_DIRECTION)
    return float(torch.cat(same).double().mean())


def _in_fp64(model: nn.Module) -> nn.Module:
    exact = copy.deepcopy(model)
    unfuse(exact)
    return exact.double()


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


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
