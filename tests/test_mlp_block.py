"""Blocks and models run by the kernels: correct, trainable, and only if a block is what it looks like."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from fused_models import assert_within
from mlp_support import DEVICE
from torch import Tensor, nn

import vit_fast
from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR
from vit_fast.apps.data import read_image, sample_image
from vit_fast.model import VisionTransformer


def _model(**overrides: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return vit_fast.create_model("vit_test", backend="eager", **overrides).to(DEVICE)


def _with_backend(model: VisionTransformer, backend: str) -> VisionTransformer:
    twin = copy.deepcopy(model)
    vit_fast.set_backend(twin, backend)
    return twin


def _photograph_tiles(count: int) -> tuple[Tensor, Tensor]:
    """32 x 32 pixel tiles of a photograph [count, 3, 32, 32] in -1..1, and the quarter of its width each comes from."""
    pixels = np.asarray(read_image(sample_image()), dtype=np.float32) / 127.5 - 1
    height, width = pixels.shape[0] - 32, pixels.shape[1] - 32
    rng = np.random.default_rng(0)
    tops, lefts = rng.integers(0, height, count), rng.integers(0, width, count)
    tiles = np.stack([pixels[top : top + 32, left : left + 32] for top, left in zip(tops, lefts)])
    return torch.from_numpy(tiles).permute(0, 3, 1, 2), torch.from_numpy(lefts * 4 // width)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overrides", [{}, {"init_values": 0.5, "qkv_bias": False, "act_layer": "quick_gelu"}])
def test_model_against_fp64(overrides: dict[str, Any], dtype: torch.dtype) -> None:
    """Logits within twice eager's error and one rounding; parameter gradients within three times."""
    model = _model(**overrides)
    images = _photograph_tiles(3)[0].to(DEVICE)

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


def test_inference_and_training_agree() -> None:
    model, images = _with_backend(_model(), "triton"), _photograph_tiles(2)[0].to(DEVICE)
    with torch.no_grad():
        logits = model(images)
    torch.testing.assert_close(logits, model(images).detach(), atol=1e-6, rtol=1e-5)


def _losses(backend: str, dtype: torch.dtype, **overrides: Any) -> Tensor:
    """32 AdamW steps on tiles of a photograph; drop path draws the same images whatever the backend."""
    images, labels = (tensor.to(DEVICE) for tensor in _photograph_tiles(4 * 32))
    model = _with_backend(_model(num_classes=4, drop_path_rate=0.1, **overrides), backend).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(1)
    history = []
    for batch, target in zip(images.split(4), labels.split(4)):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            logits = model(batch)
        loss = nn.functional.cross_entropy(logits.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
    return torch.stack(history)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)], ids=["fp32", "bf16"])
def test_training_follows_eager(dtype: torch.dtype, tolerance: float) -> None:
    """Uses a block of 5 tokens, because the interpreter takes a second per step."""
    ours, eager = (_losses(backend, dtype, depth=1, patch_size=16) for backend in ("triton", "eager"))
    assert ((ours - eager).abs() / eager).max() <= tolerance
    assert eager.unique().numel() == 32


def test_drop_path_scales_whole_branches() -> None:
    """Output and gradients match eager if both draw the same random numbers."""
    images = _photograph_tiles(8)[0].to(DEVICE)
    results = []
    for backend in ("triton", "eager"):
        model = _with_backend(_model(drop_path_rate=0.6, init_values=0.7), backend).train()
        torch.manual_seed(3)
        logits = model(images)
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_nan_stays_in_its_image() -> None:
    model, images = _with_backend(_model(), "triton"), _photograph_tiles(3)[0].to(DEVICE)
    with torch.no_grad():
        clean = model(images)
        images[1, 0, 5, 5] = float("nan")
        logits = model(images)
    assert logits[1].isnan().all()
    assert torch.equal(logits[[0, 2]], clean[[0, 2]])


def test_no_images() -> None:
    model = _with_backend(_model(), "triton")
    assert model(torch.empty(0, 3, 32, 32, device=DEVICE)).shape == (0, 10)
