"""Frozen models: the same outputs, from weights that follow every change that torch can detect."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, gradients
from mlp_support import DEVICE
from our_operators import OurOperators
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fp8_scales import FrozenFp8
from vit_fast.blocks.packed import Packed, PackedLinear
from vit_fast.fusion.fuse import frozen_of
from vit_fast.kernels.linear import folding
from vit_fast.model import VisionTransformer

Change = Callable[[nn.Module], object]


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


def own_vit(**overrides: object) -> VisionTransformer:
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


@pytest.mark.fast_cases("timm-vit", "transformers-vit", "torchvision-vit", "timm-eva02")
@pytest.mark.parametrize(
    "name",
    [
        "timm-vit", "transformers-vit", "torchvision-vit", "timm-dinov3", "timm-eva02", "transformers-dinov3-gated",
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
        vit_fast.unfuse(model)
        torch.testing.assert_close(changed, subject.run(model, inputs), rtol=1e-3, atol=1e-3)


def _write(model: VisionTransformer) -> None:
    with torch.no_grad():
        model.blocks[1].norm1.weight.mul_(3)


def test_the_dtype_is_that_of_the_matmuls(folds: list[int]) -> None:
    """A forward in another dtype folds in every call."""
    model, x = own_vit(), images()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = model(x)
        vit_fast.freeze(model)
        folds.clear()
        assert torch.equal(model(x), expected) and not folds
    assert_current(model, x)
    assert folds


@pytest.mark.slow
def test_compiled_it_is_followed_too(folds: list[int]) -> None:
    model, x = own_vit(), images()
    vit_fast.freeze(model)
    seen = OurOperators()
    compiled = torch.compile(model, fullgraph=True, backend=seen)
    with torch.no_grad():
        expected = model(x)
        folds.clear()
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
        assert not folds, "frozen weights are tensors like others"
        for change in (_write, vit_fast.unfreeze):
            change(model)
            expected = copy.deepcopy(model)(x)
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert seen == ["block"] * len(model.blocks) * seen.graphs


def test_what_can_be_frozen() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got \d"):
        vit_fast.freeze(3)  # type: ignore[arg-type]  # the wrong type is the test
    with pytest.raises(ValueError, match=r"blocks\.0 must be in evaluation mode"):
        vit_fast.freeze(own_vit().train())
    half = own_vit()
    half.blocks[1].train()
    with pytest.raises(ValueError, match=r"blocks\.1 must be in evaluation mode"):
        vit_fast.freeze(half)
    assert not frozen_of(half), "all or nothing"
    model = own_vit()
    vit_fast.set_backend(model, "eager")
    assert vit_fast.freeze(model) == () and not frozen_of(model)
    model = own_vit()
    model.blocks[0].attn.proj.register_forward_hook(lambda *_: None)
    assert vit_fast.freeze(model) == ("blocks.1",)


def test_steps_of_sharded_weights_are_followed() -> None:
    """fully_shard gathers the shards that an optimizer updates into the same tensors, without counting these writes."""

    class Shard(nn.Parameter):
        pass

    def step(parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.1).step()

    model, x = own_vit(), images()
    vit_fast.freeze(model)
    before = assert_current(model, x)
    weight = model.blocks[0].attn.qkv.weight
    step(Shard(torch.zeros(1)))
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(-1)
    assert not torch.allclose(assert_current(model, x), before, atol=1e-3)


@pytest.mark.gpu
def test_other_streams_wait_for_what_is_folded_anew() -> None:
    model, x = own_vit(dtype=torch.bfloat16), images(torch.bfloat16)
    vit_fast.freeze(model)
    assert_current(model, x)
    _write(model)
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


@pytest.mark.parametrize("made_inside", [False, True])
def test_frozen_in_inference_mode(made_inside: bool) -> None:
    """Parameters made in inference mode count no writes, but a second freeze reads them again."""
    model = own_vit()
    with torch.inference_mode():
        model, x = own_vit() if made_inside else model, images()
        vit_fast.freeze(model)
        before = model(x)
    with torch.inference_mode(made_inside):
        _write(model)
        if made_inside:
            vit_fast.freeze(model)
        assert not torch.allclose(assert_current(model, x.clone()), before, atol=1e-3)


# --- changed weights: folded, packed and in e4m3 ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["folded", "fp8", "packed"])
def made(request: pytest.FixtureRequest) -> nn.Module:
    subject = SUBJECTS["vit-fast"]
    dtype = torch.bfloat16 if request.param == "fp8" else torch.float32
    device = torch.device("cpu") if request.param == "packed" else DEVICE
    model = subject.build().eval().to(device, dtype)
    if request.param != "fp8":
        vit_fast.fuse(model, "triton" if request.param == "folded" else "sdpa")
    else:
        vit_fast.calibrate(model, subject.inputs()["images"].to(DEVICE, dtype))
        vit_fast.fuse(model, precision="fp8")
    return model


@pytest.fixture
def model(made: nn.Module) -> nn.Module:
    """Frozen; of its own weights."""
    model = copy.deepcopy(made)
    assert len(vit_fast.freeze(model)) == 2
    eight = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(isinstance(each, FrozenFp8) == eight for each in frozen_of(model))
    return model


def kept(model: nn.Module) -> list[Tensor]:
    """Returns the cached weights as the next forward would use them."""
    for each in frozen_of(model):
        each.ensure_current()
    tensors = [tensor.float() for each in frozen_of(model) for tensor in each.tensors]
    packed = [each for each in frozen_of(model) if isinstance(each, Packed)]
    layers = [step for each in packed for step in each.steps() if isinstance(step, PackedLinear)]
    return tensors + [layer(torch.eye(layer.shape[1])) for layer in layers]


def assert_followed(model: nn.Module, before: list[Tensor]) -> None:
    """Checks that the cached weights equal those of a newly frozen copy, and differ from the old ones."""
    twin = copy.deepcopy(model)
    vit_fast.freeze(twin)
    found, expected = kept(model), kept(twin)
    assert len(found) == len(before) and all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, found, before))


def _stepped(optimizer: type[torch.optim.Optimizer], **options: bool) -> Change:
    def step(model: nn.Module) -> None:
        stepping: Any = optimizer(model.parameters(), lr=0.75, **options)  # type: ignore[call-arg]  # every optimizer's
        torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
        stepping.step()

    return step


def _replace(model: nn.Module) -> None:
    layer = model.get_submodule("blocks.0.mlp.fc1")
    layer.weight = nn.Parameter(torch.randn_like(layer.get_parameter("weight")))


def _other_memory(model: nn.Module) -> None:
    """Twice, because an allocator may reuse the first memory."""
    for parameter in (*model.parameters(), *model.parameters()):
        parameter.data = parameter.data * 2


def _buffer(model: nn.Module) -> None:
    layer = model.get_submodule("blocks.0.mlp.fc1")
    weight = layer.get_parameter("weight").detach()
    del layer.weight
    layer.register_buffer("weight", torch.randn_like(weight))


def _in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model.get_submodule("blocks.0.mlp.fc1").get_parameter("weight")[0].mul_(-3)


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


SEEN: dict[str, Change] = {
    "writes in a loop": _stepped(torch.optim.SGD, foreach=False),
    "writes in lists": _stepped(torch.optim.Adam, foreach=True),
    "writes in a kernel": _stepped(torch.optim.AdamW, fused=True),
    "in place": _in_place,
    "another parameter": _replace,
    "other memory": _other_memory,
    "a buffer": _buffer,
    "in inference mode": _in_inference_mode,
}


@pytest.mark.parametrize("change", SEEN)
def test_what_torch_can_see_is_followed(model: nn.Module, change: str) -> None:
    before = [tensor.clone() for tensor in kept(model)]
    SEEN[change](model)
    assert_followed(model, before)


def _doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: value if "fp8" in name else value * 2 for name, value in copy.deepcopy(model.state_dict()).items()}


GIVEN_UP: dict[str, Change] = {
    "load_state_dict": lambda model: model.load_state_dict(_doubled(model)),
    "load_state_dict assign": lambda model: model.load_state_dict(_doubled(model), assign=True),
    "to": lambda model: model.to(torch.float64).to(next(model.parameters()).dtype),
    "meta": lambda model: model.to("meta"),
    "train": lambda model: model.train().eval(),
    "unfreeze": vit_fast.unfreeze,
}


@pytest.mark.parametrize("change", GIVEN_UP)
def test_what_loads_or_moves_gives_it_up(model: nn.Module, change: str) -> None:
    assert frozen_of(model)
    GIVEN_UP[change](model)
    assert not frozen_of(model), "the next forward makes it of the weights as they are then"


def test_another_module_is_followed(model: nn.Module) -> None:
    old = model.get_submodule("blocks.0.attn.qkv").weight
    model.blocks[0].attn.qkv = nn.Linear(64, 192, device=old.device, dtype=old.dtype)  # type: ignore[index,union-attr]
    images = SUBJECTS["vit-fast"].inputs()["images"].to(old.dtype)
    twin = copy.deepcopy(model)
    vit_fast.freeze(twin)
    with torch.no_grad():
        torch.testing.assert_close(model(images), twin(images), rtol=1e-4, atol=1e-4)


def test_copies_and_files_hold_only_the_weights(model: nn.Module) -> None:
    assert not frozen_of(copy.deepcopy(model)) and not frozen_of(pickle.loads(pickle.dumps(model)))
    keys = list(model.state_dict())
    assert len(frozen_of(model)) == 2
    vit_fast.unfreeze(model)
    assert list(model.state_dict()) == keys and not frozen_of(model)


def test_gradients_are_those_of_the_modules(model: nn.Module) -> None:
    if isinstance(frozen_of(model)[0], FrozenFp8):
        pytest.skip("in e4m3 gradients are refused")
    subject, inputs, twin = SUBJECTS["vit-fast"], SUBJECTS["vit-fast"].inputs(), copy.deepcopy(model)
    (_, found), (_, expected) = (gradients(subject, each, inputs) for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    leaf = inputs["images"].clone().requires_grad_()
    model.requires_grad_(False)(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


def test_what_torch_cannot_see_is_taken_over_by_freezing_again(model: nn.Module) -> None:
    before = [tensor.clone() for tensor in kept(model)]
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert vit_fast.freeze(model) == ("blocks.0", "blocks.1")
    assert_followed(model, before)
