"""Tiles of the matmuls: every architecture has some for every epilogue, and they cover the result."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.inspect import offline
from vit_fast.kernels.matmul import matmul_policy
from vit_fast.kernels.matmul.matmul_launch import EPILOGUES, MatmulConfig


@pytest.mark.parametrize("arch", offline.ARCHS)
@pytest.mark.parametrize("kind", ["half", "tf32"])
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
