"""RMSNorm in the place of LayerNorm: folded into linear layers, MLPs and whole blocks, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import mlp_support as support
import pytest
import torch
import torch.nn.functional as F
from kernel_execution import DTYPES
from mlp_support import DEVICE, assert_rule, check_case, make_case, statistics_of
from torch import Tensor

from vit_fast.ops.attention import attention_qkvpacked
from vit_fast.ops.block import fold, fused_block
from vit_fast.ops.descriptions import BlockTensors
from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp
from vit_fast.ops.linear import layer_norm_linear, linear_residual

support.make_bf16_exact()


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("residual", [True, False])
def test_mlp(dtype: torch.dtype, mean: float, residual: bool) -> None:
    check_case(make_case(37, 72, 96, dtype, mean=mean, norm="rms_norm", residual=residual))


def test_mlp_of_several_pieces_with_fp32_parameters() -> None:
    check_case(make_case(20, 264, 40, torch.bfloat16, norm="rms_norm"), torch.float32)


def test_mlp_without_parameters_of_the_norm() -> None:
    case = make_case(9, 40, 48, torch.float16, norm="rms_norm")
    check_case(replace(case, parameters=(None, None, *case.parameters[2:])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_and_constant_rows(dtype: torch.dtype) -> None:
    case = make_case(9, 64, 48, dtype, norm="rms_norm")
    with torch.no_grad():
        case.x[2] = 0
        case.x[5] = 3
    check_case(case)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_statistics_are_those_of_a_layer_norm(dtype: torch.dtype) -> None:
    """Whoever wrote the rows need not know which norm will read them."""
    case = make_case(19, 72, 48, dtype, norm="rms_norm")
    with torch.no_grad():
        choices = {"eps": 1e-6, "norm": "rms_norm", "activation": "gelu", "layer_scale": None, "residual": True}
        handed, _ = fused_layer_norm_mlp(case.x, statistics_of(case.x), *case.parameters, **choices)
        own, _ = fused_layer_norm_mlp(case.x, None, *case.parameters, **choices)
    torch.testing.assert_close(handed, own)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layer_against_fp64(dtype: torch.dtype) -> None:
    shapes = ((2, 9, 72), (72,), (48, 72), (48,), (2, 9, 48))
    base = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    base[0] += 1

    def run(target: torch.dtype, ours: bool) -> dict[str, Tensor]:
        x, gamma, weight, bias = leaves = [tensor.to(target).requires_grad_() for tensor in base[:4]]
        if ours:
            y = layer_norm_linear(x, gamma, None, weight, bias, eps=1e-6, norm="rms_norm")
        else:
            y = F.linear(F.rms_norm(x, (72,), gamma, 1e-6), weight, bias)
        gradients = torch.autograd.grad(y, leaves, base[4].to(target))
        return {"y": y.detach(), **dict(zip(("x", "gamma", "weight", "bias"), gradients))}

    assert_rule(run(dtype, True), run(dtype, False), run(torch.float64, False))


def _block(dtype: torch.dtype) -> tuple[Tensor, BlockTensors]:
    C, hidden = 64, 48
    shapes = (
        (C,), None, (3 * C, C), (3 * C,), (C, C), (C,), (C,),
        (C,), None, (hidden, C), (hidden,), (C, hidden), (C,), (C,),
    )  # fmt: skip
    leaves = (
        None if shape is None else (0.3 * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()
        for shape in shapes
    )
    return torch.randn(2, 5, C, device=DEVICE).to(dtype).requires_grad_(), BlockTensors(*leaves)


def _by_one(x: Tensor, statistics: Tensor | None, t: BlockTensors) -> tuple[Tensor, Tensor | None]:
    return fused_block(
        x, statistics, t, heads=2, attention_scale=None, eps=(1e-6, 1e-5), norm="rms_norm", activation="gelu",
        next_statistics=True,
    )  # fmt: skip


def _by_four(x: Tensor, statistics: Tensor | None, t: BlockTensors) -> tuple[Tensor, Tensor | None]:
    qkv = layer_norm_linear(
        x, t.norm1_weight, None, t.qkv_weight, t.qkv_bias, eps=1e-6, norm="rms_norm", statistics=statistics
    )
    mixed = attention_qkvpacked(qkv.unflatten(-1, (3, 2, -1)), backend="triton").flatten(2)
    x, statistics = linear_residual(
        mixed, t.proj_weight, t.proj_bias, layer_scale=t.scale1, residual=x, next_statistics=True
    )
    return fused_layer_norm_mlp(
        x, statistics, t.norm2_weight, None, t.fc1_weight, t.fc1_bias, t.fc2_weight, t.fc2_bias,
        eps=1e-5, norm="rms_norm", activation="gelu", layer_scale=t.scale2, residual=True, next_statistics=True,
    )  # fmt: skip


@pytest.mark.fast_cases("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_is_its_four_operators(dtype: torch.dtype) -> None:
    x, tensors = _block(dtype)
    leaves = [tensor for tensor in (x, *tensors) if tensor is not None]
    found = []
    for run in (_by_one, _by_four):
        y, _ = run(x, None, tensors)
        with torch.no_grad():
            following, _ = run(x, None if dtype == torch.float32 else statistics_of(x), tensors)
        found.append((y.detach(), following, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_frozen_block() -> None:
    x, tensors = _block(torch.bfloat16)
    with torch.no_grad():
        frozen = fold(tensors, torch.bfloat16, "rms_norm")
        assert frozen.qkv_sum is not None and frozen.qkv_sum.numel() == 0
        assert torch.equal(_by_one(x, None, frozen)[0], _by_one(x, None, tensors)[0])


def test_an_unknown_norm() -> None:
    with pytest.raises(ValueError, match="norm is 'rms': accepted are 'layer_norm', 'rms_norm'"):
        x = torch.randn(4, 8, device=DEVICE)
        layer_norm_linear(x, None, None, torch.randn(8, 8, device=DEVICE), None, eps=1e-6, norm="rms")
