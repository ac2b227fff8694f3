"""The block operator: what the four operators that it is made of give, bit for bit; what torch asks of an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlp_support import DEVICE, make_bf16_exact
from our_operators import OurOperators
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit_fast import UnsupportedInputError
from vit_fast.ops.attention import attention_qkvpacked
from vit_fast.ops.block import fold, fused_block
from vit_fast.ops.block_op import block_backward_op, block_op, block_training_op
from vit_fast.ops.descriptions import BlockTensors
from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp
from vit_fast.ops.linear import layer_norm_linear, linear_residual

make_bf16_exact()

WIDTH, HEADS, HIDDEN = 32, 2, 48
SHAPES = BlockTensors(
    (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), (WIDTH,),
    (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,), (WIDTH,),
)  # fmt: skip
NEEDED = ("qkv_weight", "proj_weight", "fc1_weight", "fc2_weight")
OPTIONAL = {name: None for name in SHAPES._fields if name not in NEEDED}
SETTINGS: dict[str, Any] = {
    "heads": HEADS, "attention_scale": None, "eps": (1e-6, 1e-5), "activation": "gelu", "next_statistics": True,
}  # fmt: skip
NO_QK_STEP = ("none", 0.0, "head", 0, "half", 0)  # neither norms nor positions
NO_INNER_NORM = (None, None, "none")


def make(dtype: torch.dtype, parameter_dtype: torch.dtype | None = None, **absent: None) -> tuple[Tensor, BlockTensors]:
    """x [2, 5, C] and the parameters, leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)

    def leaf(shape: Any, target: torch.dtype) -> Tensor:
        return (0.5 * torch.randn(shape, generator=generator)).to(DEVICE, target).requires_grad_()

    x = leaf((2, 5, WIDTH), dtype)
    return x, BlockTensors(*(leaf(shape, parameter_dtype or dtype) for shape in SHAPES[:14]))._replace(**absent)


def by_four(x: Tensor, statistics: Tensor | None, t: BlockTensors) -> tuple[Tensor, Tensor | None]:
    """The same by the single operators."""
    eps1, eps2 = SETTINGS["eps"]
    qkv = layer_norm_linear(x, t.norm1_weight, t.norm1_bias, t.qkv_weight, t.qkv_bias, eps=eps1, statistics=statistics)
    mixed = attention_qkvpacked(qkv.unflatten(-1, (3, HEADS, -1)), backend="triton").flatten(2)
    x, statistics = linear_residual(
        mixed, t.proj_weight, t.proj_bias, layer_scale=t.scale1, residual=x, next_statistics=True
    )
    return fused_layer_norm_mlp(
        x, statistics, t.norm2_weight, t.norm2_bias, t.fc1_weight, t.fc1_bias, t.fc2_weight, t.fc2_bias,
        eps=eps2, activation="gelu", layer_scale=t.scale2, residual=True, next_statistics=True,
    )  # fmt: skip


def assert_equal(ours: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    assert len(ours) == len(others)
    for one, other in zip(ours, others):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


def by_one(x: Tensor, statistics: Tensor | None, tensors: BlockTensors) -> tuple[Tensor, Tensor | None]:
    return fused_block(x, statistics, tensors, **SETTINGS)


def hold(x: Tensor, tensors: BlockTensors) -> None:
    """Inference, of two blocks, the second with the statistics of the first; training and every gradient."""
    leaves = [tensor for tensor in (x, *tensors) if tensor is not None]
    found = []
    for run in (by_one, by_four):
        with torch.no_grad():
            inference = run(*run(x, None, tensors), tensors)
        y, statistics = run(x, None, tensors)
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        found.append((*inference, y.detach(), statistics, *gradients))
    assert_equal(*found)
    assert all(tensor.isfinite().all() for tensor in found[0] if tensor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_is_the_four_operators(dtype: torch.dtype) -> None:
    hold(*make(dtype))


def test_with_fp32_parameters_and_nothing_optional() -> None:
    hold(*make(torch.bfloat16, torch.float32))
    hold(*make(torch.bfloat16, **OPTIONAL))


@pytest.mark.fast_cases("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    x, tensors = make(dtype, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        hold(x, tensors)


def arguments(
    x: Tensor, tensors: BlockTensors, next_statistics: bool = False, dtype: torch.dtype | None = None
) -> tuple[Any, ...]:
    settings = (HEADS, 0.25, 1e-6, 1e-5, "layer_norm", "gelu", *NO_QK_STEP, next_statistics, dtype or x.dtype)
    return (x, None, *tensors[:16], *(None,) * 8, *tensors[16:18], *settings, None, None, None, "none", 0.0)


def of_training(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the sums of folded weights."""
    return *arguments[:26], *arguments[28:-3], *arguments[-2:]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    wanted = dtype != torch.float32
    x, tensors = make(dtype)
    torch.library.opcheck(block_training_op, of_training(arguments(x, tensors, wanted)))
    detached = BlockTensors(*(tensor.detach() for tensor in tensors[:14]))
    torch.library.opcheck(block_op, arguments(x.detach(), detached, wanted))
    y, _, rows, statistics, *kept = block_training_op(*of_training(arguments(x.detach(), detached)))
    rows = rows if dtype == torch.float32 else x.detach()
    torch.library.opcheck(
        block_backward_op,
        (
            y,
            rows,
            statistics,
            *kept,
            *detached[:16],
            *(None,) * 8,
            0.25,
            "layer_norm",
            "gelu",
            *NO_QK_STEP,
            *NO_INNER_NORM,
        ),
    )


@pytest.mark.fast_cases("torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folded_beforehand_it_is_the_same(dtype: torch.dtype) -> None:
    x, tensors = make(dtype, torch.float32)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        frozen = fold(tensors, torch.bfloat16)
        assert_equal(by_one(x, None, frozen), by_one(x, None, tensors))
        torch.library.opcheck(block_op, arguments(x.detach(), frozen, dtype=torch.bfloat16))
        tensors.fc1_weight.zero_()  # it follows no change
        assert not torch.equal(by_one(x, None, frozen)[0], by_one(x, None, tensors)[0])
    with pytest.raises(UnsupportedInputError, match="they give no gradient"):
        by_one(x, None, frozen)


def test_what_was_folded_for_another_dtype_is_refused() -> None:
    x, tensors = make(torch.bfloat16)
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=r"folded for torch\.float32"):
        by_one(x, None, fold(tensors, torch.float32))


@pytest.mark.slow
def test_opcheck_with_nothing_optional() -> None:
    x, tensors = make(torch.float32, **OPTIONAL)
    torch.library.opcheck(block_training_op, of_training(arguments(x, tensors)))


def test_compiled_it_is_one_graph_with_one_operator_a_direction() -> None:
    x, tensors = make(torch.float32)
    seen = OurOperators()
    compiled = torch.compile(lambda x: by_one(x, None, tensors)[0], backend=seen, fullgraph=True)
    assert torch.equal(compiled(x), by_one(x, None, tensors)[0])
    assert seen == ["block_training"]


def test_torch_func_differentiates_it() -> None:
    x, tensors = make(torch.float32)
    expected = torch.autograd.grad(by_one(x, None, tensors)[0].sum(), x)[0]
    found = torch.func.grad(lambda x: by_one(x, None, tensors)[0].sum())(x.detach())
    assert torch.equal(found, expected)


def test_what_it_cannot_do_it_says() -> None:
    x, tensors = make(torch.float32)
    with pytest.raises(UnsupportedInputError, match=r"torch.vmap of a block"):
        torch.vmap(lambda x: by_one(x, None, tensors)[0])(x.detach()[None])
    (gradient,) = torch.autograd.grad(by_one(x, None, tensors)[0].sum(), x, create_graph=True)
    with pytest.raises(UnsupportedInputError, match="second derivative of a block"):
        gradient.sum().backward()
    with pytest.raises(UnsupportedInputError, match=r"weight is torch\.float64"):
        by_one(x, None, tensors._replace(qkv_weight=tensors.qkv_weight.double()))


def test_flop_are_those_of_the_four_operators() -> None:
    counts = []
    for run in (by_one, by_four):
        x, tensors = make(torch.float32)
        with FlopCounterMode(display=False) as counter:
            run(x, None, tensors)[0].sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
