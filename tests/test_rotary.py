"""The formula of qk-norm and rotary embeddings, against what timm and transformers do to q and k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DEVICE
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor
from transformers.models.internvl.modeling_internvl import InternVLVisionRMSNorm
from transformers.models.llama4.modeling_llama4 import vision_apply_rotary_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from vit_fast.ops import Norm, QkNorm, Rope, qk_norm_rope

B, N, H, D = 2, 7, 3, 8


def _qkv(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, N, 3, H, D, device=DEVICE, dtype=dtype)


def _angles(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE) * 3


def _each(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the libraries have them, [B, H, N, D]."""
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return q, k, v


def _assert_same(found: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.testing.assert_close(found, torch.stack((q, k, v), 2).transpose(1, 3))


@pytest.mark.pairwise
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("leading", [(), (B,), (B, 1), (1, H), (B, H)])
def test_rotation_is_timms(prefix: int, wide: bool, half: bool, leading: tuple[int, ...]) -> None:
    qkv, angles = _qkv(), _angles(*leading, N - prefix, D // 2)
    full = torch.cat((angles, angles), -1) if half else angles.repeat_interleave(2, -1)
    embedding = torch.cat((full.sin(), full.cos()), -1)
    q, k, v = _each(qkv)
    if len(leading) == 1:
        embedding = embedding[:, None]
    q, k = (
        torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], embedding, half=half)), 2) for x in (q, k)
    )
    given = full if wide else angles
    rope = Rope(given.cos(), given.sin(), prefix, "half" if half else "interleaved")
    _assert_same(qk_norm_rope(qkv, rope=rope, backend="eager"), q, k, v)


def _dinov3(qkv: Tensor, angles: Tensor) -> tuple[Tensor, Rope]:
    q, k, v = _each(qkv)
    theirs = pytest.importorskip("transformers.models.dinov3_vit.modeling_dinov3_vit")  # not before 4.56
    rope = Rope(angles[5:].tile(2).cos(), angles[5:].tile(2).sin(), 5)
    q, k = theirs.apply_rotary_pos_emb(q, k, *rope[:2])
    return torch.stack((q, k, v), 2).transpose(1, 3), rope


def _qwen(qkv: Tensor, angles: Tensor) -> tuple[Tensor, Rope]:
    q, k, v = qkv.unbind(-3)
    rope = Rope(angles.tile(2).cos(), angles.tile(2).sin())
    turned = [apply_rotary_pos_emb_vision(q[i], k[i], *rope[:2]) for i in range(B)]  # of packed tokens
    q, k = map(torch.stack, zip(*turned))
    return torch.stack((q, k, v), -3), rope


def _llama4(qkv: Tensor, angles: Tensor) -> tuple[Tensor, Rope]:
    q, k, v = qkv.unbind(2)
    q, k = vision_apply_rotary_emb(q, k, torch.polar(torch.ones_like(angles), angles))
    return torch.stack((q, k, v), 2), Rope(angles.cos(), angles.sin(), 0, "interleaved")


@pytest.mark.parametrize("library", [_dinov3, _qwen, _llama4])
def test_rotation_is_that_of_transformers(library: Any) -> None:
    qkv = _qkv()
    expected, rope = library(qkv, _angles(N, D // 2))
    torch.testing.assert_close(qk_norm_rope(qkv, rope=rope, backend="eager"), expected)
    if library is _qwen:
        torch.testing.assert_close(qk_norm_rope(qkv[0], rope=rope, backend="eager"), expected[0])


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_norm_of_each_head(kind: str) -> None:
    qkv = _qkv()
    one, two = (Norm(_angles(D), _angles(D) if kind == "layer_norm" else None, 1e-3, kind) for _ in range(2))
    q, k, v = _each(qkv)
    if kind == "layer_norm":
        q, k = (F.layer_norm(x, (D,), norm.weight, norm.bias, 1e-3) for x, norm in ((q, one), (k, two)))
    else:
        q, k = (F.rms_norm(x, (D,), norm.weight, 1e-3) for x, norm in ((q, one), (k, two)))
    _assert_same(qk_norm_rope(qkv, qk_norm=QkNorm(one, two), backend="eager"), q, k, v)


def test_norm_over_the_width_is_that_of_internvl() -> None:
    qkv = _qkv()
    modules = [InternVLVisionRMSNorm(H * D).to(DEVICE) for _ in range(2)]
    for module in modules:
        torch.nn.init.normal_(module.weight)
    q, k = (module(x.flatten(2)).view(x.shape) for module, x in zip(modules, qkv.unbind(2)))
    norms = [Norm(module.weight, None, 1e-6, "rms_norm") for module in modules]
    found = qk_norm_rope(qkv, qk_norm=QkNorm(*norms, "width"), backend="eager")
    torch.testing.assert_close(found, torch.stack((q, k, qkv[:, :, 2]), 2))


_TABLE = torch.zeros(N, D // 2)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rope": Rope(_TABLE, _TABLE, 1)}, r"rope.cos must have shape \(6, 4\).*, got \(7, 4\)"),
        ({"rope": Rope(_TABLE, _TABLE[:, :3])}, r"equal shapes, got \(7, 4\) and \(7, 3\)"),
        ({"rope": Rope(_TABLE[:, :3], _TABLE[:, :3])}, "the last dimension may be 8"),
        ({"rope": Rope(_TABLE, _TABLE, 8)}, "between 0 and 7, the number of tokens, got 8"),
        ({"rope": Rope(_TABLE, _TABLE, 0, "halves")}, "rope.layout must be one of 'half', 'interleaved', got 'halves'"),
        ({"qk_norm": QkNorm(Norm(), Norm(), "heads")}, "qk_norm.over must be one of 'head', 'width', got 'heads'"),
        ({"qk_norm": QkNorm(Norm(kind="rms"), Norm())}, "qk_norm.q must be one of 'layer_norm', 'rms_norm', got 'rms'"),
        ({"qk_norm": QkNorm(Norm(), Norm(torch.ones(H * D)))}, r"qk_norm.k.weight must have shape \(8,\), got \(24,\)"),
        ({"qk_norm": QkNorm(Norm(), Norm(torch.ones(D)), "width")}, r"must have shape \(24,\), got \(8,\)"),
        ({"qk_norm": QkNorm(Norm(bias=torch.ones(D), kind="rms_norm"), Norm())}, "bias must be None for 'rms_norm'"),
        (
            {"qk_norm": QkNorm(Norm(eps=1e-5), Norm())},
            "equal kind and eps, got layer_norm, 1e-05 and layer_norm",
        ),
    ],
)
def test_refusals(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(torch.zeros(B, N, 3, H, D), **choices, backend="eager")
    with pytest.raises(ValueError, match=r"must have shape \[B, N, 3, H, D\] or \[total, 3, H, D\]"):
        qk_norm_rope(torch.zeros(B, N, H, D), backend="eager")
