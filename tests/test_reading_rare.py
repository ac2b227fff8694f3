"""Blocks that compute something else than on the example, for rare inputs or after a change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from spellings import Net, Packed
from torch import nn

import vit_fast


class Branches(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[0] == 1 else y


class Clamps(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-50, 50)


class UnderAutocast(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_autocast_enabled("cpu") else 1)


class ByStrides(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if x.is_contiguous() else 2)


class ReplacesNaN(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).nan_to_num()


class Hides(Packed):
    kind = 2.0  # fused modules have an attribute of this name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.kind if len(x) > 1000 else 1)  # type: ignore[operator]


def test_rare_inputs_give_the_same_outputs() -> None:
    """A batch of one, large values, NaN, other strides, autocast, and an attribute that a fused class has, too."""
    for block in (Branches, Clamps, UnderAutocast, ByStrides, ReplacesNaN, Hides):
        torch.manual_seed(0)
        original = nn.Sequential(block(32, 4), block(32, 4)).eval()
        model = copy.deepcopy(original)
        report = vit_fast.fuse(model, "eager", example=(x := torch.randn(2, 20, 32)))
        assert any("attention" in row.part for row in report.fused) is (block is Branches), str(report)
        for given in (x, x[:1], x * 1e3, x.transpose(0, 1).contiguous().transpose(0, 1), x / 0 * 0):
            torch.testing.assert_close(model(given), original(given), equal_nan=True)
        with torch.autocast("cpu"):
            torch.testing.assert_close(model(x), original(x), rtol=0.02, atol=0.02)  # rounded to bf16


class Configured(Packed):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.config = {"gain": [1.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (super().forward(x) - x) * self.config["gain"][0]


def test_a_changed_entry_of_a_dictionary_has_an_effect_also_after_freeze() -> None:
    torch.manual_seed(0)
    model = Net(Configured).eval()
    vit_fast.fuse(model, "eager", example=torch.randn(2, 3, 32, 8)).require_all()
    nn.init.ones_(model.layers[0].gamma1)
    expected = model.layers[0](x := torch.randn(2, 20, 32)) * 2 - x
    model.layers[0].config["gain"][0] = 2.0
    torch.testing.assert_close(model.layers[0](x), expected)
    vit_fast.freeze(model)
    torch.testing.assert_close(model.layers[0](x), expected)
