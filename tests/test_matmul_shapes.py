"""Tiles of matmuls: the choices of the policy, and that the tile of every size fits its architecture."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from children import environment, run_python
from kernel_support import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.device import REFERENCE_GPU, Gpu
from vit_fast.kernels.inspect import offline
from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul.matmul_launch import EPILOGUES, MatmulConfig, Operands
from vit_fast.kernels.matmul.matmul_policy import NORMED_HEADS, Problem, best, best_head, config_table

SIZES = (2, 15, 16, 17, 768)
# Rows whose length is no multiple of 8 are loaded element by element, with more addresses than registers.
UNALIGNED_SPILLS = 350

_COMPILE = """
import json, sys
import torch
from vit_fast.kernels.inspect import offline, static_checks
from vit_fast.ops import layer_norm_mlp
arch, compiles, shapes = sys.argv[1], sys.argv[2] == "compile", json.loads(sys.argv[3])
builds, found = {}, []
for M, C, F in shapes:
    sizes = (M, C), (C,), (C,), (F, C), (F,), (C, F), (C,)
    tensors = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    with offline.recorded(offline.gpu(arch)) as launches:
        y = layer_norm_mlp(*tensors, backend="triton")
        torch.autograd.grad(y, tensors, torch.empty_like(y))
    for launch in launches:
        if "EPILOGUE" in launch.constants or "BLOCK_P" in launch.constants:
            build = offline.Build("matmul", f"{M} {C} {F}", launch)
            builds.setdefault(offline.specialization(launch), (C % 8 == 0 and F % 8 == 0, build))
for aligned, build in builds.values() if compiles else ():
    stats = static_checks.compile_stats(build.launch, arch)
    spills = stats["spill_loads"] + stats["spill_stores"]
    found.append([build.case, aligned, spills, static_checks.problems(build, stats, arch)])
print(json.dumps([len(builds), found]))
"""


def compiled(arch: str, what: str, shapes: list[tuple[int, int, int]]) -> tuple[int, list[list[object]]]:
    """Returns the number of different matmuls of LayerNorm + MLP in training, and what became of each."""
    number, found = json.loads(run_python(["-c", _COMPILE, arch, what, json.dumps(shapes)], environment()))
    return number, found


@pytest.mark.parametrize(
    ("arch", "shapes"),
    [
        # K of a weight gradient is the number of rows: 1 in attention pooling at batch 1
        *(pytest.param(arch, [(1, 768, 3072)], id=f"{arch}-one row", marks=pytest.mark.slow) for arch in offline.ARCHS),
        *(
            pytest.param(arch, [*itertools.product(SIZES, repeat=3)], id=arch, marks=pytest.mark.slow(minutes=True))
            for arch in offline.ARCHS
        ),
    ],
)
def test_every_size_fits(arch: str, shapes: list[tuple[int, int, int]]) -> None:
    number, found = compiled(arch, "compile", shapes)
    assert number == len(found) >= 4
    for case, aligned, spills, problems in found:
        assert spills <= (0 if aligned else UNALIGNED_SPILLS), case
        assert not [problem for problem in problems if not problem.startswith("spills")], case


@pytest.mark.slow
def test_sizes_are_not_compiled_anew() -> None:
    """Batch sizes share their binaries, also those of the weight gradients, whose K is the number of rows."""
    first, _ = compiled("sm_90", "list", [(50_432, 768, 768)])
    both, _ = compiled("sm_90", "list", [(50_432, 768, 768), (50_433, 768, 768)])
    assert both == first


# ---- choices of the policy ----


def problem(arch: str, sizes: tuple[int, int, int], kind: str = "half", tma: bool = True) -> Problem:
    gpu, itemsize = Gpu(arch, REFERENCE_GPU.sm_count), 2 if kind == "half" else 4
    return Problem(gpu, kind, "residual", tma, sizes, itemsize, 17, narrowest=0, largest=2**31, head=0)


@pytest.mark.parametrize("arch", offline.ARCHS)
def test_tables(arch: str) -> None:
    """Even an empty batch, which launches nothing, has a configuration."""
    for kind, tma in itertools.product(("half", "tf32"), (True, False)):
        for epilogue in (*EPILOGUES, "weight_products"):
            table = config_table(arch, kind, epilogue, tma)
            assert bool(table) == (epilogue != "qk_norm" or kind == "half")  # of half precision alone
            assert not any(config.tma for config in table) or (tma and arch in ("sm_90", "sm_100", "sm_103"))
            if table and epilogue == "qk_norm":
                assert {config.sub_tile_width for config in table} == set(NORMED_HEADS)
        config, splits = best(problem(arch, (0, 768, 768), kind, tma), 8)
        assert config in config_table(arch, kind, "residual", tma) and splits == 1


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_120"])
def test_few_rows_are_cut_along_k(arch: str) -> None:
    """fc2 of ViT-B at batch 1 has 48 of the smallest tiles, a third of the multiprocessors."""
    config, splits = best(problem(arch, (197, 768, 3072)), 8)
    assert config in config_table(arch, "half", "partial", True)
    assert config.tiles(197, 768) * splits > 80


def test_a_part_of_a_wave_gets_a_launch_of_its_own() -> None:
    """fc2 of ViT-B: at batch 64, 2.25 waves of the widest tiles take as long as 3; at 256, 8.95 are as good as 9."""
    few, many = 64 * 197, 256 * 197
    assert 0 < best_head(problem("sm_90", (few, 768, 3072))) < few
    assert best_head(problem("sm_90", (many, 768, 3072))) == many


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
