"""The block operator: forward and gradients match fp64, also if folded, and unsupported calls are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_execution import DTYPES
from mlp_support import DEVICE, Case, assert_rule, check_case, make_block

from vit_fast import UnsupportedInputError
from vit_fast.ops.descriptions import interleave
from vit_fast.ops.folded import fold

SILU = {"activation": "silu"}
KINDS: dict[str, dict[str, Any]] = {
    "DINOv3": SILU | {"leading": ()},
    "EVA": SILU | {"leading": (), "layout": "interleaved", "gated": True},
    "EVA, a norm inside": SILU
    | {"leading": (), "layout": "interleaved", "gated": True, "inner_norm": "layer_norm"},
    "a table per image": {"leading": (2,), "prefix": 0, "head_dim": 20},
    "a table per head": {"leading": (1, 2)},
    "RMSNorm, SwiGLU": SILU | {"norm": "rms_norm", "gated": True},
    "qk-norm": {"qk": "layer_norm"},
    "qk-norm, rotated": {"leading": (), "qk": "rms_norm", "prefix": 5, "layout": "interleaved"},
    "qk-norm in the matmul, rotated": {"leading": (), "qk": "rms_norm", "prefix": 5, "head_dim": 128},
    "qk-norm in the matmul, interleaved": {
        "qk": "layer_norm", "leading": (2,), "layout": "interleaved", "head_dim": 64,
    },
    "packed": SILU | {"leading": (), "prefix": 0, "norm": "rms_norm", "gated": True, "keys": "packed"},
    "packed, qk-norm": {"qk": "rms_norm", "keys": "packed"},
    "padded, rotated": {"leading": (2,), "keys": "mask"},
    "nothing optional": {},
    "heads of 72 channels": {"leading": (), "head_dim": 72, "prefix": 0},
    "heads of 80 channels, interleaved": {"leading": (), "head_dim": 80, "layout": "interleaved", "prefix": 0},
    "qk-norm over the width": {
        "leading": (), "qk": "rms_norm", "over": "width", "norm": "rms_norm", "head_dim": 24,
    },
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_every_gradient(kind: str, dtype: torch.dtype) -> None:
    case = make_block(dtype, **KINDS[kind])
    if kind == "nothing optional":
        case = case.but(**{name: None for name, leaf in case.leaves().items() if leaf.dim() == 1})
    check_case(case)
    check_case(case, torch.float32, inference=True)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tokens", ["usual", "constant", "far from 0", "wide"])
def test_attention_alone(tokens: str, residual: bool, norm: str, dtype: torch.dtype) -> None:
    """Every third token constant, all with a mean of 1000 spreads, or wider than a program reads at once."""
    case = make_block(dtype, width=2100 if tokens == "wide" else 32, norm=norm, residual=residual).half(1)
    with torch.no_grad():
        if tokens == "constant":
            case.x[:, ::3] = 3.0
        elif tokens == "far from 0":
            case.x.mul_(5.0).add_(1000)
    check_case(case)


def _folded(case: Case, rope_head: int = 0) -> Case:
    o, rope = case.options, case.options.get("rope")
    inner = "none" if o["inner_norm"] is None else o["inner_norm"][0]
    t = fold(case.t, case.x.dtype, o["norm"], rope_head, inner)
    return replace(case, t=t, options=o | {"rope": interleave(rope, rope_head) if rope and rope_head else rope})


@pytest.mark.fast_cases(
    "DINOv3-together", "EVA, a norm inside-apart", "RMSNorm, SwiGLU-together", "qk-norm, rotated-apart",
    "qk-norm in the matmul, rotated-together", "qk-norm in the matmul, interleaved-apart",
    "packed-together", "padded, rotated-together", "qk-norm over the width-apart",
)  # fmt: skip
@pytest.mark.parametrize("together", ["apart", "together"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_folded_blocks(name: str, together: str) -> None:
    """Folding may make the channels of rotated pairs adjacent, so that the matmul rotates them."""
    kind = {"leading": None, "layout": "half", "qk": None, "over": "head"} | KINDS[name]
    can_pair = kind["qk"] is None or (kind["over"] == "head" and kind["leading"] is not None)
    case = make_block(torch.bfloat16, **KINDS[name])
    paired = together == "together" and kind["layout"] == "half" and can_pair
    folded = _folded(case, kind.get("head_dim", 16) if paired else 0)
    exact = case.to(torch.float64).forward("eager")
    assert_rule({"y": folded.forward("triton")}, {"y": case.forward("eager")}, {"y": exact})
    if paired and kind["leading"] is not None:
        with pytest.raises(ValueError, match=r"rope\.layout must be .*'interleaved', got 'interleaved_half'$"):
            replace(folded, t=case.t).fused()


@pytest.mark.parametrize("gamma", [1e-5, 1e-6, 3e-8])
def test_a_small_layer_scale_keeps_its_branch(gamma: float) -> None:
    """Without a residual, as before drop path, the branch is fp32 like torch's: fp16 would round it to a few bits."""
    case = make_block(torch.float32, residual=False).half(1)
    case = case.but(scale1=torch.full_like(case.t.proj_bias, gamma).requires_grad_())
    with torch.autocast(DEVICE, torch.float16):
        y, eager = case.forward("triton"), case.forward("eager")
    exact = case.to(torch.float64).forward("eager")
    assert y.dtype == eager.dtype == torch.float32
    assert (y - exact).abs().max() <= 2 * (eager - exact).abs().max()
    assert torch.autograd.grad(y.sum(), case.t.scale1)[0].isfinite().all()


def test_an_empty_batch() -> None:
    case = make_block(torch.float16)
    found = case.but(x=case.x[:0].detach().requires_grad_(), grad=case.grad[:0]).run("triton")
    assert found["y"].shape == found["d x"].shape == (0, *case.x.shape[1:])
    assert not any(gradient.any() for gradient in found.values())


def test_unsupported_calls_are_refused() -> None:
    case = make_block(torch.bfloat16)
    rope: Any = make_block(torch.bfloat16, leading=(), prefix=0).options["rope"]
    mask, packed = (make_block(torch.bfloat16, keys=keys).options["keys"] for keys in ("mask", "packed"))
    shorter = case.x[:, 1:]
    for given, options, message in (
        (case.but(qkv_weight=case.t.qkv_weight.double()), {}, r"weight must be .*, got torch\.float64"),
        (case.but(x=case.x[:, :0]), {}, "must have at least one token"),
        (case.but(x=case.x[..., 1:]), {}, r"x must have 48 channels .*, got 47"),
        (_folded(case), {}, "folded weights have no gradients"),
        (case.but(x=shorter), {"keys": mask}, r"key_mask must be torch.bool \[2, 6\] .*\[2, 7\]"),
        (case, {"keys": packed}, r"x must have shape \[1, total, C\].*got \(2, 7, 48\)"),
        (case.but(x=shorter), {"rope": rope}, r"rope\.cos must have shape .*, got \(7, 8\)"),
        (case, {"rope": rope._replace(cos=rope.cos.clone().requires_grad_())}, "rope.cos must not require a gradient"),
        (case.half(1), {"next_factor": case.x[0, 0]}, "next_factor must be None .*, got a tensor with no MLP half"),
        (
            make_block(torch.bfloat16, inner_norm="layer_norm"),
            {"next_factor": case.x[0, 0]},
            "next_factor must be None .*, got a tensor with inner_norm",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            given.fused(**options)
    other = _folded(case).but(x=case.x.float())
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=r"got torch\.bfloat16"):
        other.fused()
