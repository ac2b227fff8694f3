"""warm_up: later calls compile nothing or, for other batch sizes, few kernels; the model stays the same; errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from children import run_python
from command_line import run
from torch import nn

import vit_fast

pytest.importorskip("triton", reason="the kernels need triton")

CALLS = Path(__file__).with_name("warm_up_calls.py")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this test is for machines without a GPU")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a child, with an empty Triton cache for these children."""
    return children.environment(str(tmp_path_factory.mktemp("triton-cache")))


@pytest.mark.slow
@without_gpu
def test_calls_compile_nothing_afterwards(environment: dict[str, str]) -> None:
    """Ours and a fused model, inference and training; then from the cache on disk in a process of its own."""
    assert run_python([str(CALLS), "cold"], environment) == "ok"
    assert run_python([str(CALLS), "warm"], environment) == "ok"


# The kernels of a block for batch sizes from 1 to 256, and how many each batch size needs first.
_COUNT = """
import json, sys, torch, vit_fast
from torch.utils._pytree import tree_leaves
from vit_fast.blocks.block import run_blocks
from vit_fast.kernels.inspect import offline, stand_in_driver
from vit_fast.kernels.launch import Launch

arch, cases = json.loads(sys.argv[1])
stand_in_driver.install(arch)
seen, told, first = {}, [], {}

def record(launch):
    specialization = offline.specialization(launch)
    if specialization not in seen:
        constants = sorted((name, str(value)) for name, value in launch.constants.items())
        kinds = [str(getattr(value, "dtype", type(value))) for value in tree_leaves(dict(launch.args))]
        seen[specialization] = repr((launch.kernel.__name__, constants, kinds, launch.options()))
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


@pytest.mark.slow
@without_gpu
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_new_batch_size_compiles_few_kernels(arch: str) -> None:
    """At most one from 17 images on and none above 88; below that a few, with tiles for small batches."""
    cases = [(f"vit_{size}_patch16_224", training) for size, training in
             (("small", False), ("base", False), ("large", False), ("base", True))]  # fmt: skip
    counts = json.loads(run_python(["-c", _COUNT, json.dumps([arch, cases])], children.environment()))
    for (name, training), (different, first) in zip(cases, counts, strict=True):
        assert sum(first.values()) == different  # nothing anew for a number of rows, of parts, or an address
        assert len(first) > 1  # other tiles at other sizes
        for after, most in ((1, 5 if training else 3), (16 if training else 11, 1), (88, 0)):
            assert all(count <= most for batch, count in first.items() if int(batch) > after), name


@without_gpu
def test_without_a_gpu_there_is_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    model = vit_fast.create_model("vit_test")
    done = vit_fast.warm_up(model, [1], progress=lambda *_: pytest.fail("nothing is done"))
    assert (done.kernels, done.compiled) == (0, 0)
    assert done.reasons and str(done).startswith("nothing to compile: ")
    assert run("kernels", "--warm-up", "vit_test") == 0
    assert "nothing to compile: " in capsys.readouterr().out


def test_what_cannot_be_warmed_up_is_refused() -> None:
    model = vit_fast.create_model("vit_test")
    for given, sizes, example, message in (
        *((model, sizes, None, "batch_sizes must be") for sizes in ([], [0], [1, -2], [1.5], ["8"])),
        *((model, [1], torch.zeros(shape), "example must have shape") for shape in ((0, 3, 32, 32), (3,))),
        (nn.Linear(2, 2), [1], None, "example must be given for a Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            vit_fast.warm_up(given, sizes, example=example)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--warm-up", "vit_test", "--batch-sizes", "1,x"], "--batch-sizes"),
        (["--warm-up", "vit_test", "--json"], "--json must not be used with --warm-up"),
        (["--batch-sizes", "1"], "--batch-sizes requires --warm-up or --model, got 1"),
    ],
)
def test_what_the_command_refuses(options: list[str], message: str, capsys: Any) -> None:
    assert run("kernels", *options) == 2
    assert message in capsys.readouterr().err
