"""Frozen models: the same answers without folding, none that torch can see to be stale, and given up in time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import mlp_support as support
import pytest
import torch
from fused_models import SUBJECTS
from mlp_support import DEVICE
from our_operators import OurOperators
from torch import Tensor, nn

import vit_fast
from vit_fast.kernels.linear import folding
from vit_fast.model import Block, VisionTransformer

support.make_bf16_exact()


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by each folding of weights."""
    made: list[int] = []
    fold = folding.fold_linears

    def counted(*args: object) -> object:
        made.append(1)
        return fold(*args)  # type: ignore[arg-type]  # handed on

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
    """The answer, which is that of an unfrozen copy."""
    with torch.no_grad():
        found, expected = model(x), copy.deepcopy(model)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return found


def is_frozen(model: nn.Module) -> bool:
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return any(block.vit_fast_parts is not None and block.vit_fast_parts.frozen is not None for block in blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_answers_without_folding(dtype: torch.dtype, folds: list[int]) -> None:
    model, x = ours(dtype=dtype, init_values=0.5), images(dtype)
    with torch.no_grad():
        expected = model(x)
        assert len(folds) == 2, "one a block"
        assert vit_fast.freeze(model) == ("blocks.0", "blocks.1")
        folds.clear()
        assert torch.equal(model(x), expected) and not folds
        vit_fast.unfreeze(model)
        assert torch.equal(model(x), expected) and len(folds) == 2


@pytest.mark.parametrize("name", ["timm-vit", "transformers-vit", "torchvision-vit"])
def test_models_of_other_libraries(name: str, folds: list[int]) -> None:
    subject = SUBJECTS[name]
    model, inputs = subject.build().to(DEVICE).eval(), {k: v.to(DEVICE) for k, v in subject.inputs().items()}
    vit_fast.fuse(model, "triton").require_all()
    with torch.no_grad():
        expected = subject.run(model, inputs)
        assert len(vit_fast.freeze(model)) >= 2
        folds.clear()
        assert torch.equal(subject.run(model, inputs), expected) and not folds
        vit_fast.unfuse(model)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def _step(optimizer: type[torch.optim.Optimizer], **options: object) -> Callable[[VisionTransformer], None]:
    def step(model: VisionTransformer) -> None:
        model(images()).square().sum().backward()
        optimizer(model.parameters(), lr=0.1, **options).step()  # type: ignore[call-arg]  # every optimizer's

    return step


def _in_place(model: VisionTransformer) -> None:
    with torch.no_grad():
        model.blocks[1].norm1.weight.mul_(3)


def _replace_module(model: VisionTransformer) -> None:
    model.blocks[0].attn.qkv = nn.Linear(*reversed(model.blocks[0].attn.qkv.weight.shape), device=DEVICE)


def _load_inside(model: VisionTransformer) -> None:
    layer = model.blocks[0].attn.qkv
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})


def _other_memory_twice(model: VisionTransformer) -> None:
    """An allocator hands out the first memory again."""
    weight = model.blocks[0].attn.qkv.weight
    for _ in range(2):
        weight.data = weight.data * 2


def _buffer(model: VisionTransformer) -> None:
    layer = model.blocks[0].attn.qkv
    del layer.bias
    layer.register_buffer("bias", torch.randn(len(layer.weight), device=DEVICE))


def _in_inference_mode(model: VisionTransformer) -> None:
    with torch.inference_mode():
        model.blocks[0].mlp.fc1.weight[0].mul_(-3)


def _train(model: VisionTransformer) -> None:
    model.train()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.eval()


SEEN = {
    "another module": _replace_module,
    "loaded inside": _load_inside,
    "other memory twice": _other_memory_twice,
    "a buffer": _buffer,
    "in inference mode": _in_inference_mode,
    "train and eval": _train,
}


@pytest.mark.fast_cases("loaded inside", "train and eval")
@pytest.mark.parametrize("change", SEEN)
def test_what_torch_can_see_is_followed(change: str) -> None:
    model, x = ours(), images()
    vit_fast.freeze(model)
    before = assert_current(model, x)
    SEEN[change](model)
    assert not torch.allclose(assert_current(model, x), before, atol=1e-3)


@pytest.mark.parametrize(
    "leave",
    [
        vit_fast.unfreeze,
        lambda model: model.train().eval(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.half().float(),
        lambda model: model.to("meta"),
    ],
    ids=["unfreeze", "train", "load_state_dict", "half", "meta"],
)
def test_how_long_it_lasts(leave: Callable[[nn.Module], object]) -> None:
    model = ours()
    vit_fast.freeze(model)
    model.eval()
    assert is_frozen(model)
    leave(model)
    assert not is_frozen(model)


def test_copies_and_pickles_are_not_frozen() -> None:
    model = ours()
    vit_fast.freeze(model)
    assert not is_frozen(copy.deepcopy(model)) and not is_frozen(pickle.loads(pickle.dumps(model)))
    assert is_frozen(model) and model.state_dict().keys() == ours().state_dict().keys()


def test_gradients_are_of_the_weights() -> None:
    model, twin, x = ours(), ours(), images()
    vit_fast.freeze(model)
    for each in (model, twin):
        each(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), twin.parameters()):
        assert torch.equal(parameter.grad, expected.grad)  # type: ignore[arg-type]  # all have one
    leaf = x.clone().requires_grad_()
    model.requires_grad_(False)(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


def test_the_dtype_is_that_of_the_matmuls(folds: list[int]) -> None:
    """A forward in another dtype folds as ever."""
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


def test_a_part_that_is_hooked_later_runs() -> None:
    model, x, seen = ours(), images(), []
    vit_fast.freeze(model)
    handle = model.blocks[0].attn.qkv.register_forward_hook(lambda *_: seen.append(1))
    assert_current(model, x)
    assert seen
    handle.remove()
    seen.clear()
    assert_current(model, x)
    assert not seen


def test_tied_weights_are_followed_in_both_blocks() -> None:
    model, x = ours(), images()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    vit_fast.freeze(model)
    before = assert_current(model, x)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(2)
    assert not torch.equal(assert_current(model, x), before)


def test_what_can_be_frozen() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got \d"):
        vit_fast.freeze(3)  # type: ignore[arg-type]  # that is the point
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
    """fully_shard gathers weights, which an optimizer knows as shards only, into the same tensors without a count."""

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
    """Its parameters count no writes at all: a second freeze follows them."""
    with torch.inference_mode():
        model, x = ours(), images()
        vit_fast.freeze(model)
        before = model(x)
        model.blocks[0].norm1.weight.mul_(2)
        vit_fast.freeze(model)
        assert not torch.allclose(model(x), before, atol=1e-3)
