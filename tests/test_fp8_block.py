"""Kernels of a block in FP8 match the reference in fp64; invalid arguments raise errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_execution import KERNEL_ARCH, WITHOUT_FP8
from mlp_support import DEVICE, Case, make_block
from torch import Tensor

from vit_fast.accuracy import judge
from vit_fast.kernels.device import Gpu
from vit_fast.kernels.inspect import offline
from vit_fast.kernels.layer_norm import new_statistics
from vit_fast.kernels.linear.split_k import finish_residual_launch
from vit_fast.kernels.matmul.forward_epilogues import BranchOutput
from vit_fast.kernels.ptx import to_e4m3
from vit_fast.ops import reference
from vit_fast.ops.backends import fp8_reasons
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockScales, Norm, interleave
from vit_fast.ops.folded import fold

pytestmark = pytest.mark.skipif(KERNEL_ARCH in WITHOUT_FP8, reason="no FP8 on this architecture")

WIDTH, HIDDEN, TOKENS = 96, 160, 21
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@triton.jit
def _round_kernel(x_ptr, out_ptr, back_ptr, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    narrow = to_e4m3(tl.load(x_ptr + places))
    tl.store(out_ptr + places, narrow)
    tl.store(back_ptr + places, narrow.to(tl.float32))


def test_kernels_and_reference_round_like_torch() -> None:
    """Ties, subnormal numbers, numbers that are too large, NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 449.0, 1e30, -1e30, 2.0**-10, 2.0**-11, 0.0])
    x = torch.cat((numbers, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), special, torch.randn(4096)))
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024)).to(DEVICE)
    out, back = torch.empty_like(x, dtype=E4M3), torch.empty_like(x)
    _round_kernel[(len(x) // 1024,)](x, out, back, 1024)
    expected = x.clamp(-448, 448).to(E4M3).float()
    by_reference = reference.quantize_e4m3(x, torch.ones((), device=DEVICE)).float()
    for rounded in (out.float(), back, by_reference):
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    assert int(back.isnan().sum()) == 1
    scaled = reference.quantize_e4m3(torch.tensor([7.0, -30.0]), torch.tensor([7.0, 2.0]))
    assert scaled.tolist() == [1, -15]


def test_linear_layers_match_fp64_if_rounding_changes_nothing() -> None:
    """Powers of two as weights, small integers as x; the row sums of any rounded weight cancel the mean."""
    x, weight = torch.randint(-4, 5, (3, 16)).double(), 2.0 ** torch.randint(0, 3, (5, 16)).double()
    bias, two = torch.randn(5).double(), torch.tensor(2.0)
    torch.testing.assert_close(reference.fp8_linear(x, weight, bias, two), torch.nn.functional.linear(x, weight, bias))
    for norm in (Norm(None, torch.randn(16).double(), 1e-6, "layer_norm"), Norm(None, None, 1e-6, "rms_norm")):
        torch.testing.assert_close(*(reference.fp8_linear(x, weight, bias, scale, norm) for scale in (two, None)))
    weight, one = torch.randn(5, 16).double(), torch.ones(())
    torch.testing.assert_close(*(reference.fp8_linear(x + shift, weight, None, one, Norm()) for shift in (0.0, 4.0)))


def make(dtype: torch.dtype = BF16, parameter_dtype: torch.dtype | None = None, **kind: Any) -> Case:
    sizes = {"width": WIDTH, "hidden": HIDDEN, "tokens": (2, TOKENS), "head_dim": WIDTH // 2, "mean": 0.3}
    return make_block(torch.float32, **sizes | kind).to(dtype, parameter_dtype)


def some_scales(x: Tensor, **kept: None) -> BlockScales:
    """Returns about the scales that the operands need, one per channel of x."""
    channels = (x.detach().float().flatten(0, 1).abs().amax(0) / 300).clamp_min(1e-3)
    one = torch.ones((), device=DEVICE)
    return BlockScales(channels, 0.01 * one, 2 * channels, 0.02 * one)._replace(**kept)


@torch.no_grad()
def run(
    case: Case, scales: BlockScales, next_scale: Tensor | None = None, rope_head: int = 0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs the kernels; returns the output, its LayerNorm statistics and its copy in e4m3."""
    options = case.options | {"next_factor": None if next_scale is None else 1 / next_scale, "next_statistics": True}
    if rope_head:
        options["rope"] = interleave(options["rope"], rope_head)
    block = fold(case.t, case.x.dtype, options["norm"], rope_head, scales=scales)
    return fused_block(case.x, None, block, **options)


@torch.no_grad()
def by_reference(case: Case, scales: BlockScales, dtype: torch.dtype = torch.float64) -> Tensor:
    names = ("heads", "eps", "norm", "activation", "qk_norm", "rope")
    options = {name: case.options[name] for name in names if name in case.options}
    return reference.fp8_block(case.x.to(dtype), case.t, scales, **options)


def matching_output(case: Case, scales: BlockScales, rope_head: int = 0) -> Tensor:
    """Returns the output of the kernels, after comparing it with the reference in fp64 and in x.dtype."""
    y, _, _ = run(case, scales, rope_head=rope_head)
    for measure in ("largest", "rms"):
        verdict = judge(y, by_reference(case, scales, y.dtype), by_reference(case, scales), measure=measure)
        assert verdict.passed, verdict
    return y


@pytest.fixture
def block() -> tuple[Case, BlockScales]:
    case = make()
    return case, some_scales(case.x)


KEPT = ("qkv", "proj", "fc1", "fc2")
ABSENT = dict.fromkeys(("norm1_weight", "norm1_bias", "qkv_bias", "proj_bias", "scale1", "fc1_bias", "scale2"))
ROTATED: dict[str, Any] = {"leading": (1, 1), "prefix": 2}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "parameters in fp32": {"parameter_dtype": torch.float32},
    "nothing optional": {"absent": ABSENT},
    "SwiGLU": {"gated": True, "activation": "silu"},
    "RMSNorm, SwiGLU": {"gated": True, "activation": "silu", "norm": "rms_norm"},
    "RMSNorm": {"norm": "rms_norm", "activation": "gelu_tanh"},
    "interleaved": ROTATED | {"layout": "interleaved"},
    "half": ROTATED,
    "half in the matmul": ROTATED | {"rope_head": WIDTH // 2},
    "half, of its own for each head": ROTATED | {"rope_head": WIDTH // 2, "leading": (1, 2)},
    "qk-norm": ROTATED | {"qk": "rms_norm"},
    "heads of 16": {"head_dim": 16},
    "heads of 72": {"head_dim": 72},  # no descriptor writes their rows in e4m3
    "constant tokens": {"constant": True},
    "a bias that fp32 cannot hold divided by the scale of its weights": {"tiny": True},
    **{f"without {name}": {"in_e4m3": set(KEPT) - {name}} for name in KEPT},
    **{f"{name} alone": {"in_e4m3": {name}} for name in KEPT},
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_block_matches_the_reference(form: str) -> None:
    kind = dict(FORMS[form])
    absent, rope_head = kind.pop("absent", {}), kind.pop("rope_head", 0)
    constant, tiny, in_e4m3 = kind.pop("constant", False), kind.pop("tiny", False), kind.pop("in_e4m3", set(KEPT))
    case = make(**kind).but(**absent)
    if constant:
        case.x[0, :] = 3.0
    if tiny:
        for weight in (case.t.qkv_weight, case.t.proj_weight, case.t.fc1_weight, case.t.fc2_weight):
            weight[3] *= 1e-37
    matching_output(case, some_scales(case.x, **dict.fromkeys(set(KEPT) - in_e4m3)), rope_head)


def test_empty_batches_and_strided_tokens(block: Any) -> None:
    case, scales = block
    y, _, y8 = run(case.but(x=case.x[:0]), scales, scales.qkv)
    assert y8 is not None and y.shape == y8.shape == (0, TOKENS, WIDTH)
    strided = case.x[:, ::2]
    assert torch.equal(run(case.but(x=strided), scales)[0], run(case.but(x=strided.contiguous()), scales)[0])


@torch.no_grad()
def test_a_channel_of_a_thousand_times_the_rest() -> None:
    """With a scale per channel, the other channels are as accurate as without the large channel.

    The norms make it small again, as they do in ViTs with massive activations.
    """
    case = make().but(norm1_bias=None)
    for tensor in (case.t.norm1_weight, case.t.norm2_weight):
        tensor[5] /= 1000
    case.x[..., 5] *= 1000
    y = matching_output(case, some_scales(case.x))
    exact, x = by_reference(case, BlockScales()), case.x.double()
    rest = torch.arange(WIDTH, device=DEVICE) != 5
    assert (y.double() - exact)[..., rest].norm() < 0.05 * (exact - x)[..., rest].norm()


@torch.no_grad()
def test_a_nan_stays_in_its_image(block: Any) -> None:
    case, scales = block
    clean, _, _ = run(case, scales)
    case.x[1, 3, 7] = torch.nan
    y, _, y8 = run(case, scales, scales.qkv)
    assert y8 is not None and y[1].isnan().all() and y8[1].float().isnan().all()
    assert torch.equal(y[0], clean[0]) and y8[0].float().isfinite().all()


@pytest.mark.parametrize("kept", [{}, {"fc2": None}], ids=str)
@torch.no_grad()
def test_outputs_passed_to_the_next_block_match_its_own(kept: dict[str, None], block: Any) -> None:
    case, scales = block
    scales = scales._replace(**kept)
    y, statistics, y8 = run(case, scales, scales.qkv)
    assert y8 is not None and statistics is not None and y8.dtype == E4M3
    exact = y.double() / scales.qkv
    nearest = (reference.quantize_e4m3(y, scales.qkv) - exact).abs()
    assert ((y8.double() - exact).abs() <= nearest + 1e-6 * exact.abs()).all()  # the reciprocal may move ties
    folded = fold(case.t, y.dtype, scales=scales)
    passed, made = (fused_block(y, own, folded, x8=x8, **case.options) for own, x8 in ((statistics, y8), (None, None)))
    torch.testing.assert_close(passed[0].float(), made[0].float(), rtol=0.02, atol=0.02)
    assert passed[1:] == made[1:] == (None, None)


@torch.no_grad()
def test_a_block_is_five_launches(block: Any) -> None:
    """FP8 adds no pass over memory, except for the input of the first block."""
    case, scales = block
    folded = fold(case.t, BF16, scales=scales)
    options = case.options | {"next_factor": 1 / scales.qkv, "next_statistics": True}
    with offline.recorded(offline.gpu("sm_90")) as launches:
        y, statistics, y8 = fused_block(case.x, None, folded, **options)
        assert len(launches) == 6
        fused_block(y, statistics, folded, x8=y8, **options)
    assert len(launches) == 11


def test_parts_of_k_end_in_e4m3_too() -> None:
    part, residual = torch.randn(3, 19, 48, device=DEVICE), torch.randn(19, 48, device=DEVICE).bfloat16()
    out, out8 = torch.empty_like(residual), torch.empty_like(residual, dtype=E4M3)
    statistics, scale = new_statistics(19, 48, residual.device), 2.0 ** torch.randint(-5, 1, (48,), device=DEVICE)
    finish_residual_launch(part, BranchOutput(out, residual, statistics, out8, out_scale=1 / scale)).run()
    assert torch.equal(out8.double(), reference.quantize_e4m3(out, scale))
    torch.testing.assert_close(out.float(), part.sum(0) + residual.float(), rtol=2**-8, atol=2**-8)


@torch.no_grad()
def test_errors_name_every_reason(block: Any) -> None:
    case, scales = block
    x, one = case.x, torch.ones((), device=DEVICE)

    def folded(dtype: torch.dtype = BF16, tensors: dict[str, Any] | None = None, **wrong: Tensor) -> Any:
        return fold(case.t._replace(**tensors or {}), dtype, scales=scales._replace(**wrong))

    def with_fp32(autocast: bool) -> Any:
        with torch.autocast(DEVICE, BF16, enabled=autocast):
            return fused_block(x.float(), None, folded(), **case.options)

    for call, message in (
        (lambda: folded(fc2=0 * one), r"scales of fc2 must be positive .*, got 0 to 0"),
        (lambda: folded(fc2=1e-40 * one), r"scales of fc2 must .* finite reciprocals, got 9"),
        (lambda: folded(fc1=scales.qkv * torch.nan), r"scales of fc1 must be .*, got nan to nan"),
        (lambda: folded(torch.float32), r"dtype of the weights must be float16 or bfloat16, got torch\.float32"),
        (
            lambda: folded(tensors={"fc2_weight": case.t.fc2_weight[:, :30]}),
            r"of fc2 must be a multiple of 16 .*, got 30 \(to run fc2",
        ),
        (lambda: with_fp32(False), r"x must be float16 or bfloat16, got torch\.float32"),
        (lambda: with_fp32(True), r"x must be float16 or bfloat16, got torch\.float32"),
        (lambda: run(case.but(x=x.to("meta")), scales), "qkv_weight must be on meta like x, got "),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_devices_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_reasons(torch.device(DEVICE)) == []
    assert fp8_reasons(torch.device("meta")) == ["tensors must be on a CUDA device, got meta"]
    for arch, accepted in (("sm_80", False), ("sm_86", False), ("sm_89", True), ("sm_120", True)):
        monkeypatch.setattr("vit_fast.kernels.device.gpu_of", lambda device, arch=arch: Gpu(arch, 100))
        reasons = fp8_reasons(torch.device(DEVICE))
        assert (reasons == []) == accepted
        assert accepted or f"compute capability 8.9 or higher, got 8.{arch[-1]}" in reasons[0]
