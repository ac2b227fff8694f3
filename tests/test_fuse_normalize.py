"""Images as bytes: normalization folded into the patch embedding."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, Subject
from torch import Tensor, nn

import vit_fast

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# the input is patches, tokens, or images and noise; or the convolution pads the images
OTHERS = ("transformers-siglip2", "torch-encoder", "transformers-vit-mae", "transformers-vitpose")
NAMES = [name for name in SUBJECTS if name not in OTHERS]


def bytes_for(subject: Subject) -> tuple[str, Tensor]:
    ((name, images),) = subject.inputs().items()
    return name, torch.randint(0, 256, images.shape, dtype=torch.uint8)


def normalized(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    return ((pixels.double() / 255 - mean) / std).to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_for_bytes_match_those_for_normalized_images(name: str) -> None:
    subject = SUBJECTS[name]
    model = subject.build().eval()
    argument, pixels = bytes_for(subject)
    with torch.no_grad():
        expected = subject.run(model, {argument: normalized(pixels)})
        report = vit_fast.fuse(model, backend="sdpa", normalize=(MEAN, STD))
        assert [module.part for module in report.fused].count("normalization") == 1
        for given in (pixels, pixels.float(), pixels.contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(subject.run(model, {argument: given}), expected, rtol=1e-4, atol=1e-4)
        vit_fast.unfuse(model)
        torch.testing.assert_close(subject.run(model, {argument: normalized(pixels)}), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_normalizing_first(dtype: torch.dtype) -> None:
    conv = nn.Conv2d(3, 64, 16, stride=16)
    nn.init.trunc_normal_(conv.weight, std=0.02)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    exact = copy.deepcopy(conv).double()(normalized(pixels, torch.float64))
    conv = conv.to(dtype)
    before = (conv(normalized(pixels, dtype)).double() - exact).square().mean()
    vit_fast.fuse(conv, normalize=(MEAN, STD))
    assert (conv(pixels).double() - exact).square().mean() <= 2 * before


@pytest.mark.slow
def test_compile_copies_and_another_fuse() -> None:
    model = SUBJECTS["timm-vit"].build().eval()
    _, pixels = bytes_for(SUBJECTS["timm-vit"])
    vit_fast.fuse(model, normalize=(MEAN, STD))
    with torch.no_grad():
        expected = model(pixels)
        vit_fast.fuse(model, normalize=((0.5,) * 3, (0.5,) * 3))
        assert not torch.allclose(model(pixels), expected)
        vit_fast.fuse(model, normalize=(MEAN, STD))
        vit_fast.fuse(model)  # without normalize, the folded normalization stays
        loaded = pickle.loads(pickle.dumps(model))
        compiled = torch.compile(loaded, backend="aot_eager", fullgraph=True)
        for each in (model, loaded, compiled):
            torch.testing.assert_close(each(pixels), expected)


@pytest.mark.parametrize(
    ("model", "normalize", "message"),
    [
        (None, ((0.5,) * 3, (0.5, 0.5)), "one number per channel"),
        (None, ((0.5,) * 3, (0.5, 0.5, 0.0)), "and std > 0"),
        (None, (0.5, 0.5), "one number per channel"),
        (None, "imagenet", "one number per channel"),
        (None, ((0.5,), (0.5,)), "normalize must have 3 numbers, one per input channel, got 1"),
        (nn.Linear(3, 3), (MEAN, STD), "must have a convolution as patch embedding, got none"),
        (nn.Conv2d(3, 8, 3, padding=1), (MEAN, STD), r"padding must be 0, got \(1, 1\)"),
        (nn.Conv2d(3, 6, 2, stride=2, groups=3), (MEAN, STD), "groups must be 1, got 3"),
    ],
)
def test_errors_change_nothing(model: Any, normalize: object, message: str) -> None:
    model = model or SUBJECTS["timm-vit"].build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        vit_fast.fuse(model, normalize=normalize)
    assert [type(module) for module in model.modules()] == classes


def test_only_the_model_whose_convolution_is_folded_takes_bytes() -> None:
    first, second = (vit_fast.create_model("vit_test", backend="eager").eval() for _ in range(2))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    expected = first(normalized(pixels))
    expected.square().sum().backward()
    weight, other = first.patch_embed.proj.weight, first.patch_embed.proj.weight.grad
    first.zero_grad()
    vit_fast.fuse(nn.ModuleList([first, second]), backend="sdpa", normalize=(MEAN, STD))
    found = first(pixels)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    torch.testing.assert_close(weight.grad, other, rtol=1e-3, atol=1e-2)
    with pytest.raises(ValueError, match=r"got torch.uint8"):
        second(pixels)
