"""Forwards that depend on more than their tokens and attributes, or in ways that a proof by examples does not show."""

from __future__ import annotations

import copy
import cProfile
import gc
import itertools
import os
import random
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spellings import Packed, runs_fused
from torch import nn

import vit_fast
from vit_fast.reading.capture import UnreadableError
from vit_fast.reading.forms import ReadModule
from vit_fast.reading.reader import read


class Asks(Packed):
    """Multiplies its output by what a function of the tokens returns."""

    def __init__(self, width: int, heads: int, question: Any) -> None:
        super().__init__(width, heads)
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.question(x)


class Clips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e9, 1e9)


def clips_gradients(x: torch.Tensor) -> int:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1e9, 1e9))
    return 1


UNKNOWN: dict[str, Any] = {
    "random number": lambda x: 1 + (torch.rand(()) < 1e-9),
    "clamp": lambda x: (x.mean() / 1e9).clamp(-1, 1) * 0 + 1,
    "comparison": lambda x: torch.where(x.mean() > 1e9, 2.0, 1.0),
    "order": lambda x: x.mean((1, 2)).sort()[0][:1] * 0 + 1,
    "rounding": lambda x: 1 + (x / 1e12).round().sum().detach(),
    "saturation": lambda x: 1 + torch.sigmoid(x.mean() - 1e9),
    "power": lambda x: 1 + (x.square().mean() / 1e30) ** 4,
    "clock": lambda x: 2 if time.time() < 0 else 1,
    "Python's random number": lambda x: 2 if random.random() < 1e-9 else 1,
    "NumPy's random number": lambda x: 2 if np.random.rand() < 1e-9 else 1,  # noqa: NPY002  # the global generator
    "thread": lambda x: 1 if threading.current_thread() else 2,
    "deterministic algorithms": lambda x: 2 if torch.are_deterministic_algorithms_enabled() else 1,
    "backend": lambda x: 1 if torch.backends.mkldnn.enabled else 2,
    "address": lambda x: 2 if x.data_ptr() == 1 else 1,
    "hook of a tensor": clips_gradients,
    "autograd.Function": lambda x: (Clips.apply(x) - x).sum() + 1,
    "iterator": itertools.repeat(1),
    "container": deque([1]),
}


def test_another_profiler_stays() -> None:
    profiler = cProfile.Profile()
    with profiler:
        assert read(Packed(32, 4), torch.empty(2, 10, 32)).kind == "attention, norm + MLP"
    assert profiler.getstats()


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_proof_can_try_is_not_read(name: str) -> None:
    with pytest.raises(UnreadableError, match=r"unknown|random numbers|differ in other calls|would not be noticed"):
        read(Asks(32, 4, UNKNOWN[name]), torch.empty(2, 10, 32))


SIZES: dict[str, Any] = {
    "division": lambda x: 1 + x.shape[1] // 40,
    "division of the batch size": lambda x: 1 + x.shape[0] // 3,
    "number": lambda x: torch.full((), x.shape[1], dtype=x.dtype).clamp(min=40) / 40,
    "sum": lambda x: torch.ones(x.shape[1]).sum().clamp(min=40) / 40,
    "list": lambda x: 2 if len(list(x)) == 3 else 1,
    "integer": lambda x: {3: 2}.get(int(x.shape[0]), 1),
    "tracing": lambda x: 2 if torch.jit.is_tracing() else 1,
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_an_effect(name: str) -> None:
    torch.manual_seed(0)
    block, x = Asks(32, 4, SIZES[name]).eval(), torch.randn(2, 20, 32)
    model = nn.Sequential(copy.deepcopy(block))
    vit_fast.fuse(model, "eager", example=x).require_all()
    assert isinstance(model[0], ReadModule)
    for given in (x, torch.randn(3, 20, 32), torch.randn(2, 80, 32), torch.randn(6, 20, 32)):
        torch.testing.assert_close(model(given), block(given))
    traced = torch.jit.trace(model, x, check_trace=False)
    torch.testing.assert_close(traced(x), torch.jit.trace(block, x, check_trace=False)(x))


class ClampsScores(Asks):
    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT * self.scale).clamp(min=torch.finfo(q.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("cls", [Asks, ClampsScores])
@pytest.mark.parametrize("question", [torch.cuda.is_available, lambda: torch.profiler.record_function("attention")])
def test_questions_without_effect_are_read(cls: Any, question: Any) -> None:
    read(cls(32, 4, lambda x: (question(), 1)[1]), torch.empty(2, 10, 32))


def test_functions_of_the_garbage_collector_are_no_questions() -> None:
    """Other packages register some, e.g. hypothesis, which measures the time."""
    block, often = Asks(32, 4, lambda x: 1), gc.get_threshold()
    gc.callbacks.append(lambda *_: time.perf_counter())
    gc.set_threshold(1)
    try:
        read(block, torch.empty(2, 10, 32))
    finally:
        gc.set_threshold(*often)
        gc.callbacks.pop()


@pytest.mark.parametrize("read_variable", [os.environ.get, os.getenv, lambda name: name in os.environ])
def test_other_variables_of_the_environment_run_the_original(
    read_variable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x = Asks(32, 4, lambda x: 2 if read_variable("VIT_FAST_TEST") else 1).eval(), torch.randn(2, 20, 32)
    model = nn.Sequential(copy.deepcopy(block))
    vit_fast.fuse(model, "eager", example=x).require_all()
    for value in (None, "1", None):
        if value is not None:
            monkeypatch.setenv("VIT_FAST_TEST", value)
        else:
            monkeypatch.delenv("VIT_FAST_TEST", raising=False)
        assert runs_fused(model, lambda: model(x)) is (value is None)
        torch.testing.assert_close(model(x), block(x))


@pytest.mark.parametrize(
    ("extra", "differs"),
    [
        (lambda x: 2 if torch.compiler.is_compiling() else 1, True),
        (lambda x: 2 if torch.compiler.is_dynamo_compiling() else 1, True),
        (lambda x: x.new_ones(()) if torch.compiler.is_compiling() else 1, False),
    ],
)
def test_questions_for_the_compiler(extra: Any, differs: bool) -> None:
    """A forward that computes something else while it is compiled runs then, and others do not."""
    block, x = Asks(32, 4, extra).eval(), torch.randn(2, 20, 32)
    model = nn.Sequential(copy.deepcopy(block))
    vit_fast.fuse(model, "eager", example=x).require_all()
    assert model[0].vit_fast_recipe.asks_if_compiled is differs
    torch._dynamo.reset()
    compiled, expected = (torch.compile(each, backend="eager", fullgraph=True)(x) for each in (model, block))
    torch.testing.assert_close(compiled, expected)


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs)
        return y * 2 if func is F.layer_norm else y


def test_tensors_and_hooks_that_change_functions() -> None:
    torch.manual_seed(0)
    block, x = Packed(32, 4).eval(), torch.randn(2, 20, 32)
    model = nn.Sequential(copy.deepcopy(block))
    nn.init.ones_(block.gamma1), nn.init.ones_(model[0].gamma1)
    vit_fast.fuse(model, "eager", example=x).require_all()
    assert torch.equal(model(x.as_subclass(Doubling)), block(x.as_subclass(Doubling)))
    hooks = nn.modules.module
    for register in (hooks.register_module_forward_hook, hooks.register_module_forward_pre_hook):
        seen: list[nn.Module] = []
        hook = register(lambda module, *_: seen.append(module))  # noqa: B023  # removed in this round
        model(x)
        hook.remove()
        assert model[0].qkv in seen
