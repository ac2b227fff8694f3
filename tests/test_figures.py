"""Figures: recorded activations of each library's models, drawings, and the command `show`."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run
from fused_models import SUBJECTS, randomize
from PIL import Image
from torch import nn

import vit_fast
from vit_fast import figures
from vit_fast.commands.optimize import FIGURES
from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.figures import Activations, components, position_embedding


@pytest.fixture
def model() -> nn.Module:
    return randomize(vit_fast.create_model("vit_test", depth=3))


def test_activations_equal_the_models(model) -> None:
    images = torch.randn(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    activations = figures.record_activations(model, images)
    assert len(activations.attention) == 3 and activations.grid == (4, 4) and activations.prefix == 1
    for block, weights in model.attention_maps(images).items():
        torch.testing.assert_close(activations.attention[block], weights, atol=1e-5, rtol=1e-4)
    features = model.forward_features(images)[:, 1:]
    torch.testing.assert_close(activations.features.flatten(1, 2), features, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("timm-siglip", 0), ("timm-dinov3", 5), ("transformers-vit", 1), ("transformers-clip", 1), ("torchvision-vit", 1)],
)
def test_activations_of_each_library(name: str, prefix: int) -> None:
    model = SUBJECTS[name].build().eval()
    (images,) = SUBJECTS[name].inputs().values()
    activations = figures.record_activations(model, images)
    assert activations.prefix == prefix and activations.has_class_token == (prefix > 0)
    assert {weights.shape[-1] for weights in activations.attention} == {prefix + np.prod(activations.grid)}
    for weights in activations.attention:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert activations.features.shape[:3] == (2, *activations.grid)
    with torch.no_grad():
        if name == "transformers-vit":
            model.config._attn_implementation = "eager"  # like set_attn_implementation, which 4.53 lacks
            expected = model(images, output_attentions=True).attentions
            torch.testing.assert_close(list(activations.attention), list(expected), atol=1e-5, rtol=1e-4)
        if name.startswith("timm"):
            features = model.forward_features(images)[:, prefix:]
            torch.testing.assert_close(activations.features.flatten(1, 2), features, atol=1e-4, rtol=1e-4)


def test_rollout_distance_and_components_by_hand() -> None:
    """Of two patches, the class token attends to the second one, and each patch to itself or to the other."""
    itself, other = torch.eye(3), torch.eye(3)[[0, 2, 1]]
    itself[0] = other[0] = torch.tensor([0.0, 0.0, 1.0])
    activations = Activations((1, 2), 1, (torch.stack([itself, other])[None],), torch.zeros(1, 1, 2, 4), True)
    torch.testing.assert_close(activations.distances((16.0, 16.0)), torch.tensor([[0.0, 16.0]]))
    expected = torch.tensor([[0.0, 0.5], [0.75, 0.25], [0.25, 0.75]])
    torch.testing.assert_close(activations.rollout()[0], expected)
    directions = torch.linalg.qr(torch.randn(8, 8)).Q[:2]
    rows = torch.randn(200, 2) * torch.tensor([5.0, 1.0]) @ directions + 3
    found, coordinates = components(rows, 2)
    torch.testing.assert_close((found @ directions.T).abs(), torch.eye(2), atol=0.1, rtol=0)
    torch.testing.assert_close(coordinates @ found + rows.mean(0), rows, atol=1e-4, rtol=1e-4)


def test_positions_and_filters(model) -> None:
    torch.testing.assert_close(position_embedding(model, 16), model.pos_embed[0, 1:].detach())
    other = SUBJECTS["transformers-vit"].build()
    expected = other.vit.embeddings.position_embeddings[0, 1:].detach()
    torch.testing.assert_close(position_embedding(other, 4), expected)
    for call, message in (
        (lambda: position_embedding(nn.Linear(3, 3), 16), "must have a learned position embedding"),
        (lambda: figures.filters(nn.Linear(3, 3)), "convolution with 1 or 3 input channels"),
        (lambda: figures.record_activations(nn.Conv2d(3, 8, 8), torch.randn(1, 3, 32, 32)), "have attention layers"),
    ):
        with pytest.raises(UnsupportedInputError, match=message):
            call()


def _pixels(figure) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]


@pytest.mark.parametrize("name", sorted({*FIGURES} - {"filters"}))
def test_all_figures_but_positions_depend_on_the_image(model, name: str, tmp_path: Path) -> None:
    drawn = [_pixels(getattr(figures, name)(model)) for _ in range(2)]
    assert drawn[0].std() > 5 and np.array_equal(*drawn)
    path = tmp_path / "other.png"
    Image.fromarray((np.random.default_rng(0).random((64, 48, 3)) * 255).astype(np.uint8)).save(path)
    other = _pixels(getattr(figures, name)(model, path))
    assert np.array_equal(drawn[0], other) == (name == "positions")


def test_a_register_token_is_not_a_class_token() -> None:
    model = randomize(vit_fast.create_model("vit_test", class_token=False, reg_tokens=1, global_pool="avg"))
    activations = figures.record_activations(model, torch.randn(1, 3, 32, 32))
    assert (activations.prefix, activations.has_class_token) == (1, False)
    figure = figures.attention(model, blocks=[0], heads=[0])
    drawn = figure.axes[0].images[-1].get_array()
    assert "mean attention of all patches" in figure.get_suptitle() and drawn.shape[:2] == (4, 4)


def test_patches_are_separated_by_white_gaps(model) -> None:
    colors = np.random.default_rng(0).integers(0, 200, (4, 4, 3)).astype(np.uint8)
    image = figures.open_image(model, Image.fromarray(colors.repeat(8, 0).repeat(8, 1)))
    sheet = figures.patches(model, image).axes[0].images[0].get_array()
    assert sheet.shape[:2] == (35, 35)
    np.testing.assert_allclose(sheet[4::9, 4::9], colors / 255, atol=0.02)
    assert (sheet[8::9] == 1).all()


def test_blocks_and_heads_are_selected(model) -> None:
    figure = figures.attention(model, blocks=[0, -1], heads=[1])
    assert [axes.get_title() for axes in figure.axes] == ["block 0, head 1", "block 2, head 1"]
    for options, message in (
        ({"blocks": [3]}, r"blocks must be one or more indices from -3 to 2, got \[3\]"),
        ({"heads": [9]}, r"heads must be .* from 0 to \d+, got \[9\]"),
        ({"blocks": []}, r"got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            figures.attention(model, **options)
    with pytest.raises(ValueError, match="count must be an integer >= 1, got 0"):
        figures.filters(model, count=0)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gray, out = tmp_path / "gray.safetensors", str(tmp_path / "seen")
    vit_fast.save(vit_fast.create_model("vit_test", in_chans=1, img_size=(32, 64)), gray)
    assert run("show", str(gray), "--out", out) == 0
    assert {path.stem for path in Path(out).iterdir()} == set(FIGURES)
    assert capsys.readouterr().out.count("wrote ") == len(FIGURES)
    for path in Path(out).iterdir():
        with Image.open(path) as image:
            assert min(image.size) > 100
    rotary = ("timm:vit_small_patch16_dinov3", "--img-size", "32", "--figures", "positions,rollout")
    assert run("show", *rotary, "--out", str(tmp_path / "rotary")) == 0
    assert [path.name for path in (tmp_path / "rotary").iterdir()] == ["rollout.png"]
    assert "skipped positions: " in capsys.readouterr().err
    with pytest.raises(UnsupportedInputError, match="the model must have parameters, got none"):
        figures.open_image(nn.Identity(), data_config=DataConfig(), image_hw=(32, 32), in_chans=3)  # as for FILE.onnx
    for options, message in (
        (("--figures", "colors"), "--figures must be one of 'patches'"),
        (("--blocks", "x"), "--blocks"),
        (("--blocks", "99"), "got [99]"),
        ((str(tmp_path / "missing.jpg"),), "no such file"),
    ):
        assert run("show", "vit_test", *options, "--out", str(tmp_path / "none")) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "none").exists()
