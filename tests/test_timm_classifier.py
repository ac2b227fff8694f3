"""Tests that the last block of a timm classifier computes one token if nothing needs the others: frozen or compiled."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import vit_fast
from vit_fast.libraries.timm import timm_towers
from vit_fast.ops.packed_linear import can_pack

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN or MKL")

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
OTHER = {"reg_tokens": 3, "init_values": 0.5, "qkv_bias": False, "qk_norm": True}


def build(**changes: Any) -> tuple[Any, Any]:
    """Returns a model of timm, and a fused copy."""
    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = timm.models.VisionTransformer(**(settings | changes)).eval()
    fused = copy.deepcopy(model)
    vit_fast.fuse(fused, "sdpa").require_all()
    return model, fused


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def count_flops(function: Callable[..., Any], flops: list[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            output = function(*args)
        flops.append(counter.get_total_flops())
        return output

    return run


@pytest.mark.parametrize("settings", [{}, OTHER, {"global_pool": "avg"}, {"global_pool": ""}], ids=str)
@torch.no_grad()
def test_outputs_match_timm(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = build(**settings)
    flops: list[int] = []
    expected = count_flops(plain, flops)(IMAGES)
    assert torch.equal(model(IMAGES), expected)
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: count_flops(graph, flops))
    assert_same(compiled(IMAGES), expected)
    assert (flops[1] < 0.75 * flops[0]) == ("global_pool" not in settings), "the last of two blocks computes one token"
    assert vit_fast.freeze(model)
    computed: list[Tensor] = []

    def run_packed_blocks(*args: Any, **options: Any) -> Tensor:
        computed.append(run(*args, **options))
        return computed[-1]

    run = timm_towers.run_packed_blocks
    monkeypatch.setattr(timm_towers, "run_packed_blocks", run_packed_blocks)
    assert_same(model(IMAGES), expected)
    assert [tokens.shape for tokens in computed] == ([] if "global_pool" in settings else [(2, 1, 64)])
    assert_same(model.forward_features(IMAGES), plain.forward_features(IMAGES))


@pytest.mark.parametrize("path", ["blocks", "blocks.1", "norm", "blocks.1.mlp.fc2", "forward_head"])
@torch.no_grad()
def test_hooks_and_replaced_methods_get_all_tokens(path: str) -> None:
    _, model = build()
    vit_fast.freeze(model)
    seen: list[Tensor] = []
    expected, head = model(IMAGES), model.forward_head
    if path == "forward_head":
        model.forward_head = lambda tokens: (seen.append(tokens), head(tokens))[1]
    else:
        model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))
    assert_same(model(IMAGES), expected)
    assert [tokens.shape[:2] for tokens in seen] == [(2, 17)]


@torch.no_grad()
def test_blocks_that_were_replaced_after_fuse_compile() -> None:
    _, model = build()
    for blocks in ([*model.blocks, torch.nn.Identity()], []):
        model.blocks = torch.nn.Sequential(*blocks)
        assert_same(torch.compile(model, fullgraph=True, backend="eager")(IMAGES), model(IMAGES))


def test_a_subclass_which_may_read_other_tokens_stays_unchanged() -> None:
    other = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    before = type(other)
    vit_fast.fuse(other, "sdpa").require_all()
    assert type(other) is before
