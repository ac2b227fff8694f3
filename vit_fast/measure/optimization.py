"""`vit_fast.optimize`: the fastest right way to run a model on this machine, found by trying, and kept.

result = vit_fast.optimize(model, images)
print(result)
logits = result.model(images)
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..apps.data import find_images
from ..arguments import check_choice
from ..errors import UnsupportedInputError, check_type
from ..files import file_aside
from . import cache, resolution
from .cache import Answer
from .candidate import GIVEN, PRECISIONS, Candidate, Precision, candidates, candidates_of_file
from .clock import percentile
from .limits import describe_error, remembered
from .optimized import Optimized, first_batch, only_images
from .runtimes import OnnxFile
from .search import SHARE, Found, Objective, Refused, Trial, paired, search
from .trials import Checked, Expected, Rule, Trials, device_of_example

# What was found once may take so long to build again.
REBUILDING_S = 1800.0


@dataclass(frozen=True)
class Row:
    """The outcome of a candidate.

    Attributes:
        choice: It.
        ms: Of a call: the median, or for the objective "latency" what nine of ten stay below.
        images_per_s: By that; with an interval.
        ratio: How many times as fast as the model as it was given; with an interval.
        checked: Errors, agreement, first call and memory; None where it gave no outputs, or wrong ones.
        reason: Why it was not tried or not taken; None of the one that was.
    """

    choice: Candidate
    ms: float | None
    images_per_s: float | None
    images_per_s_interval: tuple[float, float] | None
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    checked: Checked | None
    reason: str | None


@dataclass(frozen=True, eq=False)
class Optimization:
    """The result of `optimize`; print it.

    Attributes:
        model: An independent, read-only copy of the model as it was then, whatever runs it; see docs/howto/optimize.md.
        choice: How it runs.
        table: Every choice that was thought of, the given one first; empty where a kept answer was taken.
        gain: How many times as fast the choice is as what was given.
        over_compile: How many times as fast as the best that torch.compile alone gave; None where that was not tried.
        resolution: Below which share of difference nothing could be told; None where that was not measured.
        objective: "throughput" or "latency".
        kept: Whether this is an answer of before, built and checked again.
        answer: What is kept of it.
    """

    model: Optimized
    choice: Candidate
    table: tuple[Row, ...]
    gain: float
    over_compile: float | None
    resolution: float | None
    objective: str
    kept: bool
    answer: Answer

    def __str__(self) -> str:
        figures = self.answer.figures
        said = [f"{self.choice.name}: {self.gain:.2f} times as fast as the model as it was given"]
        if self.choice == GIVEN:
            said = ["the model as it was given: nothing that was tried is faster"]
        if self.over_compile is not None:
            said.append(f"{self.over_compile:.2f} times as fast as torch.compile alone")
        said.append(f"{figures['images_per_s']:.4g} images/s, {figures['ms']:.4g} ms a call")
        if figures["agreement"] is not None and self.choice.precision is not None:
            said.append(f"{figures['agreement']:.1%} of the answers are the model's own")
        if self.resolution is not None:
            said.append(f"differences below {self.resolution:.1%} cannot be told here")
        how = ["cached result, checked again"] if self.kept else []
        if "candidates" in figures:  # older results lack it
            how.append(f"{figures['tried']} of {figures['candidates']} candidates tried in {figures['budget_s']:.3g} s")
        if figures.get("finish_s") is not None:
            how.append(f"about {figures['finish_s']:.2g} s would finish the search")
        return f"{'; '.join(said)} ({'; '.join(how)})."

    def save(self, path: str | Path) -> None:
        """Writes what `load_optimized` reads: the choice, what it holds for, and its figures; not the weights.

        Raises:
            OSError: the file cannot be written.
        """
        with file_aside(Path(path)) as aside:
            aside.write_text(json.dumps(self.answer.to_dict(), indent=1))


def optimize(
    model: nn.Module | str | Path,
    example: Any,
    *,
    budget_s: float = 120,
    lossless: bool = True,
    min_agreement: float = 0.99,
    calibration: Sequence[str | Path] | None = None,
    latency_or_throughput: Objective = "throughput",
    memory_limit: int | None = None,
    allow: Collection[Precision] | None = None,
    images: Sequence[Any] = (),
    again: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Optimization:
    """Finds the fastest right way to run a model on this machine.

    Backends of our operators by part, torch.compile, CUDA graphs, prepared weights, ONNX Runtime, threads, splitting
    the batch and, where loss is allowed, fewer bits: each is built, held against the model, and timed in turns with the
    others, the losers dropped early. The model itself is copied, not changed, and no later change of it reaches the
    result. What is found is never slower as far as this machine can tell. The result is cached (see `vit-fast cache`);
    a second call builds and checks it without a search, unless its budget is larger and the first search needed more.

    Args:
        model: Any module; it is called in evaluation mode, without gradients. Or the path of an ONNX file: as it is
            given it runs in ONNX Runtime, by its defaults.
        example: What it will be called with: images [B, channels, height, width], a tuple of arguments, or a mapping
            of keyword arguments, on the model's device.
        budget_s: Seconds for building, exporting, checking and timing. What is not expected to fit is not begun; what
            takes longer is ended. The model itself is always measured, and a cached result always rebuilt.
        lossless: Whether only what passes the rule of `vit_fast.accuracy` is taken: at most twice as far off as the
            model itself is, against fp64. Else what keeps min_agreement is, too.
        min_agreement: The share of images that a lossy choice must answer as the model does: the same largest output
            or, of outputs that are no classes, nearly the same direction. Judged on the example and on `images`.
        calibration: Image files and folders for int8 and fp8; None means the photograph inside matplotlib's wheel, and
            for fp8 of a model whose library is not known the example.
        latency_or_throughput: "throughput": the median duration of a call; "latency": what nine of ten stay below.
        memory_limit: Bytes that a choice may take beyond the model: weights of its own and the peak of a call.
        allow: Number formats that may be tried where loss is allowed: "bf16", "fp16", "int8", "fp8"; None means all.
        images: More batches like the example, to judge agreement on where loss is allowed.
        again: Whether to search although an answer is kept.
        progress: Called with what comes next (the reference, a candidate, the timing) and the seconds since the start.
    Returns:
        The model's replacement, and what was tried. Ctrl-C gives the best so far.
    Raises:
        ValueError: an argument is not one of those accepted, or names no image; or the model writes into its inputs or
            its own tensors, or gives another answer each time.
        UnsupportedInputError: the model cannot be copied and run in fp64, which answers are held against.
        Exception: whatever the model itself raises for the example.
    """
    start = time.perf_counter()
    check_type("progress", progress, Callable, type(None))  # type: ignore[arg-type]  # works with isinstance
    allowed = _check(budget_s, lossless, min_agreement, latency_or_throughput, memory_limit, allow)
    others: Any = images
    if isinstance(others, Tensor):
        raise TypeError(f"images is a tensor {tuple(others.shape)}: expected batches of them, [images] for one")
    device = device_of_example(example)
    photographs = find_images(calibration or ())
    model = _snapshot(model, example)
    asked = {
        "objective": latency_or_throughput,
        "allow": sorted(allowed),
        "min_agreement": min_agreement if allowed else None,
        "memory_limit": memory_limit,
    }
    with remembered() as interruption:
        key = cache.key_of(model, example, asked)
        if progress is not None:
            progress("the reference in fp64", time.perf_counter() - start)
        expected = Expected(model, example, images if allowed else ())
        rule = Rule(min_agreement, memory_limit)
        trials = Trials(model, example, expected, photographs, rule, progress, interruption)
        trials.start = start
        kept = None if again else cache.look_up(key)
        if kept is not None and kept.suffices(budget_s):
            try:
                return _rebuilt(kept, trials)
            except Refused:
                pass  # it does not hold any more: search
        first = (candidates_of_file if isinstance(model, OnnxFile) else candidates)(device, allowed)
        found = search(trials, GIVEN, first, budget_s=budget_s, objective=latency_or_throughput)
        return _result(found, trials, key, latency_or_throughput, budget_s)


def load_optimized(
    path: str | Path,
    model: nn.Module | str | Path,
    example: Any = None,
    *,
    calibration: Sequence[str | Path] | None = None,
) -> Optimized:
    """Makes of a model what `Optimization.save` wrote, on this machine, and checks it.

    Args:
        path: The file.
        model: Of the same architecture; its weights may be others. Of a file, the same file.
        example: What it will be called with; None means random images of the shape that the answer was found for.
        calibration: As for optimize.
    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or was written for a model of other shapes.
        Refused: the choice cannot be had here, or does not keep what was asked of it.
    """
    check_type("path", path, str, Path)
    try:
        answer = Answer.from_dict(json.loads(Path(path).read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    asked, photographs = answer.key["asked"], find_images(calibration or ())
    if example is not None:
        device_of_example(example)
    module = _snapshot(model, example)
    if answer.key["model"] != cache.model_key(module):
        raise ValueError(
            f"{path}: was written for a model of other shapes than this {type(module).__name__}, or for another file"
        )
    if example is None:
        example = _example_of(answer, module)
    rule = Rule(asked["min_agreement"] or 0.0, asked["memory_limit"])
    trials = Trials(module, example, Expected(module, example), photographs, rule)
    trials.prepare(answer.choice, REBUILDING_S)
    return trials.prepared[answer.choice][0]


def _example_of(answer: Answer, model: nn.Module) -> Tensor:
    """Random images of the shape that an answer was found for.

    Raises:
        ValueError: it was found for more than images.
    """
    described = answer.key["example"]
    parameter = next(model.parameters(), torch.empty(0))
    if len(described) != 1 or len(described[0][0]) != 4:
        raise ValueError(f"example=None: expected what the model is called with, as the answer is for {described}")
    images = torch.randn(described[0][0], generator=torch.Generator().manual_seed(0))
    return images.to(parameter.device, getattr(torch, described[0][1].removeprefix("torch.")))


def _snapshot(model: Any, example: Any) -> nn.Module:
    """A copy of a model in evaluation mode; of a file, what runs it where the example is."""
    if isinstance(model, OnnxFile):
        return model
    if isinstance(model, nn.Module):
        try:
            return copy.deepcopy(model).eval()
        except Exception as error:  # whatever the model's own classes raise
            reason = f"copying it fails: {describe_error(error)}"
            raise UnsupportedInputError("optimizing this model", [reason]) from None
    if not isinstance(model, str | Path):
        raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module, or the path of a file.onnx")
    images = only_images(example)
    if images is None or images.dim() != 4:
        return OnnxFile(model)
    height, width = images.shape[2:]
    return OnnxFile(model, images.device, (height, width) if images.is_floating_point() else None)


def _check(
    budget_s: float, lossless: bool, min_agreement: float, objective: str, memory_limit: int | None,
    allow: Collection[Precision] | None,
) -> frozenset[Precision]:  # fmt: skip
    """The number formats that may be tried."""
    numbers = {"budget_s": budget_s, "min_agreement": min_agreement, "memory_limit": memory_limit}
    for name, value in numbers.items():
        if not isinstance(value, int | float) and (name, value) != ("memory_limit", None):
            raise TypeError(f"{name} is a {type(value).__name__}: expected a number")
    if isinstance(allow, str):
        raise TypeError(f"allow={allow!r}: expected several names, ({allow!r},) for one")
    check_type("allow", allow, Collection, type(None))
    if not budget_s > 0:
        raise ValueError(f"budget_s={budget_s}: expected a number of seconds above 0")
    if not 0 <= min_agreement <= 1:
        raise ValueError(f"min_agreement={min_agreement}: expected a share from 0 to 1")
    check_choice("latency_or_throughput", objective, tuple(SHARE))
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit={memory_limit}: expected a number of bytes above 0, or None")
    if lossless and allow:
        raise ValueError(f"allow={sorted(allow)} with lossless=True: expected lossless=False with it")
    for name in allow or ():
        if name not in PRECISIONS:
            raise ValueError(f"allow has {name!r}: expected {', '.join(PRECISIONS)}")
    return frozenset() if lossless else frozenset(PRECISIONS if allow is None else allow)


def _rebuilt(answer: Answer, trials: Trials) -> Optimization:
    trials.prepare(answer.choice, REBUILDING_S)
    figures = answer.figures
    return Optimization(
        trials.prepared[answer.choice][0], answer.choice, (), figures["gain"], figures["over_compile"],
        figures["resolution"], answer.key["asked"]["objective"], True, answer,
    )  # fmt: skip


def _result(
    found: Found[Candidate], trials: Trials, key: dict[str, Any], objective: Objective, budget_s: float
) -> Optimization:
    given, share = found.of(GIVEN), SHARE[objective]
    rows = tuple(_row(trial, given, trials, share) for trial in found.trials)
    chosen = next(row for row in rows if row.choice == found.chosen)
    compiled = [row.ratio for row in rows if row.ratio is not None and _is_compile_alone(row.choice)]
    gain = chosen.ratio or 1.0
    over_compile = gain / max(compiled) if compiled and not _is_compile_alone(found.chosen) else None
    figures = {
        "gain": gain,
        "over_compile": over_compile,
        "resolution": found.resolution,
        "ms": chosen.ms,
        "images_per_s": chosen.images_per_s,
        "tried": found.tried,
        "candidates": len(found.trials),
        "budget_s": budget_s,
        "finish_s": found.finish_s,
        **vars(trials.checked[found.chosen]),
    }
    answer = Answer(key, found.chosen, figures)
    if not found.interrupted:
        try:
            cache.keep(answer)
        except OSError as error:  # the search has been made all the same
            warnings.warn(f"the answer is not kept: {error}", stacklevel=3)
    return Optimization(
        trials.prepared[found.chosen][0], found.chosen, rows, gain, over_compile, found.resolution, objective,
        False, answer,
    )  # fmt: skip


def _is_compile_alone(choice: Candidate) -> bool:
    """True for torch.compile alone."""
    return choice in [
        Candidate(engine, frozen=frozen) for engine in ("compile", "max-autotune") for frozen in (False, True)
    ]


def _row(trial: Trial[Candidate], given: Trial[Candidate], trials: Trials, share: float) -> Row:
    batch = first_batch(trials.example)
    ms = ratio = rate = interval = None
    if trial.samples_ms:
        ms = percentile(trial.samples_ms, share)
        before, after = paired(given.samples_ms, trial.samples_ms)
        ratio = resolution.ratio(before, after, paired=True, share=share)
        low, high = resolution.ratio_interval(before, after, paired=True, share=share)
        interval = (low, high)
        base = batch * 1e3 / percentile(before, share)
        rate = (base * low, base * high)
    checked = trials.checked.get(trial.candidate)
    return Row(trial.candidate, ms, ms and batch * 1e3 / ms, rate, ratio, interval, checked, trial.reason)
