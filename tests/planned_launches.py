"""Launches by plan against the launches of the same call without one; asserted in a process with the stand-in driver.

A plan must launch the same kernels with the same grids and arguments, whatever moved since it was recorded; only the
buffers that an operator allocates for itself may lie elsewhere, each in one other place.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

import vit_fast
from vit_fast.kernels import plan, plan_recorder, stand_in_driver
from vit_fast.kernels.launch import Launch
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

BF16, FP32 = torch.bfloat16, torch.float32
Arguments = tuple[Any, ...]


class Tapes(threading.local):
    """What the functions in C that launch were called with, in each thread."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, ...]] = []


tapes = Tapes()


def listen() -> None:
    """Put a tape before every launcher in C; before any kernel is compiled."""
    wrap = nvidia.wrap_handle_tensordesc

    def wrap_taped(launcher: Any, *args: Any) -> Any:
        def taped(*arguments: Any) -> None:
            tapes.tape.append((launcher, *arguments))
            launcher(*arguments)

        return wrap(taped, *args)

    nvidia.wrap_handle_tensordesc = wrap_taped


def keep_what_is_recorded() -> list[Tensor]:
    """Everything that a recorded function makes stays, from now on, so that no two have the same address."""
    kept: list[Tensor] = []
    add = plan_recorder._Recorder._add

    def add_and_keep(self: Any, tensor: Tensor, kind: str) -> None:
        kept.append(tensor)
        add(self, tensor, kind)

    plan_recorder._Recorder._add = add_and_keep  # type: ignore[method-assign]  # a spy
    return kept


def taped(call: Callable[[], Any]) -> tuple[list[list[Any]], Any]:
    """The launches of a call, flat, and its result."""
    tapes.tape = []
    result = call()
    return [list(flattened(arguments)) for arguments in tapes.tape], result


def flattened(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, list | tuple):
            yield from flattened(value)
        elif type(value).__name__ == "PyCUtensorMap":
            words = ctypes.string_at(id(value) + type(value).__basicsize__ - 128, 128)
            yield Address(int.from_bytes(words[:8], "little"))
            yield words[8:]
        else:
            yield Address(value.data_ptr()) if isinstance(value, Tensor) else value


class Address(int):
    """A number that is known to be one."""


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
        operator(*tensors)  # a launch that compiles is triton's own, with hooks
        plan.forget()
        ordinary, made = taped(lambda tensors=tensors: operator(*tensors))
        assert plan.plans() != [None], operator
        replayed, again = taped(lambda tensors=tensors: operator(*tensors))
        assert_same(ordinary, replayed, tensors)
        assert [*map(described, leaves(made))] == [*map(described, leaves(again))]
        elsewhere = moved(tensors)
        replayed, _ = taped(lambda tensors=elsewhere: operator(*tensors))
        assert len(plan.plans()) == 1
        plan.forget()
        ordinary, _ = taped(lambda tensors=elsewhere: operator(*tensors))
        assert_same(ordinary, replayed, elsewhere)
    kept.clear()


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def moved(arguments: Arguments) -> Arguments:
    """The same shapes and strides somewhere else, as well aligned."""
    return tuple(elsewhere(value) if isinstance(value, Tensor) else value for value in arguments)


def elsewhere(tensor: Tensor) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.zeros(start + max(extent, 0) + 64, dtype=tensor.dtype)
    return memory[start:].as_strided(tensor.shape, tensor.stride(), start)


def zeros(*shape: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """A tensor that starts `offset` elements behind an aligned address."""
    size = torch.Size(shape)
    return torch.zeros(size.numel() + offset, dtype=dtype)[offset:].view(size)


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
            BlockTensors._make((*tensors, None, None, None, None)),
            fold(BlockTensors._make((*tensors, None, None, None, None)), dtype),
        ):
            yield block_op, (x, None, *inner[:16], *none, *inner[16:], *settings)
        call = (x, None, *tensors, None, None, *none, *settings)
        yield block_training_op, call
        y, _, rows, statistics, *kept = block_training_op(*call)
        rows = rows if dtype == FP32 else x
        yield (
            block_backward_op,
            (y, rows, statistics, *kept, *tensors, None, None, *none, 0.125, "layer_norm", "gelu", *of_qk),
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
    for of_qk, qk_settings in (rotated, normed, padded, packed):
        x = x[:1] if of_qk is packed[0] else x
        settings = (1, 0.125, 1e-6, 1e-5, "rms_norm", "silu", *qk_settings, True, BF16)
        yield block_op, (x, None, *tensors, *of_qk, None, None, *settings)
        call = (x, None, *tensors, *of_qk, *settings)
        yield block_training_op, call
        y, _, _, statistics, *kept = block_training_op(*call)
        rest = (*tensors, *of_qk, 0.125, "rms_norm", "silu", *qk_settings)
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


def steady_state() -> None:
    """A model's second step builds no launch: forward, backward and inference."""
    model = vit_fast.create_model("vit_test", backend="triton", depth=3).bfloat16()
    images = torch.zeros(2, 3, 32, 32, dtype=BF16)

    def step() -> None:
        model(images).sum().backward()
        with torch.no_grad():
            model(images)

    step()
    build, built = Launch.__init__, []
    Launch.__init__ = lambda self, *args, **kwargs: built.append(build(self, *args, **kwargs))  # type: ignore[method-assign]  # a spy
    step()
    Launch.__init__ = build  # type: ignore[method-assign]  # a spy
    assert built == []
    assert None not in plan.plans()


def one_plan_serves_one_tensor_thrice_and_three() -> None:
    """What was recorded with one tensor as q, k and v reads three when it is given three."""
    plan.forget()
    one, others = zeros(1, 2, 17, 64), [zeros(1, 2, 17, 64) for _ in range(3)]
    attention_op(one, one, one, 0.125)
    replayed, _ = taped(lambda: attention_op(*others, 0.125))
    assert len(plan.plans()) == 1
    addresses = {value for call in replayed for value in call if isinstance(value, Address)}
    assert {tensor.data_ptr() for tensor in others} <= addresses
    assert one.data_ptr() not in addresses


def precision() -> None:
    """torch's setting for fp32 products decides which kernel: a plan is not asked across it."""
    plan.forget()
    arguments = (
        zeros(16, 64, dtype=FP32),
        None,
        None,
        None,
        zeros(128, 64, dtype=FP32),
        None,
        1e-6,
        "layer_norm",
        FP32,
    )
    tensors: list[Any] = []
    for setting in ("ieee", "tf32", "ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = setting
        calls, _ = taped(lambda: layer_norm_linear_op(*arguments))
        tensors.append(calls[-1][5])  # the function on the device
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert tensors[0] == tensors[2] != tensors[1] == tensors[3]
    assert len(plan.plans()) == 2


@triton.jit
def copy_kernel(source, target, n, SIZE: triton.language.constexpr):
    lane = triton.language.arange(0, SIZE)
    triton.language.store(target + lane, triton.language.load(source + lane, mask=lane < n), mask=lane < n)


def launched_copy(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    Launch(copy_kernel, (1,), {"source": x, "target": out, "n": x.numel()}, {"SIZE": 64}).run()
    return out


def with_torch(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Torch operators of every kind around a launch: views, results, into a buffer, of a list."""
    room = torch.empty(2, 4)
    torch.mul(x, factor, out=room[1])
    room[0].copy_(y)
    launched_copy(x)
    joined = torch.cat([room[1], y[None, :].expand(2, 4).sum(0)])
    return joined, room[1:], (x + y).to(BF16).view(2, 2).t()


def torch_operators() -> None:
    plan.forget()
    for start in (0.0, 1.0, 7.0):
        x, y = torch.arange(start, start + 4), torch.randn(4)
        found = plan.run(with_torch, (x, y, 3.0))
        for tensor, expected in zip(found, with_torch(x, y, 3.0), strict=True):
            assert torch.equal(tensor, expected)
            assert described(tensor) == described(expected)
    one = torch.ones(4)
    for tensor, expected in zip(plan.run(with_torch, (one, one, 3.0)), with_torch(one, one, 3.0)):
        assert torch.equal(tensor, expected)
    assert torch.equal(plan.run(with_torch, (one, one, 5.0))[1], 5 * one[None])
    assert len(plan.plans()) == 2 and None not in plan.plans()


FOREIGN = torch.ones(4)


def unplannable() -> None:
    """What a replay could not repeat runs each time, and follows what it reads."""

    def foreign(x: Tensor) -> Tensor:
        return x + FOREIGN

    def by_value(x: Tensor) -> Tensor:
        return x + float(x.sum())

    def itself(x: Tensor) -> Tensor:
        return x.view(-1)

    def as_bits(x: Tensor) -> Tensor:
        return (x + 0).view(torch.int32)

    def no_tensor(x: Tensor) -> tuple[Tensor, int]:
        return x + 1, 3

    x = torch.ones(4)
    for function in (foreign, by_value, itself, as_bits, no_tensor):
        plan.forget()
        plan.run(function, (x,))
        assert plan.plans() == [None], function
    plan.forget()
    plan.run(foreign, (x,))
    FOREIGN.fill_(5)
    assert torch.equal(plan.run(foreign, (x,)), torch.full((4,), 6.0))
    plan.forget()
    assert torch.equal(plan.run(by_value, (2 * x,)), 10 * x)
    assert torch.equal(plan.run(by_value, (x,)), 5 * x)


def errors() -> None:
    """A check that fails is made again the next time."""

    def failing(x: Tensor) -> Tensor:
        raise ValueError("no")

    plan.forget()
    for _ in range(2):
        try:
            plan.run(failing, (torch.ones(4),))
        except ValueError:
            continue
        raise AssertionError("it did not fail")
    assert plan.plans() == []


def hooks(driver: stand_in_driver.StandInDriver) -> None:
    """Whoever listens hears every launch, of planned operators too."""
    plan.forget()
    x, heard = torch.ones(32), []
    for _ in range(2):
        plan.run(launched_copy, (x,))
    triton.knobs.runtime.launch_enter_hook.add(heard.append)
    plan.run(launched_copy, (x,))
    plan.run(launched_copy, (x[:16],))  # not seen before: nothing is recorded
    triton.knobs.runtime.launch_enter_hook.remove(heard.append)
    copy_kernel.add_pre_run_hook(lambda *args, **kwargs: heard.append(None))
    plan.run(launched_copy, (x,))
    plan.run(launched_copy, (x[:16],))
    copy_kernel.pre_run_hooks.clear()
    assert len(heard) == 4
    assert len(plan.plans()) == 1
    before = driver.counters().launches
    plan.run(launched_copy, (x,))
    assert driver.counters().launches == before + 1


def threads() -> None:
    """Several threads replay one plan, each with its own tensors, while plans are forgotten and few maps are kept."""
    plan.forget()
    weight = zeros(128, 64)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                arguments = (zeros(17, 64), None, None, None, weight, None, 1e-6, "layer_norm", BF16)
                calls, result = taped(lambda arguments=arguments: layer_norm_linear_op(*arguments))
                addresses = {value for call in calls for value in call if isinstance(value, int)}
                assert {arguments[0].data_ptr(), weight.data_ptr(), result.data_ptr()} <= addresses
                if torch.randint(10, ()) == 0:
                    plan.forget()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def bounded() -> None:
    plan.MAX_PLANS = 4
    for n in range(1, 20):
        plan.run(launched_copy, (torch.ones(n),))
        assert len(plan.plans()) <= 4


def buffers_share() -> None:
    """Buffers overlap only where they are needed at different times."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes, starts, lengths = torch.randint(0, 9, (3, 12), generator=generator).tolist()
        needs = {i: (1000 * sizes[i] + i, starts[i], starts[i] + lengths[i]) for i in range(12)}
        offsets, total = plan_recorder._overlay(needs)
        for a in needs:
            assert offsets[a] % 256 == 0 and offsets[a] + needs[a][0] <= total
            for b in range(a):
                meet = needs[a][1] <= needs[b][2] and needs[b][1] <= needs[a][2]
                disjoint = offsets[a] + needs[a][0] <= offsets[b] or offsets[b] + needs[b][0] <= offsets[a]
                assert disjoint or not meet or 0 in (needs[a][0], needs[b][0])
    assert plan_recorder._overlay({0: (512, 0, 1), 1: (512, 2, 3)})[1] == 512


def main() -> None:
    torch.set_num_threads(1)
    listen()
    driver = stand_in_driver.install("sm_90")
    kept = keep_what_is_recorded()
    for operator, arguments in (*cases(), *block_cases(), *modern_cases(), *fp8_cases()):
        hold(operator, arguments, kept)
    one_plan_serves_one_tensor_thrice_and_three()
    precision()
    steady_state()
    torch_operators()
    unplannable()
    errors()
    hooks(driver)
    threads()
    buffers_share()
    bounded()
    assert driver.violations() == []
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
