"""Committed statistics of compiled kernels: all builds for sm_90, and the core builds for other architectures.

Only `vit-fast kernels --update-baseline` changes `baseline.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

from ..device import REFERENCE_GPU
from .offline import ARCHS, Build, Stats, builds

BASELINE_PATH = Path(__file__).with_name("baseline.json")
ALLOWED_GROWTH = 1.10
_GROWING = ("registers", "instructions", "wgmma_waits")
_MUST_STAY = {"hgmma": "HGMMA", "tcgen05": "TCGEN05", "tma_loads": "TMA loads", "tma_stores": "TMA stores"}
_RECORDED = ("registers", "instructions", "spills", "shared_bytes", "ctas_per_sm", "hmma", *_MUST_STAY)


def is_recorded(build: Build, arch: str) -> bool:
    return build.core or arch == REFERENCE_GPU.arch


def read_baseline(path: Path = BASELINE_PATH) -> dict[str, Any]:
    """Returns the baseline: {"triton": version, "builds": {key: statistics}}."""
    baseline: dict[str, Any] = json.loads(path.read_text())
    return baseline


def is_comparable(baseline: Mapping[str, Any]) -> bool:
    """True if the baseline was written with the installed triton version."""
    return bool(baseline["triton"] == triton.__version__)


def regressions(baseline: Mapping[str, Any], key: str, stats: Stats) -> list[str]:
    """Lists the statistics of a build that are worse than in the baseline; reports if the baseline lacks the build."""
    before = baseline["builds"].get(key)
    if before is None:
        return ["not in the baseline: run vit-fast kernels --update-baseline"]
    now = stats.as_dict()
    found = [
        f"{name} grew from {before[name]} to {now[name]}"
        for name in _GROWING
        if name in before and now[name] > ALLOWED_GROWTH * before[name]
    ]
    return found + [f"lost its {word}" for name, word in _MUST_STAY.items() if before[name] and not now[name]]


def _recorded_counts(stats: Stats) -> dict[str, int]:
    names = (*_RECORDED, "wgmma_waits") if stats.wgmma_waits else _RECORDED
    return {name: getattr(stats, name) for name in names}


def write_baseline(found: Mapping[str, Stats], path: Path = BASELINE_PATH) -> None:
    """Writes `found`. Preserves other entries whose builds still exist, if the triton version is unchanged."""
    kept: dict[str, Any] = {}
    if path.exists() and is_comparable(old := read_baseline(path)):
        existing = {build.key(arch) for arch in ARCHS for build in builds(arch) if is_recorded(build, arch)}
        kept = {key: counts for key, counts in old["builds"].items() if key in existing}
    kept |= {key: _recorded_counts(stats) for key, stats in found.items()}
    lines = [f"  {json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept)]
    text = f'{{"triton": {json.dumps(triton.__version__)}, "builds": {{\n' + ",\n".join(lines) + "\n}}\n"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
