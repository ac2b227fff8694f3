"""Tests of launches and launch plans under the stand-in driver, which needs a process of its own.

    VIT_FAST_EXECUTE=sm_90 python tests/planned_launches.py 1    # every n-th case; 0: only the rules

The driver rejects illegal launches and tensor maps. It runs no kernels: test_executed_kernels.py compares results.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import triton
from kernel_execution import KERNEL_ARCH
from kernel_support import LAYOUTS, strided
from mlp_support import make_block, make_case
from our_operators import calls_of, each_tensor
from test_operators import CALLS
from torch import Tensor
from torch.utils import _pytree as pytree
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from vit_fast import ops
from vit_fast.errors import UnsupportedInputError
from vit_fast.kernels import launch, plan
from vit_fast.kernels.device import reads_descriptors, starts_early
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.launch import Launch
from vit_fast.ops.backends import fp8_reasons

BF16, FP32 = torch.bfloat16, torch.float32
Arguments = tuple[Any, ...]
Call = Callable[[], Tensor]


def hold(operator: Any, arguments: Arguments) -> None:
    """Runs an operator without a plan, records its plan, and replays it, also with inputs at other addresses."""
    plan.forget()
    moved = each_tensor(elsewhere, arguments)
    first, *others = [described(operator(*given)) for given in (arguments, arguments, arguments, moved)]
    assert all(result == first for result in others)
    assert len(plan.plans()) == 1 and plan.plans() != [None], operator


def described(result: Any) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in pytree.tree_leaves(result)]


def elsewhere(tensor: Tensor) -> Tensor:
    """Returns a copy with the same strides and alignment at another address."""
    extent = max(0, 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())))
    start = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.zeros(start + extent + 64, dtype=tensor.dtype)
    memory[start : start + extent] = tensor.as_strided((extent,), (1,))
    return memory[start:].as_strided(tensor.shape, tensor.stride(), start)


def cases() -> Iterator[Call]:
    """Yields a call of every operator, and calls with unaligned, expanded and repeated inputs."""
    yield from (call for name, call in CALLS.items() if "FP8" not in name or not fp8_reasons(torch.device("cpu")))
    for layout in LAYOUTS:
        one = strided(layout, (2, 2, 17, 64), BF16).requires_grad_()
        yield partial(ops.attention, one, one, one, backend="triton")
    other_dtype = make_case(34, 72, 200, BF16).to(BF16, FP32)
    for case in (make_case(5, 70, 201, BF16), other_dtype, make_block(BF16, leading=())):
        yield lambda case=case: case.fused(next_statistics=True)[0]


def calls_of_many_sizes() -> Iterator[Call]:
    for head_dim, tokens, dtype in (
        *product((16, 32, 64, 72, 80, 96, 128), (1, 50, 197, 577), (BF16,)),
        *product((64, 80), (1, 197), (FP32, torch.float16)),
    ):
        qkv = torch.zeros(2, tokens, 3, 2, head_dim, dtype=dtype, requires_grad=True)
        yield partial(ops.attention_qkvpacked, qkv, backend="triton")
    for rows, (width, hidden), dtype in product((1, 2, 15, 16, 394), ((192, 768), (70, 201)), (BF16, FP32)):
        yield partial(make_case(rows, width, hidden, dtype).forward, "triton")


def calls(case: Call) -> list[tuple[Any, Arguments]]:
    """Returns the operators of a call and of its backward, with their arguments."""

    def run() -> None:
        out = case()
        if out.requires_grad:
            out.backward(torch.randn_like(out))

    return [(operator, each_tensor(Tensor.detach, arguments)) for operator, arguments in calls_of(run)]


def in_threads(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()


@triton.jit
def descriptor_copy(source, target):
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def scaled_copy(source, target, n, scale, flag, SIZE: triton.language.constexpr):
    lane = triton.language.arange(0, SIZE)
    value = triton.language.load(source + lane, mask=lane < n) * scale
    triton.language.store(target + lane, value + flag, mask=lane < n)


def a_launch(n: object = 16, scale: float = 0.5, flag: object = 3, *, size: int = 32, offset: int = 0) -> Launch:
    args = {"source": torch.zeros(64)[offset:], "target": torch.zeros(64), "n": n, "scale": scale, "flag": flag}
    return Launch(scaled_copy, 1, args, {"SIZE": size})


def a_descriptor() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(64, 64, dtype=BF16), [64, 64], [64, 1], [16, 16])


def refusals(driver: stand_in_driver.StandInDriver) -> None:
    """The stand-in counts legal launches. Illegal ones raise errors and are recorded as violations."""
    other = descriptor_copy[(1,)](a_descriptor(), a_descriptor(), num_warps=8)
    driver.reset()
    kernel = descriptor_copy[(1,)](a_descriptor(), a_descriptor())
    counters = driver.counters()
    assert (counters.launches, counters.descriptors, driver.violations()) == (1, 2, [])
    warps, clusters, *_ = kernel.packed_metadata
    odd_stride, unaligned = a_descriptor(), a_descriptor()
    odd_stride.strides, unaligned.base = [63, 1], torch.zeros(64 * 64 + 1, dtype=BF16)[1:]  # triton checked the others

    def again(kernel: Any, metadata: tuple[int, ...]) -> None:
        arguments = (a_descriptor(), a_descriptor())
        kernel.run(1, 1, 1, 0, kernel.function, metadata, None, None, None, *arguments)

    def unloaded() -> None:  # triton 3.8 unloads kernels that are no longer referenced
        ctypes.CDLL("libcuda.so.1").cuModuleUnload(ctypes.c_void_p(other.module))
        again(other, other.packed_metadata)

    for rule, illegal in {
        "descriptor_copy: the module is unloaded": unloaded,
        "tensor map: a stride must be": lambda: descriptor_copy[(1,)](a_descriptor(), odd_stride),
        "tensor map: the address must be": lambda: descriptor_copy[(1,)](a_descriptor(), unaligned),
        "descriptor_copy: the grid must be": lambda: descriptor_copy[(1, 65_536)](a_descriptor(), a_descriptor()),
        "the shared memory exceeds the limit": lambda: again(kernel, (warps, clusters, 300_000)),
    }.items():
        driver.reset()
        with pytest.raises(RuntimeError, match=rule):
            illegal()
        (violation,) = driver.violations()
        assert rule in violation and driver.counters().launches == 0
    driver.reset()


def cached_kernels(driver: stand_in_driver.StandInDriver) -> None:
    """Launches share a cached kernel if and only if Triton would. Threads may clear the cache at the same time."""

    def compiled_for(call: Launch) -> int:
        call.run()
        cached = launch._ready[call._specialization(0)].compiled
        assert cached is call._run_by_triton()
        return id(cached)

    first = compiled_for(a_launch())
    assert compiled_for(a_launch(n=32, scale=0.25)) == first
    others = [a_launch(n=1), a_launch(n=17), a_launch(n=2**40), a_launch(flag=True), a_launch(flag=1)]
    others += [a_launch(offset=1), a_launch(size=64)]
    assert len({first, *map(compiled_for, others)}) == 1 + len(others)
    most, launch.MAX_READY = launch.MAX_READY, 4
    before = driver.counters().launches
    in_threads(lambda: [a_launch(n=n).run() for n in range(2, 102)] and None)
    assert driver.counters().launches == before + 400 and len(launch._ready) <= 4
    launch.MAX_READY = most


def first_calls() -> None:
    """If several threads launch a new kernel, one of them compiles it."""
    compiling: list[int] = []
    together: list[int] = []

    def hook(**_: object) -> None:
        compiling.append(threading.get_ident())
        time.sleep(0.1)  # the others arrive
        together.append(len(compiling))

    triton.knobs.runtime.jit_cache_hook = hook
    in_threads(lambda: a_launch(size=16).run())
    triton.knobs.runtime.jit_cache_hook = None
    assert together == [1]


def precision() -> None:
    """A plan with TF32 matmuls is not replayed if torch no longer allows TF32."""
    case = make_case(16, 64, 128, FP32)
    for setting in ("tf32", "tf32", "ieee", "tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = setting
        refused = pytest.raises(UnsupportedInputError, match="fp32_precision must be 'tf32'")
        with torch.no_grad(), refused if setting == "ieee" else contextlib.nullcontext():
            case.fused()
    assert len(plan.plans()) == 1


def launched_copy(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    args = {"source": x, "target": out, "n": x.numel(), "scale": 1.0, "flag": 0}
    Launch(scaled_copy, 1, args, {"SIZE": 64}).run()
    return out


def with_torch(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Calls torch operators that return views or new tensors, write into a buffer, or take a list."""
    room = torch.empty(2, 4)
    torch.mul(x, factor, out=room[1])
    room[0].copy_(y)
    launched_copy(x)
    joined = torch.cat([room[1], y[None, :].expand(2, 4).sum(0)])
    return joined, room[1:], (x + y).to(BF16).view(2, 2).t()


def torch_operators() -> None:
    for start in (0.0, 1.0, 7.0, 8.0):
        x, y = torch.arange(start, start + 4), torch.randn(4)
        for found, expected in zip(plan.run(with_torch, (x, y, 3.0)), with_torch(x, y, 3.0), strict=True):
            assert torch.equal(found, expected)
            assert described(found) == described(expected)
    one = torch.ones(4)
    for factor in (3.0, 5.0, 5.0, 5.0):  # one tensor twice, another constant
        assert torch.equal(plan.run(with_torch, (one, one, factor))[1], factor * one[None])
    assert len(plan.plans()) == 2 and None not in plan.plans()


FOREIGN = torch.ones(4)


def unplannable() -> None:
    """Functions that a replay cannot repeat run in each call."""
    reading = (lambda x: x + FOREIGN, lambda x: x + float(x.sum()))
    others = (lambda x: x.view(-1), lambda x: (x + 0).view(torch.int32), lambda x: (x + 1, 3))
    x = torch.ones(4)
    for function in (*reading, *others):
        plan.forget()
        for _ in range(2):
            plan.run(function, (x,))
        assert plan.plans() == [None], function
    for value in (1.0, 5.0, 6.0):
        FOREIGN.fill_(value)
        assert torch.equal(plan.run(reading[0], (x,)), x + value)
        assert torch.equal(plan.run(reading[1], (value * x,)), 5 * value * x)


def hooks() -> None:
    """Launch hooks and pre-run hooks are called for every launch, also if there is a plan."""
    x, heard = torch.ones(32), []
    for _ in range(3):
        plan.run(launched_copy, (x,))
    triton.knobs.runtime.launch_enter_hook.add(heard.append)
    plan.run(launched_copy, (x,))
    plan.run(launched_copy, (x[:16],))  # has no plan: nothing is recorded
    triton.knobs.runtime.launch_enter_hook.remove(heard.append)
    scaled_copy.add_pre_run_hook(lambda *args, **kwargs: heard.append(None))
    plan.run(launched_copy, (x,))
    plan.run(launched_copy, (x[:16],))
    scaled_copy.pre_run_hooks.clear()
    assert len(heard) == 4
    assert len(plan.plans()) == 1


def changed_launcher() -> None:
    """A function has no plan, but runs, if a private function of Triton takes other arguments."""
    plan.run(launched_copy, (torch.ones(32),))  # loads the kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia, "wrap_handle_tensordesc", lambda launcher: launcher)
        with pytest.warns(UserWarning, match="launch plans do not support triton"):
            plan.run(launched_copy, (torch.ones(32),))
    plan.run(launched_copy, (torch.ones(32),))
    assert plan.plans() == [None]


def loaded_kernels() -> None:
    """A plan keeps its kernels loaded: triton 3.8 unloads kernels that are no longer referenced."""
    for number in range(4):
        plan.run(launched_copy, (torch.ones(32),))
        if number == 2:
            launch._ready.clear()
            scaled_copy.device_caches.clear()
            gc.collect()


def threads() -> None:
    """Several threads replay one plan with different tensors, while others clear the plans."""

    def work() -> None:
        for _ in range(50):
            x, y = torch.randn(2, 4)
            for found, expected in zip(plan.run(with_torch, (x, y, 3.0)), with_torch(x, y, 3.0), strict=True):
                assert torch.equal(found, expected)
            if torch.randint(10, ()) == 0:
                plan.forget()

    in_threads(work)


def what_is_recorded() -> None:
    """The second call records a plan, also after a failed call. The number of plans is limited."""
    for _ in range(3):
        with pytest.raises(IndexError):
            plan.run(lambda x: x[4], (torch.ones(4),))
    for number in (0, 1, 1):
        plan.run(launched_copy, (torch.ones(32),))
        assert len(plan.plans()) == number
    plan.MAX_PLANS = plan.MAX_SEEN = 4
    for n in range(1, 20):
        for _ in range(2):
            plan.run(launched_copy, (torch.ones(n),))
        assert 1 <= len(plan.plans()) <= 4 and len(plan._seen) <= 4


RULES = (
    precision, torch_operators, unplannable, hooks, changed_launcher, loaded_kernels, threads, what_is_recorded,
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    assert KERNEL_ARCH is not None
    driver = stand_in_driver.install(KERNEL_ARCH)
    if every := int(sys.argv[1]):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        chosen = [*cases(), *calls_of_many_sizes()][::every]
        for operator, arguments in [call for case in chosen for call in calls(case)]:
            hold(operator, arguments)
        assert bool(driver.counters().dependent) == starts_early(KERNEL_ARCH)
        assert bool(driver.counters().descriptors) == reads_descriptors(KERNEL_ARCH)
    else:
        first_calls()
        refusals(driver)
        cached_kernels(driver)
        for rule in RULES:
            plan.forget()
            rule()
    assert driver.violations() == []
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
