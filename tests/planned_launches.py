"""Launches by plan against the launches of the same call without one; asserted in a process with the stand-in driver.

A plan must launch the same kernels with the same grids and arguments, whatever moved since it was recorded; only the
buffers that an operator allocates for itself may lie elsewhere, each in one other place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from launch_tapes import BF16, FP32, Address, Arguments, described, listen, taped, zeros
from torch import Tensor

from vit_fast.kernels import plan, plan_recorder
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.ops.attention_op import attention_backward_op, attention_op, attention_qkvpacked_op
from vit_fast.ops.attention_varlen_op import (
    attention_masked_backward_op,
    attention_masked_op,
    attention_varlen_backward_op,
    attention_varlen_op,
    attention_varlen_qkvpacked_backward_op,
    attention_varlen_qkvpacked_op,
)
from vit_fast.ops.block import fold
from vit_fast.ops.block_op import block_backward_op, block_op, block_training_op
from vit_fast.ops.descriptions import BlockScales, BlockTensors
from vit_fast.ops.fp8 import quantize_block
from vit_fast.ops.fp8_op import block_fp8_op
from vit_fast.ops.layer_norm_mlp_op import layer_norm_mlp_backward_op, layer_norm_mlp_op, layer_norm_mlp_training_op
from vit_fast.ops.linear_op import (
    layer_norm_linear_backward_op,
    layer_norm_linear_op,
    layer_norm_linear_training_op,
    linear_residual_backward_op,
    linear_residual_op,
)


def keep_what_is_recorded() -> list[Tensor]:
    """Everything that a recorded function makes stays, from now on, so that no two have the same address."""
    kept: list[Tensor] = []
    add = plan_recorder._Recorder._add

    def add_and_keep(self: Any, tensor: Tensor, kind: str) -> None:
        kept.append(tensor)
        add(self, tensor, kind)

    plan_recorder._Recorder._add = add_and_keep  # type: ignore[method-assign]  # a spy
    return kept


def assert_same(ordinary: list[list[Any]], planned: list[list[Any]], inputs: Arguments) -> None:
    """The same launches; addresses of inputs the same, each other one always in place of the same one."""
    assert len(ordinary) == len(planned) > 0
    spans = [
        range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensor in inputs
        if isinstance(tensor, Tensor) and tensor.is_contiguous()
    ]
    moved: dict[int, int] = {}
    for expected, found in zip(ordinary, planned):
        assert len(expected) == len(found)
        for before, after in zip(expected, found):
            if isinstance(before, Address) and not any(before in span for span in spans):
                assert moved.setdefault(before, after) == after
                assert before % 16 == after % 16
            else:
                assert before == after, (before, after)


def hold(operator: Any, arguments: Arguments, kept: list[Tensor]) -> None:
    """Recorded, replayed, and replayed elsewhere: the launches of the call without a plan."""
    for tensors in (arguments, moved(arguments)):
        plan.forget()
        operator(*tensors)  # a launch that compiles is triton's own, with hooks; and nothing is recorded yet
        ordinary, made = taped(lambda tensors=tensors: operator(*tensors))
        assert plan.plans() != [None], operator
        replayed, again = taped(lambda tensors=tensors: operator(*tensors))
        assert_same(ordinary, replayed, tensors)
        assert [*map(described, leaves(made))] == [*map(described, leaves(again))]
        elsewhere = moved(tensors)
        replayed, _ = taped(lambda tensors=elsewhere: operator(*tensors))
        assert len(plan.plans()) == 1
        plan.forget()
        operator(*elsewhere)
        ordinary, _ = taped(lambda tensors=elsewhere: operator(*tensors))
        assert_same(ordinary, replayed, elsewhere)
    kept.clear()


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def moved(arguments: Arguments) -> Arguments:
    """The same shapes and strides somewhere else, as well aligned."""
    return tuple(elsewhere(value) if isinstance(value, Tensor) else value for value in arguments)


def elsewhere(tensor: Tensor) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.zeros(start + max(extent, 0) + 64, dtype=tensor.dtype)
    return memory[start:].as_strided(tensor.shape, tensor.stride(), start)


def cases() -> Iterator[tuple[Any, Arguments]]:
    """Operators with arguments: half precision, fp32, fp32 parameters, unaligned, one tensor twice, nothing absent."""
    for rows, width, hidden, dtype, weights, offset in (
        (17, 64, 128, BF16, BF16, 0),
        (34, 72, 200, BF16, FP32, 0),
        (16, 64, 128, FP32, FP32, 0),
        (5, 70, 201, BF16, BF16, 1),
    ):
        x = zeros(rows, width, dtype=dtype, offset=offset)
        vectors = [zeros(width, dtype=weights) for _ in range(4)]
        fc1, fc2 = zeros(hidden, width, dtype=weights), zeros(width, hidden, dtype=weights)
        bias1 = zeros(hidden, dtype=weights)
        mlp = (*vectors[:2], fc1, bias1, fc2, vectors[2], vectors[3], None, None)
        wanted = dtype != FP32
        yield layer_norm_linear_op, (x, None, *vectors[:2], fc1, bias1, 1e-6, "layer_norm", dtype)
        yield layer_norm_linear_op, (x, None, None, None, fc1, None, 1e-6, "layer_norm", dtype)
        training = (x, None, *vectors[:2], fc1, bias1, 1e-6, "layer_norm", dtype)
        yield layer_norm_linear_training_op, training
        out, made, statistics = layer_norm_linear_training_op(*training)
        kept = made if dtype == FP32 else x
        yield layer_norm_linear_backward_op, (out, kept, statistics, *vectors[:2], fc1, bias1, "layer_norm")
        h = zeros(rows, hidden, dtype=dtype, offset=offset)
        yield linear_residual_op, (h, fc2, vectors[2], vectors[3], x, wanted)
        yield linear_residual_backward_op, (x, h, fc2, vectors[2], vectors[3])
        gate, affine = zeros(hidden, width, dtype=weights), zeros(hidden, dtype=weights)
        inside = (*mlp[:6], None, gate, bias1)
        for parameters, inner in ((mlp, (None, None, "none")), (inside, (affine, affine, "layer_norm"))):
            training = (x, None, *parameters, 1e-6, "layer_norm", "gelu", True, wanted, dtype, *inner, 1e-6)
            yield layer_norm_mlp_op, training
            yield layer_norm_mlp_training_op, training
            y, _, z, made, statistics, *hidden_rows = layer_norm_mlp_training_op(*training)
            kept = made if dtype == FP32 else x
            before = (y, kept, statistics, z, *parameters, "layer_norm", "gelu", True)
            yield layer_norm_mlp_backward_op, (*before, *hidden_rows, *inner)
        packed = zeros(2, 17, 3, 2, 64, dtype=dtype, offset=offset)
        yield attention_qkvpacked_op, (packed, 0.125)
        q, k, v = packed.transpose(1, 3).unbind(2)
        yield attention_op, (q, k, v, 0.125)
        one = zeros(2, 2, 17, 64, dtype=dtype)
        yield attention_op, (one, one, one, 0.125)
        out, lse = attention_op(one, one, one, 0.125)
        yield attention_backward_op, (one, one, one, one, out, lse, 0.125)
        yield from varlen_cases(zeros(20, 3, 2, 64, dtype=dtype, offset=offset), one)


def varlen_cases(qkv: Tensor, one: Tensor) -> Iterator[tuple[Any, Arguments]]:
    """Packed sequences and masked keys; a row of the mask that has to be copied, which a replay does too."""
    bounds, half = torch.tensor([0, 9, 9, 17], dtype=torch.int32), torch.zeros(4, 18, dtype=torch.int32)[:, 1]
    for sequences in (bounds, half):
        yield attention_varlen_qkvpacked_op, (qkv, sequences, 9, 0.125)
    q, k, v = qkv.unbind(1)
    yield attention_varlen_op, (q, k, v, bounds, 9, 0.125)
    out, lse = attention_varlen_op(q, k, v, bounds, 9, 0.125)
    yield attention_varlen_backward_op, (out, q, k, v, bounds, out, lse, 9, 0.125)
    yield attention_varlen_qkvpacked_backward_op, (out, qkv, bounds, out, lse, 9, 0.125)
    for keep in (torch.ones(2, 17, dtype=torch.bool), torch.ones(2, 34, dtype=torch.bool)[:, ::2]):
        yield attention_masked_op, (one, one, one, keep, 0.125)
        out, lse = attention_masked_op(one, one, one, keep, 0.125)
        yield attention_masked_backward_op, (one, one, one, one, keep, out, lse, 0.125)


def block_cases() -> Iterator[tuple[Any, Arguments]]:
    """Whole blocks of half precision, of fp32 parameters beside it, and of fp32."""
    for dtype, weights in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        x = zeros(1, 17, 64, dtype=dtype)
        shapes = (64,), (64,), (192, 64), (192,), (64, 64), (64,), (64,), (64,), (64,), (128, 64), (128,), (64, 128)
        tensors = [zeros(*shape, dtype=weights) for shape in (*shapes, (64,), (64,))]
        of_qk = ("none", 0.0, "head", 0, "half", 0)
        settings = (1, 0.125, 1e-6, 1e-5, "layer_norm", "gelu", *of_qk, dtype != FP32, dtype)
        none = (None,) * 8
        for inner in (
            BlockTensors(*tensors),
            fold(BlockTensors(*tensors), dtype),
        ):
            yield block_op, (x, None, *inner[:16], *none, *inner[16:18], *settings, None, None, None, "none", 0.0)
        call = (x, None, *tensors, None, None, *none, *settings, None, None, "none", 0.0)
        yield block_training_op, call
        y, _, rows, statistics, *kept = block_training_op(*call)
        rows = rows if dtype == FP32 else x
        yield (
            block_backward_op,
            (
                y,
                rows,
                statistics,
                *kept,
                *tensors,
                None,
                None,
                *none,
                0.125,
                "layer_norm",
                "gelu",
                *of_qk,
                *(None, None, "none"),
            ),
        )


def modern_cases() -> Iterator[tuple[Any, Arguments]]:
    """Blocks of rotary positions, of qk-norm, of RMSNorms and a gate; of padded and of packed images."""
    C, F = 64, 128
    x, table, vector = zeros(2, 17, C), zeros(1, 1, 16, 32, dtype=FP32), zeros(64)
    tensors = [
        zeros(C), None, zeros(3 * C, C), zeros(3 * C), zeros(C, C), zeros(C), zeros(C), zeros(C), None, zeros(F, C),
        zeros(F), zeros(C, F), zeros(C), zeros(C), zeros(F, C), zeros(F),
    ]  # fmt: skip
    everything, bounds = (None, None), torch.tensor([0, 9, 9, 17], dtype=torch.int32)
    turned = (None, None, None, None, table, table)
    rotated = (*turned, *everything), ("none", 0.0, "head", 1, "half", 0)
    normed = (vector, None, vector, None, table, table, *everything), ("rms_norm", 1e-6, "head", 1, "interleaved", 0)
    padded = (*turned, None, torch.ones(2, 17, dtype=torch.bool)), ("none", 0.0, "head", 1, "interleaved", 0)
    packed = (*turned, bounds, None), ("none", 0.0, "head", 1, "half", 9)
    none, inside = ((None, None), "none"), ((zeros(F), zeros(F)), "layer_norm")
    kinds = *((kind, none) for kind in (rotated, normed, padded, packed)), (rotated, inside)
    for (of_qk, qk_settings), (affine, inner) in kinds:
        x = zeros(1 if of_qk is packed[0] else 2, 17, C)
        settings = (1, 0.125, 1e-6, 1e-5, "rms_norm", "silu", *qk_settings, True, BF16)
        yield block_op, (x, None, *tensors, *of_qk, None, None, *settings, *affine, None, inner, 1e-6)
        call = (x, None, *tensors, *of_qk, *settings, *affine, inner, 1e-6)
        yield block_training_op, call
        y, _, _, statistics, *kept = block_training_op(*call)
        rest = (*tensors, *of_qk, 0.125, "rms_norm", "silu", *qk_settings, *affine, inner)
        yield block_backward_op, (y, x, statistics, *kept, *rest)


def fp8_cases() -> Iterator[tuple[Any, Arguments]]:
    """Blocks in e4m3: the first, which makes its operand, and one behind another."""
    x, ones = zeros(2, 17, 64), torch.ones(64)
    tensors = BlockTensors(
        None, None, zeros(192, 64), zeros(192), zeros(64, 64), zeros(64), zeros(64), None, None, zeros(128, 64),
        zeros(128), zeros(64, 128), zeros(64), zeros(64),
    )  # fmt: skip
    block = quantize_block(tensors, BlockScales(ones, ones[0], ones, ones[0]), BF16)
    layers = (*block.qkv, *block.proj, *block.fc1, *block.fc2)
    settings = (*(None,) * 6, 1, 0.125, 1e-6, 1e-5, "gelu", "none", 0.0, "head", 0, "half", True)
    first = (x, None, None, ones, *layers, *settings)
    yield block_fp8_op, first
    yield block_fp8_op, (*block_fp8_op(*first), None, *layers, *settings)


def main() -> None:
    torch.set_num_threads(1)
    listen()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    driver = stand_in_driver.install("sm_90")
    kept = keep_what_is_recorded()
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for operator, arguments in [*cases(), *block_cases(), *modern_cases(), *fp8_cases()][::every]:
        hold(operator, arguments, kept)
    assert driver.violations() == []
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
