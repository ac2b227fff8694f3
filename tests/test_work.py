"""Lower bounds on the work of a model: by formula, by torch's counter, and by hand."""

from __future__ import annotations

import pytest
import torch

import vit_fast
from vit_fast.config import RopeConfig
from vit_fast.variants import get_variant
from vit_fast.work import Counter, Work, total, work

VARIANTS = {
    "plain": {},
    "registers": {"reg_tokens": 4, "class_token": True},
    "no bias, two heads": {"qkv_bias": False, "distilled": True},
    "map": {"global_pool": "map", "class_token": False},
    "map of all tokens": {"global_pool": "map", "pool_include_prefix": True, "pool_mlp_ratio": 2.5},
    "mean": {"global_pool": "avg"},
    "every token": {"global_pool": "", "num_classes": 5},
    "no head": {"num_classes": 0},
    "hybrid": {"stem_channels": (8, 16), "patch_size": 2},
    "gated": {
        "mlp_layer": "swiglu",
        "act_layer": "silu",
        "scale_attn_norm": True,
        "scale_mlp_norm": True,
        "rope": RopeConfig(),
        "qk_norm": True,
    },
    "clip": {"pre_norm": True, "img_size": (40, 24)},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_formula_is_what_torch_counts(overrides, batch):
    model = vit_fast.create_model("vit_test", backend="sdpa", **overrides).eval()
    with torch.no_grad(), Counter() as counter:
        model(torch.randn(batch, 3, *model.config.image_hw))
    assert total(work(model.config, batch).values()) == counter.work


def test_a_products_work_by_hand():
    """A linear layer with 6 rows, 4 to 5 channels: 240 operations; 24 + 20 + 5 + 30 elements."""
    with torch.no_grad(), Counter() as counter:
        torch.nn.Linear(4, 5)(torch.randn(6, 4))
    assert counter.work == Work(240, 79)


def test_layers_that_torch_runs_as_one_operator_are_counted():
    """3 images of 7 tokens, 8 wide, 16 hidden: four linears and the attention; in evaluation torch has a fast path."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad(), Counter() as counter:
        layer(torch.randn(3, 7, 8))
    assert counter.work.flop == 2 * 21 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 3 * 7 * 7 * 8
    assert torch.backends.mha.get_fastpath_enabled()


def test_floor_is_the_longer_of_computing_and_moving():
    """1e9 operations at 1 TFLOP/s: 1 ms; 1e6 elements of 2 bytes at 1 GB/s: 2 ms, of 4 bytes at 100 GB/s: 0.04 ms."""
    assert Work(10**9, 10**6).floor_ms(2, 1.0, 1.0) == pytest.approx(2.0)
    assert Work(10**9, 10**6).floor_ms(4, 1.0, 100.0) == pytest.approx(1.0)


def test_vit_b_by_hand():
    config = get_variant("vit_base_patch16_224").config
    parts = work(config, 256)
    assert parts["linears"].flop == 256 * 197 * config.depth * 24 * 768**2
    assert parts["attention"].elements == 256 * 197 * config.depth * 4 * 768
