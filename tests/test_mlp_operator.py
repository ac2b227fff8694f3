"""layer_norm_mlp as an operator: layouts, statistics, memory, changed weights, errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_execution import few
from mlp_support import DEVICE, Case, check_case, make_case
from torch import Tensor

import vit_fast
from vit_fast.kernels.matmul.matmul_tiles import load_tile, store_tile
from vit_fast.ops import LayerNormMLP, Norm, layer_norm_mlp
from vit_fast.ops.reference import ACTIVATIONS


@pytest.fixture
def case() -> Case:
    return make_case(18, 32, 48, torch.float32)


@pytest.mark.parametrize("layout", ["sliced", "transposed", "offset by one element", "four dimensions"])
def test_layouts(case: Case, layout: str) -> None:
    expected, (M, C) = case.run("triton"), case.x.shape
    if layout == "transposed":
        x = case.x.detach().t().contiguous().t()
    elif layout == "four dimensions":
        x = case.x.detach().view(1, 2, M // 2, C)
    else:
        wide = C + 3 if layout == "sliced" else C
        x = torch.full((M * wide + 1,), float("nan"), device=DEVICE)[1:].view(M, wide)[:, :C]
        x.copy_(case.x.detach())
    y = case.but(x=x.requires_grad_()).forward("triton")
    assert y.shape == x.shape
    torch.testing.assert_close(y.view_as(case.x), expected["y"])
    (dx,) = torch.autograd.grad(y, x, case.grad.view_as(y))
    torch.testing.assert_close(dx.view_as(case.x), expected["d x"])


def test_parameters_of_any_stride() -> None:
    """fc1 and its gate may also be halves of one weight."""
    case = make_case(18, 32, 48, torch.float32, gated=True)
    packed = torch.cat((case.t.fc1_weight, case.t.gate_weight)).detach().requires_grad_()
    up, gate = packed.chunk(2)
    strided = {
        name: leaf.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for name, leaf in case.leaves().items()
    }
    expected = case.run("triton")
    for other in (case.but(**strided), case.but(fc1_weight=up, gate_weight=gate)):
        for name, found in other.run("triton").items():
            torch.testing.assert_close(found, expected[name])


@pytest.mark.parametrize("residual", [True, False])
def test_fp32_layer_scale_does_not_change_the_dtype(residual: bool) -> None:
    case = make_case(18, 32, 48, torch.float16, residual=residual)
    case = case.but(scale2=case.t.scale2.detach().float().requires_grad_())
    found, expected = (case.forward(backend) for backend in ("triton", "eager"))
    assert found.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)


def test_empty_and_nan_tokens(case: Case) -> None:
    results = case.but(x=case.x[:0].detach().requires_grad_(), grad=case.grad[:0]).run("triton")
    assert results["y"].shape == (0, 32) and not any(gradient.any() for gradient in results.values())
    clean = case.run("triton")["y"]
    with torch.no_grad():
        case.x[5, 3] = float("nan")
    y = case.forward("triton")
    assert y[5].isnan().all()
    assert torch.equal(y[torch.arange(18) != 5], clean[torch.arange(18) != 5])


def test_fewer_gradients_than_parameters(case: Case) -> None:
    expected = case.run("triton")
    for parameter in (case.t.norm2_weight, case.t.norm2_bias, case.t.scale2):
        parameter.requires_grad_(False)
    (gradient,) = torch.autograd.grad(case.forward("triton"), case.t.fc1_weight, case.grad)
    assert torch.equal(gradient, expected["d fc1_weight"])


NAMES = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
zeros = functools.partial(torch.zeros, device=DEVICE)
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"x": Tensor.int}, "x must be .*, got torch.int32"),
    ({"x": Tensor.bfloat16, "fc1_weight": Tensor.half}, "fc1_weight must be .* torch.float16"),
    (
        {"x": Tensor.double, "fc1_weight": lambda w: w.to("meta"), "fc2_bias": Tensor.half},
        r"x must be float32.* got torch.float64(.|\n)*fc1_weight must be on .*, got meta(.|\n)*fc2_bias must be",
    ),
    ({"x": lambda x: x[:, :8]}, "norm_weight must have shape"),
    ({"fc1_bias": lambda b: b[:5]}, "fc1_bias must have shape"),
    ({"fc1_weight": lambda w: 3}, "fc1_weight must be a torch.Tensor, got 3"),
    ({"x": lambda x: x[0, 0]}, "x and fc1_weight must have shapes"),
    ({"activation": "swiglu"}, "activation must be one of"),
    ({"norm": "batch_norm"}, "norm must be one of 'layer_norm', 'rms_norm', got 'batch_norm'"),
    ({"norm": "rms_norm"}, "the bias of norm must be None for 'rms_norm'"),
    ({"gate_weight": zeros(32, 32), "fc1_bias": None}, r"gate_weight must have shape \(48, 32\) .* \(32"),
    ({"gate_bias": zeros(48)}, "gate_bias must be None without gate_weight"),
    ({"gate_weight": zeros(48, 32)}, "fc1_bias and gate_bias must both be tensors or both be None"),
    ({"inner_norm": Norm(zeros(32))}, r"inner_norm\.weight must have shape \(48,\), got \(32,\)"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_errors_name_the_argument(case: Case, changes: dict[str, Any], message: str) -> None:
    given = dict(zip(("x", *NAMES), (case.x.detach(), *(tensor.detach() for tensor in case.t[7:13]))))
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises((ValueError, TypeError), match=message):
        layer_norm_mlp(**given, backend="triton")


@pytest.mark.parametrize("options", [{}, {"init_values": 0.3, "residual": False, "bias": False, "activation": "silu"}])
def test_module_follows_its_weights(options: dict[str, Any]) -> None:
    """Also after writes that torch does not count as a new version, as peft and many loaders make them."""
    module = LayerNormMLP(32, 48, backend="triton", **options).to(DEVICE)
    x = torch.randn(2, 9, 32, device=DEVICE, requires_grad=True)
    leaves = [x, *module.parameters()]
    for _ in range(2):
        branch = module.fc2(ACTIVATIONS[module.activation](module.fc1(module.norm(x))))
        branch = branch if module.gamma is None else branch * module.gamma
        expected, y = x + branch if module.residual else branch, module(x)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
        for gradient, peer in zip(*(torch.autograd.grad(out.square().mean(), leaves) for out in (y, expected))):
            torch.testing.assert_close(gradient, peer, atol=1e-4, rtol=1e-4)
        for parameter in module.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    with pytest.raises(ValueError, match="'mish'"):
        LayerNormMLP(32, 48, activation="mish")


@triton.jit
def _copy_tile_kernel(source, target, row, col, rows, columns, SIZE: tl.constexpr):
    tile = load_tile(source, row, col, rows, columns, SIZE, SIZE, False)
    store_tile(target, tile, row, col, rows, columns, SIZE, SIZE, False)


@pytest.mark.parametrize(("rows", "columns"), [(2**31 // 3072 + 40, 3072), (40, 2**31 // 32)])
def test_tiles_beyond_two_to_the_31_elements(rows: int, columns: int) -> None:
    """The last tile of two tensors of more than 2^31 elements; only the pages that it touches exist."""
    source, target = (torch.empty(rows, columns, dtype=torch.float16, device=DEVICE) for _ in range(2))
    assert source.numel() > 2**31
    row, col = rows - 20, columns - 20
    source[row:, col:] = torch.randn(20, 20, dtype=torch.float16, device=DEVICE)
    target[row:, col:] = 0
    _copy_tile_kernel[(1,)](source, target, row, col, rows, columns, 32)
    assert torch.equal(target[row:, col:], source[row:, col:])


def test_training_keeps_less_than_torch() -> None:
    """Per block: x, qkv, lse, attention, x and z, and no normalized copies, no activated hidden layer."""

    def saved_bytes(backend: str) -> int:
        model = vit_fast.create_model("vit_test", backend=backend).to(DEVICE).train()
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(4, 3, 32, 32, device=DEVICE)).sum().backward()
        return sum(kept.values()) - sum(kept.get(p.data_ptr(), 0) for p in model.parameters())

    assert saved_bytes("triton") < 0.75 * saved_bytes("sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 127, 197, few(50_432, 256)])
def test_vit_b_against_fp64(M: int) -> None:
    check_case(make_case(M, few(768, 96), few(3072, 384), torch.bfloat16))


@pytest.mark.gpu
def test_a_training_step_in_a_captured_graph() -> None:
    """Forward and backward captured once, replayed on other tokens; the same bits as 50 calls without a graph."""
    case = make_case(few(394, 70), few(192, 64), few(768, 96), torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        case.run("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run("triton")
    with torch.no_grad():
        case.x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for _ in range(few(50, 2)):
        for name, expected in case.run("triton").items():
            assert torch.equal(results[name], expected), name
