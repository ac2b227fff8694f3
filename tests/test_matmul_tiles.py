"""Tables of tiles, and the tiles and waves of a block's matmuls: `matmul_tiles.txt`.

After a change of the policy, run `python tests/test_matmul_tiles.py` to rewrite the table, and review the difference.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from children import environment, run_python
from kernel_support import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.device import REFERENCE_GPU, Gpu
from vit_fast.kernels.inspect import offline
from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul import matmul_policy
from vit_fast.kernels.matmul.matmul_launch import EPILOGUES, MatmulConfig, Operands
from vit_fast.kernels.matmul.matmul_policy import NORMED_HEADS, Problem, best, config_table, predicted_cycles
from vit_fast.kernels.row_parts import row_parts

PATH = Path(__file__).with_name("matmul_tiles.txt")
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
WIDTHS = {"ViT-B": 768, "ViT-L": 1024}
BATCHES = (1, 8, 64, 256)
LAYERS = ("qkv", "proj", "fc1", "fc2")
TOKENS = 197
every_arch = pytest.mark.parametrize("arch", offline.ARCHS)

TITLE = """\
bf16, patches of 16 at 224 pixels: tile, parts of K where it is cut, and waves, tiles a multiprocessor gets on average.
A part of a wave takes as long as a whole one; after a "+" the rows that would make it have a launch of their own.
Written by `python tests/test_matmul_tiles.py`.
"""


def chosen(arch: str, layer: str, M: int, C: int) -> list[tuple[MatmulConfig, int, int]]:
    """Configuration, parts of K and tiles of each launch of a layer, as the launchers ask for them in inference."""
    N, K = {"qkv": (3 * C, C), "proj": (C, C), "fc1": (4 * C, C), "fc2": (C, 4 * C)}[layer]
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((M, K), (N, K), (M, N)))
    with (
        mock.patch.object(matmul_policy, "gpu_of", lambda device: offline.gpu(arch)),
        mock.patch.object(matmul_policy, "is_interpreted", lambda: False),
    ):
        if layer not in ("proj", "fc2"):
            activation = "gelu" if layer == "fc1" else "identity"
            config = matmul_policy.matmul_config(Operands(a, b, out, b_is_nk=True), "layer_norm", activation)
            return [(config, 1, config.tiles(M, N))]
        statistics = torch.empty(M, 2, row_parts(N), device="meta")
        operands = Operands(a, b, out, b_is_nk=True, residual=out, out_part=statistics)
        first = matmul_policy.rows_in_whole_waves(operands)
        found = []
        for rows in (slice(0, first), slice(first, M)) if first < M else (slice(0, M),):
            config, parts = matmul_policy.residual_config(operands.of_rows(rows))
            found.append((config, parts, config.tiles(rows.stop - rows.start, N) * parts))
    return found


def table() -> str:
    lines = [TITLE]
    for arch in ARCHS:
        lines.append(f"{arch}, {offline.gpu(arch).sm_count} multiprocessors")
        for (model, width), batch in itertools.product(WIDTHS.items(), BATCHES):
            line = f"  {model} {batch:4d}"
            for layer in LAYERS:
                words = []
                for config, parts, tiles in chosen(arch, layer, TOKENS * batch, width):
                    tile = f"{config.block_m}x{config.block_n}" + (f"/{parts}" if parts > 1 else "")
                    words.append(f"{tile:9s} {tiles / offline.gpu(arch).sm_count:6.2f}")
                line += f"   {layer} {' + '.join(words)}"
            lines.append(line)
    return "\n".join(lines) + "\n"


def test_the_chosen_tiles_are_those_of_the_table() -> None:
    assert table() == PATH.read_text()


_TILES = """
import json, sys
from vit_fast.kernels.inspect import static_checks
found = {}
for arch in sys.argv[1:]:
    builds = [build.launch.constants for build in static_checks.builds(arch) if build.case.startswith("bf16")]
    matmuls = [constants for constants in builds if "EPILOGUE" in constants]
    found[arch] = [[c["EPILOGUE"], c["ACTIVATION"], c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"]] for c in matmuls]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_chosen_tile_is_built_offline() -> None:
    built = json.loads(run_python(["-c", _TILES, *ARCHS], environment()))
    for arch, width, batch, layer in itertools.product(ARCHS, WIDTHS.values(), BATCHES, LAYERS):
        for config, parts, _ in chosen(arch, layer, TOKENS * batch, width):
            epilogue = "layer_norm" if layer in ("qkv", "fc1") else "residual" if parts == 1 else "partial"
            activation = "gelu" if layer == "fc1" else "identity"
            assert [epilogue, activation, config.block_m, config.block_n, config.block_k] in built[arch]


@every_arch
def test_tables(arch: str) -> None:
    for kind, tma, epilogue in itertools.product(("half", "tf32"), (True, False), (*EPILOGUES, "weight_products")):
        table = config_table(arch, kind, epilogue, tma)
        assert bool(table) == (epilogue != "qk_norm" or kind == "half")  # of half precision alone
        assert not any(config.tma for config in table) or (tma and arch in ("sm_90", "sm_100", "sm_103"))
        areas = [config.block_m * config.block_n for config in table]
        assert areas == sorted(areas, reverse=True)
        if table and epilogue == "qk_norm":
            assert {config.sub_tile_width for config in table} == set(NORMED_HEADS)


def problem(arch: str, sizes: tuple[int, int, int], kind: str = "half", tma: bool = True) -> Problem:
    gpu, itemsize = Gpu(arch, REFERENCE_GPU.sm_count), 2 if kind == "half" else 4
    return Problem(gpu, kind, "residual", tma, sizes, itemsize, 17, narrowest=0, largest=2**31, head=0)


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_120"])
def test_few_rows_are_cut_along_k(arch: str) -> None:
    """fc2 of ViT-B at batch 1 has 48 of the smallest tiles, a third of the multiprocessors."""
    config, splits = best(problem(arch, (197, 768, 3072)), 8)
    assert config in config_table(arch, "half", "partial", True)
    assert config.tiles(197, 768) * splits > 80


@every_arch
def test_no_rows_have_a_configuration(arch: str) -> None:
    """An empty batch launches nothing, but is asked for its tiles all the same."""
    for kind, tma in itertools.product(("half", "tf32"), (True, False)):
        config, splits = best(problem(arch, (0, 768, 768), kind, tma), 8)
        assert config in config_table(arch, kind, "residual", tma)
        assert splits == 1


def test_a_part_of_a_wave_gets_a_launch_of_its_own() -> None:
    """fc2 of ViT-B at batch 64 on sm_90 has 2.25 waves of the widest tiles, which take as long as 3."""
    (wide, whole, tiles), (_, parts, rest) = chosen("sm_90", "fc2", TOKENS * 64, 768)
    assert (wide.block_m, wide.block_n, whole, tiles) == (128, 256, 1, 2 * 132)
    assert parts > 1 and rest <= 132
    assert len(chosen("sm_90", "fc2", TOKENS * 256, 768)) == 1  # 8.95 waves are as good as 9


def test_the_model_orders_what_is_certain() -> None:
    config, gpu = MatmulConfig(128, 128, 64), Gpu("sm_90", 100)
    base = predicted_cycles(config, (1280, 1280, 768), 2, gpu, 7)
    assert predicted_cycles(config, (1281, 1280, 768), 2, gpu, 7) > base  # one tile more than multiprocessors
    assert predicted_cycles(config, (1280, 1280, 1536), 2, gpu, 7) > base
    assert predicted_cycles(config, (1280, 1280, 768), 4, gpu, 7) > base
    assert predicted_cycles(config, (1280, 1280, 768), 2, gpu, 17) > base
    assert predicted_cycles(config, (1280, 1280, 768), 2, Gpu("sm_90", 50), 7) > base


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_two_launches_are_those_of_one(
    dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def normal(*shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)

    h, weight, residual = normal(150, 64, seed=0), normal(80, 64, seed=1), normal(150, 80, seed=2)
    vectors, scale = (normal(80, seed=3), normal(80, seed=4)), torch.full((80,), 0.125, device=DEVICE)
    out8 = torch.empty(2, 150, 80, dtype=torch.float8_e4m3fn, device=DEVICE)
    whole = linear.linear_residual(h, weight, *vectors, residual, True, out8=out8[0], out_scale=scale)
    monkeypatch.setattr(linear, "rows_in_whole_waves", lambda operands: 128)
    config_of, calls = linear.residual_config, []

    def config(operands: Operands) -> tuple[MatmulConfig, int]:
        calls.append(operands.sizes[0])
        return config_of(operands)[0], splits if operands.sizes[0] < 128 else 1

    monkeypatch.setattr(linear, "residual_config", config)
    cut = linear.linear_residual(h, weight, *vectors, residual, True, out8=out8[1], out_scale=scale)
    assert calls == [128, 22]
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out8[0].float(), out8[1].float(), rtol=0.13, atol=0.01)


if __name__ == "__main__":
    PATH.write_text(table())
