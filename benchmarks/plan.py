"""Run configuration, checked whole before anything is built."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vit_fast.apps.data import default_photograph, find_images, read_image
from vit_fast.config import Size
from vit_fast.measure.clock import Protocol

from .candidates import FP32_ALONE, NamedCandidate, choose
from .inputs import MAX_VIEWS
from .machine import DTYPES, has_bf16, memory_bytes
from .models import Model, resolve
from .rows import PERCENTILE_REPEATS, Group

# Sizes that are worth measuring on the device. On two CPU cores the budget ends the run within three minutes.
DEFAULT_MODELS = {"cpu": ("vit_tiny_patch16_224",), "cuda": ("vit_base_patch16_224",)}
DEFAULT_BATCH_SIZES = {"cpu": (1, 8), "cuda": (1, 32, 256)}
DEFAULT_DTYPES = {"cpu": ("fp32",), "cuda": ("bf16",)}
DEFAULT_TIME_BUDGET_S = {"cpu": 155.0, "cuda": 900.0}
PROTOCOLS = {
    "cpu": Protocol(repeats=80, seconds=4.0, least_repeats=5, warmup_repeats=1, warmup_seconds=0.0),
    "cuda": Protocol(repeats=100, seconds=1.0, least_repeats=10),
}
# Of one image: enough calls for a 99th percentile.
LATENCY = Protocol(repeats=1000, seconds=5.0, least_repeats=PERCENTILE_REPEATS)
BOTH_DTYPES = ("ours", "given")  # models that a CPU with products in bf16 measures in fp32 and in bf16
# Where the batch with most images a second is searched; see runner.
SEARCHED = {"cpu": tuple(2**i for i in range(7)), "cuda": tuple(2**i for i in range(12))}


@dataclass(frozen=True)
class Plan:
    """A checked run: every model x dtype x batch size, for every selection.

    Attributes:
        models: What is measured.
        batch_sizes: Images a call.
        dtypes: Of parameters, images and products, see machine.DTYPES.
        selections: Candidates in their compile modes, by kind of model.
        device: Where everything runs.
        images: Photographs that fill the batches.
        time_budget_s: Seconds after which nothing new is started; infinite when there is none.
        protocol: How long a measurement is.
        training: Whether training steps are measured; data: where their batches lie, see rows.Group.
        explain: Whether every candidate is profiled, too; cold: whether its cold start is measured.
        search: Whether batch_sizes, in their order, are tried only as long as they gain anything.
        request: What make_plan was asked for, as plain data from which it makes the same plan again.
    """

    models: tuple[Model, ...]
    batch_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    selections: Mapping[str, tuple[NamedCandidate, ...]]
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
        """Returns the groups, whose candidates are timed interleaved, in their order."""
        return [
            Group(model, dtype, batch_size, batch_size, self.training, self.data)
            for model in self.models
            for dtype in self.dtypes
            for batch_size in self.batch_sizes
        ]

    @property
    def is_default(self) -> bool:
        """True if nobody named the candidates: then those are planned that the time suffices for."""
        return self.request.get("candidates") is None and not self.search

    def selections_of(self, group: Group) -> list[NamedCandidate]:
        """The candidates of a group; by default none that cannot compute in its dtype."""
        found = self.selections[group.model.kind]
        left_out = FP32_ALONE if self.is_default and self.device.type == "cpu" and group.dtype_name != "fp32" else ()
        return [selection for selection in found if selection.name not in left_out]

    def product_dtypes(self) -> list[str]:
        """Returns the dtypes of the candidates' matrix products, as far as torch has them; amp multiplies in bf16."""
        chosen = [selection for selections in self.selections.values() for selection in selections]
        lower = "amp" in self.dtypes or any(selection.precision == "bf16" for selection in chosen)
        return [*self.dtypes, *(["bf16"] if lower else [])]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the record; images by name only."""
        return {
            "models": list(dict.fromkeys(model.name for model in self.models)),
            **{n: self.request.get(n) for n in ("img_size", "train", "amp", "data", "explain", "cold", "latency")},
            "seconds": self.request.get("seconds"),
            "batch_sizes": ["best"] if self.search else list(self.batch_sizes),
            "dtypes": list(self.dtypes),
            "subjects": list(dict.fromkeys(s.label for chosen in self.selections.values() for s in chosen)),
            "device": str(self.device),
            "images": [path.name for path in self.images],
            "time_budget_s": self.time_budget_s if math.isfinite(self.time_budget_s) else None,
            "protocol": dataclasses.asdict(self.protocol),
        }


def make_plan(
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
) -> Plan:
    """Checks what was asked for, and fills in what was not by what the device is good for.

    Args:
        images: Files and folders; none means a photograph that is on this machine already.
        models: Names, patterns, ids, files or functions; see models.resolve.
        batch_sizes: Images a call, each at least 1; "best": doubled for as long as that gains images a second.
        dtypes: "fp32", "tf32", "fp16", "bf16".
        candidates: See candidates.parse_label.
        img_size: Height and width of the images, or several such; None means each model's own.
        train: Measure training steps (forward, backward, AdamW), not inference.
        amp: The forward of these under autocast in bf16, the parameters in fp32.
        data: "device", or "host": a call begins with the copy of its images to the GPU.
        explain: Profile every candidate, too; see explain.explain.
        cold: Measure each from the start of a process to its first answer, too; see cold.cold_start.
        latency: One image a call, often enough for a 99th percentile.
        device: "auto" (CUDA where there is one), or what torch.device takes.
        time_budget_s: Seconds; 0 means without limit, as None does where `candidates` or `seconds` are given.
        seconds: How long each candidate is timed; None means what suits the device.
        protocol: How long a measurement is, in place of what the device and `seconds` say.
    Raises:
        ValueError: anything is unknown, out of range or unreadable (ImageError); nothing has been built.
    """
    request = {name: value for name, value in locals().items() if name != "protocol"}
    kind = (where := _device(device)).type
    unlimited = 0 if seconds is not None or candidates is not None else DEFAULT_TIME_BUDGET_S[kind]
    budget = unlimited if time_budget_s is None else time_budget_s
    if not budget >= 0:
        raise ValueError(f"time_budget_s={budget}: expected a number of seconds >= 0 (0: no limit)")
    if amp and (not train or dtypes not in (None, ["fp32"])):
        raise ValueError("--amp: expected with --train, and with --dtypes fp32 or none: the parameters stay in fp32")
    if latency and batch_sizes not in (None, [1]):
        raise ValueError("--latency times calls of one image: --batch-sizes must be 1 or absent")
    words = DEFAULT_MODELS[kind] if models is None else models
    # all that is quick to check before the first model is built
    resolved, img_sizes, photographs = [resolve(word) for word in words], _sizes(img_size), _images(images)
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
        raise ValueError(f"--data must be device or, for images on a GPU, host, got {data}; a CPU copies nothing")
    plan = Plan(
        models=found,
        batch_sizes=sizes,
        dtypes=names,
        selections={m.kind: tuple(choose(candidates, where, m.kind, train)) for m in found},
        device=where,
        images=photographs,
        time_budget_s=budget or math.inf,
        protocol=protocol or (LATENCY if latency else PROTOCOLS[kind]).lasting(seconds),
        training=train,
        data=data,
        explain=explain,
        cold=cold,
        search=search,
        request=request | {"images": [str(Path(image).absolute()) for image in images], "device": str(where)},
    )
    there = memory_bytes(where)
    if there is None:
        return plan
    if search:
        fitting = tuple(size for size in plan.batch_sizes if _least_bytes(plan, size) <= there)
        return dataclasses.replace(plan, batch_sizes=fitting or (1,))
    most = max(plan.batch_sizes)
    if (needed := _least_bytes(plan, most)) > there:
        raise ValueError(
            f"batch size {most}: needs at least {needed / 2**30:,.0f} GiB, {where} has {there / 2**30:,.0f} GiB;"
            f" at most {max(1, most * there // needed):,}"
        )
    return plan


def _least_bytes(plan: Plan, batch: int) -> int:
    """Estimates the least memory of a call: two inputs, the residual stream and one hidden layer."""
    values = 0
    for model in plan.models:
        tokens = 0 if model.config is None else model.config.seqlen * (model.config.embed_dim + model.config.hidden_dim)
        values = max(values, 2 * math.prod(model.shape) + tokens)
    return batch * values * min(DTYPES[name].itemsize for name in plan.dtypes)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEFAULT_MODELS:
        raise ValueError(f"device={name!r}: expected auto, cpu, cuda and cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices here")
    return device


def _sizes(img_size: Sequence[int] | Sequence[Sequence[int]] | None) -> list[Size | None]:
    several: Any = [] if img_size is None else img_size if isinstance(img_size[0], Sequence) else [img_size]
    for sides in several:
        if len(sides) not in (1, 2) or min(sides) < 1:
            raise ValueError(f"--img-size {'x'.join(map(str, sides))}: expected a side, or HEIGHTxWIDTH, in pixels")
    return [(sides[0], sides[-1]) for sides in several] or [None]


def _batch_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if too_small := [size for size in sizes if size < 1]:
        raise ValueError(f"batch size {too_small[0]}: expected an integer >= 1")
    return _some("batch sizes", sizes)


def _dtypes(names: Sequence[str], device: torch.device) -> tuple[str, ...]:
    accepted = [name for name in DTYPES if name != "amp" and (name != "tf32" or device.type == "cuda")]
    if unknown := [name for name in names if name not in accepted]:
        raise ValueError(f"dtype {unknown[0]!r} on {device}: expected {', '.join(accepted)}")
    return _some("dtypes", names)


def _images(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    found = find_images(paths or [default_photograph()])[:MAX_VIEWS]
    for path in found:
        read_image(path)
    return tuple(found)


def _some(what: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if not values:
        raise ValueError(f"no {what}: expected at least one")
    return tuple(dict.fromkeys(values))
