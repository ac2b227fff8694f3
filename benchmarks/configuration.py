"""Run configuration of the benchmark, checked before the first candidate is built."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vit_fast.apps.data import find_images, read_image, sample_image
from vit_fast.config import Size
from vit_fast.errors import as_device
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.clock import Protocol
from vit_fast.version import matmul_slowdown, memory_bytes

from .candidates import choose
from .models import DTYPES, MAX_VIEWS, Group, Model, resolve

# Defaults. On two CPU cores, the budget ends the run within three minutes.
DEFAULT_MODELS = {"cpu": ("vit_tiny_patch16_224",), "cuda": ("vit_base_patch16_224",)}
DEFAULT_BATCH_SIZES = {"cpu": (1, 8), "cuda": (1, 32, 256)}
DEFAULT_DTYPES = {"cpu": ("fp32",), "cuda": ("bf16",)}
DEFAULT_TIME_BUDGET_S = {"cpu": 155.0, "cuda": 900.0}
PROTOCOLS = {
    "cpu": Protocol(repeats=80, seconds=4.0, least_repeats=5, warmup_repeats=1, warmup_seconds=0.0),
    "cuda": Protocol(repeats=100, seconds=1.0, least_repeats=10),
}
LATENCY = Protocol(repeats=1000, seconds=5.0, least_repeats=100)  # enough calls for a 99th percentile
# Batch sizes of --batch-sizes best.
SEARCHED = {"cpu": tuple(2**i for i in range(7)), "cuda": tuple(2**i for i in range(12))}


@dataclass(frozen=True)
class Configuration:
    """A checked run: every model x dtype x batch size, with candidates by Model.kind."""

    models: tuple[Model, ...]
    batch_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    candidates: Mapping[str, tuple[Candidate, ...]]
    device: torch.device
    images: tuple[Path, ...]
    time_budget_s: float
    protocol: Protocol
    request: dict[str, Any] = field(compare=False)  # arguments of make_configuration

    def groups(self) -> list[Group]:
        each = itertools.product(self.models, self.dtypes, self.batch_sizes)
        return [Group(*one, self.request["train"], self.request["data"], self.device) for one in each]

    @property
    def search(self) -> bool:
        """True if larger batch sizes are tried only while throughput grows."""
        return bool(self.request["batch_sizes"] == "best")

    @property
    def is_limited(self) -> bool:
        """True if the time budget limits which of the default candidates are measured."""
        return self.request["candidates"] is None and not self.search and math.isfinite(self.time_budget_s)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for the record, with the file names of images."""
        return self.request | {
            "models": list(dict.fromkeys(model.name for model in self.models)),
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

    `time_budget_s` 0 means no limit, which is the default with `candidates` or `seconds`. Raises ValueError for an
    invalid argument or an unreadable image.
    """
    request = {name: value for name, value in locals().items() if name != "protocol"}
    where = as_device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if (kind := where.type) not in DEFAULT_MODELS:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if time_budget_s is None:
        time_budget_s = 0 if seconds is not None or candidates is not None else DEFAULT_TIME_BUDGET_S[kind]
    if not time_budget_s >= 0:
        raise ValueError(f"--time-budget must be >= 0 (0: no limit), got {time_budget_s}")
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ValueError(f"--seconds must be finite and >= 0, got {seconds}")
    if latency and batch_sizes not in (None, [1]):
        raise ValueError(f"--batch-sizes must be 1 or absent with --latency, got {batch_sizes}")
    # quick checks before the first model is built
    resolved = [resolve(word) for word in (DEFAULT_MODELS[kind] if models is None else models)]
    several: Any = [] if img_size is None else img_size if isinstance(img_size[0], Sequence) else [img_size]
    for sides in several:
        if len(sides) not in (1, 2) or min(sides) < 1:
            raise ValueError(f"--img-size must be N or HEIGHTxWIDTH in pixels, got {'x'.join(map(str, sides))}")
    img_sizes: list[Size | None] = [(sides[0], sides[-1]) for sides in several] or [None]
    image_files = find_images(images or [sample_image()])[:MAX_VIEWS]
    for path in image_files:
        read_image(path)
    known = [name for name in DTYPES if {"amp": train, "tf32": kind == "cuda"}.get(name, True)]
    names = _some("--dtypes", DEFAULT_DTYPES[kind] if dtypes is None else dtypes)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--dtypes must consist of {', '.join(known)} on {where}, got {unknown[0]!r}")
    choose(candidates, where)
    sizes = SEARCHED[kind] if batch_sizes == "best" else (1,) if latency else batch_sizes
    sizes = _some("--batch-sizes", DEFAULT_BATCH_SIZES[kind] if sizes is None else sizes)
    if min(sizes) < 1:
        raise ValueError(f"--batch-sizes must be >= 1, got {min(sizes)}")
    found = _some("--models", [model for make in resolved for size in img_sizes for model in make(size)])
    by_default = dtypes is None and candidates is None and not train
    if by_default and kind == "cpu" and all(model.kind in ("vit-fast", "given") for model in found):
        names = ("fp32", "bf16") if matmul_slowdown(torch.bfloat16) < 1 else names
    if data != "device" and (data != "host" or kind == "cpu" or any(model.data is None for model in found)):
        raise ValueError(f"--data must be device (host needs a GPU and models that take images), got {data} on {where}")
    if batch_sizes != "best":
        _check_memory(found, max(sizes), min(DTYPES[name].itemsize for name in names), where)
    protocol = protocol or (LATENCY if latency else PROTOCOLS[kind])
    if seconds is not None:
        protocol = dataclasses.replace(protocol, repeats=sys.maxsize, seconds=seconds)
    chosen = {m.kind: tuple(choose(candidates, where, m.kind, train, not time_budget_s)) for m in found}
    return Configuration(
        found, sizes, names, chosen, where,
        tuple(image_files), time_budget_s or math.inf, protocol,
        request=request | {"images": [str(Path(image).absolute()) for image in images], "device": str(where)},
    )  # fmt: skip


def _check_memory(models: Sequence[Model], batch_size: int, itemsize: int, device: torch.device) -> None:
    """Checks the least memory: two batches of inputs (rotating_batches), the residual stream and one hidden layer."""
    widths = [m.config.seqlen * (m.config.embed_dim + m.config.hidden_dim) if m.config else 0 for m in models]
    per_image = itemsize * max(2 * math.prod(m.shape) + width for m, width in zip(models, widths))
    available = memory_bytes(device)
    if available is None or batch_size * per_image <= available:
        return
    most = available // per_image
    rule = f"the batch size must be at most {most:,}, got {batch_size}" if most else "one image must fit into memory"
    raise ValueError(
        f"{rule}: batch size {batch_size} needs at least {batch_size * per_image / 2**30:,.0f} GiB, "
        f"but {device} has {available / 2**30:,.0f} GiB"
    )


def _some(what: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if not values:
        raise ValueError(f"{what} must not be empty")
    return tuple(dict.fromkeys(values))
