"""Attention cores that a forward spells by products and a softmax run with a backend."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_reading_cores import Core
from torch import Tensor, nn

import vit_fast
from vit_fast.ops import reference
from vit_fast.reading.scores import Attends, Unvalued

B, H, N, M, D = 2, 3, 5, 4, 16
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # of q, k, v and a bias [H, N, M]


def in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores /= 4.0
    scores += bias
    weights = F.dropout(nn.Softmax(-1)(scores), 0.5, training=False).to(v)
    return (weights @ (v + scores.shape[-1])).transpose(1, 2).flatten(2)


def keys_first(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = torch.einsum("bjhd, bihd -> bhij", k, q).mul(0.3).double()
    return torch.einsum("b j h d, b h i j -> b i h d", v, scores.softmax(dim=-1, dtype=torch.float64))


def batches(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(q.new_empty(()).expand(B * H, N, M), q, k.mT, beta=0, alpha=0.5)
    added = torch.baddbmm(bias.repeat(B, 1, 1), q, k.mT)
    return torch.bmm(F.softmax(scores, 2), v) + torch.bmm(torch.softmax(added, -1, torch.float64), v)


def learned_scale(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ((bias + 2 * (q @ k.mT)) * bias[:, :1, :1].exp()).softmax(-1) @ v


def without_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    hides = (torch.arange(N)[:, None] < 1) | (torch.arange(M) == 2)
    return (q @ k.mT + torch.zeros(N, M).masked_fill(hides, -torch.inf)).softmax(-1) @ v


def wide(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ torch.cat((v, bias.mT.expand(B, -1, -1, -1)), -1)


def narrow(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v[..., :3]


def transposed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1).transpose(-1, 2)
    return (v.mT @ F.dropout(weights.mT.mT, 0.5, training=False)).mT + weights.shape[-1]


def over_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def biased_after(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) + bias) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(bias > 1, -torch.inf).softmax(-1) @ v


def two_softmaxes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).softmax(-1) @ v


def by_token(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ((q @ k.mT) * bias[:, :, :1]).softmax(-1) @ v


def sum_of_two(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + k[..., :1, :] @ q[..., :1, :].mT).softmax(-1) @ v


def hooked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    weights = scores.softmax(-1)
    scores.register_hook(lambda grad: 2 * grad)
    return weights @ v


def drops(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v


def writes_into_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k = q.detach().clone(), k.detach()
    scores = q @ k.mT
    q += 1
    return scores.softmax(-1) @ v


def writes_into_another_name(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q.detach() @ k.detach().mT
    other, weights = scores.to(q.dtype), scores.softmax(-1)
    other += bias
    return scores.softmax(-1) @ v + weights @ v


def writes_into_weights(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (q.detach() @ k.detach().mT).softmax(-1)
    weights[..., 0] = 0
    return weights @ v


def both(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, torch.stack([weights, weights])


FUSED: dict[Function, int] = {
    in_place: 1, keys_first: 1, batches: 2, learned_scale: 1, without_keys: 1, wide: 1, narrow: 1, both: 1,
    transposed: 1,
}  # fmt: skip
OTHERS: list[Function] = [
    over_queries, biased_after, filled, two_softmaxes, by_token, sum_of_two, hooked, drops, writes_into_queries,
    writes_into_another_name, writes_into_weights,
]  # fmt: skip


@pytest.mark.parametrize("function", [*FUSED, *OTHERS])
def test_functions(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, their strides, and gradients are those of the function, also if a part is not a core."""
    calls, attention = [], reference.attention
    monkeypatch.setattr(reference, "attention", lambda *args, **kwargs: calls.append(1) or attention(*args, **kwargs))
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, N, D), (B, H, M, D), (B, H, M, D), (H, N, M)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    results: list[list[Any]] = []
    for run in (function, partial(Attends.run, "eager", function)):
        torch.manual_seed(1)
        outputs = run(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad(sum(each.sin().sum() for each in outputs), given, allow_unused=True)
        results.append([*outputs, *gradients])
    for a, b in itertools.zip_longest(*results):
        torch.testing.assert_close(a, b, equal_nan=True, check_stride=b is not None and b.requires_grad)
    assert len(calls) == FUSED.get(function, 0)


class Doubled(torch.autograd.Function):
    """A function that torch does not show to modes."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        return scores * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # torch's has *args
        return grad * 2


class Custom(Core):
    """Calls it after the example only."""

    custom = False

    def forward(self, x: Tensor) -> Tensor:
        if self.custom:
            self.attend = lambda q, k, v: Doubled.apply(q @ k.mT).softmax(-1) @ v
        return super().forward(x)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def test_functions_that_modes_do_not_see() -> None:
    original, x = Custom(plain), torch.randn(2, 9, 32)
    model = nn.Sequential(copy.deepcopy(original))
    assert vit_fast.fuse(model, "eager", example=x).require_all()
    model[0].custom = original.custom = True
    for net in (model, original):
        net(x).square().sum().backward()
    torch.testing.assert_close(model(x), original(x))
    for a, b in zip(model.parameters(), original.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


class Keeps(Core):
    """Keeps its weights, a cache that forward fills, and returns the weights if asked."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
        self.cache: dict[str, Tensor] = {}
        self.table = nn.Parameter(torch.zeros(2, 9, 9))
        self.returns = False

    def forward(self, x: Tensor) -> Any:
        if "bias" not in self.cache:
            self.cache["bias"] = self.table + 0
        q, k, v = self.qkv(x.mT).unflatten(1, (3, 2, 16)).mT.unbind(1)
        self.weights = (q @ k.mT + self.cache["bias"]).softmax(-1)
        y = self.proj((self.weights @ v).mT.flatten(1, 2)).mT
        return (y, self.weights) if self.returns else y


def test_weights_and_caches_that_modules_keep() -> None:
    """fuse leaves caches empty, so that they contain the weights that are loaded after it."""
    original, x = Keeps().eval(), torch.randn(2, 9, 32)
    model = nn.Sequential(copy.deepcopy(original))
    assert vit_fast.fuse(model, "eager", example=x).require_all()
    assert not model[0].cache and not hasattr(model[0], "weights")
    state = {name: torch.randn_like(each) for name, each in original.state_dict().items()}
    for net in (model[0], original):
        net.load_state_dict(state)
    torch.testing.assert_close(model(x), original(x))
    assert type(model[0].weights) is Unvalued
    torch.testing.assert_close(model[0].weights * 1, original.weights)
    model[0].returns = original.returns = True
    for a, b in zip(model(x), original(x)):
        assert type(a) is Tensor
        torch.testing.assert_close(a, b)
    assert not vit_fast.fuse(nn.Sequential(original), "eager", example=x).fused  # the weights are needed anyway
