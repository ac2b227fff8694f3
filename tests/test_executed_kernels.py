"""Tests on the PTX emulator: replayed launch plans, CUDA graphs, a compiled model, TF32 and FP8."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import planned_launches
import pytest
import test_fp8_block
import torch
from emulator.binding import Emulator
from emulator.process import SAME_PTX
from kernel_execution import KERNEL_ARCH
from mlp_support import Case, make_block, make_case
from our_operators import each_tensor
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import vit_fast
from vit_fast import set_backend
from vit_fast.accuracy import GRADIENT_FACTOR, judge
from vit_fast.blocks.block import run_blocks
from vit_fast.kernels import plan
from vit_fast.kernels.attention import attention_policy
from vit_fast.kernels.device import starts_early
from vit_fast.kernels.inspect import offline, static_checks
from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul import matmul_policy

pytestmark = pytest.mark.executed

BF16 = torch.bfloat16


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("first", range(4))
def test_a_replayed_plan_computes_the_same_bits(first: int, tf32: None) -> None:
    """Replays the plan of each operator, with inputs at the same and at other addresses."""
    cases = [*planned_launches.cases()][first::4]
    for operator, arguments in [call for case in cases for call in planned_launches.calls(case)]:
        plan.forget()
        results = [operator(*arguments) for _ in range(3)]  # compiled, recorded, replayed
        results.append(operator(*each_tensor(planned_launches.elsewhere, arguments)))
        assert len(plan.plans()) == 1 and plan.plans() != [None]
        for one in zip(*map(tree_leaves, results), strict=True):
            ordinary, *planned = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in one)
            assert all(torch.equal(ordinary, bits) for bits in planned), operator


@pytest.mark.skipif(KERNEL_ARCH not in SAME_PTX, reason="compiled for the architecture that is executed")
def test_ptx_equals_that_of_the_architecture_which_is_not_executed() -> None:
    builds = {build.kernel: build for build in static_checks.builds(KERNEL_ARCH)}
    for kernel, build in builds.items():
        compiled = (offline.compile_launch(build.launch, arch) for arch in (KERNEL_ARCH, SAME_PTX[KERNEL_ARCH]))
        own, executed = (re.sub(r"\.target sm_\d+", "", one.asm["ptx"]) for one in compiled)
        assert own == executed, kernel


@pytest.fixture
def models() -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """Returns a fused model in bf16, and eager models in bf16 and fp64."""
    shape = {"embed_dim": 192, "num_heads": 3, "img_size": 64, "patch_size": 16}
    model = vit_fast.create_model("vit_base_patch16_224", backend="eager", depth=2, num_classes=10, **shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.to(BF16).float())
    fused = copy.deepcopy(model).to(BF16)
    set_backend(fused, "triton")
    yield fused, copy.deepcopy(model).to(BF16), model.double()
    torch._dynamo.reset()


def _gradients(model: nn.Module, images: Tensor, weight: Tensor) -> list[Tensor]:
    model.train().zero_grad(set_to_none=True)
    (model(images) * weight).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("compiled", [False, True])
def test_training(compiled: bool, models: tuple[nn.Module, ...]) -> None:
    fused, eager, exact = models
    step = torch.compile(fused) if compiled else fused
    for batch in (2, 1) if compiled else (2, 1, 2, 2):
        images, weight = torch.randn(batch, 3, 64, 64).to(BF16), torch.randn(batch, 10).to(BF16)
        gradients = (
            _gradients(step, images, weight), _gradients(eager, images, weight),
            _gradients(exact, images.double(), weight.double()),
        )  # fmt: skip
        for each in zip(*gradients, strict=True):
            found = judge(*each, GRADIENT_FACTOR, "rms")
            assert found.passed, found


def test_a_graph_replays_with_new_inputs(models: tuple[nn.Module, ...], emulator: Emulator) -> None:
    """Records launches without executing them, as a CUDA graph does, and executes them after the inputs changed."""
    fused = models[0]
    vit_fast.freeze(fused)
    static = torch.randn(2, 17, 192).to(BF16)

    def blocks(x: Tensor) -> Tensor:
        for block in fused.blocks:
            x = block(x)
        return x

    with torch.inference_mode():
        expected_first = [blocks(static) for _ in range(3)][-1]  # compiled and planned before the capture
        with emulator.recording():
            out = blocks(static)
        assert out.isnan().all()  # nothing ran
        for seed in range(3):
            torch.manual_seed(seed)
            images = torch.randn(2, 17, 192).to(BF16)
            expected = blocks(images)
            static.copy_(images)
            emulator.replay()
            assert torch.equal(out, expected)
            assert not torch.equal(out, expected_first)
    emulator.release()


def test_kernels_that_start_early_compute_the_same_bits(
    models: tuple[nn.Module, ...], emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator reports memory accesses before a kernel waits for the previous one."""
    fused = models[0]
    vit_fast.freeze(fused)
    x, results = torch.randn(1, 17, 192).to(BF16), []
    for early in (False, True):  # ends with True, so that later tests find unchanged caches
        plan.forget()
        for module in (attention_policy, linear, matmul_policy):
            monkeypatch.setattr(module, "starts_early", lambda arch, early=early: early and starts_early(arch))
        for cached in (matmul_policy.config_table, matmul_policy.best, matmul_policy.best_head):
            cached.cache_clear()
        emulator.profile()
        with torch.inference_mode():
            results += [run_blocks(fused.blocks, x) for _ in range(3)]
        waits = sum(found.executed for found in emulator.find("griddepcontrol.wait"))
        assert (waits > 0) == (early and starts_early(KERNEL_ARCH))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("sizes", [(1, 64, 128), (70, 192, 264), (129, 72, 200), (33, 100, 150)], ids=str)
def test_tf32_mlp(sizes: tuple[int, int, int], emulator: Emulator, tf32: None) -> None:
    _check_tf32(make_case(*sizes, torch.float32), emulator)


@pytest.mark.parametrize("sizes", [(17, 64), (50, 32), (197, 64), (65, 16), (257, 32), (9, 72), (24, 32)], ids=str)
def test_tf32_attention(sizes: tuple[int, int], emulator: Emulator, tf32: None) -> None:
    tokens, head_dim = sizes
    case = make_block(torch.float32, tokens=(1, tokens), head_dim=head_dim, terms=tokens == 24)
    _check_tf32(case.half(1), emulator)


def _check_tf32(case: Case, emulator: Emulator) -> None:
    """TF32 operands have 11 bits of precision; at least one instruction must use TF32."""
    emulator.profile()
    found, exact = case.run("triton"), case.to(torch.float64).run("eager")
    for name, value in exact.items():
        error = float((found[name] - value).abs().max() / value.abs().max())
        assert error < 8e-3, (name, error)  # of several matmuls, one after another
    assert any(instruction.executed for instruction in emulator.find("tf32.tf32"))


@pytest.mark.skipif(KERNEL_ARCH != "sm_90", reason="wgmma of 8-bit floats is sm_90's")
def test_fp8_is_accurate_with_sums_of_14_bits(emulator: Emulator) -> None:
    """sm_90 accumulates FP8 products in about 14 bits; sizes of ViT-S."""
    case = test_fp8_block.make(width=384, hidden=1536, heads=6, head_dim=64)
    scales = test_fp8_block.some_scales(case.x)
    emulator.shorten_fp8_sums(14)
    try:
        y, _, _ = test_fp8_block.run(case, scales)
    finally:
        emulator.shorten_fp8_sums(0)
    eager, exact = (test_fp8_block.by_reference(case, scales, dtype) for dtype in (BF16, torch.float64))
    found = judge(y, eager, exact, measure="rms")
    assert found.passed, found
