"""Small models of every supported library, with their inputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

import vit_fast
from vit_fast import FusionReport
from vit_fast.accuracy import judge

IMAGE = 32
SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 2}
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Subject:
    """A model to fuse: make(depth) builds it, inputs() draws inputs, output() returns one tensor of its result."""

    make: Callable[..., nn.Module]
    inputs: Callable[..., dict[str, Tensor]]
    output: Callable[[Any], Tensor] = lambda result: result

    def build(self, depth: int = 2) -> nn.Module:
        """Returns the model with random parameters."""
        torch.manual_seed(0)
        return randomize(self.make(depth))

    def run(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return self.output(model(**inputs))


def randomize(module: nn.Module) -> nn.Module:
    """Draws every parameter. Zero biases and unit scales would hide mistakes, and large activations round coarsely."""
    for parameter in module.parameters():
        is_vector = parameter.dim() < 2
        std = 0.3 if is_vector else max(parameter[:1].numel(), 1) ** -0.5
        nn.init.normal_(parameter, 0.3 if is_vector else 0.0, std)
    return module


@torch.no_grad()
def assert_same_outputs(
    own: vit_fast.VisionTransformer, peer: nn.Module, run_peer: Callable[..., Tensor] | None = None,
    fp64_tolerance: float = 1e-10,
) -> None:  # fmt: skip
    """Compares outputs for random images in fp32, and in fp64 with a smaller tolerance."""
    images = torch.randn(2, own.config.in_chans, *own.config.image_hw)
    run = run_peer or nn.Module.__call__
    exact = run(copy.deepcopy(peer.eval()).double(), images.double())
    assert exact.std() > 0.05, "a constant output would prove nothing"
    for found in (own(images), run(peer, images)):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(own).double()(images.double()), exact, rtol=0, atol=fp64_tolerance)


def images(name: str, height: int = IMAGE, width: int | None = None) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(2, 3, height, width or height)}


def is_older_than_pinned(library: str) -> bool:
    pinned = re.search(rf"^{library}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return pinned is not None and TorchVersion(version(library)) < pinned[1]


def _skip_if_unknown(library: str, known: bool, model: str) -> None:
    """Skips a model that the installed release lacks; with constraints.txt, no model is skipped."""
    if not known and is_older_than_pinned(library):
        pytest.skip(f"{library} {version(library)} has no {model}")


def timm_subject(name: str, size: int = IMAGE, **overrides: Any) -> Subject:
    def make(depth: int = 2) -> nn.Module:
        timm = pytest.importorskip("timm")
        settings = {"img_size": size, "depth": depth, "embed_dim": 64, "num_heads": 2, "num_classes": 5} | overrides
        if isinstance(settings.get("mlp_layer"), str):
            settings["mlp_layer"] = getattr(timm.layers, settings["mlp_layer"])
        _skip_if_unknown("timm", timm.is_model(name), name)
        try:
            return timm.create_model(name, **settings)
        except TypeError:  # an argument of later releases
            _skip_if_unknown("timm", False, f"{name} with {', '.join(overrides)}")
            raise

    return Subject(make, images("x", size))


def tiny_timm(name: str = "vit_tiny_patch16_224", depth: int = 1, **settings: Any) -> Any:
    return timm_subject(name, **settings).make(depth)


def transformers_subject(model: str, pick: str = "last_hidden_state", **overrides: Any) -> Subject:
    """Returns a model of transformers, named by its class or by its path in `transformers.models`."""

    def make(depth: int = 2) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        home, _, name = model.rpartition(".")
        folder = f"transformers.models.{home.partition('.')[0]}"
        _skip_if_unknown("transformers", not home or importlib.util.find_spec(folder) is not None, model)
        owner = importlib.import_module(f"transformers.models.{home}") if home else transformers
        _skip_if_unknown("transformers", hasattr(owner, name), model)
        cls = getattr(owner, name)
        settings = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "image_size": IMAGE}
        settings |= {"num_hidden_layers": depth, "depth": depth, "patch_size": 16}
        given, defaults = dict(overrides), cls.config_class()
        for field, value in settings.items():
            default = getattr(defaults, field, None)
            if isinstance(default, int | list | tuple):
                given.setdefault(field, value if isinstance(default, int) else [value] * len(default))
        return cls(cls.config_class(**given))

    return Subject(make, images("pixel_values"), lambda result: getattr(result, pick))


def vitpose_subject(**overrides: Any) -> Subject:
    subject = transformers_subject("vitpose_backbone.VitPoseBackbone", mlp_ratio=2, out_indices=[2], **overrides)
    return dataclasses.replace(subject, output=lambda result: result.feature_maps[-1])


def torchvision_vit(depth: int = 2, **dropout: float) -> nn.Module:
    models = pytest.importorskip("torchvision").models
    return models.VisionTransformer(IMAGE, 16, depth, 2, hidden_dim=64, mlp_dim=128, num_classes=5, **dropout)


def torch_encoder(depth: int = 2, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout, "gelu", norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def plain_vit(depth: int = 2, name: str = "vit_tiny_patch16_224", **fields: Any) -> nn.Module:
    """Returns a small model of vit-fast, not fused."""
    sizes = {"img_size": IMAGE, "depth": depth, "embed_dim": 64, "num_heads": 2, "num_classes": 5}
    config = vit_fast.variants.get_variant(name).config.replace(**sizes, **fields)
    return vit_fast.VisionTransformer(config)


def _siglip2_inputs() -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(2, 4, 16 * 16 * 3),
        "pixel_attention_mask": torch.ones(2, 4, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 2], [2, 2]]),
    }


SUBJECTS: dict[str, Subject] = {
    "timm-vit": timm_subject("vit_tiny_patch16_224"),
    "timm-deit-distilled": timm_subject("deit_tiny_distilled_patch16_224"),
    "timm-dinov2-registers": timm_subject("vit_small_patch14_reg4_dinov2", size=28),
    "timm-clip-quickgelu": timm_subject("vit_base_patch32_clip_quickgelu_224"),
    "timm-siglip": timm_subject("vit_base_patch16_siglip_224"),
    "timm-qk-norm": timm_subject("vit_tiny_patch16_224", qk_norm=True, embed_dim=128),
    "timm-dinov3": timm_subject("vit_small_patch16_dinov3"),
    "timm-perception-encoder": timm_subject("vit_pe_core_tiny_patch16_384", attn_pool_num_heads=2),
    "timm-eva02": timm_subject("eva02_tiny_patch14_224", size=28),
    "timm-eva02-norms-inside": timm_subject("eva02_base_patch16_clip_224"),
    "timm-dinov3-gated": timm_subject("vit_small_plus_patch16_dinov3"),
    "timm-gated": timm_subject("vit_tiny_patch16_224", mlp_layer="SwiGLUPacked", norm_layer="rmsnorm"),
    "timm-norm-inside": timm_subject("vit_tiny_patch16_224", scale_mlp_norm=True, scale_attn_norm=True),
    "timm-deepseek": timm_subject("deepseek_vit_412m", size=28),
    "timm-qwen3": timm_subject("qwen3_vit_88m"),
    "timm-rope-mixed": timm_subject("vit_small_patch16_rope_mixed_ape_224"),
    "transformers-vit": transformers_subject("ViTForImageClassification", "logits"),
    "transformers-deit": transformers_subject("DeiTModel"),
    "transformers-dinov2": transformers_subject("Dinov2Model", mlp_ratio=2),
    "transformers-clip": transformers_subject("CLIPVisionModel", "pooler_output"),
    "transformers-siglip": transformers_subject("SiglipVisionModel", "pooler_output"),
    "transformers-siglip2": dataclasses.replace(
        transformers_subject("Siglip2VisionModel", "pooler_output", num_patches=4), inputs=_siglip2_inputs
    ),
    "transformers-beit": transformers_subject("BeitModel", use_relative_position_bias=True),
    "transformers-dinov2-giant": transformers_subject("Dinov2Model", use_swiglu_ffn=True),
    "transformers-dinov3": transformers_subject("DINOv3ViTModel", num_register_tokens=4),
    "transformers-dinov3-gated": transformers_subject(
        "DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu", num_register_tokens=2
    ),
    "transformers-aimv2": transformers_subject("Aimv2VisionModel"),
    "transformers-internvl-6b": transformers_subject("InternVLVisionModel", norm_type="rms_norm", use_qk_norm=True),
    "transformers-vit-mae": dataclasses.replace(
        transformers_subject("ViTMAEModel", mask_ratio=0.0),
        inputs=lambda: {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE), "noise": torch.rand(2, 4)},
    ),
    "transformers-dpt": transformers_subject("DPTModel", backbone_out_indices=[0, 1]),
    "transformers-vitpose": vitpose_subject(),
    "torchvision-vit": Subject(torchvision_vit, images("x")),
    "torch-encoder": Subject(torch_encoder, lambda: {"src": torch.randn(2, 5, 64)}),
    "vit-fast": Subject(plain_vit, images("images")),
    "vit-fast-dinov3": Subject(
        functools.partial(plain_vit, name="vit_small_patch16_dinov3", act_layer="relu"), images("images")
    ),
}  # fmt: skip


LIBRARIES = ("timm-vit", "timm-dinov3", "transformers-vit", "torchvision-vit", "vit-fast")


def gradients(subject: Subject, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the output, and the gradient of its sum of squares for each parameter that has one."""
    model.zero_grad(set_to_none=True)
    output = subject.run(model, inputs)
    output.square().sum().backward()
    named = ((name.removeprefix("_orig_mod."), parameter.grad) for name, parameter in model.named_parameters())
    return output.detach(), {name: grad.clone() for name, grad in named if grad is not None}


def assert_same_results(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], rtol: float = 1e-3
) -> None:
    """Compares outputs and gradients, as `gradients` returns them; a zero gradient may differ by rounding."""
    torch.testing.assert_close(found[0], expected[0], rtol=rtol / 10, atol=rtol / 50)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():  # a bias of k has a gradient of zero, except for rounding
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(found[1][name] / scale, gradient / scale, rtol=rtol, atol=rtol / 5, msg=name)


def double_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def in_fp64(subject: Subject, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns output and gradients of the reference: the library's own model in fp64."""
    return gradients(subject, copy.deepcopy(model).double(), double_inputs(inputs))


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def attributes_of(model: nn.Module) -> dict[str, dict[str, str]]:
    """Returns the attributes of modules beside parameters and children, and the items of containers."""
    hidden = {"_parameters", "_buffers", "_modules"}
    return {
        name: {key: repr(value) for key, value in vars(module).items() if key not in hidden}
        for name, module in model.named_modules()
    }


def assert_within(actual: Tensor, before: Tensor, exact: Tensor, factor: float, what: str) -> None:
    """Applies the accuracy rule to root mean squares, because the maximum of a few elements is noisy."""
    found = judge(actual, before, exact, factor, "rms")
    assert found.passed, f"{what}: {found}"


def assert_fused_agrees(
    subject: Subject, model: nn.Module, inputs: dict[str, Tensor], backend: str = "sdpa"
) -> FusionReport:
    """Fuses a model; outputs and gradients must be as accurate as before."""
    exact, exact_grads = in_fp64(subject, model, inputs)
    before, before_grads = gradients(subject, model, inputs)
    report = vit_fast.fuse(model, backend)
    after, after_grads = gradients(subject, model, inputs)
    assert_within(after, before, exact, 2, "output")
    assert_gradients_within(after_grads, before_grads, exact_grads, 3)
    return report


def assert_gradients_within(
    actual: dict[str, Tensor], before: dict[str, Tensor], exact: dict[str, Tensor], factor: float
) -> None:
    """Applies assert_within to all gradients; a gradient of zero (of a bias of k) may contain rounding errors."""
    assert actual.keys() == before.keys()
    largest = max(grad.abs().max().item() for grad in exact.values())
    for name, grad in actual.items():
        if exact[name].abs().max() < 1e-12 * largest:
            assert grad.abs().max() <= torch.finfo(grad.dtype).eps * largest, name
        else:
            assert_within(grad, before[name], exact[name], factor, name)


def losses_of_training(model: nn.Module, x: Tensor) -> list[float]:
    """Trains for ten steps on x, without dropout, but with drop path."""
    for part in model.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(10):
        torch.manual_seed(step)  # of drop path
        loss = torch.stack([(each - 1).square().mean() for each in tree_leaves(model(x))]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
