"""Every operator with the triton backend: autograd, checkpointing, torch.func, autocast, compile, export and FLOP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from fused_models import assert_within
from kernel_support import DEVICE
from mlp_support import make_block, make_case
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vit_fast import ops
from vit_fast.errors import UnsupportedInputError

pytest.importorskip("triton", reason="the kernels need triton")

B, N, C, HEADS = 2, 3, 32, 2
CASE = make_block(torch.float32, width=C, hidden=48, tokens=(B, N), gated=True, activation="gelu")
KV = 0.3 * torch.randn(2, 1, HEADS, 5, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
PARAMETERS = [tensor.requires_grad_(False) for tensor in (*CASE.leaves().values(), KV)]


def _attention(x: Tensor, backend: str) -> Tensor:
    k, v = KV.expand(-1, len(x), -1, -1, -1)
    return ops.attention(x.unflatten(-1, (HEADS, -1)).transpose(1, 2), k, v, backend=backend)


def _mlp(x: Tensor, backend: str, residual: bool = True) -> Tensor:
    t = CASE.t
    gate = {"gate_weight": t.gate_weight, "gate_bias": t.gate_bias}
    return ops.layer_norm_mlp(x, *t[7:13], **gate, residual=residual, backend=backend)


OPERATORS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "attention": _attention,
    "attention_qkvpacked": lambda x, backend: ops.attention_qkvpacked(x.reshape(-1, 2, 3, 1, 16), backend=backend),
    "layer_norm_mlp": _mlp,
    "block": lambda x, backend: CASE.but(x=x).forward(backend),
}
every_operator = pytest.mark.parametrize("operator", OPERATORS)


@contextmanager
def _training(trained: bool) -> Iterator[None]:
    for parameter in PARAMETERS:
        parameter.requires_grad_(trained)
    try:
        yield
    finally:
        for parameter in PARAMETERS:
            parameter.requires_grad_(False).grad = None


def _input(batch: int = B) -> Tensor:
    return torch.randn(batch, N, C, device=DEVICE)


def _close(value: Any, expected: Any) -> None:
    torch.testing.assert_close(value, expected, atol=2e-5, rtol=2e-5)


@every_operator
def test_gradients_by_autograd_and_checkpointing(operator: str) -> None:
    x, run = _input().requires_grad_(), OPERATORS[operator]
    (expected,) = torch.autograd.grad(run(x, "eager").sum(), x)
    (found,) = torch.autograd.grad(run(x, "triton").sum(), x)
    _close(found, expected)
    for reentrant in (True, False):
        x.grad = None
        checkpoint(run, x, "triton", use_reentrant=reentrant).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, found)


@every_operator
def test_transforms_and_second_derivatives_are_refused(operator: str) -> None:
    x = _input()

    def own(x: Tensor) -> Tensor:
        return OPERATORS[operator](x, "triton").square().mean()

    def dual() -> Any:
        with forward_ad.dual_level():
            return own(forward_ad.make_dual(x, x))

    torch._dynamo.reset()
    for attempt in (
        dual,
        lambda: torch.func.grad(own)(x),
        lambda: torch.vmap(own)(torch.stack([x, x])),
        lambda: torch.compile(lambda x: torch.func.jvp(own, (x,), (x,)), backend="aot_eager")(x),
    ):
        with pytest.raises(UnsupportedInputError, match=r"must be outside of torch\.func transforms"):
            attempt()
    for trained in (False, True):
        with _training(trained):
            (gradient,) = torch.autograd.grad(own(x.requires_grad_()), x, create_graph=True)
            with pytest.raises(UnsupportedInputError, match="second derivative"):
                gradient.sum().backward()


@every_operator
def test_a_negative_view_gives_the_same(operator: str) -> None:
    """torch negates the imaginary part of a conjugate lazily: its memory contains the opposite values."""
    x, run = _input(), OPERATORS[operator]
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    _close(run(negative, "triton"), run(x, "triton"))


@pytest.mark.fast_cases("attention-aot_eager", "layer_norm_mlp-aot_eager")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@every_operator
def test_compiles_whole_with_a_dynamic_batch(operator: str, compiler: str) -> None:
    def function(x: Tensor) -> Tensor:
        return OPERATORS[operator](x * 2, "triton").sin()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)
    for batch in (2, 3, 5):
        x = _input(batch).requires_grad_()
        value, right = compiled(x), function(x)
        _close(value, right)
        _close(torch.autograd.grad(value.sum(), x), torch.autograd.grad(right.sum(), x))
        with torch.no_grad():
            _close(compiled(x), right)


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "block"])  # fused models export modules
def test_an_exported_program_contains_operators_of_torch(operator: str) -> None:
    x, module = _input(), torch.nn.Module()
    module.forward = lambda x: OPERATORS[operator](x, "triton")
    program = torch.export.export(module, (x,))
    assert "vit_fast" not in str(program.graph)
    _close(program.module()(x), OPERATORS[operator](x, "eager"))


@pytest.mark.parametrize("operator", [*OPERATORS, "branch"])
def test_autocast_computes_in_its_dtype(operator: str) -> None:
    """The MLP branch without a residual has the autocast dtype; with an fp32 residual, the output is fp32."""
    x, run = _input().requires_grad_(), OPERATORS.get(operator, partial(_mlp, residual=False))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found, expected = run(x, backend="triton"), run(x, backend="eager")
    assert found.dtype == expected.dtype and not torch.equal(found.float(), run(x, backend="triton"))
    gradients = [torch.autograd.grad(y.float().sum(), x)[0] for y in (found, expected)]
    assert all(gradient.dtype == x.dtype for gradient in gradients)
    for one, other in ((found, expected), gradients):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-6, 3e5], ids=["tiny", "beyond fp16"])
def test_tokens_that_fp16_cannot_represent(size: float, dtype: torch.dtype) -> None:
    """torch normalizes fp32 tokens in fp32, and so do the kernels."""
    case = make_case(30, 48, 72, torch.float32)
    case = case.but(x=(case.x.detach() * size).requires_grad_())

    def results(backend: str) -> dict[str, Tensor]:
        with torch.autocast(DEVICE.type, dtype):
            found = case.run(backend)
        assert found["y"].dtype == torch.float32
        return found | {"y": found["y"] - case.x.detach()}  # beside a large residual, the branch's error would not show

    exact = case.to(torch.float64).run("eager")
    exact["y"] -= case.x.detach().double()
    own, eager = results("triton"), results("eager")
    for name, value in own.items():
        assert_within(value, eager[name], exact[name], 2 if name == "y" else 3, name)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("ends", [(0, 3, 5), (0, 0)], ids=["tokens after the last sequence", "no sequence"])
def test_packed_attention_has_the_autocast_dtype(ends: tuple[int, ...], backend: str) -> None:
    q = torch.randn(7, 2, 16, device=DEVICE)
    bounds = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert ops.attention_varlen(q, q, q, bounds, 3, backend=backend).dtype == torch.bfloat16


# The backward of an attention computes its scores again.
RECOMPUTED = {"attention": 2 * 3 * 5 * 32, "attention_qkvpacked": 2 * 2 * 2 * 16, "block": 2 * 3 * 3 * 32}


@every_operator
def test_flop_are_those_of_the_formula(operator: str) -> None:
    counts = []
    for backend in ("triton", "eager"):
        for trained in (False, True):
            with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trained), _training(trained):
                y = OPERATORS[operator](_input().requires_grad_(trained), backend)
                if trained:
                    y.sum().backward()
            counts.append(counter.get_total_flops())
    assert counts[0] == counts[2] > 0
    assert counts[1] == counts[3] + 2 * RECOMPUTED.get(operator, 0)
