"""fuse(model, example=...) reads masks, biases and scales that a module computes from its own tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from spellings import Packed, SequenceFirst, Variant, runs_fused
from timm.models import vision_transformer_sam as sam
from torch import Tensor, nn

import vit_fast
from vit_fast import UnsupportedInputError
from vit_fast.export import export_onnx


class ZeroBias(Variant):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.bias = nn.Parameter(torch.zeros(heads, 1, 1))

    def scores(self, scores: Tensor) -> Tensor:
        return scores + self.bias * torch.arange(scores.shape[-1])


class MaskBuffer(Variant):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("mask", torch.ones(64, 64).tril())

    def scores(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return torch.where(self.mask[:n, :n] == 0, torch.finfo(scores.dtype).min, scores)


class Causal(Variant):
    def scores(self, scores: Tensor) -> Tensor:
        return scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)


class Slopes(Variant):
    """Attention with linear biases, whose slopes are created in the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        bias = (positions - positions[:, None]).abs() * -(0.5 ** torch.arange(1, self.heads + 1)).view(-1, 1, 1)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.mixed(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
        return x + self.mlp(self.norm2(x))


class Cosine(Variant):
    """Cosine attention with a learned scale per head, and a bias from an MLP: Swin v2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
        self.register_buffer("coordinates", torch.randn(500, 2))
        self.register_buffer("index", torch.arange(499, 99, -1).view(20, 20))  # exceeds other tables [8, heads]
        self.cpb = nn.Sequential(nn.Linear(2, 8), nn.ReLU(inplace=True), nn.Linear(8, heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.clamp(max=4.6052).exp()
        bias = 16 * torch.sigmoid(self.cpb(self.coordinates))[self.index].permute(2, 0, 1)
        x = x + self.out(self.mixed((scores + bias.contiguous().unsqueeze(0)).softmax(-1) @ v))
        return x + self.mlp(self.norm2(x))


class MaskAttribute(SequenceFirst):
    """A mask that is an ordinary attribute: OpenAI's CLIP, text tower."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.attn_mask = torch.full((20, 20), -torch.inf).triu(1)

    def attend(self, y: Tensor) -> Tensor:
        return self.attn(y, y, y, need_weights=False, attn_mask=self.attn_mask.to(y.dtype))[0]


@pytest.mark.fast_cases("MaskBuffer", "Slopes", "Cosine")
@pytest.mark.parametrize(
    "block", [ZeroBias, MaskBuffer, Causal, Slopes, Cosine, MaskAttribute], ids=lambda block: block.__name__
)
def test_constant_terms_of_the_scores(block: Any) -> None:
    """Masks, biases and scales that a module computes from its tensors follow these tensors, also after freeze."""
    torch.manual_seed(0)
    original = nn.Sequential(block(32, 4), block(32, 4)).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model, x = copy.deepcopy(original), torch.randn((20, 3, 32) if block is MaskAttribute else (3, 20, 32))
    vit_fast.fuse(model, "eager", example=x).require_all()
    assert runs_fused(model, lambda: model(x))
    for net in (model, original):
        net(x).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), original.parameters()):
        if b.grad is None:
            assert a.grad is None, name
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()), msg=name)
    vit_fast.fuse(model, "sdpa")
    assert len(vit_fast.freeze(model)) == 2
    with torch.inference_mode(False), torch.no_grad():
        for net in (model, original):
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.mul_(1.1 if tensor.is_floating_point() else 1)
        assert runs_fused(model, lambda: model(x))
        for given in (copy.deepcopy(model), model):
            torch.testing.assert_close(given(x), original(x), rtol=1e-5, atol=1e-5)
        if block in (MaskBuffer, Causal, Slopes):  # another number of tokens runs the original
            torch.testing.assert_close(model(x[:, :9]), original(x[:, :9]), rtol=1e-5, atol=1e-5)


class Shifted(nn.Module):
    """Shifted windows with a table of biases, a window mask and a learned scale per head: [B, 8, 8, C].

    The mask may be an argument, as in MONAI and Video Swin.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))
        self.scale, self.table = nn.Parameter(torch.rand(heads, 1, 1) + 0.1), nn.Parameter(torch.randn(9, heads))
        self.register_buffer("index", torch.randint(9, (16, 16)))
        self.register_buffer("mask", torch.where(torch.rand(4, 16, 16) < 0.3, -100.0, 0.0))

    def attend(self, windows: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(windows).unflatten(-1, (3, len(self.scale), -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.scale + self.table[self.index].permute(2, 0, 1)
        scores = (scores.unflatten(0, (-1, 4)) + mask[None, :, None]).flatten(0, 1)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x).roll((-2, -2), (1, 2)).unflatten(1, (2, 4)).unflatten(3, (2, 4)).transpose(2, 3)
        y = self.attend(y.reshape(-1, 16, x.shape[-1]), self.mask if mask is None else mask)
        x = x + y.view(-1, 2, 2, 4, 4, x.shape[-1]).transpose(2, 3).reshape(x.shape).roll((2, 2), (1, 2))
        return x + self.mlp(self.norm2(x))


class OfWindows(Shifted):
    """An attention layer whose batch contains the windows of several images: [B * 4, 16, C]."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, self.mask if mask is None else mask)


@pytest.mark.parametrize("make", [Shifted, OfWindows])
def test_window_masks_that_are_arguments(make: Any) -> None:
    """Each call uses its mask; queries without keys return NaN; a mask with a gradient runs the original."""
    torch.manual_seed(0)
    original, x = make(32, 4).eval(), torch.randn((3, 8, 8, 32) if make is Shifted else (12, 16, 32))
    mask = torch.where(torch.rand(4, 16, 16) < 0.3, -100.0, 0.0)
    block = copy.deepcopy(original)
    vit_fast.fuse(block, "eager", example=(x[:2] if make is Shifted else x, mask)).require_all()

    def compare(mask: Tensor, is_fused: bool = True) -> None:
        assert runs_fused(block, lambda: block(x, mask)) is is_fused
        for net in (block, original):
            net.zero_grad()
            net(x, mask).square().sum().backward()
        torch.testing.assert_close(block(x, mask), original(x, mask), rtol=1e-4, atol=1e-4, equal_nan=True)
        for a, b in zip(block.parameters(), original.parameters()):
            if b.grad is None:
                assert a.grad is None
                continue
            assert (a.grad - b.grad).nan_to_num().norm() <= 1e-3 * b.grad.nan_to_num().norm()
            assert torch.equal(a.grad.isnan(), b.grad.isnan())

    hiding = mask.index_fill(1, torch.tensor([2]), -torch.inf)
    for given in (mask, mask.roll(1, 0), hiding):
        compare(given)
    wanted = mask.requires_grad_()
    compare(wanted, is_fused=False)
    assert wanted.grad is not None
    mask = mask.detach()
    compare(mask[:1], is_fused=False)
    vit_fast.fuse(block, "sdpa")
    assert len(vit_fast.freeze(block)) == 1
    with torch.inference_mode():
        for given in (mask, mask.roll(1, 0), hiding):
            assert runs_fused(block, lambda given=given: block(x, given))
            torch.testing.assert_close(block(x, given), original(x, given), rtol=1e-4, atol=1e-4, equal_nan=True)


def with_rel(width: int, heads: int) -> nn.Module:
    """SAM's block: windows, and decomposed relative positions."""
    return sam.Block(width, heads, use_rel_pos=True, window_size=4, input_size=(8, 8))


class Alone(Packed):
    """Tokens [N, C] without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[None])[0]


class ByLength(Alone):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + len(x) / 20)


class Volume(Packed):
    """Shifted windows in three dimensions, [B, D, H, W, C]."""

    back = 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x).roll((0, -1, -1), (1, 2, 3)).unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).unflatten(5, (-1, 2))
        order = (0, 1, 3, 5, 2, 4, 6, 7)
        windows = y.permute(order)
        y = self.attend(windows.reshape(-1, 8, x.shape[-1])).view(windows.shape).permute(0, 1, 4, 2, 5, 3, 6, 7)
        x = x + self.gamma1 * y.reshape(x.shape).roll((0, self.back, self.back), (1, 2, 3))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class OtherWay(Volume):
    back = -1


class OverChannels(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        return (
            x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * self.weight[:, None, None] + self.bias[:, None, None]
        )


class Pointwise(nn.Module):
    """1x1 convolutions as linear layers, [B, C, H, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = OverChannels(width), OverChannels(width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))
        self.mlp = nn.Sequential(nn.Conv2d(width, 48, 1), nn.GELU(), nn.Conv2d(48, width, 1))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), self.heads, -1, x.shape[2] * x.shape[3]).chunk(3, 2)
        weights = (q.mT @ k * q.shape[2] ** -0.5).softmax(-1)
        return self.out((v @ weights.mT).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PointwiseWindows(Pointwise):
    """Attention in windows of two rows."""

    def attend(self, x: Tensor) -> Tensor:
        y = super().attend(x.unflatten(2, (-1, 2)).transpose(1, 2).flatten(0, 1))
        return y.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2, 3)


class PointwiseMlp(nn.Module):
    """An MLP of Conv1d on [B, N, C]."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Conv1d(width, 48, 1), nn.Conv1d(48, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x).mT))).mT


class Squeezes(nn.Module):
    """Convolutions that are no MLP of all positions: squeeze and excite, and a bottleneck."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.excite = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, 8, 1), nn.ReLU(), nn.Conv2d(8, width, 1))
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(width, 8, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(x).sigmoid() + self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))


SHAPES: dict[Any, tuple[int, ...]] = {
    Alone: (20, 32), ByLength: (20, 32), Volume: (2, 2, 4, 4, 32), OtherWay: (2, 2, 4, 4, 32), Pointwise: (2, 32, 3, 5),
    PointwiseWindows: (2, 32, 4, 3), PointwiseMlp: (2, 20, 32), Squeezes: (2, 32, 4, 4),
}  # fmt: skip
READ = {Alone: "attention, norm + MLP", PointwiseMlp: "norm + MLP"}
READ |= dict.fromkeys((Volume, Pointwise, PointwiseWindows), READ[Alone])


@pytest.mark.fast_cases("Alone", "ByLength", "Pointwise", "PointwiseMlp", "Squeezes")
@pytest.mark.parametrize("block", SHAPES)
def test_other_dimensions(block: Any) -> None:
    torch.manual_seed(0)
    original, shape = block(32, 4).eval(), SHAPES[block]
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = nn.Sequential(copy.deepcopy(original))
    report = vit_fast.fuse(model, "eager", example=torch.randn(shape))
    is_read = [row.part for row in report.fused] == [READ.get(block)]
    assert is_read is (block in READ) and bool(report.modules) is (block is not Squeezes)
    for x in (torch.randn(shape), torch.randn(3 * shape[0], *shape[1:])):
        assert runs_fused(model, lambda x=x: model(x)) or not is_read
        for net in (model, original):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4, check_stride=True)
        for a, b in zip(model.parameters(), original.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()))
    if block is Pointwise:
        last = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(model(last), original(last), rtol=1e-4, atol=1e-4, check_stride=True)
    vit_fast.fuse(model, "sdpa")
    vit_fast.freeze(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("block", [MaskBuffer, Cosine, Shifted, with_rel, Pointwise], ids=lambda block: block.__name__)
def test_compile_and_export(block: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(32, 2), block(32, 2)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn((3, 8, 8, 32) if block in (Shifted, with_rel) else (3, *SHAPES.get(block, (2, 20, 32))[1:]))
    expected = model(x)
    vit_fast.fuse(model, "eager", example=x).require_all()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected, rtol=1e-5, atol=1e-5)
    export_onnx(model, tmp_path / "model.onnx", example=x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_fp8_runs_only_blocks_without_terms() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Variant(32, 2), MaskBuffer(32, 2)).bfloat16().eval(), torch.randn(2, 20, 32).bfloat16()
    reason = "in FP8, attention must not have a bias, a window mask, relative positions, windows or a scale per head"
    with pytest.raises(UnsupportedInputError, match=f"1: {reason}"):
        vit_fast.calibrate(model[1:].eval(), x)
    half = model(x)
    assert all(linear.name.startswith("0.") for linear in vit_fast.calibrate(model, x).linears)
    first, second = vit_fast.fuse(model, precision="fp8").fused
    assert first.notes == ("in e4m3: qkv, proj, fc1, fc2",) and second.notes == (f"stays in bfloat16: {reason}",)
    assert 1e-3 < (model(x) - half).norm() / half.norm() < 0.3 and runs_fused(model, lambda: model(x))
