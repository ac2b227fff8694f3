"""fuse(model, example=...) reads blocks of unknown classes by what they compute."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_models import losses_of_training
from spellings import (
    BLOCKS,
    OTHER_BLOCKS,
    ChannelsFirst,
    Einsum,
    Flat,
    Head,
    HeadsFirst,
    ListOfHeads,
    Net,
    NormedBranch,
    Packed,
    PostNorm,
    Residuals,
    Separate,
    Tiled,
    Tutorial,
    Variant,
    runs_fused,
)
from torch import Tensor, nn

import vit_fast
from vit_fast.reading.capture import UnreadableError
from vit_fast.reading.forms import ReadModule
from vit_fast.reading.reader import read

WITHOUT_SDPA = {Packed, HeadsFirst, ChannelsFirst, Einsum, Tutorial, Flat, Tiled, ListOfHeads}
IMAGES = torch.randn(2, 3, 20, 16, generator=torch.Generator().manual_seed(0))


def fused_net(block: Any, backend: str = "eager", **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(block, **options).eval()
    vit_fast.fuse(model, backend, example=IMAGES).require_all()
    return model


@pytest.mark.fast_cases("Packed", "Tutorial", "SequenceFirst", "PostNorm", "Tiled", "Parallel", "Modulated")
@pytest.mark.parametrize("block", [*BLOCKS, *OTHER_BLOCKS], ids=lambda block: block.__name__)
def test_spellings(block: Any) -> None:
    """Every spelling is fused; outputs and gradients are equal; training, freeze and unfuse work."""
    torch.manual_seed(0)
    original = Net(block).eval()
    model = copy.deepcopy(original)
    report = vit_fast.fuse(model, "eager", example=IMAGES).require_all()
    assert [row.part for row in report.fused] == [f"attention, {'' if block is NormedBranch else 'norm + '}MLP"] * 2
    other = torch.randn(3, 3, 24, 8)  # other batch size and number of tokens
    for images in (IMAGES, other):
        torch.testing.assert_close(model(images), original(images), rtol=1e-5, atol=1e-5)
    assert runs_fused(model, lambda: model(other))
    for net in (model, original):
        net(IMAGES).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), original.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)
    vit_fast.fuse(model, "sdpa")
    # an original that calls SDPA itself is as fast
    assert runs_fused(model, lambda: model(IMAGES)) is (block in WITHOUT_SDPA)
    torch.testing.assert_close(model(IMAGES), original(IMAGES), rtol=1e-5, atol=1e-5)
    frozen = vit_fast.freeze(model)
    with torch.inference_mode():
        assert len(frozen) == 2, str(frozen)
        assert runs_fused(model, lambda: model(IMAGES))
        torch.testing.assert_close(model(IMAGES), original(IMAGES), rtol=1e-5, atol=1e-5)
    vit_fast.unfuse(model)
    assert [type(each) for each in model.modules()] == [type(each) for each in original.modules()]
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(model.modules(), original.modules()))


def test_the_model_stays_unchanged() -> None:
    model = Net(Packed).train()
    before, rng = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    vit_fast.fuse(model, example=IMAGES)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.training and not each._forward_hooks and not each._forward_pre_hooks for each in model.modules())
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.fast_cases("Packed", "Residuals", "NormedResidual")
@pytest.mark.parametrize("block", [*BLOCKS, *OTHER_BLOCKS], ids=lambda block: block.__name__)
def test_ten_training_steps(block: Any) -> None:
    torch.manual_seed(0)
    original = Net(block)
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "eager", example=IMAGES)
    found, expected = (losses_of_training(net, IMAGES) for net in (model, original))
    assert expected[-1] < expected[0]
    # PostNorm contains a drop path that its forward does not use, so that training runs the original
    assert runs_fused(model, lambda: model(IMAGES)) is (block is not PostNorm)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [Residuals, NormedBranch])
def test_drop_path_runs_fused(block: Any) -> None:
    model = Net(block).train()  # drops most samples while it is read
    for part in model.modules():
        if hasattr(part, "drop_prob"):
            part.drop_prob = 0.9
    assert len(vit_fast.fuse(model, "eager", example=IMAGES).require_all().fused) == 2
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert runs_fused(model, lambda: model(IMAGES))
    for part in model.modules():
        if hasattr(part, "drop_prob"):
            part.drop_prob = 1 - 1e-9  # drops every sample
    torch.testing.assert_close(model.layers[0](torch.ones(2, 5, 32)), torch.ones(2, 5, 32))


def test_copies_pickles_and_state() -> None:
    model = fused_net(Packed)
    expected = model(IMAGES)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert runs_fused(other, lambda: other(IMAGES))  # noqa: B023
        assert torch.equal(other(IMAGES), expected)
    fresh = fused_net(Packed)
    nn.init.zeros_(fresh.layers[0].qkv.weight)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(IMAGES), expected)
    assert list(fresh.state_dict()) == list(Net(Packed).state_dict())


def test_changes_after_fuse_run_the_original() -> None:
    """Hooks, replaced modules and changed attributes inside a fused module have an effect."""
    model = fused_net(Packed)
    layer: Any = model.layers[0]
    x = torch.randn(2, 20, 32)
    nn.init.ones_(layer.gamma1)
    nn.init.ones_(layer.gamma2)
    before = layer(x)

    seen: list[object] = []
    hook = layer.mlp[0].register_forward_hook(lambda *arguments: seen.append(arguments))
    assert torch.allclose(layer(x), before, atol=1e-5)
    assert seen
    hook.remove()
    assert runs_fused(model, lambda: model(IMAGES))

    layer.scale *= 2
    assert not torch.allclose(layer(x), before, atol=1e-5)
    layer.scale /= 2
    assert runs_fused(model, lambda: model(IMAGES))
    layer.mlp[1] = nn.ReLU()
    assert not torch.allclose(layer(x), before, atol=1e-3)


def test_other_calls_run_the_original() -> None:
    model = fused_net(Separate)
    layer, x = model.layers[0], torch.randn(2, 20, 32)
    assert runs_fused(layer, lambda: layer(x))
    assert not torch.allclose(layer(x)[0], layer(x, causal=True)[0], atol=1e-4)
    assert not runs_fused(layer, lambda: layer(x, causal=True))


@pytest.mark.slow
def test_compile_and_export() -> None:
    model = fused_net(Packed)
    expected = model(IMAGES)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IMAGES), expected)
    model.layers[0].scale *= 3  # guarded
    torch.testing.assert_close(compiled(IMAGES), model(IMAGES))
    vit_fast.fuse(model, "sdpa")
    exported = torch.export.export(model, (IMAGES,)).module()
    torch.testing.assert_close(exported(IMAGES), model(IMAGES))


# Modules that compute something else than parts can express: each must keep its original forward.


class OtherOutputOrder(Variant):
    def mixed(self, y: Tensor) -> Tensor:
        return y.permute(0, 2, 3, 1).flatten(2)  # [d, h]


class MaskOfTokens(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(scores < scores.mean(), -torch.inf)


class ScaleOfTokens(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores * scores.square().mean().sqrt()


class RandomMask(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores + torch.rand(scores.shape[-2:])


class Item(Variant):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum().item() > 1e6 else 1)


class WritesInput(Variant):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(2)
        return y


class Counts(Variant):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Detached(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores.detach()


class NearlyGelu(Variant):
    def forward(self, x: Tensor) -> Tensor:
        fc1, _, fc2 = self.mlp
        return x + fc2(F.gelu(fc1(self.norm2(x))) * 1.0001)


class NormedTwice(Variant):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.norm1(super().forward(x)))


UNREADABLE = [
    OtherOutputOrder, MaskOfTokens, ScaleOfTokens, RandomMask, Item, WritesInput, Counts, Detached, NearlyGelu,
    NormedTwice, Head,
]  # fmt: skip


@pytest.mark.parametrize("block", UNREADABLE, ids=lambda block: block.__name__)
def test_another_function_is_not_read(block: Any) -> None:
    with pytest.raises(UnreadableError) as raised:
        read(block(32, 4), torch.empty(2, 10, 32))
    assert str(raised.value).startswith("its ") or "not tokens to tokens" in str(raised.value)


class ManyTokens(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores * 3 if scores.shape[-1] > 30 else scores


class LocalMask(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        i = torch.arange(scores.shape[-1])
        return scores.masked_fill((i - i[:, None]).abs() > 30, -torch.inf)


class TrainingBranch(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores * 3 if self.training else scores


class HalfBranch(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores * 3 if scores.dtype == torch.bfloat16 else scores


@pytest.mark.parametrize("block", [ManyTokens, LocalMask, TrainingBranch, HalfBranch], ids=lambda block: block.__name__)
def test_other_shapes_modes_and_dtypes_run_the_original(block: Any) -> None:
    torch.manual_seed(0)
    original = Net(block).eval()
    for part in original.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    nn.init.normal_(original.layers[0].qkv.weight)  # sharp attention
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "eager", example=IMAGES)
    dtype = torch.bfloat16 if block is HalfBranch else torch.float32
    for net in (model, original):
        net.train(block is TrainingBranch).to(dtype)
    images = torch.randn(2, 3, 32, 32).to(dtype)
    torch.testing.assert_close(model(images), original(images), rtol=1e-3, atol=1e-3)


def test_attention_and_mlp_inside_a_block_that_computes_more() -> None:
    class Convolved(PostNorm):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__(width, heads)
            self.conv = nn.Conv1d(width, width, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            x = x + self.conv(x.mT).mT
            return x + self.mlp(self.norm2(x))

    original = Net(Convolved).eval()
    model, expected = copy.deepcopy(original), original(IMAGES)
    report = vit_fast.fuse(model, "eager", example=IMAGES)
    assert [(row.name, row.part) for row in report.fused] == [
        (f"layers.{i}.{name}", part) for i in (0, 1) for name, part in (("attention", "attention"), ("mlp", "MLP"))
    ]
    assert runs_fused(model, lambda: model(IMAGES))
    torch.testing.assert_close(model(IMAGES), expected)
    assert vit_fast.freeze(model).skipped[0].reasons == ("the backend must be 'triton' or 'sdpa', got 'eager'",)

    vit_fast.fuse(model, "sdpa")
    assert len(vit_fast.freeze(model)) == 4
    with torch.inference_mode():
        assert runs_fused(model, lambda: model(IMAGES))
        torch.testing.assert_close(model(IMAGES), expected)
        for net in (model, original):
            nn.init.eye_(net.layers[0].attention.to_out.weight)
        torch.testing.assert_close(model(IMAGES), original(IMAGES))
        model.layers[0].mlp[2] = original.layers[0].mlp[2] = nn.Linear(96, 32)
        torch.testing.assert_close(model(IMAGES), original(IMAGES))


def test_a_model_that_states_its_size_needs_no_example() -> None:
    model = Net(Packed).eval()
    report = vit_fast.fuse(model)
    assert [row.name for row in report.skipped] == ["layers.0", "layers.1"] and "pass example=" in str(report)
    with pytest.raises(vit_fast.UnsupportedInputError, match="pass example="):
        report.require_all()
    row = vit_fast.fuse(nn.Sequential(model.layers[0]), example=torch.randn(2, 9, 32)).fused[0]
    assert (row.name, row.class_name) == ("0", "Packed")
    vit_fast.unfuse(model)
    model.img_size = 20  # type: ignore[assignment]
    assert len(vit_fast.fuse(model).require_all().fused) == 2


def test_functions_that_have_an_example_pass_it_on(tmp_path: Any) -> None:
    model = Net(Packed).eval()
    vit_fast.GraphRunner(model, IMAGES, fallback="eager", fuse=False)
    assert len(vit_fast.calibrate(model, IMAGES).linears) == 2 * 4
    vit_fast.unfuse(model)
    report = vit_fast.export.export_onnx(model, tmp_path / "m.onnx", example=IMAGES, target="ort-cpu")
    assert report.nodes["MultiHeadAttention"] == 2
    expected = model(IMAGES)
    assert not any(isinstance(each, ReadModule) for each in model.modules())
    runner = vit_fast.GraphRunner(model, IMAGES, fallback="eager")
    assert any(isinstance(each, ReadModule) for each in model.modules())
    torch.testing.assert_close(runner(IMAGES), expected)


class BiasOfKeys(nn.Module):
    """Attention with a saturated softmax, whose gradients of keys are zero up to rounding."""

    def __init__(self, leak: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = self.out(F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2))
        return y + self.leak * self.k.bias if self.leak else y


def test_gradients_that_are_zero_up_to_rounding() -> None:
    x = torch.randn(2, 7, 64)
    assert read(BiasOfKeys(0.0), x).kind == "attention"
    for leak in (1e-6, 1e-8):  # outputs differ by less than the limit
        with pytest.raises(UnreadableError, match=r"gradients of k\.bias"):
            read(BiasOfKeys(leak), x)


def test_a_block_that_is_read_later_restores_its_parts() -> None:
    block, x = PostNorm(32, 4).eval(), torch.randn(2, 9, 32)
    parts = [type(part) for part in block.modules()]
    for example in ("attention", "mlp", ""):
        assert vit_fast.fuse(block.get_submodule(example), "eager", example=x).fused
    assert [type(part) for part in block.modules()][1:] == parts[1:]


def test_inference_mode() -> None:
    model = Net(Residuals).eval()
    with torch.inference_mode():
        vit_fast.fuse(model, "eager", example=IMAGES.clone()).require_all()
