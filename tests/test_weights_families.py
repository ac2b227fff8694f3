"""Tests one model per family: with the weights of another library's model, outputs match, and vice versa."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fused_models import SMALL, assert_same_outputs, randomize
from torch import Tensor, nn

from vit_fast import VisionTransformer, ViTConfig, create_model, load_weights
from vit_fast.libraries import torchvision
from vit_fast.libraries.interface.weight_names import take_weights
from vit_fast.libraries.timm import timm_model
from vit_fast.libraries.transformers import hf_model
from vit_fast.weights import WeightsReport


def _timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return randomize(timm.create_model(name, **{**SMALL, **options}))


def _load_like_timm(name: str, state: dict[str, Tensor], **options: Any) -> WeightsReport:
    """Loads a state dict into our model and into timm's, and compares positions and outputs."""
    from timm.models.vision_transformer import checkpoint_filter_fn

    peer = _timm_model(name, **options)
    peer.load_state_dict(checkpoint_filter_fn(dict(state), peer))
    model = create_model(name, backend="sdpa", **options, **SMALL)
    report = load_weights(model, state)
    assert (model.pos_embed - peer.pos_embed).abs().max() < 1e-6
    assert_same_outputs(model, peer)
    return report


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("vit_base_patch16_224", 224, 384),
        ("deit3_small_patch16_224", 224, (192, 320)),
        ("vit_small_patch14_reg4_dinov2", 98, 140),
        ("vit_base_patch16_siglip_224", 224, 256),
    ],
)
def test_timm_at_another_size(name: str, old: int, new: int | tuple[int, int]) -> None:
    report = _load_like_timm(name, _timm_model(name, img_size=old).state_dict(), img_size=new)
    assert len(report.interpolated) == 1


HF_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
_TINY_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_MLP = {"intermediate_size": 150}
_TOWERS = {"vision_config": HF_TINY | _MLP, "text_config": _TINY_TEXT}
# The class without its suffix Config, the class of the model, fields, and the output that corresponds to ours
HF_FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "vit": ("ViT", "ViTForImageClassification", _MLP | {"num_labels": 7}, "logits"),
    "vit_features": ("ViT", "ViTModel", _MLP | {"qkv_bias": False}, "class token"),
    "deit_distilled": ("DeiT", "DeiTForImageClassificationWithTeacher", _MLP | {"num_labels": 7}, "logits"),
    "dinov2": ("Dinov2", "Dinov2Model", {"mlp_ratio": 3}, "class token"),
    "dinov2_registers": (
        "Dinov2WithRegisters", "Dinov2WithRegistersModel", {"mlp_ratio": 3, "num_register_tokens": 3}, "class token",
    ),
    "dinov2_giant": ("Dinov2", "Dinov2Model", {"mlp_ratio": 3, "use_swiglu_ffn": True}, "class token"),
    "dinov3": (
        "DINOv3ViT", "DINOv3ViTModel",
        _MLP | {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 2}, "class token",
    ),
    "clip": ("CLIPVision", "CLIPVisionModelWithProjection", _MLP | {"projection_dim": 24}, "image_embeds"),
    "clip_tower": ("CLIPVision", "CLIPVisionModel", _MLP | {"hidden_act": "gelu"}, "pooler_output"),
    "clip_with_text": ("CLIP", "CLIPModel", _TOWERS | {"projection_dim": 24}, "image features"),
    "siglip": ("SiglipVision", "SiglipVisionModel", _MLP, "pooler_output"),
    "siglip_classifier": ("Siglip", "SiglipForImageClassification", _TOWERS | {"num_labels": 5}, "logits"),
    "siglip_with_text": ("Siglip", "SiglipModel", _TOWERS, "image features"),
}  # fmt: skip


def _output(family: str, model: Any, images: Tensor) -> Tensor:
    name = HF_FAMILIES[family][-1]
    if name == "image features":
        features = model.get_image_features(pixel_values=images)
        return features if isinstance(features, Tensor) else features.pooler_output  # transformers 4 and 5
    found = model(pixel_values=images)
    return found.last_hidden_state[:, 0] if name == "class token" else getattr(found, name)


@pytest.mark.parametrize("family", HF_FAMILIES)
def test_transformers(family: str, tmp_path: Path) -> None:
    config, cls, fields, _ = HF_FAMILIES[family]
    if not hasattr(transformers, cls):  # the oldest supported version lacks some families
        pytest.skip(f"{cls} needs a newer version of transformers")
    tiny = {} if "vision_config" in fields else HF_TINY
    peer = randomize(getattr(transformers, cls)(getattr(transformers, f"{config}Config")(**tiny, **fields)))
    peer.save_pretrained(tmp_path)  # writes the names of transformers 4, with config.json
    model = create_model(str(tmp_path), backend="sdpa")
    # with registers, the position of the class token is added to the token and rounded to fp32;
    # the libraries compute rotary angles in fp32, each in its own order
    tolerance = 1e-6 if family in ("dinov2_registers", "dinov3") else 1e-10
    assert_same_outputs(model, peer, functools.partial(_output, family), tolerance)

    fresh = VisionTransformer(model.config)
    report = load_weights(fresh, peer.state_dict())  # the names in memory: those of transformers 5
    assert report.layout.startswith("transformers ") and report.loaded == len(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    ignored = {"vit_features": {"pooler.dense.weight"}, "siglip_classifier": {"vision_model.head.probe"}}
    if "with_text" in family:
        ignored[family] = {"logit_scale", "text_model.embeddings.token_embedding.weight"}
    assert ignored.get(family, set()) <= set(report.ignored)


@pytest.mark.parametrize(
    ("family", "fields"), [("CLIP", _TOWERS | {"num_labels": 3}), ("Dinov2", HF_TINY | {"num_labels": 3})]
)
def test_transformers_heads_with_other_inputs(family: str, fields: dict[str, Any]) -> None:
    config = getattr(transformers, f"{family}Config")(**fields)
    peer = getattr(transformers, f"{family}ForImageClassification")(config)
    fields = hf_model.vit_fields({**config.to_dict(), "architectures": [type(peer).__name__]})
    state = peer.state_dict()
    assert "classifier.weight" in load_weights(VisionTransformer(ViTConfig(**fields)), state).ignored
    with_head = VisionTransformer(ViTConfig(**{**fields, "num_classes": 3}))
    with pytest.raises(ValueError, match="classifier reads"):
        load_weights(with_head, state)
    before = with_head.head.weight.clone()
    report = load_weights(with_head, state, replace_head=True)
    assert len(report.replaced) == 2 and torch.equal(with_head.head.weight, before)


def test_torchvision() -> None:
    from torchvision.models import VisionTransformer as TorchvisionViT

    peer = randomize(TorchvisionViT(64, 16, 2, 2, 64, 128, num_classes=7))
    state = peer.state_dict()
    old = {n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): t for n, t in state.items()}
    for names in (state, old):
        model = create_model("vit_base_patch16_224", backend="sdpa", img_size=64, mlp_ratio=2.0, num_classes=7, **SMALL)
        report = load_weights(model, names)
        assert report.layout == "torchvision"
        assert ("conv_proj.weight", "patch_embed.proj.weight") in report.renamed
        assert_same_outputs(model, peer)


def _jax_arrays(big_vision: bool, scanned: bool, pooled: bool) -> dict[str, np.ndarray]:
    """Returns random parameters in Google's layout: kernels [in, out], heads on an axis of their own."""
    C, H, depth = SMALL["embed_dim"], SMALL["num_heads"], SMALL["depth"]
    D, norm = C // H, {"scale": (C,), "bias": (C,)}
    mlp = {"Dense_0": {"kernel": (C, 4 * C), "bias": (4 * C,)}, "Dense_1": {"kernel": (4 * C, C), "bias": (C,)}}
    attention = {name: {"kernel": (C, H, D), "bias": (H, D)} for name in ("query", "key", "value")}
    attention["out"] = {"kernel": (H, D, C), "bias": (C,)}
    a, n, m = (0, 1, 0) if big_vision else (1, 2, 3)
    block = {"LayerNorm_0": norm, f"LayerNorm_{n}": norm, f"MlpBlock_{m}": mlp}
    block[f"MultiHeadDotProductAttention_{a}"] = attention
    positions = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
    tree: dict[str, Any] = {"embedding": {"kernel": (16, 16, 3, C), "bias": (C,)}, positions: (1, 16 + (not pooled), C)}
    tree["Transformer"] = {"encoder_norm": norm, **{f"encoderblock_{i}": block for i in range(depth)}}
    if pooled:
        pool = {"LayerNorm_0": norm, "MlpBlock_0": mlp, "MultiHeadDotProductAttention_0": attention}
        tree["MAPHead_0"] = {"probe": (1, 1, C), **pool}
    else:
        tree |= {"cls": (1, 1, C), "head": {"kernel": (C, 1000), "bias": (1000,)}}
    rng, arrays = np.random.default_rng(0), {}

    def draw(prefix: str, node: Any) -> None:
        if isinstance(node, dict):
            for name, child in node.items():
                draw(f"{prefix}/{name}", child)
        else:
            arrays[prefix[1:]] = rng.normal(prefix.endswith("scale"), 0.1, node).astype(np.float32)

    draw("", tree)
    if scanned:
        for name in sorted(name for name in arrays if "encoderblock_0/" in name):
            blocks = [arrays.pop(name.replace("encoderblock_0/", f"encoderblock_{i}/")) for i in range(depth)]
            arrays[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(blocks)
    if big_vision:
        arrays = {("params/img/" if pooled else "params/") + name: array for name, array in arrays.items()}
    if pooled:
        arrays |= {"params/txt/Embed_0/embedding": np.zeros((3, 4), np.float32), "params/t": np.zeros(1, np.float32)}
    return arrays


@pytest.mark.parametrize(
    ("name", "big_vision", "scanned"),
    [
        ("vit_base_patch16_224", False, False),
        ("vit_base_patch16_224", True, False),
        ("vit_base_patch16_224", True, True),
        ("vit_base_patch16_siglip_224", True, True),
    ],
)
def test_google_npz(name: str, big_vision: bool, scanned: bool, tmp_path: Path) -> None:
    arrays = _jax_arrays(big_vision, scanned, pooled="siglip" in name)
    np.savez(tmp_path / "jax.npz", **arrays)
    peer = _timm_model(name, img_size=64)
    peer.load_pretrained(str(tmp_path / "jax.npz"))
    model = create_model(name, weights=tmp_path / "jax.npz", backend="sdpa", img_size=64, **SMALL)
    report = load_weights(model, tmp_path / "jax.npz")
    assert report.layout == "Google JAX"
    assert report.ignored == [n for n in sorted(arrays) if n in ("params/t", "params/txt/Embed_0/embedding")]
    assert_same_outputs(model, peer)


def test_openai_clip() -> None:
    name = "vit_base_patch32_clip_quickgelu_224"
    swaps = {
        "patch_embed.proj": "conv1", "norm_pre": "ln_pre", "norm.": "ln_post.", "norm1": "ln_1", "norm2": "ln_2",
        "blocks.": "transformer.resblocks.", "attn.qkv.": "attn.in_proj_", "attn.proj": "attn.out_proj",
        "fc1": "c_fc", "fc2": "c_proj", "cls_token": "class_embedding", "pos_embed": "positional_embedding",
    }  # fmt: skip
    state = {"logit_scale": torch.ones(())}
    for key, tensor in _timm_model(name).state_dict().items():
        if key == "head.weight":
            state["visual.proj"] = tensor.T
        elif key != "head.bias":
            for own, other in swaps.items():
                key = key.replace(own, other)
            state[f"visual.{key}"] = tensor.flatten() if "class_emb" in key else tensor.squeeze(0)
    assert _load_like_timm(name, state).layout == "OpenAI CLIP"
    state |= {"positional_embedding": torch.ones(77, 32), "transformer.resblocks.0.ln_1.weight": torch.ones(32)}
    training = {"epoch": 3, "state_dict": {f"module.{key}": tensor for key, tensor in state.items()}}  # of open_clip
    report = load_weights(create_model(name, **SMALL), training)
    assert report.used == "state_dict, prefix module." and "positional_embedding" in report.ignored


def test_original_dinov2_file_with_registers() -> None:
    name = "vit_small_patch14_reg4_dinov2"
    state = dict(_timm_model(name, img_size=98).state_dict())
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.cat([torch.randn(1, 1, 64), state["pos_embed"]], dim=1)
    state["mask_token"] = torch.zeros(1, 64)
    assert _load_like_timm(name, state, img_size=98).ignored == ["mask_token"]
    gated = create_model("vit_small_patch14_reg4_dinov2", mlp_layer="swiglu", act_layer="silu", num_classes=0, **SMALL)
    names = {n: n.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3") for n in gated.state_dict()}
    assert load_weights(gated, {names[n]: t for n, t in gated.state_dict().items()}).loaded == len(names)


PEER: dict[str, Any] = {**SMALL, "img_size": 32, "patch_size": 8, "num_classes": 7, "mlp_ratio": 3}


@pytest.mark.parametrize(
    ("library", "fields"),
    [
        (timm_model, {"distilled": True}),
        (timm_model, {"init_values": 1e-5, "reg_tokens": 3, "no_embed_class": True, "num_classes": 0}),
        (timm_model, {"pre_norm": True, "qkv_bias": False, "class_token": False, "global_pool": "map"}),
        (timm_model, {"final_norm": False, "scale_attn_norm": True, "scale_mlp_norm": True, "global_pool": "avg"}),
        (hf_model, {"qkv_bias": False, "num_classes": 0, "img_size": (32, 48)}),
        (torchvision, {}),
    ],
)
def test_a_peer_contains_exactly_our_weights(library: Any, fields: dict[str, Any]) -> None:
    """Converts the weights of the peer back."""
    config = ViTConfig(**PEER | fields)
    weights = {name: torch.randn(tensor.shape) for name, tensor in VisionTransformer(config).state_dict().items()}
    peer = library.build_peer(config)
    take_weights(peer, weights, library.convert, config)
    back = library.convert(peer.state_dict(), config)
    assert back.tensors.keys() == weights.keys() and not back.ignored
    assert all(torch.equal(back.tensors[name], weights[name]) for name in weights)
