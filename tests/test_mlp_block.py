"""A model of ours run by the kernels: logits and parameter gradients against fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fused_models import assert_within
from mlp_support import DEVICE
from torch import Tensor

import vit_fast
from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR
from vit_fast.model import VisionTransformer


def _model(**overrides: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return vit_fast.create_model("vit_test", backend="eager", **overrides).to(DEVICE)


def _with_backend(model: VisionTransformer, backend: str) -> VisionTransformer:
    twin = copy.deepcopy(model)
    vit_fast.set_backend(twin, backend)
    return twin


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overrides", [{}, {"init_values": 0.5, "qkv_bias": False, "act_layer": "quick_gelu"}])
def test_model_against_fp64(overrides: dict[str, Any], dtype: torch.dtype) -> None:
    """Logits within twice eager's error and one rounding; parameter gradients within three times."""
    model = _model(**overrides)
    images = torch.randn(3, 3, 32, 32, device=DEVICE)

    def run(backend: str, target: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        twin = _with_backend(model, backend).to(target)
        logits = twin(images.to(dtype).to(target))
        logits.square().sum().backward()
        return logits.detach(), [parameter.grad for parameter in twin.parameters()]

    (ours, our_grads), (eager, eager_grads) = run("triton", dtype), run("eager", dtype)
    exact, exact_grads = run("eager", torch.float64)
    assert_within(ours, eager, exact, FORWARD_FACTOR, "logits")
    for (name, _), *results in zip(model.named_parameters(), our_grads, eager_grads, exact_grads):
        assert_within(*results, GRADIENT_FACTOR, name)
