"""Runs operators with many shapes under the stand-in driver, and prints a JSON line per case.

    python tests/launch_cases.py sm_90

test_stand_in_driver.py runs it in a child process, which the stand-in requires.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from planned_launches import BF16, FP32, zeros
from torch import Tensor

from vit_fast.kernels import launch
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.launch import Launch
from vit_fast.ops import attention, attention_qkvpacked, layer_norm_mlp

Case = tuple[str, Callable[..., Tensor], list[Tensor]]


def cases() -> Iterator[Case]:
    for head_dim, tokens, dtype, offset in (
        *product((16, 32, 64, 72, 80, 96, 128), (1, 50, 197, 577), (BF16,), (0,)),
        *product((64, 80), (1, 197), (FP32, torch.float16), (0,)),
        *product((64, 72), (50,), (BF16, FP32), (1,)),
    ):
        qkv = zeros(2, tokens, 3, 2, head_dim, dtype=dtype, offset=offset)
        yield f"attention N{tokens} D{head_dim} {dtype} +{offset}", attention_qkvpacked, [qkv]
    k, v = zeros(2, 196, 2, 2, 64).permute(2, 0, 3, 1, 4)
    yield "pooling", attention, [zeros(2, 2, 1, 64), k, v]
    shared = zeros(1, 2, 16, 64).expand(4, -1, -1, -1)  # one query for the whole batch, with stride 0
    yield "expanded query", attention, [shared, *zeros(2, 4, 2, 50, 64)]
    for rows, (width, hidden, scaled), dtype in (
        *product((1, 2, 15, 16, 17, 394), ((64, 128, 0), (192, 768, 1), (72, 200, 0), (70, 201, 1)), (BF16,)),
        *product((1, 17, 394), ((192, 768, 1), (70, 201, 0)), (FP32,)),
    ):
        shapes = (rows, width), (width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,)
        mlp = partial(layer_norm_mlp, layer_scale=zeros(width, dtype=dtype) if scaled else None)
        name = f"mlp M{rows} C{width} F{hidden} {dtype}{' scaled' if scaled else ''}"
        yield name, mlp, [zeros(*shape, dtype=dtype) for shape in shapes]


def launch_twice() -> None:
    """Repeats each launch. The second one must use the kernel that Triton would choose."""
    run = Launch.run

    def run_twice(self: Launch) -> None:
        run(self)
        cached = launch._ready[self._specialization(0)]
        assert cached.compiled is self.kernel[self.grid](**self.args, **self.constants, **self.options())
        run(self)

    Launch.run = run_twice  # type: ignore[method-assign]


def main(arch: str) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    launch_twice()
    driver = stand_in_driver.install(arch)
    for name, function, tensors in cases():
        driver.reset()
        problems = []
        try:
            with torch.no_grad():
                function(*tensors, backend="triton")
            out = function(*(tensor.requires_grad_() for tensor in tensors), backend="triton")
            out.backward(torch.zeros_like(out))
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:400])
        counters = driver.counters()
        print(json.dumps({"case": name, "problems": problems + driver.violations(), **counters._asdict()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
