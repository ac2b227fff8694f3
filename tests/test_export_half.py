"""fp16 files do not overflow on any target, although ONNX Runtime's CPU provider would hide it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from digits import digits_vit, held_out
from onnx.reference import ReferenceEvaluator
from onnx_models import make
from torch import Tensor, nn

from vit_fast.apps.data import sample_image
from vit_fast.export import export_onnx

TARGETS: dict[str, dict[str, Any]] = {
    "tensorrt": {"target": "tensorrt"}, "generic": {}, "opset 23": {"opset": 23}, "ort-cuda": {"target": "ort-cuda"},
}  # fmt: skip


def large_hidden(model: Any) -> None:
    """A hidden unit near 65,504 that is not read."""
    mlp = model.blocks[1].mlp
    mlp.fc1.bias[5], mlp.fc1.weight[5, 3], mlp.fc2.weight[:, 5] = 6.5e4, 4e4, 0


def large_scores(model: Any) -> None:
    """One channel of q and k that adds 90,000 to all scores, which does not change the softmax."""
    qkv = model.blocks[1].attn.qkv
    for channel in (3, 64 + 3):
        qkv.weight[channel], qkv.bias[channel] = 0, 300


def large_residual(model: Any) -> None:
    """A channel of the residual stream that exceeds 65,504, and that the norms ignore."""
    model.pos_embed[..., 7] = 5e4
    model.blocks[0].mlp.fc2.bias[7] = 3e4


@pytest.mark.fast_cases("tensorrt-large_hidden", "opset 23-large_scores", "ort-cuda-large_scores")
@pytest.mark.parametrize("change", [large_hidden, large_scores, large_residual], ids=lambda change: change.__name__)
@pytest.mark.parametrize("target", TARGETS)
@torch.no_grad()
def test_layers_that_overflow_stay_in_fp32(target: str, change: Any, tmp_path: Path) -> None:
    """Evaluates the file with numpy, whose fp16 overflows as on a GPU."""
    model = digits_vit()
    change(model)
    report = export_onnx(model, tmp_path / "m.onnx", precision="fp16", **TARGETS[target])
    assert report.verified and any(line.startswith("blocks.1: ") for line in report.in_fp32)
    assert report.in_fp32[0] in str(report) and ("on a CPU only" in str(report.warnings)) == (
        target in ("tensorrt", "ort-cuda")
    )
    if change is large_hidden:
        assert report.in_fp32 == (report.in_fp32[0],) and "mlp.fc1, Add, Gelu, mlp.fc2" in report.in_fp32[0]
    if target != "ort-cuda":
        images = held_out()[0][:4]
        (got,) = ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {"images": images.numpy()})
        np.testing.assert_allclose(got, model(images), atol=0.02 * model(images).abs().max().item())
    halves = [t for t in onnx.load(tmp_path / "m.onnx").graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert len(halves) > 20, "the other layers stay in fp16"


class LargeConstants(nn.Module):
    """Numbers, tensors, a buffer and a parameter that fp16 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        nn.init.constant_(self.layer.bias[:1], 7e4)
        self.vit: Any = make("transformers-vit")  # a block, whose q, k and v are concatenated
        nn.init.constant_(self.vit.vit.layers[0].attention.k_proj.bias[:2], 7e4)  # does not change the softmax
        self.register_buffer("mask", torch.tensor([0, -1e9] * 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "number": (x + 3e5) / 1e5,
            "in_place": x.clone().mul_(2e5).sub_(1e5) / 1e5,
            "masked": x.masked_fill(x > -100, -1e9).softmax(-1),
            "infinite": x.masked_fill(x > x.mean(-1, True), -torch.inf).softmax(-1),
            "tensor": torch.where(x > 0, x, torch.tensor(-1e9)).softmax(-1),
            "filled": (x * torch.full_like(x, 2e5) * 1000 > 1e8).to(x.dtype),
            "buffer": (x[:, None] + self.mask.view(1, 2, 4).flatten()).softmax(-1),
            "parameter": self.layer(x) / 1e4,
            "stored": self.mask,
            "block": self.vit.vit.layers[0](x[:, None].repeat(1, 4, 8)),
            "several": (x * 1e5).topk(2, -1).values / 1e5,
        }


@torch.no_grad()
def test_large_constants_stay_in_fp32(tmp_path: Path) -> None:
    """Evaluates the file with numpy. If nothing is measured, only the operators beside constants are in fp32."""
    model, x = LargeConstants(), torch.randn(3, 8)
    for verify in (True, False):
        report = export_onnx(model, tmp_path / "m.onnx", precision="fp16", example=x, verify=verify)
        assert report.verified == verify
        session = ReferenceEvaluator(str(tmp_path / "m.onnx"))
        got = dict(zip(report.outputs, session.run(None, {"x": x.numpy()})))
        for name, expected in model(x).items():
            if not verify and name in ("filled", "block", "several"):
                continue
            np.testing.assert_allclose(got[name], expected, atol=5e-3 * expected.abs().max().clamp(1), err_msg=name)


class MixedDtypes(nn.Module):
    """Computes parts in fp32 in any case, as a model that was never run in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer, self.scale = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), torch.tensor([0.5] * 8)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        x = self.patches(pixels.float() / 255).flatten(2).mT
        scores = self.layer(x * self.scale) @ x.mT + torch.eye(4) * -100
        y = scores.softmax(-1) @ x
        return {"attention": y, "spectrum": torch.fft.rfft(y).abs(), "fused": F.scaled_dot_product_attention(y, x, x)}


def test_a_model_that_mixes_dtypes(tmp_path: Path) -> None:
    example = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    report = export_onnx(MixedDtypes().eval(), tmp_path / "m.onnx", precision="fp16", example=example)
    assert report.verified and report.inputs == {"pixels": "uint8 ['batch', 3, 8, 8]"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@torch.no_grad()
def test_float_layers_of_8_bit_files(precision: Any, tmp_path: Path) -> None:
    """TensorRT computes them in fp16."""
    model, images = digits_vit(), {"calibration": [sample_image()], "images": [sample_image()]}
    large_residual(model)
    report = export_onnx(model, tmp_path / "m.onnx", precision=precision, target="tensorrt", **images)  # type: ignore[arg-type]
    assert report.verified and any("Add" in line for line in report.in_fp32)
