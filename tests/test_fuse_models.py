"""Every model that fuse covers: outputs and gradients as before, and everything given back by unfuse."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, assert_gradients_within, assert_within, gradients, in_fp64, vitpose_subject
from kernel_support import DEVICE, HAS_GPU
from torch import nn

import vit_fast
from vit_fast.blocks import block
from vit_fast.blocks.fused import FusedNormMlp

if not HAS_GPU:
    from interpreter_speed import search_once

    search_once()

BIASED = {"transformers-beit"}  # its relative position bias keeps the attention from being fused


@pytest.mark.parametrize("name", SUBJECTS)
def test_output_and_gradients_are_those_of_the_original(name: str) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build(), subject.inputs()
    exact, exact_grads = in_fp64(subject, model, inputs)
    before, before_grads = gradients(subject, model, inputs)
    report = vit_fast.fuse(model, backend="sdpa")
    assert len(report.fused) >= 2
    after, after_grads = gradients(subject, model, inputs)
    assert_within(after, before, exact, 2, "output")
    assert_gradients_within(after_grads, before_grads, exact_grads, 3)


@pytest.mark.parametrize("name", SUBJECTS)
def test_everything_is_fused_but_a_position_bias(name: str) -> None:
    report = vit_fast.fuse(SUBJECTS[name].build(), backend="sdpa")
    if name in BIASED:
        reasons = [reason for module in report.left for reason in module.reasons]
        assert len(reasons) == 2
        assert all(reason.endswith("it adds a relative position bias") for reason in reasons)
        assert {module.part for module in report.left} == {"attention"}
    else:
        assert report.require_all() is report
    kinds = " ".join(module.part for module in report.fused)
    assert "norm + MLP" in kinds
    assert ("attention" in kinds) == (name not in BIASED)


@pytest.mark.parametrize("name", SUBJECTS)
def test_objects_stay_and_unfuse_gives_their_classes_back(name: str) -> None:
    model = SUBJECTS[name].build()
    objects = list(model.modules())
    classes = [type(module) for module in objects]
    attributes = [set(vars(module)) for module in objects]
    parameters, keys = list(model.parameters()), list(model.state_dict())
    vit_fast.fuse(model, backend="sdpa")
    assert [type(module) for module in objects] != classes
    assert all(a is b for a, b in zip(model.modules(), objects, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    vit_fast.unfuse(model)
    assert all(a is b for a, b in zip(model.modules(), objects, strict=True))
    assert [type(module) for module in objects] == classes
    assert [set(vars(module)) for module in objects] == attributes


@pytest.mark.parametrize("name", SUBJECTS)
def test_fusing_twice_changes_nothing_and_unfusing_twice_neither(name: str) -> None:
    model = SUBJECTS[name].build()
    classes = [type(module) for module in model.modules()]
    first = vit_fast.fuse(model, backend="sdpa")
    fused_classes = [type(module) for module in model.modules()]
    second = vit_fast.fuse(model, backend="sdpa")
    assert [type(module) for module in model.modules()] == fused_classes
    assert [(m.name, m.part, m.fused) for m in second.modules] == [(m.name, m.part, m.fused) for m in first.modules]
    for _ in range(2):
        vit_fast.unfuse(model)
        assert [type(module) for module in model.modules()] == classes


def on_device(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


TRITON = [
    "timm-dinov2-registers",
    "timm-siglip",
    "timm-qk-norm",
    "timm-dinov3-biases",
    "timm-dinov3-gated",
    "timm-gated",
    "transformers-vit",
    "transformers-dinov2",
    "transformers-dinov3",
    "transformers-internvl-6b",
    "torchvision-vit",
    "ours",
]


@pytest.mark.fast_cases(
    "timm-dinov2-registers", "timm-gated", "timm-dinov3-gated", "transformers-dinov3", "transformers-internvl-6b",
    "torchvision-vit", "ours",
)  # fmt: skip
@pytest.mark.parametrize("name", TRITON)
def test_the_triton_backend_is_as_exact_as_the_formulas(name: str) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().to(DEVICE), on_device(subject.inputs())
    exact, exact_grads = in_fp64(subject, model, inputs)
    assert vit_fast.fuse(model, backend="eager").backend == "eager"
    before, before_grads = gradients(subject, model, inputs)
    assert vit_fast.fuse(model, backend="triton").backend == "triton"
    after, after_grads = gradients(subject, model, inputs)
    assert_within(after, before, exact, 2, "output")
    assert_gradients_within(after_grads, before_grads, exact_grads, 3)


@pytest.mark.fast_cases("timm-dinov3", "transformers-clip")
@pytest.mark.parametrize(
    "name",
    [
        "timm-vit",
        "timm-dinov3",
        "transformers-clip",
        "transformers-dinov3",
        "transformers-dpt",
        "transformers-vitpose",
        "torchvision-vit",
    ],
)
def test_whole_blocks_run_as_kernels_until_somebody_looks_inside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_block, calls = block.run_block, []

    def count(parts: block.BlockParts, *args: Any, **how: Any) -> Any:
        if how.get("attend") is None:
            calls.append(parts.watch.owner)
        return run_block(parts, *args, **how)

    monkeypatch.setattr(block, "run_block", count)
    subject = SUBJECTS[name]
    model, inputs = subject.build().eval().to(DEVICE), on_device(subject.inputs())
    with torch.no_grad():
        expected = subject.run(model, inputs)
        vit_fast.fuse(model, backend="triton")
        first, second = (module for module in model.modules() if isinstance(module, FusedNormMlp))
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-3, atol=1e-3)
        assert calls == [first, second]
        seen = []
        attention = next(child for child in first.children() if "Attention" in type(child).__qualname__)
        attention.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-3, atol=1e-3)
    assert calls == [first, second, second]
    assert seen == [1]


@pytest.mark.parametrize(("drop_path", "autocast"), [(0.5, False), (0.0, True)])
def test_triton_with_layer_scale_and_drop_path_or_autocast(drop_path: float, autocast: bool) -> None:
    timm = pytest.importorskip("timm")
    settings = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5, "init_values": 0.5}
    model = timm.create_model("vit_tiny_patch16_224", **settings).train()
    model.blocks[0].drop_path1, model.blocks[0].drop_path2 = (timm.layers.DropPath(drop_path) for _ in range(2))
    fused = copy.deepcopy(model.to(DEVICE))
    assert vit_fast.fuse(fused, backend="triton").require_all()
    images = torch.randn(4, 3, 32, 32, device=DEVICE)
    found = []
    for computed in (model, fused):
        torch.manual_seed(2)  # the same images are dropped
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            output = computed(images)
        output.float().square().sum().backward()
        found.append((output.float(), computed.patch_embed.proj.weight.grad))
    tolerance = 0.05 if autocast else 1e-4
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def test_the_fused_operators_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_fast.libraries import timm_blocks, transformers_attention

    calls: list[str] = []

    def counted(module: object, name: str) -> None:
        operator = getattr(module, name)

        def count(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(module, name, count)

    counted(block, "layer_norm_mlp")
    counted(timm_blocks, "attention_among")
    counted(transformers_attention, "attention")
    for name, attention in (("timm-vit", "attention_among"), ("transformers-vit", "attention")):
        subject = SUBJECTS[name]
        model = subject.build()
        subject.run(model, subject.inputs())
        assert calls == []
        vit_fast.fuse(model, "eager")
        subject.run(model, subject.inputs())
        assert calls == [attention, "layer_norm_mlp"] * 2
        calls.clear()


def test_drop_path_in_training_drops_the_same_images() -> None:
    timm = pytest.importorskip("timm")
    settings = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 5, "drop_path_rate": 0.5}
    model = timm.create_model("vit_tiny_patch16_224", **settings).train()
    fused = copy.deepcopy(model)
    assert vit_fast.fuse(fused).require_all()
    images = torch.randn(8, 3, 32, 32)
    torch.manual_seed(1)
    expected = model(images)
    torch.manual_seed(1)
    torch.testing.assert_close(fused(images), expected)


def test_a_frozen_and_a_tied_model_stay_frozen_and_tied() -> None:
    subject = SUBJECTS["timm-vit"]
    model = subject.build()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    for parameter in model.blocks[0].attn.parameters():
        parameter.requires_grad_(False)
    inputs = subject.inputs()
    expected, expected_grads = gradients(subject, model, inputs)
    vit_fast.fuse(model).require_all()
    assert model.blocks[1].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight
    output, grads = gradients(subject, model, inputs)
    assert grads.keys() == expected_grads.keys()
    assert not any(name.startswith("blocks.0.attn") for name in grads)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_an_optimizer_made_before_trains_the_fused_model() -> None:
    subject = SUBJECTS["torchvision-vit"]
    model = subject.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    vit_fast.fuse(model)
    inputs = subject.inputs()
    for _ in range(2):
        for trained, steps in ((model, optimizer), (twin, twin_optimizer)):
            gradients(subject, trained, inputs)
            steps.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "torchvision-vit"])
def test_half_precision_is_no_worse_than_the_original(name: str, dtype: torch.dtype) -> None:
    subject = SUBJECTS[name]
    model = subject.build().eval().to(dtype)
    inputs = {key: value.to(dtype) for key, value in subject.inputs().items()}
    exact, _ = in_fp64(subject, model, inputs)
    with torch.no_grad():
        before = subject.run(model, inputs)
        vit_fast.fuse(model, backend="sdpa")
        assert_within(subject.run(model, inputs), before, exact, 2, "output")


@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "torchvision-vit", "ours"])
def test_channels_last_and_strided_images_give_the_same(name: str) -> None:
    subject = SUBJECTS[name]
    model = subject.build().eval()
    vit_fast.fuse(model, backend="sdpa")
    ((key, pictures),) = subject.inputs().items()
    expected = subject.run(model, {key: pictures})
    wide = torch.zeros(2, 3, 32, 64)
    wide[..., ::2] = pictures
    for layout in (pictures.contiguous(memory_format=torch.channels_last), wide[..., ::2]):
        torch.testing.assert_close(subject.run(model, {key: layout}), expected)


def test_a_model_of_another_kind_is_reported_as_such() -> None:
    report = vit_fast.fuse(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    assert report.modules == ()
    assert "no attention or MLP that vit_fast knows" in str(report)
    with pytest.raises(vit_fast.UnsupportedInputError, match="holds no attention or MLP"):
        report.require_all()


def test_the_report_is_a_table_with_one_line_a_kind_of_module() -> None:
    text = str(vit_fast.fuse(SUBJECTS["timm-vit"].build(), backend="sdpa"))
    lines = text.splitlines()
    assert lines[0] == "backend sdpa: 4 fused, 0 left"
    assert len(lines) == 4
    assert "blocks.{0-1}.attn" in text
    assert "fused" in lines[2]


LAYERS_ALONE = {  # of models that need more than transformers to be made
    "eomt": ("EomtLayer", "EomtConfig", {"mlp_ratio": 2}),
    "eomt_dinov3": ("EomtDinov3Layer", "EomtDinov3Config", {"intermediate_size": 128}),
    "unlimited_ocr": ("UnlimitedOcrEncoderLayer", "UnlimitedOcrVisionEncoderConfig", {"intermediate_size": 128}),
}


@pytest.mark.parametrize("model", LAYERS_ALONE)
def test_a_layer_of_a_model_that_cannot_be_made_here(model: str) -> None:
    pytest.importorskip("transformers")
    home = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    layer_name, config_name, settings = LAYERS_ALONE[model]
    config = getattr(home, config_name)(hidden_size=64, num_attention_heads=2, **settings)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = getattr(home, layer_name)(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, extra = torch.randn(2, 5, 64), {}
    if "dinov3" in model:
        angles = torch.rand(4, 16).tile(2)
        extra = {"position_embeddings": (angles.cos(), angles.sin())}
    masks = (None,) if "ocr" in model else ()
    before = layer(x, *masks, **extra)
    vit_fast.fuse(layer, backend="sdpa").require_all()
    torch.testing.assert_close(layer(x, *masks, **extra), before, rtol=1e-4, atol=1e-5)


def test_vitpose_with_experts_keeps_its_mlps() -> None:
    subject = vitpose_subject(num_experts=3, part_features=16)
    model = subject.build().eval()
    inputs = subject.inputs() | {"dataset_index": torch.tensor([0, 2])}
    expected = subject.run(model, inputs)
    report = vit_fast.fuse(model, backend="sdpa")
    reason = "mlp is a VitPoseBackboneMoeMLP of 3 experts: must be a single MLP"
    assert [module.reasons for module in report.left] == [(reason,)] * 2
    assert {module.part for module in report.fused} == {"attention"}
    torch.testing.assert_close(subject.run(model, inputs), expected)


def test_a_hybrid_dpt_has_the_same_blocks() -> None:
    transformers = pytest.importorskip("transformers")
    bit = {"model_type": "bit", "depths": [1, 1, 1], "hidden_sizes": [8, 8, 16], "num_groups": 4, "embedding_size": 8}
    bit |= {"out_features": ["stage1", "stage2", "stage3"], "global_padding": "same", "layer_type": "bottleneck"}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    necks = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "neck_ignore_stages": [0, 1]}
    hybrid = {"is_hybrid": True, "backbone_config": bit, "backbone_featmap_shape": [1, 16, 2, 2]}
    config = transformers.DPTConfig(
        image_size=32, backbone_out_indices=[0, 1, 0, 1], readout_type="project", **sizes, **necks, **hybrid
    )
    torch.manual_seed(0)
    model, images = transformers.DPTForDepthEstimation(config).eval(), torch.randn(2, 3, 32, 32)
    expected = model(images).predicted_depth
    assert len(vit_fast.fuse(model, backend="sdpa").require_all().fused) == 4
    torch.testing.assert_close(model(images).predicted_depth, expected)
