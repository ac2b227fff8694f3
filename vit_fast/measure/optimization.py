"""`vit_fast.optimize`: finds the fastest configuration of a model on this machine.

result = vit_fast.optimize(model, images)
print(result)
logits = result.model(images)
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..apps.data import find_images
from ..errors import UnsupportedInputError, check_choice, check_number, check_type
from ..files import folder_aside
from . import cache
from .build import Optimized, arguments, changed_copy, map_floating, only_images
from .cache import CachedResult
from .candidate import COMPILE_MODES, DTYPES, ORIGINAL, PRECISIONS, Candidate, Precision, describe_error
from .clock import format_number, percentile, ratio, ratio_interval
from .limits import patient_interrupt
from .runtimes import OnnxFile, write_onnx
from .search import SHARE, Found, Objective, Refused, paired, search
from .trials import Checked, Trials, candidates, candidates_of_file, device_of_example, first_batch, slow_precisions

REBUILDING_S = 1800.0  # time limit to build a cached candidate
COMPILE_ALONE = [Candidate(mode) for mode in COMPILE_MODES]
FIGURES = "optimize.json"


@dataclass(frozen=True)
class Row:
    """The outcome of a candidate. Fields are None if the candidate was not timed, or failed its check."""

    candidate: Candidate
    ms: float | None  # median duration of a call, or the 90th percentile for the objective "latency"
    images_per_s: float | None
    speedup: float | None  # relative to the original
    speedup_interval: tuple[float, float] | None
    checked: Checked | None
    reason: str | None  # why it was not chosen


@dataclass(frozen=True, eq=False)
class Optimization:
    """The result of `optimize`; print it."""

    model: Optimized  # runs an independent copy of the model; see docs/howto/optimize.md
    candidate: Candidate  # the fastest
    table: tuple[Row, ...]  # all candidates, the original first; empty for a cached result
    speedup: float  # relative to the original
    speedup_over_compile: float | None  # relative to torch.compile alone, if tried
    resolution: float | None  # smallest measurable difference (0.02: 2 %); None: not measured
    objective: str  # "throughput" or "latency"
    from_cache: bool  # True: a cached result, which was built and checked again
    cached: CachedResult  # the stored form

    def __str__(self) -> str:
        figures = self.cached.figures
        facts = [f"{self.candidate.name}: {self.speedup:.2f}x the speed of the original model"]
        if self.candidate == ORIGINAL:
            facts = ["original: no candidate is faster"]
        if self.speedup_over_compile is not None:
            facts.append(f"{self.speedup_over_compile:.2f}x torch.compile alone")
        facts.append(
            f"{format_number(figures['images_per_s'], 4)} images/s, {format_number(figures['ms'], 4)} ms per call"
        )
        if figures["agreement"] is not None and self.candidate.precision is not None:
            facts.append(f"agreement with the original {figures['agreement']:.1%}")
        if self.resolution is not None:
            facts.append(f"smallest measurable difference {self.resolution:.1%}")
        notes = ["cached result, checked again"] if self.from_cache else []
        budget = format_number(figures["budget_s"])
        notes.append(f"{figures['tried']} of {figures['candidates']} candidates tried, budget {budget} s")
        if figures["finish_s"] is not None:
            notes.append(f"a budget of about {format_number(figures['finish_s'], 2)} s would finish the search")
        return f"{'; '.join(facts)} ({'; '.join(notes)})."

    def save(self, path: str | Path) -> None:
        """Writes the candidate and its figures, without weights, for `load_optimized`; may raise OSError."""
        self.cached.write(Path(path))


def optimize(
    model: nn.Module | str | Path,
    example: Any,
    *,
    budget_s: float = 100,
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
    """Finds the fastest configuration of a model on this machine, verifies its outputs, and caches the result.

    Candidates combine fused operators, torch.compile, CUDA graphs, frozen weights, ONNX Runtime, TensorRT, OpenVINO,
    other thread counts and batch splitting; with lossless=False also lower precision. If no candidate is measurably
    faster than the model, the result is a copy of the model. A second call builds and checks the cached result without
    a search (see `vit-fast cache`). If the first search did not finish, a larger budget starts a new search.

    Args:
        model: A module, which is copied and called in evaluation mode without gradients. Or the path of an ONNX file,
            which is compared with ONNX Runtime's default settings.
        example: Input on the model's device: images [B, channels, height, width], a tuple of arguments, or a mapping of
            keyword arguments.
        budget_s: Time limit in seconds for building, exporting, checking and timing. A candidate that would probably
            exceed the budget is skipped. The model is always timed, and a cached result is always rebuilt.
        lossless: True allows at most about twice the model's own error against fp64; see `vit_fast.accuracy`. False
            also allows candidates in lower precision.
        min_agreement: Minimum share of images whose top-1 class matches the model's, for candidates in lower precision.
            Outputs other than logits match at a cosine similarity of at least 0.99. Measured on `example` and `images`.
        calibration: Image files and folders for int8 and fp8. None means the sample image of matplotlib, or for fp8 the
            example if the model's preprocessing is unknown.
        latency_or_throughput: "throughput" compares median durations, "latency" 90th percentiles.
        memory_limit: Maximum memory of a candidate in bytes, in addition to the model.
        allow: Precisions to try with lossless=False: "bf16", "fp16", "int8", "fp8"; None means all. On a CPU, bf16 and
            fp16 are skipped if their matmuls are slower than in fp32, except if only one precision is allowed.
        images: More batches like the example, to measure agreement.
        again: True searches even if there is a cached result.
        progress: Function that is called at each step with a text and the seconds since the start.
    Returns:
        The optimized model and all candidates. Ctrl-C returns the best result so far.
    Raises:
        ValueError: an argument is invalid, or the model is nondeterministic, returns NaN, or modifies its inputs.
        UnsupportedInputError: the model cannot be copied or run in fp64.
        Exception: any error of the model itself for the example.
    """
    start = time.perf_counter()
    check_type("progress", progress, Callable, type(None))  # type: ignore[arg-type]  # works with isinstance
    check_number("budget_s", budget_s, positive=True)
    if memory_limit is not None:
        check_number("memory_limit", memory_limit, positive=True)
    check_choice("latency_or_throughput", latency_or_throughput, tuple(SHARE))
    if not 0 <= min_agreement <= 1:
        raise ValueError(f"min_agreement must be between 0 and 1, got {min_agreement}")
    allowed = _precisions(lossless, allow)
    others: Any = images
    if isinstance(others, Tensor):
        raise TypeError(f"images must be a list of batches such as [images], got a tensor {tuple(others.shape)}")
    device, image_files, model = device_of_example(example), find_images(calibration or ()), _snapshot(model, example)
    slow = slow_precisions(device, allowed)
    request = {
        "objective": latency_or_throughput,
        "allow": sorted(allowed),
        "min_agreement": min_agreement if allowed else None,
        "memory_limit": memory_limit,
    }
    with patient_interrupt(signal.SIGINT) as check_interrupt:
        key = cache.key_of(model, example, request)
        trials = Trials(
            model, example, images if allowed else (), image_files, min_agreement, memory_limit,
            start=start, progress=progress, check_interrupt=check_interrupt, skipped=slow,
        )  # fmt: skip
        cached = None if again else next(cache.find(key), None)
        # reuse the result if its search finished, or had at least this budget
        if cached is not None and (cached.figures["finish_s"] is None or budget_s <= cached.figures["budget_s"]):
            with contextlib.suppress(Refused):  # the candidate is no longer available: search again
                trials.prepare(cached.candidate, REBUILDING_S)
                return _optimization(trials, (), cached)
        first = (candidates_of_file if isinstance(model, OnnxFile) else candidates)(device, allowed.difference(slow))
        first = [*(Candidate(precision=name) for name in slow), *first]
        found = search(trials, ORIGINAL, first, budget_s=budget_s, objective=latency_or_throughput)
    table = tuple(_rows(found, trials, SHARE[latency_or_throughput]))
    chosen = next(row for row in table if row.candidate == found.chosen)
    compiled = [row.speedup for row in table if row.speedup is not None and row.candidate in COMPILE_ALONE]
    speedup = chosen.speedup or 1.0
    figures = {
        "speedup": speedup,
        "speedup_over_compile": speedup / max(compiled) if compiled and found.chosen not in COMPILE_ALONE else None,
        "resolution": found.resolution,
        "ms": chosen.ms,
        "images_per_s": chosen.images_per_s,
        "tried": found.tried,
        "candidates": len(found.trials),
        "budget_s": budget_s,
        "finish_s": found.finish_s,
        **vars(trials.checked[found.chosen]),
    }
    result = CachedResult(key, found.chosen, figures)
    if not found.interrupted:
        try:
            cache.store(result)
        except OSError as error:  # the result itself is valid
            warnings.warn(f"the result is not cached: {error}", stacklevel=2)
    return _optimization(trials, table, result)


def _optimization(trials: Trials, table: tuple[Row, ...], cached: CachedResult) -> Optimization:
    figures: Any = {name: cached.figures[name] for name in ("speedup", "speedup_over_compile", "resolution")}
    figures |= {"objective": cached.key["request"]["objective"], "from_cache": not table, "cached": cached}
    return Optimization(trials.prepared[cached.candidate][0], cached.candidate, table, **figures)


def load_optimized(
    path: str | Path,
    model: nn.Module | str | Path,
    example: Any = None,
    *,
    calibration: Sequence[str | Path] | None = None,
) -> Optimized:
    """Builds the candidate that `Optimization.save` wrote for a model on this machine, and checks it.

    Args:
        path: File of `Optimization.save`.
        model: A model of the same architecture, with any weights; or the same ONNX file.
        example: Input to check the outputs with; None means random images of the saved shape.
        calibration: See `optimize`.
    Raises:
        ValueError: the file was not written by `save`, or for another architecture.
        Refused: the candidate is not available here, or fails its check.
    """
    check_type("path", path, str, Path)
    try:
        result = CachedResult.read(Path(path))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as a result of vit_fast.optimize: {error}") from None
    request, image_files = result.key["request"], find_images(calibration or ())
    if example is not None:
        device_of_example(example)
    module = _snapshot(model, example)
    if result.key["model"] != cache.model_key(module):
        raise ValueError(
            f"{path} was saved for another model: model must have the same class and a state_dict with the same "
            "names, shapes and dtypes; an ONNX file must have the same content"
        )
    if example is None:
        (shape, dtype), *others = result.key["example"]
        if others or len(shape) != 4:
            raise ValueError(f"example must be given, because the inputs saved in {path} are not one 4-D tensor")
        noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        example = noise.to(next(module.parameters(), noise).device, getattr(torch, dtype.removeprefix("torch.")))
    trials = Trials(module, example, (), image_files, request["min_agreement"] or 0.0, request["memory_limit"])
    trials.prepare(result.candidate, REBUILDING_S)
    return trials.prepared[result.candidate][0]


def _precisions(lossless: bool, allow: Collection[Precision] | None) -> frozenset[Precision]:
    check_type("allow", allow, Collection, type(None))
    if isinstance(allow, str):
        raise TypeError(f"allow must be a collection such as ({allow!r},), got {allow!r}")
    if lossless and allow:
        raise ValueError(f"allow requires lossless=False, got allow={sorted(allow)} with lossless=True")
    allowed = frozenset(PRECISIONS if allow is None else allow)
    if unknown := allowed.difference(PRECISIONS):
        raise ValueError(f"allow must consist of {', '.join(PRECISIONS)}, got {min(unknown)!r}")
    return frozenset() if lossless else allowed


def _snapshot(model: Any, example: Any) -> nn.Module:
    """Returns a copy of a module in evaluation mode, or a file opened on the device of the example."""
    if isinstance(model, OnnxFile):
        return model
    if isinstance(model, nn.Module):
        try:
            copied: nn.Module = copy.deepcopy(model)
            copied.eval()
            return copied
        except Exception as error:  # whatever the model raises
            reason = f"copy.deepcopy of the model fails: {describe_error(error)}"
            raise UnsupportedInputError("optimizing this model", [reason]) from None
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a torch.nn.Module or the path of an ONNX file, got {type(model).__name__}")
    images = only_images(example)
    if images is None or images.dim() != 4:
        return OnnxFile(model)
    height, width = images.shape[2:]
    return OnnxFile(model, images.device, (height, width) if images.is_floating_point() else None)


def _rows(found: Found, trials: Trials, share: float) -> Iterator[Row]:
    for trial in found.trials:
        ms = rate = speedup = interval = None
        if trial.samples_ms:
            before, after = paired(found.trials[0].samples_ms, trial.samples_ms)
            ms = percentile(trial.samples_ms, share)
            rate = first_batch(trials.example) * 1e3 / ms
            speedup = ratio(before, after, paired=True, share=share)
            interval = ratio_interval(before, after, paired=True, share=share)
        yield Row(trial.candidate, ms, rate, speedup, interval, trials.checked.get(trial.candidate), trial.reason)


def deploy(
    result: CachedResult, model: nn.Module, example: Any, folder: Path, image_files: Sequence[Path] = ()
) -> list[Path]:
    """Writes a folder with the chosen candidate and its figures, optimize.json; returns the files.

    A candidate of ONNX Runtime or OpenVINO becomes model.onnx. A candidate of torch.compile becomes model.pt2 for
    `torch._inductor.aoti_load_package`. Others become model.pt2 for `torch.export.load`, after `import vit_fast`. A
    model.pt2 takes inputs in the candidate's precision. Threads, CUDA graphs and batch splitting are not saved. Raises
    OSError, or UnsupportedInputError if the export fails.
    """
    candidate, images = result.candidate, only_images(example)
    with folder_aside(folder) as aside:
        if (candidate.runs_file or isinstance(model, OnnxFile)) and images is not None:
            path = aside / "model.onnx"
            write_onnx(candidate, model, path, images, image_files)
        else:
            path = aside / "model.pt2"
            work, inputs = changed_copy(candidate, model, example, image_files), arguments(example)
            if candidate.precision is not None:
                dtype = DTYPES[candidate.precision]
                inputs = map_floating(lambda value: value.to(dtype), inputs)
            try:
                with torch.no_grad():
                    program = torch.export.export(work, *inputs)
            except Exception as error:  # torch.export raises many types
                reason = f"torch.export failed: {' '.join(str(error).split())[:200]}"
                raise UnsupportedInputError(f"export of {candidate.name!r}", [reason]) from None
            package = io.BytesIO()  # torch aborts the process if it cannot write a file
            if candidate.engine == "torch":
                torch.export.save(program, package)
            else:
                torch._inductor.aoti_compile_and_package(program, package_path=package)
            path.write_bytes(package.getbuffer())
        described = result.to_dict() | {"name": candidate.name, "file": path.name}
        (aside / FIGURES).write_text(json.dumps(described, indent=1) + "\n")
        names = sorted(part.name for part in aside.iterdir())
    return [folder / name for name in names]
