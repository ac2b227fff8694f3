"""fuse(model, example=...) replaces attention cores, and reads relative positions of SAM."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spellings import Packed, runs_fused
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import vit_fast
from vit_fast.ops import reference


def compare(model: Any, original: Any, *args: Any) -> None:
    """Compares outputs and all gradients."""
    for net in (model, original):
        net.zero_grad()
        net(*args).square().sum().backward()
    torch.testing.assert_close(model(*args), original(*args), rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(model.named_parameters(), original.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()) + 1e-5, msg=name)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Core(nn.Module):
    """Attention with grouped 1x1 convolutions as projections."""

    def __init__(self, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.qkv, self.proj, self.attend = nn.Conv1d(32, 96, 1, groups=2), nn.Conv1d(32, 32, 1), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.mT).unflatten(1, (3, 2, 16)).mT.unbind(1)
        y = self.attend(q, k, v)
        return self.proj(F.pad(y, (0, 16 - y.shape[-1])).mT.flatten(1, 2)).mT


def by_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 4).softmax(-1) @ v


class Twins(nn.Module):
    """Queries of all tokens, keys and values of fewer tokens."""

    def __init__(self) -> None:
        from timm.models.twins import GlobalSubSampleAttn

        super().__init__()
        self.attn = GlobalSubSampleAttn(32, 2, sr_ratio=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, (4, x.shape[1] // 4))


@pytest.mark.fast_cases("Core")
@pytest.mark.parametrize("make", [Twins, Core, partial(Core, by_softmax)])
def test_cores_of_modules_that_are_not_read(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    original, x = make().eval(), torch.randn(2, 16, 32)
    model, calls, attention = copy.deepcopy(original), [], reference.attention
    monkeypatch.setattr(reference, "attention", lambda *args, **kwargs: calls.append(1) or attention(*args, **kwargs))
    report = vit_fast.fuse(model, "eager", example=x).require_all()
    assert [row.part for row in report.modules] == ["attention core"]
    assert report.modules[0].notes[0].startswith("the rest runs as modules: ")
    for tokens in (x, torch.randn(3, 24, 32)):
        compare(model, original, tokens)
    assert len(calls) == 4
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(x), original(x), rtol=1e-4, atol=1e-4)
    assert len(calls) == 6
    assert "already fused" in str(vit_fast.fuse(model, "sdpa", example=x))
    is_spelled = getattr(original, "attend", None) is by_softmax
    assert any("with the backend sdpa" in note for note in report.modules[0].notes) == is_spelled
    assert torch.equal(model(x), original(x)) and len(calls) == 6
    vit_fast.freeze(model)
    vit_fast.unfuse(model)
    assert [type(part) for part in model.modules()] == [type(part) for part in original.modules()]
    assert [set(vars(part)) for part in model.modules()] == [set(vars(part)) for part in original.modules()]
    torch.testing.assert_close(model(x), original(x))


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def biased_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) + 0.1) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "attend", [partial(F.scaled_dot_product_attention, is_causal=True), over_queries, biased_after, twice]
)
def test_cores_that_attention_cannot_compute(attend: Attend) -> None:
    assert not vit_fast.fuse(nn.Sequential(Core(attend)), "eager", example=torch.randn(2, 9, 32)).fused


class Checkpointed(Core):
    """Attention, or only its softmax, runs again in the backward pass: outside of the module's forward."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def again(self, *args: Any) -> Any:
        return checkpoint(*args, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.mT).unflatten(1, (3, 2, 16)).mT.unbind(1)
        if self.part == "softmax":
            y = self.again(lambda scores: scores.softmax(-1), q @ k.mT / 4) @ v
        else:
            y = self.again(by_softmax if self.part == "spelled" else F.scaled_dot_product_attention, q, k, v)
        return self.proj(y.mT.flatten(1, 2)).mT


@pytest.mark.parametrize("part", ["spelled", "sdpa", "softmax"])
def test_checkpoints_inside_of_a_forward(part: str) -> None:
    model = Checkpointed(part)
    report = vit_fast.fuse(fused := copy.deepcopy(model), "eager", example=torch.randn(1, 9, 32))
    assert report.fused
    compare(fused, model, torch.randn(2, 9, 32))


class Flex(Core):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.mT).unflatten(1, (3, 2, 16)).mT.unbind(1)
        return self.proj(flex_attention(q, k, v).mT.flatten(1, 2)).mT


def test_flex_attention_is_named() -> None:
    (row,) = vit_fast.fuse(nn.Sequential(Flex()), "eager", example=torch.randn(2, 9, 32)).skipped
    assert (row.name, row.part) == ("0", "attention")


def sam(window: int, size: tuple[int, int]) -> nn.Module:
    from timm.models.vision_transformer_sam import Block

    return Block(32, 2, use_rel_pos=True, window_size=window, input_size=size)


@pytest.mark.fast_cases("windows")
@pytest.mark.parametrize(
    ("window", "size", "whole"), [(0, (6, 4), True), (4, (8, 4), True), (4, (6, 5), False)],
    ids=["grid", "windows", "padded windows"],
)  # fmt: skip
def test_relative_positions_of_sam(window: int, size: tuple[int, int], whole: bool) -> None:
    """Tables that the queries multiply; padded windows are not part of a block."""
    torch.manual_seed(0)
    original, x = sam(window, size).eval(), torch.randn(2, *size, 32)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = nn.Sequential(copy.deepcopy(original))
    parts = [row.part for row in vit_fast.fuse(model, "eager", example=x).require_all().modules]
    assert parts == (["attention, norm + MLP"] if whole else ["attention", "MLP"])
    assert runs_fused(model, lambda: model(x))
    compare(model, nn.Sequential(original), x)
    vit_fast.fuse(model, "sdpa")
    assert len(vit_fast.freeze(model)) == whole
    with torch.inference_mode():
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


class ByKeys(nn.Module):
    """Tables that the keys multiply, which is another function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.tables = nn.ParameterList(torch.randn(4, 4, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        grid = k.unflatten(1, (4, 4))
        rel_h, rel_w = (
            torch.einsum("byxd,ykd->byxk", grid, self.tables[0]),
            torch.einsum("byxd,xkd->byxk", grid, self.tables[1]),
        )
        rel = (rel_h[..., None] + rel_w[..., None, :]).flatten(1, 2).flatten(2)
        return self.proj((q @ k.mT * 32**-0.5 + rel).softmax(-1) @ v)


def test_tables_that_keys_multiply_are_not_read() -> None:
    original, x = ByKeys(), torch.randn(2, 16, 32)
    model = nn.Sequential(copy.deepcopy(original))
    (row,) = vit_fast.fuse(model, "eager", example=x).require_all().modules
    assert row.part == "attention core"
    assert row.notes[0].startswith("the rest runs as modules: its scores are changed before the softmax")
    compare(model, original, x)


class Ignores(Packed):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, positions: Tensor | None = None) -> Tensor:
        return super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Ignores(32, 4)
        self.block.drop.p = 0.0

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        return self.block(x, **given) if "positions" in given else self.block(x, *given.values())


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.fast_cases("mask-deepcopy")
@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle], ids=lambda how: how.__name__)
@pytest.mark.parametrize("name", ["mask", "positions"])
def test_ten_training_steps_with_unused_arguments(name: str, how: Any) -> None:
    """Copies and pickles of a fused module train like the original; the arguments are positional or keywords."""
    torch.manual_seed(0)
    original, given = Net().train(), {name: torch.randn(12, 8)}
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "eager", example={"x": torch.randn(2, 12, 32)} | given).require_all()
    model = how(model)
    assert runs_fused(model, lambda: model(torch.randn(3, 12, 32), **given))
    losses: list[list[float]] = []
    for net in (model, original):
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        losses.append([])
        for step in range(10):
            torch.manual_seed(step)
            loss = (net(torch.randn(4, 12, 32), **given) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
