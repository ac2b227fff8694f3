"""fuse(model, example=...) reads models of libraries."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import losses_of_training
from spellings import runs_fused
from torch import nn
from torch.utils._pytree import tree_leaves

import vit_fast
from vit_fast.reading.forms import ReadModule


def compare_gradients(model: nn.Module, original: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), original.parameters()):
        most = 0.0 if b.grad is None else float(b.grad.abs().max())
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * most + 1e-6, msg=name)


def parallel_vit(**sizes: Any) -> Any:
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    return VisionTransformer(block_fn=ParallelScalingBlock, **sizes)


SMALL = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2}
STAGES = {"embed_dim": 32, "depths": (2, 1), "num_heads": (2, 4)}
FAMILIES: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": SMALL,
    "vit_relpos_small_patch16_224": SMALL,
    "swin_tiny_patch4_window7_224": {"img_size": 56} | STAGES,
    "swinv2_tiny_window8_256": {"img_size": 32, "window_size": 4} | STAGES,
    "test_maxvit": {"img_size": 64},
    "test_coatnet": {"img_size": 64},
    "gcvit.GlobalContextVit": {"img_size": 32, "window_ratio": (8, 16)} | STAGES,
    "samvit_base_patch16": SMALL | {"img_size": 64, "window_size": 2, "global_attn_indexes": (1,)},
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 32, "stages": (1, 1, 1, 1)},
    "sam2_hiera_tiny": {"embed_dim": 32, "stages": (1, 1, 2, 1)},
    "twins_svt_small": {"img_size": 64, "embed_dims": (32, 32, 64, 64), "depths": (2, 2, 1, 1)},
    "nest.Nest": {"img_size": 32, "embed_dims": (16, 32, 64), "num_heads": (1, 2, 4), "depths": (1, 1, 1)},
    "crossvit_tiny_240": {},
    "tnt.TNT": {"img_size": 32, "embed_dim": 64, "inner_dim": 16, "depth": 2, "num_heads_outer": 4},
    "parallel": SMALL,
}
PARTLY = {"gcvit.GlobalContextVit"}


@pytest.mark.fast_cases("beit_base_patch16_224", "swin_tiny_patch4_window7_224")
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_timm(name: str) -> None:
    """Repeats timm's own checks: forward, features, intermediates, heads, scripts, gradients of all parameters."""
    import timm

    torch.manual_seed(0)
    home, _, cls = name.partition(".")
    build = getattr(importlib.import_module(f"timm.models.{home}"), cls) if cls else partial(timm.create_model, name)
    original = (parallel_vit if name == "parallel" else build)(num_classes=3, **FAMILIES[name]).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    size = FAMILIES[name].get("img_size", 64)
    images = torch.randn(2, 3, size, size)
    model = copy.deepcopy(original)
    states_size = hasattr(getattr(original, "patch_embed", None), "img_size")
    fuse = partial(vit_fast.fuse, model, example=None if states_size else images)
    report = fuse("eager")
    assert report.fused and (name in PARTLY or report.require_all())

    def compare(run: Any) -> None:
        with torch.no_grad():
            torch.testing.assert_close(run(model), run(original), rtol=1e-3, atol=1e-3)

    read = [each for each in model.modules() if isinstance(each, ReadModule)]
    assert not read or runs_fused(model, lambda: compare(lambda net: net(images)))
    compare(lambda net: net.forward_head(net.forward_features(images)))
    compare(lambda net: net.forward_intermediates(images))
    for net in (model, original):
        torch.manual_seed(1)  # of drop path
        net.train()(images).square().sum().backward()
    compare_gradients(model, original)
    for net in (model, original):
        net.eval()
    fuse("sdpa")
    frozen = vit_fast.freeze(model)
    assert len(frozen) >= len(read), str(frozen)
    if name != "hiera_tiny_224":  # torch cannot script it
        compare(lambda net: torch.jit.script(net)(images))
    compare(lambda net: net(images))
    for net in (model, original):
        net.reset_classifier(0)
    compare(lambda net: net(images))


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
    compare_gradients(block, original)
    vit_fast.fuse(block, "sdpa")
    assert len(vit_fast.freeze(block)) == 1
    with torch.inference_mode():
        torch.testing.assert_close(block(x), original(x), rtol=1e-4, atol=1e-4)


def from_package(path: str) -> Any:
    """Imports a class; reads the file itself if its package needs more packages, as OpenAI's CLIP does."""
    package, *folders, cls = path.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} must be installed: install the extra 'libraries'")
    file = Path(spec.origin).parent.joinpath(*folders)
    loader = importlib.util.spec_from_file_location(package, file.with_suffix(".py")) if package == "clip" else None
    if loader is None or loader.loader is None:
        return getattr(importlib.import_module(".".join((package, *folders))), cls)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return getattr(module, cls)


SIZES = {"dim": 32, "heads": 2, "dim_head": 16, "mlp_dim": 64, "num_classes": 3}
VIT = SIZES | {"image_size": 32, "patch_size": 8, "depth": 2}
CLIP = {"width": 32, "layers": 2, "heads": 2, "output_dim": 8}
CLIP_IMAGES = {"image_size": 32, "patch_size": 8, "mlp_ratio": 2.0} | CLIP
MONAI = {"img_size": (16, 16, 16), "patch_size": 8, "hidden_size": 32, "mlp_dim": 64, "num_layers": 2, "num_heads": 2}
CLIPS = {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
SAM = {"window_size": 2, "use_rel_pos": True, "global_attn_indexes": (1,), "out_chans": 8}
OTHERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # options, shape of the input
    "vit_pytorch.vit.ViT": (VIT, (2, 3, 32, 32)),
    "vit_pytorch.simple_vit_with_qk_norm.SimpleViT": (VIT, (2, 3, 32, 32)),
    "vit_pytorch.simple_vit_with_register_tokens.SimpleViT": (VIT, (2, 3, 32, 32)),
    "vit_pytorch.vivit.ViViT": (SIZES | CLIPS | {"spatial_depth": 1, "temporal_depth": 1}, (2, 3, 4, 32, 32)),
    "open_clip.transformer.VisionTransformer": (CLIP_IMAGES, (2, 3, 32, 32)),
    "open_clip.transformer.TextTransformer": (CLIP | {"context_length": 9, "vocab_size": 20}, (2, 9)),
    "clip.model.VisionTransformer": (CLIP | {"input_resolution": 32, "patch_size": 8}, (2, 3, 32, 32)),
    "monai.networks.nets.vit.ViT": (MONAI | {"in_channels": 1}, (2, 1, 16, 16, 16)),
    "monai.networks.nets.swin_unetr.SwinTransformer": (
        {"in_chans": 1, "embed_dim": 12, "window_size": (2, 2, 2), "patch_size": (2, 2, 2), "depths": (2, 1, 1, 1)}
        | {"num_heads": (1, 2, 2, 2)}, (1, 1, 32, 32, 32),
    ),
    "segment_anything.modeling.image_encoder.ImageEncoderViT": (SMALL | {"img_size": 64} | SAM, (2, 3, 64, 64)),
    "kornia.models.vit.VisionTransformer": (
        {"image_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}, (2, 3, 32, 32)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHERS)
def test_models_of_other_libraries(path: str) -> None:
    """All attention and all MLPs are fused; outputs, gradients, losses of training, freeze and unfuse are equal."""
    options, shape = OTHERS[path]
    cls = from_package(path)
    torch.manual_seed(0)
    original = cls(**options).eval()
    x = torch.randint(20, shape) if "Text" in path else torch.randn(shape)
    model = copy.deepcopy(original)
    vit_fast.fuse(model, "eager", example=x).require_all()
    assert runs_fused(model, lambda: model(x))
    for net in (model, original):
        sum(each.square().sum() for each in tree_leaves(net(x))).backward()
    compare_gradients(model, original)
    found, expected = (losses_of_training(net, x) for net in (model, original))
    assert expected[-1] < expected[0] and runs_fused(model, lambda: model(x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    model.load_state_dict(original.state_dict())  # AdamW amplifies rounding errors of gradients that are zero
    vit_fast.fuse(model.eval(), "sdpa", example=x)
    original.eval()
    assert vit_fast.freeze(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), original(x), rtol=1e-3, atol=1e-3)
        vit_fast.unfuse(model)
        torch.testing.assert_close(model(x), original(x))
