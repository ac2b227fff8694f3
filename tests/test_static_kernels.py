"""Compiled kernels: no spills, no serialized wgmma, the expected instructions; estimated device time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from children import environment, run_python

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.commands.block_times import ESTIMATED, device_time_text
from vit_fast.kernels.inspect import attention_builds, offline, static_checks
from vit_fast.kernels.launch import Launch

STATS = {
    "registers": 160, "stack_bytes": 0, "spill_loads": 0, "spill_stores": 0, "shared_bytes": 60_000, "ctas_per_sm": 3,
    "warps": 4, "instructions": 1000, "hgmma": 25, "hmma": 0, "tcgen05": 0, "e4m3": 0, "tma_loads": 7, "tma_stores": 1,
    "wgmma_waits": 6, "wgmma_waits_in_ptx": 6, "grid_waits": 1, "grid_starts": 1, "early_accesses": 0,
    "atomics": 0,
}  # fmt: skip

BUILD = offline.Build("kernel", "case", Launch(None, 1, {}, {"DEPENDENT": True}), needs=("hgmma",))


def run_compiler(*command: str) -> Any:
    """Runs Python without Triton's interpreter and returns the JSON that it prints."""
    return json.loads(run_python([*command], environment()))


_CORE = """
import json, sys
from vit_fast.commands.kernels import collect
print(json.dumps(collect([sys.argv[1]], core=True, update_baseline=False)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", offline.ARCHS)
def test_core_builds(arch: str) -> None:
    """No build spills, serializes wgmma, has atomics, lacks expected instructions or is worse than the baseline."""
    rows = {f"{row['kernel']}/{row['case']}": row for row in run_compiler("-c", _CORE, arch)["builds"]}
    assert rows and not {name: row["problems"] for name, row in rows.items() if row["problems"]}


_COMPILE = """
import json, sys
from vit_fast.kernels.inspect import static_checks
wanted, found = json.loads(sys.argv[1]), {}
for arch, cases in wanted.items():
    for build in static_checks.builds(arch):
        if f"{build.kernel}/{build.case}" in cases:
            stats = static_checks.compile_stats(build.launch, arch)
            found[build.key(arch)] = stats | {"problems": static_checks.problems(build, stats, arch)}
print(json.dumps(found))
"""
# Small batches, whose kernels overlap with the previous and the next launch, and kernels that once spilled.
_OTHERS = {
    "sm_80": ("vector_grad/fp32 gelu, training", "attention_bias_bwd_tile/bf16 N256 D128 B8 bias"),
    "sm_89": (
        "attention_bwd_dkdv/tf32 N257 D80 B256 tma packed",
        "attention_bwd_dq/tf32 N257 D80 B256 tma masked",
        "attention_fwd_looped/bf16 N64 D128 B256 tma packed",
    ),
    "sm_90": ("matmul_layer_norm/bf16 gelu 64x64x64 TMA gelu", "matmul_partial/bf16 gelu 64x64x64 TMA"),
    "sm_100": (
        "finish_residual/bf16 gelu",
        "matmul_layer_norm/bf16 gelu 64x64x64 pointers gelu",
        "matmul_layer_norm/fp8 proj and fc2, gelu 128x128x64 TMA",
        "matmul_activation_grad/fp16 gelu alone, training 128x128x64 TMA gelu",
        "matmul_activation_grad/bf16 gelu_tanh, training 128x128x64 TMA gelu_tanh",
        "matmul_gated_grad/autocast gated silu, training 128x64x64 TMA silu",
        "qk_norm_rope_grad/fp32 layer_norm, rope D64, training",
    ),
    "sm_120": (
        "matmul_layer_norm/bf16 gelu 64x64x64 pointers gelu",
        "matmul_partial/bf16 gelu 64x64x64 pointers",
        "attention_bias_bwd_dkdv/tf32 N144 D32 B2048 bias masks",
    ),
}


@pytest.mark.slow
def test_other_builds() -> None:
    found = run_compiler("-c", _COMPILE, json.dumps(_OTHERS))
    assert len(found) == sum(map(len, _OTHERS.values())), found.keys()
    assert not {key: row["problems"] for key, row in found.items() if row["problems"]}
    assert {
        row["grid_waits"] for key, row in found.items() if "matmul" in key and key.startswith(("sm_90", "sm_120"))
    } == {1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"registers": 177}, ["registers grew"]),
        ({"instructions": 1101}, ["instructions grew"]),
        ({"wgmma_waits": 7}, ["wgmma is serialized: 7 waits in SASS, 6 in PTX", "wgmma_waits grew from 6 to 7"]),
        ({"hgmma": 0}, ["no hgmma", "no hgmma, baseline has"]),
        ({"tma_stores": 0}, ["no tma_stores, baseline has"]),
        ({"spill_loads": 2, "spill_stores": 19}, ["spills: 2 loads, 19 stores"]),
        ({"grid_waits": 0}, ["no grid_waits"]),
        ({"grid_starts": 0}, ["no grid_starts"]),
        ({"atomics": 3}, ["3 atomic operations on global memory"]),
        ({"early_accesses": 2}, ["2 accesses to global memory before griddepcontrol.wait"]),
        ({"shared_bytes": 300_000}, ["shared memory"]),
        ({"ctas_per_sm": 0}, ["does not fit"]),
    ],
)
def test_regressions_and_problems(change: dict[str, int], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    static_checks.write_baseline({"a": STATS}, path)
    before = static_checks.read_baseline(path)

    def found(**changed: int) -> list[str]:
        stats = STATS | changed
        return static_checks.problems(BUILD, stats, "sm_90") + static_checks.regressions(before, "a", stats)

    assert found(registers=176, instructions=1100) == []
    for problem, word in zip(found(**change), words, strict=True):
        assert word in problem
    assert "not in the baseline" in static_checks.regressions(before, "b", STATS)[0]


@pytest.mark.parametrize("other", [False, True])
def test_few_spills_are_allowed_with_other_versions_of_triton(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_checks, "is_comparable", lambda: not other)
    found = static_checks.problems(BUILD, STATS | {"spill_loads": 10, "spill_stores": 10}, "sm_90")
    assert found == ([] if other else ["spills: 10 loads, 10 stores"])


def test_early_accesses_are_counted() -> None:
    lines = ["CCTL.E.PF2 [R8]", "ACQBULK", "PREEXIT", "@!P0 LDG.E R2, desc[UR4][R2.64]", "STG.E desc[UR4][R4.64], R2"]
    for first, count in ((0, 0), (3, 1)):
        order = [lines[first], *lines[:first], *lines[first + 1 :]]
        sass = "".join(f"        /*{16 * i:04x}*/   {line} ;\n" for i, line in enumerate(order))
        assert static_checks.early_accesses(sass) == count


_KEYS = """
import json
from vit_fast.kernels.inspect import offline, static_checks
keys = [build.key(arch) for arch in offline.ARCHS for build in static_checks.builds(arch, core=arch != "sm_90")]
print(json.dumps(keys))
"""


@pytest.mark.slow
def test_baseline_contains_all_recorded_builds() -> None:
    recorded = static_checks.read_baseline()["builds"]
    builds = {key: counts for key, counts in recorded.items() if key.startswith(offline.ARCHS)}  # of this triton
    assert {key.partition("/")[0] for key in recorded} <= {*offline.ARCHS, "sm_103"}
    assert builds.keys() == set(run_compiler("-c", _KEYS))
    assert not {key: counts["spills"] for key, counts in builds.items() if counts["spills"]}
    # two instructions may wait once each without being serialized; `problems` compares with PTX
    waits = [counts for counts in builds.values() if counts["hgmma"] > 2]
    assert not [counts for counts in waits if not 0 < counts["wgmma_waits"] < counts["hgmma"]]


@pytest.mark.slow
def test_estimated_device_time_of_a_block() -> None:
    command = ["-m", "vit_fast.cli", "kernels", "--model", "vit_base_patch16_224", "--batch-sizes", "256"]
    report = run_compiler(*command, "--arch", "sm_90", "--json")
    text, rows = device_time_text(report), report["launches"]
    assert ESTIMATED in text and all(row["kernel"] in text for row in (*rows, *report["training"]["launches"]))
    assert all(row["floor_us"] > 0 and row["waves"] > 0 and row["registers"] for row in rows)
    fc1 = next(row for row in rows if row["kernel"] == "matmul, layer_norm, gelu")
    assert fc1["MB"] == pytest.approx((50_432 * (768 + 3072) + 3072 * 768) * 2 / 1e6, rel=0.02)
    assert fc1["GFLOP"] == pytest.approx(2 * 50_432 * 768 * 3072 / 1e9, rel=1e-3)
    attention = next(row for row in rows if row["kernel"].startswith("attention"))
    assert attention["GFLOP"] == pytest.approx(4 * 50_432 * 197 * 768 / 1e9, rel=1e-3)


@pytest.mark.slow
def test_estimated_device_time_of_attention_with_a_bias() -> None:
    """Shifted windows of Swin-B: q, k, v and o are moved once; PyTorch also makes a mask [B, H, N, N]."""
    word, batch = "attention:49x4x32:masks64", 8192
    report = run_compiler("-m", "vit_fast.cli", "kernels", "--model", word, "--batch-sizes", str(batch), "--json")
    (forward,), (eager, compiled) = report["launches"], report["torch"]
    tokens, mask = batch * 49 * 128 * 2 * 4 / 1e6, batch * 49 * 49 * 2 / 1e6
    assert forward["GFLOP"] == eager["GFLOP"] == pytest.approx(4 * batch * 4 * 49 * 49 * 32 / 1e9, rel=1e-3)
    assert forward["MB"] == pytest.approx(tokens, rel=0.02)
    assert compiled["kernel"] == "PyTorch, compile, 2 launches"
    assert compiled["MB"] == pytest.approx(tokens + 2 * 4 * mask, rel=0.02)
    assert eager["MB"] == pytest.approx(tokens + (2 + 2 * 4) * mask, rel=0.02)
    text, training = device_time_text(report), report["training"]
    assert ESTIMATED in text and all(row["kernel"] in text for row in training["launches"] + training["torch"])
    assert training["launches"][1]["MB"] > 1.7 * tokens  # reads q, k, v, do, and writes dq, dk, dv


def test_the_gradient_of_a_bias_alone_has_no_other_outputs() -> None:
    """The device model would count their bytes."""
    *_, build = attention_builds.biased_builds("sm_90", 64, 197, 12, 64, 0, 0)
    args = build.launch.args
    assert args["parts_ptr"] is not None and [args[name] for name in ("dq", "dk", "dv")] == [None] * 3
