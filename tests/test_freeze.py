"""Frozen models: same outputs, and cached weights that are updated after every change that torch tracks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, gradients, tiny_timm
from mlp_support import DEVICE
from spellings import Net, NormedBranch, NormedResidual, Parallel, PostNorm, Residual
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks import packed
from vit_fast.blocks.fp8_scales import FrozenFp8
from vit_fast.fusion.fuse import frozen_of
from vit_fast.kernels.linear import folding
from vit_fast.model import VisionTransformer
from vit_fast.ops.packed_linear import PackedLinear

Change = Callable[[Any], object]


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


def test_a_forward_in_another_dtype_than_at_freeze() -> None:
    model, x = own_vit(), images()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = model(x)
        vit_fast.freeze(model)
        assert torch.equal(model(x), expected)
        assert frozen_of(model)[0].dtype == torch.bfloat16
    assert_current(model, x)


def test_freeze_raises_errors_and_skips_blocks() -> None:
    model = own_vit()
    model.blocks[1].train()
    with pytest.raises(ValueError, match=r"blocks\.1 must be in evaluation mode"):
        vit_fast.freeze(model)
    assert not frozen_of(model), "all or nothing"
    vit_fast.set_backend(model.eval(), "eager")
    eager = vit_fast.freeze(model)
    assert eager == () and not frozen_of(model)
    assert {row.reasons for row in eager.skipped} == {("the backend must be 'triton' or 'sdpa', got 'eager'",)}
    vit_fast.set_backend(model, "triton")
    model.blocks[0].attn.proj.register_forward_hook(lambda *_: None)
    report = vit_fast.freeze(model)
    assert report == ("blocks.1",)
    assert "attn.proj has hooks" in str(report) and "blocks.1  Block: block  frozen" in str(report)
    assert copy.deepcopy(report).skipped == report.skipped
    assert "no fused block: call vit_fast.fuse first" in str(vit_fast.freeze(nn.Linear(2, 2)))


@pytest.mark.gpu
def test_other_streams_wait_for_recomputed_weights() -> None:
    model, x = own_vit(dtype=torch.bfloat16), images(torch.bfloat16)
    vit_fast.freeze(model)
    assert_current(model, x)
    with torch.no_grad():
        model.blocks[1].norm1.weight.mul_(3)
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


@torch.inference_mode()
def test_a_second_freeze_reads_parameters_of_inference_mode() -> None:
    """Parameters created in inference mode have no version counter."""
    model, x = own_vit(), images()
    vit_fast.freeze(model)
    before = model(x)
    model.blocks[1].norm1.weight.mul_(3)
    vit_fast.freeze(model)
    assert not torch.allclose(assert_current(model, x), before, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.TransformerEncoderLayer(64, 2, 64, norm_first=True), "self_attn.batch_first must be True, got"),
        (lambda: SUBJECTS["timm-siglip"].build().attn_pool, "fuse does not run the attention of this class"),
        (lambda: tiny_timm(act_layer=nn.Tanh), "fuse did not fuse the norm and MLP of its"),
        (lambda: tiny_timm().double(), "this CPU cannot pack weights in torch.float64"),
        (lambda: mixed_dtypes(tiny_timm()), "got torch.bfloat16 on cpu, torch.float32 on cpu"),
    ],
)  # fmt: skip
def test_a_skipped_block_has_a_reason(make: Callable[[], nn.Module], reason: str) -> None:
    model = make().eval()
    vit_fast.fuse(model, "sdpa")
    report = vit_fast.freeze(model)
    assert report == () and report.skipped and all(reason in row.reasons[0] for row in report.skipped)


def mixed_dtypes(model: Any) -> nn.Module:
    model.blocks[0].mlp.fc2.bfloat16()
    return model


def test_an_encoder_layer_of_torch_runs_fused_and_frozen() -> None:
    """torch's fast path would bypass the attention layer; calls with masks still use it."""
    subject = SUBJECTS["torch-encoder"]
    model, twin, x = subject.build().eval(), subject.build().eval(), subject.inputs()["src"]
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    vit_fast.fuse(model, "sdpa").require_all()

    def names(each: nn.Module, **options: Any) -> set[str]:
        with torch.no_grad(), torch.profiler.profile() as profile:
            torch.testing.assert_close(each(x, **options), twin(x, **options), rtol=1e-4, atol=1e-4)
        return {event.key for event in profile.key_averages()}

    fast = "aten::_transformer_encoder_layer_fwd"
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(x)
    assert fast not in {event.key for event in profile.key_averages()}
    assert fast in names(model, src_key_padding_mask=mask)
    assert vit_fast.freeze(model) == ("layers.0", "layers.1")
    assert {"mkldnn::_linear_pointwise", "mkl::_mkl_linear"} & names(model)
    sequence = nn.Sequential(*model.layers)
    vit_fast.fuse(sequence, "sdpa")
    with torch.no_grad():  # without a batch
        torch.testing.assert_close(sequence(x[0]), twin(x)[0], rtol=1e-4, atol=1e-4)


# --- changed weights: folded, packed and in e4m3 ----------------------------------------------------------------------


@pytest.fixture(params=["folded", "fp8", "packed", "in place"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a frozen model. ATen's implementation ("in place") reads the weights themselves."""
    subject, is_fp8 = SUBJECTS["vit-fast"], request.param == "fp8"
    dtype, on_cpu = torch.bfloat16 if is_fp8 else torch.float32, request.param in ("packed", "in place")
    if request.param == "in place":
        monkeypatch.setattr(packed, "fastest", lambda layers, _: {key: names[0] for key, names in layers.items()})
    model = subject.build().eval().to("cpu" if on_cpu else DEVICE, dtype)
    if is_fp8:
        vit_fast.calibrate(model, subject.inputs()["images"].to(DEVICE, dtype))
    options = {"folded": {"backend": "triton"}, "fp8": {"precision": "fp8"}}
    vit_fast.fuse(model, **options.get(request.param, {"backend": "sdpa"}))
    assert len(vit_fast.freeze(model)) == 2
    assert all(isinstance(each, FrozenFp8) == is_fp8 for each in frozen_of(model))
    return model


def cached(model: nn.Module) -> list[Tensor]:
    """Returns copies of the cached weights that the next forward would use."""
    for each in frozen_of(model):
        each.ensure_current()
    tensors = [tensor.float().clone() for each in frozen_of(model) for tensor in each.tensors]
    on_cpu = [each for each in frozen_of(model) if isinstance(each, packed.Packed)]
    layers = [step for each in on_cpu for step in vars(each.steps()).values() if isinstance(step, PackedLinear)]
    return tensors + [layer(torch.eye(layer.shape[1])) for layer in layers]


def _step(model: nn.Module, optimizer: type[torch.optim.Optimizer], **options: bool) -> None:
    stepping: Any = optimizer(model.parameters(), lr=0.75, **options)
    torch.stack([p.square().sum() for p in model.parameters()]).sum().backward()
    stepping.step()


@torch.no_grad()
def _sharded_step(model: Any) -> None:
    """fully_shard gathers the shards that an optimizer updates into the same tensors, without counting these writes."""
    shard = type("Shard", (nn.Parameter,), {})(torch.zeros(1))
    shard.grad = torch.ones_like(shard)
    torch.optim.SGD([shard], lr=0.1).step()
    with torch.autograd._unsafe_preserve_version_counter(weight := model.blocks[0].attn.qkv.weight):
        weight.mul_(-1)


def _other_memory(model: nn.Module) -> None:
    """Twice, because an allocator may reuse the first memory."""
    for parameter in (*model.parameters(), *model.parameters()):
        parameter.data = parameter.data * 2


def _narrower(model: Any) -> None:
    """Prunes hidden channels in place. A forward cannot update the cached weights in the same memory."""
    fc1, fc2 = model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2
    fc1.weight, fc1.bias = nn.Parameter(fc1.weight[:-16].detach()), nn.Parameter(fc1.bias[:-16].detach())
    fc2.weight = nn.Parameter(fc2.weight[:, :-16].detach())
    if not isinstance(frozen_of(model)[0], packed.Packed):
        with pytest.raises(RuntimeError, match=r"call vit_fast\.freeze"):
            cached(model)
    assert len(vit_fast.freeze(model)) == 2


def _buffer(model: Any) -> None:
    layer = model.blocks[0].mlp.fc1
    weight = torch.randn_like(layer.weight).detach()
    del layer.weight
    layer.register_buffer("weight", weight)


def _untracked(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)
    assert vit_fast.freeze(model) == ("blocks.0", "blocks.1")


UPDATED: dict[str, Change] = {
    "SGD, loop": lambda model: _step(model, torch.optim.SGD, foreach=False),
    "Adam, foreach": lambda model: _step(model, torch.optim.Adam, foreach=True),
    "AdamW, fused": lambda model: _step(model, torch.optim.AdamW, fused=True),
    "step of sharded weights": _sharded_step,
    "in inference mode": torch.inference_mode()(lambda model: model.blocks[0].mlp.fc1.weight[0].mul_(-3)),
    "another parameter": lambda model: setattr(
        fc1 := model.blocks[0].mlp.fc1, "weight", nn.Parameter(torch.randn_like(fc1.weight))
    ),
    "other memory": _other_memory,
    "a buffer": _buffer,
    "frozen again": _untracked,
    "other shapes": _narrower,
}


@pytest.mark.parametrize("change", UPDATED)
def test_cached_weights_are_updated(model: nn.Module, change: str) -> None:
    """The cached weights equal those of a newly frozen copy, and differ from the old ones."""
    before = cached(model)
    UPDATED[change](model)
    twin = copy.deepcopy(model)
    vit_fast.freeze(twin)
    found, expected = cached(model), cached(twin)
    assert len(found) == len(before) and all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, found, before))


def _doubled(model: nn.Module) -> dict[str, Tensor]:
    return {name: value if "fp8" in name else value * 2 for name, value in copy.deepcopy(model.state_dict()).items()}


DROPPED: dict[str, Callable[[nn.Module], nn.Module | Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(_doubled(model)),
    "load_state_dict assign": lambda model: model.load_state_dict(_doubled(model), assign=True),
    "to": lambda model: model.to(torch.float64).to(next(model.parameters()).dtype),
    "meta": lambda model: model.to("meta"),
    "train": lambda model: model.train().eval(),
    "unfreeze": vit_fast.unfreeze,
}


@pytest.mark.parametrize("change", DROPPED)
def test_cached_weights_are_dropped(model: nn.Module, change: str) -> None:
    keys = list(model.state_dict())
    assert not frozen_of(copy.deepcopy(model)) and not frozen_of(pickle.loads(pickle.dumps(model)))
    assert len(frozen_of(model)) == 2
    DROPPED[change](model)
    assert not frozen_of(model) and list(model.state_dict()) == keys


def test_a_replaced_module_takes_effect(model: Any) -> None:
    old = model.blocks[0].attn.qkv.weight
    model.blocks[0].attn.qkv = nn.Linear(64, 192, device=old.device, dtype=old.dtype)
    images = SUBJECTS["vit-fast"].inputs()["images"].to(old.dtype)
    twin = copy.deepcopy(model)
    vit_fast.freeze(twin)
    with torch.no_grad():
        torch.testing.assert_close(model(images), twin(images), rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_modules(model: nn.Module) -> None:
    if isinstance(frozen_of(model)[0], FrozenFp8):
        pytest.skip("FP8 does not support gradients")
    subject, inputs, twin = SUBJECTS["vit-fast"], SUBJECTS["vit-fast"].inputs(), copy.deepcopy(model)
    (_, found), (_, expected) = (gradients(subject, each, inputs) for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    leaf = inputs["images"].clone().requires_grad_()
    model.requires_grad_(False)(leaf).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


class Halves(PostNorm):
    """Two halves, each read on its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.attention = Residual(width, self.attention)
        self.mlp, self.conv = Residual(width, self.mlp), nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.mlp(x + self.conv(x.mT).mT)


@pytest.mark.parametrize(
    "block", [PostNorm, NormedBranch, NormedResidual, Parallel, Halves], ids=lambda cls: cls.__name__
)
def test_halves_that_run_apart_are_folded_once(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    original = Net(block, depth=1, heads=2).eval().to(DEVICE)
    model, x = copy.deepcopy(original), torch.randn(2, 3, 12, 8, device=DEVICE)
    vit_fast.fuse(model, "triton", example=x).require_all()
    assert len(vit_fast.freeze(model)) == len(frozen_of(model)) == 1 + (block is Halves)

    def compare() -> None:
        torch.testing.assert_close(model(x), original(x), rtol=1e-3, atol=1e-3)

    compare()  # gradients need the parameters
    with torch.no_grad():
        for net in (model, original):
            for parameter in net.layers.parameters():
                parameter.mul_(1.5)
        compare()
        monkeypatch.setattr(folding, "fold_linears", None)
        compare()
