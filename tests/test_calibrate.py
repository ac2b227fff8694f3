"""calibrate: finds e4m3 scales on images and stores them with the weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import digits_vit, inputs
from fused_models import SUBJECTS
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fp8_scales import LINEARS, PLACE, scales_of
from vit_fast.quantization.fp8 import IMAGES


@pytest.fixture
def model() -> Any:
    """A model calibrated on eight images."""
    model = digits_vit()
    vit_fast.calibrate(model, inputs()[:8])
    return model


def scales_in(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if PLACE in name}


def same_scales(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    """Returns True if the model has these scales, rounded to its own dtype."""
    found = scales_in(model)
    equal = (torch.equal(scale, expected[name].to(scale.dtype)) for name, scale in found.items())
    return found.keys() == expected.keys() and all(equal)


def test_scales_are_copied_saved_and_loaded_with_the_weights(model: Any, tmp_path: Path) -> None:
    expected, fresh = scales_in(model), vit_fast.VisionTransformer(model.config)
    assert len(expected) == 3 * (len(LINEARS) + 1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict(model.state_dict())
    vit_fast.fuse(fresh)
    fresh.load_state_dict(model.state_dict())
    saved = vit_fast.load(vit_fast.save(model, tmp_path / "model.safetensors"))
    assert all(same_scales(each, expected) for each in (copy.deepcopy(model).half().float(), fresh, saved))
    vit_fast.load_weights(fresh, vit_fast.save(copy.deepcopy(model).half(), tmp_path / "half.safetensors"))
    assert same_scales(fresh, expected)
    with pytest.raises(RuntimeError, match=rf"Missing key.*blocks.0.{PLACE}.qkv"):
        model.load_state_dict(digits_vit().state_dict())
    vit_fast.unfuse(model)
    assert model.state_dict().keys() == digits_vit().state_dict().keys()


def test_a_fused_model_is_calibrated_again(model: Any) -> None:
    plain = copy.deepcopy(scales_in(model))
    vit_fast.fuse(model, "sdpa")
    vit_fast.calibrate(model, inputs()[:8])
    assert same_scales(model, plain)
    scales: Any = scales_of(model.blocks[0])
    assert scales.names_kept() == []
    scales.keep(["proj", "fc2"])
    vit_fast.calibrate(model, 64 * inputs()[:8])
    assert scales_of(model.blocks[0]) is scales and scales.names_kept() == ["proj", "fc2"]
    assert scales_in(model)["blocks.0.vit_fast_fp8.qkv"].mean() > 4 * plain["blocks.0.vit_fast_fp8.qkv"].mean()
    assert model.blocks[0].vit_fast_backend == "sdpa"
    nn.init.zeros_(model.blocks[0].attn.qkv.weight)
    nn.init.zeros_(model.blocks[0].attn.qkv.bias)
    vit_fast.calibrate(model, inputs()[:8])
    assert scales_in(model)["blocks.0.vit_fast_fp8.proj"] == 1, "if all inputs are 0"


def test_batches_of_loaders() -> None:
    """Tuples, other dtypes, empty batches, and a loader that writes every batch into the same memory."""
    images, whole = inputs()[:10], digits_vit()
    vit_fast.calibrate(whole, images)
    one = torch.empty(2, 1, 8, 8)
    reused = (one.copy_(batch) for batch in images.split(2))
    for given in (images.double(), [(images, torch.arange(10))], [images, images[:0]], reused):
        model = digits_vit()
        assert vit_fast.calibrate(model, given).images == 10
        if given is reused:  # other samples of tokens
            vit_fast.calibrate(whole, images.split(2))
        assert same_scales(model, scales_in(whole))
    assert torch.equal(torch.cat(IMAGES[model]), images), "min_agreement needs them later"


def test_a_model_on_meta_runs_in_fp8_once_it_has_its_weights(model: Any) -> None:
    model.bfloat16()
    empty: Any = copy.deepcopy(model).to("meta")
    for each in (model, empty):
        vit_fast.fuse(each, precision="fp8", keep=("blocks.0.mlp.fc2",) if each is model else None)
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    x = inputs()[:1].bfloat16()
    with torch.no_grad():
        assert torch.equal(filled(x), model(x))


IMAGE = torch.zeros(1, 1, 8, 8)


@pytest.mark.parametrize(
    ("make", "images", "error", "message"),
    [
        (digits_vit, [], ValueError, "at least one image, got none"),
        (digits_vit, IMAGE[:0], ValueError, "at least one image, got none"),
        (digits_vit, [IMAGE.numpy()], TypeError, "batch 0 of images must be .*, got numpy.ndarray"),
        (digits_vit, torch.zeros(8), TypeError, r"batch 0 of images must be .*, got shape \(8,\)"),
        (digits_vit, IMAGE[0], ValueError, r"got a batch of shape \(1, 8, 8\), torch.float32: "),
        (digits_vit, IMAGE.byte(), ValueError, r"got a batch of shape .*, torch.uint8: "),
        (digits_vit, IMAGE * torch.nan, ValueError, "input of blocks.0.attn.qkv must be finite"),
        (lambda: digits_vit().train(), IMAGE, ValueError, r"evaluation mode: call eval\(\)"),
        (lambda: digits_vit().to("meta"), IMAGE, ValueError, "must have weights, got tensors on the meta device"),
        (lambda: torch.compile(digits_vit()), IMAGE, ValueError, r"before torch\.compile"),
        (lambda: nn.Linear(3, 3).eval(), IMAGE, ValueError, "must have an encoder block"),
        (lambda: SUBJECTS["timm-norm-inside"].build().eval(), IMAGE, ValueError, r"blocks.0: .*norm"),
    ],
)
def test_invalid_models_and_images(make: Any, images: Any, error: type[Exception], message: str) -> None:
    model = make()
    with pytest.raises(error, match=message):
        vit_fast.calibrate(model, images)
    assert not isinstance(model, nn.Module) or not scales_in(model)
