"""Cached weights, folded or in e4m3, are recomputed after changes that torch can detect, and otherwise by freeze."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from fused_models import SUBJECTS, gradients
from mlp_support import DEVICE
from optimizer_ways import Step, optimizer_ways
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fp8_scales import FrozenFp8
from vit_fast.blocks.packed import Packed, PackedLinear
from vit_fast.fusion.freezing import frozen_of

Change = Callable[[nn.Module], object]


@pytest.fixture(scope="module", params=["folded", "fp8", "packed"])
def made(request: pytest.FixtureRequest) -> nn.Module:
    subject = SUBJECTS["ours"]
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


def _stepped(step: Step) -> Change:
    return lambda model: step(model, lambda: torch.stack([p.square().sum() for p in model.parameters()]).sum())


def _replace(model: nn.Module) -> None:
    layer = model.get_submodule("blocks.0.mlp.fc1")
    layer.weight = nn.Parameter(torch.randn_like(layer.get_parameter("weight")))


def _other_memory(model: nn.Module) -> None:
    """Twice, because an allocator may reuse the first memory."""
    for parameter in (*model.parameters(), *model.parameters()):
        parameter.data = parameter.data * 2


def _load_inside(model: nn.Module) -> None:
    layer = model.get_submodule("blocks.0.attn.qkv")
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})


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
    **{name: _stepped(step) for name, step in optimizer_ways(lr=0.75).items()},
    "in place": _in_place,
    "another parameter": _replace,
    "other memory": _other_memory,
    "loaded inside": _load_inside,
    "a buffer": _buffer,
    "in inference mode": _in_inference_mode,
}
# One step that writes in a loop, one in lists, one in a kernel of its own: every optimizer takes one of these ways.
FAST = {"SGD", "Adam foreach", "AdamW fused", "in place", "another parameter", "other memory",
        "loaded inside", "a buffer", "in inference mode"}  # fmt: skip


@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SEEN]
)
def test_what_torch_can_see_is_followed(model: nn.Module, change: str) -> None:
    before = [tensor.clone() for tensor in kept(model)]
    weights = [parameter.detach().clone() for parameter in model.get_submodule("blocks").parameters()]
    SEEN[change](model)
    same = all(map(torch.equal, model.get_submodule("blocks").parameters(), weights))
    if same and weights[0].dtype == torch.bfloat16 and change in ("SGD fused", "LBFGS"):
        pytest.skip("on CPUs these steps of torch 2.13 leave weights in half precision as they are")
    assert_followed(model, before)


def _doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: value if "fp8" in name else value * 2 for name, value in copy.deepcopy(model.state_dict()).items()}


def _timm_average(model: nn.Module) -> None:
    ema = pytest.importorskip("timm.utils").ModelEmaV3(model, decay=0.5)
    other = copy.deepcopy(model)
    _in_place(other)
    ema.update(other)
    model.load_state_dict(ema.module.state_dict())


GIVEN_UP: dict[str, Change] = {
    "load_state_dict": lambda model: model.load_state_dict(_doubled(model)),
    "load_state_dict assign": lambda model: model.load_state_dict(_doubled(model), assign=True),
    "moving average of timm": _timm_average,
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
    dtype = next(model.parameters()).dtype
    images = SUBJECTS["ours"].inputs()["images"].to(dtype)
    with torch.no_grad():
        before = model(images)
        attention, width = model.get_submodule("blocks.0.attn"), 64
        attention.qkv = nn.Linear(width, 3 * width, device=images.device, dtype=dtype)
        twin = copy.deepcopy(model)
        vit_fast.freeze(twin)
        torch.testing.assert_close(model(images), twin(images), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(twin(images), before, rtol=1e-2, atol=1e-2)


def test_copies_and_files_hold_only_the_weights(model: nn.Module) -> None:
    assert not frozen_of(copy.deepcopy(model)) and not frozen_of(pickle.loads(pickle.dumps(model)))
    keys = list(model.state_dict())
    assert len(frozen_of(model)) == 2
    vit_fast.unfreeze(model)
    assert list(model.state_dict()) == keys and not frozen_of(model)


def test_gradients_are_those_of_the_modules(model: nn.Module) -> None:
    if isinstance(frozen_of(model)[0], FrozenFp8):
        pytest.skip("in e4m3 gradients are refused")
    subject, inputs, twin = SUBJECTS["ours"], SUBJECTS["ours"].inputs(), copy.deepcopy(model)
    (_, found), (_, expected) = (gradients(subject, each, inputs) for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    leaf = inputs["images"].clone().requires_grad_()
    model.requires_grad_(False)(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


def _data_write(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _average(model: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    other = copy.deepcopy(model)
    _in_place(other)
    for each in (model, other):
        average.update_parameters(each)
    for parameter, averaged in zip(model.parameters(), average.module.parameters()):
        parameter.data.copy_(averaged)


def _lora(model: nn.Module, *steps: str) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=".*(qkv|proj|fc1|fc2)"))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    for step in steps:
        getattr(wrapped, step)()


UNSEEN: dict[str, Change] = {
    "data": _data_write,
    "moving average": _average,
    "merged LoRA": lambda model: _lora(model, "merge_and_unload"),
    "unmerged LoRA": lambda model: _lora(model, "merge_adapter", "unmerge_adapter", "merge_and_unload"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("change", UNSEEN)
def test_what_torch_cannot_see_is_taken_over_by_freezing_again(model: nn.Module, change: str) -> None:
    before = [tensor.clone() for tensor in kept(model)]
    UNSEEN[change](model)
    assert vit_fast.freeze(model) == ("blocks.0", "blocks.1")
    assert_followed(model, before)
