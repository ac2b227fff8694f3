"""Models of other libraries with random weights, and a comparison of their outputs with those of our models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vit_fast import VisionTransformer

SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 2}


@torch.no_grad()
def randomize(module: nn.Module) -> nn.Module:
    """Draws every parameter, so that no bias, scale or token is zero or one, and activations stay near one."""
    for parameter in module.parameters():
        is_vector = parameter.dim() < 2
        nn.init.normal_(parameter, 0.5 * is_vector, 0.3 if is_vector else max(parameter[:1].numel(), 1) ** -0.5)
    return module.eval()


@torch.no_grad()
def assert_same_outputs(
    own: VisionTransformer,
    peer: nn.Module,
    run_peer: Callable[[nn.Module, Tensor], Tensor] = lambda peer, images: peer(images),
    fp64_tolerance: float = 1e-10,
) -> None:
    """Compares outputs for random images in fp32, and in fp64 with a smaller tolerance."""
    images = torch.randn(2, own.config.in_chans, *own.config.image_hw)
    exact = run_peer(copy.deepcopy(peer).double(), images.double())
    assert exact.std() > 0.05, "a constant output would prove nothing"
    for found in (own(images), run_peer(peer, images)):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(own).double()(images.double()), exact, rtol=0, atol=fp64_tolerance)
