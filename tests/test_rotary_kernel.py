"""The formula of rotary embeddings is timm's, and the kernels of qk-norm and rotary embeddings match it in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernel_execution import DTYPES
from kernel_support import DEVICE, assert_as_exact_as_eager
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR
from vit_fast.errors import UnsupportedInputError
from vit_fast.kernels import rotary
from vit_fast.ops import Norm, QkNorm, Rope, qk_norm_rope
from vit_fast.ops.descriptions import checked_rope

Shape = tuple[int, int, int, int]  # B, N, H, D
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


def _leaves(shape: Shape, norm: str, over: str, affine: bool) -> list[Tensor]:
    """Returns qkv and the parameters of the norms of q and k."""
    B, N, H, D = shape
    width = D if over == "head" else H * D
    count = 0 if norm == "none" or not affine else 2 if norm == "rms_norm" else 4
    shift = torch.randn(1, device=DEVICE, dtype=torch.float64)
    qkv = torch.randn(B, N, 3, H, D, device=DEVICE, dtype=torch.float64) + shift
    return [qkv, *(torch.randn(width, device=DEVICE, dtype=torch.float64) * 0.3 + 1 for _ in range(count))]


def _tables(shape: Shape, leading: Sequence[int], prefix: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*leading, shape[1] - prefix, shape[3] // 2, device=DEVICE) * 3
    return angles.cos(), angles.sin()


def _run(
    leaves: list[Tensor], grad: Tensor, dtype: torch.dtype, backend: str, norm: str, over: str, rope: Rope | None
) -> list[Tensor]:
    """Returns the output and the gradients of all leaves, computed in `dtype`."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    qkv, *vectors = leaves
    weights = vectors[:2] or [None, None]
    biases = vectors[2:] or [None, None]
    norms = [Norm(weight, bias, 1e-3, norm) for weight, bias in zip(weights, biases)]
    if rope is not None and dtype == torch.float64:
        rope = rope._replace(cos=rope.cos.double(), sin=rope.sin.double())
    qk_norm = None if norm == "none" else QkNorm(*norms, over)
    out = qk_norm_rope(qkv, qk_norm=qk_norm, rope=rope, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def _check(
    shape: Shape, dtype: torch.dtype, *, norm: str = "none", over: str = "head", affine: bool = True,
    rope: Rope | None = None,
) -> None:  # fmt: skip
    leaves = [leaf.to(dtype) for leaf in _leaves(shape, norm, over, affine)]
    grad = torch.randn(leaves[0].shape, device=DEVICE).to(dtype)
    own, eager, exact = (
        _run(leaves, grad, kind, backend, norm, over, rope)
        for kind, backend in ((dtype, "triton"), (dtype, "eager"), (torch.float64, "eager"))
    )
    for index, (one, two, three) in enumerate(zip(own, eager, exact)):
        factor = GRADIENT_FACTOR if index else FORWARD_FACTOR
        assert_as_exact_as_eager("d " * bool(index) + str(index), one, two, three, factor)


@pytest.mark.pairwise
@pytest.mark.parametrize("D", [2, 36, 64, 72, 80, 128])
@pytest.mark.parametrize("layout", ["half", "interleaved", None])
@pytest.mark.parametrize("over", ["head", "width"])
@pytest.mark.parametrize("norm", ["none", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_norms_and_layouts(
    D: int, layout: str | None, over: str, norm: str, affine: bool, dtype: torch.dtype
) -> None:
    shape = (2, 5, 3, D)
    rope = None if layout is None else Rope(*_tables(shape, (), 1), 1, layout)
    _check(shape, dtype, norm=norm, over=over, affine=affine, rope=rope)


@pytest.mark.each_value
@pytest.mark.parametrize("leading", [(), (2,), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("prefix", [0, 1, 5, 7])
def test_tables_of_all_kinds(leading: tuple[int, ...], prefix: int) -> None:
    shape = (2, 7, 3, 16)
    _check(shape, torch.float16, rope=Rope(*_tables(shape, leading, prefix), prefix, "interleaved"))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("leading", [(), (2,), (1, 3), (2, 3)])
def test_strided_tables_are_not_copied(leading: tuple[int, ...], layout: str) -> None:
    """Repeated angles, cosines and sines in one tensor, and tables shared by all images."""
    cos, sin = _tables((2, 5, 3, 16), leading, 0)
    qkv = torch.randn(2, 5, 3, 3, 16, device=DEVICE)
    expected = qk_norm_rope(qkv, rope=Rope(cos, sin, layout=layout), backend="triton")
    twice = [
        torch.cat([table, table], -1) if layout == "half" else table.repeat_interleave(2, -1) for table in (cos, sin)
    ]
    for tables in (twice, torch.cat(twice, -1).chunk(2, -1)):
        as_given = checked_rope(Rope(*tables, layout=layout), qkv.shape)
        assert rotary.can_be_read(as_given.cos, as_given.sin)
        assert torch.equal(qk_norm_rope(qkv, rope=as_given, backend="triton"), expected)
    if leading:
        shared = [table[:1].expand(2, *table.shape[1:]) for table in (cos, sin)]
        assert rotary.can_be_read(*shared)
        assert torch.equal(qk_norm_rope(qkv, rope=Rope(*shared, layout=layout), backend="triton")[0], expected[0])


def test_inputs_and_tables_with_other_strides_are_copied() -> None:
    cos, sin = _tables((2, 5, 3, 16), (2,), 0)
    qkv = torch.randn(2, 5, 3, 3, 32, device=DEVICE)[..., ::2]
    expected = qk_norm_rope(qkv.contiguous(), rope=Rope(cos, sin), backend="triton")
    apart = (
        torch.empty(2, 83, device=DEVICE)[:, :40].unflatten(1, (5, 8)).copy_(cos)
    )  # the image stride is no multiple of the row stride
    turned = cos.mT.contiguous().mT, sin.mT.contiguous().mT
    for tables in ((apart, sin), (cos, turned[1]), turned):
        assert torch.equal(qk_norm_rope(qkv, rope=Rope(*tables), backend="triton"), expected)


def test_a_batch_without_tokens() -> None:
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8)):
        _check(shape, DTYPES[-1], norm="layer_norm", rope=Rope(*_tables(shape, (), 0)))


def test_nan_stays_in_its_head() -> None:
    x = torch.randn(2, 5, 3, 2, 16, device=DEVICE)
    x[1, 2, 0, 1, 3] = float("nan")
    found = qk_norm_rope(
        x, qk_norm=QkNorm(Norm(), Norm()), rope=Rope(*_tables((2, 5, 2, 16), (), 1), 1), backend="triton"
    )
    lost = torch.zeros(2, 5, 3, 2, 16, dtype=torch.bool, device=DEVICE)
    lost[1, 2, 0, 1] = True
    assert torch.equal(found.isnan(), lost)


_TABLE = torch.zeros(N, D // 2)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rope": Rope(_TABLE, _TABLE, 1)}, r"T = 6, .*, got \(7, 4\)"),
        ({"rope": Rope(_TABLE, _TABLE[:, :3])}, r"equal shapes, got \(7, 4\) and \(7, 3\)"),
        ({"rope": Rope(_TABLE[:, :3], _TABLE[:, :3])}, "d = 4 or 8"),
        ({"rope": Rope(_TABLE, _TABLE, 8)}, "between 0 and 7, the number of tokens, got 8"),
        ({"rope": Rope(_TABLE, _TABLE, 0, "halves")}, "rope.layout must be one of 'half', 'interleaved', got 'halves'"),
        ({"qk_norm": QkNorm(Norm(), Norm(), "heads")}, "qk_norm.over must be one of 'head', 'width', got 'heads'"),
        ({"qk_norm": QkNorm(Norm(kind="rms"), Norm())}, "qk_norm.q.kind must be one of 'layer_norm', 'rms_norm', got"),
        ({"qk_norm": QkNorm(Norm(), Norm(torch.ones(H * D)))}, r"qk_norm.k.weight must have shape \(8,\), got \(24,\)"),
        ({"qk_norm": QkNorm(Norm(), Norm(torch.ones(D)), "width")}, r"must have shape \(24,\), got \(8,\)"),
        ({"qk_norm": QkNorm(Norm(bias=torch.ones(D), kind="rms_norm"), Norm())}, "bias of qk_norm.q must be None for"),
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


def test_refusals() -> None:
    cos, sin = _tables((2, 5, 2, 16), (), 0)
    with pytest.raises(UnsupportedInputError, match=r"rope\.cos must not require a gradient"):
        qk_norm_rope(torch.randn(2, 5, 3, 2, 16, device=DEVICE), rope=Rope(cos.requires_grad_(), sin), backend="triton")
    qkv = torch.randn(2, 5, 3, 2, 15, device=DEVICE, dtype=torch.float64)
    expected = r"qkv must be .*got torch.float64(.|\n)*head_dim must be even, got 15"
    with pytest.raises(UnsupportedInputError, match=expected):
        qk_norm_rope(qkv, qk_norm=QkNorm(Norm(), Norm()), backend="triton")
