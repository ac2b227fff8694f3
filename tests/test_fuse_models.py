"""All models that fuse supports: outputs and gradients match the original, and unfuse restores the model."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from typing import Any

import pytest
import torch
from fused_models import (
    SUBJECTS,
    Subject,
    assert_fused_agrees,
    assert_same_results,
    assert_within,
    attributes_of,
    classes_of,
    gradients,
    images,
    plain_vit,
    timm_subject,
    tiny_timm,
    torch_encoder,
    torchvision_vit,
    transformers_subject,
)
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule
from vit_fast.kernels.linear import folding

# unusual head_dim, hidden size, image size, activation, pooling and number of heads of k and v
ODD = {
    "timm, odd sizes": timm_subject(
        "vit_tiny_patch16_224", size=48, embed_dim=72, num_heads=3, mlp_ratio=2.5, act_layer="gelu_tanh", reg_tokens=2,
        init_values=0.1, qkv_bias=False, global_pool="map",
    ),
    "timm, one patch": timm_subject(
        "vit_tiny_patch16_224", size=16, embed_dim=16, num_heads=2, act_layer="relu", global_pool="avg", qk_norm=True
    ),
    "transformers, tanh GELU": transformers_subject(
        "Dinov2Model", hidden_size=40, num_attention_heads=1, mlp_ratio=1, hidden_act="gelu_pytorch_tanh"
    ),
    "timm, grouped-query attention": timm_subject(
        "vit_small_patch16_dinov3", attn_type="rope", qkv_fused=False, num_kv_heads=1, qk_norm=True, qkv_bias=True
    ),
    "timm, other image size": Subject(SUBJECTS["timm-dinov3"].make, images("x", 48, 64)),
    "timm, gated, other image size": Subject(
        timm_subject("eva02_tiny_patch14_224", size=28, dynamic_img_size=True).make, images("x", 42, 84)
    ),
    "transformers, other image size": Subject(
        SUBJECTS["transformers-dinov3"].make, images("pixel_values", 48, 64), lambda result: result.last_hidden_state
    ),
}  # fmt: skip
MODELS = SUBJECTS | ODD


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_agrees_and_unfuse_restores_it(name: str) -> None:
    subject = MODELS[name]
    model, inputs = subject.build(), subject.inputs()
    objects, keys = [*model.modules(), *model.parameters()], list(model.state_dict())
    classes, attributes = classes_of(model), attributes_of(model)
    report = assert_fused_agrees(subject, model, inputs)
    assert any("MLP" in module.part for module in report.fused)
    assert report.require_all() is report

    fused = classes_of(model)
    again = vit_fast.fuse(model, "sdpa")
    assert fused != classes and classes_of(model) == fused
    assert [(m.name, m.part, m.fused) for m in again.modules] == [(m.name, m.part, m.fused) for m in report.modules]
    vit_fast.unfuse(model)
    assert all(map(operator.is_, (*model.modules(), *model.parameters()), objects))
    assert list(model.state_dict()) == keys
    assert (classes_of(model), attributes_of(model)) == (classes, attributes)


def on_device(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


FAST = ("timm-dinov2-registers", "timm-eva02", "transformers-vit", "transformers-internvl-6b", "torchvision-vit")


@pytest.mark.fast_cases(*FAST)
@pytest.mark.parametrize("name", [*FAST, "timm-dinov3-gated", "transformers-dinov3-gated", "vit-fast"])
def test_the_triton_backend_is_as_accurate_as_the_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when frozen, without folding weights in each call, and after changes of the weights."""
    subject = SUBJECTS[name]
    model, inputs = subject.build().to(DEVICE), on_device(subject.inputs())
    vit_fast.fuse(model, backend="eager")
    assert assert_fused_agrees(subject, model, inputs, "triton").backend == "triton"
    assert len(vit_fast.freeze(model.eval())) == 2
    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(folding, "fold_linears", None)
            subject.run(model, inputs)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        found = subject.run(model, inputs)
        vit_fast.unfuse(model)
        torch.testing.assert_close(found, subject.run(model, inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("backend", "drop_path", "autocast"), [("sdpa", 0.5, False), ("triton", 0.5, False), ("triton", 0.0, True)]
)
def test_layer_scale_with_drop_path_or_autocast(backend: str, drop_path: float, autocast: bool) -> None:
    timm = pytest.importorskip("timm")
    model = tiny_timm(init_values=0.5).train()
    model.blocks[0].drop_path1, model.blocks[0].drop_path2 = (timm.layers.DropPath(drop_path) for _ in range(2))
    fused = copy.deepcopy(model.to(DEVICE))
    assert vit_fast.fuse(fused, backend).require_all()
    pixels = torch.randn(4, 3, 32, 32, device=DEVICE)
    found = []
    for computed in (model, fused):
        torch.manual_seed(2)  # the same images are dropped
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            output = computed(pixels)
        output.float().square().sum().backward()
        found.append((output.float(), computed.patch_embed.proj.weight.grad))
    tolerance = 0.05 if autocast else 1e-4
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def test_the_report_groups_blocks_and_is_empty_for_other_models() -> None:
    text = str(vit_fast.fuse(SUBJECTS["timm-vit"].build(), backend="sdpa"))
    assert text.startswith("backend sdpa: 4 fused, 0 skipped") and "blocks.*.attn (2)" in text
    report = vit_fast.fuse(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    assert report.modules == () and "no attention or MLP of a supported class" in str(report)
    with pytest.raises(vit_fast.UnsupportedInputError, match="contains no attention or MLP"):
        report.require_all()


# --- rotary embeddings: augmented or learned positions, calls without positions ---------------------------------

AUGMENTED = {
    "jitter": {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0},
    "dropped patches": {"patch_drop_rate": 0.5},  # each image keeps other patches, so the tables differ per image
    "dropped patches, learned": {"patch_drop_rate": 0.5, "rope_type": "mixed", "rope_rotate_half": False},
}


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_positions(name: str, backend: str) -> None:
    subject = timm_subject("vit_small_patch16_dinov3", size=64, depth=1, embed_dim=32, **AUGMENTED[name])
    model, inputs = subject.build().to(DEVICE).train(), on_device(subject.inputs())
    twin = copy.deepcopy(model)
    vit_fast.fuse(twin, backend=backend).require_all()
    found = []
    for computed in (model, twin):
        torch.manual_seed(3)
        found.append(gradients(subject, computed, inputs))
    assert_same_results(found[1], found[0])
    with torch.no_grad():
        torch.testing.assert_close(
            subject.run(twin.eval(), inputs), subject.run(model.eval(), inputs), rtol=1e-3, atol=1e-4
        )


def test_frozen_blocks_with_qk_norm_and_without_positions() -> None:
    """Freezing makes rotated pairs of q and k adjacent. A call without positions needs the original order."""
    subject = timm_subject("vit_small_patch16_dinov3", depth=1, embed_dim=128, qk_norm=True)
    model = subject.build().eval().to(DEVICE, torch.bfloat16)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    vit_fast.fuse(model, backend="triton").require_all()
    assert len(vit_fast.freeze(model)) == 1
    inputs = {key: value.to(DEVICE, torch.bfloat16) for key, value in subject.inputs().items()}
    tokens = torch.randn(2, 6, 128, device=DEVICE).bfloat16()
    with torch.no_grad():
        found = [subject.run(each, inputs) for each in (model, plain)]
        assert_within(*found, subject.run(exact, {key: value.double() for key, value in inputs.items()}), 2, "output")
        found = [each.blocks[0](tokens) for each in (model, plain)]
        assert_within(*found, exact.blocks[0](tokens.double()), 2, "a block without positions")


# --- dropout: fused in training and evaluation mode; active dropout runs the original forward --------------------

P = 0.25
tokens, logits = SUBJECTS["torch-encoder"].inputs, SUBJECTS["torch-encoder"].output
DROPPING: dict[str, Subject] = {
    "timm, attention": timm_subject("vit_tiny_patch16_224", attn_drop_rate=P),
    "timm, MLP": timm_subject("vit_tiny_patch16_224", proj_drop_rate=P),
    "transformers": transformers_subject("ViTModel", attention_probs_dropout_prob=P, hidden_dropout_prob=P),
    "transformers, pooling": transformers_subject("SiglipVisionModel", "pooler_output", attention_dropout=P),
    "torchvision": Subject(functools.partial(torchvision_vit, dropout=P, attention_dropout=P), images("x"), logits),
    "torch": Subject(functools.partial(torch_encoder, dropout=P), tokens, logits),
    "vit-fast": Subject(functools.partial(plain_vit, proj_drop_rate=P, attn_drop_rate=P), images("images"), logits),
}


@pytest.mark.parametrize("case", DROPPING)
def test_fuse_in_training_mode_equals_fuse_in_evaluation_mode(case: str) -> None:
    subject = DROPPING[case]
    model, inputs = subject.build().train(), subject.inputs()
    twin, evaluated = copy.deepcopy(model), copy.deepcopy(model).eval()
    report, other = (vit_fast.fuse(each, "sdpa").require_all() for each in (model, evaluated))
    assert report.modules == other.modules
    notes = [note for row in report.fused for note in row.notes]
    assert any(note.startswith("in training the original forward runs") and str(P) in note for note in notes)
    outputs = []
    for trained in (model, twin, evaluated.train()):
        torch.manual_seed(3)
        outputs.append(subject.run(trained, inputs))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[2], outputs[1])
    torch.testing.assert_close(subject.run(model.eval(), inputs), subject.run(twin.eval(), inputs))


@pytest.mark.parametrize("library", ["timm-vit", "transformers-vit", "torchvision-vit", "vit-fast"])
def test_a_model_on_meta_is_fused_for_its_later_device(library: str) -> None:
    subject = SUBJECTS[library]
    model, inputs = subject.build().to("meta").eval(), on_device(subject.inputs())
    plain = subject.build().to(DEVICE).eval()
    vit_fast.fuse(model, "triton").require_all()
    on_meta = subject.run(model, {name: tensor.to("meta") for name, tensor in inputs.items()})
    model.to_empty(device=DEVICE).load_state_dict(plain.state_dict())
    fused = [part for part in model.modules() if isinstance(part, FusedModule)]
    assert {part.vit_fast_backend for part in fused} == {"triton"}
    torch.testing.assert_close(subject.run(model, inputs), subject.run(plain, inputs), rtol=1e-4, atol=1e-4)
    assert on_meta.is_meta and on_meta.shape == subject.run(plain, inputs).shape


# --- images as bytes: normalization folded into the patch embedding --------------------------------------------------

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# the input is patches, tokens, or images and noise; or the convolution pads the images
OTHERS = ("transformers-siglip2", "torch-encoder", "transformers-vit-mae", "transformers-vitpose")
NORMALIZED = [name for name in SUBJECTS if name not in OTHERS]


def bytes_for(subject: Subject) -> tuple[str, Tensor]:
    ((name, images),) = subject.inputs().items()
    return name, torch.randint(0, 256, images.shape, dtype=torch.uint8)


def normalized(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    return ((pixels.double() / 255 - mean) / std).to(dtype)


@pytest.mark.parametrize("name", NORMALIZED)
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
def test_tracers_copies_and_another_fuse() -> None:
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
        for each in (model, loaded, compiled, torch.fx.symbolic_trace(model)):
            torch.testing.assert_close(each(pixels), expected)
    with pytest.raises(Exception, match="annotation"), pytest.warns(DeprecationWarning):
        torch.jit.script(model)  # would lose the normalization


@pytest.mark.parametrize(
    ("model", "normalize", "message"),
    [
        (None, ((0.5,) * 3, (0.5, 0.5)), "number per channel"),
        (None, ((0.5,) * 3, (0.5, 0.5, 0.0)), "and std > 0"),
        (None, ((0.5, 0.5, float("nan")), (0.5,) * 3), "one finite number per channel"),
        (None, (0.5, 0.5), "number per channel"),
        (None, "imagenet", "number per channel"),
        (None, ((0.5,), (0.5,)), "mean and std must have 3 numbers, one per input channel, got 1"),
        (nn.Linear(3, 3), (MEAN, STD), "must have a torch.nn.Conv2d as patch embedding, got none"),
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
