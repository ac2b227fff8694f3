"""ONNX of models with rotary embeddings: sizes stay open, the positions are computed in the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fused_models import SUBJECTS, timm_subject

import vit_fast
from vit_fast.export import OnnxRunner, export_onnx

DYNAMIC = {
    "timm-dinov3": SUBJECTS["timm-dinov3"],
    "timm-eva02": timm_subject("eva02_tiny_patch14_224", size=28, dynamic_img_size=True),
    "transformers-dinov3": SUBJECTS["transformers-dinov3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_any_size_from_one_file(name: str, tmp_path: Path) -> None:
    subject = DYNAMIC[name]
    model = subject.build().eval()
    vit_fast.fuse(model, backend="sdpa")
    assert export_onnx(model, tmp_path / "m.onnx", dynamic_size=True, target="ort-cpu").verified
    assert not any("get_embed" in vars(module) for module in model.modules()), "timm's own is back"
    runner = OnnxRunner(tmp_path / "m.onnx", "cpu")
    (key,) = subject.inputs()
    patch = 14 if "eva02" in name else 16
    for rows, columns in ((2, 2), (3, 5), (4, 1)):
        images = torch.randn(2, 3, rows * patch, columns * patch)
        with torch.inference_mode():
            tokens = subject.run(model, {key: images})
            expected = (tokens[:, 0] if name.startswith("transformers") else tokens).numpy()
        np.testing.assert_allclose(runner(images.numpy()), expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()))


@pytest.mark.fast_cases("vit_pe_lang_gigantic_patch14_448")
@pytest.mark.parametrize("name", ["eva02_base_patch16_clip_224", "vit_pe_lang_gigantic_patch14_448"])
def test_a_model_of_ours_is_exported_with_every_norm_it_has(name: str, tmp_path: Path) -> None:
    size = 3 * vit_fast.variants.get_variant(name).config.patch_hw[0]
    model = vit_fast.create_model(name, depth=1, embed_dim=64, num_heads=2, img_size=size)
    assert export_onnx(model, tmp_path / "m.onnx", target="ort-cpu").verified


def test_positions_that_no_graph_leaves_open_are_refused(tmp_path: Path) -> None:
    model = timm_subject("vit_small_patch16_rope_mixed_ape_224").build().eval()
    message = r"\(RotaryEmbeddingMixed\) are computed for one size only"
    with pytest.raises(vit_fast.UnsupportedInputError, match=message):
        export_onnx(model, tmp_path / "m.onnx", dynamic_size=True)
