"""fuse(model, example=...) reads models of libraries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spellings import runs_fused
from torch import nn

import vit_fast


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "swin_tiny_patch4_window7_224"])
def test_biases_and_windows_of_timm(name: str) -> None:
    """A bias table with an index, windows, and the mask of shifted windows; the number of tokens is fixed."""
    import timm

    torch.manual_seed(0)
    sizes = {"embed_dim": 24, "depths": (2,), "num_heads": (2,)} if "swin" in name else {"depth": 2, "embed_dim": 32}
    heads = {} if "swin" in name else {"num_heads": 2}
    original = timm.create_model(name, img_size=56 if "swin" in name else 32, num_classes=3, **sizes, **heads).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = copy.deepcopy(original)
    assert len(vit_fast.fuse(model, "eager").require_all().fused) == 2  # the model states its size
    images = torch.randn(3, 3, *original.patch_embed.img_size)
    expected = original(images)
    assert runs_fused(model, lambda: model(images))
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    for net in (model, original):
        net(images).square().sum().backward()
    for (own, a), b in zip(model.named_parameters(), original.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()), msg=own)
    vit_fast.fuse(model, "sdpa")
    assert len(vit_fast.freeze(model)) == 2
    with torch.inference_mode():
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchvision", "torchvision v2", "timm v2"])
def test_shifted_windows_with_masks_made_in_forward(name: str) -> None:
    """Swin v2 also has post-norm, cosine attention with a learned scale, and a bias from an MLP."""
    torch.manual_seed(0)
    if name == "timm v2":
        from timm.models.swin_transformer_v2 import SwinTransformerV2Block

        block: Any = SwinTransformerV2Block(32, (8, 8), 2, 4, 2)
    else:
        from torchvision.models import swin_transformer

        cls = getattr(swin_transformer, f"SwinTransformerBlock{'V2' if 'v2' in name else ''}")
        block = cls(32, 2, [4, 4], [2, 2])
    original, x = block.eval(), torch.randn(2, 8, 8, 32)
    block = copy.deepcopy(original)
    vit_fast.fuse(block, "eager", example=x).require_all()
    assert runs_fused(block, lambda: block(x))
    for net in (block, original):
        net(x).square().sum().backward()
    torch.testing.assert_close(block(x), original(x), rtol=1e-4, atol=1e-4)
    for (own, a), b in zip(block.named_parameters(), original.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * float(b.grad.abs().max()) + 1e-6, msg=own)
    vit_fast.fuse(block, "sdpa")
    assert len(vit_fast.freeze(block)) == 1
    with torch.inference_mode():
        torch.testing.assert_close(block(x), original(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["vit_pytorch", "segment_anything", "kornia", "monai"])
def test_blocks_of_other_libraries(library: str) -> None:
    """Every half is fused; runs for libraries that are installed."""
    pytest.importorskip(library)
    torch.manual_seed(0)
    x = torch.randn(2, 12, 32)
    if library == "vit_pytorch":
        from vit_pytorch.vit import Transformer

        block: Any = Transformer(32, 2, 4, 8, 64)
    elif library == "segment_anything":
        from segment_anything.modeling.image_encoder import Block

        block, x = Block(32, 4, window_size=0), torch.randn(2, 4, 3, 32)
    elif library == "kornia":
        from kornia.models.vit import TransformerEncoderBlock

        block = TransformerEncoderBlock(32, 4, 0.1, 0.1)
    else:
        from monai.networks.blocks.transformerblock import TransformerBlock

        block = TransformerBlock(32, 64, 4)
    expected = block.eval()(x)
    assert len(vit_fast.fuse(block, "eager", example=x).require_all().fused) == (4 if library == "vit_pytorch" else 1)
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
    assert runs_fused(block, lambda: block(x))
