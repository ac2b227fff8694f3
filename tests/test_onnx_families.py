"""Every model family x opset x precision x target: exported, verified, and held against eager again here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_models import FAMILIES, SIZE, make, newest_opset_to_run, randomised, transformers_deit_with_teacher

from vit_fast.export import capture as capture_module
from vit_fast.export import export_onnx, exporter
from vit_fast.libraries.known import recognise

OPSETS = tuple(dict.fromkeys((18, 20, 23, newest_opset_to_run())))
ATTENTIONS = {"siglip": 3, "timm_siglip": 3}
# These are others but for a few nodes.
LIKE = {"vit_avg_pool", "sincos", "timm_siglip", "transformers_dinov2", "transformers_siglip"}
OTHER_ACTIVATIONS = {"clip_quickgelu", "siglip", "transformers_clip", "transformers_siglip"}
# transformers' SigLIP pools with torch's nn.MultiheadAttention, which asks for the weights and so decomposes
UNFUSED_POOL = {"transformers_siglip"}


@pytest.fixture(scope="module")
def captured() -> dict[Any, bytes]:
    return {}


@pytest.fixture
def cached_capture(captured: dict[Any, bytes], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """torch's own exporter runs once for both targets: what it gives does not depend on the target."""
    real: Callable[..., ir.Model] = capture_module.capture

    def capture(subject: Any, options: Any) -> ir.Model:
        key = (request.node.callspec.params["family"], options.opset, options.precision)
        if key not in captured:
            captured.clear()
            captured[key] = ir.serde.serialize_model(real(subject, options)).SerializeToString()
        return ir.serde.deserialize_model(onnx.ModelProto.FromString(captured[key]))

    monkeypatch.setattr(exporter, "capture", capture)


def _matrix() -> list[Any]:
    """The whole product; in `make test` one export of most families: every opset, precision and target occurs."""
    kinds = [*product(OPSETS, ("fp32", "fp16"), ("generic", "ort-cpu"))]
    minutes = pytest.mark.slow(minutes=True)  # together
    return [
        pytest.param(family, *kind, marks=[] if kind == kinds[3 * i % len(kinds)] and family not in LIKE else [minutes])
        for i, family in enumerate(FAMILIES)
        for kind in kinds
    ]


@pytest.mark.parametrize(("family", "opset", "precision", "target"), _matrix())
def test_family(family: str, opset: int, precision: str, target: str, tmp_path: Path, cached_capture: None) -> None:
    model = make(family)
    report = export_onnx(model, tmp_path / "m.onnx", opset=opset, precision=precision, target=target)  # type: ignore[arg-type]
    assert report.verified and {check.batch for check in report.checks} == {1, 3, 8}
    assert report.max_error is not None and report.max_error <= (1e-5 if precision == "fp32" else 5e-3)

    proto = onnx.load(tmp_path / "m.onnx")
    assert {entry.domain: entry.version for entry in proto.opset_import}[""] == opset
    domains = {node.domain for node in proto.graph.node}
    kinds = [node.op_type for node in proto.graph.node]
    wanted = ATTENTIONS.get(family, 2)
    if target == "generic":
        assert domains == {""}
        assert kinds.count("Attention") == (wanted if opset >= 23 else 0)
    else:
        assert kinds.count("MultiHeadAttention") == wanted
        assert (kinds.count("BiasGelu") >= 2) == (family not in OTHER_ACTIVATIONS)
    norms = kinds.count("LayerNormalization") + kinds.count("SkipLayerNormalization")
    assert norms >= 4 and "ReduceMean" not in kinds[5:-5]

    subject = recognise(model)
    images = torch.randn(5, 3, SIZE, SIZE)
    with torch.inference_mode():
        expected = subject.forward(images, "logits").numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    assert got.dtype == np.float32 and expected.std() > 0.01
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(got - expected).max() <= (2e-5 if precision == "fp32" else 2e-2) * scale


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("family", ["vit", "transformers_vit", "torchvision"])
def test_everything_is_fused_for_ort_cuda(family: str, opset: int, tmp_path: Path) -> None:
    report = export_onnx(make(family), tmp_path / "m.onnx", opset=opset, target="ort-cuda", precision="fp16")
    fused = {fusion.name: fusion.fused for fusion in report.fusions}
    assert report.verified and all(fusion.complete for fusion in report.fusions)
    assert (fused["MultiHeadAttention"], fused["SkipLayerNormalization"], fused["BiasGelu"]) == (2, 4, 2)


@pytest.mark.slow
def test_every_missing_fusion_is_a_visible_line(tmp_path: Path) -> None:
    report = export_onnx(make("transformers_siglip"), tmp_path / "m.onnx", target="ort-cpu")
    (attention,) = [f for f in report.fusions if f.name == "MultiHeadAttention"]
    assert (attention.fused, attention.wanted) == (2, 3)
    assert any("MultiHeadAttention: 2 of 3" in warning for warning in report.warnings)
    assert "MultiHeadAttention: 2 of 3" in str(report)


@pytest.mark.slow
def test_a_model_with_two_heads_gives_their_logits(tmp_path: Path) -> None:
    """DeiT with its teacher's head: two linears, none of them called classifier."""
    model = randomised(transformers_deit_with_teacher())
    report = export_onnx(model, tmp_path / "m.onnx", target="ort-cpu")
    assert report.verified and report.output == "logits" and report.top1_agreement is not None
    images = torch.randn(2, 3, SIZE, SIZE)
    with torch.inference_mode():
        expected = model(pixel_values=images).logits.numpy()
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    assert got.shape == (2, 10)
    np.testing.assert_allclose(got, expected, atol=1e-5 * max(1, np.abs(expected).max()))
