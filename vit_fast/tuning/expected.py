"""What a model gives, and whether a choice gives it too: in fp64 for a few images, in its own dtype for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..accuracy import Measure, allowed_error, error_of, size_of
from ..errors import UnsupportedInputError
from ..fusion.fuse import unfuse
from ..measuring.limits import describe_error
from .calls import call, first_batch, tensors_in
from .choices import GIVEN, Choice
from .drop_in import version_of
from .runtimes import OnnxFile
from .search import Refused

MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs without classes agree where they point in the same direction as far as this cosine says.
SAME_DIRECTION = 0.99
# Images of the example that fp64 is computed of, where images do not look at one another.
MOST_IN_FP64 = 8
# How far off a file is by its own rounding, of its outputs' size: there is no fp64 of it. TF32 is beyond it.
FILE_ROUNDING = 2e-5


@dataclass(frozen=True)
class Rule:
    """What a choice must keep.

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
                raise ValueError(f"the model gives {given}: accepted are tensors of floating numbers")
            if not all(bool(leaf.isfinite().all()) for leaf in first):
                raise ValueError("the model gives NaN or infinity for the example: accepted are finite answers")
            for one, other in zip(first, second):
                if one.shape != other.shape or error_of(one, other) > torch.finfo(one.dtype).eps ** 0.5 * size_of(one):
                    raise ValueError("the model gives another answer each time: accepted are models without chance")
            self.answers = [first, *(leaves_of(call(model, batch)) for batch in others)]
            self._hold_against_fp64(model, example, first)
        self.dtypes = [leaf.dtype for leaf in first]

    def _hold_against_fp64(self, model: nn.Module, example: Any, answers: list[Tensor]) -> None:
        """Of a few images; of the whole example, where these are another answer than they are among the others."""
        self.batch = first_batch(example)
        exact_model, rounding = _definition(model)
        self.images = min(MOST_IN_FP64, self.batch)
        few = self._few(example)
        self.exact = leaves_of(call(exact_model, few))
        errors = self._errors(answers)
        if self.images < self.batch:
            alone = [_errors_of(one, exact) for one, exact in zip(leaves_of(call(model, few)), self.exact)]
            if errors is None or any(
                mine["rms"] > 4 * allowed_error(by_itself["rms"], exact, leaf.dtype, measure="rms")
                for mine, by_itself, exact, leaf in zip(errors, alone, self.exact, answers)
            ):
                self.images = self.batch
                self.exact = leaves_of(call(exact_model, example))
                errors = self._errors(answers)
        assert errors is not None
        self.eager_errors = [
            {measure: max(error, rounding * size_of(exact, measure)) for measure, error in each.items()}
            for each, exact in zip(errors, self.exact)
        ]

    def _few(self, example: Any) -> Any:
        if self.images == self.batch:
            return example
        return pytree.tree_map(lambda value: self._rows(value) if isinstance(value, Tensor) else value, example)

    def _rows(self, leaf: Tensor) -> Tensor:
        return leaf[: self.images] if leaf.dim() and leaf.shape[0] == self.batch else leaf

    def _errors(self, leaves: list[Tensor]) -> list[dict[Measure, float]] | None:
        """Of outputs for the example; None where fewer images do not just give fewer rows."""
        rows = [self._rows(leaf) for leaf in leaves]
        if [row.shape for row in rows] != [exact.shape for exact in self.exact]:
            return None
        return [_errors_of(row, exact) for row, exact in zip(rows, self.exact)]

    def check(self, function: Callable[..., Any], choice: Choice, rule: Rule) -> tuple[float, float | None, float]:
        """Error, what is allowed, and agreement of a choice's outputs.

        Raises:
            Refused: they are wrong.
        """
        given = choice == GIVEN  # whose outputs are known
        outputs = [self.output] if given else [call(function, batch) for batch in self.batches]
        found = self.answers if given else [leaves_of(output) for output in outputs]
        if type(outputs[0]) is not type(self.output):
            raise Refused(f"gives {type(outputs[0]).__name__} instead of {type(self.output).__name__}")
        shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in (found[0], self.answers[0])]
        if shapes[0] != shapes[1]:
            raise Refused(f"gives {shapes[0]} instead of {shapes[1]}")
        worst = 0.0
        limit: float | None = None
        all_errors = self._errors(found[0])
        assert all_errors is not None
        for errors, exact, eager, dtype in zip(all_errors, self.exact, self.eager_errors, self.dtypes):
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


def leaves_of(output: Any) -> list[Tensor]:
    """The floating tensors in what a model gives."""
    return [leaf for leaf in tensors_in(output) if leaf.is_floating_point()]


def _untouched(model: nn.Module, example: Any) -> Any:
    """What the model gives, once it is seen to write nowhere else; what it wrote to is as before.

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
        raise ValueError(f"the model writes into {', '.join(written[:3])} when called: accepted are models that do not")
    return output


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


def _definition(model: nn.Module) -> tuple[Callable[..., Any], float]:
    """What says which answer is right, and which share of it the model itself may be off by in any case."""
    if isinstance(model, OnnxFile):
        return model.unrewritten(), FILE_ROUNDING
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


def _errors_of(leaf: Tensor, exact: Tensor) -> dict[Measure, float]:
    return {measure: error_of(leaf, exact, measure) for measure in MEASURES}


def _agreement(found: list[list[Tensor]], expected: list[list[Tensor]]) -> float:
    """The share of images with the same answer, by the first output of a batch's."""
    same = []
    for mine, theirs in zip(found, expected):
        one, other = mine[0].float(), theirs[0].float()
        if one.dim() == 2 and one.shape[1] > 1:
            same.append(one.argmax(1) == other.argmax(1))
        else:
            rows = [value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1) for value in (one, other)]
            same.append(torch.cosine_similarity(rows[0], rows[1]) >= SAME_DIRECTION)
    return float(torch.cat(same).double().mean())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
