"""A block in FP8 by the kernels, against its definition in fp64; what is refused; the rounding that kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from mlp_support import DEVICE, make_bf16_exact
from torch import Tensor

from vit_fast.accuracy import judge
from vit_fast.kernels.fp8 import to_e4m3
from vit_fast.ops import reference
from vit_fast.ops.descriptions import BlockScales, BlockTensors
from vit_fast.ops.fp8 import fused_block_fp8, quantize_block

make_bf16_exact()

WIDTH, HEADS, HIDDEN, TOKENS = 96, 2, 160, 21
E4M3 = torch.float8_e4m3fn
EPS = (1e-6, 1e-5)


@triton.jit
def _round_kernel(x_ptr, out_ptr, back_ptr, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    narrow = to_e4m3(tl.load(x_ptr + places))
    tl.store(out_ptr + places, narrow)
    tl.store(back_ptr + places, narrow.to(tl.float32))


def test_kernels_round_as_the_definition_does() -> None:
    """Ties, subnormal numbers, what is too large, NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 449.0, 1e30, -1e30, 2.0**-10, 2.0**-11, 0.0])
    x = torch.cat((numbers, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), special, torch.randn(4096)))
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024)).to(DEVICE)
    out, back = torch.empty_like(x, dtype=E4M3), torch.empty_like(x)
    _round_kernel[(len(x) // 1024,)](x, out, back, 1024)
    expected = reference.quantize_e4m3(x, torch.ones((), device=DEVICE)).float()
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)
    assert int(back.isnan().sum()) == 1


def parameters(dtype: torch.dtype, gated: bool = False, norm: str = "layer_norm", **absent: None) -> BlockTensors:
    def of(*shape: int, spread: float = 0.2) -> Tensor:
        return (spread * torch.randn(*shape)).to(DEVICE, dtype)

    gate = (of(HIDDEN, WIDTH), of(HIDDEN)) if gated else (None, None)
    bias = () if norm == "rms_norm" else (WIDTH,)
    made = BlockTensors(
        1 + of(WIDTH), of(*bias) if bias else None, of(3 * WIDTH, WIDTH), of(3 * WIDTH), of(WIDTH, WIDTH), of(WIDTH),
        1 + of(WIDTH), 1 + of(WIDTH), of(*bias) if bias else None, of(HIDDEN, WIDTH), of(HIDDEN), of(WIDTH, HIDDEN),
        of(WIDTH), 1 + of(WIDTH), *gate,
    )  # fmt: skip
    return made._replace(**absent)


def some_scales(x: Tensor, **kept: None) -> BlockScales:
    """Near what the operands need, of another size for each channel of x."""
    channels = (x.float().flatten(0, 1).abs().amax(0) / 300).clamp_min(1e-3)
    one = torch.ones((), device=DEVICE)
    return BlockScales(channels, 0.01 * one, 2 * channels, 0.02 * one)._replace(**kept)


def run(
    x: Tensor, tensors: BlockTensors, scales: BlockScales, next_scale: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    paired = settings.pop("paired_head", 0)
    norm = settings.get("norm", "layer_norm")
    block = quantize_block(tensors, scales, x.dtype, norm, paired)
    with torch.no_grad():
        return fused_block_fp8(
            x, None, None, block, next_scale, heads=HEADS, attention_scale=None, eps=EPS,
            **{"activation": "gelu", **settings},
        )  # fmt: skip


def hold(x: Tensor, tensors: BlockTensors, scales: BlockScales, **settings: Any) -> Tensor:
    """The rule of accuracy, with the definition in x.dtype as eager."""
    y, _, _ = run(x, tensors, scales, **settings)
    settings.pop("paired_head", 0)
    eager, exact = (
        reference.fp8_block(x.to(dtype), tensors, scales, heads=HEADS, eps=EPS, **settings)
        for dtype in (x.dtype, torch.float64)
    )
    for measure in ("largest", "rms"):
        assert (verdict := judge(y, eager, exact, measure=measure)).passed, verdict
    return y


def an_input(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(2, TOKENS, WIDTH) + 0.3).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_block_is_its_definition(dtype: torch.dtype) -> None:
    x = an_input(dtype)
    hold(x, parameters(dtype), some_scales(x))
