"""Checks that warm_up compiles exactly the kernels of later calls, in a process with the stand-in driver."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
from torch import Tensor, nn

import vit_fast
from vit_fast.kernels import precompile
from vit_fast.kernels.inspect import stand_in_driver

BATCHES = (1, 4)
SIZES = {"depth": 2, "embed_dim": 64, "num_heads": 1, "img_size": 32, "patch_size": 8, "num_classes": 3}


def own() -> nn.Module:
    return vit_fast.create_model("vit_base_patch16_224", backend="triton", **SIZES).bfloat16()


def fused() -> nn.Module:
    """timm's, whose parts after fusing are of the same kinds."""
    import timm

    model = timm.create_model("vit_base_patch16_224", **SIZES).bfloat16()
    vit_fast.fuse(model, backend="triton")
    return model


def call(model: nn.Module, batch: int, training: bool) -> None:
    images = torch.zeros(batch, 3, 32, 32, dtype=torch.bfloat16)
    model.train(training)
    with torch.set_grad_enabled(training):
        out = model(images)
    if training:
        out.backward(torch.zeros_like(out))


def assert_nothing_compiles(model: nn.Module, training: bool, driver: stand_in_driver.StandInDriver) -> None:
    """Checks that Triton's cache hook is never called."""
    asked: list[str] = []
    triton.knobs.runtime.jit_cache_hook = lambda **compiled: asked.append(compiled["fn"].name)
    before = driver.counters().launches
    for batch in BATCHES:
        call(model, batch, training)
    triton.knobs.runtime.jit_cache_hook = None
    assert driver.counters().launches > before
    assert asked == []


def state_of(model: nn.Module) -> dict[str, Any]:
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {"modes": modes, "gradients": gradients, "tensors": tensors, "random": torch.get_rng_state()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one is other


def leaves_no_trace(driver: stand_in_driver.StandInDriver) -> None:
    """A BatchNorm counts, dropout draws random numbers."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), own()).bfloat16()
    before = state_of(model)
    images = torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16)
    vit_fast.warm_up(model, [3], training=True, example=images)
    assert same(state_of(model), before)
    launched = driver.counters().launches
    call(model, 3, training=True)
    assert driver.counters().launches > launched


def failures() -> None:
    """A kernel that does not compile is an error in triton's words, here and in processes beside; others are tried."""
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


def main(cache: str) -> None:
    torch.set_num_threads(1)
    driver = stand_in_driver.install("sm_90")
    for make in (own, fused) if cache == "cold" else (fused, own):  # the second needs few that the first does not
        for training in (False, True):
            model = make()
            progress = Mock()
            done = vit_fast.warm_up(model, BATCHES, training, progress=progress)
            assert progress.call_args_list == [((n, done.kernels),) for n in range(1, done.kernels + 1)]
            if (cache, make) in (("cold", own), ("warm", fused)):
                assert done.kernels > 0
                assert (done.compiled > 0) == (cache == "cold")
            assert_nothing_compiles(model, training, driver)
            again = vit_fast.warm_up(model, BATCHES, training)
            assert (again.kernels, again.compiled) == (0, 0)
    if cache == "cold":
        leaves_no_trace(driver)
        failures()
    assert driver.violations() == []
    sys.stdout.write("ok")


if __name__ == "__main__":
    main(sys.argv[1])
