"""The check that every candidate passes before it is timed: its outputs against fp64, by the rule of accuracy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..accuracy import FORWARD_FACTOR, Measure, allowed_error, error_of, size_of
from ..errors import UnsupportedInputError
from ..fusion.fuse import unfuse
from .candidate import GIVEN, Candidate
from .limits import describe_error
from .optimized import call, first_batch, tensors_in, version_of
from .runtimes import OnnxFile, unrewritten
from .search import Refused

MEASURES: tuple[Measure, ...] = ("largest", "rms")
# Outputs without classes agree where they point in the same direction as far as this cosine says.
SAME_DIRECTION = 0.99
# Images of the example that fp64 is computed of, where images do not look at one another.
MOST_IN_FP64 = 8
# How far off a file is by its own rounding, of its outputs' size: there is no fp64 of it. TF32 is beyond it.
FILE_ROUNDING = 2e-5


@dataclass(frozen=True)
class Reference:
    """The outputs that a candidate must give, leaf by leaf.

    Attributes:
        exact: In fp64, of the checked images.
        eager_errors: The errors of plain torch in the candidate's dtype, by measure.
        dtypes: The dtypes whose rounding is allowed.
        shapes: Those of a whole batch.
        rows: The checked images of a batch.
    """

    exact: Sequence[Tensor]
    eager_errors: Sequence[dict[Measure, float]]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    rows: Sequence[int]

    def errors(self, leaves: Sequence[Tensor]) -> list[dict[Measure, float]]:
        return [
            errors_of(leaf if leaf.shape == exact.shape else leaf[[*self.rows]], exact)
            for leaf, exact in zip(leaves, self.exact, strict=True)
        ]

    def limits(self, factor: float, tolerance: float | None) -> list[dict[Measure, float]]:
        """Returns the largest errors allowed, by the rule of accuracy or as a share of the largest output."""
        if tolerance is not None:
            return [{"largest": tolerance * size_of(exact)} for exact in self.exact]
        each = zip(self.exact, self.eager_errors, self.dtypes, strict=True)
        return [{m: allowed_error(eager[m], exact, dtype, factor, m) for m in MEASURES} for exact, eager, dtype in each]


@dataclass(frozen=True)
class Verdict:
    """The largest error of a candidate, the largest allowed one, and why it fails, if so.

    `agreement` is the share of the images with the reference's answer.
    """

    max_error: float
    allowed_error: float
    reason: str | None
    agreement: float | None = None

    @property
    def passed(self) -> bool:
        return self.reason is None


def judge(
    leaves: Sequence[object], reference: Reference, factor: float = FORWARD_FACTOR, tolerance: float | None = None
) -> Verdict:
    """Compares the outputs of a whole batch with the reference.

    Args:
        leaves: The outputs, leaf by leaf.
        reference: What they must be.
        factor: FORWARD_FACTOR or GRADIENT_FACTOR.
        tolerance: The largest error as a share of the largest output, for candidates in fewer bits; None means the
            rule of vit_fast.accuracy.
    """
    limits = reference.limits(factor, tolerance)
    limit = max(each["largest"] for each in limits)
    found = [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    if found != [*reference.shapes]:
        ours, theirs = (one[0] if len(one) == 1 else one for one in (found, [*reference.shapes]))
        return Verdict(float("inf"), limit, f"gives {ours} instead of {theirs}")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not all(bool(leaf.isfinite().all()) for leaf in tensors):
        return Verdict(float("inf"), limit, "gives NaN or infinity")
    errors = reference.errors(tensors)
    worst = max(each["largest"] for each in errors)
    for each, allowed in zip(errors, limits, strict=True):
        for measure, most in allowed.items():
            if each[measure] > most:
                in_what = "" if measure == "largest" else " in root mean square"
                reason = f"off by {each[measure]:.3g}{in_what}, allowed is {most:.3g}"
                return Verdict(worst, limit, reason)
    return Verdict(worst, limit, None)


def errors_of(leaf: Tensor, exact: Tensor) -> dict[Measure, float]:
    return {measure: error_of(leaf, exact, measure) for measure in MEASURES}


def same_answers(one: Tensor, other: Tensor) -> Tensor:
    """Compares images [B]: the same largest output or, of outputs without classes, nearly the same direction."""
    one, other = one.float(), other.to(one.device).float()
    if one.dim() == 2 and one.shape[1] > 1:
        return one.argmax(1) == other.argmax(1)
    rows = [value.flatten(1) if value.dim() > 1 else value.reshape(-1, 1) for value in (one, other)]
    return torch.cosine_similarity(rows[0], rows[1]) >= SAME_DIRECTION


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
