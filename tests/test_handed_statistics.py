"""Row statistics that travel from block to block beside the hidden states: of every library, right, and never stale."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import LIBRARIES, SUBJECTS, Subject, assert_gradients_within, assert_within, gradients, in_fp64
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks import block as block_module
from vit_fast.blocks.fused import FusedNormMlp

every_library = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns for each block whether it received statistics."""
    seen: list[bool] = []
    run_block = block_module.run_block

    def spy(parts: Any, x: Tensor, statistics: Tensor | None = None, **how: Any) -> Any:
        seen.append(statistics is not None)
        return run_block(parts, x, statistics, **how)

    monkeypatch.setattr(block_module, "run_block", spy)
    return seen


def half(library: str) -> tuple[Subject, nn.Module, dict[str, Tensor]]:
    subject = SUBJECTS[LIBRARIES[library]]
    inputs = {name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in subject.inputs().items()}
    return subject, subject.build().to(DEVICE, torch.bfloat16).eval(), inputs


@pytest.mark.fast_cases("timm-rotary", "torchvision")
@every_library
def test_every_librarys_blocks_hand_them_on(library: str, handed_on: list[bool]) -> None:
    subject, model, inputs = half(library)
    exact, exact_grads = in_fp64(subject, model, inputs)
    before, before_grads = gradients(subject, model, inputs)
    vit_fast.fuse(model, "triton").require_all()
    modes: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode]
    for mode in modes:
        handed_on.clear()
        with mode():
            output = subject.run(model, inputs)
        assert handed_on == [False, True]
        assert_within(output, before, exact, 2, "output")
    handed_on.clear()
    output, grads = gradients(subject, model, inputs)
    assert handed_on == [False, True]
    assert_within(output, before, exact, 2, "output")
    assert_gradients_within(grads, before_grads, exact_grads, 3)


def other_data(x: Tensor) -> Tensor:
    x.data = x.data * 3
    return x


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: x.mul_(3),
    "a view": lambda x: (x[:, 1:].add_(2), x)[1],
    "other data": other_data,
    "another tensor": lambda x: x * 3,
    "a copy": copy.deepcopy,
}


def blocks_of(library: str) -> list[nn.Module]:
    _, model, _ = half(library)
    vit_fast.fuse(model, "triton").require_all()
    return [part for part in model.modules() if isinstance(part, FusedNormMlp) or type(part).__name__ == "Block"]


@pytest.mark.each_value
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", BETWEEN)
def test_what_is_done_between_blocks_is_seen(change: str, mode: Callable[[], Any], handed_on: list[bool]) -> None:
    first, second = blocks_of("timm")
    tokens = torch.randn(2, 5, 64, dtype=torch.bfloat16, device=DEVICE)
    with mode():
        untouched = first(tokens)
        handed = second(untouched)
        assert handed_on == [False, True]
        x = BETWEEN[change](first(tokens))
        found, expected = second(x), second(x.clone())
    assert handed_on[2:] == [False, False, False]
    assert torch.equal(found, expected)
    assert change == "a copy" or not torch.equal(found, handed)


def write_data(module: nn.Module, args: Any, output: Tensor) -> None:
    output.data.mul_(3)  # which torch does not count


@pytest.mark.parametrize("where", ["first", "second"])
def test_hooks_between_blocks_run_and_end_it(where: str, handed_on: list[bool]) -> None:
    first, second = blocks_of("transformers")
    tokens = torch.randn(2, 5, 64, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        x = first(tokens)
        expected = second(x * 3)
        if where == "first":
            first.register_forward_hook(write_data)
        else:
            second.register_forward_pre_hook(lambda module, args: write_data(module, args, args[0]))
        handed_on.clear()
        found = second(first(tokens))
    assert handed_on == [False, False]
    assert torch.equal(found, expected)


def test_nothing_is_handed_to_another_thread_or_after_another_block(handed_on: list[bool]) -> None:
    first, second = blocks_of("timm")
    tokens = torch.randn(2, 5, 64, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        x = first(tokens)
        worker = threading.Thread(target=torch.no_grad()(second), args=(x,))
        worker.start()
        worker.join()
        first(tokens)
        second(x)
    assert handed_on == [False, False, False, False]


@pytest.mark.fast_cases("False-transformers")
@pytest.mark.parametrize("library", ["timm", "transformers"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_do_the_same_twice(library: str, reentrant: bool) -> None:
    """torch compares what is kept for the backward in both runs; the statistics are of the kept."""
    subject, model, inputs = half(library)
    _, exact = in_fp64(subject, model, inputs)
    _, before = gradients(subject, copy.deepcopy(model), inputs)
    vit_fast.fuse(model, "triton").require_all()
    model.train()
    if library == "transformers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    else:
        model.set_grad_checkpointing(True)
    _, found = gradients(subject, model, inputs)
    assert_gradients_within(found, before, exact, 3)
