"""Attention with a bias, window mask, relative positions and a scale per head: every backend against the formula."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import timm
import torch
from bias_support import FORMS, bias_inputs, formula, in_dtype, output_and_gradients
from kernel_support import DEVICE
from torch import nn

import vit_fast
from vit_fast import ops
from vit_fast.blocks import packed
from vit_fast.blocks.block import freeze_block, parts_of
from vit_fast.blocks.packed import run_packed
from vit_fast.blocks.parts import TermParts, Windows
from vit_fast.ops.attention import attention_among
from vit_fast.ops.descriptions import ScoreTerms

SIZES = (4, 2, 6, 12, 16)
COMBINED = (*((form,) for form in FORMS), ("bias", "masked", "window_mask", "rel", "scale", "key_mask"))


@pytest.mark.parametrize("forms", COMBINED, ids="+".join)
def test_eager_and_sdpa_compute_the_formula(forms: tuple[str, ...]) -> None:
    """In fp64, with all gradients; queries without keys have output and gradients 0."""
    made = in_dtype(bias_inputs(forms, SIZES, grid=4), torch.float64)
    do = torch.randn(4, 2, 6, 16, dtype=torch.float64, device=DEVICE)
    expected = output_and_gradients(formula, made, do)
    for backend in ("eager", "sdpa"):
        found = output_and_gradients(ops.attention, made, do, backend=backend)
        torch.testing.assert_close(found, expected)
    if "masked" in forms:
        assert not expected["o"][:, :, 0].any() and not expected["bias"][:, :, 0].any()


def test_qkvpacked_takes_the_same_terms() -> None:
    made = bias_inputs(("bias", "window_mask", "rel", "scale"), (4, 2, 12, 12, 16), grid=4)
    qkv = torch.stack([made.pop(name) for name in "qkv"], 2).transpose(1, 3)  # [B, N, 3, H, D]
    for backend in ("eager", "sdpa"):
        found = ops.attention_qkvpacked(qkv, **made, backend=backend)
        torch.testing.assert_close(found, formula(*qkv.transpose(1, 3).unbind(2), **made).transpose(1, 2))


def test_gradcheck_of_the_reference() -> None:
    made = in_dtype(bias_inputs(("bias", "masked", "rel", "scale"), (2, 2, 3, 4, 16), grid=2), torch.float64)
    made |= {"bias": made["bias"].detach().clamp(min=-5.0).requires_grad_()}  # no finite difference of -inf

    def attend(q: Any, k: Any, v: Any, bias: Any, h: Any, w: Any, scale: Any) -> Any:
        return ops.attention(q, k, v, bias=bias, rel=(h, w), scale=scale, backend="eager")

    *qkv, bias, rel, scale = made.values()
    assert torch.autograd.gradcheck(attend, (*qkv, bias, *rel, scale), fast_mode=True)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": (2, 6, 11)}, r"bias must have shape \[1 or 4, 1 or 2, 6, 12\] on .*, got \[1, 2, 6, 11\]"),
        ({"bias": (6, 12)}, r"bias must have shape .* got \[6, 12\]"),
        ({"window_mask": (2, 6, 6)}, r"window_mask must have shape \[any, 6, 12\]"),
        ({"window_mask": (0, 6, 12)}, r"window_mask must have at least one window, got \[0, 6, 12\]"),
        ({"scale": (3,)}, r"scale must have shape \[2\]"),
        ({"rel": ((4, 2, 6, 5), (4, 2, 6, 2))}, r"rel must have Kh \* Kw = 12, the number of keys, got 5 \* 2"),
        ({"rel": ((4, 2, 5, 6), (4, 2, 6, 2))}, r"rel_h must have shape \[4, 2, 6, any\]"),
        ({"rel": ((2, 6, 16), (4, 2, 6, 2))}, r"rel_w must have shape \[any, any, 16\]"),
        ({"rel": ((2, 6, 16), (2, 2, 16), (1,))}, r"rel must be a pair of tensors, got a tuple of 3: pass \(rel_h"),
        ({"rel": ((2, 6, 16), (2, 2, 16))}, r"rel must have h \* w = 6, the number of queries, got 2 \* 2"),
    ],
)
def test_bad_shapes_are_named(change: dict[str, Any], message: str, backend: str) -> None:
    made = bias_inputs((), SIZES)
    for name, shape in change.items():
        made[name] = tuple(map(torch.ones, shape)) if name == "rel" else torch.ones(shape)
    with pytest.raises(ValueError, match=message):
        ops.attention(**made, backend=backend)


def test_other_errors() -> None:
    made = bias_inputs((), SIZES, torch.float16)
    with pytest.raises(ValueError, match=r"bias must be torch.float32 or torch.float16 like q, got torch.bfloat16"):
        ops.attention(**made, bias=torch.ones(2, 6, 12, device=DEVICE, dtype=torch.bfloat16), backend="sdpa")
    with pytest.raises(ValueError, match="window_mask must not require a gradient"):
        ops.attention(**made, window_mask=torch.ones(1, 6, 12, device=DEVICE, requires_grad=True), backend="sdpa")
    with pytest.raises(ValueError, match=r"bias must be a dense tensor, got torch.sparse_coo: call .to_dense\(\)"):
        ops.attention(**made, bias=torch.ones(2, 6, 12).to_sparse(), backend="sdpa")
    rel = torch.ones(4, 2, 6, 12, device=DEVICE)
    with pytest.raises(ValueError, match="rel must be a pair of tensors"):
        ops.attention(**made, rel=rel, backend="sdpa")
    with pytest.raises(TypeError, match=r"rel_w must be a torch.Tensor, got None"):
        ops.attention(**made, rel=(rel, None), backend="sdpa")


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
def test_autocast_converts_q_to_the_dtype_of_the_bias(backend: str) -> None:
    made = bias_inputs((), SIZES)
    bias = torch.randn(2, 6, 12, device=DEVICE).bfloat16().requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        o = ops.attention(**made, bias=bias, backend=backend)
    expected = formula(**made, bias=bias)
    assert o.dtype == torch.bfloat16 and torch.autograd.grad(o.sum(), bias)[0].dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), expected, rtol=0.05, atol=0.05)


class _Biased(nn.Module):
    """A timm Block whose parts have a table of biases, a window mask, shifted windows and a scale per head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(timm.models.vision_transformer.Block(48, 3))
        attn = self.blocks[0].attn
        attn.table, attn.per_head = nn.Parameter(torch.randn(9, 3)), nn.Parameter(torch.rand(3) + 0.1)
        attn.register_buffer("index", torch.randint(9, (6, 6)))
        attn.register_buffer("mask", torch.where(torch.rand(4, 6, 6) < 0.3, -100.0, 0.0))
        attn.rows, attn.columns = nn.Parameter(torch.randn(2, 2, 16)), nn.Parameter(torch.randn(3, 3, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the block by window partition, as Swin does."""
        block, attn = self.blocks[0], self.blocks[0].attn
        normed = block.norm1(x).view(-1, 4, 6, 48).roll((-1, -2), (1, 2))
        windows = normed.view(-1, 2, 2, 2, 3, 48).transpose(2, 3).reshape(-1, 6, 48)
        q, k, v = attn.qkv(windows).view(-1, 6, 3, 3, 16).permute(2, 0, 3, 1, 4)
        mixed = formula(
            q, k, v, scale=attn.per_head, bias=attn.table[attn.index].permute(2, 0, 1), window_mask=attn.mask,
            rel=(attn.rows, attn.columns),
        )  # fmt: skip
        mixed = mixed.transpose(1, 2).reshape(-1, 2, 2, 2, 3, 48).transpose(2, 3).reshape(-1, 4, 6, 48)
        x = x + attn.proj(mixed.roll((1, 2), (1, 2)).view(x.shape))
        return x + block.mlp(block.norm2(x))

    def fused(self, backend: str) -> tuple[nn.Sequential, Any]:
        """Returns a fused copy of the blocks, and the parts of the only one."""
        blocks = copy.deepcopy(self.blocks)
        vit_fast.fuse(blocks, backend=backend)
        parts, module = parts_of(blocks[0]), blocks[0].attn
        terms = TermParts(
            bias=(module, "table"), index=(module, "index"), window_mask=(module, "mask"), scale=(module, "per_head"),
            rel_h=(module, "rows"), rel_w=(module, "columns"), windows=Windows((4, 6), (2, 3), (1, 2)),
        )  # fmt: skip
        parts.attention = dataclasses.replace(parts.attention, terms=terms)
        return blocks, parts


@torch.inference_mode()
def test_a_frozen_block_on_the_cpu_has_the_terms() -> None:
    """The bias is looked up once, and again when the table changes."""
    model, x = _Biased().eval(), torch.randn(2, 24, 48)
    blocks, parts = model.fused("sdpa")
    assert not freeze_block(blocks[0])
    frozen = parts.frozen.steps().terms.bias
    torch.testing.assert_close(run_packed([parts.frozen], x, None, None), model(x))
    torch.testing.assert_close(run_packed([parts.frozen], x, None, None, 5), model(x)[:, :5])
    assert parts.frozen.steps().terms.bias is frozen
    with torch.inference_mode(False):
        for owner in (model.blocks[0].attn, parts.attention.module):
            owner.table.data.fill_(0.5)
    vit_fast.freeze(blocks)
    torch.testing.assert_close(blocks(x), model(x))
    assert parts.frozen.steps().terms.bias is not frozen


@pytest.mark.parametrize("by", ["flash", "matmul", "graph"])
@torch.inference_mode()
def test_implementations_of_frozen_attention(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one to run is measured, unless a query has no keys."""
    groups = Windows((4, 6), (2, 3), (1, 2)).groups(torch.device("cpu"))
    rel = torch.randn(2, 2, 16), torch.randn(3, 3, 16)
    terms = ScoreTerms(torch.randn(1, 2, 6, 6), torch.randn(4, 6, 6), *rel, groups=groups)
    qkv, asked = torch.randn(2, 24, 3, 2, 16), []
    for each in (terms, ScoreTerms(groups=groups), terms._replace(scale=torch.rand(2)))[: 2 if by == "graph" else 3]:
        found = packed._attend_terms(by, packed._with_one_bias(each), qkv, None)
        expected = attention_among(qkv, None, terms=each, backend="eager").flatten(-2)
        torch.testing.assert_close(found, expected)
    monkeypatch.setattr(packed, "fastest", lambda layers, _: asked.append(layers) or dict.fromkeys(layers, by))

    def select(terms: ScoreTerms) -> str:
        return packed._select_for_terms({"terms": terms, "heads": 2}, torch.float32, 16)

    assert select(terms) == by and by in next(iter(asked[0].values()))
    terms.bias[0, 1, 3] = -torch.inf
    assert select(terms) == "flash" and len(asked) == 1
    with pytest.raises(ValueError, match="x must have 24 tokens for windows, got 25"):
        packed._attend_terms(by, terms, torch.zeros(2, 25, 3, 2, 16), None)


def test_windows() -> None:
    """Tokens of adjacent and of dilated windows, row by row."""
    groups = Windows((2, 4), (2, 2), (0, 1)).groups(torch.device("cpu"))
    assert groups.tolist() == [[1, 2, 5, 6], [3, 0, 7, 4]]
    groups = Windows((2, 4), (1, 2), (0, 0), dilated=True).groups(torch.device("cpu"))
    assert groups.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
