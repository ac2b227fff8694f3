"""Static checks of the kernels in every shipped configuration: statistics, problems, and the committed baseline.

The baseline, `baseline.json`, contains all builds for sm_90, and the core builds (`Build.core`) for other
architectures. Only `vit-fast kernels --update-baseline` changes it.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from ..launch import Launch
from . import offline
from .attention_builds import attention_builds
from .block_builds import block_builds
from .offline import Build, architecture

Stats = dict[str, int]
"""Resources and instruction counts of a compiled kernel.

Resources: registers per thread, stack_bytes, shared_bytes, ctas_per_sm, warps. Numbers of machine instructions:

- instructions (all but NOP), spill_loads, spill_stores, async_copies, tma_loads, tma_stores, hgmma, hmma, tcgen05
- e4m3: MMAs with e4m3; early_accesses: accesses to global memory before griddepcontrol.wait
- atomics: atomic operations on global memory, which would make sums depend on the order of programs
- grid_waits: griddepcontrol.wait; grid_starts: griddepcontrol.launch_dependents (ptx.py)
- wgmma_waits: waits for wgmma; if the PTX has fewer (wgmma_waits_in_ptx), ptxas has serialized wgmma
"""

BASELINE_PATH = Path(__file__).with_name("baseline.json")
ALLOWED_GROWTH = 1.10
ALLOWED_SPILLS = 0.02
_GROWING = ("registers", "instructions", "wgmma_waits")
_MUST_STAY = ("hgmma", "tcgen05", "tma_loads", "tma_stores")
_RECORDED = ("registers", "instructions", "spills", "shared_bytes", "ctas_per_sm", "hmma", *_MUST_STAY)

_GLOBAL_ACCESSES = {"ATOM", "ATOMG", "LD", "LDG", "LDGSTS", "RED", "REDG", "ST", "STG", "UBLKCP", "UTMALDG", "UTMASTG"}
_ATOMICS = ("ATOM", "ATOMG", "RED", "REDG")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def builds(arch: str, core: bool = False) -> Iterator[Build]:
    """Yields the shipped builds for an architecture, or only its core builds. Yields one build per distinct kernel."""
    architecture(arch)
    kernels, keys = set(), set()
    for build in (*attention_builds(arch), *block_builds(arch, core)):
        if (kernel := offline.specialization(build.launch)) in kernels:
            continue
        kernels.add(kernel)
        unnumbered, number = build.case, 2
        while build.key(arch) in keys:
            build = replace(build, case=f"{unnumbered} ({number})")
            number += 1
        keys.add(build.key(arch))
        if build.core or not core:
            yield build


def _disassemble(compiled: Any, flag: str) -> str:
    """Returns the output of cuobjdump for a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        return subprocess.run([cuobjdump, flag, path], capture_output=True, text=True, check=True).stdout


def early_accesses(sass: str) -> int:
    """Returns the number of global memory accesses before ACQBULK (griddepcontrol.wait), excluding prefetches."""
    names = _INSTRUCTION.findall(sass)
    return sum(name in _GLOBAL_ACCESSES for name in names[: names.index("ACQBULK")]) if "ACQBULK" in names else 0


def compile_stats(launch: Launch, arch: str) -> Stats:
    """Compiles the kernel of a launch and returns its statistics."""
    compiled = offline.compile_launch(launch, arch)
    sass = _disassemble(compiled, "-sass")
    match = re.search(r"REG:(\d+) STACK:(\d+)", _disassemble(compiled, "-res-usage"))
    assert match is not None
    mix, metadata = Counter(_INSTRUCTION.findall(sass)), compiled.metadata
    stats = {
        "registers": int(match[1]), "stack_bytes": int(match[2]), "shared_bytes": int(metadata.shared),
        "warps": int(getattr(metadata, "total_num_warps", None) or metadata.num_warps),
        "instructions": sum(mix.values()) - mix["NOP"], "spill_loads": mix["LDL"], "spill_stores": mix["STL"],
        "hgmma": mix["HGMMA"] + mix["QGMMA"] + mix["IGMMA"], "hmma": mix["HMMA"],
        "tcgen05": sum(count for name, count in mix.items() if name.startswith("UTC") and name.endswith("MMA")),
        "e4m3": mix["QGMMA"] + mix["QMMA"] + mix["UTCQMMA"],
        "tma_loads": mix["UTMALDG"], "tma_stores": mix["UTMASTG"], "async_copies": mix["LDGSTS"],
        "grid_waits": mix["ACQBULK"], "grid_starts": mix["PREEXIT"], "early_accesses": early_accesses(sass),
        "wgmma_waits": sass.count("WARPGROUP.DEPBAR"), "atomics": sum(mix[name] for name in _ATOMICS),
        "wgmma_waits_in_ptx": compiled.asm["ptx"].count("wgmma.wait_group"),
    }  # fmt: skip
    limits, warps = architecture(arch), stats["warps"]
    registers_per_warp = (max(stats["registers"], 1) + 7) // 8 * 8 * 32
    by_registers = 65_536 // registers_per_warp // warps
    by_shared = limits.shared_bytes // (stats["shared_bytes"] + offline.KIB)
    tensor_columns = int(getattr(metadata, "tmem_size", None) or 0)
    by_tensor_memory = 512 // tensor_columns if tensor_columns else limits.blocks
    blocks = min(by_registers, by_shared, by_tensor_memory, limits.threads // (32 * warps), limits.blocks)
    return stats | {"ctas_per_sm": blocks}


def problems(build: Build, stats: Stats, arch: str) -> list[str]:
    """Lists reasons not to ship a build.

    The configurations are chosen for the Triton version of the baseline, with which no kernel spills. With other
    versions, at most 2 % of the instructions may access spilled registers.
    """
    found = []
    allowed = 0 if is_comparable() else ALLOWED_SPILLS * stats["instructions"]
    if stats["spill_loads"] + stats["spill_stores"] > allowed:
        found.append(f"spills: {stats['spill_loads']} loads, {stats['spill_stores']} stores")
    if stats["wgmma_waits"] > stats["wgmma_waits_in_ptx"]:
        found.append(f"wgmma is serialized: {stats['wgmma_waits']} waits in SASS, {stats['wgmma_waits_in_ptx']} in PTX")
    dependent = ("grid_waits", "grid_starts") if build.launch.constants.get("DEPENDENT") else ()
    found += [f"no {name} in the machine code" for name in (*build.needs, *dependent) if not stats[name]]
    if stats["atomics"]:
        found.append(f"{stats['atomics']} atomic operations on global memory")
    if stats["early_accesses"]:
        found.append(f"{stats['early_accesses']} accesses to global memory before griddepcontrol.wait")
    if stats["shared_bytes"] > (most := architecture(arch).shared_bytes_per_block):
        found.append(f"needs {stats['shared_bytes']} bytes of shared memory, {arch} has {most} per block")
    if stats["ctas_per_sm"] < 1:
        found.append("does not fit on a multiprocessor")
    return found


def read_baseline(path: Path = BASELINE_PATH) -> dict[str, Any]:
    """Returns the baseline: {"triton": version, "builds": {key: statistics}}."""
    baseline: dict[str, Any] = json.loads(path.read_text())
    return baseline


@functools.cache
def is_comparable() -> bool:
    """True if the installed version of Triton wrote the baseline."""
    return bool(read_baseline()["triton"] == triton.__version__)


def regressions(baseline: Mapping[str, Any], key: str, now: Stats) -> list[str]:
    """Lists differences from the baseline: counts that grew by over 10 %, and vanished instructions.

    If the baseline does not contain the build, returns only a request to update the baseline.
    """
    before = baseline["builds"].get(key)
    if before is None:
        return ["not in the baseline: run vit-fast kernels --update-baseline"]
    found = [
        f"{name} grew from {before[name]} to {now[name]}, by more than 10 %"
        for name in _GROWING
        if name in before and now[name] > ALLOWED_GROWTH * before[name]
    ]
    return found + [f"no {name}, baseline has {before[name]}" for name in _MUST_STAY if before[name] and not now[name]]


def write_baseline(found: Mapping[str, Stats], path: Path = BASELINE_PATH) -> None:
    """Writes `found`, deleting other entries of these architectures. Deletes all entries of another Triton version."""
    builds: dict[str, Any] = {}
    if path.exists() and (old := read_baseline(path))["triton"] == triton.__version__:
        written = {key.partition("/")[0] for key in found}
        builds = {key: counts for key, counts in old["builds"].items() if key.partition("/")[0] not in written}
    for key, stats in found.items():
        names = (*_RECORDED, "wgmma_waits") if stats["wgmma_waits"] else _RECORDED
        counts = stats | {"spills": stats["spill_loads"] + stats["spill_stores"]}
        builds[key] = {name: counts[name] for name in names}
    lines = [f"  {json.dumps(key)}: {json.dumps(builds[key])}" for key in sorted(builds)]
    text = f'{{"triton": {json.dumps(triton.__version__)}, "builds": {{\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(text)
