"""Compiled kernels: no spills, no serialised wgmma, the expected instructions; the policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.attention.attention_policy import Problem, forward_config
from vit_fast.kernels.inspect import baseline, offline

STATS = offline.Stats(
    registers=160, stack_bytes=0, spill_loads=0, spill_stores=0, shared_bytes=60_000, ctas_per_sm=3, warps=4,
    instructions=1000, hgmma=25, hmma=0, tcgen05=0, tma_loads=7, tma_stores=1, async_copies=0, seconds=0.5,
    wgmma_waits=6, wgmma_waits_in_ptx=6, grid_waits=1, grid_starts=1,
)  # fmt: skip


def run_compiler(command: list[str]) -> Any:
    """Returns what a process prints as JSON that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    return json.loads(run.stdout)


_COMPILE = """
import json, sys
from vit_fast.kernels.inspect import offline
wanted = {f"{arch}/{case}": arch for arch, cases in json.loads(sys.argv[1]).items() for case in cases}
found = {}
for arch in dict.fromkeys(wanted.values()):
    for build in offline.builds(arch):
        if build.key(arch) in wanted:
            stats = offline.compile_build(build, arch)
            found[build.key(arch)] = stats.as_dict() | {"problems": offline.problems(build, stats, arch)}
print(json.dumps(found))
"""


def compile_builds(keys: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Compiles the named builds of each architecture; returns their statistics and problems."""
    found: dict[str, dict[str, Any]] = run_compiler(["-c", _COMPILE, json.dumps(keys)])
    assert len(found) == sum(map(len, keys.values()))
    return found


@pytest.mark.slow
def test_attention_and_fc1_keep_their_bars() -> None:
    """On sm_90 with N = 197, D = 64, and fc1 with GELU: no spills, at most 184 registers, wgmma and TMA in and out."""
    row, fc1 = "attention_fwd_row/bf16 N197 D64 B256 tma", "matmul_layer_norm/half 128x256x64 TMA gelu"
    found = compile_builds({"sm_90": (row, fc1)})
    for build in found.values():
        assert build["problems"] == []
        assert build["spill_loads"] == build["spill_stores"] == 0
        assert build["registers"] <= 184
        assert build["hgmma"] and build["tma_loads"] and build["tma_stores"]
    assert found[f"sm_90/{row}"]["shared_bytes"] <= 64 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_kernels_of_small_batches_start_early(arch: str) -> None:
    """Their machine code waits for the previous launch and lets the next one start."""
    matmul = "half 64x64x64 TMA" if arch == "sm_90" else "half 64x64x64 pointers"
    keys = (f"matmul_layer_norm/{matmul} gelu", f"matmul_residual/{matmul} 5 parts", "finish_residual/bf16")
    found = compile_builds({arch: keys})
    assert [build["grid_waits"] for build in found.values()] == [1] * 3
    assert not {key: build["problems"] for key, build in found.items() if build["problems"]}


@pytest.mark.slow
@pytest.mark.parametrize("arch", offline.ARCHS)
def test_core_builds(arch: str) -> None:
    """No build spills, serialises wgmma or became worse than the baseline; the instructions are the expected ones."""
    code = (
        "import json; from vit_fast.commands.kernels import collect\n"
        f"print(json.dumps(collect([{arch!r}], core=True, update_baseline=False)))"
    )
    report = run_compiler(["-c", code])
    rows = report["builds"]
    assert {row["arch"] for row in rows} == {arch}
    assert not [f"{row['kernel']} {row['case']}: {row['problems']}" for row in rows if row["problems"]]

    eight_bit = [row for row in rows if row["case"].startswith("fp8")]
    for row in eight_bit:
        assert row["case"].startswith("fp8 128x256x128 TMA")
        assert row["e4m3"] and row["tma_loads"] and row["tma_stores"]
    if arch == "sm_90":
        assert {row["kernel"] for row in eight_bit} == {"matmul_layer_norm", "matmul_residual"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"registers": 177}, "registers grew"),
        ({"instructions": 1101}, "instructions grew"),
        ({"wgmma_waits": 7}, "wgmma_waits grew from 6 to 7"),
        ({"hgmma": 0}, "HGMMA"),
        ({"tma_loads": 0}, "TMA loads"),
        ({"tma_stores": 0}, "TMA stores"),
    ],
)
def test_what_became_worse_is_found(change: dict[str, int], word: str, tmp_path: Path) -> None:
    baseline.write_baseline({"a": STATS}, tmp_path / "baseline.json")
    before = baseline.read_baseline(tmp_path / "baseline.json")
    assert baseline.is_comparable(before)
    assert baseline.regressions(before, "a", replace(STATS, registers=176, instructions=1100)) == []
    (problem,) = baseline.regressions(before, "a", replace(STATS, **change))
    assert word in problem
    assert "not in the baseline" in baseline.regressions(before, "b", STATS)[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spill_loads": 2}, "spills: 2 loads"),
        ({"wgmma_waits": 25}, "wgmma is serialized: 25 waits, 6 in PTX"),
        ({"hgmma": 0}, "no HGMMA"),
        ({"grid_waits": 0}, "no ACQBULK"),
        ({"grid_starts": 0}, "no PREEXIT"),
        ({"early_accesses": 2}, "2 accesses to global memory before ACQBULK"),
        ({"shared_bytes": 300_000}, "shared memory"),
        ({"ctas_per_sm": 0}, "does not fit"),
    ],
)
def test_what_must_not_be_shipped_is_found(change: dict[str, int], word: str) -> None:
    builds = (build for build in offline.builds("sm_90") if "HGMMA" in build.needs)
    build = next(build for build in builds if build.launch.constants.get("DEPENDENT"))
    assert offline.problems(build, replace(STATS), "sm_90") == []
    (problem,) = offline.problems(build, replace(STATS, **change), "sm_90")
    assert word in problem


def test_an_access_before_the_wait_for_the_previous_launch_is_counted() -> None:
    lines = ["CCTL.E.PF2 [R8]", "ACQBULK", "PREEXIT", "@!P0 LDG.E R2, desc[UR4][R2.64]", "STG.E desc[UR4][R4.64], R2"]
    for first, count in ((0, 0), (3, 1)):
        order = [lines[first], *lines[:first], *lines[first + 1 :]]
        sass = "".join(f"        /*{16 * i:04x}*/   {line} ;\n" for i, line in enumerate(order))
        assert offline.early_accesses(sass) == count


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="sm_90"):
        list(offline.builds("sm_75"))


def test_no_build_of_the_baseline_spills_or_waits_for_every_wgmma() -> None:
    """The committed baseline contains the recorded builds and no others."""
    recorded = baseline.read_baseline()["builds"]
    builds = {key: counts for key, counts in recorded.items() if key.startswith(offline.ARCHS)}  # of this triton
    assert {key.partition("/")[0] for key in recorded} <= {*offline.ARCHS, "sm_103"}
    both = ((arch, build) for arch in offline.ARCHS for build in offline.builds(arch))
    assert builds.keys() == {build.key(arch) for arch, build in both if baseline.is_recorded(build, arch)}
    assert not {key: counts["spills"] for key, counts in builds.items() if counts["spills"]}
    # two instructions may wait once each without being serialised; `problems` compares with PTX
    waits = [counts for counts in builds.values() if counts["hgmma"] > 2]
    assert not [counts for counts in waits if not 0 < counts["wgmma_waits"] < counts["hgmma"]]


def test_builds_that_no_longer_exist_leave_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, build = tmp_path / "baseline.json", next(offline.builds("sm_90"))
    monkeypatch.setattr(baseline, "builds", lambda arch: [build] if arch == "sm_90" else [])
    baseline.write_baseline({build.key("sm_90"): STATS, "sm_90/removed/bf16": STATS}, path)
    baseline.write_baseline({"sm_90/new/bf16": STATS}, path)
    assert baseline.read_baseline(path)["builds"].keys() == {build.key("sm_90"), "sm_90/new/bf16"}


# What left to itself, or with the tiles of its neighbours, moved registers to memory and back.
_ONCE_SPILLED = {
    "sm_80": ("vector_grad of a block/fp32", "vector_grad before a residual/fp32"),
    "sm_89": (
        "attention_varlen_dkdv/tf32 N257 D80 B256 tma packed",
        "attention_varlen_dq/tf32 N257 D80 B256 tma masked",
        "attention_varlen_fwd/bf16 N64 D128 B256 tma packed",
    ),
    "sm_100": (
        "finish_residual/bf16",
        "matmul_layer_norm/half 64x64x64 pointers gelu",
        "matmul_layer_norm/half 128x128x64 TMA gelu to e4m3",
        "matmul_activation_grad/half 64x64x64 TMA gelu with a factor",
        "matmul_activation_grad/half 128x128x64 TMA gelu_tanh",
        "matmul_gated_grad/half 128x64x64 TMA silu of normalised rows",
        "qk_norm_rope_grad/fp32 layer_norm, rope D64",
    ),
}


@pytest.mark.slow
def test_what_spilled_once_does_not_again() -> None:
    found = compile_builds(_ONCE_SPILLED)
    assert not {key: row["problems"] for key, row in found.items() if row["problems"]}


def test_measured_configurations_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_fast.kernels.attention import attention_policy

    problem = Problem("sm_90", 132, "half", 64, 577, 577, batch_heads=512, access="tma")
    measured = {"scheme": "looped", "block_m": 128, "block_n": 128, "num_warps": 8, "tma": True}
    table = {"sm_90": {problem.shape_class: {"forward": measured}}}
    monkeypatch.setattr(attention_policy, "_table", lambda: table)
    assert forward_config(problem) == attention_policy.ForwardConfig(**measured, dependent=True)
    assert forward_config(replace(problem, arch="sm_100")).block_n == 64
