"""The attention operators of the triton backend: registration, compile, export, autograd, refusals, the whole model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_support import DEVICE, FORWARD_FACTOR, GRADIENT_FACTOR, assert_as_exact_as_eager
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vit_fast import create_model, ops
from vit_fast.errors import UnsupportedInputError
from vit_fast.ops.attention_op import attention_kernel, unsupported_reasons

pytest.importorskip("triton", reason="the kernels need triton")

# by name: `vit_fast.ops.attention` is also the function
attention_module = import_module("vit_fast.ops.attention")


def _qkv(batch: int = 2, tokens: int = 17, heads: int = 2, head_dim: int = 16, **kwargs: Any) -> Tensor:
    return torch.randn(batch, tokens, 3, heads, head_dim, device=DEVICE, **kwargs)


def _separate() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 2, 5, 32, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 9, 32, device=DEVICE)
    return q, k, v


def _packed(qkv: Tensor) -> Tensor:
    return ops.attention_qkvpacked(qkv, backend="triton")


@pytest.mark.fast_cases("aot_eager")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiles_whole_with_a_dynamic_batch(compiler: str) -> None:
    def function(qkv: Tensor) -> Tensor:
        return _packed(qkv * 2).sin()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)
    for batch in (2, 3, 5):
        qkv = _qkv(batch).requires_grad_()
        right = function(qkv)
        (right_grad,) = torch.autograd.grad(right.sum(), qkv)
        value = compiled(qkv)
        (grad,) = torch.autograd.grad(value.sum(), qkv)
        torch.testing.assert_close(value, right)
        torch.testing.assert_close(grad, right_grad)


def test_the_choice_of_a_backend_compiles_whole() -> None:
    """What runs before the operator may not break the graph either: availability is a constant to the compiler."""

    def function(q: Tensor) -> Tensor:
        return q if unsupported_reasons(q, q, q, 0.25) else q + 1

    q, _, _ = _separate()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), q + 1)


class _Both(torch.nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.transpose(1, 3).unbind(2)
        return _packed(qkv) + ops.attention(q, k, v, backend="triton").transpose(1, 2)


def test_an_exported_program_holds_sdpa() -> None:
    qkv = _qkv()
    program = torch.export.export(_Both(), (qkv,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("scaled_dot_product_attention" in target for target in targets) == 2
    assert not any("vit_fast" in target for target in targets)
    torch.testing.assert_close(program.module()(qkv), _Both()(qkv))


def test_vmap_is_refused() -> None:
    with pytest.raises(UnsupportedInputError, match="vmap"):
        torch.vmap(_packed)(torch.stack([_qkv(), _qkv()]))


def test_second_derivative_is_refused() -> None:
    qkv = _qkv().requires_grad_()
    (grad,) = torch.autograd.grad(_packed(qkv).sum(), qkv, create_graph=True)
    with pytest.raises(UnsupportedInputError, match="second derivative"):
        grad.sum().backward()


def test_every_reason_is_listed() -> None:
    q = torch.randn(1, 2, 5, 8, device=DEVICE, dtype=torch.float64)
    with pytest.raises(UnsupportedInputError) as caught:
        ops.attention(q, q, q.transpose(2, 3).contiguous().transpose(2, 3), scale=-1.0, backend="triton")
    text = str(caught.value)
    for part in (
        "q must be float32, float16 or bfloat16, got torch.float64",
        "v must have stride 1 along D, got 5",
        "got 8",
        "got -1.0",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :, :3], v), "k and v must have one shape"),
        (lambda q, k, v: (q, k.half(), v), "got torch.float16"),
        (lambda q, k, v: (q, k.to("meta"), v), "on meta"),
        (lambda q, k, v: (q[0], k, v), "q must have shape"),
        (lambda q, k, v: (q[:1], k, v), "B, H and D of q and k must be equal"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "int64"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "must have tokens"),
    ],
)
def test_bad_inputs_are_named(change: Callable[..., tuple[Tensor, Tensor, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.attention(*change(*_separate()), backend="triton")


def test_packed_input_of_the_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"qkv must have shape \[B, N, 3, H, D\]"):
        _packed(torch.randn(2, 17, 2, 2, 16, device=DEVICE))


def test_stand_in_for_torch_uses_the_kernel_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU "auto" never means triton: here it is made to, and every call is counted."""
    q, k, v = _separate()
    calls: list[str] = []

    def to_triton(backend: str, *_: object) -> str:
        return "triton" if backend == "auto" else backend

    def counted(*args: Any) -> Any:
        calls.append("kernel")
        return attention_kernel(*args)

    monkeypatch.setattr(attention_module, "resolve_backend", to_triton)
    monkeypatch.setattr(attention_module, "attention_kernel", counted)
    torch.testing.assert_close(ops.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert calls == ["kernel"]
    mask = torch.ones(5, 9, dtype=torch.bool, device=DEVICE).tril(3)
    wide = torch.randn(2, 4, 5, 32, device=DEVICE)
    others = [
        ((q, k, v), {"attn_mask": mask}),
        ((q, k, v), {"is_causal": True}),
        ((q, k, v), {"scale": -0.5}),
        ((q[..., :8], k[..., :8], v[..., :8]), {}),
        ((q[0], k[0], v[0]), {}),
        ((q, k, v[..., :16]), {}),
        ((wide, k, v), {"enable_gqa": True}),
        ((q.double(), k.double(), v.double()), {}),
    ]
    for inputs, options in others:
        value = ops.scaled_dot_product_attention(*inputs, **options)
        torch.testing.assert_close(value, F.scaled_dot_product_attention(*inputs, **options))
    torch.manual_seed(3)
    dropped = ops.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert calls == ["kernel"]


def test_flop_formulas() -> None:
    qkv, (q, k, v) = _qkv().requires_grad_(), _separate()
    with FlopCounterMode(display=False) as counter:
        _packed(qkv).sum().backward()
        ops.attention(q, k, v, backend="triton")
    assert counter.get_total_flops() == 14 * 2 * 2 * 17 * 17 * 16 + 4 * 2 * 2 * 5 * 9 * 32


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import vit_fast", "import torch.utils.flop_counter"])
def test_flop_counters_made_before_triton_was_asked_for_count_us(first: str) -> None:
    code = f"""
{first}
import torch
from torch.utils.flop_counter import FlopCounterMode
counter = FlopCounterMode(display=False)
from vit_fast import ops
with counter:
    ops.attention(*torch.randn(3, 1, 2, 4, 16, device="{DEVICE}"), backend="triton")
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [str(4 * 2 * 4 * 4 * 16)], done.stderr


def test_autocast_computes_in_its_dtype() -> None:
    qkv, (q, k, v) = _qkv(), _separate()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert _packed(qkv).dtype == torch.bfloat16
        assert ops.attention(q, k.bfloat16(), v, backend="triton").dtype == torch.bfloat16


def test_checkpointing_gives_the_same_gradient() -> None:
    qkv = _qkv().requires_grad_()
    (right,) = torch.autograd.grad(_packed(qkv).sin().sum(), qkv)
    value = checkpoint(lambda x: _packed(x).sin(), qkv, use_reentrant=False)
    (grad,) = torch.autograd.grad(value.sum(), qkv)
    assert torch.equal(grad, right)


def test_expanded_gradient() -> None:
    """`sum` hands back one scalar expanded to the whole output."""
    qkv = _qkv().requires_grad_()
    (grad,) = torch.autograd.grad(_packed(qkv).sum(), qkv)
    (right,) = torch.autograd.grad(ops.attention_qkvpacked(qkv, backend="eager").sum(), qkv)
    torch.testing.assert_close(grad, right)


def test_whole_model_forward_and_backward() -> None:
    """create_model(backend="triton") against the same model in fp64 eager, in eager's own error."""
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}
    models = {
        name: create_model("vit_base_patch16_224", backend=backend, **small).to(DEVICE)
        for name, backend in (("fast", "triton"), ("eager", "eager"), ("exact", "eager"))
    }
    for name in ("eager", "exact"):
        models[name].load_state_dict(models["fast"].state_dict())
    models["exact"].double()
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    outputs, gradients = {}, {}
    for name, model in models.items():
        outputs[name] = model(images.double() if name == "exact" else images)
        outputs[name].square().sum().backward()
        gradients[name] = model.blocks[0].attn.qkv.weight.grad
    assert_as_exact_as_eager("logits", outputs["fast"], outputs["eager"], outputs["exact"], FORWARD_FACTOR)
    assert_as_exact_as_eager("qkv", gradients["fast"], gradients["eager"], gradients["exact"], GRADIENT_FACTOR)


def test_the_stand_in_answers_where_only_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap and subclasses go to torch's own function, also where the kernel would be chosen."""
    monkeypatch.setattr(import_module("vit_fast.ops.attention"), "resolve_backend", lambda *_: "triton")
    q, k, v = torch.randn(3, 2, 2, 3, 17, 16).unbind(0)  # each [2, 2, 3, 17, 16]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    mapped = torch.vmap(ops.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(mapped, expected, atol=1e-5, rtol=1e-5)

    class Marked(torch.Tensor):
        pass

    marked = ops.scaled_dot_product_attention(*(t[0].as_subclass(Marked) for t in (q, k, v)))
    torch.testing.assert_close(marked.as_subclass(torch.Tensor), expected[0], atol=1e-5, rtol=1e-5)
