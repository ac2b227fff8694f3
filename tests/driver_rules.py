"""Rules for launches under the stand-in driver: what it refuses, and when a cached kernel is launched.

A child of test_stand_in_driver.py: the stand-in needs a process of its own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from vit_fast.kernels import launch
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.launch import Launch


@triton.jit
def planted_copy(source, target):
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def scaled_copy(source, target, n, scale, flag, SIZE: triton.language.constexpr):
    lane = triton.language.arange(0, SIZE)
    value = triton.language.load(source + lane, mask=lane < n) * scale
    triton.language.store(target + lane, value + flag, mask=lane < n)


def described() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64], [64, 1], [16, 16])


def with_map(change: Callable[[TensorDescriptor], object]) -> None:
    """A launch with a descriptor changed after triton's own checks."""
    target = described()
    change(target)
    planted_copy[(1,)](described(), target)


def refusals(driver: stand_in_driver.StandInDriver) -> None:
    """A legal launch is counted; an illegal one raises an error, and is recorded as a violation."""
    kernel = planted_copy[(1,)](described(), described())
    counters = driver.counters()
    assert (counters.launches, counters.descriptors, counters.modules, driver.violations()) == (1, 2, 1, [])
    warps, clusters, *_ = kernel.packed_metadata
    unaligned = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:]

    def oversized() -> None:
        arguments = (described(), described())
        kernel.run(1, 1, 1, 0, kernel.function, (warps, clusters, 300_000), None, None, None, *arguments)

    def early() -> None:
        driver._library.stand_in_configure(89, 132, 99 * 1024, 100 * 1024)
        scaled_copy[(1,)](*a_launch().args.values(), SIZE=32, launch_pdl=True)

    plants: dict[str, Callable[[], object]] = {
        "tensor map: a stride must be a multiple of 16 bytes": lambda: with_map(lambda m: m.strides.__setitem__(0, 63)),
        "a multiple of 16 bytes, above 0": lambda: with_map(lambda made: made.strides.__setitem__(0, 0)),
        "tensor map: the address must be aligned": lambda: with_map(lambda made: setattr(made, "base", unaligned)),
        "tensor map: a dimension must be 1..2^32": lambda: with_map(lambda made: made.shape.__setitem__(0, 0)),
        "launch of planted_copy: the grid must be": lambda: planted_copy[(1, 65_536)](described(), described()),
        "the shared memory exceeds the limit set for the function": oversized,
        "programmatic dependent launch needs sm_90": early,
    }
    for rule, plant in plants.items():
        driver.reset()
        with pytest.raises(RuntimeError) as caught:
            plant()
        (violation,) = driver.violations()
        assert rule in violation and rule in str(caught.value), (rule, violation)
        assert driver.counters().launches == 0
    driver.reset()
    driver._library.stand_in_configure(90, 132, 227 * 1024, 228 * 1024)


def a_launch(n: object = 16, scale: float = 0.5, flag: object = 3, *, size: int = 32, offset: int = 0) -> Launch:
    source, target = torch.zeros(64)[offset:], torch.zeros(64)
    args = {"source": source, "target": target, "n": n, "scale": scale, "flag": flag}
    return Launch(scaled_copy, (1,), args, {"SIZE": size})


def first_calls() -> None:
    """One of several threads that launch a new kernel compiles it, and no two compile at once."""
    together: list[int] = []

    def hook(**_: object) -> None:
        together.append(threading.get_ident())
        time.sleep(0.1)  # the others arrive

    triton.knobs.runtime.jit_cache_hook = hook
    in_threads(lambda: a_launch(size=16).run())
    triton.knobs.runtime.jit_cache_hook = None
    assert len(together) == 1


def compiled_for(call: Launch) -> object:
    call.run()
    kept = launch._ready[call._specialisation(0)]
    assert kept.compiled is call._run_by_triton()
    return kept.compiled


def cached_kernels() -> None:
    """Launches share a cached kernel exactly if Triton would."""
    first = compiled_for(a_launch())
    assert compiled_for(a_launch(n=32, scale=0.25)) is first
    others = [a_launch(n=1), a_launch(n=17), a_launch(n=2**40), a_launch(flag=True), a_launch(flag=1)]
    others += [a_launch(offset=1), a_launch(size=64)]
    assert len({id(compiled_for(call)) for call in others} | {id(first)}) == 1 + len(others)


def in_threads(work: Callable[[], None]) -> None:
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def few_are_cached(driver: stand_in_driver.StandInDriver) -> None:
    """Launches of several threads, while the cached kernels are dropped again and again."""
    launch.MAX_READY = 4
    before = driver.counters().launches

    def work() -> None:
        for n in range(2, 102):
            a_launch(n=n).run()

    in_threads(work)
    assert driver.counters().launches == before + 400 and len(launch._ready) <= 4


def main() -> None:
    driver = stand_in_driver.install("sm_90")
    first_calls()
    driver.reset()
    refusals(driver)
    cached_kernels()
    few_are_cached(driver)
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
