"""Arguments of a wrong type: every public function raises an error that names the argument and its value."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vit_fast
from vit_fast import export, figures, ops

MODEL = vit_fast.create_model("vit_test")
IMAGES = torch.zeros(1, 3, 32, 32)
q = torch.zeros(1, 2, 5, 16)
PACKED, LENGTHS = torch.zeros(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
MLP = dict(zip(
    ("x", "norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "layer_scale"),
    (torch.zeros(shape) for shape in ((1, 5, 16), 16, 16, (32, 16), 32, (16, 32), 16, 16)),
))  # fmt: skip
# Function, valid arguments, and names of arguments to replace: NAME? also accepts None, NAME' also a string.
CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (vit_fast.fuse, {"model": MODEL, "backend": "sdpa"}, "model backend"),
    (vit_fast.unfuse, {"model": MODEL}, "model"),
    (vit_fast.freeze, {"model": MODEL}, "model"),
    (vit_fast.unfreeze, {"model": MODEL}, "model"),
    (vit_fast.set_backend, {"model": MODEL, "backend": "sdpa"}, "model backend"),
    (vit_fast.compile, {"model": MODEL, "mode": "default"}, "model mode"),
    (vit_fast.warm_up, {"model": MODEL, "batch_sizes": [1], "example": IMAGES}, "model batch_sizes example"),
    (vit_fast.calibrate, {"model": MODEL, "images": IMAGES}, "model images"),
    (vit_fast.create_model, {"name": "vit_test"}, "name backend weights device dtype precision depth rope pool_heads"),
    (vit_fast.list_models, {"pattern": "*"}, "pattern"),
    (vit_fast.load, {"source": "m.safetensors"}, "source"),
    (vit_fast.load_weights, {"model": MODEL, "source": {}}, "model source"),
    (vit_fast.save, {"model": MODEL, "path": "m.safetensors"}, "model path"),
    (vit_fast.VisionTransformer, {"config": MODEL.config}, "config data_config"),
    (vit_fast.ViTConfig, {}, "depth img_size mlp_ratio stem_channels rope class_token pool_heads global_pool"),
    (vit_fast.ViTConfig.from_dict, {"fields": {}}, "fields"),
    (vit_fast.DataConfig, {}, "mean std crop_pct interpolation"),
    (vit_fast.DataConfig.from_dict, {"fields": {}}, "fields"),
    (vit_fast.optimize, {"model": MODEL, "example": IMAGES}, "model example allow? progress? latency_or_throughput"),
    (vit_fast.load_optimized, {"path": "m.json", "model": MODEL}, "path"),
    (vit_fast.GraphRunner, {"model": MODEL, "example": IMAGES, "fallback": "eager"},
     "model example batch_sizes budgets fallback"),
    (vit_fast.budgets_for, {"sizes": [(2, 2)]}, "sizes patch_size count"),
    (lambda images: vit_fast.GraphRunner(MODEL, IMAGES, fallback="eager")(images), {"images": IMAGES}, "images"),
    (ops.attention, {"q": q, "k": q, "v": q}, "q k v bias? window_mask? rel? scale? backend"),
    (ops.attention_qkvpacked, {"qkv": torch.zeros(1, 5, 3, 2, 16)}, "qkv backend"),
    (ops.attention_varlen, {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens": LENGTHS, "max_seqlen": 5},
     "q k v cu_seqlens"),
    (ops.attention_varlen_qkvpacked, {"qkv": torch.zeros(5, 3, 2, 16), "cu_seqlens": LENGTHS, "max_seqlen": 5},
     "qkv cu_seqlens"),
    (ops.qk_norm_rope, {"qkv": torch.zeros(1, 5, 3, 2, 16)}, "qkv"),
    (ops.scaled_dot_product_attention, {"query": q, "key": q, "value": q}, "query key value"),
    (ops.layer_norm_mlp, MLP, " ".join(MLP) + " activation"),
    (export.export_onnx, {"model": MODEL, "path": "m.onnx"},
     "model path' opset? precision target output? layers images? data_config? class_names?'"),
    (export.OnnxRunner, {"path": "m.onnx"}, "path device"),
    (export.inspect_onnx, {"path": "m.onnx"}, "path"),
    (figures.filters, {"model": MODEL}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        pytest.param(function, arguments, name, id=f"{getattr(function, '__qualname__', '')}-{name}")
        for function, arguments, names in CALLS
        for name in names.split()
    ],
)
def test_errors_name_the_argument_and_its_value(function, arguments, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for names of files
    refused, accepted = 0, [*([None] if "?" in name else []), *(["text"] if "'" in name else [])]
    name = name.rstrip("?'")
    for bad in (bad for bad in (None, 5, "text", object()) if bad not in accepted):
        try:
            function(**arguments | {name: bad})
        except (TypeError, ValueError, OSError) as error:
            refused += 1
            said = str(error)
            named = re.search(rf"\b{name}\b", said) or repr(bad).strip("'") in said
            assert named or said.startswith(("expected str", "argument should be a str")), said  # of Python, for a path
            came = [str(bad), repr(bad), type(bad).__name__, f"a {type(bad).__name__}"]
            assert any(word in said for word in came), said
    assert refused >= 2
    assert list(tmp_path.iterdir()) == []
