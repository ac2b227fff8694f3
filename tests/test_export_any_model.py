"""Exports any model from an example of its inputs, and any outputs of the known libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
import transformers
from command_line import run
from onnx_models import make, randomized
from torch import Tensor, nn

import vit_fast
from vit_fast.apps.data import sample_image
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import ExportReport, OnnxRunner, QuantisationError, VerificationError, export_onnx, inspect_onnx
from vit_fast.export.options import BUDGETS
from vit_fast.export.tensorrt import tensorrt_reasons

SMALL: dict[str, Any] = {"embed_dim": 64, "num_heads": 2, "depth": 4, "img_size": 64}
SMALL_HF: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 64,
}  # fmt: skip
PIXELS_OF_SAM = 1024


def timm_model(name: str, **fields: Any) -> nn.Module:
    return timm.create_model(name, **(SMALL | fields))


def hf_model(name: str, **fields: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**(SMALL_HF | fields))
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model


TOWERS = {
    "timm-dinov2": lambda: timm_model("vit_small_patch14_reg4_dinov2", patch_size=16),
    "timm-dinov3": lambda: timm_model("vit_small_patch16_dinov3"),
    "hf-dinov2": lambda: hf_model("Dinov2", patch_size=16),
    "hf-dinov3": lambda: hf_model("DINOv3ViT", patch_size=16),
    "torchvision": lambda: make("torchvision-vit"),
    "vit-fast": lambda: make("dinov2_registers"),
}


def exported(model: nn.Module, path: Path, **given: Any) -> ExportReport | None:
    """Exports a model; returns None if 8 bits are refused, because they change outputs of random weights too much."""
    try:
        return export_onnx(model, path, **given)
    except QuantisationError as error:
        assert given["precision"] not in BUDGETS and "changes outputs too much" in str(error) and not path.exists()
        return None


def intermediates(name: str, model: Any, x: Tensor, layers: list[int]) -> list[Tensor]:
    """Returns the outputs of blocks as the library itself returns them: [B, P + N, C]."""
    if name.startswith("timm"):
        found = model.forward_intermediates(x, layers, True, output_fmt="NLC", intermediates_only=True)
        return [torch.cat([prefix, patches], 1) for patches, prefix in found]
    return [model(x, output_hidden_states=True).hidden_states[layer + 1] for layer in layers]


@pytest.mark.fast_cases("fp32-timm-dinov3")
@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_tokens_and_intermediate_layers(name: str, precision: Any, tmp_path: Path) -> None:
    """One file with tokens, prefix tokens and four layers, which match the library's own outputs."""
    model: Any = randomized(TOWERS[name]())
    layers = list(range(2 if name in ("torchvision", "vit-fast") else 4))
    given: dict[str, Any] = {"output": ["tokens", "intermediate"], "layers": layers, "target": "ort-cpu"}
    if precision == "int8":
        given |= {"calibration": [sample_image()], "images": [sample_image()]}
    if (report := exported(model, tmp_path / "m.onnx", precision=precision, **given)) is None:
        return
    names = [name for layer in layers for name in (f"intermediate_{layer}", f"intermediate_{layer}_prefix")]
    assert report.verified and list(report.outputs) == ["tokens", "prefix_tokens", *names]
    assert {check.output for check in report.checks} == set(report.outputs) and max(c.batch for c in report.checks) > 3
    info = inspect_onnx(tmp_path / "m.onnx")
    assert info.output == "tokens" and info.metadata["outputs"] == report.outputs
    side = report.outputs["tokens"][1]
    found = OnnxRunner(tmp_path / "m.onnx", "cpu")(x := torch.randn(3, 3, *report.checks[0].image_hw))
    assert found["tokens"].shape[1] == side and list(found) == list(report.outputs)
    if precision == "fp32" and name not in ("torchvision", "vit-fast"):
        with torch.no_grad():
            expected = intermediates(name, model, x, layers)
        for layer, y in zip(layers, expected):
            got = torch.cat([found[f"intermediate_{layer}_prefix"], found[f"intermediate_{layer}"]], 1)
            torch.testing.assert_close(got, y, atol=1e-4 * float(y.abs().max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit-fast", "timm-dinov3", "hf-dinov2"])
def test_normed_and_spatial(name: str, tmp_path: Path) -> None:
    """With the last norm, the last block's tokens are the model's tokens."""
    model = randomized(TOWERS[name]())
    given: dict[str, Any] = {"output": ["features", "tokens", "intermediate"], "layers": [-1], "normed": True}
    report = export_onnx(model, tmp_path / "m.onnx", spatial=True, **given)
    assert report.verified and len(report.outputs["tokens"]) == 4
    size = report.checks[0].image_hw
    found = OnnxRunner(tmp_path / "m.onnx", "cpu")(torch.randn(2, 3, *size))
    last = max(key for key in found if key.startswith("intermediate") and not key.endswith("prefix"))
    torch.testing.assert_close(found[last], found["tokens"], atol=1e-5, rtol=0)
    empty = OnnxRunner(tmp_path / "m.onnx", "cpu")(torch.randn(0, 3, *size))
    assert {key: y.shape[1:] for key, y in empty.items()} == {key: y.shape[1:] for key, y in found.items()}


class BackboneAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = make("timm-vit")
        self.backbone.reset_classifier(0)
        self.head = nn.Linear(self.backbone.num_features, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class TwoInputs(nn.Module):
    """A model of images and of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = make("vit")

    def forward(self, pixel_values: Tensor, mask: Tensor, temperature: Tensor) -> dict[str, Any]:
        logits = self.vit(pixel_values * mask[:, None])
        return {"logits": logits / temperature, "parts": [mask.mean((1, 2)), mask.flatten(1).argmax(-1)]}


@dataclass
class Scores:
    scores: Tensor
    nothing: None = None


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x: Tensor) -> Scores:
        return Scores(self.layer(x).flatten(2).transpose(1, 2).softmax(-1))


def sam(library: str) -> nn.Module:
    """SAM's image encoder for 1,024 pixels, with two blocks: one with windows, one with global attention."""
    if library == "timm":
        return timm.create_model("samvit_base_patch16", embed_dim=32, depth=2, num_heads=2, global_attn_indexes=(1,))
    if library == "transformers":
        fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "global_attn_indexes": [1]}
        return transformers.SamVisionModel(transformers.SamVisionConfig(**fields, mlp_dim=64))
    segment_anything = pytest.importorskip("segment_anything")
    return segment_anything.modeling.ImageEncoderViT(
        embed_dim=32, depth=2, num_heads=2, use_rel_pos=True, window_size=14, global_attn_indexes=(1,)
    )


def open_clip_tower() -> nn.Module:
    open_clip = pytest.importorskip("open_clip")
    return open_clip.transformer.VisionTransformer(64, 16, 64, 2, 2, 4.0, output_dim=32)


def open_clip_timm() -> nn.Module:
    open_clip = pytest.importorskip("open_clip")
    return open_clip.timm_model.TimmModel("vit_tiny_patch16_224", 32, image_size=224, pool="avg", proj="linear")


def monai_vit() -> nn.Module:
    pytest.importorskip("einops")
    nets = pytest.importorskip("monai.networks.nets")
    return nets.ViT(1, (32, 32, 32), (16, 16, 16), hidden_size=48, mlp_dim=64, num_layers=2, num_heads=2)


def lightly_vit() -> nn.Module:
    modules = pytest.importorskip("lightly.models.modules")
    return modules.MaskedVisionTransformerTIMM(timm_model("vit_tiny_patch16_224", depth=2))


def clip() -> nn.Module:
    """CLIP with its text tower, whose attention is causal and ignores padding."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98, "bos_token_id": 97}
    vision = {**small, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return randomized(transformers.CLIPModel(config))


torch.manual_seed(0)  # the same examples in every process
IMAGES, VOLUMES, LARGE = torch.randn(1, 3, 64, 64), torch.randn(2, 1, 32, 32, 32), torch.zeros(1, 3, 1024, 1024)
SMALL_IMAGES = torch.randn(1, 3, 32, 32)
ANY: dict[str, tuple[Any, Any, list[str]]] = {
    "wrapper": (BackboneAndHead, SMALL_IMAGES, ["output"]),
    "two-inputs": (
        TwoInputs, {"pixel_values": SMALL_IMAGES, "mask": torch.rand(1, 32, 32), "temperature": torch.tensor(2.0)},
        ["logits", "parts_0", "parts_1"],
    ),
    "dataclass": (ReturnsDataclass, SMALL_IMAGES, ["scores"]),
    "features_only": (
        lambda: timm.create_model("resnet18", features_only=True, out_indices=(2, 3)), IMAGES, ["output_0", "output_1"]
    ),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1), embed_dim=24, num_heads=(1, 2),
                                       img_size=112, num_classes=7), torch.randn(1, 3, 112, 112), ["output"]),
    "hf": (TOWERS["hf-dinov2"], {"pixel_values": IMAGES}, ["last_hidden_state", "pooler_output"]),
    "clip": (
        clip, {"pixel_values": torch.randn(2, 3, 32, 32), "attention_mask": torch.tensor([[1] * 7, [0, 0, *[1] * 5]]),
               "input_ids": torch.tensor([[97, 5, 6, 7, 8, 9, 98]] * 2)},
        ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds",
         *(f"{tower}_model_output_{name}" for tower in ("text", "vision") for name in ("last_hidden_state",
                                                                                      "pooler_output"))],
    ),
    "lightly": (lightly_vit, IMAGES, ["output"]),
    "open_clip": (open_clip_tower, IMAGES, ["output"]),
    "open_clip-timm": (open_clip_timm, torch.randn(1, 3, 224, 224), ["output"]),
    "monai": (monai_vit, VOLUMES, ["output_0", "output_1_0", "output_1_1"]),
    "sam-timm": (lambda: sam("timm"), LARGE, ["output"]),
    "sam-transformers": (lambda: sam("transformers"), LARGE, ["last_hidden_state"]),
    "sam-segment-anything": (lambda: sam("segment_anything"), LARGE, ["output"]),
}  # fmt: skip


@pytest.mark.fast_cases("fp32-wrapper")
@pytest.mark.parametrize("name", ANY)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_any_model(name: str, precision: Any, tmp_path: Path) -> None:
    """The file has the outputs of the call, also for other batches; what 8 bits change too much is refused."""
    build, example, names = ANY[name]
    model = build().eval()
    given: dict[str, Any] = {"example": example, "precision": precision, "target": "ort-cpu"}
    if precision == "int8":
        if name != "monai":  # takes no images, but volumes
            given |= {"calibration": [sample_image()], "images": [sample_image()]}
        if name in ("features_only", "dataclass"):
            with pytest.raises(UnsupportedInputError, match="must have a linear layer over tokens, got none"):
                export_onnx(model, tmp_path / "m.onnx", **given)
            return
    if (report := exported(model, tmp_path / "m.onnx", **given)) is None:
        return
    assert report.verified and list(report.outputs) == names and {c.output for c in report.checks} == set(names)
    assert max(check.batch for check in report.checks) >= 3
    if name == "wrapper":
        assert report.nodes["MultiHeadAttention"] == 2 and report.nodes["BiasGelu"] == 2
    if name == "clip" and precision == "fp32":  # of the unmodified model, with other padding
        inputs = example | {"attention_mask": example["attention_mask"].flip(0, 1)}
        found, expected = OnnxRunner(tmp_path / "m.onnx", "cpu")(inputs), model(**inputs)
        torch.testing.assert_close(found["text_embeds"], expected["text_embeds"], atol=1e-5, rtol=0)
        assert any("MultiHeadAttention: 2 of 4" in warning for warning in report.warnings), "masks are not fused"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrapper", "two-inputs", "swin", "hf"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8-dynamic"])
def test_other_precisions_of_any_model(name: str, precision: Any, tmp_path: Path) -> None:
    """Linear layers and attention are found in the graph; bf16 cannot be verified on a CPU."""
    build, example, names = ANY[name]
    given: dict[str, Any] = {"example": example, "precision": precision, "verify": precision != "bf16"}
    if precision != "bf16":
        given |= {"calibration": [sample_image()], "images": [sample_image()]}
    target: Any = {"fp8": "tensorrt", "int8-dynamic": "ort-cpu"}.get(precision, "generic")
    if (report := exported(build().eval(), tmp_path / "m.onnx", target=target, **given)) is None:
        return
    assert list(report.outputs) == names and report.verified == given["verify"]
    info = inspect_onnx(tmp_path / "m.onnx")
    assert (info.precision == "bf16") == (precision == "bf16") and info.fp8 == (precision == "fp8")
    assert report.eight_bit is None or report.eight_bit.matmuls > 0  # the sensitive ones stay in float


def test_a_file_with_named_inputs(tmp_path: Path) -> None:
    model, inputs = TwoInputs().eval(), dict(ANY["two-inputs"][1])
    export_onnx(model, tmp_path / "m.onnx", example=inputs, target="tensorrt")
    inputs |= {"pixel_values": torch.randn(3, 3, 32, 32), "mask": torch.rand(3, 32, 32)}
    runner = OnnxRunner(tmp_path / "m.onnx", "cpu")
    found, expected = runner(inputs), model(**inputs)
    torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-4, rtol=0)
    assert found["parts_1"].dtype == torch.int64 and found["parts_0"].shape == (3,)
    with pytest.raises(TypeError, match="must be a dict with pixel_values, mask, temperature"):
        runner(inputs["pixel_values"])
    command = vit_fast.export.trtexec_line(inspect_onnx(tmp_path / "m.onnx"))
    assert "--optShapes=pixel_values:8x3x32x32,mask:8x32x32,temperature: " in command.replace("'", "") + " "


class HasUnbatchedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.turn)
        found = {"mean": x.mean((1, 2, 3)), "scale": torch.tensor(2.0), "grid": torch.arange(8.0).view(2, 4), "x": x}
        return found | {"planes": x.flatten(0, 1), "turned": turned, "none": x[:, :0]}


def test_outputs_without_a_batch(tmp_path: Path) -> None:
    """Constants are not sliced and not concatenated; complex constants keep their imaginary part."""
    example, model = torch.randn(1, 3, 8, 8), HasUnbatchedOutputs()
    report = export_onnx(model, tmp_path / "m.onnx", example=example)
    assert report.verified and report.outputs["scale"] == [] and report.outputs["grid"] == [2, 4]
    runner = OnnxRunner(tmp_path / "m.onnx", "cpu", max_batch=2)
    for count in (0, 3, 4):
        found = runner(x := torch.randn(count, 3, 8, 8))
        assert found["scale"] == 2 and found["grid"].shape == (2, 4) and found["mean"].shape == (count,)
        assert found["none"].shape == (count, 0, 8, 8)
        torch.testing.assert_close(found["planes"], x.flatten(0, 1))
        torch.testing.assert_close(found["turned"], model(x)["turned"])
        torch.testing.assert_close(found["x_output" if "x_output" in found else "x"], x)


class Computes(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


OFFSET = torch.arange(2.0).view(2, 1, 1, 1)
LENGTH = Computes(lambda x: torch.ones(5).expand(len(x), -1) * x.mean())
RETURNS_TEXT = Computes(lambda x: (x, "text"))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Computes(lambda x: x if x.sum() > 0 else -x), {}, r"any_model\.py:\d+: .*sum\(\) > 0(.|\n)*use torch\.where"),
        (Computes(lambda x: x + OFFSET), {}, r"x \+ OFFSET(.|\n)*the model fixes the batch: .*dynamic_batch=False"),
        (LENGTH, {}, r"any_model\.py:\d+: LENGTH = (.|\n)*the model fixes the batch: .* instead of len\(x\)"),
        (Computes(torch.special.airy_ai), {}, r"return self\.function\(x\)(.|\n)*compute it from others"),
        (Computes(nn.functional.dropout), {}, "the model draws random numbers or has a state"),
        (Computes(lambda x: x.clamp(0).log().sqrt()), {}, "the model returns NaN in output"),
        (
            Computes(torch.abs),
            {"example": torch.randn(2, 3, dtype=torch.complex64)},
            "must not contain complex numbers",
        ),
        (RETURNS_TEXT, {}, "output_1 must be a tensor, got str"),
        (RETURNS_TEXT, {"output": "logits"}, "must not be given with example"),
        (nn.Conv2d(3, 3, 1), {"example": torch.tensor(1.0)}, "first axis is a batch"),
        (nn.Conv2d(3, 3, 1), {"preprocess": True}, "data_config must be given"),
    ],
)
def test_models_that_cannot_be_captured(model: Any, options: Any, message: str, tmp_path: Path, capfd: Any) -> None:
    with pytest.raises((ValueError, VerificationError), match=message):
        export_onnx(model, tmp_path / "m.onnx", **({"example": torch.randn(2, 3, 8, 8)} | options))
    assert not list(tmp_path.iterdir()) and "aten" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_fixed_batch_and_preprocessing(tmp_path: Path) -> None:
    example = torch.randn(2, 3, 8, 8)
    model: nn.Module = Computes(lambda x: (x + OFFSET).sum((2, 3)))
    report = export_onnx(model, tmp_path / "m.onnx", example=example, dynamic_batch=False)
    assert report.verified and report.outputs == {"output": [2, 3]}
    data = {"mean": [0.4] * 3, "std": [0.2] * 3}
    model, given = BackboneAndHead().eval(), {"example": SMALL_IMAGES, "preprocess": True, "data_config": data}
    assert export_onnx(model, tmp_path / "p.onnx", class_names=list("abcde"), **given).verified
    pixels = np.zeros((2, 50, 40, 3), np.uint8)
    with torch.no_grad():
        expected = model(torch.full((2, 3, 32, 32), -2.0)).numpy()
    np.testing.assert_allclose(OnnxRunner(tmp_path / "p.onnx", "cpu")(pixels), expected, atol=1e-3)


def build_wrapper() -> tuple[nn.Module, Tensor]:
    return BackboneAndHead().eval(), SMALL_IMAGES


@pytest.mark.slow
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    path = str(tmp_path / "m.onnx")
    assert not run("export", "test_export_any_model:build_wrapper", "-o", path, "--json")
    assert json.loads(capsys.readouterr().out)["outputs"] == {"output": ["batch", 5]}
    outputs = ["--returns", "tokens,intermediate", "--layers=0,-1", "--spatial", "--no-verify", "--json"]
    assert not run("export", "vit_test", "-o", path, *outputs)
    assert next(iter(json.loads(capsys.readouterr().out)["outputs"])) == "tokens"


def test_what_tensorrt_rejects(tmp_path: Path) -> None:
    import onnx_ir as ir

    path = tmp_path / "m.onnx"
    export_onnx(make("vit"), path, opset=23, target="tensorrt", verify=False)
    assert not tensorrt_reasons(ir.load(path))
    proto = onnx.load(path)
    attention = next(node for node in proto.graph.node if node.op_type == "Attention")
    attention.output.extend(["", "", "scores"])
    proto.opset_import[0].version = 26
    proto.graph.initializer.add().CopyFrom(onnx.numpy_helper.from_array(np.zeros(2, np.uint32), "narrow"))
    reasons = " ".join(tensorrt_reasons(ir.serde.deserialize_model(proto)))
    assert "opset must be between 9 and 25, got 26" in reasons and "Attention" in reasons and "UINT32" in reasons
