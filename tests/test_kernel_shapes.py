"""The policies choose tiles that fit every architecture, for every size; tuning finds the fastest correct tiles."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from children import environment, run_python
from kernel_support import DEVICE, HAS_GPU

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.cli import main
from vit_fast.kernels.attention import attention_policy
from vit_fast.kernels.attention.attention_policy import AttentionConfig
from vit_fast.kernels.device import REFERENCE_GPU, Gpu
from vit_fast.kernels.inspect import attention_tuning, offline
from vit_fast.kernels.launch import Launch
from vit_fast.kernels.layer_norm import new_statistics
from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul.forward_epilogues import BranchOutput
from vit_fast.kernels.matmul.matmul_launch import Matmul, MatmulConfig
from vit_fast.kernels.matmul.matmul_policy import Problem, best, best_head, config_table

SIZES = (2, 15, 16, 17, 768)
LENGTHS = (1, 2, 15, 16, 17, 197, 577, 1025)
LENGTH_PAIRS = [*itertools.product(LENGTHS, LENGTHS), *((n, n) for n in range(4, 257, 8))]  # one of each length class
# Rows whose length is no multiple of 8 are loaded element by element, with more addresses than registers.
UNALIGNED_SPILLS = 350

_COMPILE = """
import json, sys
import torch
from vit_fast.kernels.inspect import offline, static_checks
from vit_fast.ops import attention, layer_norm_mlp
arch, compiles, shapes = sys.argv[1], sys.argv[2] == "compile", json.loads(sys.argv[3])
builds, found = {}, []
for shape in shapes:
    if len(shape) == 2:  # queries and keys
        function, aligned = attention, True
        sizes = [(256, 4, tokens, 64) for tokens in (shape[0], shape[1], shape[1])]
    else:
        M, C, F = shape
        function, aligned = layer_norm_mlp, C % 8 == 0 and F % 8 == 0
        sizes = (M, C), (C,), (C,), (F, C), (F,), (C, F), (C,)
    tensors = [torch.empty(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    with offline.recorded(offline.gpu(arch)) as launches:
        y = function(*tensors, backend="triton")
        torch.autograd.grad(y, tensors, torch.empty_like(y))
    for launch in launches:
        if function is attention or "EPILOGUE" in launch.constants or "BLOCK_P" in launch.constants:
            build = offline.Build(launch.kernel.__name__, str(shape), launch)
            builds.setdefault(offline.specialization(launch), (aligned, build))
for aligned, build in builds.values() if compiles else ():
    try:
        stats = static_checks.compile_stats(build.launch, arch)
        spills, problems = stats["spill_loads"] + stats["spill_stores"], static_checks.problems(build, stats, arch)
    except Exception as error:
        spills, problems = 0, [repr(error)]
    found.append([f"{build.kernel} {build.case}", aligned, spills, problems])
print(json.dumps([len(builds), found]))
"""


def compiled(arch: str, what: str, shapes: list[tuple[int, ...]]) -> tuple[int, list[Any]]:
    """Returns the number of different kernels of a training step, and the problems of each if they are compiled."""
    number, found = json.loads(run_python(["-c", _COMPILE, arch, what, json.dumps(shapes)], environment()))
    return number, found


@pytest.mark.parametrize(
    ("arch", "shapes"),
    [
        # the K of a weight gradient is the number of rows: 1 in attention pooling at batch 1
        *(pytest.param(arch, [(1, 768, 3072)], id=f"{arch}-one row", marks=pytest.mark.slow) for arch in offline.ARCHS),
        # one query, one key, and both forward kernels
        pytest.param("sm_90", [(1, 1), (1, 577), (17, 2)], id="sm_90-attention", marks=pytest.mark.slow),
        *(
            pytest.param(arch, shapes, id=f"{arch}-{name}", marks=pytest.mark.slow(minutes=True))
            for arch in offline.ARCHS
            for name, shapes in (("all sizes", [*itertools.product(SIZES, repeat=3)]), ("all lengths", LENGTH_PAIRS))
        ),
    ],
)
def test_every_size_fits(arch: str, shapes: list[tuple[int, ...]]) -> None:
    number, found = compiled(arch, "compile", shapes)
    assert number == len(found) >= 4
    for case, aligned, spills, problems in found:
        assert spills <= (0 if aligned else UNALIGNED_SPILLS), case
        assert not [problem for problem in problems if not problem.startswith("spills")], case


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(50_432, 768, 768), (50_433, 768, 768)], [(578, 578), (580, 580)]], ids=str)
def test_sizes_share_kernels(shapes: list[tuple[int, ...]]) -> None:
    """Includes the weight gradients, whose K is the number of rows, and strides of attention with and without 16."""
    first, _ = compiled("sm_90", "list", shapes[:1])
    both, _ = compiled("sm_90", "list", shapes)
    assert both == first


def problem(arch: str, sizes: tuple[int, int, int]) -> Problem:
    gpu = Gpu(arch, REFERENCE_GPU.sm_count)
    return Problem(gpu, "half", "residual", True, sizes, 2, 17, narrowest=0, largest=2**31, head=0)


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_120"])
def test_matmuls_with_few_rows_use_split_k(arch: str) -> None:
    """fc2 of ViT-B at batch 1 has 48 of the smallest tiles, a third of the multiprocessors."""
    config, splits = best(problem(arch, (197, 768, 3072)), 8)
    assert config in config_table(arch, "half", "partial", True)
    assert config.tiles(197, 768) * splits > 80


def test_a_partial_wave_gets_its_own_launch() -> None:
    """fc2 of ViT-B: at batch 64, 2.25 waves of the widest tiles take as long as 3; at 256, 8.95 are nearly 9."""
    few, many = 64 * 197, 256 * 197
    assert 0 < best_head(problem("sm_90", (few, 768, 3072))) < few
    assert best_head(problem("sm_90", (many, 768, 3072))) == many


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_two_launches_compute_the_same_as_one(dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (150, 64), (80, 64), (80,), (80,), (150, 80)
    h, weight, bias, scale, residual = [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]
    factors = torch.full((80,), 0.125).to(DEVICE)
    whole, cut = (
        BranchOutput(
            torch.full_like(residual, torch.nan), residual, new_statistics(150, 80, DEVICE),
            torch.empty_like(residual, dtype=torch.float8_e4m3fn), bias, scale, factors,
        )
        for _ in range(2)
    )  # fmt: skip
    linear.linear_residual(h, weight, whole)
    monkeypatch.setattr(linear, "rows_in_whole_waves", lambda matmul: 128)
    config_of, calls = linear.residual_config, []

    def config(matmul: Matmul) -> tuple[MatmulConfig, int]:
        calls.append(matmul.sizes[0])
        return config_of(matmul)[0], splits if matmul.sizes[0] < 128 else 1

    monkeypatch.setattr(linear, "residual_config", config)
    linear.linear_residual(h, weight, cut)
    assert calls == [128, 22]
    torch.testing.assert_close(whole.out, cut.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole.out_part, cut.out_part, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole.out8.float(), cut.out8.float(), rtol=0.13, atol=0.01)


SHAPE = (1, 33, 1, 16)
FAST = AttentionConfig(64, 64, num_stages=2, tma=True)


def test_the_fastest_correct_configuration_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 48 queries does not compile; an empty grid writes nothing."""
    task = next(attention_tuning.tasks(*SHAPE, device=DEVICE))
    tried = [task.by_rule, FAST, AttentionConfig(48, 64)]
    monkeypatch.setattr(attention_tuning, "candidates", lambda task: iter(tried))

    def measure(launch: Launch) -> float:
        return 0.5 if launch.constants.get("LOOP", (0, 0))[1] == FAST.block_n else 1.0

    def launch_wrong(config: AttentionConfig) -> Launch:
        launch = task.launch(config)
        return launch if config == task.by_rule else replace(launch, programs=0)

    assert attention_tuning.fastest(task, measure) == (FAST, 0.5)
    assert attention_tuning.fastest(replace(task, launch=launch_wrong), measure)[0] == task.by_rule


OLD = {"scheme": "row", "block_m": 64, "block_n": 128}  # a field that no longer exists


@pytest.mark.parametrize(
    "content", ["{}", "{", "[]", json.dumps({"note": "", "architectures": {}}), json.dumps({"any/forward": OLD})]
)
def test_the_policy_uses_the_table(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of another version, or a damaged one, is ignored with a warning, and then written again."""
    path = tmp_path / "table.json"
    path.write_text(content)
    monkeypatch.setattr(attention_policy, "TABLE_PATH", path)
    task = next(attention_tuning.tasks(*SHAPE, device=DEVICE))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attention_policy.tuned_table.cache_clear()
        assert attention_policy.forward_config(task.problem) == task.by_rule
    messages = [str(each.message) for each in caught]
    assert len(messages) == (content != "{}") and all("run vit-fast kernels --tune again" in each for each in messages)
    attention_tuning.write_entry(path, task.problem, "forward", FAST)
    assert replace(attention_policy.forward_config(task.problem), dependent=False) == FAST


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_tuning_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["kernels", "--tune"])
    assert caught.value.code == 2 and "GPU" in capsys.readouterr().err
