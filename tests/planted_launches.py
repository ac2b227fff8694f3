"""Plant illegal tensor maps and launches, and print as JSON what the stand-in driver refused of each.

A child of test_stand_in_driver.py: the stand-in needs a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from vit_fast.kernels.inspect import stand_in_driver


@triton.jit
def planted_copy(source, target):
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def planted_store(target):
    triton.language.store(target, 1.0)


def described() -> TensorDescriptor:
    return TensorDescriptor(torch.zeros(64, 64, dtype=torch.bfloat16), [64, 64], [64, 1], [16, 16])


def with_map(change: Callable[[TensorDescriptor], object]) -> None:
    """A launch with a descriptor changed after triton's own checks."""
    target = described()
    change(target)
    planted_copy[(1,)](described(), target)


def main() -> None:
    driver = stand_in_driver.install("sm_90")
    kernel = planted_copy[(1,)](described(), described())
    legal = {"error": "", "refused": driver.violations(), **driver.counters().as_dict()}
    warps, clusters, *_ = kernel.packed_metadata

    def oversized() -> None:
        arguments = (described(), described())
        kernel.run(1, 1, 1, 0, kernel.function, (warps, clusters, 300_000), None, None, None, *arguments)

    def early() -> None:
        driver._library.stand_in_configure(89, 132, 99 * 1024, 100 * 1024)
        planted_store[(1,)](torch.zeros(1), launch_pdl=True)

    unaligned = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:]
    plants: dict[str, Callable[[], object]] = {
        "stride": lambda: with_map(lambda made: made.strides.__setitem__(0, 63)),
        "expanded": lambda: with_map(lambda made: made.strides.__setitem__(0, 0)),
        "address": lambda: with_map(lambda made: setattr(made, "base", unaligned)),
        "dimension": lambda: with_map(lambda made: made.shape.__setitem__(0, 0)),
        "grid": lambda: planted_copy[(1, 65_536)](described(), described()),
        "shared": oversized,
        "early": early,  # the last: the device is another one then
    }
    found = {"legal": legal}
    for name, plant in plants.items():
        driver.reset()
        error = ""
        try:
            plant()
        except Exception as raised:  # which one is the test's business
            error = f"{type(raised).__name__}: {raised}"
        found[name] = {"error": error, "refused": driver.violations(), **driver.counters().as_dict()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
