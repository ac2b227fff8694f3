"""What the compiler makes of the fc1 matmul for sm_90, without a GPU: the bars that its epilogue has to keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels import matmul_policy, offline
from vit_fast.kernels.matmul_launch import EPILOGUES, MatmulConfig
from vit_fast.kernels.sass import count_loops

_COMPILE = """
import json
from vit_fast.kernels import offline
wanted = {"gelu", "no activation"}
found = {}
for build in offline.builds("sm_90"):
    if build.kernel == "matmul_layer_norm" and build.case.startswith("half 128x256x64 TMA"):
        what = build.case.removeprefix("half 128x256x64 TMA ")
        if what in wanted:
            compiled = offline.compile_launch(build.launch, "sm_90")
            stats = offline.read_stats(compiled, "sm_90", 0.0)
            found[what] = stats.as_dict() | {"sass": offline.disassemble(compiled)[1]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fc1() -> dict[str, Any]:
    """Exact GELU and no activation, 128 x 256 x 64, compiled in a process that is not the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _epilogue_issue_slots(row: dict[str, Any]) -> int:
    """Issue slots of a scheduler a tile in the epilogue: its share of the warps runs it once."""
    loops = count_loops(row["sass"])
    assert 0 < loops.step < 400 < loops.tile, "the loop and the epilogue in it were not recognised"
    return loops.tile * row["warps"] // 4


def test_fc1_keeps_its_bars(fc1: dict[str, Any]) -> None:
    row = fc1["gelu"]
    assert row["spill_loads"] == row["spill_stores"] == 0
    assert row["registers"] <= 184
    assert row["hgmma"] and row["tma_loads"] and row["tma_stores"]
    assert _epilogue_issue_slots(row) < 5500


def test_exact_gelu_costs_less_than_three_thousand_slots(fc1: dict[str, Any]) -> None:
    """Of a tile's 12,288 tensor-core cycles at K = 768; erf took 8,000."""
    gelu, plain = (_epilogue_issue_slots(fc1[what]) for what in ("gelu", "no activation"))
    assert 1000 < gelu - plain < 3000


@pytest.mark.parametrize("arch", offline.ARCHS)
@pytest.mark.parametrize("kind", ["half", "tf32", "ieee"])
@pytest.mark.parametrize("tma", [True, False])
def test_every_architecture_has_tiles_for_everything(arch: str, kind: str, tma: bool) -> None:
    for epilogue in (*EPILOGUES, "weight_products"):
        table = matmul_policy.config_table(arch, kind, epilogue, tma)
        assert bool(table) == (epilogue != "qk_norm" or kind == "half")  # of half precision alone
        assert tma or not any(config.tma for config in table)
        areas = [config.block_m * config.block_n for config in table]
        assert areas == sorted(areas, reverse=True)


def test_no_descriptors_before_hopper() -> None:
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120"):
        assert not any(c.tma for c in matmul_policy.config_table(arch, "half", "layer_norm", True))


def test_pieces_cover_the_result() -> None:
    config = MatmulConfig(128, 256, 64, sub_tiles=4)
    assert config.piece == 64
    assert config.row_parts(768) * config.piece == 768
    assert config.row_parts(769) * config.piece >= 769
    assert config.column_parts(129) == 2
    assert config.tiles(129, 257) == 4


@pytest.mark.parametrize("arch", offline.ARCHS)
@pytest.mark.parametrize("tma", [True, False])
def test_a_piece_of_a_tile_can_be_a_head_of_each_size(arch: str, tma: bool) -> None:
    pieces = {config.piece for config in matmul_policy.config_table(arch, "half", "qk_norm", tma)}
    assert pieces == set(matmul_policy.NORMED_HEADS)
