"""calibrate: finds e4m3 scales on images and stores them with the weights."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits import digits_vit, inputs
from fused_models import SUBJECTS
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fp8_scales import LINEARS, PLACE, Fp8Scales, scales_of
from vit_fast.fusion import calibration
from vit_fast.fusion.fuse import sharing_copy
from vit_fast.quantization import schemes
from vit_fast.quantization.fp8_emulation import IMAGES, emulate

LIBRARIES = [
    "ours", "timm-vit", "timm-qk-norm", "timm-dinov3", "timm-gated", "timm-dinov3-gated", "transformers-vit",
    "transformers-dinov2", "transformers-dinov3", "torchvision-vit",
]  # fmt: skip


def calibrated(images: int = 8) -> tuple[Any, calibration.Calibration]:
    model = digits_vit()
    return model, vit_fast.calibrate(model, inputs()[:images])


def scales_in(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if PLACE in name}


def same_scales(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    """Returns True if the model has these scales, rounded to its own dtype."""
    found = scales_in(model)
    equal = (torch.equal(scale, expected[name].to(scale.dtype)) for name, scale in found.items())
    return found.keys() == expected.keys() and all(equal)


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_linear_layer_of_every_library_by_its_name(name: str) -> None:
    """Calibration runs a copy whose blocks compute the reference, without rounding."""
    subject = SUBJECTS[name]
    model, given = subject.build().eval(), subject.inputs()
    copied = sharing_copy(model)
    blocks, left = emulate(copied)
    assert len(blocks) == 2 and not left
    seen: list[str] = []
    for block in blocks:
        block.look = lambda linear, x: seen.append(linear)
    with torch.no_grad():
        before = subject.run(model, given)
        torch.testing.assert_close(subject.run(copied, given), before, rtol=1e-3, atol=1e-3)
    assert set(seen) == set(LINEARS)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True)), "no weight is copied"

    names, classes = dict(model.named_modules()), [type(module) for module in model.modules()]
    found = vit_fast.calibrate(model, next(iter(given.values())))
    assert found.images == 2 and len(found.linears) == 2 * len(LINEARS)
    for linear in found.linears:
        assert isinstance(names[linear.name.removesuffix(".in_proj")], nn.Linear | nn.MultiheadAttention)
        assert 1e-4 < linear.error < 0.1 and linear.name in str(found)
    scales = [scales_of(module) for module in model.modules() if scales_of(module) is not None]
    assert len(scales) == 2
    for scale in (scale for of_block in scales for scale in of_block.all()):
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), "powers of two"
    assert [type(module) for module in model.modules() if type(module) is not Fp8Scales] == classes
    with torch.no_grad():
        assert torch.equal(subject.run(model, given), before), "nothing but buffers is added"


@pytest.mark.fast_cases("torch.float16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_are_the_same_after_every_way_that_weights_go(dtype: torch.dtype, tmp_path: Path) -> None:
    model, _ = calibrated()
    expected = scales_in(model)
    assert len(expected) == 3 * (len(LINEARS) + 1)

    fresh = vit_fast.VisionTransformer(model.config)
    vit_fast.fuse(fresh)
    fresh.load_state_dict(model.state_dict())
    saved = vit_fast.load(vit_fast.save(model, tmp_path / "model.safetensors"))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).to(dtype).float()
    assert all(same_scales(each, expected) for each in (*copies, fresh, saved))
    vit_fast.load_weights(fresh, vit_fast.save(copy.deepcopy(model).to(dtype), tmp_path / "half.safetensors"))
    assert same_scales(fresh, expected)
    with pytest.raises(RuntimeError, match=rf"Missing key.*blocks.0.{PLACE}.qkv"):
        model.load_state_dict(digits_vit().state_dict())
    vit_fast.unfuse(model)
    assert model.state_dict().keys() == digits_vit().state_dict().keys()

    other, unfused = (SUBJECTS["timm-vit"].build().eval() for _ in range(2))
    vit_fast.calibrate(other, SUBJECTS["timm-vit"].inputs()["x"])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        unfused.load_state_dict(other.state_dict())
    vit_fast.fuse(unfused)
    unfused.load_state_dict(vit_fast.fuse(other) and other.state_dict())
    assert same_scales(unfused, scales_in(other))


def test_a_fused_model_is_calibrated_as_it_is_and_again() -> None:
    model, _ = calibrated()
    plain = copy.deepcopy(scales_in(model))
    vit_fast.fuse(model, "sdpa")
    vit_fast.calibrate(model, inputs()[:8])
    assert same_scales(model, plain)
    scales = scales_of(model.blocks[0])
    assert scales is not None and scales.names_kept() == []
    scales.keep(["proj", "fc2"])
    vit_fast.calibrate(model, 64 * inputs()[:8])
    assert scales_of(model.blocks[0]) is scales and scales.names_kept() == ["proj", "fc2"]
    assert scales_in(model)["blocks.0.vit_fast_fp8.qkv"].mean() > 4 * plain["blocks.0.vit_fast_fp8.qkv"].mean()
    assert model.blocks[0].vit_fast_backend == "sdpa"


@pytest.mark.slow
def test_large_channels_are_moved_into_the_weight_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One channel exceeds the range of e4m3. Without smoothing, all others would be rounded to about 0."""
    model = digits_vit(massive=1e5)
    with_it = {linear.name: linear for linear in vit_fast.calibrate(model, inputs()[:16]).linears}
    monkeypatch.setattr(calibration, "smoothing_scale", lambda peak, weights: np.ones_like(peak))
    without = {linear.name: linear for linear in vit_fast.calibrate(model, inputs()[:16]).linears}
    first = "blocks.0.attn.qkv"
    assert with_it[first].smoothed and with_it[first].error < 0.1 < without[first].error
    assert not with_it["blocks.0.mlp.fc2"].smoothed


def test_the_sample_of_tokens_has_an_end_and_keeps_the_furthest() -> None:
    observer = schemes.Observer(np.random.default_rng(0))
    for number in range(400):
        rows = np.random.default_rng(number).normal(size=(20, 4)).astype(np.float32)
        rows[0, 1] = number
        assert observer.add(rows)
    seen = observer.seen()
    assert len(seen.tokens) <= schemes.MAX_TOKENS and seen.high[1] == seen.tokens.max() == 399
    assert (seen.tokens[:, 1] > 300).sum() == 99, "those of the last hundred images"


def test_batches_as_loaders_give_them() -> None:
    """Tuples, other dtypes, empty batches, and a loader that writes every batch into the same memory."""
    images, expected = inputs()[:10], scales_in(calibrated(10)[0])
    one = torch.empty(2, 1, 8, 8)
    reused = (one.copy_(batch) for batch in images.split(2))
    pieces = images.double(), [(images, torch.arange(10))], [images, images[:0]], reused
    for number, given in enumerate(pieces):
        model = digits_vit()
        assert vit_fast.calibrate(model, given).images == 10
        assert same_scales(model, expected) or number == 3  # other samples of tokens
    whole = digits_vit()
    vit_fast.calibrate(whole, images.split(2))
    assert same_scales(model, scales_in(whole))
    assert torch.equal(torch.cat(IMAGES[model]), images), "min_agreement needs them later"


def test_weights_that_bring_scales_are_rounded_by_these(tmp_path: Path) -> None:
    model, _ = calibrated()
    other = digits_vit()
    with torch.no_grad():
        other.blocks[0].norm1.weight.mul_(20)
    vit_fast.calibrate(other, inputs()[:8])
    path = vit_fast.save(other.bfloat16(), tmp_path / "other.safetensors")
    x = inputs()[:1].bfloat16()
    for each in (model.bfloat16(), other):
        vit_fast.fuse(each, precision="fp8")
    with torch.no_grad():
        before = model(x)
        vit_fast.load_weights(model, path)
        assert torch.equal(model(x), other(x)) and not torch.equal(model(x), before)


def test_a_model_on_meta_runs_in_fp8_once_it_has_its_weights() -> None:
    model, _ = calibrated()
    model.bfloat16()
    empty: Any = copy.deepcopy(model).to("meta")
    for each in (model, empty):
        vit_fast.fuse(each, precision="fp8")
    scales_of(model.blocks[0]).keep(["fc2"])  # type: ignore[union-attr]  # calibrated
    vit_fast.fuse(model, precision="fp8")
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    x = inputs()[:1].bfloat16()
    with torch.no_grad():
        assert torch.equal(filled(x), model(x))


def test_images_are_held_as_long_as_the_model() -> None:
    model, _ = calibrated()
    held = weakref.ref(IMAGES[model][0])
    assert copy.deepcopy(model) not in IMAGES
    del model
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([], ValueError, "at least one image, got none"),
        (torch.zeros(0, 1, 8, 8), ValueError, "at least one image, got none"),
        ("folder", TypeError, "images must be .*, got str"),
        (3, TypeError, "images must be .*, got int"),
        ([np.zeros((1, 1, 8, 8))], TypeError, "batch 0 of images must be .*, got numpy.ndarray"),
        (torch.zeros(8), TypeError, r"batch 0 of images must be .*, got shape \(8,\)"),
        (torch.zeros(1, 8, 8), ValueError, r"got a batch of shape \(1, 8, 8\), torch.float32: "),
        (torch.zeros(2, 3, 8, 8), ValueError, r"got a batch of shape \(2, 3, 8, 8\), torch.float32: "),
        (torch.zeros(2, 1, 8, 8).byte(), ValueError, r"got a batch of shape .*, torch.uint8: "),
        (torch.full((1, 1, 8, 8), torch.nan), ValueError, "input of blocks.0.attn.qkv must be finite"),
    ],
)
def test_images_that_cannot_be_used(images: object, error: type[Exception], message: str) -> None:
    model = digits_vit()
    with pytest.raises(error, match=message):
        vit_fast.calibrate(model, images)  # type: ignore[arg-type]  # the wrong type is the test
    assert not scales_in(model)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: 3, TypeError, r"model must be a torch\.nn\.Module, got 3"),
        (lambda: digits_vit().train(), ValueError, r"evaluation mode: call eval\(\)"),
        (lambda: digits_vit().to("meta"), ValueError, "model must have weights, got tensors on the meta device"),
        (lambda: torch.compile(digits_vit()), ValueError, r"before torch\.compile"),
        (lambda: nn.Linear(3, 3).eval(), vit_fast.UnsupportedInputError, "must have an encoder block"),
        (lambda: SUBJECTS["timm-norm-inside"].build().eval(), vit_fast.UnsupportedInputError, r"blocks.0: .*norm"),
    ],
)
def test_models_that_cannot_be_calibrated(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vit_fast.calibrate(make(), inputs()[:1])
