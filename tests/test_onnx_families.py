"""Every model family is exported and verified with changing opset, precision and target; operation counts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import FAMILIES, SIZE, make
from torch import nn

import vit_fast
from vit_fast import set_backend
from vit_fast.export import OnnxRunner, export_onnx
from vit_fast.export.options import newest_opset
from vit_fast.export.runtime.work import UncountedError, count_work, narrow_precision
from vit_fast.libraries.known import recognize
from vit_fast.work import Counter

RUNS_NEWEST = onnxruntime.__version__ >= "1.24"  # 1.23 loads no opset beyond 23
OPSETS = (18, 20, 23, *([newest_opset()] if RUNS_NEWEST else []))
LIKE_OTHERS = {
    "vit_avg_pool", "clip_quickgelu", "sincos", "timm_siglip", "transformers_dinov2", "transformers_siglip",
    "transformers_two_heads",
}  # fmt: skip
COUNTED = {"vit", "deit_distilled", "dinov2_registers", "hybrid", "timm", "torchvision"}
OTHER_ACTIVATIONS = {"clip_quickgelu", "siglip", "transformers_clip", "transformers_siglip"}


def matches(path: Path, model: nn.Module, batch: int) -> bool:
    """Returns True if the FLOP equal torch's, and the elements except for those of biases."""
    if isinstance(model, vit_fast.VisionTransformer):
        set_backend(model, "sdpa")  # does not store the attention scores
    with torch.no_grad(), Counter() as counter:
        model(torch.zeros(batch, 3, 32, 32))
    found, expected = count_work(path, (batch, 3, 32, 32)), counter.work
    return found.flop == expected.flop and found.elements == pytest.approx(expected.elements, rel=0.02)


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
    assert report.verified and [(check.images, check.batch) for check in report.checks] == [(8, 5)]
    proto = onnx.load(tmp_path / "m.onnx")
    assert {entry.domain: entry.version for entry in proto.opset_import}[""] == opset
    kinds = [node.op_type for node in proto.graph.node]
    attentions = 3 if family in ("siglip", "timm_siglip") else 2
    if target == "generic":
        assert {node.domain for node in proto.graph.node} == {""}
        assert kinds.count("Attention") == (attentions if opset >= 23 else 0)
    else:
        assert kinds.count("MultiHeadAttention") == attentions
        assert (kinds.count("BiasGelu") >= 2) == (family not in OTHER_ACTIVATIONS)
    assert kinds.count("LayerNormalization") >= 4 and "ReduceMean" not in kinds[5:-5]
    (packed,) = [fusion for fusion in report.fusions if fusion.name == "packed qkv"]
    assert packed.complete, "q, k and v are one matmul, whatever the library"
    assert target != "generic" or family not in COUNTED or matches(tmp_path / "m.onnx", model, 3)
    assert narrow_precision(tmp_path / "m.onnx") == (None if precision == "fp32" else precision)

    images = torch.randn(5, 3, SIZE, SIZE)
    with torch.inference_mode():
        expected = recognize(model).forward(images, "logits").numpy()
    got, largest = OnnxRunner(tmp_path / "m.onnx", "cpu")(images.numpy()), max(1, np.abs(expected).max())
    assert got.dtype == np.float32 and expected.std() > 0.01
    np.testing.assert_allclose(got, expected, rtol=0, atol=largest * (2e-5 if precision == "fp32" else 2e-2))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "opset"), [("vit", 23), ("transformers_vit", 18), ("torchvision", 23)])
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


@pytest.mark.slow
def test_every_missing_fusion_is_a_visible_line(tmp_path: Path) -> None:
    """The pooling of transformers' SigLIP asks nn.MultiheadAttention for the attention weights, which decomposes it."""
    report = export_onnx(make("transformers_siglip"), tmp_path / "m.onnx", target="ort-cpu")
    (attention,) = [f for f in report.fusions if f.name == "MultiHeadAttention"]
    assert (attention.fused, attention.wanted) == (2, 3)
    assert any("MultiHeadAttention: 2 of 3" in warning for warning in report.warnings)


@pytest.mark.parametrize("name", ["generic", "plain"])
def test_counts_match_torch(name: str, exported: Any) -> None:
    assert matches(exported(name), exported.model, 1) and matches(exported(name), exported.model, 3)
    assert narrow_precision(exported(name)) is None
    of_one = count_work(exported("fixed"), (1, 3, 32, 32)).flop
    assert count_work(exported("fixed"), (3, 3, 32, 32)).flop == 3 * of_one, "three calls"


@pytest.mark.parametrize(
    ("operator", "attributes", "reason"),
    [
        ("Einsum", {"equation": "bchw,wk->bchk"}, "Einsum: no formula"),
        ("MatMulNBits", {"domain": "com.microsoft"}, "MatMulNBits"),
        ("Attention", {"domain": "com.microsoft", "num_heads": 2}, "packed qkv|cannot be inferred"),
        ("Anything", {"domain": "mine"}, "mine.Anything|cannot be inferred"),
    ],
)
def test_operators_without_a_formula_raise(operator: str, attributes: Any, reason: str, tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4, 6, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weight = onnx.numpy_helper.from_array(np.ones((8, 5), np.float32), "w")
    graph = helper.make_graph([helper.make_node(operator, ["x", "w"], ["y"], **attributes)], "g", [x], [y], [weight])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(UncountedError, match=reason):
        count_work(tmp_path / "m.onnx", (2, 4, 6, 8))
    with pytest.raises(UncountedError, match="must have 3 axes, got 4"):
        count_work(tmp_path / "m.onnx", (2, 4, 6))
