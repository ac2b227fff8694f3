"""The tiles that a block's matmuls run with, as a table to judge: `matmul_tiles.txt`.

To write it again after a change of the policy: `python tests/test_matmul_tiles.py`, and read the difference.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels import baseline, matmul_policy
from vit_fast.kernels.device import Gpu
from vit_fast.kernels.matmul_launch import MatmulConfig, Operands
from vit_fast.kernels.row_parts import row_parts
from vit_fast.kernels.stand_in_driver import SM_COUNTS

PATH = Path(__file__).with_name("matmul_tiles.txt")
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
WIDTHS = {"ViT-B": 768, "ViT-L": 1024}
BATCHES = (1, 8, 64, 256)
TOKENS = 197
TITLE = """\
bf16, patches of 16 at 224 pixels: tile, parts of K where it is cut, and waves, tiles a multiprocessor gets on average.
A part of a wave takes as long as a whole one. Written by `python tests/test_matmul_tiles.py`.
"""


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def chosen(gpu: Gpu, layer: str, M: int, C: int) -> tuple[MatmulConfig, int, int]:
    """Configuration, parts of K and tiles of a layer, as the launchers ask for them in inference."""
    N, K = {"qkv": (3 * C, C), "proj": (C, C), "fc1": (4 * C, C), "fc2": (C, 4 * C)}[layer]
    a, b, out = (_meta(*shape, dtype=torch.bfloat16) for shape in ((M, K), (N, K), (M, N)))
    with (
        mock.patch.object(matmul_policy, "gpu_of", lambda device: gpu),
        mock.patch.object(matmul_policy, "is_interpreted", lambda: False),
    ):
        if layer in ("proj", "fc2"):
            operands = Operands(a, b, out, b_is_nk=True, residual=out, out_part=_meta(M, 2, row_parts(N)))
            config, parts = matmul_policy.residual_config(operands)
        else:
            activation = "gelu" if layer == "fc1" else "identity"
            config = matmul_policy.matmul_config(Operands(a, b, out, b_is_nk=True), "layer_norm", activation)
            parts = 1
    return config, parts, config.tiles(M, N) * parts


def table() -> str:
    lines = [TITLE]
    for arch in ARCHS:
        gpu = Gpu(arch, SM_COUNTS[arch])
        lines.append(f"{arch}, {gpu.sm_count} multiprocessors")
        for model, width in WIDTHS.items():
            for batch in BATCHES:
                line = f"  {model} {batch:4d}"
                for layer in ("qkv", "proj", "fc1", "fc2"):
                    config, parts, tiles = chosen(gpu, layer, TOKENS * batch, width)
                    tile = f"{config.block_m}x{config.block_n}" + (f"/{parts}" if parts > 1 else "")
                    line += f"   {layer} {tile:9s} {tiles / gpu.sm_count:6.2f}"
                lines.append(line)
    return "\n".join(lines) + "\n"


def test_the_chosen_tiles_are_those_of_the_table() -> None:
    assert table() == PATH.read_text()


@pytest.mark.parametrize("arch", ARCHS)
def test_every_chosen_tile_is_built_offline_without_spills(arch: str) -> None:
    builds = baseline.read_baseline()["builds"]
    whole = {"qkv": "no activation", "fc1": "gelu"}
    for width in WIDTHS.values():
        for batch in BATCHES:
            for layer in ("qkv", "proj", "fc1", "fc2"):
                config, parts, _ = chosen(Gpu(arch, SM_COUNTS[arch]), layer, TOKENS * batch, width)
                kernel = "matmul_layer_norm" if layer in whole else "matmul_residual"
                what = "5 parts" if parts > 1 else whole.get(layer, "bias, LayerScale, residual, statistics")
                tile = f"{config.block_m}x{config.block_n}x{config.block_k} {'TMA' if config.tma else 'pointers'}"
                assert builds[f"{arch}/{kernel}/half {tile} {what}"]["spills"] == 0


if __name__ == "__main__":
    PATH.write_text(table())
