"""Whole blocks with rotary embeddings, qk-norm, RMSNorm and gates by one operator, against eager in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_execution import DTYPES
from mlp_support import DEVICE, assert_rule
from torch import Tensor

from vit_fast.errors import UnsupportedInputError
from vit_fast.ops import Norm, QkNorm, Rope, layer_norm_mlp, qk_norm_rope
from vit_fast.ops.attention import attention_among
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors, Keys, interleave
from vit_fast.ops.folded import fold
from vit_fast.ops.reference import normalize

WIDTH, HEADS, HIDDEN, B, N = 48, 2, 40, 2, 7


@dataclass(frozen=True)
class Kind:
    """Features of a block."""

    norm: str = "layer_norm"
    gated: bool = False
    qk: str | None = None
    over: str = "head"
    leading: tuple[int, ...] | None = ()
    layout: str = "half"
    prefix: int = 1
    head_dim: int = 16
    keys: str = "all"
    inner: str = "none"

    @property
    def sizes(self) -> tuple[int, int]:
        """Images and tokens of one."""
        return (1, B * N) if self.keys == "packed" else (B, N)

    def among(self) -> Keys | None:
        """Returns the keys as the operator expects them."""
        if self.keys == "packed":  # an empty image, and tokens behind the last
            return Keys(torch.tensor([0, 5, 5, B * N - 1], dtype=torch.int32, device=DEVICE), B * N)
        lengths = torch.tensor([[N], [N - 3]], device=DEVICE)
        return Keys(mask=torch.arange(N, device=DEVICE) < lengths) if self.keys == "mask" else None


KINDS = {
    "DINOv3": Kind(),
    "EVA": Kind(layout="interleaved", gated=True),
    "EVA, a norm inside": Kind(layout="interleaved", gated=True, inner="layer_norm"),
    "a table an image": Kind(leading=(B,), prefix=0, head_dim=20),
    "a table a head": Kind(leading=(1, HEADS)),
    "RMSNorm, SwiGLU": Kind(norm="rms_norm", gated=True, leading=None),
    "qk-norm": Kind(qk="layer_norm", leading=None),
    "qk-norm, rotated": Kind(qk="rms_norm", prefix=5, layout="interleaved"),
    "qk-norm in the matmul, rotated": Kind(qk="rms_norm", prefix=5, head_dim=128),
    "qk-norm in the matmul, interleaved": Kind(qk="layer_norm", leading=(B,), layout="interleaved", head_dim=64),
    "packed": Kind(prefix=0, norm="rms_norm", gated=True, keys="packed"),
    "packed, qk-norm": Kind(qk="rms_norm", leading=None, keys="packed"),
    "padded, rotated": Kind(leading=(B,), keys="mask"),
    "heads of 72 channels": Kind(head_dim=72, prefix=0),
    "heads of 80 channels, interleaved": Kind(head_dim=80, layout="interleaved", prefix=0),
    "over the width": Kind(qk="rms_norm", over="width", norm="rms_norm", head_dim=24),
}


def _make(kind: Kind) -> tuple[list[Tensor], list[str], Rope | None]:
    """Leaves in fp64, with their names, and positions in fp32."""
    C, inner, rms = WIDTH, HEADS * kind.head_dim, kind.norm == "rms_norm"
    shapes: dict[str, Any] = {
        "norm1_weight": (C,), "norm1_bias": None if rms else (C,), "qkv_weight": (3 * inner, C),
        "qkv_bias": (3 * inner,), "proj_weight": (C, inner), "proj_bias": (C,), "scale1": (C,), "norm2_weight": (C,),
        "norm2_bias": None if rms else (C,), "fc1_weight": (HIDDEN, C), "fc1_bias": (HIDDEN,),
        "fc2_weight": (C, HIDDEN), "fc2_bias": (C,), "scale2": (C,),
    }  # fmt: skip
    if kind.gated:
        shapes |= {"gate_weight": (HIDDEN, C), "gate_bias": (HIDDEN,)}
    if kind.inner != "none":
        shapes |= {"inner_weight": (HIDDEN,), "inner_bias": (HIDDEN,)}
    if kind.qk is not None:
        width = (inner if kind.over == "width" else kind.head_dim,)
        shapes |= {"q_weight": width, "k_weight": width}
        if kind.qk == "layer_norm":
            shapes |= {"q_bias": width, "k_bias": width}
    shapes = {"x": (*kind.sizes, C), **{name: shape for name, shape in shapes.items() if shape is not None}}
    leaves = [
        torch.randn(shape, device=DEVICE, dtype=torch.float64) * (1 if name == "x" else 0.3)
        + (1 if name.endswith("norm") or name in ("q_weight", "k_weight", "inner_weight") else 0)
        for name, shape in shapes.items()
    ]
    if kind.leading is None:
        return leaves, [*shapes], None
    angles = 3 * torch.randn(*kind.leading, kind.sizes[1] - kind.prefix, kind.head_dim // 2, device=DEVICE)
    return leaves, [*shapes], Rope(angles.cos(), angles.sin(), kind.prefix, kind.layout)


def _qk_norm(kind: Kind, t: dict[str, Tensor]) -> QkNorm | None:
    if kind.qk is None:
        return None
    norms = (Norm(t[f"{name}_weight"], t.get(f"{name}_bias"), 1e-5, kind.qk) for name in ("q", "k"))
    return QkNorm(*norms, kind.over)


def _eager(kind: Kind, t: dict[str, Tensor], rope: Rope | None) -> Tensor:
    x = t["x"]
    if rope is not None and x.dtype == torch.float64:
        rope = rope._replace(cos=rope.cos.double(), sin=rope.sin.double())
    normed = normalize(x, Norm(t["norm1_weight"], t.get("norm1_bias"), 1e-6, kind.norm))
    qkv = F.linear(normed, t["qkv_weight"], t["qkv_bias"]).unflatten(-1, (3, HEADS, -1))
    qkv = qk_norm_rope(qkv, qk_norm=_qk_norm(kind, t), rope=rope, backend="eager")
    mixed = attention_among(qkv, kind.among(), backend="eager").flatten(2)
    x = x + t["scale1"] * F.linear(mixed, t["proj_weight"], t["proj_bias"])
    return layer_norm_mlp(
        x, t["norm2_weight"], t.get("norm2_bias"), t["fc1_weight"], t["fc1_bias"], t["fc2_weight"], t["fc2_bias"],
        eps=1e-5, activation="silu", layer_scale=t["scale2"], norm=kind.norm, gate_weight=t.get("gate_weight"),
        gate_bias=t.get("gate_bias"), backend="eager",
        inner_norm=None if kind.inner == "none" else Norm(t["inner_weight"], t["inner_bias"], 1e-5, kind.inner),
    )  # fmt: skip


def _tensors(t: dict[str, Tensor]) -> BlockTensors:
    return BlockTensors(**{name: t.get(name) for name in BlockTensors._fields})  # type: ignore[arg-type]  # as named


def _fused(kind: Kind, x: Tensor, tensors: BlockTensors, qk_norm: QkNorm | None, rope: Rope | None) -> Tensor:
    return fused_block(
        x, None, tensors, heads=HEADS, attention_scale=None, eps=(1e-6, 1e-5), norm=kind.norm, activation="silu",
        qk_norm=qk_norm, rope=rope, keys=kind.among(), inner_norm=(kind.inner, 1e-5),
    )[0]  # fmt: skip


def _hold(kind: Kind, dtype: torch.dtype) -> None:
    leaves, names, rope = _make(kind)
    leaves = [leaf.to(dtype) for leaf in leaves]
    grad = torch.randn(*kind.sizes, WIDTH, device=DEVICE).to(dtype)
    inference: list[Tensor] = []

    def run(target: torch.dtype, fused: bool) -> dict[str, Tensor]:
        own = [leaf.to(target).requires_grad_() for leaf in leaves]
        t = dict(zip(names, own))
        y = _fused(kind, t["x"], _tensors(t), _qk_norm(kind, t), rope) if fused else _eager(kind, t, rope)
        found = {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, own, grad.to(target))))}
        if fused:
            with torch.no_grad():
                inference.append(_fused(kind, t["x"], _tensors(t), _qk_norm(kind, t), rope))
        return found

    fused, eager, exact = run(dtype, True), run(dtype, False), run(torch.float64, False)
    assert_rule(fused, eager, exact)
    assert_rule({"y": inference[0]}, eager, exact)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_every_gradient(kind: str, dtype: torch.dtype) -> None:
    _hold(KINDS[kind], dtype)


def _pairs(kind: Kind) -> bool:
    """True if freezing brings the pairs of q and k together."""
    return kind.layout == "half" and (kind.qk is None or (kind.over == "head" and kind.leading is not None))


@pytest.mark.fast_cases(
    "DINOv3-together", "EVA, a norm inside-apart", "RMSNorm, SwiGLU-together", "qk-norm, rotated-apart",
    "qk-norm in the matmul, rotated-together", "qk-norm in the matmul, interleaved-apart",
    "packed-together", "padded, rotated-together", "over the width-apart",
)  # fmt: skip
@pytest.mark.parametrize("together", ["apart", "together"])
@pytest.mark.parametrize("name", KINDS)
def test_folded_beforehand(name: str, together: str) -> None:
    """A folded block, whose matmul may rotate adjacent pairs, against a block that folds in every forward."""
    kind = KINDS[name]
    paired = together == "together" and _pairs(kind)
    leaves, names, rope = _make(kind)
    t = {name: leaf.bfloat16() for name, leaf in zip(names, leaves)}
    qk_norm = _qk_norm(kind, t)
    with torch.no_grad():
        folded = fold(_tensors(t), torch.bfloat16, kind.norm, kind.head_dim if paired else 0, kind.inner)
        tables = interleave(rope, kind.head_dim) if rope is not None and paired else rope
        fused = _fused(kind, t["x"], folded, qk_norm, tables)
        exact = _eager(kind, {name: leaf.double() for name, leaf in t.items()}, rope)
        assert_rule({"y": fused}, {"y": _eager(kind, t, rope)}, {"y": exact})
        if paired and rope is not None:
            with pytest.raises(ValueError, match=r"rope\.layout must be .*'interleaved', got 'interleaved_half'$"):
                _fused(kind, t["x"], _tensors(t), qk_norm, tables)


def test_refuses_keys_and_positions_of_another_size() -> None:
    leaves, names, rope = _make(replace(KINDS["DINOv3"], prefix=0))
    t = {name: leaf.float() for name, leaf in zip(names, leaves)}
    for kind, x, given, error, message in (
        (KINDS["padded, rotated"], t["x"][:, 1:], None, ValueError, r"key_mask must be torch.bool \[2, 6\] .*\[2, 7\]"),
        (KINDS["packed, qk-norm"], t["x"], None, ValueError, r"x must have shape \[1, total, C\].*got \(2, 7, 48\)"),
        (KINDS["DINOv3"], t["x"][:, 1:], rope, ValueError, r"rope\.cos must have shape .*, got \(7, 8\)"),
        (KINDS["DINOv3"], t["x"], rope._replace(cos=rope.cos.clone().requires_grad_()), UnsupportedInputError,
         r"rope\.cos must not require a gradient"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            _fused(kind, x, _tensors(t), None, given)
