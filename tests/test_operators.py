"""torch's requirements for operators: opcheck of each one, as public functions call it, and a FLOP formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlp_support import DEVICE, make_case, statistics_of
from our_operators import calls_of, each_tensor
from torch import Tensor, library

from vit_fast import ops
from vit_fast.ops import Norm, QkNorm, Rope
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors, Keys
from vit_fast.ops.folded import fold

pytest.importorskip("triton", reason="the kernels need triton")
C, HEADS, HIDDEN, N = 32, 2, 48, 7


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.4 * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()


def _attention(layout: str) -> Tensor:
    bounds = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=DEVICE)
    if layout == "apart":
        return ops.attention(_leaf(2, 2, 5, 32), _leaf(2, 2, 9, 32), _leaf(2, 2, 9, 32), backend="triton")
    if layout == "masked":
        keep = torch.tensor([[True, False, True, True, False], [True] * 5], device=DEVICE)
        q, k, v = (_leaf(2, 2, 5, 16) for _ in range(3))
        return ops.attention(q, k, v, key_mask=keep, backend="triton")
    if layout == "sequences apart":
        q, k, v = (_leaf(14, 2, 16) for _ in range(3))
        return ops.attention_varlen(q, k, v, bounds, 7, backend="triton")
    if layout == "sequences":
        return ops.attention_varlen_qkvpacked(_leaf(14, 3, 2, 16), bounds, 7, backend="triton")
    return ops.attention_qkvpacked(_leaf(2, 17, 3, 2, 16), backend="triton")


def _mlp(
    dtype: torch.dtype = torch.float32, statistics: bool = False, wanted: bool = False, bare: bool = False, **kind: Any
) -> Tensor:
    case = make_case(18, C, HIDDEN, dtype, **kind)
    case = case.but(x=case.x.detach().view(2, 9, -1).requires_grad_())
    if bare:
        case = case.but(norm2_weight=None, norm2_bias=None, fc1_bias=None, fc2_bias=None, scale2=None)
    return case.fused(statistics_of(case.x) if statistics else None, next_statistics=wanted)[0]


def _block(
    dtype: torch.dtype = torch.float32, qk: str = "", rotated: bool = False, keys: str = "", inner: str = "none",
    frozen: bool = False, attention_alone: bool = False, bare: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    shapes: list[Any] = [
        (C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,), (C,), (C,), (C,), (HIDDEN, C), (HIDDEN,), (C, HIDDEN), (C,),
        (C,),
    ]  # fmt: skip
    t = BlockTensors(*(_leaf(*shape, dtype=dtype) for shape in shapes))
    if inner != "none":
        t = t._replace(inner_weight=_leaf(HIDDEN, dtype=dtype), inner_bias=_leaf(HIDDEN, dtype=dtype))
    if bare:
        t = BlockTensors(*(None if len(shape) == 1 else each for shape, each in zip(shapes, t)))
    if attention_alone:
        t = BlockTensors(*t[:7], *(None,) * 7)  # type: ignore[arg-type]  # a half
    x = _leaf(*((1, 2 * N) if keys == "packed" else (2, N)), C, dtype=dtype)
    among = None
    if keys == "packed":
        among = Keys(torch.tensor([0, 5, 5, 2 * N - 1], dtype=torch.int32, device=DEVICE), 2 * N)
    elif keys == "mask":
        among = Keys(mask=torch.arange(N, device=DEVICE) < torch.tensor([[N], [N - 3]], device=DEVICE))
    table = torch.rand(x.shape[1] - 1, C // HEADS // 2, device=DEVICE)
    norms = [Norm(_leaf(C // HEADS), _leaf(C // HEADS), 1e-5, "layer_norm") for _ in "qk"]
    with torch.set_grad_enabled(not frozen):
        return fused_block(
            x, None, fold(t, dtype, inner_norm=inner) if frozen else t, heads=HEADS, eps=(1e-6, 1e-5),
            qk_norm=QkNorm(*norms, qk) if qk else None, rope=Rope(table, table, 1) if rotated else None, keys=among,
            inner_norm=(inner, 1e-5), **options,
        )[0]  # fmt: skip


def _rotary(norm: str, biased: bool = True, rotated: bool = True) -> Tensor:
    table = torch.rand(4, 8, device=DEVICE)
    norms = [Norm(_leaf(16), _leaf(16) if biased else None, 1e-6, norm) for _ in "qk"] if norm else []
    return ops.qk_norm_rope(
        _leaf(2, 5, 3, 2, 16), qk_norm=QkNorm(*norms) if norms else None,
        rope=Rope(table, table, 1) if rotated else None, backend="triton",
    )  # fmt: skip


def _autocast(run: Callable[[], Tensor]) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return run()


BF16 = torch.bfloat16
CALLS: dict[str, Callable[[], Tensor]] = {
    **{
        f"attention, {layout}": lambda layout=layout: _attention(layout)
        for layout in ("apart", "masked", "sequences apart", "sequences", "packed")
    },
    "mlp": _mlp,
    "mlp, autocast": lambda: _autocast(_mlp),
    "mlp, autocast, a branch": lambda: _autocast(lambda: _mlp(residual=False, bare=True)),
    "mlp, bf16, statistics": lambda: _mlp(BF16, statistics=True, wanted=True),
    "mlp, bare": lambda: _mlp(bare=True),
    "mlp, gated": lambda: _mlp(BF16, gated=True),
    "mlp, gated, a norm inside": lambda: _mlp(gated=True, inner_norm="layer_norm"),
    "mlp, bf16, a norm inside": lambda: _mlp(BF16, wanted=True, inner_norm="layer_norm"),
    "block": _block,
    "block, bf16": lambda: _block(BF16, next_statistics=True),
    "block, bare": lambda: _block(bare=True),
    "block, frozen": lambda: _block(frozen=True, inner="layer_norm"),
    "block, a norm inside, rotated": lambda: _block(inner="layer_norm", rotated=True),
    "block, qk-norm over the head, rotated": lambda: _block(BF16, qk="head", rotated=True),
    "block, packed": lambda: _block(keys="packed", rotated=True),
    "block, padded": lambda: _block(keys="mask"),
    "half": lambda: _block(attention_alone=True),
    "half, bf16, a branch": lambda: _block(BF16, attention_alone=True, residual=False),
    "rotary": lambda: _rotary("layer_norm"),
    "rotary, no bias": lambda: _rotary("rms_norm", biased=False),
    "rotary, not normalized": lambda: _rotary(""),
    "rotary, not rotated": lambda: _rotary("layer_norm", rotated=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    def run() -> None:
        y = CALLS[name]()
        if name != "block, frozen":
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
