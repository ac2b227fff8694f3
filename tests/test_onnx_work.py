"""Operation counts of ONNX files from their graphs match torch's count for the exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import make, own_vit, randomized
from torch import nn

import vit_fast
from vit_fast import set_backend
from vit_fast.apps.data import sample_image
from vit_fast.export.runtime.work import UncountedError, count_work, narrow_precision
from vit_fast.work import Counter


def matches(path: Path, model: nn.Module, batch: int) -> bool:
    """Returns True if the FLOP equal torch's, and the elements except for those of biases."""
    if isinstance(model, vit_fast.VisionTransformer):
        set_backend(model, "sdpa")  # does not store the attention scores
    with torch.no_grad(), Counter() as counter:
        model(torch.zeros(batch, 3, 32, 32))
    found, expected = count_work(path, (batch, 3, 32, 32)), counter.work
    return found.flop == expected.flop and found.elements == pytest.approx(expected.elements, rel=0.02)


@pytest.mark.parametrize("name", ["generic", "plain"])
def test_counts_match_torch(name: str, exported: Any) -> None:
    assert matches(exported(name), exported.model, 1) and matches(exported(name), exported.model, 3)
    assert narrow_precision(exported(name)) is None
    of_one = count_work(exported("fixed"), (1, 3, 32, 32)).flop
    assert count_work(exported("fixed"), (3, 3, 32, 32)).flop == 3 * of_one, "three calls"


INT8 = {"precision": "int8", "calibration": [sample_image()]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("vit", {"opset": 23} | options) for options in ({}, {"target": "tensorrt"}, {"precision": "fp16"})),
        *(("vit", options) for options in ({"target": "ort-cuda"}, INT8, INT8 | {"target": "ort-cpu"})),
        *((family, {}) for family in ("swiglu", "deit_distilled", "dinov2_registers", "hybrid", "timm", "torchvision")),
    ],
)
def test_counts_of_every_form_and_family_match_torch(family: str, options: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = randomized(own_vit(mlp_layer="swiglu", act_layer="silu")) if family == "swiglu" else make(family)
    vit_fast.export.export_onnx(model, path, verify=False, **options)
    assert matches(path, model, 3) and narrow_precision(path) == options.get("precision")


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
