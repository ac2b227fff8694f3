"""layer_norm_mlp as an operator: tracing, layouts, statistics, refusals."""

from __future__ import annotations

from typing import Any

import mlp_support as support
import pytest
import torch
import torch.nn.functional as F
from mlp_support import DEVICE, Case, assert_rule, make_case, statistics_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vit_fast.errors import UnsupportedInputError
from vit_fast.ops import LayerNormMLP, layer_norm_mlp
from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp
from vit_fast.ops.reference import ACTIVATIONS

support.make_bf16_exact()


@pytest.fixture
def case() -> Case:
    return make_case(18, 32, 48, torch.float32)


@pytest.mark.each_value
@pytest.mark.parametrize("width", [32, 100, 1100])
@pytest.mark.parametrize("rows", ["usual", "constant", "far from 0", "pieces apart"])
def test_statistics_handed_in_give_the_same_result(rows: str, width: int) -> None:
    """Of one piece, of a last one that is shorter, and of more than are combined at once."""
    x, weight = torch.randn(18, width, device=DEVICE), torch.randn(48, width, device=DEVICE) * width**-0.5
    second = torch.randn(width, 48, device=DEVICE).bfloat16() * 48**-0.5
    if rows == "constant":
        x[::3] = 3.1
    elif rows == "far from 0":
        x += 100
    elif rows == "pieces apart":
        x[:, :64] += 50
    x, weight = x.bfloat16(), weight.bfloat16()
    options = {"eps": 1e-5, "activation": "relu", "residual": False, "layer_scale": None}

    def eager(dtype: torch.dtype) -> Tensor:
        hidden = F.linear(F.layer_norm(x.to(dtype), (width,), eps=1e-5), weight.to(dtype)).relu()
        return F.linear(hidden, second.to(dtype))

    for statistics in (statistics_of(x), None):
        ours, _ = fused_layer_norm_mlp(x, statistics, None, None, weight, None, second, None, **options)
        assert_rule({"y": ours}, {"y": eager(torch.bfloat16)}, {"y": eager(torch.float64)})


def test_the_reader_applies_its_own_epsilon(case: Case) -> None:
    half = case.to(torch.bfloat16)
    with torch.no_grad():
        x, statistics = half.x, statistics_of(half.x)
        for eps in (1e-6, 0.5):
            options = {"eps": eps, "activation": "gelu", "layer_scale": half.layer_scale, "residual": True}
            given, _ = fused_layer_norm_mlp(x, statistics, *half.parameters, **options)
            computed, _ = fused_layer_norm_mlp(x, None, *half.parameters, **options)
            assert (given - computed).abs().max() <= 2**-7 * computed.abs().max()


@pytest.mark.fast_cases("aot_eager")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_with_dynamic_batch(case: Case, compiler: str) -> None:
    compiled = torch.compile(
        lambda x: layer_norm_mlp(x, *case.parameters, layer_scale=case.layer_scale, backend="triton"),
        fullgraph=True, dynamic=True, backend=compiler,
    )  # fmt: skip
    for batch in (2, 3, 5):
        x = torch.randn(batch, 4, 32, device=DEVICE, requires_grad=True)
        expected = layer_norm_mlp(x, *case.parameters, layer_scale=case.layer_scale, backend="eager")
        y = compiled(x)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        ours, theirs = (torch.autograd.grad(out.square().sum(), [x, *case.parameters]) for out in (y, expected))
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)


class _Module(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.parameters_ = torch.nn.ParameterList([p.detach() for p in case.parameters if p is not None])

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm_mlp(x, *self.parameters_, backend="triton")


def test_export_gives_plain_operators(case: Case) -> None:
    program = torch.export.export(_Module(case), (case.x.detach(),))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [target for target in targets if "vit_fast" in target]
    assert any("layer_norm" in target for target in targets)
    expected = layer_norm_mlp(case.x, *case.parameters, backend="eager")
    torch.testing.assert_close(program.module()(case.x.detach()), expected, atol=1e-5, rtol=1e-5)


def test_flop_formula(case: Case) -> None:
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        case.forward("triton")
    assert forward.get_total_flops() == 4 * 18 * 32 * 48
    with FlopCounterMode(display=False) as both:
        case.forward("triton").sum().backward()
    assert both.get_total_flops() == 3 * 4 * 18 * 32 * 48


def test_autocast_computes_in_its_dtype_with_fp32_parameters(case: Case) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        y = case.forward("triton")
    assert y.dtype == torch.float32, "the residual stream stays what it was"
    y.backward(case.grad)
    assert case.x.grad is not None and case.x.grad.dtype == torch.float32
    weight = case.parameters[2]
    assert weight is not None and weight.grad is not None and weight.grad.dtype == torch.float32
    exact = case.to(torch.float64).run("eager")
    assert (y - exact["y"]).abs().max() <= 0.02 * exact["y"].abs().max()
    assert (weight.grad - exact["d fc1_weight"]).abs().max() <= 0.02 * exact["d fc1_weight"].abs().max()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(case: Case, reentrant: bool) -> None:
    expected = case.run("triton")
    y = checkpoint(lambda x: support.replace(case, x=x).forward("triton"), case.x, use_reentrant=reentrant)
    assert torch.equal(y, expected["y"])
    y.backward(case.grad)
    assert case.x.grad is not None and torch.equal(case.x.grad, expected["d x"])


def _layouts(x: Tensor) -> dict[str, Tensor]:
    M, C = x.shape
    padded = torch.full((M, C + 3), float("nan"), device=x.device, dtype=x.dtype)
    padded[:, 1 : C + 1] = x
    shifted = torch.full((M * C + 1,), float("nan"), device=x.device, dtype=x.dtype)
    shifted[1:] = x.flatten()
    return {
        "sliced": padded[:, 1 : C + 1],
        "transposed": x.t().contiguous().t(),
        "offset by one element": shifted[1:].view(M, C),
        "four dimensions": x.view(1, 2, M // 2, C),
    }


@pytest.mark.parametrize("layout", ["sliced", "transposed", "offset by one element", "four dimensions"])
def test_layouts(case: Case, layout: str) -> None:
    expected = case.run("triton")
    x = _layouts(case.x.detach())[layout].requires_grad_()
    y = support.replace(case, x=x).forward("triton")
    assert y.shape == x.shape
    torch.testing.assert_close(y.view_as(case.x), expected["y"])
    (dx,) = torch.autograd.grad(y, x, case.grad.view_as(y))
    torch.testing.assert_close(dx.view_as(case.x), expected["d x"])


def test_parameters_of_any_stride(case: Case) -> None:
    strided = tuple(
        p.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for p in case.parameters if p is not None
    )
    expected = case.run("triton")
    ours = support.replace(case, parameters=strided).run("triton")
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name])


def test_expanded_gradient(case: Case) -> None:
    (ours,) = torch.autograd.grad(case.forward("triton").sum(), case.x)
    (expected,) = torch.autograd.grad(case.forward("eager").sum(), case.x)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_no_rows(case: Case) -> None:
    empty = support.replace(case, x=case.x[:0].detach().requires_grad_(), grad=case.grad[:0])
    results = empty.run("triton")
    assert results["y"].shape == (0, 32)
    assert all(not gradient.any() for name, gradient in results.items() if name != "y")


def test_nan_stays_in_its_row(case: Case) -> None:
    clean = case.run("triton")["y"]
    with torch.no_grad():
        case.x[5, 3] = float("nan")
    y = case.forward("triton")
    assert y[5].isnan().all()
    assert torch.equal(y[torch.arange(18) != 5], clean[torch.arange(18) != 5])


def test_fewer_gradients_than_parameters(case: Case) -> None:
    """Frozen parameters get none, and do not disturb the others."""
    expected = case.run("triton")
    for parameter in (*case.parameters[:2], case.layer_scale):
        assert parameter is not None
        parameter.requires_grad_(False)
    weight = case.parameters[2]
    assert weight is not None
    (gradient,) = torch.autograd.grad(case.forward("triton"), weight, case.grad)
    assert torch.equal(gradient, expected["d fc1_weight"])


def _refusals(case: Case) -> list[tuple[str, Any, type[Exception], str]]:
    x, (gamma, beta, w1, b1, w2, b2) = case.x.detach(), (p.detach() for p in case.parameters if p is not None)

    def call(x: Tensor = x, w1: Tensor = w1, b1: Tensor = b1, gamma: Tensor = gamma, **options: Any) -> Any:
        return lambda: layer_norm_mlp(x, gamma, beta, w1, b1, w2, b2, backend="triton", **options)

    return [
        ("fp64", call(x.double()), UnsupportedInputError, "x must be .*, got torch.float64"),
        ("integers", call(x.int()), UnsupportedInputError, "x must be .*, got torch.int32"),
        (
            "fp16 weight for bf16 x",
            call(x.bfloat16(), w1.half()),
            UnsupportedInputError,
            "fc1_weight must be .* torch.float16",
        ),
        ("another device", call(w1=w1.to("meta")), UnsupportedInputError, "fc1_weight must be on .*, got meta"),
        ("width", call(x[:, :8]), ValueError, "norm_weight must have shape"),
        ("hidden", call(b1=b1[:5]), ValueError, "fc1_bias must have shape"),
        ("scalar", call(x[0, 0]), ValueError, "x and fc1_weight must have shapes"),
        ("gated activation", call(activation="swiglu"), ValueError, "activation must be one of"),
        ("unknown activation", call(activation="mish"), ValueError, "'mish'"),
    ]


@pytest.mark.parametrize("index", range(9))
def test_refusals_name_the_argument(case: Case, index: int) -> None:
    _, call, error, message = _refusals(case)[index]
    with pytest.raises(error, match=message):
        call()


def test_every_reason_is_given_at_once(case: Case) -> None:
    parameters = [p.detach() for p in case.parameters if p is not None]
    parameters[2] = parameters[2].to("meta")
    parameters[5] = parameters[5].half()
    with pytest.raises(UnsupportedInputError) as caught:
        layer_norm_mlp(case.x.detach().double(), *parameters, backend="triton")
    for part in ("x must be float32", "got torch.float64", "fc1_weight must be on", "got meta", "fc2_bias must be"):
        assert part in str(caught.value)


def test_vmap_is_refused(case: Case) -> None:
    with pytest.raises(UnsupportedInputError, match="fold the mapped dimension"):
        torch.vmap(lambda x: layer_norm_mlp(x, *case.parameters, backend="triton"))(case.x.detach().view(2, 9, 32))


def test_second_derivative_is_refused(case: Case) -> None:
    (gradient,) = torch.autograd.grad(case.forward("triton").square().sum(), case.x, create_graph=True)
    with pytest.raises(UnsupportedInputError, match="second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("options", [{}, {"init_values": 0.3, "residual": False, "bias": False, "activation": "silu"}])
def test_module(options: dict[str, Any]) -> None:
    module = LayerNormMLP(32, 48, backend="triton", **options).to(DEVICE)
    x = torch.randn(2, 9, 32, device=DEVICE, requires_grad=True)
    branch = module.fc2(ACTIVATIONS[module.activation](module.fc1(module.norm(x))))
    branch = branch if module.gamma is None else branch * module.gamma
    expected = x + branch if module.residual else branch
    y = module(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    leaves = [x, *module.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected))):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_module_refuses_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match="'mish'"):
        LayerNormMLP(32, 48, activation="mish")
