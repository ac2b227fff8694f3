"""Lower bounds on the work of a model: by formula, by torch's counter, and by hand."""

from __future__ import annotations

import pytest
import torch

import vit_fast
from vit_fast.benchmarks import operators
from vit_fast.benchmarks.models import resolve
from vit_fast.config import RopeConfig
from vit_fast.work import Counter, Work, parameter_count, total, work

VARIANTS = {
    "registers, no bias": {"reg_tokens": 4, "qkv_bias": False},
    "distilled": {"distilled": True},
    "map": {"global_pool": "map", "class_token": False},
    "map of all tokens": {"global_pool": "map", "pool_include_prefix": True, "pool_mlp_ratio": 2.5},
    "every token": {"global_pool": "", "num_classes": 5},
    "no head": {"num_classes": 0},
    "hybrid": {"stem_channels": (8, 16), "patch_size": 2},
    "gated": {
        "mlp_layer": "swiglu", "act_layer": "silu", "scale_attn_norm": True, "scale_mlp_norm": True, "qk_norm": True,
        "rope": RopeConfig(),
    },
    "clip": {"pre_norm": True, "img_size": (40, 24)},
}  # fmt: skip


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_formula_is_what_torch_counts(overrides):
    model = vit_fast.create_model("vit_test", backend="sdpa", **overrides).eval()
    with torch.no_grad(), Counter() as counter:
        model(torch.randn(3, 3, *model.config.image_hw))
    assert total(work(model.config, 3).values()) == counter.work
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


def test_layers_that_torch_runs_as_one_operator_are_counted():
    """3 images of 7 tokens, 8 wide, 16 hidden: four linears and the attention; in evaluation torch has a fast path."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), Counter() as counter:
        layer(torch.randn(3, 7, 8))
    assert counter.work.flop == 2 * 21 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 3 * 7 * 7 * 8
    assert torch.backends.mha.get_fastpath_enabled()


def test_floor_is_the_longer_of_computing_and_moving():
    """1e9 operations at 1 TFLOP/s take 1 ms, 1e6 elements of 2 bytes at 1 GB/s take 2 ms."""
    assert Work(10**9, 10**6).floor_ms(2, 1.0, 1.0) == pytest.approx(2.0)
    assert Work(10**9, 10**6).floor_ms(4, 1.0, 100.0) == pytest.approx(1.0)


@pytest.mark.parametrize("word", ["attention:7x2x16", "attention:7x2x16:bias", "mlp:7x32x48"])
def test_operators_have_the_flop_that_torch_counts(word: str) -> None:
    operator = resolve(word)(None)[0].operator
    model = operators.build("sdpa", operator, operator.weights(), torch.device("cpu"))
    with torch.no_grad(), Counter() as counter:
        model(torch.randn(2, *operator.shape))
    assert total(operator.parts(2, False).values()).flop == counter.work.flop


def test_operators_have_the_work_computed_by_hand() -> None:
    """A layer of ViT-B at batch 2: q k^T and p v, and two matmuls of 394 tokens."""
    rows = 2 * 197
    words = ("attention:197x12x64", "attention:197x12x64:bias", "mlp:197x768x3072")
    attention, biased, mlp = (resolve(word)(None)[0].operator for word in words)
    forward = Work(4 * 2 * 12 * 197 * 197 * 64, 4 * rows * 768)
    assert attention.parts(2, False) == {"attention": forward}
    assert attention.parts(2, True) == {"attention": Work(forward.flop * 5 // 2, 8 * rows * 768)}
    gradients = 8 * rows * 768 + 2 * 12 * 197**2  # also reads the bias, and writes its gradient
    assert biased.parts(2, True) == {"attention": Work(forward.flop * 5 // 2, gradients)}
    flop, weights = 2 * rows * 768 * 3072, 768 * 3072
    assert mlp.parts(2, False) == {"linears": Work(2 * flop, 2 * rows * 768 + 2 * rows * 3072 + 2 * weights)}
    assert mlp.parts(2, True) == {"linears": Work(4 * flop, 3 * rows * 768 + 6 * rows * 3072 + 4 * weights)}
