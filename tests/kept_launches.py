"""Checks which launches Triton makes itself and which use a cached kernel, in a process with the stand-in driver."""

from __future__ import annotations

import sys
import threading
import time

import torch
import triton

from vit_fast.kernels import launch
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.launch import Launch


@triton.jit
def scaled_copy(source, target, n, scale, flag, SIZE: triton.language.constexpr):
    lane = triton.language.arange(0, SIZE)
    value = triton.language.load(source + lane, mask=lane < n) * scale
    triton.language.store(target + lane, value + flag, mask=lane < n)


def a_launch(n: object = 16, scale: float = 0.5, flag: object = 3, *, size: int = 32, offset: int = 0) -> Launch:
    source, target = torch.zeros(64)[offset:], torch.zeros(64)
    args = {"flag": flag, "source": source, "target": target, "n": n, "scale": scale}  # in another order
    return Launch(scaled_copy, (1,), args, {"SIZE": size})


def compiled_for(call: Launch) -> object:
    call.run()
    kept = launch._ready[call._specialisation(0)]
    assert kept.compiled is call._run_by_triton()
    return kept.compiled


def kernels() -> None:
    """Checks that launches share a cached kernel exactly if Triton would."""
    first = compiled_for(a_launch())
    assert compiled_for(a_launch(n=32, scale=0.25)) is first
    others = [a_launch(n=1), a_launch(n=17), a_launch(n=2**40), a_launch(flag=True), a_launch(flag=1)]
    others += [a_launch(offset=1), a_launch(size=64)]
    assert len({id(compiled_for(call)) for call in others} | {id(first)}) == 1 + len(others)


def bounded() -> None:
    launch.MAX_READY = 4
    for n in range(2, 20):
        a_launch(n=n).run()
        assert len(launch._ready) <= 4


def first_calls() -> None:
    """One of several threads that launch a new kernel compiles it, and no two compile at once."""
    compiling: list[int] = []
    together: list[list[int]] = []

    def hook(**_: object) -> None:
        compiling.append(threading.get_ident())
        time.sleep(0.1)  # the others arrive
        together.append(compiling.copy())

    triton.knobs.runtime.jit_cache_hook = hook
    workers = [threading.Thread(target=a_launch(size=16).run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    triton.knobs.runtime.jit_cache_hook = None
    assert list(map(len, together)) == [1]


def threads(driver: stand_in_driver.StandInDriver) -> None:
    """Launches of several threads, while the cached kernels are dropped again and again."""
    before = driver.counters().launches

    def work() -> None:
        for n in range(2, 102):
            a_launch(n=n).run()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert driver.counters().launches == before + 400


def main() -> None:
    driver = stand_in_driver.install("sm_90")
    first_calls()
    kernels()
    bounded()
    threads(driver)
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
