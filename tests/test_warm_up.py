"""warm_up: later calls compile nothing or, for other batch sizes, few kernels; the model stays the same; errors.

The slow test runs this file as a script, in processes with the stand-in driver.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import children
import pytest
import torch
from command_line import run
from torch import Tensor, nn

import vit_fast

pytest.importorskip("triton", reason="the kernels need triton")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this test is for machines without a GPU")
BATCHES = (1, 4)
SIZES = {"depth": 2, "embed_dim": 64, "num_heads": 1, "img_size": 32, "patch_size": 8, "num_classes": 3}


@pytest.mark.slow
@without_gpu
def test_calls_compile_nothing_afterwards(tmp_path: Any) -> None:
    """In inference and training; a second process finds the kernels in the cache on disk."""
    environment = children.environment(str(tmp_path))
    for cache in ("cold", "warm"):
        assert children.run_python([__file__, cache], environment) == "ok"


@without_gpu
def test_without_a_gpu_there_is_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    model = vit_fast.create_model("vit_test")
    done = vit_fast.warm_up(model, [1], progress=lambda *_: pytest.fail("nothing is done"))
    assert (done.kernels, done.compiled) == (0, 0)
    assert done.reasons and str(done).startswith("nothing to compile: ")
    assert run("kernels", "--warm-up", "vit_test") == 0
    assert "nothing to compile: " in capsys.readouterr().out


def test_errors() -> None:
    model = vit_fast.create_model("vit_test")
    for given, sizes, example, message in (
        *((model, sizes, None, "batch_sizes must be") for sizes in ([], [0], [1, -2], [1.5], ["8"])),
        *((model, [1], torch.zeros(shape), "example must have at least 2 dim") for shape in ((0, 3, 32, 32), (3,))),
        (nn.Linear(2, 2), [1], None, "example must be given for a Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            vit_fast.warm_up(given, sizes, example=example)


# --- in processes with the stand-in driver --------------------------------------------------------------------------


def own() -> nn.Module:
    return vit_fast.create_model("vit_base_patch16_224", backend="triton", **SIZES).bfloat16()


def fused() -> nn.Module:
    import timm

    model = timm.create_model("vit_base_patch16_224", **SIZES).bfloat16()
    vit_fast.fuse(model, backend="triton")
    return model


def step(model: nn.Module, batch: int, training: bool) -> None:
    images = torch.zeros(batch, 3, 32, 32, dtype=torch.bfloat16)
    with torch.set_grad_enabled(training):
        out = model.train(training)(images)
    if training:
        out.backward(torch.zeros_like(out))


def check_calls(cache: str, driver: Any) -> None:
    """Compares the kernels that warm_up compiles with those that Triton's cache hook reports for later calls."""
    import triton

    for make in (own, fused) if cache == "cold" else (fused, own):  # the second needs few that the first does not
        for training in (False, True):
            model, progress = make(), Mock()
            done = vit_fast.warm_up(model, BATCHES, training, progress=progress)
            assert progress.call_args_list == [((n, done.kernels),) for n in range(1, done.kernels + 1)]
            if (cache, make) in (("cold", own), ("warm", fused)):
                assert done.kernels > 0 and (done.compiled > 0) == (cache == "cold")
            compiled, launches = Mock(return_value=None), driver.counters().launches
            triton.knobs.runtime.jit_cache_hook = compiled
            for batch in BATCHES:
                step(model, batch, training)
            assert driver.counters().launches > launches and not compiled.called
            step(model, 40, training)  # another batch size
            assert compiled.call_count <= 5
            triton.knobs.runtime.jit_cache_hook = None
            again = vit_fast.warm_up(model, BATCHES, training)
            assert (again.kernels, again.compiled) == (0, 0)


def check_the_model_stays_the_same(driver: Any) -> None:
    """With a BatchNorm, which counts, and dropout, which draws random numbers."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), own()).bfloat16()

    def state() -> list[Any]:
        modes, grads = [each.training for each in model.modules()], [each.grad for each in model.parameters()]
        return [modes, grads, torch.get_rng_state(), *copy.deepcopy(model.state_dict()).values()]

    before, launches = state(), driver.counters().launches
    vit_fast.warm_up(model, [3], training=True, example=torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16))
    for one, other in zip(state(), before, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    step(model, 3, training=True)
    assert driver.counters().launches > launches


def check_failures() -> None:
    """A kernel that does not compile is an error, in this process and in others."""
    from vit_fast.kernels import precompile

    model = own().eval()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with precompile.collect() as requests, torch.no_grad():
        for dtype in (torch.float16, torch.float32):
            model.to(dtype)(torch.zeros(9, 3, 32, 32, dtype=dtype))
    assert len(requests) >= 2 * precompile.KERNELS_A_PROCESS
    broken = replace(requests[1], data=requests[1].data.replace("constexpr", "nothing"))
    for compiler in (lambda: precompile.compile_all([broken]), lambda: list(precompile._compile_beside([broken] * 4))):
        with pytest.raises(RuntimeError, match=f"{broken.name} does not compile"):
            compiler()


def main(cache: str) -> str:
    from vit_fast.kernels.inspect import stand_in_driver

    torch.set_num_threads(1)
    driver = stand_in_driver.install("sm_90")
    check_calls(cache, driver)
    if cache == "cold":
        check_the_model_stays_the_same(driver)
        check_failures()
    assert driver.violations() == []
    return "ok"


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
