"""Fused blocks hand the row statistics on: right, and never past a block that is called as a module."""

from __future__ import annotations

import pytest
import torch
from fused_models import assert_within
from mlp_support import make_bf16_exact
from torch import nn

import vit_fast
from vit_fast.fusion import block as block_module
from vit_fast.model import VisionTransformer

make_bf16_exact()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU runs Triton's interpreter


@pytest.fixture
def model() -> VisionTransformer:
    model = vit_fast.create_model("vit_test", backend="triton", depth=3, device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether statistics came in, a block each."""
    seen: list[bool] = []
    run_block = block_module.run_block

    def spy(parts, x, statistics=None, **how):
        seen.append(statistics is not None)
        return run_block(parts, x, statistics, **how)

    monkeypatch.setattr(block_module, "run_block", spy)
    return seen


def run(model: VisionTransformer) -> tuple[torch.Tensor, list[torch.Tensor]]:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    logits = model(images.to(next(model.parameters())))
    logits.square().sum().backward()
    return logits.detach(), [parameter.grad for parameter in model.parameters()]


def test_fp32_rows_are_normalised_by_each_layer_itself(model, handed_on):
    ours = run(model)
    assert handed_on == [False, False, False]
    vit_fast.set_backend(model, "eager")
    eager = run(model)
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)


def test_statistics_change_nothing_but_the_work(model, handed_on):
    model.bfloat16()
    ours = run(model)
    assert handed_on == [False, True, True]
    vit_fast.set_backend(model, "eager")
    eager, exact = run(model), run(model.double())
    assert_within(ours[0], eager[0], exact[0], 2, "logits")
    for (name, _), *gradients in zip(model.named_parameters(), ours[1], eager[1], exact[1]):
        assert_within(*gradients, 3, name)


@pytest.mark.fast_cases("blocks.1.mlp.fc1")
@pytest.mark.parametrize("part", ["blocks", "blocks.1", "blocks.1.attn", "blocks.1.mlp.fc1", "blocks.1.norm2"])
def test_hooks_still_run(model, handed_on, part):
    called: list[str] = []
    model.bfloat16()  # of fp32 rows no statistics are handed on in any case
    expected, _ = run(model)
    assert handed_on == [False, True, True]
    model.get_submodule(part).register_forward_hook(lambda *_: called.append(part))
    handed_on.clear()
    logits, _ = run(model)
    assert called == [part]
    assert (True in handed_on) == (part == "blocks"), "a hook on all of them is between none"
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)  # a few roundings to bf16 apart


@pytest.mark.fast_cases("attn.proj-triton")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("layer", ["attn.proj", "mlp.fc1"])
def test_a_replaced_layer_is_called(model, layer, backend):
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    vit_fast.set_backend(model, backend)
    linear = model.blocks[1].get_submodule(layer)
    doubled = Doubled(linear.in_features, linear.out_features, device=DEVICE)
    doubled.load_state_dict(linear.state_dict())
    before, _ = run(model)
    model.blocks[1].set_submodule(layer, doubled)
    after, _ = run(model)
    assert (after - before).abs().max() > 1e-3
    vit_fast.set_backend(model, "eager")
    torch.testing.assert_close(run(model)[0], after, atol=1e-4, rtol=1e-4)
