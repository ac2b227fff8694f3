"""The operators under torch.func, forward-mode derivatives, fx and the compiler: torch's answer or a plain refusal."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DEVICE
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vit_fast import create_model, ops
from vit_fast.errors import UnsupportedInputError
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors

pytest.importorskip("triton", reason="the kernels need triton")

C = 32
Scalar = Callable[..., Tensor]


def _drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE) for shape in shapes]


def _half(x: Tensor, backend: str) -> Tensor:
    """The first half of a block."""
    gamma, beta, qkv, bias, proj, proj_bias = PARAMETERS["half"]
    if backend == "triton":
        absent: Any = (None,) * 8
        tensors = BlockTensors(*PARAMETERS["half"], *absent)
        return fused_block(x[None], None, tensors, heads=2, eps=(1e-6, 0.0), next_statistics=True)[0][0]
    packed = F.linear(F.layer_norm(x, (C,), gamma, beta, 1e-6), qkv, bias).view(1, -1, 3, 2, C // 2)
    return x + F.linear(ops.attention_qkvpacked(packed, backend="eager").flatten(2)[0], proj, proj_bias)


torch.manual_seed(1)
PARAMETERS = {
    # small enough that softmax does not saturate: else neither output nor gradient would depend on much
    "half": [0.2 * tensor for tensor in _drawn((C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,))],
    "mlp": _drawn((C,), (C,), (48, C), (48,), (C, 48), (C,)),
}
KV = torch.randn(2, 1, 2, 5, 16, device=DEVICE)
OPERATORS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "attention": lambda x, backend: ops.attention(x.view(1, 2, 3, 16), *KV, backend=backend),
    "attention_qkvpacked": lambda x, backend: ops.attention_qkvpacked(x.view(1, 2, 3, 1, 16), backend=backend),
    "layer_norm_mlp": lambda x, backend: ops.layer_norm_mlp(x, *PARAMETERS["mlp"], backend=backend),
    "half of a block": _half,
}
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def _input() -> Tensor:
    return torch.randn(3, C, device=DEVICE)


def _scalar(operator: str, backend: str) -> Scalar:
    return lambda x: OPERATORS[operator](x, backend).square().mean()


def _close(value: Any, right: Any) -> None:
    torch.testing.assert_close(value, right, atol=2e-5, rtol=2e-5)


@every_operator
def test_reverse_mode_of_torch_func(operator: str) -> None:
    x, ours, right = _input(), _scalar(operator, "triton"), _scalar(operator, "eager")
    expected = torch.func.grad(right)(x)
    _close(torch.func.grad(ours)(x), expected)
    value, back = torch.func.vjp(ours, x)
    _close((value, back(torch.ones_like(value))[0]), (right(x), expected))
    _close(torch.func.grad(lambda factor: ours(x) * factor)(torch.ones((), device=DEVICE)), right(x))


@every_operator
def test_forward_mode_is_refused(operator: str) -> None:
    x, ours = _input(), _scalar(operator, "triton")

    def dual(grad: bool, by: Scalar = ours) -> Any:
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            return forward_ad.unpack_dual(by(forward_ad.make_dual(x, x)))

    refused: list[Callable[[], Any]] = [
        lambda: torch.func.jvp(ours, (x,), (x,)),
        lambda: torch.func.jvp(torch.func.grad(ours), (x,), (x,)),
        lambda: dual(True),
        lambda: dual(False),
    ]
    for attempt in refused:
        with pytest.raises(UnsupportedInputError, match=r"forward-mode derivative.*with backend='triton'"):
            attempt()
    value, tangent = torch.func.jvp(lambda factor: ours(x) * factor, *[(torch.full((), 2.0, device=DEVICE),)] * 2)
    _close((value, tangent), (2 * ours(x),) * 2)  # nothing that the operator sees has a tangent
    assert dual(True, _scalar(operator, "eager")).tangent is not None


@every_operator
def test_other_transforms_are_refused(operator: str) -> None:
    x, ours = _input(), _scalar(operator, "triton")
    with pytest.raises(UnsupportedInputError, match="vmap"):
        torch.vmap(torch.func.grad(ours))(torch.stack([x, x]))
    with pytest.raises(UnsupportedInputError, match="second derivative"):
        torch.func.grad(lambda x: torch.func.grad(ours)(x).sum())(x)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(call.name())
        return call(*args, **(kwargs or {}))


@every_operator
def test_modes_and_subclasses_see_the_operator(operator: str) -> None:
    """Calls reach the implementation past the dispatcher only where nothing else would see them."""
    x, ours = _input(), OPERATORS[operator]
    expected = ours(x, "triton")
    leaf = x.clone().requires_grad_()
    with _Seen() as seen, FlopCounterMode(display=False) as counter:
        ours(leaf, "triton").square().sum().backward()
    made = [name.removeprefix("vit_fast::") for name in seen.names if name.startswith("vit_fast::")]
    assert len(made) == 2 and made[1] == f"{made[0]}_backward" and counter.get_total_flops() > 0
    twice = TwoTensor(x.clone(), 2 * x)
    if operator.startswith("attention"):  # the others have parameters, which would have to be of the class, too
        found = ours(twice, "triton")
        _close((found.a, found.b), (ours(x, "triton"), ours(2 * x, "triton")))
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    _close(ours(negative, "triton"), expected)
    _close(torch.func.functionalize(lambda x: ours(x, "triton"))(x), expected)
    with torch.inference_mode():
        assert ours(x, "triton").is_inference()


@pytest.mark.slow
def test_gradients_of_a_whole_model_by_torch_func() -> None:
    settings = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = create_model("vit_tiny_patch16_224", backend="triton", **settings).to(DEVICE)
    images, parameters = torch.randn(2, 3, 32, 32, device=DEVICE), dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (images,)).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    _close(gradients, {name: parameter.grad for name, parameter in parameters.items()})


@pytest.mark.fast_cases("attention")
@every_operator
def test_the_compiler_meets_a_transform(operator: str) -> None:
    """Whatever is transformed runs uncompiled; where that is forbidden, the error says so."""
    x, ours = _input(), _scalar(operator, "triton")
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(ours), backend="aot_eager")
    _close(compiled(x), torch.func.grad(_scalar(operator, "eager"))(x))
    with pytest.raises(UnsupportedInputError, match="forward-mode"):
        torch.compile(lambda x: torch.func.jvp(ours, (x,), (x,)), backend="aot_eager")(x)
    torch._dynamo.reset()
    whole = torch.compile(torch.func.grad(ours), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="forward-mode derivatives run uncompiled"):
        whole(x)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_a_compiled_function_refuses_forward_mode(warm: bool) -> None:
    x, ours = _input(), _scalar("attention", "triton")
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager")
    if warm:
        _close(compiled(x), ours(x))
    with forward_ad.dual_level(), pytest.raises(UnsupportedInputError, match="forward-mode"):
        compiled(forward_ad.make_dual(x, x))
    _close(compiled(x), ours(x))


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes "auto" mean triton for the stand-in of torch's function, and counts what reaches the kernel."""
    module = import_module("vit_fast.ops.attention")  # by name: `vit_fast.ops.attention` is also the function
    right, calls = module.attention_kernel, []

    def counted(*args: Any) -> Any:
        calls.append("kernel")
        return right(*args)

    monkeypatch.setattr(module, "resolve_backend", lambda backend, *_: "triton" if backend == "auto" else backend)
    monkeypatch.setattr(module, "attention_kernel", counted)
    return calls


def _qkv(head_dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 2, 5, head_dim, device=DEVICE)
    return q, k, v


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_stand_in_inside_transforms_is_torchs(compiled: bool, kernel_calls: list[str]) -> None:
    q, k, v = _qkv()

    def results(sdpa: Callable[..., Tensor]) -> tuple[Any, ...]:
        def loss(q: Tensor) -> Tensor:
            return sdpa(q, k, v).square().sum()

        def per_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q[None], k[None], v[None]).square().sum()

        functions: list[tuple[Any, ...]] = [
            (torch.func.grad(loss), q),
            (torch.vmap(sdpa), q[:, None], k[:, None], v[:, None]),
            (torch.vmap(torch.func.grad(per_sample)), q, k, v),
        ]
        if not compiled:
            functions.append((sdpa_kernel(SDPBackend.MATH)(lambda q: torch.func.jvp(loss, (q,), (q,))), q))
        torch._dynamo.reset()
        return tuple(
            (torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f)(*args) for f, *args in functions
        )

    _close(results(ops.scaled_dot_product_attention), results(F.scaled_dot_product_attention))
    assert kernel_calls == []


@pytest.mark.slow
def test_the_stand_in_compiles_with_dynamic_shapes(kernel_calls: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ops.scaled_dot_product_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    for head_dim, tokens in ((16, 5), (32, 5), (32, 4)):
        q, k, v = (tensor[:, :, :tokens] for tensor in _qkv(head_dim))
        _close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
        _close(compiled(q, k, v, scale=0.3), F.scaled_dot_product_attention(q, k, v, scale=0.3))


class _Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.scaled_dot_product_attention(q, k, v)


def test_the_stand_in_under_fx(kernel_calls: list[str]) -> None:
    q, k, v = _qkv()
    for traced in (torch.fx.symbolic_trace(_Attend()), torch.fx.symbolic_trace(ops.scaled_dot_product_attention)):
        extra = () if len(list(traced.graph.find_nodes(op="placeholder"))) == 3 else (None, 0.0, False, None, False)
        _close(traced(q, k, v, *extra), F.scaled_dot_product_attention(q, k, v))


def test_the_stand_in_without_channels(kernel_calls: list[str]) -> None:
    q, k, v = _qkv(0)
    _close(ops.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    with pytest.raises(UnsupportedInputError, match="head_dim must be between 16 and 128, got 0"):
        ops.attention(q, k, v, backend="triton")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_stand_in_obeys_a_restriction_to_the_formula(compiled: bool, kernel_calls: list[str]) -> None:
    q, k, v = _qkv()

    def attend(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return ops.scaled_dot_product_attention(q, k, v)

    torch._dynamo.reset()
    function = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    _close(function(q), F.scaled_dot_product_attention(q, k, v))
    assert kernel_calls == []
    if not compiled:
        x = q.clone().requires_grad_()
        (grad,) = torch.autograd.grad(attend(x).square().sum(), x, create_graph=True)
        grad.sum().backward()  # the second derivative, which the kernel has not
        assert x.grad is not None and x.grad.isfinite().all()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        ops.scaled_dot_product_attention(q, k, v)
    assert kernel_calls == ["kernel"]
