"""Kernels of a block in FP8 match the reference in fp64; invalid arguments raise errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_execution import KERNEL_ARCH, WITHOUT_FP8
from mlp_support import DEVICE
from our_operators import OurOperators, calls_of, each_tensor
from torch import Tensor, library
from torch.utils.flop_counter import FlopCounterMode

from vit_fast.accuracy import judge
from vit_fast.kernels.device import Gpu
from vit_fast.kernels.layer_norm import new_statistics
from vit_fast.kernels.linear.split_k import finish_residual_launch
from vit_fast.kernels.ptx import to_e4m3
from vit_fast.ops import reference
from vit_fast.ops.backends import fp8_reasons
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockScales, BlockTensors, Norm, QkNorm, Rope, interleave
from vit_fast.ops.folded import fold

pytestmark = pytest.mark.skipif(KERNEL_ARCH in WITHOUT_FP8, reason="no FP8 on this architecture")

WIDTH, HEADS, HIDDEN, TOKENS = 96, 2, 160, 21
E4M3 = torch.float8_e4m3fn
EPS = (1e-6, 1e-5)
SETTINGS: dict[str, Any] = {"heads": HEADS, "eps": EPS, "activation": "gelu", "next_statistics": True}


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


def test_a_weight_uses_the_whole_range_of_every_row() -> None:
    weight, gamma, scale = torch.randn(6, 32), torch.randn(32), torch.rand(32) + 0.5
    weight[3] = 0
    values, rows = reference.fp8_weight(weight, scale, gamma)
    assert torch.equal(values.to(E4M3).double(), values)
    assert values.abs().amax(1).tolist() == [448, 448, 448, 0, 448, 448]
    torch.testing.assert_close(values * rows[:, None], (weight * gamma * scale).double(), rtol=2**-4, atol=1e-6)


def test_linear_layers_match_fp64_if_rounding_changes_nothing() -> None:
    """Powers of two as weights, small integers as x; the row sums of any rounded weight cancel the mean."""
    x, weight = torch.randint(-4, 5, (3, 16)).double(), 2.0 ** torch.randint(0, 3, (5, 16)).double()
    bias, two = torch.randn(5).double(), torch.tensor(2.0)
    torch.testing.assert_close(reference.fp8_linear(x, weight, bias, two), torch.nn.functional.linear(x, weight, bias))
    for norm in (Norm(None, torch.randn(16).double(), 1e-6, "layer_norm"), Norm(None, None, 1e-6, "rms_norm")):
        torch.testing.assert_close(*(reference.fp8_linear(x, weight, bias, scale, norm) for scale in (two, None)))
    weight, one = torch.randn(5, 16).double(), torch.ones(())
    torch.testing.assert_close(*(reference.fp8_linear(x + shift, weight, None, one, Norm()) for shift in (0.0, 4.0)))


def parameters(dtype: torch.dtype, gated: bool = False, norm: str = "layer_norm", **absent: None) -> BlockTensors:
    def of(*shape: int, spread: float = 0.2) -> Tensor:
        return (spread * torch.randn(*shape)).to(DEVICE, dtype)

    gate = (of(HIDDEN, WIDTH), of(HIDDEN)) if gated else (None, None)
    beta1, beta2 = (None, None) if norm == "rms_norm" else (of(WIDTH), of(WIDTH))
    made = BlockTensors(
        1 + of(WIDTH), beta1, of(3 * WIDTH, WIDTH), of(3 * WIDTH), of(WIDTH, WIDTH), of(WIDTH), 1 + of(WIDTH),
        1 + of(WIDTH), beta2, of(HIDDEN, WIDTH), of(HIDDEN), of(WIDTH, HIDDEN), of(WIDTH), 1 + of(WIDTH), *gate,
    )  # fmt: skip
    return made._replace(**absent)


def some_scales(x: Tensor, **kept: None) -> BlockScales:
    """Returns about the scales that the operands need, one per channel of x."""
    channels = (x.float().flatten(0, 1).abs().amax(0) / 300).clamp_min(1e-3)
    one = torch.ones((), device=DEVICE)
    return BlockScales(channels, 0.01 * one, 2 * channels, 0.02 * one)._replace(**kept)


def run(
    x: Tensor, tensors: BlockTensors, scales: BlockScales, next_scale: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    paired = settings.pop("rope_head", 0)
    block = fold(tensors, x.dtype, settings.pop("norm", "layer_norm"), paired, scales=scales)
    settings["next_factor"] = None if next_scale is None else 1 / next_scale
    if paired:
        settings["rope"] = interleave(settings["rope"], paired)
    with torch.no_grad():
        y, statistics, y8 = fused_block(x, None, block, **SETTINGS | settings)
        return y, y8, statistics


def matching_output(x: Tensor, tensors: BlockTensors, scales: BlockScales, **settings: Any) -> Tensor:
    """Returns the output of the kernels, after comparing it with the reference in fp64 and in x.dtype."""
    y, _, _ = run(x, tensors, scales, **settings)
    settings.pop("rope_head", 0)
    eager, exact = (
        reference.fp8_block(x.to(dtype), tensors, scales, heads=HEADS, eps=EPS, **settings)
        for dtype in (x.dtype, torch.float64)
    )
    for measure in ("largest", "rms"):
        assert (verdict := judge(y, eager, exact, measure=measure)).passed, verdict
    return y


def an_input(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(2, TOKENS, WIDTH) + 0.3).to(DEVICE, dtype)


@pytest.fixture
def block() -> tuple[Tensor, BlockTensors, BlockScales]:
    x = an_input()
    return x, parameters(torch.bfloat16), some_scales(x)


def positions(layout: str, prefix: int, heads: int = 1) -> Rope:
    angles = 3 * torch.randn(1, heads, TOKENS - prefix, WIDTH // HEADS // 2, device=DEVICE)
    return Rope(angles.cos(), angles.sin(), prefix, layout)


KEPT = ("qkv", "proj", "fc1", "fc2")
ABSENT = dict.fromkeys(("norm1_weight", "norm1_bias", "qkv_bias", "proj_bias", "scale1", "fc1_bias", "scale2"))
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "parameters in fp32": {"parameter_dtype": torch.float32},
    "nothing optional": {"absent": ABSENT},
    "SwiGLU": {"gated": True, "activation": "silu"},
    "RMSNorm, SwiGLU": {"gated": True, "activation": "silu", "norm": "rms_norm"},
    "RMSNorm": {"norm": "rms_norm", "activation": "gelu_tanh"},
    "interleaved": {"layout": "interleaved"},
    "half": {"layout": "half"},
    "half in the matmul": {"layout": "half", "rope_head": WIDTH // HEADS},
    "half, of its own for each head": {"layout": "half", "rope_head": WIDTH // HEADS, "heads_apart": HEADS},
    "qk-norm": {"layout": "half", "qk": True},
    "heads of 16": {"head_dim": 16},
    "heads of 72": {"head_dim": 72},  # no descriptor writes their rows in e4m3
    "constant tokens": {"constant": True},
    "a bias that fp32 cannot hold divided by the scale of its weights": {"tiny": True},
    **{f"without {name}": {"in_e4m3": set(KEPT) - {name}} for name in KEPT},
    **{f"{name} alone": {"in_e4m3": {name}} for name in KEPT},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_block_matches_the_reference(form: str) -> None:
    settings = dict(FORMS[form])
    dtype, x = settings.pop("dtype", torch.bfloat16), an_input(settings.get("dtype", torch.bfloat16))
    if settings.pop("constant", False):
        x[0, :] = 3.0
    if layout := settings.pop("layout", None):
        settings["rope"] = positions(layout, 2, settings.pop("heads_apart", 1))
    if settings.pop("qk", False):
        weight = 1 + 0.3 * torch.randn(2, WIDTH // HEADS, device=DEVICE)
        settings["qk_norm"] = QkNorm(*(Norm(each.bfloat16(), None, 1e-5, "rms_norm") for each in weight))
    tensors = parameters(
        settings.pop("parameter_dtype", dtype), settings.pop("gated", False), settings.get("norm", "layer_norm"),
        **settings.pop("absent", {}),
    )  # fmt: skip
    if settings.pop("tiny", False):
        for weight in (tensors.qkv_weight, tensors.proj_weight, tensors.fc1_weight, tensors.fc2_weight):
            weight[3] *= 1e-37
    if inner := HEADS * settings.pop("head_dim", 0):
        qkv, proj = (0.2 * torch.randn(*shape, device=DEVICE) for shape in ((3 * inner, WIDTH), (WIDTH, inner)))
        tensors = tensors._replace(qkv_weight=qkv.bfloat16(), qkv_bias=None, proj_weight=proj.bfloat16())
    kept = set(KEPT) - settings.pop("in_e4m3", set(KEPT))
    matching_output(x, tensors, some_scales(x, **dict.fromkeys(kept)), **settings)


def test_empty_batches_and_strided_tokens() -> None:
    tensors, wide = parameters(torch.bfloat16), torch.cat((an_input(), an_input()), dim=1)
    scales = some_scales(wide)
    y, y8, _ = run(wide[:0], tensors, scales, scales.qkv)
    assert y8 is not None and y.shape == y8.shape == (0, 2 * TOKENS, WIDTH)
    assert torch.equal(run(wide[:, ::2], tensors, scales)[0], run(wide[:, ::2].contiguous(), tensors, scales)[0])


def test_compiled_blocks_are_one_operator_each(block: Any) -> None:
    x, tensors, scales = block
    quantized = fold(tensors, x.dtype, scales=scales)

    def two(x: Tensor) -> Tensor:
        statistics = x8 = None
        for _ in range(2):
            x, statistics, x8 = fused_block(x, statistics, quantized, x8=x8, next_factor=scales.qkv, **SETTINGS)
        return x

    seen = OurOperators()
    with torch.no_grad():
        assert torch.equal(torch.compile(two, fullgraph=True, backend=seen)(x), two(x))
    assert seen == ["block"] * 2


def test_a_channel_of_a_thousand_times_the_rest() -> None:
    """With a scale per channel, the other channels are as accurate as without the large channel.

    The norms make it small again, as they do in ViTs with massive activations.
    """
    x, tensors = an_input(), parameters(torch.bfloat16, norm1_bias=None)
    for gamma in (tensors.norm1_weight, tensors.norm2_weight):
        gamma[5] /= 1000  # type: ignore[index]  # it is there
    far = x.clone()
    far[..., 5] *= 1000
    y = matching_output(far, tensors, some_scales(far))
    exact = reference.fp8_block(far.double(), tensors, BlockScales(), heads=HEADS, eps=EPS)
    rest = torch.arange(WIDTH, device=DEVICE) != 5
    assert (y.double() - exact)[..., rest].norm() < 0.05 * (exact - far.double())[..., rest].norm()


def test_a_nan_stays_in_its_image(block: Any) -> None:
    x, tensors, scales = block
    clean, _, _ = run(x, tensors, scales)
    x[1, 3, 7] = torch.nan
    y, y8, _ = run(x, tensors, scales, scales.qkv)
    assert y8 is not None and y[1].isnan().all() and y8[1].float().isnan().all()
    assert torch.equal(y[0], clean[0]) and y8[0].float().isfinite().all()


@pytest.mark.parametrize("kept", [{}, {"fc2": None}], ids=str)
def test_outputs_passed_to_the_next_block_match_its_own(kept: dict[str, None], block: Any) -> None:
    x, tensors, scales = block
    scales = scales._replace(**kept)
    y, y8, statistics = run(x, tensors, scales, scales.qkv)
    assert y8 is not None and statistics is not None and y8.dtype == E4M3
    exact = y.double() / scales.qkv
    nearest = (reference.quantize_e4m3(y, scales.qkv) - exact).abs()
    assert ((y8.double() - exact).abs() <= nearest + 1e-6 * exact.abs()).all()  # the reciprocal may move ties
    quantized = fold(tensors, x.dtype, scales=scales)
    with torch.no_grad():
        passed = fused_block(y, statistics, quantized, x8=y8, **SETTINGS)
        made = fused_block(y, None, quantized, **SETTINGS | {"next_statistics": False})
    torch.testing.assert_close(passed[0].float(), made[0].float(), rtol=0.02, atol=0.02)
    assert passed[2] is None and made[1] is None and made[2] is None


def test_parts_of_k_end_in_e4m3_too() -> None:
    part, residual = torch.randn(3, 19, 48, device=DEVICE), torch.randn(19, 48, device=DEVICE).bfloat16()
    out, out8 = torch.empty_like(residual), torch.empty_like(residual, dtype=E4M3)
    statistics, scale = new_statistics(19, 48, residual.device), 2.0 ** torch.randint(-5, 1, (48,), device=DEVICE)
    finish_residual_launch(part, None, None, residual, out, statistics, out8, 1 / scale).run()
    assert torch.equal(out8.double(), reference.quantize_e4m3(out, scale))
    torch.testing.assert_close(out.float(), part.sum(0) + residual.float(), rtol=2**-8, atol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("passed_on", [False, True])
def test_opcheck(passed_on: bool, block: Any) -> None:
    x, tensors, scales = block
    _, x8, statistics = run(x, tensors, scales, scales.qkv) if passed_on else (None, None, None)
    settings = SETTINGS | {"x8": x8, "next_factor": 1 / scales.qkv if passed_on else None, "next_statistics": passed_on}
    quantized = fold(tensors, x.dtype, scales=scales)
    calls = calls_of(lambda: fused_block(x, statistics, quantized, **settings))
    ((operator, arguments),) = calls
    # not test_schema, for which torch would have to compare tensors of e4m3
    others = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    library.opcheck(operator, each_tensor(torch.Tensor.detach, arguments), test_utils=others)


def test_flop_are_those_of_the_matmuls(block: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        run(*block)
    tokens = 2 * TOKENS
    assert counter.get_total_flops() == 2 * tokens * WIDTH * (4 * WIDTH + 2 * HIDDEN) + 4 * tokens * TOKENS * WIDTH


@torch.no_grad()
def test_errors_name_every_reason(block: Any) -> None:
    x, tensors, scales = block
    bf16 = torch.bfloat16

    def quantize(tensors: BlockTensors = tensors, dtype: torch.dtype = bf16, **wrong: Tensor) -> Any:
        return fold(tensors, dtype, scales=scales._replace(**wrong))

    def with_fp32(autocast: bool) -> Any:
        with torch.autocast(DEVICE, bf16, enabled=autocast):
            return fused_block(x.float(), None, quantize(), **SETTINGS)

    one, narrow = torch.ones((), device=DEVICE), tensors._replace(fc2_weight=tensors.fc2_weight[:, :30])
    for call, word in (
        (lambda: quantize(proj=scales.qkv), r"scales\.proj must have shape \(\), got \(96,\)"),
        (lambda: quantize(fc2=0 * one), r"scales\.fc2 must be positive .*, got 0 to 0"),
        (lambda: quantize(fc2=1e-40 * one), r"scales\.fc2 must .* finite reciprocals, got 9"),
        (lambda: quantize(fc1=scales.qkv * torch.nan), r"scales\.fc1 must be .*, got nan to nan"),
        (lambda: quantize(dtype=torch.float32), r"dtype must be float16 or bfloat16, got torch\.float32"),
        (lambda: quantize(narrow), r"of fc2 must be a multiple of 16 .*, got 30 \(scales\.fc2=None"),
        (
            lambda: quantize(tensors._replace(inner_weight=x, fc2_sum=x)),
            "inner_weight, fc2_sum must be None",
        ),
        (lambda: with_fp32(False), r"x must be float16 or bfloat16, got torch\.float32"),
        (lambda: with_fp32(True), r"x must be float16 or bfloat16, got torch\.float32"),
        (lambda: run(torch.cat((x, x), 2), tensors, scales), f"x must have {WIDTH} channels .*, got {2 * WIDTH}"),
        (lambda: run(x.to("meta"), tensors, scales), "qkv_weight must be on meta like x, got "),
    ):
        with pytest.raises(ValueError, match=word):
            call()


def test_devices_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_reasons(torch.device(DEVICE)) == []
    assert fp8_reasons(torch.device("meta")) == ["tensors must be on a CUDA device, got meta"]
    for arch, accepted in (("sm_80", False), ("sm_86", False), ("sm_89", True), ("sm_120", True)):
        monkeypatch.setattr("vit_fast.kernels.device.gpu_of", lambda device, arch=arch: Gpu(arch, 100))
        reasons = fp8_reasons(torch.device(DEVICE))
        assert (reasons == []) == accepted
        assert accepted or f"compute capability 8.9 or higher, got 8.{arch[-1]}" in reasons[0]
