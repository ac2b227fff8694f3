"""Exports and verifies every model family with different opsets, precisions and targets."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_models import FAMILIES, make

import vit_fast
from vit_fast.export import OnnxRunner, export_onnx, inspect_onnx
from vit_fast.export.options import newest_opset
from vit_fast.libraries.interface.image_model import Outputs
from vit_fast.libraries.known import recognize

RUNS_NEWEST = onnxruntime.__version__ >= "1.24"  # 1.23 loads no opset beyond 23
OPSETS = (18, 20, 23, *([newest_opset()] if RUNS_NEWEST else []))
LIKE_OTHERS = {
    "vit_avg_pool", "clip_quickgelu", "sincos", "timm-siglip", "transformers-dinov2", "transformers-siglip",
    "transformers-two-heads",
}  # fmt: skip
OTHER_ACTIVATIONS = {"clip_quickgelu", "siglip", "transformers-clip", "transformers-siglip"}


def _cases() -> list[Any]:
    """Five of all combinations for each family, each combination for some; in `make test` one for most families."""
    kinds = [*product(OPSETS, ("fp32", "fp16"), ("generic", "ort-cpu"))]
    cases = []
    for i, family in enumerate(FAMILIES):
        for step in range(5):
            marks = [pytest.mark.slow(minutes=True)] if step or family in LIKE_OTHERS else []
            cases.append(pytest.param(family, *kinds[(3 * i + 5 * step) % len(kinds)], marks=marks))
    return cases


@pytest.mark.parametrize(("family", "opset", "precision", "target"), _cases())
def test_family(family: str, opset: int, precision: Any, target: Any, tmp_path: Path) -> None:
    model = make(family)
    report = export_onnx(model, tmp_path / "m.onnx", opset=opset, precision=precision, target=target)
    assert report.verified and [(check.images, check.batch) for check in report.checks] == [(8, 4)]
    assert report.in_fp32 == (), "ordinary values do not overflow"
    proto = onnx.load(tmp_path / "m.onnx")
    halves = {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}
    assert precision == "fp32" or {tensor.data_type for tensor in proto.graph.initializer} <= halves
    assert {entry.domain: entry.version for entry in proto.opset_import}[""] == opset
    kinds = [node.op_type for node in proto.graph.node]
    attentions = 3 if family in ("siglip", "timm-siglip") else 2
    if target == "generic":
        assert {node.domain for node in proto.graph.node} == {""}
        assert kinds.count("Attention") == (attentions if opset >= 23 else 0)
    else:
        assert kinds.count("MultiHeadAttention") == attentions
        assert (kinds.count("BiasGelu") >= 2) == (family not in OTHER_ACTIVATIONS)
    assert kinds.count("LayerNormalization") >= 4 and "ReduceMean" not in kinds[5:-5]
    packed = [t.name for t in proto.graph.initializer if len(t.dims) == 2 and t.dims[1] == 3 * t.dims[0]]
    assert len(packed) == 2, "q, k and v are one matmul, whatever the library"
    assert inspect_onnx(tmp_path / "m.onnx").precision == (None if precision == "fp32" else precision)

    images = torch.randn(5, 3, 32, 32)
    with torch.inference_mode():
        (expected,) = (y.numpy() for y in recognize(model).outputs(images, Outputs()).values())
    got, largest = OnnxRunner(tmp_path / "m.onnx", "cpu")(images.numpy()), max(1, np.abs(expected).max())
    assert got.dtype == np.float32 and expected.std() > 0.01
    np.testing.assert_allclose(got, expected, rtol=0, atol=largest * (2e-5 if precision == "fp32" else 2e-2))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "opset"), [("vit", 23), ("transformers-vit", 18), ("torchvision-vit", 23)])
def test_everything_is_fused_for_ort_cuda(family: str, opset: int, tmp_path: Path) -> None:
    """The file of a fused model is the same."""
    model = make(family)
    reports = []
    for name in ("plain.onnx", "fused.onnx"):
        reports.append(export_onnx(model, tmp_path / name, opset=opset, target="ort-cuda", precision="fp16"))
        vit_fast.fuse(model, backend="triton")
    assert all(report.verified and all(fusion.complete for fusion in report.fusions) for report in reports)
    fused = {fusion.name: fusion.fused for fusion in reports[0].fusions}
    assert (fused["MultiHeadAttention"], fused["SkipLayerNormalization"], fused["BiasGelu"]) == (2, 4, 2)
    assert reports[1].nodes == reports[0].nodes
