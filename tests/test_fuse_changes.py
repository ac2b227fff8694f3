"""Blocks that users change before or after fuse: the change takes effect, fuse follows or skips it, unfuse keeps it."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import packed_towers
import pytest
import torch
import torch.nn.functional as F
from fused_models import LIBRARIES, SUBJECTS, Subject, plain_vit, tiny_timm, transformers_subject
from kernel_support import DEVICE
from torch import Tensor, nn
from torch.nn.utils import prune

import vit_fast
from vit_fast.blocks.fused import FusedBlocks, FusedModule, FusedNormMlp
from vit_fast.libraries import known
from vit_fast.libraries.transformers.families import LAYERS
from vit_fast.reading.forms import ReadModule

CLOSE = {"rtol": 1e-4, "atol": 1e-4}

# --- changes; each notes the shapes of the arguments, and returns a function that undoes it -------------------------


def changed(value: Any, scale: float) -> Any:
    """Returns a result, or arguments, with a changed first tensor."""
    first = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return value
    return (scale * first + 0.1, *value[1:]) if isinstance(value, tuple) else scale * first + 0.1


def shapes(args: Any, kwargs: dict[str, Any]) -> Any:
    named = {name: tuple(value.shape) for name, value in kwargs.items() if isinstance(value, Tensor)}
    return [tuple(value.shape) for value in args if isinstance(value, Tensor)], named


def hook_output(module: nn.Module, seen: list[Any]) -> Callable[[], object]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append(shapes(args, kwargs))
        return changed(output, 1.5)

    return module.register_forward_hook(hook, with_kwargs=True).remove


def hook_input(module: nn.Module, seen: list[Any]) -> Callable[[], object]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(shapes(args, kwargs))
        return changed(args, 0.5), kwargs

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def call_changed(before: Callable[..., Any], seen: list[Any], *args: Any, **kwargs: Any) -> Any:
    seen.append(shapes(args, kwargs))
    return changed(before(*args, **kwargs), 1.5)


def set_forward(module: Any, seen: list[Any]) -> Callable[[], object]:
    module.forward = functools.partial(call_changed, module.forward, seen)
    return lambda: module.__dict__.pop("forward")


def hook_attention_dropout(block: Any) -> None:
    block.attn.fused_attn = False  # with its fused attention, timm does not call the module
    block.attn.attn_drop.register_forward_hook(lambda module, args, output: output * 2)


class ScaledWeight(Tensor):
    """A tensor class that is correct with F.linear only, like the quantized weights of torchao."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.as_subclass(Tensor) * 0.5, bias)
        return super().__torch_function__(func, types, args, kwargs)


def scale_weights(block: nn.Module) -> None:
    for linear in block.modules():
        if type(linear) is nn.Linear:
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(ScaledWeight), requires_grad=False)


# Changes of timm's and our blocks, with the reason that fuse then reports, or None if it can still fuse the block
CHANGES: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "wrapped": (
        lambda block: setattr(block.mlp, "fc1", nn.Sequential(block.mlp.fc1, nn.Tanh())), "must be torch.nn.Linear",
    ),
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
    "tensor class": (scale_weights, "mlp.fc1.weight must be an ordinary tensor, got "),
    "forward": (lambda block: set_forward(block, []), "its forward was replaced on the instance"),
}  # fmt: skip
OF_TIMM: dict[str, tuple[Callable[[Any], object], str | None]] = {
    "activation": (lambda block: setattr(block.mlp, "act", nn.GELU(approximate="tanh")), None),
    "unknown activation": (lambda block: setattr(block.mlp, "act", nn.Tanh()), "mlp.act must be one of gelu"),
    "other heads": (lambda block: [setattr(block.attn, *each) for each in (("num_heads", 1), ("head_dim", 64))], None),
}
ALL = {"timm": CHANGES | OF_TIMM, "vit-fast": CHANGES}


def is_read(model: nn.Module) -> bool:
    """Returns True if a module was read by its computation, although its class is not supported as it is."""
    return any(isinstance(part, ReadModule) for part in model.modules())


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
        torch.testing.assert_close(model(images), expected, **CLOSE)
        for each in (model, twin):
            reasons = " | ".join(text for row in vit_fast.fuse(each, backend).skipped for text in row.reasons)
            assert is_read(each) or (reason in reasons if reason else not reasons)
            torch.testing.assert_close(each(images), expected, **CLOSE)


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


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_stays_fused_after_accelerate_removed_its_hooks(library: str) -> None:
    subject = SUBJECTS[library]
    model, inputs = subject.build().eval(), subject.inputs()
    expected = subject.run(model, inputs)
    vit_fast.fuse(model, "sdpa").require_all()
    for module in model.modules():
        module.forward = module.forward
    torch.testing.assert_close(subject.run(model, inputs), expected)
    assert all(block.ready() is not None for block in model.modules() if isinstance(block, FusedNormMlp))
    vit_fast.fuse(model, "eager").require_all()
    torch.testing.assert_close(subject.run(model, inputs), expected)
    vit_fast.unfuse(model)
    assert torch.equal(subject.run(model, inputs), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("how", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forward_set_before_or_after_fuse_stays(library: str, how: Callable[[nn.Module], nn.Module]) -> None:
    """It may call the previous forward."""
    subject = SUBJECTS[library]
    model, inputs = subject.build().eval(), subject.inputs()
    twin, fused = copy.deepcopy(model), copy.deepcopy(model)
    vit_fast.fuse(fused, "sdpa").require_all()
    paths = [name for name, module in fused.named_modules() if name and isinstance(module, FusedModule | nn.LayerNorm)]
    for path in paths[::4]:
        set_forward(model.get_submodule(path), [])
    vit_fast.fuse(model, "sdpa")
    vit_fast.freeze(model)
    for path in paths[2::4]:
        set_forward(model.get_submodule(path), [])
    for path in paths[::2]:
        set_forward(twin.get_submodule(path), [])
    with torch.no_grad():
        expected = subject.run(twin, inputs)
        torch.testing.assert_close(subject.run(model, inputs), expected, **CLOSE)
        model = how(model)
        vit_fast.unfuse(model)
        assert not any(isinstance(module, FusedModule) for module in model.modules())
        assert all("forward" in vars(model.get_submodule(path)) for path in paths[::2])
        torch.testing.assert_close(subject.run(model, inputs), expected, **CLOSE)


# --- hooks and forwards that users set inside fused blocks -----------------------------------------------------------

INSIDE = (hook_output, hook_input, set_forward)
CLASSES = Path(__file__).parents[1] / "docs" / "classes.md"
MODELS = SUBJECTS | packed_towers.TOWERS | packed_towers.NAFLEX
OFTEN = (
    "timm-vit", "timm-qk-norm", "timm-siglip", "timm-eva02-norms-inside", "transformers-siglip2", "torchvision-vit",
    "torch-encoder", "vit-fast", "qwen2_5_vl", "pixtral", "rotary, a table an image",
)  # fmt: skip
# and all towers of transformers that fuse supports and that read nothing but images
BLOCKS = {name: MODELS[name] for name in OFTEN} | {
    name: transformers_subject(f"{folder}.modeling_{folder}.{name}")
    for folder, name in re.findall(r"^\| (\w+) \| (\w+) \| default \| fused", CLASSES.read_text(), re.MULTILINE)
    if folder in LAYERS and folder != "siglip2"
}


@pytest.fixture
def slow_path() -> Iterator[None]:
    """Disables torch's fast path of TransformerEncoderLayer, which ignores forwards set on modules inside."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@torch.no_grad()
def blocks_of(subject: Subject) -> dict[type, tuple[nn.Module, Any, Any]]:
    """Returns the first module of each class that fuse supports in a model, and the arguments of its first call."""
    model = subject.build().eval()
    twin = copy.deepcopy(model)
    vit_fast.fuse(twin, "sdpa")
    calls: dict[type, tuple[nn.Module, Any, Any]] = {}
    for name, module in twin.named_modules():
        if isinstance(module, FusedModule) and name:
            original = model.get_submodule(name)
            original.register_forward_pre_hook(
                lambda each, args, kwargs: calls.setdefault(type(each), (each, args, kwargs)) and None, with_kwargs=True
            )
    model(**subject.inputs())
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks_with_kwargs.clear()
    return calls


@torch.no_grad()
@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("name", BLOCKS)
def test_changes_inside_a_fused_block_take_effect(name: str) -> None:
    """Applies each change to each module of a block. The fused block matches the original, also after undoing it.

    With the triton backend, a changed block does not run as kernels only, which would bypass the change.
    """
    count = 0
    for block, args, kwargs in blocks_of(BLOCKS[name]).values():
        for parameter in block.eval().parameters():
            nn.init.normal_(parameter, 0.1, 0.2)
        twin, by_kernels = copy.deepcopy(block), copy.deepcopy(block)
        vit_fast.fuse(by_kernels, "triton")
        is_whole = hasattr(by_kernels, "whole") and by_kernels.whole() is not None
        rows = vit_fast.fuse(twin, "sdpa").skipped
        skipped = [twin.get_submodule(row.name) for row in rows]
        for row, module in zip(rows, skipped):  # in transformers 4: BEiT's attention, and CLIPSeg's with "eager"
            assert known.reason_against(type(module)) or "attn_implementation='eager'" in str(row.reasons)
        vit_fast.freeze(twin)

        def run(each: nn.Module, args: Any = args, kwargs: Any = kwargs) -> Tensor:
            found = each(*args, **kwargs)
            return found[0] if isinstance(found, tuple) else found

        expected = run(twin)
        torch.testing.assert_close(expected, run(block), **CLOSE)
        for (path, _), change in itertools.product(list(block.named_modules()), INSIDE):
            seen: tuple[list[Any], list[Any]] = ([], [])
            undo = [change(each.get_submodule(path), noted) for each, noted in zip((block, twin), seen)]
            found, wanted = run(twin), run(block)
            what = f"{change.__name__} of {path or 'the block'} of {type(block).__name__}"
            torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda text, what=what: f"{what}: {text}")
            assert seen[1] == seen[0], what
            if is_whole and path:
                undo.append(change(by_kernels.get_submodule(path), []))
                assert by_kernels.whole() is None, what
            count += bool(seen[0])
            for each in undo:
                each()
        assert torch.equal(run(twin), expected)
        assert not is_whole or by_kernels.whole() is not None
        assert not hasattr(twin, "ready") or twin.ready() is not None, "the block is fused again"
    assert count


@pytest.mark.parametrize("name", ["timm-vit", "timm-eva02-norms-inside", "transformers-vit", "torchvision-vit"])
def test_a_forward_set_on_a_class_takes_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().eval(), subject.inputs()
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    block = next(module for module in model.modules() if hasattr(module, "whole"))
    with torch.no_grad():
        expected = subject.run(twin, inputs)
        for cls in {getattr(module, "original", type(module)) for module in block.modules()}:

            def forward(self: Any, *args: Any, before: Any = cls.forward, **kwargs: Any) -> Any:
                return changed(before(self, *args, **kwargs), 1.5)

            with monkeypatch.context() as patched:
                patched.setattr(cls, "forward", forward)
                torch.testing.assert_close(subject.run(model, inputs), subject.run(twin, inputs), **CLOSE)
                again = copy.deepcopy(twin)
                rows = vit_fast.fuse(again, "sdpa").skipped
                replaced = f"{cls.__qualname__}.forward was replaced on the class"
                assert is_read(again) or any(replaced in row.reasons[0] for row in rows)
                torch.testing.assert_close(subject.run(again, inputs), subject.run(twin, inputs), **CLOSE)
        torch.testing.assert_close(subject.run(model, inputs), expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:(Full backward hook is firing|For backward hooks to be called):UserWarning")
@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "torchvision-vit"])
def test_backward_hooks_fire_as_often_as_before_fuse(name: str) -> None:
    subject = SUBJECTS[name]
    calls: tuple[list[Any], list[Any]] = ([], [])
    inputs = subject.inputs()
    for fused, seen in enumerate(calls):
        model = subject.build().eval()
        if fused:
            vit_fast.fuse(model, "sdpa").require_all()
        for path, module in model.named_modules():
            for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
                handle = register(lambda *args, path=path, seen=seen: seen.append((path, len(args))))
                subject.run(model, inputs).square().sum().backward()
                handle.remove()
    assert calls[1] == calls[0] and calls[0]


# --- a Sequential of fused blocks behaves like a Sequential ---------------------------------------------------------

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


OPERATIONS: dict[str, Callable[[Any], nn.Module]] = {
    "first": lambda blocks: blocks[:1],
    "none": lambda blocks: blocks[:0],
    "sum": lambda blocks: nn.Sequential(nn.Tanh()) + blocks + blocks[1:][:1],
    "product": lambda blocks: 2 * blocks,
    "sum in place": lambda blocks: operator.iadd(blocks, blocks[:1]),
    "append": lambda blocks: blocks.append(nn.Tanh()),
    "pickle of a slice": lambda blocks: pickle.loads(pickle.dumps(blocks[1:])),
}
PATHS = {"timm-vit": "blocks", "torchvision-vit": "encoder.layers", "vit-fast": "blocks"}


@pytest.mark.each_value
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("library", PATHS)
def test_operations_of_sequential_work(library: str, operation: str) -> None:
    model = SUBJECTS[library].build(3).eval()
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
            torch.testing.assert_close(found(X), expected(X), **CLOSE)
    assert not isinstance(found, FusedBlocks)
