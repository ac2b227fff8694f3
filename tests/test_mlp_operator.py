"""layer_norm_mlp as an operator: tracing, layouts, statistics, refusals."""

from __future__ import annotations

import functools
from typing import Any

import mlp_support as support
import pytest
import torch
import torch.nn.functional as F
from mlp_support import DEVICE, NAMES, Case, assert_rule, make_case, statistics_of
from torch import Tensor

from vit_fast.errors import UnsupportedInputError
from vit_fast.ops import LayerNormMLP, Norm, layer_norm_mlp
from vit_fast.ops.layer_norm_mlp import fused_layer_norm_mlp
from vit_fast.ops.reference import ACTIVATIONS


@pytest.fixture
def case() -> Case:
    return make_case(18, 32, 48, torch.float32)


@pytest.mark.each_value
@pytest.mark.parametrize("width", [32, 100, 1100])
@pytest.mark.parametrize("rows", ["usual", "constant", "far from 0", "pieces apart"])
def test_passed_statistics_give_the_same_result(rows: str, width: int) -> None:
    """Tests one piece, a shorter last piece, and more pieces than are combined at once."""
    x, weight = torch.randn(18, width, device=DEVICE), torch.randn(48, width, device=DEVICE) * width**-0.5
    second = torch.randn(width, 48, device=DEVICE).bfloat16() * 48**-0.5
    if rows == "constant":
        x[::3] = 3.1
    elif rows == "far from 0":
        x += 100
    elif rows == "pieces apart":
        x[:, :64] += 50
    x, weight = x.bfloat16(), weight.bfloat16()
    eps = 0.5 if rows == "usual" else 1e-5  # whoever reads statistics applies an epsilon of its own
    options = {"eps": eps, "activation": "relu", "residual": False, "layer_scale": None}

    def eager(dtype: torch.dtype) -> Tensor:
        hidden = F.linear(F.layer_norm(x.to(dtype), (width,), eps=eps), weight.to(dtype)).relu()
        return F.linear(hidden, second.to(dtype))

    for statistics in (statistics_of(x), None):
        ours, _ = fused_layer_norm_mlp(x, statistics, None, None, weight, None, second, None, **options)
        assert_rule({"y": ours}, {"y": eager(torch.bfloat16)}, {"y": eager(torch.float64)})


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


zeros = functools.partial(torch.zeros, device=DEVICE)
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": Tensor.double}, UnsupportedInputError, "x must be .*, got torch.float64"),
    ({"x": Tensor.int}, UnsupportedInputError, "x must be .*, got torch.int32"),
    ({"x": Tensor.bfloat16, "fc1_weight": Tensor.half}, UnsupportedInputError, "fc1_weight must be .* torch.float16"),
    ({"fc1_weight": lambda w: w.to("meta")}, UnsupportedInputError, "fc1_weight must be on .*, got meta"),
    ({"x": lambda x: x[:, :8]}, ValueError, "norm_weight must have shape"),
    ({"fc1_bias": lambda b: b[:5]}, ValueError, "fc1_bias must have shape"),
    ({"x": lambda x: x[0, 0]}, ValueError, "x and fc1_weight must have shapes"),
    ({"activation": "swiglu"}, ValueError, "activation must be one of"),
    ({"norm": "batch_norm"}, ValueError, "norm must be one of 'layer_norm', 'rms_norm', got 'batch_norm'"),
    ({"norm": "rms_norm"}, ValueError, "bias must be None for 'rms_norm'"),
    (
        {"gate_weight": zeros(32, 32), "fc1_bias": None},
        ValueError,
        r"gate_weight must have shape \(48, 32\) .*, got \(32, 32\)",
    ),
    ({"gate_bias": zeros(48)}, ValueError, "gate_bias must be None without gate_weight"),
    ({"inner_norm": Norm(zeros(32))}, ValueError, r"inner_norm\.weight must have shape \(48,\), got \(32,\)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS)
def test_refusals_name_the_argument(case: Case, changes: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"x": case.x.detach(), **dict(zip(NAMES, (p.detach() for p in case.parameters)))}
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises(error, match=message):
        layer_norm_mlp(**given, backend="triton")


def test_every_reason_is_given_at_once(case: Case) -> None:
    parameters = [p.detach() for p in case.parameters if p is not None]
    parameters[2] = parameters[2].to("meta")
    parameters[5] = parameters[5].half()
    with pytest.raises(UnsupportedInputError) as caught:
        layer_norm_mlp(case.x.detach().double(), *parameters, backend="triton")
    for part in ("x must be float32", "got torch.float64", "fc1_weight must be on", "got meta", "fc2_bias must be"):
        assert part in str(caught.value)


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
