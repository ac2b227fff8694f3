"""Run configuration of the benchmark: checked completely before anything is built, and fitted to a time budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from vit_fast.apps.data import find_images, read_image, sample_image
from vit_fast.config import Size
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import SETTLE_MS, Protocol
from vit_fast.work import total

from .candidates import FP32_ALONE, choose
from .machine import DTYPES, has_bf16, memory_bytes
from .models import MAX_VIEWS, Model, resolve
from .rows import PERCENTILE_REPEATS, Group

Planned = dict[Group, list[Candidate]]

# Defaults. On two CPU cores, the budget ends the run within three minutes.
DEFAULT_MODELS = {"cpu": ("vit_tiny_patch16_224",), "cuda": ("vit_base_patch16_224",)}
DEFAULT_BATCH_SIZES = {"cpu": (1, 8), "cuda": (1, 32, 256)}
DEFAULT_DTYPES = {"cpu": ("fp32",), "cuda": ("bf16",)}
DEFAULT_TIME_BUDGET_S = {"cpu": 155.0, "cuda": 900.0}
PROTOCOLS = {
    "cpu": Protocol(repeats=80, seconds=4.0, least_repeats=5, warmup_repeats=1, warmup_seconds=0.0),
    "cuda": Protocol(repeats=100, seconds=1.0, least_repeats=10),
}
# For batch size 1: enough calls for a 99th percentile.
LATENCY = Protocol(repeats=1000, seconds=5.0, least_repeats=PERCENTILE_REPEATS)
BOTH_DTYPES = ("ours", "given")  # kinds of models that a CPU with bf16 matmuls measures in fp32 and bf16
# Batch sizes of --batch-sizes best.
SEARCHED = {"cpu": tuple(2**i for i in range(7)), "cuda": tuple(2**i for i in range(12))}


@dataclass(frozen=True)
class Configuration:
    """A checked run: every model x dtype x batch size, with its candidates; see make_configuration.

    Attributes:
        candidates: The candidates by kind of model.
        images: Images that fill the batches.
        time_budget_s: Seconds after which nothing is started; infinite without a limit.
        search: True to try larger batch sizes only while throughput grows.
        request: The arguments of make_configuration, as plain data to repeat the run.
    """

    models: tuple[Model, ...]
    batch_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    candidates: Mapping[str, tuple[Candidate, ...]]
    device: torch.device
    images: tuple[Path, ...]
    time_budget_s: float
    protocol: Protocol
    training: bool = False
    data: str = "device"
    explain: bool = False
    cold: bool = False
    search: bool = False
    request: dict[str, Any] = field(default_factory=dict, compare=False)

    def groups(self) -> list[Group]:
        """Returns the groups of candidates that are timed interleaved."""
        return [
            Group(model, dtype, batch_size, batch_size, self.training, self.data)
            for model in self.models
            for dtype in self.dtypes
            for batch_size in self.batch_sizes
        ]

    @property
    def is_default(self) -> bool:
        """True if the candidates are the default ones, which are fitted to the time budget."""
        return self.request.get("candidates") is None and not self.search

    def candidates_of(self, group: Group) -> list[Candidate]:
        """Returns the candidates of a group; by default without those that do not support its dtype."""
        found = self.candidates[group.model.kind]
        skipped = FP32_ALONE if self.is_default and self.device.type == "cpu" and group.dtype_name != "fp32" else ()
        return [candidate for candidate in found if candidate.base not in skipped]

    def product_dtypes(self) -> list[str]:
        """Returns the dtypes of the candidates' matmuls; amp also multiplies in bf16."""
        chosen = [candidate for found in self.candidates.values() for candidate in found]
        lower = "amp" in self.dtypes or any(candidate.precision == "bf16" for candidate in chosen)
        return [*self.dtypes, *(["bf16"] if lower else [])]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for the record, with names of images without folders."""
        return {
            "models": list(dict.fromkeys(model.name for model in self.models)),
            **{n: self.request.get(n) for n in ("img_size", "train", "amp", "data", "explain", "cold", "latency")},
            "seconds": self.request.get("seconds"),
            "batch_sizes": ["best"] if self.search else list(self.batch_sizes),
            "dtypes": list(self.dtypes),
            "candidates": list(dict.fromkeys(c.name for chosen in self.candidates.values() for c in chosen)),
            "device": str(self.device),
            "images": [path.name for path in self.images],
            "time_budget_s": self.time_budget_s if math.isfinite(self.time_budget_s) else None,
            "protocol": dataclasses.asdict(self.protocol),
        }


def make_configuration(
    images: Sequence[str | Path] = (),
    *,
    models: Sequence[str] | None = None,
    batch_sizes: Sequence[int] | Literal["best"] | None = None,
    dtypes: Sequence[str] | None = None,
    candidates: Sequence[str] | None = None,
    img_size: Sequence[int] | Sequence[Sequence[int]] | None = None,
    train: bool = False,
    amp: bool = False,
    data: str = "device",
    explain: bool = False,
    cold: bool = False,
    latency: bool = False,
    device: str = "auto",
    time_budget_s: float | None = None,
    seconds: float | None = None,
    protocol: Protocol | None = None,
) -> Configuration:
    """Checks the arguments, and fills in defaults for the device; see the options of `vit-fast bench`.

    Args:
        models: Names, patterns, ids, files or functions; see models.resolve.
        batch_sizes: Images per call; "best" doubles the batch size while throughput grows.
        img_size: Height and width of the images, or several pairs; None means each model's own.
        time_budget_s: Seconds; 0 means no limit, the default with `candidates` or `seconds`.
        protocol: Length of a measurement, instead of the default.
    Raises:
        ValueError: an argument is unknown, out of range or unreadable. Nothing has been built.
    """
    request = {name: value for name, value in locals().items() if name != "protocol"}
    kind = (where := _device(device)).type
    unlimited = 0 if seconds is not None or candidates is not None else DEFAULT_TIME_BUDGET_S[kind]
    budget = unlimited if time_budget_s is None else time_budget_s
    if not budget >= 0:
        raise ValueError(f"time_budget_s must be >= 0 (0: no limit), got {budget}")
    if amp and (not train or dtypes not in (None, ["fp32"])):
        raise ValueError("--amp requires --train, and fp32 if --dtypes is given: parameters stay in fp32")
    if latency and batch_sizes not in (None, [1]):
        raise ValueError("--batch-sizes must be 1 or absent with --latency")
    words = DEFAULT_MODELS[kind] if models is None else models
    # quick checks before the first model is built
    resolved, img_sizes, image_files = [resolve(word) for word in words], _sizes(img_size), _images(images)
    names = ("amp",) if amp else _dtypes(DEFAULT_DTYPES[kind] if dtypes is None else dtypes, where)
    choose(candidates, where)
    search = batch_sizes == "best"
    sizes = SEARCHED[kind] if batch_sizes == "best" else (1,) if latency else batch_sizes
    sizes = _batch_sizes(DEFAULT_BATCH_SIZES[kind] if sizes is None else sizes)
    found = _some("models", [model for make in resolved for size in img_sizes for model in make(size)])
    by_default = dtypes is None and candidates is None and not train
    if by_default and kind == "cpu" and has_bf16() and all(model.kind in BOTH_DTYPES for model in found):
        names = ("fp32", "bf16")
    if data != "device" and (data != "host" or kind == "cpu" or any(model.data is None for model in found)):
        raise ValueError(f"--data must be device, or host for a model that takes images on a GPU, got {data}")
    configuration = Configuration(
        models=found,
        batch_sizes=sizes,
        dtypes=names,
        candidates={m.kind: tuple(choose(candidates, where, m.kind, train)) for m in found},
        device=where,
        images=image_files,
        time_budget_s=budget or math.inf,
        protocol=protocol or (LATENCY if latency else PROTOCOLS[kind]).lasting(seconds),
        training=train,
        data=data,
        explain=explain,
        cold=cold,
        search=search,
        request=request | {"images": [str(Path(image).absolute()) for image in images], "device": str(where)},
    )
    available = memory_bytes(where)
    if available is None:
        return configuration
    if search:
        fitting = tuple(size for size in configuration.batch_sizes if _least_bytes(configuration, size) <= available)
        return dataclasses.replace(configuration, batch_sizes=fitting or (1,))
    most = max(configuration.batch_sizes)
    if (needed := _least_bytes(configuration, most)) > available:
        raise ValueError(
            f"the batch size must be at most {max(1, most * available // needed):,}, got {most}, which needs at least"
            f" {needed / 2**30:,.0f} GiB, {where} has {available / 2**30:,.0f} GiB"
        )
    return configuration


def _least_bytes(configuration: Configuration, batch: int) -> int:
    """Estimates the least memory of a call: two inputs, the residual stream and one hidden layer."""
    values = 0
    for model in configuration.models:
        tokens = 0 if model.config is None else model.config.seqlen * (model.config.embed_dim + model.config.hidden_dim)
        values = max(values, 2 * math.prod(model.shape) + tokens)
    return batch * values * min(DTYPES[name].itemsize for name in configuration.dtypes)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEFAULT_MODELS:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one of {torch.cuda.device_count()} CUDA devices, got {name!r}")
    return device


def _sizes(img_size: Sequence[int] | Sequence[Sequence[int]] | None) -> list[Size | None]:
    several: Any = [] if img_size is None else img_size if isinstance(img_size[0], Sequence) else [img_size]
    for sides in several:
        if len(sides) not in (1, 2) or min(sides) < 1:
            raise ValueError(f"--img-size must be N or HEIGHTxWIDTH in pixels, got {'x'.join(map(str, sides))}")
    return [(sides[0], sides[-1]) for sides in several] or [None]


def _batch_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if too_small := [size for size in sizes if size < 1]:
        raise ValueError(f"the batch size must be >= 1, got {too_small[0]}")
    return _some("batch sizes", sizes)


def _dtypes(names: Sequence[str], device: torch.device) -> tuple[str, ...]:
    known = [name for name in DTYPES if name != "amp" and (name != "tf32" or device.type == "cuda")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"the dtype must be one of {', '.join(known)} on {device}, got {unknown[0]!r}")
    return _some("dtypes", names)


def _images(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    found = find_images(paths or [sample_image()])[:MAX_VIEWS]
    for path in found:
        read_image(path)
    return tuple(found)


def _some(what: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if not values:
        raise ValueError(f"{what} must not be empty")
    return tuple(dict.fromkeys(values))


# Estimated seconds on two CPU cores to compile a model, for each batch size and dtype.
COMPILING_S = {"none": 0.0, "default": 25.0, "freezing": 13.0, "reduce-overhead": 30.0, "max-autotune": 240.0}
# The same, if a candidate in this mode was compiled before in the group: most of its C++ kernels exist.
COMPILING_NEXT_S = {"freezing": 7.0}
# The shortest timing of a candidate.
TIMED_S, ROUNDS = 1.5, 10
# Calls before a candidate is timed; time of the images and the fp64 reference of a group, in calls of one image.
CALLS_BEFORE, REFERENCE_CALLS = 6, 50
CEILINGS_S = 1.0
# The share of the matmul ceiling that a model reaches; seconds per image for a model of unknown work.
SHARE, OTHER_SHARE, UNKNOWN_CALL_S = {"fp32": 0.6}, 0.4, 0.1
# The share of the budget that is allocated; the rest is a reserve.
PLANNED_SHARE = 0.88
OF_FP32 = 0.7  # the least time in a lower precision relative to fp32: not all of a model is matmuls
ALWAYS = 2  # candidates that are always measured


def call_s(group: Group, ceilings: Mapping[str, Any]) -> float:
    """Estimates the seconds of a call."""
    flop, reached = total(group.least().values()).flop, ceilings.get("matmul_TFLOP_per_s", {})
    if not flop or group.dtype_name not in reached:
        return UNKNOWN_CALL_S * group.batch_size
    seconds = {name: flop / (SHARE.get(name, OTHER_SHARE) * most * 1e12) for name, most in reached.items()}
    return max(seconds[group.dtype_name], OF_FP32 * seconds.get("fp32", 0.0))


class Allocation:
    """Chooses the candidates that fit into the time budget, and divides the time among the groups.

    Args:
        groups: The candidates of each group, the most important ones first.
        budget_s: Seconds from the start of the run; infinite keeps all candidates.
        ceilings: See machine.measure_ceilings.
        skipped: Candidates to skip in a resumed run; None means those that do not fit.
    Attributes:
        planned: The candidates of each group that fit, in all groups of a dtype or in none.
        skipped: The others, with their dtype.
    """

    def __init__(
        self,
        groups: Planned,
        budget_s: float = math.inf,
        ceilings: Mapping[str, Any] | None = None,
        skipped: Sequence[str] | None = None,
    ) -> None:
        self._budget_s, self._calls = budget_s, {group: call_s(group, ceilings or {}) for group in groups}
        # each timed call on a CPU follows untimed ones, at least one
        self._timed = {
            group: max(TIMED_S, ROUNDS * (call + max(call, SETTLE_MS / 1e3))) for group, call in self._calls.items()
        }
        self._first: dict[tuple[str, str], Group] = {}
        self.skipped: list[str] = [] if skipped is None else list(skipped)
        self.planned: Planned = {group: [] for group in groups}
        needed = sum(self._fixed_s(group) for group in groups)
        every = [(c.name, group.dtype_name) for group, found in groups.items() for c in found]
        modes = {c.name: c.compile_mode for found in groups.values() for c in found}
        labels = list(modes)
        # candidates that share compiled kernels are chosen together, for one dtype after the other
        sharing = [mode if mode in COMPILING_NEXT_S else label for label, mode in modes.items()]
        ranks = {label: sharing.index(share) for label, share in zip(labels, sharing)}
        for label, dtype in sorted(dict.fromkeys(every), key=lambda one: ranks[one[0]]):
            chosen = [
                (group, c)
                for group, found in groups.items()
                for c in found
                if (c.name, group.dtype_name) == (label, dtype)
            ]
            name, seconds = f"{label} ({dtype})", sum(self.preparing_s(*pair) + self._timed[pair[0]] for pair in chosen)
            fits = label in labels[:ALWAYS] or needed + seconds <= PLANNED_SHARE * budget_s
            if name in self.skipped or (skipped is None and not fits):
                self.skipped += [name] * (skipped is None)
                continue
            needed += seconds
            for group, candidate in chosen:
                self.planned[group].append(candidate)

    def preparing_s(self, group: Group, candidate: Candidate) -> float:
        """Estimates the seconds to prepare a candidate; later groups reuse what the first of a dtype builds."""
        first = self._first.setdefault((candidate.name, group.dtype_name), group)
        if candidate.missing_packages():
            return 0.0
        building_s = candidate.build_s if first is group else 0.0
        mode, before = candidate.compile_mode, takewhile(lambda c: c.name != candidate.name, self.planned[group])
        compiling_s = COMPILING_S[mode]
        if mode in COMPILING_NEXT_S and any(c.compile_mode == mode for c in before):
            compiling_s = COMPILING_NEXT_S[mode]
        return building_s + compiling_s + CALLS_BEFORE * self._calls[group]

    def _fixed_s(self, group: Group) -> float:
        return CEILINGS_S + REFERENCE_CALLS * self._calls[group] / group.batch_size + self._timed[group]

    def prepared_s(self, group: Group) -> float:
        """Estimates the seconds until the candidates of a group can be timed."""
        return sum(self.preparing_s(group, c) for c in self.planned[group]) + self._fixed_s(group) - self._timed[group]

    def end_of_timing_s(self, group: Group, now_s: float, slowness: float) -> float:
        """Returns the end of the timing of a prepared group; now and the end are seconds since the start of the run.

        `slowness` is the measured time of the preparations so far relative to the estimate.
        """
        after = list(self.planned)[list(self.planned).index(group) :]
        free_s = self._budget_s - now_s - slowness * sum(map(self.prepared_s, after[1:]))
        weights = [(len(self.planned[each]) + 1) * self._timed[each] for each in after]
        return now_s + max(free_s, 0.0) * weights[0] / sum(weights)
