"""A fused timm classifier computes only the token that its head reads, unless something else needs the others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import vit_fast
from vit_fast.blocks.block import run_packed_blocks
from vit_fast.blocks.packed import pack_reasons
from vit_fast.libraries.timm import timm_towers

pytestmark = pytest.mark.skipif(bool(pack_reasons(torch.float32)), reason="; ".join(pack_reasons(torch.float32)))

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.models.VisionTransformer(**(settings | changes)).eval()


def counting(function: Callable[..., Any], flops: list[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            output = function(*args)
        flops.append(counter.get_total_flops())
        return output

    return run


@pytest.mark.parametrize("how", ["fused", "frozen", "compiled"])
@pytest.mark.parametrize(
    "changes", [{}, {"reg_tokens": 3, "qk_norm": True, "init_values": 0.5, "qkv_bias": False}], ids=["plain", "other"]
)
def test_logits_are_those_of_timm(changes: dict[str, Any], how: str) -> None:
    model = build(**changes)
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    function: Any = model
    flops: list[int] = []
    if how == "frozen":
        assert vit_fast.freeze(model)
    if how == "compiled":
        function = torch.compile(model, fullgraph=True, backend=lambda graph, _: counting(graph, flops))
    with torch.no_grad():
        torch.testing.assert_close(function(IMAGES), plain(IMAGES), rtol=1e-5, atol=1e-5)
        if how == "frozen":
            blocks = model.blocks
            tokens = torch.rand(2, 17, 64)
            first = run_packed_blocks(blocks, tokens, outputs=1)
            assert first is not None and first.shape == (2, 1, 64)
            torch.testing.assert_close(first, blocks(tokens)[:, :1], rtol=1e-5, atol=1e-5)
        if how == "compiled":
            counting(plain, flops)(IMAGES)
            assert flops[0] < 0.75 * flops[1], "the last of two blocks computes one token"


CHANGES: dict[str, Callable[[Any], object]] = {
    "written": lambda model: model.blocks[0].attn.qkv.weight.data.mul_(2),
    "replaced": lambda model: setattr(model.blocks[1].mlp.fc1, "bias", torch.nn.Parameter(torch.ones(256))),
    "converted": lambda model: model.bfloat16(),
    "activation": lambda model: setattr(model.blocks[0].mlp, "act", torch.nn.Tanh()),
    "drop path": lambda model: setattr(model.blocks[0], "drop_path1", torch.nn.Dropout(0.0)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "settings", [{}, {"reg_tokens": 3, "init_values": 0.5, "qkv_bias": False}], ids=["plain", "other"]
)
def test_unfrozen_blocks_change_no_bit(
    settings: dict[str, Any], change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs, run = build(**settings), [], timm_towers._run_block
    monkeypatch.setattr(timm_towers, "_run_block", lambda *args: (runs.append(args), run(*args))[1])
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa")
    with torch.no_grad():
        assert torch.equal(model(IMAGES), plain(IMAGES)) and len(runs) == 2
        for each in (model, plain):
            change(each)
        images = IMAGES.to(plain.head.weight.dtype)
        assert torch.equal(model(images), plain(images))


def test_global_hooks_see_the_modules_of_unfrozen_blocks() -> None:
    model, seen = build(), []
    vit_fast.fuse(model, "sdpa")
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        with torch.no_grad():
            model(IMAGES)
    finally:
        handle.remove()
    assert seen.count(torch.nn.GELU) == 2


def _hook(path: str) -> Callable[[Any, list[Tensor]], Any]:
    def register(model: Any, seen: list[Tensor]) -> None:
        model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output))

    return register


def _replace_method(model: Any, seen: list[Tensor]) -> None:
    original = model.forward_head
    model.forward_head = lambda tokens: (seen.append(tokens), original(tokens))[1]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "watch",
    [*map(_hook, ("blocks", "blocks.1", "norm", "blocks.1.mlp.fc2", "blocks.1.attn.proj")), _replace_method],
    ids=["blocks", "last", "norm", "fc2", "proj", "forward_head"],
)
def test_whoever_watches_the_tokens_gets_all(watch: Callable[[Any, list[Tensor]], Any], frozen: bool) -> None:
    model = build()
    vit_fast.fuse(model, "sdpa")
    if frozen:
        vit_fast.freeze(model)
    seen: list[Tensor] = []
    with torch.no_grad():
        expected = model(IMAGES)
        watch(model, seen)
        torch.testing.assert_close(model(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert [tokens.shape[:2] for tokens in seen] == [(2, 17)]


@pytest.mark.parametrize("pool", ["avg", ""])
def test_heads_that_read_more_than_one_token(pool: str) -> None:
    model = build(global_pool=pool)
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa")
    vit_fast.freeze(model)
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), plain(IMAGES), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.forward_features(IMAGES), plain.forward_features(IMAGES), rtol=1e-5, atol=1e-5)


def test_a_model_whose_blocks_were_removed() -> None:
    model = build()
    vit_fast.fuse(model, "sdpa")
    model.blocks = torch.nn.Sequential()
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), model.forward_head(model.forward_features(IMAGES)))


def test_a_subclass_is_left_alone() -> None:
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    before = type(model)
    vit_fast.fuse(model, "sdpa").require_all()
    assert type(model) is before


def test_gradients_and_unfuse() -> None:
    model = build()
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa")
    for each in (model, plain):
        each(IMAGES).sum().backward()
    for (name, own), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)
    vit_fast.unfuse(model)
    assert type(model) is type(plain)
