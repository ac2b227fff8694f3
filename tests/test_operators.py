"""torch's requirements for operators: opcheck of each one, as public functions call it, and a FLOP formula."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from mlp_support import DEVICE, make_block, make_case, statistics_of
from our_operators import calls_of, each_tensor
from torch import Tensor, library

from vit_fast import ops
from vit_fast.ops import Norm, QkNorm, Rope
from vit_fast.ops.folded import fold

pytest.importorskip("triton", reason="the kernels need triton")
FP32, BF16 = torch.float32, torch.bfloat16


def _leaf(*shape: int) -> Tensor:
    return (0.4 * torch.randn(shape, device=DEVICE)).requires_grad_()


def _attention(layout: str) -> Tensor:
    bounds = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=DEVICE)
    if layout == "apart":
        return ops.attention(_leaf(2, 2, 5, 32), _leaf(2, 2, 9, 32), _leaf(2, 2, 9, 32), backend="triton")
    if layout == "masked":
        keep = torch.tensor([[True, False, True, True, False], [True] * 5], device=DEVICE)
        return ops.attention(*(_leaf(2, 2, 5, 16) for _ in "qkv"), key_mask=keep, backend="triton")
    if layout == "sequences apart":
        return ops.attention_varlen(*(_leaf(14, 2, 16) for _ in "qkv"), bounds, 7, backend="triton")
    if layout == "sequences":
        return ops.attention_varlen_qkvpacked(_leaf(14, 3, 2, 16), bounds, 7, backend="triton")
    return ops.attention_qkvpacked(_leaf(2, 17, 3, 2, 16), backend="triton")


def _mlp(
    dtype: torch.dtype = FP32, statistics: bool = False, wanted: bool = False, bare: bool = False,
    autocast: bool = False, **kind: Any,
) -> Tensor:  # fmt: skip
    case = make_case(18, 32, 48, dtype, **kind)
    case = case.but(x=case.x.detach().view(2, 9, -1).requires_grad_())
    if bare:
        case = case.but(norm2_weight=None, norm2_bias=None, fc1_bias=None, fc2_bias=None, scale2=None)
    with torch.autocast(DEVICE, BF16) if autocast else nullcontext():
        return case.fused(statistics_of(case.x) if statistics else None, next_statistics=wanted)[0]


def _block(dtype: torch.dtype = FP32, wanted: bool = False, bare: bool = False, half: int = 0, **kind: Any) -> Tensor:
    case = make_block(dtype, **kind)
    if bare:
        vectors = {name: None for name, leaf in case.leaves().items() if leaf.dim() == 1}
        case = case.but(**vectors)
    return (case.half(half) if half else case).fused(next_statistics=wanted)[0]


@torch.no_grad()
def _frozen() -> Tensor:
    case = make_block(FP32, inner_norm="layer_norm")
    return replace(case, t=fold(case.t, FP32, inner_norm="layer_norm")).fused()[0]


def _rotary(norm: str, biased: bool = True, rotated: bool = True) -> Tensor:
    table = torch.rand(4, 8, device=DEVICE)
    norms = [Norm(_leaf(16), _leaf(16) if biased else None, 1e-6, norm) for _ in "qk"] if norm else []
    return ops.qk_norm_rope(
        _leaf(2, 5, 3, 2, 16), qk_norm=QkNorm(*norms) if norms else None,
        rope=Rope(table, table, 1) if rotated else None, backend="triton",
    )  # fmt: skip


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
    **{
        f"attention, {layout}": (_attention, (layout,), {})
        for layout in ("apart", "masked", "sequences apart", "sequences", "packed")
    },
    "mlp": (_mlp, (), {}),
    "mlp, autocast": (_mlp, (), {"autocast": True}),
    "mlp, autocast, a branch": (_mlp, (), {"autocast": True, "residual": False, "bare": True}),
    "mlp, bf16, statistics": (_mlp, (BF16,), {"statistics": True, "wanted": True}),
    "mlp, bare": (_mlp, (), {"bare": True}),
    "mlp, gated": (_mlp, (BF16,), {"gated": True}),
    "mlp, gated, a norm inside": (_mlp, (), {"gated": True, "inner_norm": "layer_norm"}),
    "mlp, bf16, a norm inside": (_mlp, (BF16,), {"wanted": True, "inner_norm": "layer_norm"}),
    "block": (_block, (), {}),
    "block, bf16": (_block, (BF16,), {"wanted": True}),
    "block, bare": (_block, (), {"bare": True}),
    "block, frozen": (_frozen, (), {}),
    "block, a norm inside, rotated": (_block, (), {"inner_norm": "layer_norm", "leading": ()}),
    "block, qk-norm over the head, rotated": (_block, (BF16,), {"qk": "layer_norm", "leading": ()}),
    "block, packed": (_block, (), {"keys": "packed", "leading": ()}),
    "block, padded": (_block, (), {"keys": "mask"}),
    "half": (_block, (), {"half": 1}),
    "half, bf16, a branch": (_block, (BF16,), {"half": 1, "residual": False}),
    "rotary": (_rotary, ("layer_norm",), {}),
    "rotary, no bias": (_rotary, ("rms_norm",), {"biased": False}),
    "rotary, not normalized": (_rotary, ("",), {}),
    "rotary, not rotated": (_rotary, ("layer_norm",), {"rotated": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    function, args, kwargs = CALLS[name]

    def run() -> None:
        y = function(*args, **kwargs)
        if y.requires_grad:
            y.float().square().sum().backward()

    made = calls_of(run)
    assert made
    for operator, arguments in made:
        if "backward" in str(operator) or name == "block, frozen":
            arguments = each_tensor(Tensor.detach, arguments)
        library.opcheck(operator, arguments)


def test_every_operator_has_a_flop_formula_and_few_arguments() -> None:
    from torch.utils.flop_counter import flop_registry

    _attention("packed")
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("vit_fast::")}
    names -= {"vit_fast::exported_attention"}  # it marks attention in graphs that become ONNX
    operators = [getattr(torch.ops.vit_fast, name.removeprefix("vit_fast::").partition(".")[0]) for name in names]
    assert operators and set(operators) <= flop_registry.keys()
    assert all(len(operator.default._schema.arguments) <= 12 for operator in operators)
