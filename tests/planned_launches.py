"""Compares the launches of a replayed plan with those of the same call without a plan, under the stand-in driver.

    python tests/planned_launches.py sm_90 1    # architecture; every n-th case

A plan must launch the same kernels with the same grids and arguments, also if inputs have other addresses than in the
recording. Only buffers that the operator allocates may move. All launches and tensor maps must be legal.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from our_operators import calls_of, each_tensor
from torch import Tensor
from torch.utils import _pytree as pytree
from triton.backends.nvidia import driver as nvidia

from vit_fast import ops
from vit_fast.kernels import plan
from vit_fast.kernels.device import reads_descriptors, starts_early
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.ops import Norm, QkNorm, Rope
from vit_fast.ops.backends import fp8_reasons
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockScales, BlockTensors, Keys
from vit_fast.ops.folded import fold

BF16, FP32 = torch.bfloat16, torch.float32
Arguments = tuple[Any, ...]
Call = Callable[[], Tensor]


def zeros(*shape: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """Returns zeros that start `offset` elements after an aligned address."""
    size = torch.Size(shape)
    return torch.zeros(size.numel() + offset, dtype=dtype)[offset:].view(size)


class Address(int):
    """A launch argument that is an address."""


tapes = threading.local()


def listen() -> None:
    """Records the arguments of Triton's C launcher; must be called before any kernel is compiled."""
    wrap = nvidia.wrap_handle_tensordesc

    def wrap_taped(launcher: Any, *args: Any) -> Any:
        def taped(*arguments: Any) -> None:
            *front, last = arguments
            if isinstance(last, list | tuple):  # triton 3.7: [..., declarations, signature, arguments]
                declared = front.pop(-2)
                last = list(_declared(declared, last))
            getattr(tapes, "tape", []).append((launcher, *front, last))
            launcher(*arguments)

        return wrap(taped, *args)

    nvidia.wrap_handle_tensordesc = wrap_taped


def _declared(declarations: Any, arguments: Any) -> Iterator[Any]:
    """Yields the arguments that the C launcher of triton 3.7 passes to a kernel, as declared by PyKernelArg structs."""
    for declaration, value in zip(declarations, arguments, strict=True):
        address = id(declaration) + object.__basicsize__
        kind = ctypes.c_int.from_address(address + 8).value
        if kind == nvidia.ARG_TUPLE:
            yield from _declared(ctypes.py_object.from_address(address).value, value)
        elif kind == nvidia.ARG_KERNEL:
            yield value


def taped(call: Callable[[], Any]) -> tuple[list[list[Any]], Any]:
    """Returns the flat arguments of each launch of a call, and its result."""
    tapes.tape = []
    result = call()
    return [list(_flattened(arguments)) for arguments in tapes.tape], result


def _flattened(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, list | tuple):
            yield from _flattened(value)
        elif type(value).__name__ == "PyCUtensorMap":
            words = ctypes.string_at(id(value) + type(value).__basicsize__ - 128, 128)
            yield Address(int.from_bytes(words[:8], "little"))
            yield words[8:]
        else:
            yield Address(value.data_ptr()) if isinstance(value, Tensor) else value


def described(result: Any) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in pytree.tree_leaves(result)]


def keep_what_is_recorded() -> list[Tensor]:
    """Keeps all tensors of recordings alive, so that they have different addresses."""
    kept: list[Tensor] = []
    add = plan._Recorder._add

    def add_and_keep(self: Any, tensor: Tensor, kind: str) -> None:
        kept.append(tensor)
        add(self, tensor, kind)

    plan._Recorder._add = add_and_keep  # type: ignore[method-assign]  # a spy
    return kept


def assert_same(ordinary: list[list[Any]], planned: list[list[Any]], inputs: Arguments) -> None:
    """Asserts equal launches, and equal addresses of inputs; other addresses must map one to one."""
    assert len(ordinary) == len(planned) > 0
    spans = [
        range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensor in pytree.tree_leaves(inputs)
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
    """Compares a replay with the call without a plan, at the same and at other addresses."""
    plan.forget()
    operator(*arguments)  # compiles the kernels; records nothing
    ordinary, made = taped(lambda: operator(*arguments))
    assert plan.plans() != [None], operator
    replayed, again = taped(lambda: operator(*arguments))
    assert_same(ordinary, replayed, arguments)
    assert described(made) == described(again)
    moved = each_tensor(elsewhere, arguments)
    replayed, _ = taped(lambda: operator(*moved))
    assert len(plan.plans()) == 1
    plan.forget()
    operator(*moved)
    ordinary, _ = taped(lambda: operator(*moved))
    assert_same(ordinary, replayed, moved)
    kept.clear()


def elsewhere(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same shape, strides and alignment at another address."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.zeros(start + max(extent, 0) + 64, dtype=tensor.dtype)
    return memory[start:].as_strided(tensor.shape, tensor.stride(), start)


def cases() -> Iterator[Call]:
    """Yields MLPs and attention: half precision, fp32, fp32 parameters, unaligned, repeated and copied inputs."""
    bounds, half = torch.tensor([0, 9, 9, 17], dtype=torch.int32), torch.zeros(4, 18, dtype=torch.int32)[:, 1]
    for rows, width, hidden, dtype, weights, offset in (
        (17, 64, 128, BF16, BF16, 0),
        (34, 72, 200, BF16, FP32, 0),
        (16, 64, 128, FP32, FP32, 0),
        (5, 70, 201, BF16, BF16, 1),
    ):
        x = zeros(rows, width, dtype=dtype, offset=offset).requires_grad_()
        vectors = [zeros(width, dtype=weights) for _ in range(4)]
        fc1, fc2, bias1 = (zeros(*s, dtype=weights) for s in ((hidden, width), (width, hidden), (hidden,)))
        absent: Any = (None,) * 7
        mlp = BlockTensors(*absent, *vectors[:2], fc1, bias1, fc2, vectors[2], vectors[3])
        inside = mlp._replace(
            scale2=None, gate_weight=zeros(hidden, width, dtype=weights), gate_bias=bias1, inner_weight=bias1,
            inner_bias=bias1,
        )  # fmt: skip
        for tensors, inner in ((mlp, None), (inside, ("layer_norm", 1e-6))):
            yield lambda x=x, t=tensors, inner=inner: fused_block(
                x, None, t, eps=(0.0, 1e-6), inner_norm=inner, next_statistics=True
            )[0]
        qkv = zeros(2, 17, 3, 2, 64, dtype=dtype, offset=offset).requires_grad_()
        yield lambda qkv=qkv: ops.attention_qkvpacked(qkv, backend="triton")
        one = zeros(2, 2, 17, 64, dtype=dtype).requires_grad_()
        for triple in (qkv.transpose(1, 3).unbind(2), (one, one, one)):
            yield lambda triple=triple: ops.attention(*triple, backend="triton")
        for keep in (torch.ones(2, 17, dtype=torch.bool), torch.ones(2, 34, dtype=torch.bool)[:, ::2]):
            yield lambda one=one, keep=keep: ops.attention(one, one, one, key_mask=keep, backend="triton")
        packed = zeros(20, 3, 2, 64, dtype=dtype, offset=offset).requires_grad_()
        for sequences in (bounds, half):
            yield lambda p=packed, s=sequences: ops.attention_varlen_qkvpacked(p, s, 9, backend="triton")
        yield lambda p=packed: ops.attention_varlen(*p.unbind(1), bounds, 9, backend="triton")


def shape_cases() -> Iterator[Call]:
    """Yields attention and MLPs of many sizes; one query for the whole batch, with stride 0."""
    for head_dim, tokens, dtype in (
        *product((16, 32, 64, 72, 80, 96, 128), (1, 50, 197, 577), (BF16,)),
        *product((64, 80), (1, 197), (FP32, torch.float16)),
    ):
        qkv = zeros(2, tokens, 3, 2, head_dim, dtype=dtype).requires_grad_()
        yield lambda qkv=qkv: ops.attention_qkvpacked(qkv, backend="triton")
    q, (k, v) = zeros(1, 2, 16, 64).expand(4, -1, -1, -1), zeros(2, 4, 2, 50, 64).requires_grad_()
    yield lambda: ops.attention(q, k, v, backend="triton")
    sizes = product((1, 2, 15, 16, 394), ((192, 768), (70, 201)), (BF16, FP32))
    for rows, (width, hidden), dtype in sizes:
        shapes = (rows, width), (width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,)
        tensors = [zeros(*shape, dtype=dtype).requires_grad_() for shape in shapes]
        yield lambda tensors=tensors: ops.layer_norm_mlp(*tensors, backend="triton")


def block_cases() -> Iterator[Call]:
    """Yields blocks, half blocks and folded blocks, in half precision, with fp32 parameters, and in fp32."""
    shapes = (64,), (64,), (192, 64), (192,), (64, 64), (64,), (64,), (64,), (64,), (128, 64), (128,), (64, 128)
    for dtype, weights in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        x = zeros(1, 17, 64, dtype=dtype).requires_grad_()
        t = BlockTensors(*(zeros(*shape, dtype=weights) for shape in (*shapes, (64,), (64,))))
        options = {"heads": 1, "eps": (1e-6, 1e-5), "next_statistics": True}
        first = BlockTensors(*t[:7], *(None,) * 7)  # type: ignore[arg-type]  # a half
        for given in (t, first):
            yield lambda x=x, given=given, o=options: fused_block(x, None, given, **o)[0]
        yield lambda x=x, t=t, d=dtype, o=options: fused_block(x.detach(), None, fold(t, d), **o)[0]


def modern_cases() -> Iterator[Call]:
    """Yields gated blocks with RMSNorm, rotary embeddings, qk-norm, and padded or packed images."""
    C, F = 64, 128
    table, vector = zeros(16, 32, dtype=FP32), zeros(64)
    t = BlockTensors(
        zeros(C), None, zeros(3 * C, C), zeros(3 * C), zeros(C, C), zeros(C), zeros(C), zeros(C), None, zeros(F, C),
        zeros(F), zeros(C, F), zeros(C), zeros(C), zeros(F, C), zeros(F),
    )  # fmt: skip
    inside = t._replace(inner_weight=zeros(F), inner_bias=zeros(F))
    half, interleaved = Rope(table, table, 1), Rope(table, table, 1, "interleaved")
    normed = QkNorm(Norm(vector, kind="rms_norm"), Norm(vector, kind="rms_norm"))
    packed = Keys(torch.tensor([0, 9, 9, 17], dtype=torch.int32), 9)
    padded = Keys(mask=torch.ones(2, 17, dtype=torch.bool))
    for tensors, options in (
        (t, {"rope": half}),
        (t, {"rope": interleaved, "qk_norm": normed}),
        (t, {"rope": interleaved, "keys": padded}),
        (t, {"rope": half, "keys": packed}),
        (inside, {"rope": half, "inner_norm": ("layer_norm", 1e-6)}),
    ):
        x = zeros(1 if options.get("keys") is packed else 2, 17, C).requires_grad_()
        options |= {"heads": 1, "eps": (1e-6, 1e-5), "norm": "rms_norm", "activation": "silu", "next_statistics": True}
        yield lambda x=x, tensors=tensors, options=options: fused_block(x, None, tensors, **options)[0]


def fp8_block() -> tuple[Tensor, Any, dict[str, Any]]:
    """Returns arguments of `fused_block`: x, a quantized block, and options."""
    x, ones = zeros(2, 17, 64), torch.ones(64)
    tensors = BlockTensors(
        None, None, zeros(192, 64), zeros(192), zeros(64, 64), zeros(64), zeros(64), None, None, zeros(128, 64),
        zeros(128), zeros(64, 128), zeros(64), zeros(64),
    )  # fmt: skip
    block = fold(tensors, BF16, scales=BlockScales(ones, ones[0], ones, ones[0]))
    return x, block, {"heads": 1, "eps": (1e-6, 1e-6), "next_statistics": True, "next_factor": ones}


def fp8_cases() -> Iterator[Call]:
    """Yields two consecutive blocks in e4m3."""
    x, block, options = fp8_block()

    def two() -> Tensor:
        y, statistics, x8 = fused_block(x, None, block, **options)
        return fused_block(y, statistics, block, x8=x8, **options)[0]

    yield two


def calls(case: Call) -> list[tuple[Any, Arguments]]:
    """Returns the operators of a call and of its backward, with their arguments."""

    def run() -> None:
        out = case()
        if out.requires_grad:
            out.backward(torch.zeros_like(out))

    return [(operator, each_tensor(Tensor.detach, arguments)) for operator, arguments in calls_of(run)]


def main() -> None:
    torch.set_num_threads(1)
    listen()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    arch, every = sys.argv[1], int(sys.argv[2])
    driver = stand_in_driver.install(arch)
    in_fp8 = () if fp8_reasons(torch.device("cpu")) else fp8_cases()
    chosen = [*cases(), *block_cases(), *modern_cases(), *in_fp8, *shape_cases()][::every]
    found = [call for case in chosen for call in calls(case)]
    kept = keep_what_is_recorded()
    for operator, arguments in found:
        hold(operator, arguments, kept)
    assert driver.violations() == []
    assert bool(driver.counters().dependent) == starts_early(arch)
    assert bool(driver.counters().descriptors) == reads_descriptors(arch)
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
