"""Counts the kernels that a new batch size compiles, from 1 to 256 images, without launching them."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from children import environment, run_python

pytest.importorskip("triton", reason="the kernels need triton")

INFERENCE = [(name, False) for name in ("vit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224")]
TRAINING = [("vit_base_patch16_224", True)]
_COUNT = """
import json, sys, torch, vit_fast
from vit_fast.blocks.block import run_blocks
from vit_fast.kernels.inspect import offline, stand_in_driver
from vit_fast.kernels.launch import Launch

arch, cases = json.loads(sys.argv[1])
stand_in_driver.install(arch)
seen, told, first = {}, [], {}

def record(launch):
    specialisation = offline.specialisation(launch)
    if specialisation not in seen:
        constants = sorted((name, str(value)) for name, value in launch.constants.items())
        kinds = [(name, str(getattr(value, "dtype", type(value)))) for name, value in launch.args.items()]
        seen[specialisation] = repr((launch.kernel.__name__, constants, kinds, launch.options()))
        first[batch] = first.get(batch, 0) + 1

Launch.run = record
for name, training in cases:
    seen, first = {}, {}
    model = vit_fast.create_model(name, backend="triton", depth=1, num_classes=0).bfloat16().train(training)
    for batch in (*range(1, 97), *range(104, 257, 8)):
        x = torch.empty(batch, 197, model.config.embed_dim, dtype=torch.bfloat16, requires_grad=training)
        with torch.set_grad_enabled(training):
            out = run_blocks(model.blocks, x)
        if training:
            out.backward(torch.empty_like(out))
    told.append([len(set(seen.values())), first])
print(json.dumps(told))
"""


@functools.cache
def new_kernels(arch: str) -> list[tuple[int, dict[int, int]]]:
    """Returns the kernels of a block for each case, and how many each batch size needs first."""
    out = run_python(["-c", _COUNT, json.dumps([arch, INFERENCE + TRAINING])], environment())
    told: list[tuple[int, dict[str, int]]] = json.loads(out)
    return [(different, {int(batch): count for batch, count in first.items()}) for different, first in told]


def most(first: dict[int, int], after: int) -> int:
    return max((count for batch, count in first.items() if batch > after), default=0)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in driver is for machines without a GPU"),
]


@pytest.mark.parametrize(("arch", "total", "at_once"), [("sm_80", 13, 2), ("sm_90", 20, 3), ("sm_100", 15, 2)])
def test_inference(arch: str, total: int, at_once: int) -> None:
    """At most one kernel from twelve images on; below that a few, with tiles for small batches."""
    for different, first in new_kernels(arch)[: len(INFERENCE)]:
        assert sum(first.values()) == different <= total  # nothing anew for a number of rows, of parts, or an address
        assert len(first) > 1  # other tiles at other sizes
        assert most(first, 1) <= at_once
        assert most(first, 11) <= 1
        assert most(first, 88) == 0


@pytest.mark.parametrize(("arch", "total", "at_once"), [("sm_80", 27, 4), ("sm_90", 38, 5), ("sm_100", 29, 4)])
def test_training(arch: str, total: int, at_once: int) -> None:
    """Products of the same size change their tiles together; from 16 images on one kernel at most."""
    for different, first in new_kernels(arch)[len(INFERENCE) :]:
        assert sum(first.values()) == different <= total
        assert len(first) > 1
        assert most(first, 1) <= at_once
        assert most(first, 16) <= 1
        assert most(first, 88) == 0
