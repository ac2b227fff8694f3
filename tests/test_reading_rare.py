"""Blocks that compute something else than on the example, for rare inputs or after a change, and skipped blocks."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from spellings import ListOfHeads, Net, Packed, Variant
from torch import nn

import vit_fast
from vit_fast.libraries.known import exportable
from vit_fast.measure.optimization import _snapshot


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


class UnderAutocastToHalf(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.get_autocast_dtype("cpu") == torch.float16 else 1)


class ByStrides(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if x.is_contiguous() else 2)


class ReplacesNaN(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).nan_to_num()


class ClampsForHalf(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(-65504, 65504))


class OfFrozenWeights(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.qkv.weight.requires_grad else 2)


class InInferenceMode(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.is_inference_mode_enabled() else 1)


class OfLeaves(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if x.grad_fn is None else 2)


class ClampsScale(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.gamma1.clamp(max=40) * self.attend(self.norm1(x))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class ClampsScores(Variant):
    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.clamp(-50, 50)


class Hides(Packed):
    kind = 2.0  # fused modules have an attribute of this name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.kind if len(x) > 1000 else 1)


def test_rare_inputs_give_the_same_outputs() -> None:
    """A batch of one, large values, NaN, other strides and modes, and an attribute that a fused class has, too."""
    for block in (
        Branches, Clamps, UnderAutocast, UnderAutocastToHalf, ByStrides, ReplacesNaN, Hides, ClampsForHalf,
        OfFrozenWeights, InInferenceMode, OfLeaves,
    ):  # fmt: skip
        torch.manual_seed(0)
        original = nn.Sequential(block(32, 4), block(32, 4)).eval()
        model = copy.deepcopy(original)
        report = vit_fast.fuse(model, "eager", example=(x := torch.randn(2, 20, 32)))
        assert any("attention," in row.part for row in report.fused) is (block is Branches), str(report)
        for given in (
            x,
            x[:1],
            x * 1e3,
            x * 1e6,
            x.clone().requires_grad_() * 1,
            x.transpose(0, 1).contiguous().transpose(0, 1),
            x / 0 * 0,
        ):
            torch.testing.assert_close(model(given), original(given), equal_nan=True)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                torch.testing.assert_close(model(x), original(x), rtol=0.02, atol=0.02)  # rounded
        with torch.inference_mode():
            torch.testing.assert_close(model(x), original(x))
        for net in (model, original):
            net.requires_grad_(False)
        torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("block", [ClampsScale, ClampsScores])
def test_large_weights_give_the_same_outputs(block: Any) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(block(32, 4), block(32, 4)).eval()
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "eager", example=(x := torch.randn(2, 20, 32)))
    with torch.no_grad():
        for net in (model, original):
            for parameter in net.parameters():
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0)).mul_(1e3)
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4 * float(original(x).detach().abs().max()))


GAIN = 1.0
SETTINGS = SimpleNamespace(gain=1.0)
GAINS: list[float] = [1.0]


class Constants:
    gain = 1.0


def of_globals() -> float:
    return GAIN * SETTINGS.gain * GAINS[0] * Constants.gain


@dataclass(slots=True)
class Options:
    gain: float = 1.0


class Gains(Packed):
    """Multiplies its branches by a number or tensor from different places."""

    of_class = 1.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.config = {"gain": [1.0], "object": Options()}
        self.options = SimpleNamespace(attention=SimpleNamespace(gain=1.0))
        self.held: list[Any] = [self.config["object"], nn.Identity()]  # e.g. the parent
        self.held[1].gain = 1.0
        self.register_buffer("absent", None)

        number = 1.0

        def closed(replacement: float | None = None) -> float:
            nonlocal number
            number = replacement or number
            return number

        self.closed = closed

    def of_method(self) -> float:
        return 1.0

    def gain(self) -> Any:
        objects = [self.options.attention, *self.held]
        found = (
            of_globals()
            * self.closed()
            * self.config["gain"][0]
            * math.prod(each.gain for each in objects)
            * self.of_class
            * self.of_method()
        )
        return self.adapter(found) if hasattr(self, "adapter") else found * getattr(self, "extra", 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.gain() if self.absent is None else self.absent
        return x + (super().forward(x) - x) * gain


class Doubles(nn.Module):
    def forward(self, x: Any) -> Any:
        return 2 * x


class InList(Gains):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tensors = [torch.ones(())]

    def gain(self) -> Any:
        return self.tensors[0]


class InArray(Gains):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.array = np.ones(1)

    def gain(self) -> Any:
        return float(self.array[0])


CHANGES: dict[str, Any] = {
    "dictionary": lambda block: block.config["gain"].__setitem__(0, 2.0),
    "nested object": lambda block: setattr(block.options.attention, "gain", 2.0),
    "instance instead of class": lambda block: setattr(block, "of_class", 2.0),
    "absent buffer": lambda block: setattr(block, "absent", torch.tensor(2.0)),
    "absent bias": lambda block: setattr(block.qkv, "bias", nn.Parameter(torch.linspace(-1, 1, 96))),
    "new attribute": lambda block: setattr(block, "extra", 2.0),
    "new module": lambda block: setattr(block, "adapter", Doubles()),
    "object with slots": lambda block: setattr(block.held[0], "gain", 2.0),
    "module in a list": lambda block: setattr(block.held[1], "gain", 2.0),
    "method of the instance": lambda block: setattr(block, "of_method", lambda: 2.0),
    "method of the class": lambda _: setattr(Gains, "of_method", lambda _: 2.0),
    "global number": lambda _: globals().update(GAIN=2.0),
    "global object": lambda _: setattr(SETTINGS, "gain", 2.0),
    "global list": lambda _: GAINS.__setitem__(0, 2.0),
    "global class": lambda _: setattr(Constants, "gain", 2.0),
    "closure": lambda block: block.closed(2.0),
    "tensor in a list": lambda block: block.tensors[0].fill_(2.0),
    "array": lambda block: block.array.fill(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_inside_a_block_have_an_effect_also_after_freeze(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gains, "of_method", Gains.of_method)  # restores both in the end
    monkeypatch.setitem(globals(), "GAIN", GAIN)
    for owner in (SETTINGS, Constants):
        monkeypatch.setattr(owner, "gain", 1.0)
    monkeypatch.setitem(globals(), "GAINS", [1.0])
    torch.manual_seed(0)
    cls = {"tensor in a list": InList, "array": InArray}.get(name, Gains)
    original = Net(cls).eval()
    model, images = copy.deepcopy(original), torch.randn(2, 3, 32, 8)
    report = vit_fast.fuse(model, "eager", example=images)
    assert cls is not Gains or report.require_all()
    model(images)  # caches what was read
    for net in (model, original):
        nn.init.ones_(net.layers[0].gamma1)
        CHANGES[name](net.layers[0])
    torch.testing.assert_close(model(images), original(images))
    vit_fast.freeze(model)
    torch.testing.assert_close(model(images), original(images))


class Counts(Variant):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[int] = []

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(scores))
        return scores


def test_a_forward_that_changes_attributes_still_does() -> None:
    model, x = nn.Sequential(Counts(32, 4)).eval(), torch.randn(2, 20, 32)
    vit_fast.fuse(model, "eager", example=x)
    seen = list(model[0].seen)
    model(x)
    assert model[0].seen == [*seen, 2]


class TrainReturnsNone(Packed):
    def train(self, mode: bool = True) -> None:  # returns nothing, as in LeViT of timm
        super().train(mode)


class NetTrainReturnsNone(Net):
    def train(self, mode: bool = True) -> None:
        super().train(mode)


def test_a_train_method_that_returns_nothing() -> None:
    torch.manual_seed(0)
    model, images = NetTrainReturnsNone(TrainReturnsNone), torch.randn(2, 3, 32, 8)
    model.eval()
    for copied in (_snapshot(model, images), exportable(model.double())):
        assert isinstance(copied, NetTrainReturnsNone) and not copied.training
    vit_fast.fuse(model.float(), "eager", example=images).require_all()


class Masked(Packed):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())
        nn.init.ones_(self.gamma1)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mask", [None, torch.linspace(-3, 3, 256).view(16, 16)], ids=["none", "float"])
def test_a_mask_of_another_kind_runs_the_original(mask: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    original = Net(Masked).eval()
    model, images = copy.deepcopy(original), torch.randn(2, 3, 16, 16)
    vit_fast.fuse(model, "eager", example=images).require_all()
    torch.testing.assert_close(model(images), original(images))
    for net in (model, original):
        net.layers[0].mask = mask
    torch.testing.assert_close(model(images), original(images))


def test_skipped_attention_is_named_once() -> None:
    """A softmax that is a module is not attention of its own."""

    class Talks(Variant):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__(width, heads)
            self.softmax = nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            return x + self.out(self.mixed(self.softmax(q @ k.mT).flip(1) @ v))

    report = vit_fast.fuse(Net(Talks), "eager", example=torch.randn(2, 3, 20, 16))
    assert [(row.name, row.part) for row in report.skipped] == [
        ("layers.0", "attention"),
        ("layers.1", "attention"),
    ]


def test_skipped_blocks_are_named_with_all_they_contain() -> None:
    """Also if one of several parts is fused, values are computed after the softmax, or there is no softmax."""

    class Reversed(ListOfHeads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).flip(1)

    class Inline(Variant):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out(self.mixed((q @ k.mT).softmax(-1).flip(1) @ v))
            fc1, _, fc2 = self.mlp
            return x + fc2(F.gelu(fc1(self.norm2(x))))

    report = vit_fast.fuse(Net(Reversed, depth=1), "eager", example=torch.randn(2, 3, 20, 16))
    rows = [("layers.0.mlp", "MLP"), ("layers.0", "attention core")]
    assert [(row.name, row.part) for row in report.fused] == rows and not report.skipped

    class ByHand(Variant):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT).exp()
            x = x + self.out(self.mixed(weights @ v / weights.sum(-1, keepdim=True)))
            return x + self.mlp(self.norm2(x))

    report = vit_fast.fuse(Net(ByHand, depth=2), "eager", example=torch.randn(2, 3, 20, 16))
    assert [(row.name, row.part) for row in report.skipped] == [("layers.0", "attention"), ("layers.1", "attention")]
    report = vit_fast.fuse(Net(Inline, depth=1), "eager", example=torch.randn(2, 3, 20, 16))
    assert [(row.name, row.part) for row in report.skipped] == [("layers.0", "attention, norm + MLP")]

    class Layer(Packed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attend(x)

    class Beside(Packed):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__(width, heads)
            self.layer = Layer(width, heads)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            fc1, _, fc2 = self.mlp
            x = x + self.layer(self.norm1(x)).flip(1)
            return x + fc2(F.gelu(fc1(self.norm2(x))))

    report = vit_fast.fuse(Net(Beside, depth=1), "eager", example=torch.randn(2, 3, 20, 16))
    assert [(row.name, row.part, row.fused) for row in report.modules] == [
        ("layers.0.layer", "attention", True),
        ("layers.0", "norm + MLP", False),
    ]


@pytest.mark.parametrize("memory", [2**10, None])
def test_captures_that_need_too_much_memory(memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vit_fast.reading.reader.memory_bytes", lambda device: memory)
    report = vit_fast.fuse(Net(Masked).eval(), "eager", example=torch.randn(2, 3, 16, 16))
    assert ("pass an example of fewer tokens" in " ".join(str(report).split())) is (memory is not None)
