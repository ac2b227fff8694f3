"""Blocks that users change before or after fuse: the change takes effect, or fuse skips the block."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_models import LIBRARIES, SUBJECTS, gradients, plain_vit, tiny_timm
from kernel_support import DEVICE
from torch import Tensor, nn
from torch.nn.utils import prune

import vit_fast
from vit_fast.blocks.fused import FusedModule, FusedNormMlp

Change = Callable[[Any], object]


class LoraLinear(nn.Module):
    """A linear layer wrapped as by peft: it exposes the weight of the layer and adds to its output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, device=base.weight.device)
        self.up = nn.Linear(2, base.out_features, bias=False, device=base.weight.device)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        return 2 * self.inner(*args)


def replace_mlp_forward(block: Any) -> None:
    mlp = block.mlp
    mlp.forward = lambda x: mlp.fc2(mlp.act(mlp.fc1(x))) * 3


def quantize(block: Any) -> None:
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        torch.ao.quantization.quantize_dynamic(block, {nn.Linear}, dtype=torch.qint8, inplace=True)


def hook_norm(block: Any) -> None:
    block.norm2.register_forward_hook(lambda module, args, output: output * 2)


def pre_hook_activation(block: Any) -> None:
    block.mlp.act.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


# Changes of timm's and our blocks, with the reason that fuse then reports.
ANY: dict[str, tuple[Change, str]] = {
    "LoRA": (lambda block: setattr(block.mlp, "fc1", LoraLinear(block.mlp.fc1)), "must be torch.nn.Linear itself, got"),
    "parametrization": (
        lambda block: nn.utils.parametrizations.weight_norm(block.mlp.fc1), "must be torch.nn.Linear itself, got ",
    ),
    "pruning": (lambda block: prune.l1_unstructured(block.mlp.fc2, "weight", 0.5), "mlp.fc2 has hooks"),
    "forward hook": (hook_norm, "norm2 has hooks, which would no longer run"),
    "quantised linears": (quantize, "got torch.ao.nn.quantized.dynamic.modules.linear.Linear"),
    "other norm": (lambda block: setattr(block, "norm2", nn.Softmax(-1)), "or RMSNorm, got a Softmax"),
}  # fmt: skip
CHANGES: dict[str, dict[str, tuple[Change, str]]] = {
    "timm": ANY
    | {
        "forward pre-hook": (pre_hook_activation, "mlp.act has hooks, which would no longer run"),
        "replaced forward": (replace_mlp_forward, "mlp.forward was replaced on the instance"),
        "unknown activation": (lambda block: setattr(block.mlp, "act", nn.Tanh()), "mlp.act must be one of gelu"),
    },
    "ours": ANY
    | {
        "no epsilon": (lambda block: setattr(block, "norm2", nn.RMSNorm(64)), "norm2.eps must be a number, got None"),
        "other MLP": (
            lambda block: setattr(block, "mlp", nn.Linear(64, 64)),
            "mlp must be the Mlp of vit_fast or the Ga",
        ),
    },
}


@pytest.mark.parametrize(
    ("library", "change"), [(library, change) for library, changes in CHANGES.items() for change in changes]
)
def test_a_changed_block_computes_the_change_and_is_skipped_with_a_reason(library: str, change: str) -> None:
    apply, reason = CHANGES[library][change]
    model: Any = (tiny_timm(depth=2) if library == "timm" else plain_vit()).eval()
    images = torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(model)
    original = type(twin.blocks[0])
    vit_fast.fuse(model, "sdpa").require_all()
    model(images)
    for each in (model, twin):
        torch.manual_seed(5)
        apply(each.blocks[0])
    expected = twin(images)
    torch.testing.assert_close(model(images), expected)
    for each, backend in ((model, "eager"), (twin, "sdpa")):
        report = vit_fast.fuse(each, backend)
        left = {row.name: " | ".join(row.reasons) for row in report.skipped if row.part != "attention"}
        assert list(left) == ["blocks.0"] and reason in left["blocks.0"]
        assert type(each.blocks[0]) is original and isinstance(each.blocks[1], FusedModule)
        torch.testing.assert_close(each(images), expected)


def without_fused_attention(change: Change) -> Change:
    """Disables timm's fused attention, with which timm does not call the dropout module."""

    def apply(block: Any) -> None:
        block.attn.fused_attn = False
        change(block.attn)

    return apply


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def change_class(block: Any) -> None:
    block.mlp.fc1.__class__ = DoubledLinear


def hook_in_a_new_dictionary(block: Any) -> None:
    block.mlp.fc2._forward_hooks = OrderedDict()
    block.mlp.fc2.register_forward_hook(lambda module, args, output: 2 * output)


def make_a_buffer(block: Any) -> None:
    weight = block.norm2.weight.detach()
    del block.norm2.weight
    block.norm2.register_buffer("weight", 2 * weight)


# Changes with True if fuse can still fuse the whole model.
FOLLOWED: dict[str, tuple[Change, bool]] = {
    "activation": (lambda block: setattr(block.mlp, "act", nn.ReLU()), True),
    "another GELU": (lambda block: setattr(block.mlp, "act", nn.GELU(approximate="tanh")), True),
    "LoRA on qkv": (lambda block: setattr(block.attn, "qkv", LoraLinear(block.attn.qkv)), True),
    "other heads": (lambda block: [setattr(block.attn, *each) for each in (("num_heads", 1), ("head_dim", 64))], True),
    "a buffer": (make_a_buffer, True),
    "class": (change_class, False),
    "hook in a new dictionary": (hook_in_a_new_dictionary, False),
    "a container": (lambda block: setattr(block, "mlp", Doubled(block.mlp)), False),
    "hook on attention dropout": (
        without_fused_attention(lambda attn: attn.attn_drop.register_forward_hook(lambda m, args, out: out * 2)), False,
    ),
    "other attention dropout": (
        without_fused_attention(lambda attn: setattr(attn, "attn_drop", nn.Tanh())), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("change", FOLLOWED)
def test_a_change_after_fuse_counts_at_once_and_when_fused_again(change: str, backend: str) -> None:
    apply, whole = FOLLOWED[change]
    model, images = tiny_timm().to(DEVICE).eval(), torch.randn(2, 3, 32, 32, device=DEVICE)
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, backend).require_all()
    model(images)
    for each in (model, twin):
        torch.manual_seed(5)
        apply(each.blocks[0])
    close = {"rtol": 1e-6, "atol": 1e-6} if backend == "sdpa" else {"rtol": 1e-4, "atol": 1e-4}
    expected = twin(images)
    torch.testing.assert_close(model(images), expected, **close)
    assert bool(vit_fast.fuse(model, backend).skipped) != whole
    torch.testing.assert_close(model(images), expected, **close)


def test_lora_around_the_projections_of_attention_is_trained() -> None:
    model, images = tiny_timm(), torch.randn(2, 3, 32, 32)
    model.blocks[0].attn.qkv = LoraLinear(model.blocks[0].attn.qkv)
    vit_fast.fuse(model).require_all()
    assert any(".up." in name for name in gradients(SUBJECTS["timm-vit"], model, {"x": images})[1])


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_an_activation_of_torchs_layer_changed_after_fuse_is_followed(backend: str) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, activation="gelu", norm_first=True, batch_first=True)
    model, x = nn.Sequential(layer).to(DEVICE), torch.randn(2, 5, 32, device=DEVICE)
    vit_fast.fuse(model, backend)
    layer.activation = F.relu
    found = model(x)
    vit_fast.unfuse(model)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ("sdpa", "triton"))
@pytest.mark.parametrize("name", ("timm-vit", "timm-eva02", "transformers-vit", "transformers-siglip2"))
def test_a_scale_of_attention_changed_after_fuse_is_followed(name: str, backend: str) -> None:
    plain, inputs = SUBJECTS[name].build().to(DEVICE).eval(), SUBJECTS[name].inputs()
    inputs = {key: value.to(DEVICE) for key, value in inputs.items()}
    fused = copy.deepcopy(plain)
    vit_fast.fuse(fused, backend)
    with torch.no_grad():
        before = SUBJECTS[name].output(fused(**inputs))
        for module in (*plain.modules(), *fused.modules()):
            for attribute in ("scale", "scaling"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 3.0)
                    module.fused_attn = False  # otherwise timm ignores its scale
        expected = SUBJECTS[name].output(plain(**inputs))
        assert (expected - before).norm() > 0.01 * before.norm()
        torch.testing.assert_close(SUBJECTS[name].output(fused(**inputs)), expected, rtol=1e-3, atol=1e-3)


def test_a_forward_replaced_on_an_instance_or_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 32, 32)
    for fused_first in (False, True):
        model = tiny_timm().eval()
        if fused_first:
            vit_fast.fuse(model, "sdpa").require_all()
        before = model.blocks[0].forward
        model.blocks[0].forward = lambda x, _before=before, **masks: _before(x, **masks) * 2
        expected = model(images)
        (row,) = vit_fast.fuse(model, "eager").skipped
        assert row.reasons == ("its forward was replaced on the instance",)
        torch.testing.assert_close(model(images), expected)
    monkeypatch.setattr("timm.models.vision_transformer.Block.forward", lambda self, x, **masks: x)
    (row,) = vit_fast.fuse(tiny_timm()).skipped
    assert row.reasons == ("Block.forward was replaced on the class",)


# --- packages that change models: weights of another tensor class (torchao), removed hooks (accelerate) -------------


class Int8Weight(Tensor):
    """A tensor class like torchao's: F.linear is the only function that supports it."""

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


@pytest.mark.parametrize("library", [*LIBRARIES, "torch"])
def test_weights_of_another_class_run_by_their_own_linear(library: str) -> None:
    subject = SUBJECTS[LIBRARIES.get(library, "torch-encoder")]
    model = subject.build().to(DEVICE).eval()
    inputs = {name: tensor[:1].to(DEVICE) for name, tensor in subject.inputs().items()}
    twin = copy.deepcopy(model)
    quantize_by_hand(twin)
    with torch.inference_mode():
        expected = subject.run(twin, inputs)
        vit_fast.fuse(model, "triton").require_all()
        subject.run(model, inputs)
        quantize_by_hand(model)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)
        report = vit_fast.fuse(model, "triton")
        left = [reason for module in report.skipped if module.part == "norm + MLP" for reason in module.reasons]
        assert any(".weight must be an ordinary tensor, got " in reason for reason in left)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def hook_by_hand(module: nn.Module) -> Callable[[], None]:
    """Sets a forward on the instance, as accelerate's hooks do."""
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
def test_a_model_stays_fused_after_hooks_were_removed(library: str, hook: Callable[[nn.Module], Any]) -> None:
    subject = SUBJECTS[LIBRARIES[library]]
    model, inputs = subject.build().eval(), subject.inputs()
    expected = subject.run(model, inputs)
    vit_fast.fuse(model, "sdpa").require_all()
    for remove in [hook(module) for module in model.modules()]:
        torch.testing.assert_close(subject.run(model, inputs), expected)
        remove()
    torch.testing.assert_close(subject.run(model, inputs), expected)
    assert all(block.ready() is not None for block in model.modules() if isinstance(block, FusedNormMlp))
    assert vit_fast.fuse(model, "eager").require_all()
    torch.testing.assert_close(subject.run(model, inputs), expected)
