"""Tests of launches, cached kernels and launch plans under the stand-in driver.

test_stand_in_driver.py runs it in a child process, which the stand-in requires.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from planned_launches import BF16, FP32, Address, described, listen, taped, zeros
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vit_fast.errors import UnsupportedInputError
from vit_fast.kernels import launch, plan
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.launch import Launch
from vit_fast.ops import attention, layer_norm_mlp


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
    return Launch(scaled_copy, (1,), args, {"SIZE": size})


def a_descriptor() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(64, 64, dtype=BF16), [64, 64], [64, 1], [16, 16])


def refusals(driver: stand_in_driver.StandInDriver) -> None:
    """The stand-in counts legal launches. Illegal ones raise errors and are recorded as violations."""
    driver.reset()
    kernel = descriptor_copy[(1,)](a_descriptor(), a_descriptor())
    counters = driver.counters()
    assert (counters.launches, counters.descriptors, driver.violations()) == (1, 2, [])
    warps, clusters, *_ = kernel.packed_metadata

    def changed(name: str, value: object) -> Callable[[], object]:
        """Changes a descriptor after Triton has checked it."""
        target = a_descriptor()
        setattr(target, name, value)
        return lambda: descriptor_copy[(1,)](a_descriptor(), target)

    def oversized() -> None:
        arguments = (a_descriptor(), a_descriptor())
        kernel.run(1, 1, 1, 0, kernel.function, (warps, clusters, 300_000), None, None, None, *arguments)

    def early() -> None:
        driver._library.stand_in_configure(89, 132, 99 * 1024, 100 * 1024)
        scaled_copy[(1,)](*a_launch().args.values(), SIZE=32, launch_pdl=True)

    for rule, illegal in {
        "tensor map: a stride must be a multiple of 16 bytes": changed("strides", [63, 1]),
        "tensor map: the address must be aligned": changed("base", zeros(64, 64, offset=1)),
        "launch of descriptor_copy: the grid must be": lambda: descriptor_copy[(1, 65_536)](
            a_descriptor(), a_descriptor()
        ),
        "the shared memory exceeds the limit set for the function": oversized,
        "programmatic dependent launch needs sm_90": early,
    }.items():
        driver.reset()
        with pytest.raises(RuntimeError) as caught:
            illegal()
        (violation,) = driver.violations()
        assert rule in violation and rule in str(caught.value), (rule, violation)
        assert driver.counters().launches == 0
    driver.reset()
    driver._library.stand_in_configure(90, 132, 227 * 1024, 228 * 1024)


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


def distinct_tensors() -> None:
    """A plan that was recorded with one tensor as q, k and v also works for three tensors."""
    one, others = zeros(1, 2, 17, 64), [zeros(1, 2, 17, 64) for _ in range(3)]
    for _ in range(2):
        attention(one, one, one, backend="triton")
    replayed, _ = taped(lambda: attention(*others, backend="triton"))
    assert len(plan.plans()) == 1
    addresses = {value for call in replayed for value in call if isinstance(value, Address)}
    assert {tensor.data_ptr() for tensor in others} <= addresses
    assert one.data_ptr() not in addresses


def precision() -> None:
    """A plan with TF32 matmuls is not replayed if torch no longer allows TF32."""
    x, fc1, fc2 = (zeros(*shape, dtype=FP32) for shape in ((16, 64), (128, 64), (64, 128)))
    for setting in ("tf32", "tf32", "ieee", "tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = setting
        try:
            layer_norm_mlp(x, None, None, fc1, None, fc2, None, backend="triton")
        except UnsupportedInputError as error:
            assert setting == "ieee" and "fp32_precision='ieee'" in str(error)
        else:
            assert setting == "tf32"
    assert len(plan.plans()) == 1


def launched_copy(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    args = {"source": x, "target": out, "n": x.numel(), "scale": 1.0, "flag": 0}
    Launch(scaled_copy, (1,), args, {"SIZE": 64}).run()
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


def threads() -> None:
    """Several threads replay one plan with different tensors, while others clear the plans."""
    fc1, fc2 = zeros(128, 64), zeros(64, 128)

    def work() -> None:
        for _ in range(30):
            x = zeros(17, 64)
            calls, result = taped(lambda x=x: layer_norm_mlp(x, None, None, fc1, None, fc2, None, backend="triton"))
            addresses = {value for call in calls for value in call if isinstance(value, int)}
            assert {x.data_ptr(), fc1.data_ptr(), fc2.data_ptr(), result.data_ptr()} <= addresses
            if torch.randint(10, ()) == 0:
                plan.forget()

    in_threads(work)


def what_is_recorded() -> None:
    """The second call records a plan, also after a failed call. The number of plans is limited."""
    for _ in range(3):
        with pytest.raises(IndexError):
            plan.run(lambda x: x[4], (torch.ones(4),))
    recorded = []
    for _ in range(3):
        plan.run(launched_copy, (torch.ones(32),))
        recorded.append(len(plan.plans()))
    assert recorded == [0, 1, 1]
    plan.MAX_PLANS = plan.MAX_SEEN = 4
    for n in range(1, 20):
        for _ in range(2):
            plan.run(launched_copy, (torch.ones(n),))
        assert 1 <= len(plan.plans()) <= 4 and len(plan._seen) <= 4


def main() -> None:
    torch.set_num_threads(1)
    listen()
    driver = stand_in_driver.install("sm_90")
    first_calls()
    refusals(driver)
    cached_kernels(driver)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for rule in (
        distinct_tensors, precision, torch_operators, unplannable, hooks,
        threads, what_is_recorded,
    ):  # fmt: skip
        plan.forget()
        rule()
    assert driver.violations() == []
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
