"""Frozen models: the same outputs without folding; test_kept_weights.py changes their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from fused_models import SUBJECTS
from mlp_support import DEVICE
from our_operators import OurOperators
from torch import Tensor, nn

import vit_fast
from vit_fast.kernels.linear import folding
from vit_fast.model import Block, VisionTransformer


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that grows with each folding of weights."""
    made: list[int] = []
    fold = folding.fold_linears

    def counted(*args: object) -> object:
        made.append(1)
        return fold(*args)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(folding, "fold_linears", counted)
    return made


def ours(**overrides: object) -> VisionTransformer:
    torch.manual_seed(0)
    model = vit_fast.create_model("vit_test", backend="triton", device=DEVICE, **overrides)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 32, 32, device=DEVICE, dtype=dtype)


def assert_current(model: VisionTransformer, x: Tensor) -> Tensor:
    """Returns the output, after comparing it with that of an unfrozen copy."""
    with torch.no_grad():
        found, expected = model(x), copy.deepcopy(model)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return found


def is_frozen(model: nn.Module) -> bool:
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return any(block.vit_fast_parts is not None and block.vit_fast_parts.frozen is not None for block in blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_outputs_without_folding(dtype: torch.dtype, folds: list[int]) -> None:
    model, x = ours(dtype=dtype, init_values=0.5), images(dtype)
    with torch.no_grad():
        expected = model(x)
        assert len(folds) == 2, "one a block"
        assert vit_fast.freeze(model) == ("blocks.0", "blocks.1")
        folds.clear()
        assert torch.equal(model(x), expected) and not folds
        vit_fast.unfreeze(model)
        assert torch.equal(model(x), expected) and len(folds) == 2


@pytest.mark.fast_cases("timm-vit", "transformers-vit", "torchvision-vit", "timm-eva02")
@pytest.mark.parametrize(
    "name",
    [
        "timm-vit", "transformers-vit", "torchvision-vit", "timm-dinov3", "timm-eva02", "timm-gated",
        "transformers-dinov3-gated",
    ],
)  # fmt: skip
def test_models_of_other_libraries(name: str, folds: list[int]) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().to(DEVICE).eval(), {k: v.to(DEVICE) for k, v in subject.inputs().items()}
    with torch.no_grad():
        before = subject.run(model, inputs)
        vit_fast.fuse(model, "triton").require_all()
        assert len(vit_fast.freeze(model)) == 2
        folds.clear()
        torch.testing.assert_close(subject.run(model, inputs), before, rtol=1e-3, atol=1e-3)
        assert not folds
        for parameter in model.parameters():
            parameter.mul_(0.5)
        changed = subject.run(model, inputs)
        vit_fast.unfreeze(model)
        torch.testing.assert_close(changed, subject.run(model, inputs), rtol=1e-3, atol=1e-3)
        vit_fast.unfuse(model)
        torch.testing.assert_close(changed, subject.run(model, inputs), rtol=1e-3, atol=1e-3)


def _step(optimizer: type[torch.optim.Optimizer], **options: object) -> Callable[[VisionTransformer], None]:
    def step(model: VisionTransformer) -> None:
        model(images()).square().sum().backward()
        optimizer(model.parameters(), lr=0.1, **options).step()  # type: ignore[call-arg]  # all optimizers have lr

    return step


def _in_place(model: VisionTransformer) -> None:
    with torch.no_grad():
        model.blocks[1].norm1.weight.mul_(3)


def test_the_dtype_is_that_of_the_matmuls(folds: list[int]) -> None:
    """A forward in another dtype folds in every call."""
    model, x = ours(), images()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = model(x)
        vit_fast.freeze(model)
        folds.clear()
        assert torch.equal(model(x), expected) and not folds
    assert_current(model, x)
    assert folds


@pytest.mark.slow
def test_compiled_it_is_followed_too(folds: list[int]) -> None:
    model, x = ours(), images()
    vit_fast.freeze(model)
    seen = OurOperators()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    with torch.no_grad():
        expected = model(x)
        folds.clear()
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        assert not folds, "frozen weights are tensors like others"
        for change in (_in_place, _step(torch.optim.AdamW, fused=True), vit_fast.unfreeze):
            with torch.enable_grad():
                change(model)
            expected = copy.deepcopy(model)(x)
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert seen == ["block"] * len(model.blocks) * seen.graphs


def test_what_can_be_frozen() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got \d"):
        vit_fast.freeze(3)  # type: ignore[arg-type]  # the wrong type is the test
    with pytest.raises(ValueError, match=r"blocks\.0 must be in evaluation mode"):
        vit_fast.freeze(ours().train())
    half = ours()
    half.blocks[1].train()
    with pytest.raises(ValueError, match=r"blocks\.1 must be in evaluation mode"):
        vit_fast.freeze(half)
    assert not is_frozen(half), "all or nothing"
    model = ours()
    vit_fast.set_backend(model, "eager")
    assert vit_fast.freeze(model) == () and not is_frozen(model)
    model = ours()
    model.blocks[0].attn.proj.register_forward_hook(lambda *_: None)
    assert vit_fast.freeze(model) == ("blocks.1",)


def test_steps_of_sharded_weights_are_followed(folds: list[int]) -> None:
    """fully_shard gathers the shards that an optimizer updates into the same tensors, without counting these writes."""

    class Shard(nn.Parameter):
        pass

    def step(parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.1).step()

    model, x = ours(), images()
    vit_fast.freeze(model)
    before = assert_current(model, x)
    weight = model.blocks[0].attn.qkv.weight
    step(Shard(torch.zeros(1)))
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(-1)
    assert not torch.allclose(assert_current(model, x), before, atol=1e-3)
    folds.clear()
    step(nn.Parameter(torch.zeros(1)))
    with torch.no_grad():
        model(x)
    assert not folds, "ordinary weights of another model are none of its own"


@pytest.mark.gpu
def test_other_streams_wait_for_what_is_folded_anew() -> None:
    model, x = ours(), images()
    vit_fast.freeze(model)
    assert_current(model, x)
    _in_place(model)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(first):
            torch.cuda._sleep(10**9)
            model(x)
        with torch.cuda.stream(second):
            found = model(x)
        torch.cuda.synchronize()
        torch.testing.assert_close(found, copy.deepcopy(model)(x), rtol=0, atol=0)


def test_frozen_in_inference_mode_it_is_followed_outside() -> None:
    model, x = ours(), images()
    with torch.inference_mode():
        vit_fast.freeze(model)
    before = assert_current(model, x)
    _in_place(model)
    assert not torch.allclose(assert_current(model, x), before, atol=1e-3)


def test_made_in_inference_mode() -> None:
    """Its parameters count no writes, but a second freeze reads them again."""
    with torch.inference_mode():
        model, x = ours(), images()
        vit_fast.freeze(model)
        before = model(x)
        model.blocks[0].norm1.weight.mul_(2)
        vit_fast.freeze(model)
        assert not torch.allclose(model(x), before, atol=1e-3)


def test_tied_weights_are_followed_in_both_blocks() -> None:
    model, x = ours(), images()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    vit_fast.freeze(model)
    before = assert_current(model, x)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(2)
    assert not torch.equal(assert_current(model, x), before)
