"""Blocks that compute something else for rare inputs than for an example."""

from __future__ import annotations

import copy

import torch
from spellings import Packed
from torch import nn

import vit_fast


class Branches(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[0] == 1 else y


class Clamps(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-50, 50)


class Hides(Packed):
    kind = 2.0  # fused modules have an attribute of this name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.kind if len(x) > 1000 else 1)  # type: ignore[operator]


def test_rare_inputs_give_the_same_outputs() -> None:
    """A batch of one image, large values, and an attribute that a fused class has, too."""
    for block in (Branches, Clamps, Hides):
        torch.manual_seed(0)
        original = nn.Sequential(block(32, 4), block(32, 4)).eval()
        model = copy.deepcopy(original)
        report = vit_fast.fuse(model, "eager", example=(x := torch.randn(2, 20, 32)))
        assert bool(report.fused) is (block is Branches), str(report)
        for given in (x, x[:1], x * 1e3):
            torch.testing.assert_close(model(given), original(given))
