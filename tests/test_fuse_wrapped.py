"""Fused models that other packages change: weights of another tensor class (torchao), hooks taken away (accelerate)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_models import LIBRARIES, SUBJECTS
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedNormMlp


class Int8Weight(Tensor):
    """What torchao puts in the place of a linear's weight: only F.linear knows how to compute with it."""

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=values.device)

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.values * weight.scales, bias)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scales)
        raise NotImplementedError(f"{func} of an Int8Weight")


def quantize_by_hand(model: nn.Module) -> None:
    for linear in model.modules():
        if type(linear) is nn.Linear:
            scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            values = (linear.weight.detach() / scales).round().to(torch.int8)
            linear.weight = nn.Parameter(Int8Weight(values, scales), requires_grad=False)


def quantize_by_torchao(model: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


@pytest.mark.each_value
@pytest.mark.parametrize("quantize", [quantize_by_hand, quantize_by_torchao])
@pytest.mark.parametrize("library", [*LIBRARIES, "torch"])
def test_weights_of_another_class_are_left_to_their_own_linear(
    library: str, quantize: Callable[[nn.Module], None]
) -> None:
    subject = SUBJECTS[LIBRARIES.get(library, "torch-encoder")]
    model = subject.build().to(DEVICE).eval()
    inputs = {name: tensor[:1].to(DEVICE) for name, tensor in subject.inputs().items()}
    twin = copy.deepcopy(model)
    quantize(twin)
    with torch.inference_mode():
        expected = subject.run(twin, inputs)
        vit_fast.fuse(model, "triton").require_all()
        quantize(model)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)
        report = vit_fast.fuse(model, "triton")
        left = [reason for module in report.left if module.part == "norm + MLP" for reason in module.reasons]
        assert left
        assert all(".weight must be an ordinary tensor, got " in reason for reason in left)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def hook_by_hand(module: nn.Module) -> Callable[[], None]:
    """What accelerate's add_hook_to_module and remove_hook_from_module leave behind: a forward on the instance."""
    before = module.forward
    module.forward = functools.partial(lambda *args, **kwargs: before(*args, **kwargs))
    return lambda: setattr(module, "forward", before)


def hook_by_accelerate(module: nn.Module) -> Callable[[], None]:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())
    return lambda: hooks.remove_hook_from_module(module)


@pytest.mark.each_value
@pytest.mark.parametrize("hook", [hook_by_hand, hook_by_accelerate])
@pytest.mark.parametrize("library", LIBRARIES)
def test_hooks_that_were_taken_away_leave_a_model_fused(library: str, hook: Callable[[nn.Module], Any]) -> None:
    subject = SUBJECTS[LIBRARIES[library]]
    model, inputs = subject.build().eval(), subject.inputs()
    expected = subject.run(model, inputs)
    vit_fast.fuse(model, "sdpa").require_all()
    for remove in [hook(module) for module in model.modules()]:
        torch.testing.assert_close(subject.run(model, inputs), expected)
        remove()
    torch.testing.assert_close(subject.run(model, inputs), expected)
    assert not any(block.runs_as_it_was() for block in model.modules() if isinstance(block, FusedNormMlp))
    assert vit_fast.fuse(model, "eager").require_all()
    torch.testing.assert_close(subject.run(model, inputs), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("library", ["timm-vit", "transformers-vit", "transformers-dinov2", "torchvision-vit"])
def test_a_container_replaced_after_fuse_is_called(library: str, backend: str) -> None:
    """Not only a linear inside the MLP: the MLP as a whole, whose linears are then no longer there."""
    subject = SUBJECTS[library]
    model, inputs = subject.build().eval(), subject.inputs()
    vit_fast.fuse(model, backend)
    block = next(module for module in model.modules() if isinstance(module, FusedNormMlp))
    path = next(path for path in ("mlp", "intermediate") if hasattr(block, path))
    setattr(block, path, _Doubled(getattr(block, path)))
    found = subject.run(model, inputs)
    vit_fast.unfuse(model)
    torch.testing.assert_close(found, subject.run(model, inputs), rtol=1e-4, atol=1e-4)


class _Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        return 2 * self.inner(*args)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_an_activation_changed_after_fuse_is_followed(backend: str) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, activation="gelu", norm_first=True, batch_first=True)
    model, x = nn.Sequential(layer).to(DEVICE), torch.randn(2, 5, 32, device=DEVICE)
    vit_fast.fuse(model, backend)
    layer.activation = F.relu
    found = model(x)
    vit_fast.unfuse(model)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


def test_another_kind_of_gelu_after_fuse_is_followed() -> None:
    subject = SUBJECTS["timm-vit"]
    model, inputs = subject.build().eval(), subject.inputs()
    vit_fast.fuse(model, "sdpa")
    for block in model.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")
    found = subject.run(model, inputs)
    vit_fast.unfuse(model)
    torch.testing.assert_close(found, subject.run(model, inputs), rtol=1e-6, atol=1e-6)
