"""Every model family, at changing opset, precision and target: exported, verified, and held against eager again."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx_models import FAMILIES, SIZE, make, newest_opset_to_run
from torch import nn

import vit_fast
from vit_fast.export import OnnxRunner, export_onnx
from vit_fast.libraries.known import recognise

OPSETS = tuple(dict.fromkeys((18, 20, 23, newest_opset_to_run())))
ATTENTIONS = {"siglip": 3, "timm_siglip": 3}
# These are others but for a few nodes.
LIKE = {
    "vit_avg_pool", "clip_quickgelu", "sincos", "timm_siglip", "transformers_dinov2", "transformers_siglip",
    "transformers_two_heads",
}  # fmt: skip
OTHER_ACTIVATIONS = {"clip_quickgelu", "siglip", "transformers_clip", "transformers_siglip"}
FP32, FP16 = 2e-5, 2e-2


def _cases() -> list[Any]:
    """Five of all combinations for each family, each combination for some; in `make test` one for most families."""
    kinds = [*product(OPSETS, ("fp32", "fp16"), ("generic", "ort-cpu"))]
    minutes = pytest.mark.slow(minutes=True)  # together
    return [
        pytest.param(family, *kinds[(3 * i + 5 * step) % len(kinds)], marks=[minutes] if step or family in LIKE else [])
        for i, family in enumerate(FAMILIES)
        for step in range(5)
    ]


def file_matches(path: Path, model: nn.Module, allowed: float) -> bool:
    """True if a file computes the model's logits, by the largest error relative to the largest logit."""
    images = torch.randn(5, 3, SIZE, SIZE)
    with torch.inference_mode():
        expected = recognise(model).forward(images, "logits").numpy()
    got = OnnxRunner(path, "cpu")(images.numpy())
    assert got.dtype == np.float32 and got.shape == expected.shape and expected.std() > 0.01
    return bool(np.abs(got - expected).max() <= allowed * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize(("family", "opset", "precision", "target"), _cases())
def test_family(family: str, opset: int, precision: str, target: str, tmp_path: Path) -> None:
    model = make(family)
    report = export_onnx(model, tmp_path / "m.onnx", opset=opset, precision=precision, target=target)  # type: ignore[arg-type]
    assert report.verified and [(check.images, check.batch) for check in report.checks] == [(8, 5)]
    assert report.max_error is not None and report.max_error <= (1e-5 if precision == "fp32" else 5e-3)

    proto = onnx.load(tmp_path / "m.onnx")
    assert {entry.domain: entry.version for entry in proto.opset_import}[""] == opset
    kinds = [node.op_type for node in proto.graph.node]
    wanted = ATTENTIONS.get(family, 2)
    if target == "generic":
        assert {node.domain for node in proto.graph.node} == {""}
        assert kinds.count("Attention") == (wanted if opset >= 23 else 0)
    else:
        assert kinds.count("MultiHeadAttention") == wanted
        assert (kinds.count("BiasGelu") >= 2) == (family not in OTHER_ACTIVATIONS)
    norms = kinds.count("LayerNormalization") + kinds.count("SkipLayerNormalization")
    assert norms >= 4 and "ReduceMean" not in kinds[5:-5]
    (packed,) = [fusion for fusion in report.fusions if fusion.name == "packed qkv"]
    assert packed.complete, "q, k and v are one product, whatever the library"
    assert file_matches(tmp_path / "m.onnx", model, FP32 if precision == "fp32" else FP16)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "opset"), [("vit", 23), ("transformers_vit", 18), ("torchvision", 23)])
def test_everything_is_fused_for_ort_cuda(family: str, opset: int, tmp_path: Path) -> None:
    """Also of a model that runs by our operators: the file is the same."""
    model = make(family)
    reports = []
    for name in ("plain.onnx", "fused.onnx"):
        reports.append(export_onnx(model, tmp_path / name, opset=opset, target="ort-cuda", precision="fp16"))
        vit_fast.fuse(model, backend="triton")
    fused = {fusion.name: fusion.fused for fusion in reports[0].fusions}
    assert reports[0].verified and all(fusion.complete for fusion in reports[0].fusions)
    assert (fused["MultiHeadAttention"], fused["SkipLayerNormalization"], fused["BiasGelu"]) == (2, 4, 2)
    assert reports[1].verified and reports[1].nodes == reports[0].nodes


@pytest.mark.slow
def test_every_missing_fusion_is_a_visible_line(tmp_path: Path) -> None:
    """transformers' SigLIP pools with torch's nn.MultiheadAttention, which asks for the weights and so decomposes."""
    report = export_onnx(make("transformers_siglip"), tmp_path / "m.onnx", target="ort-cpu")
    (attention,) = [f for f in report.fusions if f.name == "MultiHeadAttention"]
    assert (attention.fused, attention.wanted) == (2, 3)
    assert any("MultiHeadAttention: 2 of 3" in line for line in (*report.warnings, str(report)))
