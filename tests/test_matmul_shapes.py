"""Tiles of matmuls: the choices of the policy, and that the tile of every size fits its architecture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from children import environment, run_python
from kernel_support import DEVICE
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.device import REFERENCE_GPU, Gpu
from vit_fast.kernels.inspect import offline, static_checks
from vit_fast.kernels.launch import Launch
from vit_fast.kernels.linear import linear
from vit_fast.kernels.linear.weight_products import weight_products_launch
from vit_fast.kernels.matmul.matmul_launch import EPILOGUES as ALL_EPILOGUES
from vit_fast.kernels.matmul.matmul_launch import MatmulConfig, Operands, fits_tma, matmul_launch
from vit_fast.kernels.matmul.matmul_policy import NORMED_HEADS, Problem, best, best_head, config_table
from vit_fast.kernels.row_parts import row_parts

SIZES = (1, 2, 15, 16, 17, 768)
# Those that take any size: N of the others is a multiple of the head size, or even.
EPILOGUES = ("layer_norm", "residual", "activation_grad", "layer_norm_grad", "partial")
HALF = torch.bfloat16
PRODUCTS = "weight products"  # in place of an epilogue: K is the number of rows
# Rows whose length is no multiple of 8 are loaded element by element, with more addresses than registers.
UNALIGNED_SPILLS = 350
Case = tuple[str, str, int, int, int]  # architecture, epilogue, M, N, K


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def operands(epilogue: str, M: int, N: int, K: int) -> Operands:
    """Everything that the epilogue takes; the row and column parts are large enough for any tile."""
    full, row, column = meta(M, N, dtype=HALF), meta(M), meta(N)
    a, b, weight = meta(M, K, dtype=HALF), meta(K, N, dtype=HALF), meta(N, K, dtype=HALF)
    if epilogue == "partial":
        return Operands(a, weight, meta(1, M, N), b_is_nk=True)
    if epilogue == "layer_norm":
        given = {"mean": row, "rstd": row, "row_part": meta(M, 2, row_parts(K)), "bias": column, "weight_sum": column}
        return Operands(a, weight, full, b_is_nk=True, z=full, **given)
    if epilogue == "residual":
        part = meta(M, 2, row_parts(N))
        return Operands(a, weight, full, b_is_nk=True, residual=full, bias=column, scale=column, out_part=part)
    if epilogue == "activation_grad":
        parts = {"row_part": meta(M, N // 16 + 4), "column_part": meta(M // 16 + 4, 2, N)}
        return Operands(a, b, full, z=full, h=full, mean=row, rstd=row, bias=column, **parts)
    return Operands(a, b, full, x=full, residual=full, mean=row, rstd=row, row_part=meta(M, 48))


def launch(arch: str, epilogue: str, M: int, N: int, K: int) -> Launch:
    """Returns the launch for an architecture."""
    if epilogue == PRODUCTS:
        pair = meta(K, M, dtype=HALF), meta(K, N, dtype=HALF)
        (config,) = config_table(arch, "half", "weight_products", fits_tma(pair))
        return weight_products_launch([pair], [meta(1, M, N)], config)
    given, gpu = operands(epilogue, M, N, K), Gpu(arch, REFERENCE_GPU.sm_count)
    problem = Problem(gpu, "half", epilogue, fits_tma(given.tiled()), given.sizes, 2, 17, 0, 2**31, 0)
    activation = "gelu" if epilogue in ("layer_norm", "activation_grad") else "identity"
    return matmul_launch(given, epilogue=epilogue, config=best(problem)[0], activation=activation)


def grid(arch: str) -> list[Case]:
    """Yields one size for each binary that the sizes need."""
    found: dict[str, Case] = {}
    for case in itertools.product((arch,), (*EPILOGUES, PRODUCTS), SIZES, SIZES, SIZES):
        found.setdefault(offline.specialisation(launch(*case)), case)
    return list(found.values())


def compiled(cases: Sequence[Case]) -> list[tuple[int, list[str]]]:
    """Returns spills and problems of each case."""
    found = []
    for arch, *case in cases:
        build = offline.Build("matmul", str(case), launch(arch, *case))
        stats = static_checks.compile_build(build, arch)
        found.append((static_checks.spills(stats), static_checks.problems(build, stats, arch)))
    return found


def binaries(cases: Sequence[Case]) -> list[str]:
    """Returns the compiler's input for each case."""
    return [offline.specialisation(launch(*case)) for case in cases]


_CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_matmul_shapes
function, *arguments = json.loads(sys.argv[2])
print(json.dumps(getattr(test_matmul_shapes, function)(*arguments)))
"""


def in_compiler(function: str, *arguments: Any) -> Any:
    """Returns what a function of this module returns in a process that compiles kernels."""
    command = ["-c", _CHILD, str(Path(__file__).parent), json.dumps([function, *arguments])]
    return json.loads(run_python(command, environment()))


@pytest.mark.slow
def test_a_single_row_in_training_fits_everywhere() -> None:
    """K of a weight gradient is the number of rows: 1 in attention pooling at batch 1. sm_90 was asked for 272 KiB."""
    found = in_compiler("compiled", [(arch, PRODUCTS, 3072, 768, 1) for arch in offline.ARCHS])
    assert found == [[0, []]] * len(offline.ARCHS)


@pytest.mark.slow(minutes=True)
@pytest.mark.parametrize("arch", offline.ARCHS)
def test_every_size_fits(arch: str) -> None:
    cases = in_compiler("grid", arch)
    for case, (spills, problems) in zip(cases, in_compiler("compiled", cases), strict=True):
        _, epilogue, M, N, K = case
        aligned = all(size % 8 == 0 for size in ((M, N) if epilogue == PRODUCTS else (N, K)))
        assert spills <= (0 if aligned else UNALIGNED_SPILLS), case
        assert not [problem for problem in problems if not problem.startswith("spills")], case


@pytest.mark.slow
def test_sizes_are_not_compiled_anew() -> None:
    """Every batch size is one binary, and so is every number of rows behind a weight gradient."""
    cases = [("sm_90", epilogue, M, 768, 768) for epilogue in EPILOGUES for M in (50_432, 50_433)]
    cases += [("sm_90", PRODUCTS, 768, 768, K) for K in (1, 17, 50_432)]
    assert len(set(in_compiler("binaries", cases))) == len(EPILOGUES) + 1


# ---- choices of the policy ----


def problem(arch: str, sizes: tuple[int, int, int], kind: str = "half", tma: bool = True) -> Problem:
    gpu, itemsize = Gpu(arch, REFERENCE_GPU.sm_count), 2 if kind == "half" else 4
    return Problem(gpu, kind, "residual", tma, sizes, itemsize, 17, narrowest=0, largest=2**31, head=0)


@pytest.mark.parametrize("arch", offline.ARCHS)
def test_tables(arch: str) -> None:
    """Even an empty batch, which launches nothing, has a configuration."""
    for kind, tma in itertools.product(("half", "tf32"), (True, False)):
        for epilogue in (*ALL_EPILOGUES, "weight_products"):
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
