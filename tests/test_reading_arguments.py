"""fuse(model, example=...) reads modules whose forward gets more tensors than the tokens, or returns more."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
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


def fused(block: nn.Module, example: Any) -> tuple[Any, Any]:
    """Returns a fused block with random parameters, and its original."""
    original = block.eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = Parent(copy.deepcopy(original))
    vit_fast.fuse(model, "eager", example=example).require_all()
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
    assert not any("attention" in row.part for row in report.fused)


@pytest.mark.parametrize("extra", ["weights", "computed", "pooled in place"])
def test_computed_outputs_are_not_fused(extra: str) -> None:
    class Computes(Packed):
        def forward(self, x: Tensor, positions: Tensor) -> Any:
            y = super().forward(x)
            if extra == "pooled in place":
                return y, positions.add_(1)
            return y, y.mean(1) if extra == "weights" else positions * 1

    report = vit_fast.fuse(Parent(Computes(32, 4)).eval(), "eager", example=(X, torch.zeros(20, 8)))
    assert not any("attention" in row.part for row in report.fused)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["argument", "dictionary", "dataclass"])
def test_compile_and_export(kind: str) -> None:
    positions = torch.randn(20, 8)
    block, original = fused(Returns(kind), (X, positions))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(X, positions), original(X, positions))
    assert_equal(compiled(X, positions, weights=True), original(X, positions, weights=True))
    if kind != "dataclass":
        exported = torch.export.export(block, (X, positions)).module()
        assert_equal(exported(X, positions), original(X, positions))
