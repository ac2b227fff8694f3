"""fuse(model, example=...) reads modules whose forward gets more tensors than the tokens, or returns more."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from spellings import Packed, runs_fused
from torch import Tensor, nn

import vit_fast

X = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))


class Parent(nn.Module):
    """A parent, because fuse replaces classes of modules inside."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs)


def fused(block: nn.Module, example: Any, is_read: bool = True) -> tuple[Any, Any]:
    """Returns a fused block with random parameters, and its original; with `is_read`, everything must be fused."""
    original = block.eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = Parent(copy.deepcopy(original))
    report = vit_fast.fuse(model, "eager", example=example)
    if is_read:
        report.require_all()
    return model.block, original


def assert_equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    elif hasattr(a, "__dataclass_fields__"):
        assert_equal(list(vars(a).values()), list(vars(b).values()))
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for each, other in zip(a, b):
            assert_equal(each, other)
    elif isinstance(a, dict):
        assert_equal(list(a.items()), list(b.items()))
    else:
        assert a == b


# Outputs


class Pair(NamedTuple):
    tokens: Tensor
    weights: Tensor | None


@dataclass
class Output:
    tokens: Tensor
    sizes: tuple[int, int]
    positions: Tensor | None = None


OUTPUTS: dict[str, Any] = {
    "list": lambda y, p: [y],
    "nothing": lambda y, p: (y, None),
    "argument": lambda y, p: (y, p, (4, 5)),
    "argument first": lambda y, p: (p, y),
    "twice": lambda y, p: (y, y),
    "dictionary": lambda y, p: {"x": y, "positions": p, "weights": None},
    "named tuple": lambda y, p: Pair(y, None),
    "dataclass": lambda y, p: Output(y, (4, 5), p),
}


class Returns(Packed):
    def __init__(self, kind: str) -> None:
        super().__init__(32, 4)
        self.kind_of_output = kind

    def forward(self, x: Tensor, positions: Tensor | None = None, weights: bool = False) -> Any:
        y = super().forward(x)
        return (y, x.mean()) if weights else OUTPUTS[self.kind_of_output](y, positions)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind: str) -> None:
    """The structure of the output is rebuilt; arguments are those of the call."""
    positions = torch.randn(20, 8)
    block, original = fused(Returns(kind), (X, positions))
    for given in (positions, torch.randn(20, 8)):
        assert runs_fused(block, functools.partial(block, X, given))
        assert_equal(block(X, given), original(X, given))
        if "argument" in kind:
            assert block(X, given)[1 - (kind != "argument")] is given
    assert_equal(block(X, positions, weights=True), original(X, positions, weights=True))
    assert not runs_fused(block, lambda: block(X, positions, weights=True))
    vit_fast.fuse(block, "sdpa")
    vit_fast.freeze(block)
    with torch.inference_mode():
        assert_equal(block(X, positions), original(X, positions))


@dataclass
class Computed:
    """Its constructor does not get all fields."""

    tokens: Tensor
    size: int = field(init=False, default=3)


@dataclass
class Tagged:
    tokens: Tensor

    def __post_init__(self) -> None:
        self.tag = "not a field"


@pytest.mark.parametrize("cls", [Computed, Tagged])
def test_outputs_that_cannot_be_rebuilt_are_not_fused(cls: Any) -> None:
    class Other(Packed):
        def forward(self, x: Tensor) -> Any:
            return cls(super().forward(x))

    report = vit_fast.fuse(Parent(Other(32, 4)).eval(), "eager", example=X)
    assert {row.part for row in report.fused} <= {"attention core", "MLP"}


@pytest.mark.parametrize("extra", ["weights", "computed", "pooled in place"])
def test_computed_outputs_are_not_fused(extra: str) -> None:
    class Computes(Packed):
        def forward(self, x: Tensor, positions: Tensor) -> Any:
            y = super().forward(x)
            if extra == "pooled in place":
                return y, positions.add_(1)
            return y, y.mean(1) if extra == "weights" else positions * 1

    report = vit_fast.fuse(Parent(Computes(32, 4)).eval(), "eager", example=(X, torch.zeros(20, 8)))
    assert {row.part for row in report.fused} <= {"attention core", "MLP"}
    assert "returns more than one tensor" in str(report) or "writes into its input" in str(report)


# Arguments without effect


class Ignores(Packed):
    def __init__(self, uses: str = "") -> None:
        super().__init__(32, 4)
        self.uses = uses

    def forward(self, x: Tensor, sizes: Tensor, *, info: Any = None) -> Tensor:
        y = super().forward(x)
        if self.uses == "shape" and len(sizes) > 6:
            return y * 2
        if self.uses == "value" and sizes.sum() > 1000:
            return y * 2
        if self.uses == "nested":
            return y + info["positions"][0]
        return y * (2 if self.uses == "dtype" and sizes.is_floating_point() else 1)


@pytest.mark.parametrize("uses", ["", "shape", "value", "dtype", "nested"])
def test_arguments_without_effect(uses: str) -> None:
    """A module is read if its output does not depend on an argument; other shapes and dtypes run the original."""
    sizes, info = torch.tensor([3, 4, 5]), {"positions": (torch.randn(20, 32), 2)}
    original = Ignores(uses).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = Parent(copy.deepcopy(original))
    vit_fast.fuse(model, "eager", example={"x": X, "sizes": sizes, "info": info})
    is_read = uses not in ("value", "nested")
    if is_read:
        other = {"positions": (torch.randn(9, 32), 2)}
        assert runs_fused(model, lambda: model(x=X[:, :9], sizes=sizes + 1, info=other))
    for given in (sizes, sizes * 1000, torch.arange(9), torch.ones(3)):
        for x in (X, X[:1], X[:, :9]):
            other = {"positions": (torch.randn(len(x[0]), 32), 2)}
            assert_equal(model(x=x, sizes=given, info=other), original(x=x, sizes=given, info=other))
    assert_equal(model(sizes=sizes, x=X, info=info), original(X, sizes, info=info))


# Masks and biases


def changed(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, mask: change(q @ k.mT / 8**0.5, mask).softmax(-1) @ v


def given(convert: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=convert(mask, q))


def padding(B: int, N: int) -> Tensor:
    return torch.arange(N) < torch.arange(N, N - B, -1)[:, None]


def extended(B: int, N: int) -> Tensor:
    return torch.where(padding(B, N), 0.0, torch.finfo(torch.float32).min)[:, None, None]


def causal(scores: Tensor, value: float) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), value)


# Masks for a batch size and a number of tokens, and attention with them
MASKS: dict[str, tuple[Callable[[int, int], Tensor], Callable[..., Tensor]]] = {
    "SDPA, padding": (padding, given(lambda mask, q: mask[:, None, None])),
    "SDPA, expanded": (padding, given(lambda mask, q: mask.view(len(q), 1, 1, -1).expand(-1, 4, q.shape[2], -1))),
    "SDPA, of pairs": (lambda B, N: torch.rand(B, 1, N, N) > 0.4, given(lambda mask, q: mask)),
    "SDPA, 1 - mask": (
        lambda B, N: padding(B, N).long(),
        given(lambda mask, q: (1 - mask[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min),
    ),
    "SDPA, bias": (lambda B, N: torch.randn(B, 4, N, N), given(lambda mask, q: mask)),
    "fill -inf": (padding, changed(lambda scores, mask: scores.masked_fill(~mask[:, None, None], -torch.inf))),
    "fill -1e9": (
        lambda B, N: padding(B, N)[:, None].float(),
        changed(lambda s, m: s.masked_fill(m[:, :, None] == 0, -1e9)),
    ),
    "where": (padding, changed(lambda s, m: torch.where(m.reshape(len(s), 1, 1, -1), s, torch.finfo(s.dtype).min))),
    "added": (extended, changed(lambda scores, mask: scores + mask)),
    "bias [B, N, N]": (lambda B, N: torch.randn(B, N, N), changed(lambda scores, mask: scores + mask.unsqueeze(1))),
    "causal": (lambda B, N: torch.ones(N, N).tril(), changed(lambda s, m: s.masked_fill(m == 0, -torch.inf))),
    "causal and padding": (padding, changed(lambda s, m: causal(s, -1e9).masked_fill(~m[:, None, None], -1e9))),
}


class Masked(Packed):
    def __init__(self, attends: Callable[..., Tensor]) -> None:
        super().__init__(32, 4)
        self.attends = attends

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return super().forward(x)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attends(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def assert_same_step(block: Any, original: Any, x: Tensor, mask: Tensor) -> None:
    """Compares outputs, and the gradients of parameters, tokens and mask; only the outputs if some are NaN."""
    results = []
    for net in (block, original):
        tensors = [x.clone().requires_grad_(), mask.clone().requires_grad_(mask.is_floating_point()), *net.parameters()]
        y = net(*tensors[:2])
        used = [each for each in tensors if each.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), used, allow_unused=True)])
    for a, b in list(zip(*results))[: 1 if results[1][0].isnan().any() else None]:
        assert (a is None) is (b is None)
        if a is not None:
            assert torch.equal(a.isnan(), b.isnan())
            assert (a - b).nan_to_num().norm() <= 1e-4 * b.nan_to_num().norm() + 1e-6


@pytest.mark.fast_cases("SDPA, 1 - mask", "fill -inf", "added")
@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_arguments(name: str) -> None:
    """Calls use their masks, also masks that hide all keys; calls with a mask of another kind run the original."""
    torch.manual_seed(0)
    mask_of, attends = MASKS[name]
    batch = 1 if name in ("where", "added") else 2
    block, original = fused(Masked(attends), (X[:batch], mask_of(batch, 20)))
    for batch, tokens in ((2, 20), (3, 9), (1, 31)):
        x, mask = torch.randn(batch, tokens, 32), mask_of(batch, tokens)
        assert_same_step(block, original, x, mask)
        with torch.no_grad():
            assert runs_fused(block, functools.partial(block, x, mask)) or (
                name == "causal and padding" and tokens != 20
            )
        lowest = torch.finfo(torch.float32).min if name == "added" else -torch.inf if "bias" in name else 0
        mask[0] = lowest
        if name == "SDPA, 1 - mask":  # torch's gradients of SDPA depend on its implementation
            assert_equal(block(x, mask), original(x, mask))
        else:
            assert_same_step(block, original, x, mask)
        assert_equal(block(x), original(x))
    mask = mask_of(2, 20)
    assert not any(block._is_captured(X, other) for other in (mask.double(), mask[None], mask[..., 1:]))
    vit_fast.fuse(block, "sdpa")
    assert len(vit_fast.freeze(block)) == 1
    with torch.inference_mode():
        for hidden in (mask, mask.index_fill(0, torch.tensor([0]), lowest)):
            for net in (block, copy.deepcopy(block)):
                torch.testing.assert_close(net(X, hidden), original(X, hidden), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert_same_step(block, original, X, mask)


HOSTILE: dict[str, Callable[..., Tensor]] = {
    "changed in place": lambda q, k, v, m: MASKS["SDPA, padding"][1](q, k, v, m) * m.logical_not_().any(),
    "by batch size": given(lambda m, q: (m if len(q) < 3 else ~m)[:, None, None]),
    "segments": given(lambda m, q: m[:, None, None] == m[:, None, :, None]),
    "after softmax": lambda q, k, v, m: ((q @ k.mT).softmax(-1) * m[:, None, None]) @ v,
    "also zeros": lambda q, k, v, m: MASKS["SDPA, padding"][1](q, k, v, m) * m[:, None, :, None],
    "NaN as zeros": lambda q, k, v, m: (
        (q @ k.mT).masked_fill(~m[:, None, None], -torch.inf).softmax(-1).nan_to_num() @ v
    ),
    "small fill": changed(lambda s, m: s.masked_fill(~m[:, None, None], -30.0)),
    "both fill": changed(lambda s, m: s.masked_fill(~(m[:, None, :, None] & m[:, None, None]), -1e9)),
}


@pytest.mark.fast_cases("by batch size", "small fill")
@pytest.mark.parametrize("name", HOSTILE)
def test_other_uses_of_masks_are_read_or_refused(name: str) -> None:
    torch.manual_seed(0)
    block, original = fused(Masked(HOSTILE[name]), (X, padding(2, 20)), is_read=False)
    for batch, tokens in ((2, 20), (3, 9), (1, 31)):
        x, mask = torch.randn(batch, tokens, 32), padding(batch, tokens)
        for other in (mask, ~mask, mask & False, mask | True):
            assert_same_step(block, original, x, other)
            copies = other.clone(), other.clone()
            assert_equal(block(x, copies[0]).nan_to_num(), original(x, copies[1]).nan_to_num())
            assert torch.equal(*copies)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["argument", "dictionary", "dataclass", "SDPA, 1 - mask", "added"])
def test_compile_and_export(kind: str) -> None:
    has_mask = kind in MASKS
    positions = MASKS[kind][0](2, 20) if has_mask else torch.randn(20, 8)
    block, original = fused(Masked(MASKS[kind][1]) if has_mask else Returns(kind), (X, positions))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(X, positions), original(X, positions))
    if not has_mask:
        assert_equal(compiled(X, positions, weights=True), original(X, positions, weights=True))
    if kind != "dataclass":
        exported = torch.export.export(block, (X, positions)).module()
        assert_equal(exported(X, positions), original(X, positions))
