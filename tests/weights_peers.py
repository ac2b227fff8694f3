"""Peers with every parameter random, so that no bias, scale or token can hide behind a zero or a one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit_fast import VisionTransformer

SMALL = {"embed_dim": 64, "depth": 2, "num_heads": 2}


@torch.no_grad()
def randomize(module: nn.Module) -> nn.Module:
    """Random parameters that keep activations near one; norms around one, LayerScale around one half."""
    for name, parameter in module.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith(("gamma", "lambda1")):
            parameter.copy_(0.5 + 0.2 * noise)
        elif parameter.dim() == 1 and "norm" in name + type(module).__name__.lower() and name.endswith("weight"):
            parameter.copy_(1 + 0.2 * noise)
        elif parameter.dim() >= 2 and parameter.shape[0] > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.3 * noise)
    return module.eval()


@torch.no_grad()
def assert_same_outputs(
    own: VisionTransformer,
    peer_model: nn.Module,
    run_peer: Callable[[nn.Module, Tensor], Tensor],
    *,
    fp64_tolerance: float = 1e-10,
) -> None:
    """Compares on random images: within 1e-5 of the peer in fp32 and fp64; within fp64_tolerance if both are fp64."""
    images = torch.randn(2, own.config.in_chans, *own.config.image_hw)
    expected = run_peer(peer_model, images)
    exact = run_peer(copy.deepcopy(peer_model).double(), images.double())
    assert exact.std() > 0.05, "a constant output would prove nothing"
    actual = own(images)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 1e-5
    assert (actual.double() - exact).abs().max() < 1e-5
    assert (copy.deepcopy(own).double()(images.double()) - exact).abs().max() < fp64_tolerance
