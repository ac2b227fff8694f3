"""warm_up: afterwards calls compile nothing, the model is as it was, and what is wrong is said."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the environment of a child, with an empty Triton cache for these children."""
    return children.environment(str(tmp_path_factory.mktemp("triton-cache")))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in driver is for machines without a GPU")
def test_calls_compile_nothing_afterwards(environment: dict[str, str]) -> None:
    """Ours and a fused model, inference and training; then from the cache on disk in a process of its own."""
    assert run_python([str(CALLS), "cold"], environment) == "ok"
    assert run_python([str(CALLS), "warm"], environment) == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to compile")
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
