"""Blocks that users change before or after fuse: the change takes effect, fuse follows or skips it, unfuse keeps it."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_models import IMAGE, LIBRARIES, SUBJECTS, plain_vit, tiny_timm
from kernel_support import DEVICE
from torch import Tensor, nn
from torch.nn.utils import prune

import vit_fast
from vit_fast.blocks.fused import FusedBlocks, FusedModule, FusedNormMlp

Change = Callable[[Any], object]


def doubled(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = before(*args, **kwargs)
    return 2 * result if isinstance(result, Tensor) else (2 * result[0], *result[1:])


def set_forward(module: nn.Module) -> None:
    module.forward = functools.partial(doubled, module.forward)


def hook_attention_dropout(block: Any) -> None:
    block.attn.fused_attn = False  # with its fused attention, timm does not call the module
    block.attn.attn_drop.register_forward_hook(lambda module, args, output: output * 2)


# Changes of timm's and our blocks, with the reason that fuse then reports, or None if it can still fuse the block
CHANGES: dict[str, tuple[Change, str | None]] = {
    "wrapped": (lambda block: setattr(block.mlp, "fc1", nn.Sequential(block.mlp.fc1)), "must be torch.nn.Linear"),
    "wrapped qkv": (lambda block: setattr(block.attn, "qkv", nn.Sequential(block.attn.qkv)), None),
    "parametrization": (
        lambda block: nn.utils.parametrizations.weight_norm(block.mlp.fc1), "must be torch.nn.Linear itself, got ",
    ),
    "pruning": (lambda block: prune.l1_unstructured(block.mlp.fc2, "weight", 0.5), "mlp.fc2 has hooks"),
    "hook on attention dropout": (hook_attention_dropout, "attn_drop has hooks"),
    "other norm": (lambda block: setattr(block, "norm2", nn.Softmax(-1)), "or RMSNorm, got a Softmax"),
    "norm without epsilon": (
        lambda block: setattr(block, "norm2", nn.RMSNorm(64)), "norm2.eps must be a number, got None",
    ),
    "other MLP": (lambda block: setattr(block, "mlp", nn.Linear(64, 64)), "mlp must be the Mlp of "),
    "forward": (set_forward, "its forward was replaced on the instance"),
}  # fmt: skip
OF_TIMM: dict[str, tuple[Change, str | None]] = {
    "activation": (lambda block: setattr(block.mlp, "act", nn.GELU(approximate="tanh")), None),
    "unknown activation": (lambda block: setattr(block.mlp, "act", nn.Tanh()), "mlp.act must be one of gelu"),
    "other heads": (lambda block: [setattr(block.attn, *each) for each in (("num_heads", 1), ("head_dim", 64))], None),
}
ALL = {"timm": CHANGES | OF_TIMM, "vit-fast": CHANGES}


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize(("library", "change"), [(library, change) for library in ALL for change in ALL[library]])
def test_a_change_takes_effect_and_is_skipped_with_a_reason(library: str, change: str, backend: str) -> None:
    apply, reason = ALL[library][change]
    model: Any = (tiny_timm() if library == "timm" else plain_vit(depth=1)).to(DEVICE).eval()
    images, twin = torch.randn(2, 3, 32, 32, device=DEVICE), copy.deepcopy(model)
    vit_fast.fuse(model, backend).require_all()
    with torch.no_grad():
        model(images)
        for each in (model, twin):
            torch.manual_seed(5)
            apply(each.blocks[0])
        expected = twin(images)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
        for each in (model, twin):
            reasons = " | ".join(text for row in vit_fast.fuse(each, backend).skipped for text in row.reasons)
            assert reason in reasons if reason else not reasons
            torch.testing.assert_close(each(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ("sdpa", "triton"))
@pytest.mark.parametrize("name", ("timm-vit", "timm-eva02", "transformers-vit", "transformers-siglip2"))
def test_a_changed_attention_scale_takes_effect(name: str, backend: str) -> None:
    subject = SUBJECTS[name]
    plain, inputs = subject.build().to(DEVICE).eval(), {k: v.to(DEVICE) for k, v in subject.inputs().items()}
    fused = copy.deepcopy(plain)
    vit_fast.fuse(fused, backend)
    with torch.no_grad():
        before = subject.run(fused, inputs)
        for module in (*plain.modules(), *fused.modules()):
            for attribute in ("scale", "scaling"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 3.0)
                    module.fused_attn = False  # otherwise timm ignores its scale
        expected = subject.run(plain, inputs)
        assert (expected - before).norm() > 0.01 * before.norm()
        torch.testing.assert_close(subject.run(fused, inputs), expected, rtol=1e-3, atol=1e-3)


def test_a_forward_replaced_in_the_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.models.vision_transformer.Block.forward", lambda self, x, **masks: x)
    (row,) = vit_fast.fuse(tiny_timm()).skipped
    assert row.reasons == ("Block.forward was replaced on the class",)


# --- packages that change models: weights of another tensor class (torchao), removed hooks (accelerate) -------------


class ScaledWeight(Tensor):
    """A tensor class that is correct with F.linear only, like the quantized weights of torchao."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.as_subclass(Tensor) * 0.5, bias)
        return super().__torch_function__(func, types, args, kwargs)


def scale_weights(model: nn.Module) -> None:
    for linear in model.modules():
        if type(linear) is nn.Linear:
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(ScaledWeight), requires_grad=False)


@pytest.mark.parametrize("library", [*LIBRARIES, "torch"])
def test_weights_of_another_tensor_class_run_in_the_original_linear(library: str) -> None:
    subject = SUBJECTS[LIBRARIES.get(library, "torch-encoder")]
    model = subject.build().to(DEVICE).eval()
    inputs = {name: tensor[:1].to(DEVICE) for name, tensor in subject.inputs().items()}
    twin = copy.deepcopy(model)
    scale_weights(twin)
    with torch.inference_mode():
        expected = subject.run(twin, inputs)
        vit_fast.fuse(model, "triton").require_all()
        subject.run(model, inputs)
        scale_weights(model)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)
        report = vit_fast.fuse(model, "triton")
        left = [reason for module in report.skipped if module.part == "norm + MLP" for reason in module.reasons]
        assert any(".weight must be an ordinary tensor, got " in reason for reason in left)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_stays_fused_after_accelerate_removed_its_hooks(library: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    subject = SUBJECTS[LIBRARIES[library]]
    model, inputs = subject.build().eval(), subject.inputs()
    expected = subject.run(model, inputs)
    vit_fast.fuse(model, "sdpa").require_all()
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
        torch.testing.assert_close(subject.run(model, inputs), expected)
        hooks.remove_hook_from_module(module)
    torch.testing.assert_close(subject.run(model, inputs), expected)
    assert all(block.ready() is not None for block in model.modules() if isinstance(block, FusedNormMlp))
    assert vit_fast.fuse(model, "eager").require_all()
    torch.testing.assert_close(subject.run(model, inputs), expected)


# --- unfuse removes everything that fuse added, and nothing that users set --------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("how", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forward_set_by_users_stays_and_may_call_the_previous_one(
    library: str, how: Callable[[nn.Module], nn.Module]
) -> None:
    subject = SUBJECTS[LIBRARIES[library]]
    model, inputs = subject.build().eval(), subject.inputs()
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    paths = [name for name, module in model.named_modules() if name and isinstance(module, FusedModule | nn.LayerNorm)]
    for path in paths[::2]:
        set_forward(model.get_submodule(path))
        set_forward(twin.get_submodule(path))
    with torch.no_grad():
        expected = subject.run(twin, inputs)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)
        model = how(model)
        vit_fast.unfuse(model)
        assert not any(isinstance(module, FusedModule) for module in model.modules())
        assert all("forward" in vars(model.get_submodule(path)) for path in paths[::2])
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def test_a_forward_set_before_fuse_stays_and_one_left_by_accelerate_is_removed() -> None:
    model, images = SUBJECTS["timm-vit"].build().eval(), torch.randn(1, 3, 32, 32)
    first, second = (block.attn for block in model.blocks)
    set_forward(first)
    given, expected = vars(first)["forward"], model(images)
    vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(model(images), expected)
    second.forward = second.forward  # as accelerate leaves it after removing its hooks
    vit_fast.unfuse(model)
    assert vars(first)["forward"] is given and "forward" not in vars(second)
    assert torch.equal(model(images), expected)


# --- a Sequential of fused blocks behaves like a Sequential ---------------------------------------------------------

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


OPERATIONS: dict[str, Callable[[Any], nn.Module]] = {
    "first": lambda blocks: blocks[:1],
    "none": lambda blocks: blocks[:0],
    "slice of a slice": lambda blocks: blocks[1:][:1],
    "sum": lambda blocks: blocks + blocks[:2],
    "added to another": lambda blocks: nn.Sequential(nn.Tanh()) + blocks,
    "product": lambda blocks: 2 * blocks,
    "sum in place": lambda blocks: operator.iadd(blocks, blocks[:1]),
    "append": lambda blocks: blocks.append(nn.Tanh()),
    "pickle of a slice": lambda blocks: pickle.loads(pickle.dumps(blocks[1:])),
}
PATHS = {"timm": "blocks", "torchvision": "encoder.layers", "vit-fast": "blocks"}


@pytest.mark.each_value
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("library", PATHS)
def test_operations_of_sequential_work(library: str, operation: str) -> None:
    model = SUBJECTS[LIBRARIES[library]].build(3).eval()
    expected = OPERATIONS[operation](copy.deepcopy(model).get_submodule(PATHS[library]))
    vit_fast.fuse(model, "sdpa").require_all()
    blocks: Any = model.get_submodule(PATHS[library])
    assert isinstance(blocks, FusedBlocks)
    found: Any = OPERATIONS[operation](blocks)
    with torch.no_grad():
        assert list(found.state_dict()) == list(expected.state_dict())
        assert len(found) == len(list(found)) == len(list(expected))
        undo = (lambda: vit_fast.unfuse(model), lambda: vit_fast.unfuse(found))  # they share their blocks
        for each in (lambda: None, lambda: vit_fast.fuse(found, "eager"), *undo):
            each()
            torch.testing.assert_close(found(X), expected(X), rtol=1e-4, atol=1e-4)
    assert not isinstance(found, FusedBlocks)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_a_block_that_is_not_fused_in_a_fused_sequential(backend: str) -> None:
    model, other = (SUBJECTS["timm-vit"].build().eval() for _ in range(2))
    expected = nn.Sequential(*copy.deepcopy(model).blocks[:1], copy.deepcopy(other).blocks[1])
    vit_fast.fuse(model, backend)
    blocks = model.blocks[:1].append(other.blocks[1])
    with torch.no_grad():
        torch.testing.assert_close(blocks(X), expected(X), rtol=1e-4, atol=1e-4)
        assert vit_fast.fuse(blocks, backend).require_all()
        torch.testing.assert_close(blocks(X), expected(X), rtol=1e-4, atol=1e-4)


def test_a_slice_of_blocks_passes_rotary_positions() -> None:
    model, images = SUBJECTS["vit-fast-dinov3"].build(3).eval(), torch.randn(1, 3, IMAGE, IMAGE)
    model.blocks = model.blocks[:2]
    with torch.no_grad():
        expected = model(images)
        vit_fast.set_backend(model, "eager")
        model.blocks = model.blocks[:2]
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
