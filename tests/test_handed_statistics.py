"""LayerNorm statistics that a block passes to the next one: in every library, exact, and never stale."""

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
from vit_fast.blocks.token_facts import NOTHING, TokenFacts


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lists for each block that runs: True if it received statistics."""
    seen: list[bool] = []
    run_block = block_module.run_block

    def spy(parts: Any, x: Tensor, facts: TokenFacts = NOTHING, **how: Any) -> Any:
        seen.append(facts.statistics is not None)
        return run_block(parts, x, facts, **how)

    monkeypatch.setattr(block_module, "run_block", spy)
    return seen


def half(library: str) -> tuple[Subject, nn.Module, dict[str, Tensor]]:
    subject = SUBJECTS[library]
    inputs = {name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in subject.inputs().items()}
    return subject, subject.build().to(DEVICE, torch.bfloat16).eval(), inputs


@pytest.mark.fast_cases("timm-dinov3", "torchvision-vit")
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_blocks_of_every_library_pass_statistics_on(library: str, received: list[bool]) -> None:
    subject, model, inputs = half(library)
    exact, exact_grads = in_fp64(subject, model, inputs)
    before, before_grads = gradients(subject, model, inputs)
    vit_fast.fuse(model, "triton").require_all()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_within(subject.run(model, inputs), before, exact, 2, "output")
    output, grads = gradients(subject, model, inputs)
    assert received == [False, True] * 3
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


def two_blocks(library: str = "timm-vit") -> tuple[nn.Module, nn.Module, Tensor]:
    """Returns two fused blocks, and tokens."""
    _, model, _ = half(library)
    vit_fast.fuse(model, "triton").require_all()
    first, second = (part for part in model.modules() if isinstance(part, FusedNormMlp))
    return first, second, torch.randn(2, 5, 64, dtype=torch.bfloat16, device=DEVICE)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", BETWEEN)
def test_changed_tokens_get_new_statistics(change: str, mode: Callable[[], Any], received: list[bool]) -> None:
    first, second, tokens = two_blocks()
    with mode():
        unchanged = second(first(tokens))
        assert received == [False, True]
        x = BETWEEN[change](first(tokens))
        found, expected = second(x), second(x.clone())
    assert received[2:] == [False, False, False]
    assert torch.equal(found, expected)
    assert change == "a copy" or not torch.equal(found, unchanged)


def write_data(module: nn.Module, args: Any, output: Tensor) -> None:
    output.data.mul_(3)  # torch does not count this write


@pytest.mark.parametrize("where", ["first", "second"])
def test_a_hook_between_blocks_drops_statistics(where: str, received: list[bool]) -> None:
    first, second, tokens = two_blocks("transformers-vit")
    with torch.no_grad():
        expected = second(first(tokens) * 3)
        if where == "first":
            first.register_forward_hook(write_data)
        else:
            second.register_forward_pre_hook(lambda module, args: write_data(module, args, args[0]))
        received.clear()
        found = second(first(tokens))
    assert received == [False, False]
    assert torch.equal(found, expected)


def test_other_threads_and_later_calls_get_no_statistics(received: list[bool]) -> None:
    first, second, tokens = two_blocks()
    with torch.no_grad():
        x = first(tokens)
        worker = threading.Thread(target=torch.no_grad()(second), args=(x,))
        worker.start()
        worker.join()
        first(tokens)
        second(x)
    assert received == [False, False, False, False]


@pytest.mark.fast_cases("False-transformers-vit")
@pytest.mark.parametrize("library", ["timm-vit", "transformers-vit"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(library: str, reentrant: bool) -> None:
    """torch compares the tensors that both runs save for the backward; statistics are among them."""
    subject, model, inputs = half(library)
    _, exact = in_fp64(subject, model, inputs)
    _, before = gradients(subject, copy.deepcopy(model), inputs)
    vit_fast.fuse(model, "triton").require_all()
    model.train()
    if library == "transformers-vit":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    else:
        model.set_grad_checkpointing(True)
    _, found = gradients(subject, model, inputs)
    assert_gradients_within(found, before, exact, 3)
