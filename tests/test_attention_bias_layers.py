"""Attention layers of timm, rebuilt on the operator with their weights: output and gradients, also of the tables."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DEVICE, assert_as_exact_as_eager
from timm.layers import RelPosBias
from timm.models import beit, levit, swin_transformer, swin_transformer_v2, vision_transformer_relpos
from timm.models import vision_transformer_sam as sam
from torch import Tensor, nn

from vit_fast import ops
from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR

GRID, HEADS, WIDTH = 4, 2, 32
TOKENS = GRID * GRID


def _mask() -> Tensor:
    """The window mask of shifted windows."""
    block = swin_transformer.SwinTransformerBlock(WIDTH, (2 * GRID, 2 * GRID), HEADS, window_size=GRID, shift_size=2)
    return block.attn_mask


def _packed(layer: Any, x: Tensor) -> Tensor:
    bias = layer.qkv.bias
    if getattr(layer, "q_bias", None) is not None:
        bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
    return F.linear(x, layer.qkv.weight, bias).unflatten(-1, (3, HEADS, -1))


def _swin(layer: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    bias = layer._get_rel_pos_bias()
    mixed = ops.attention_qkvpacked(_packed(layer, x), scale=layer.scale, bias=bias, window_mask=mask, **options)
    return layer.proj(mixed.flatten(2))


def _swin_v2(layer: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    q, k, v = _packed(layer, x).transpose(1, 3).unbind(2)
    scale = layer.logit_scale.clamp(max=4.605170185988091).exp().flatten()
    table = layer.cpb_mlp(layer.relative_coords_table).view(-1, HEADS)
    bias = 16 * table[layer.relative_position_index].sigmoid().permute(2, 0, 1)
    terms = {"scale": scale, "bias": bias, "window_mask": mask}
    mixed = ops.attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, **terms, **options)
    return layer.proj(mixed.transpose(1, 2).flatten(2))


def _beit(layer: Any, x: Tensor, **options: Any) -> Tensor:
    return layer.proj(ops.attention_qkvpacked(_packed(layer, x), bias=layer._get_rel_pos_bias(), **options).flatten(2))


def _rel_pos(layer: Any, x: Tensor, **options: Any) -> Tensor:
    bias = layer.rel_pos.get_bias()
    return layer.proj(ops.attention_qkvpacked(_packed(layer, x), bias=bias, **options).flatten(2))


def _sam(layer: Any, x: Tensor, **options: Any) -> Tensor:
    height, width = x.shape[1:3]
    qkv = _packed(layer, x.flatten(1, 2))
    q = qkv[:, :, 0].unflatten(1, (height, width))  # [B, h, w, H, D]
    rel_h = torch.einsum("bhwnd,hkd->bnhwk", q, sam.get_rel_pos(height, height, layer.rel_pos_h)).flatten(2, 3)
    rel_w = torch.einsum("bhwnd,wkd->bnhwk", q, sam.get_rel_pos(width, width, layer.rel_pos_w)).flatten(2, 3)
    mixed = ops.attention_qkvpacked(qkv, rel=(rel_h, rel_w), **options)
    return layer.proj(mixed.flatten(2)).view(x.shape)


def _levit(layer: Any, x: Tensor, **options: Any) -> Tensor:
    """The values are wider than q and k, which get zeros."""
    q, k, v = layer.qkv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([16, 16, 32], -1)
    q, k = F.pad(q, (0, 16)), F.pad(k, (0, 16))
    bias = layer.attention_biases[:, layer.attention_bias_idxs]
    return layer.proj(ops.attention(q, k, v, scale=layer.scale, bias=bias, **options).transpose(1, 2).flatten(2))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], bool, tuple[int, ...]]] = {
    "swin": (lambda: swin_transformer.WindowAttention(WIDTH, HEADS, window_size=GRID), _swin, False, (TOKENS,)),
    "swin, shifted": (lambda: swin_transformer.WindowAttention(WIDTH, HEADS, window_size=GRID), _swin, True, (TOKENS,)),
    "swin v2": (lambda: swin_transformer_v2.WindowAttention(WIDTH, (GRID, GRID), HEADS), _swin_v2, True, (TOKENS,)),
    "beit": (
        lambda: beit.Attention(WIDTH, HEADS, qkv_bias=True, window_size=(GRID, GRID)), _beit, False, (TOKENS + 1,),
    ),
    "relpos": (
        lambda: vision_transformer_relpos.RelPosAttention(
            WIDTH, HEADS, rel_pos_cls=functools.partial(RelPosBias, (GRID, GRID))
        ), _rel_pos, False, (TOKENS,),
    ),
    "sam, window": (lambda: sam.Attention(WIDTH, HEADS, use_rel_pos=True, input_size=(3, 5)), _sam, False, (3, 5)),
    "sam, global": (lambda: sam.Attention(WIDTH, HEADS, use_rel_pos=True, input_size=(9, 8)), _sam, False, (9, 8)),
    "levit": (lambda: levit.Attention(WIDTH, 16, HEADS, attn_ratio=2, resolution=GRID), _levit, False, (TOKENS,)),
}  # fmt: skip


def _run(function: Callable[..., Tensor], layer: nn.Module, x: Tensor, do: Tensor, mask: Any) -> dict[str, Tensor]:
    """Returns the output and the gradients of x and of all parameters that the layer uses."""
    y = function(x) if mask is None else function(x, mask=mask.to(x.dtype))
    leaves = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(y, [*leaves.values()], do.to(y.dtype), allow_unused=True)
    return {"y": y.detach()} | {name: g for name, g in zip(leaves, gradients) if g is not None}


@pytest.mark.fast_cases(*(f"{name}-sdpa" for name in LAYERS), "swin, shifted-triton")
@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_timm(name: str, backend: str) -> None:
    build, rebuilt, is_masked, shape = LAYERS[name]
    layer = build().to(DEVICE)
    layer.eval()  # LeViT's returns None
    for parameter in layer.parameters():  # tables and biases are 0 at first
        nn.init.normal_(parameter, std=0.3)
    mask = _mask().to(DEVICE) if is_masked else None
    x, do = torch.randn(2, 4, *shape, WIDTH, device=DEVICE)
    exact = copy.deepcopy(layer).double()
    wide = x.double().requires_grad_()
    expected = _run(exact, exact, wide, do, mask)
    if backend != "triton":
        found = _run(lambda x, **kw: rebuilt(exact, x, **kw, backend=backend), exact, wide, do, mask)
        torch.testing.assert_close(found, expected)
        return
    narrow = x.requires_grad_()
    same = _run(layer, layer, narrow, do, mask)
    found = _run(lambda x, **kw: rebuilt(layer, x, **kw, backend=backend), layer, narrow, do, mask)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        factor = FORWARD_FACTOR if name == "y" else GRADIENT_FACTOR
        assert_as_exact_as_eager(name, value, same[name], expected[name], factor)
