"""The formula of rotary embeddings, against timm's; invalid positions and norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_support import DEVICE
from timm.layers.pos_embed_sincos import apply_rot_embed_cat

from vit_fast.ops import Norm, QkNorm, Rope, qk_norm_rope

B, N, H, D = 2, 7, 3, 8


@pytest.mark.pairwise
@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("leading", [(), (B,), (B, 1), (1, H), (B, H)])
def test_rotation_is_timms(prefix: int, wide: bool, half: bool, leading: tuple[int, ...]) -> None:
    qkv = torch.randn(B, N, 3, H, D, device=DEVICE)
    angles = 3 * torch.randn(*leading, N - prefix, D // 2, device=DEVICE)
    full = torch.cat((angles, angles), -1) if half else angles.repeat_interleave(2, -1)
    embedding = torch.cat((full.sin(), full.cos()), -1)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    if len(leading) == 1:
        embedding = embedding[:, None]
    q, k = (
        torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], embedding, half=half)), 2) for x in (q, k)
    )
    given = full if wide else angles
    rope = Rope(given.cos(), given.sin(), prefix, "half" if half else "interleaved")
    found = qk_norm_rope(qkv, rope=rope, backend="eager")
    torch.testing.assert_close(found, torch.stack((q, k, v), 2).transpose(1, 3))
    if not leading:
        assert torch.equal(qk_norm_rope(qkv[0], rope=rope, backend="eager"), found[0])


_TABLE = torch.zeros(N, D // 2)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rope": Rope(_TABLE, _TABLE, 1)}, r"rope.cos must have shape \(6, 4\).*, got \(7, 4\)"),
        ({"rope": Rope(_TABLE, _TABLE[:, :3])}, r"equal shapes, got \(7, 4\) and \(7, 3\)"),
        ({"rope": Rope(_TABLE[:, :3], _TABLE[:, :3])}, "8 may replace 4"),
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
def test_invalid_norms_and_positions(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(torch.zeros(B, N, 3, H, D), **choices, backend="eager")
    with pytest.raises(ValueError, match=r"must have shape \[B, N, 3, H, D\] or \[total, 3, H, D\]"):
        qk_norm_rope(torch.zeros(B, N, H, D), backend="eager")
