"""Counts the kernels that a new batch size compiles, from 1 to 256 images, without launching them."""

from __future__ import annotations

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


def new_kernels(arch: str) -> list[tuple[int, dict[int, int]]]:
    """Returns the kernels of a block for each case, and how many each batch size needs first."""
    out = run_python(["-c", _COUNT, json.dumps([arch, INFERENCE + TRAINING])], environment())
    told: list[tuple[int, dict[str, int]]] = json.loads(out)
    return [(different, {int(batch): count for batch, count in first.items()}) for different, first in told]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in driver is for machines without a GPU"),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_new_batch_size_compiles_few_kernels(arch: str) -> None:
    """At most one from 17 images on and none above 88; below that a few, with tiles for small batches."""
    for (name, training), (different, first) in zip(INFERENCE + TRAINING, new_kernels(arch), strict=True):
        assert sum(first.values()) == different  # nothing anew for a number of rows, of parts, or an address
        assert len(first) > 1  # other tiles at other sizes
        for after, most in ((1, 5 if training else 3), (16 if training else 11, 1), (88, 0)):
            assert all(count <= most for batch, count in first.items() if batch > after), name
