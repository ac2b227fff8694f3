"""torch's requirements for operators: opcheck of each one, as public functions call it, and a FLOP formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mlp_support import DEVICE, make_block
from our_operators import calls_of, each_tensor
from torch import Tensor, library

from vit_fast import ops
from vit_fast.ops import Norm, QkNorm, Rope
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockScales
from vit_fast.ops.folded import fold

pytest.importorskip("triton", reason="the kernels need triton")
FP32, BF16 = torch.float32, torch.bfloat16
BOUNDS = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=DEVICE)
KEEP = torch.tensor([[True, False, True, True, False], [True] * 5], device=DEVICE)


def _leaf(*shape: int) -> Tensor:
    return (0.4 * torch.randn(shape, device=DEVICE)).requires_grad_()


def _block(dtype: torch.dtype = FP32, bare: bool = False, half: int = 0, autocast: bool = False, **kind: Any) -> Tensor:
    """Runs two blocks, or one half of them twice; in bf16, the second one receives statistics."""
    case = make_block(dtype, **kind)
    if bare:
        case = case.but(**{name: None for name, leaf in case.leaves().items() if leaf.dim() == 1})
    if half:
        case = case.half(half)
    with torch.autocast(DEVICE, BF16, enabled=autocast):
        y, statistics = case.fused(next_statistics=dtype == BF16)
        return case.but(x=y.detach().requires_grad_()).fused(statistics)[0]


@torch.no_grad()
def _frozen() -> Tensor:
    case = make_block(FP32, inner_norm="layer_norm")
    return replace(case, t=fold(case.t, FP32, inner_norm="layer_norm")).fused()[0]


@torch.no_grad()
def _fp8() -> Tensor:
    """Runs two blocks; the second one receives statistics and tokens in e4m3."""
    case = make_block(BF16, width=96, hidden=160)
    one = torch.ones((), device=DEVICE)
    scales = BlockScales(one.repeat(96) / 64, one / 64, one.repeat(96) / 64, one / 64)
    block = fold(case.t, BF16, scales=scales)
    y, statistics, x8 = fused_block(
        case.x, None, block, **case.options, next_factor=1 / scales.qkv, next_statistics=True
    )
    return fused_block(y, statistics, block, x8=x8, **case.options)[0]


def _rotary(norm: str = "layer_norm", rotated: bool = True) -> Tensor:
    table = torch.rand(4, 8, device=DEVICE)
    norms = [Norm(_leaf(16), _leaf(16) if norm == "layer_norm" else None, 1e-6, norm) for _ in "qk" if norm]
    return ops.qk_norm_rope(
        _leaf(2, 5, 3, 2, 16), qk_norm=QkNorm(*norms) if norms else None,
        rope=Rope(table, table, 1) if rotated else None, backend="triton",
    )  # fmt: skip


CALLS: dict[str, Callable[[], Tensor]] = {
    "attention": lambda: ops.attention(_leaf(2, 2, 5, 32), *_leaf(2, 2, 2, 9, 32), backend="triton"),
    "attention, packed": lambda: ops.attention_qkvpacked(_leaf(2, 17, 3, 2, 16), backend="triton"),
    "attention, masked": lambda: ops.attention(*_leaf(3, 2, 2, 5, 16), key_mask=KEEP, backend="triton"),
    "attention, sequences apart": lambda: ops.attention_varlen(*_leaf(3, 14, 2, 16), BOUNDS, 7, backend="triton"),
    "attention, sequences": lambda: ops.attention_varlen_qkvpacked(_leaf(14, 3, 2, 16), BOUNDS, 7, backend="triton"),
    "attention, biased": lambda: ops.attention(
        *_leaf(3, 2, 2, 6, 16),
        bias=_leaf(1, 6, 6),
        rel=(_leaf(2, 2, 6, 2), _leaf(2, 2, 6, 3)),
        scale=_leaf(2).exp(),
        backend="triton",
    ),
    "attention, biased, packed": lambda: ops.attention_qkvpacked(
        _leaf(3, 17, 3, 2, 16), bias=_leaf(3, 2, 17, 17), window_mask=_leaf(3, 17, 17).detach(), backend="triton"
    ),
    "block, windows": lambda: _block(BF16, terms=True, tokens=(2, 24)),
    "mlp, autocast": lambda: _block(half=2, autocast=True),
    "mlp, autocast, a branch": lambda: _block(half=2, autocast=True, residual=False, bare=True),
    "mlp, bf16": lambda: _block(BF16, half=2),
    "mlp, gated": lambda: _block(half=2, gated=True),
    "mlp, gated, a norm inside": lambda: _block(half=2, gated=True, inner_norm="layer_norm"),
    "block": _block,
    "block, bf16": lambda: _block(BF16),
    "block, bare": lambda: _block(bare=True),
    "block, frozen": _frozen,
    "block, a norm inside, rotated": lambda: _block(inner_norm="layer_norm", leading=()),
    "block, qk-norm over the head, rotated": lambda: _block(BF16, qk="layer_norm", leading=()),
    "block, packed": lambda: _block(keys="packed", leading=()),
    "block, padded": lambda: _block(keys="mask"),
    "half": lambda: _block(half=1),
    "half, bf16, a branch": lambda: _block(BF16, half=1, residual=False),
    "block, FP8": _fp8,
    "rotary": _rotary,
    "rotary, no bias": lambda: _rotary("rms_norm"),
    "rotary, not normalized": lambda: _rotary(""),
    "rotary, not rotated": lambda: _rotary(rotated=False),
}


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    def run() -> None:
        y = CALLS[name]()
        if y.requires_grad:
            y.float().square().sum().backward()

    made = calls_of(run)
    assert made
    for operator, arguments in made:
        if "backward" in str(operator) or name in ("block, frozen", "block, FP8"):
            arguments = each_tensor(Tensor.detach, arguments)
        # not test_schema in FP8, for which torch would have to compare tensors of e4m3
        library.opcheck(operator, arguments, test_utils=CHECKS[1:] if name == "block, FP8" else CHECKS)


def test_every_operator_has_a_flop_formula_and_few_arguments() -> None:
    from torch.utils.flop_counter import flop_registry

    CALLS["attention"]()
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("vit_fast::")}
    names -= {"vit_fast::exported_attention"}  # it marks attention in graphs that become ONNX
    operators = [getattr(torch.ops.vit_fast, name.removeprefix("vit_fast::").partition(".")[0]) for name in names]
    assert operators and set(operators) <= flop_registry.keys()
    assert all(len(operator.default._schema.arguments) <= 12 for operator in operators)
