"""vit_fast.optimize: every candidate is a drop-in, results are verified, cached, and never stale."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import assert_within
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import vit_fast
from vit_fast.blocks import fastest
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure import cache
from vit_fast.measure.build import build, call
from vit_fast.measure.candidate import PRECISIONS, Candidate, judge
from vit_fast.measure.runtimes import OnnxFile
from vit_fast.measure.search import Refused
from vit_fast.measure.trials import Trials, candidates, expect, variations

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FUSED, SPLIT = Candidate(attention="sdpa", mlp="sdpa"), Candidate(split=3)
FROZEN, MIXED = dataclasses.replace(FUSED, frozen=True), dataclasses.replace(FUSED, mlp="eager")
CHOICES = [
    Candidate(),
    FUSED,
    FROZEN,
    MIXED,
    Candidate(attention="sdpa"),
    SPLIT,
    Candidate(threads=1),
    dataclasses.replace(FUSED, precision="bf16", split=2),
    Candidate("onnxruntime"),
]
# Choices, and ONNX files as models; None is the model itself.
CASES = [
    *((choice, None) for choice in CHOICES),
    (Candidate(), "plain"),
    (Candidate("onnxruntime", threads=2), "beside"),
]
SLOW_CASES = [
    (Candidate("onnxruntime", precision="int8", split=1), None),
    (Candidate("freezing"), None),
    (Candidate("onnxruntime", split=1), "plain"),
    (Candidate("onnxruntime", precision="int8"), "beside"),
]


@pytest.mark.parametrize(
    ("choice", "file"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_candidate_is_a_drop_in(choice: Candidate, file: str | None, model, images, exported) -> None:
    network, given = (model, model) if file is None else (exported.model, OnnxFile(exported(file)))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = given(images)
    optimized = build(choice, given, images, expected, ())
    output = optimized(images)
    assert output.dtype == expected.dtype and output.shape == expected.shape and not output.requires_grad
    if choice.precision is None:
        exact = copy.deepcopy(network).double()(images.double())
        assert_within(output, network(images), exact, 2, choice.name)
    else:
        assert torch.nn.functional.cosine_similarity(output, network(images)).min() > 0.9
        assert not torch.equal(output, expected), "it computes in fewer bits"
    assert optimized(images[:1]).shape[0] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    if choice == SPLIT:
        assert optimized(images[:0]).shape == (0, 10)
    if choice == MIXED:
        blocks = optimized._function.blocks
        assert (blocks[0].attn.vit_fast_backend, blocks[0].vit_fast_backend) == ("sdpa", "eager")
    if file is not None:
        with pytest.raises((ValueError, UnsupportedInputError), match=r"must|expected"):
            optimized(images.double())


def test_unavailable_candidates_state_the_reason(model, images, exported) -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    hooked, pixels = copy.deepcopy(model), torch.zeros(2, 40, 40, 3, dtype=torch.uint8)
    hooked.blocks[0].register_forward_hook(lambda *_: None)
    int8 = Candidate("onnxruntime", precision="int8")
    for choice, given, example, reason in (
        (Candidate(graphs=True), model, images, "CUDA"),
        (Candidate(graphs=True), Around(lambda m, *_: m.inner(images)), (images, images), "that takes one tensor"),
        (Candidate(frozen=True), model, images, "vit_fast.freeze supports no module of the model"),
        (FUSED, plain, images, "supports no module of the model"),
        (FUSED, hooked, images, r"hooks of blocks\.0 would not run"),
        (Candidate("onnxruntime"), Around(lambda m, x: {"a": m.inner(x), "b": x}), images, "must return one tensor"),
        (Candidate("default"), OnnxFile(exported("plain")), images, "an ONNX file runs only in"),
        (int8, OnnxFile(exported("pixels")), pixels, "got uint8"),
    ):
        with pytest.raises(UnsupportedInputError, match=reason):
            build(choice, given.eval(), example, given(example), ())


class Around(nn.Module):
    """A small model inside one with another forward."""

    def __init__(self, forward: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = vit_fast.create_model("vit_test", backend="eager")
        self.register_buffer("calls", torch.zeros(1))
        self.__dict__.update(attributes, how=forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(self, *args, **kwargs)


def coupled(model: Any, images: Tensor) -> Tensor:
    output = model.inner(images)
    return (output - output.mean(0)) / (output.std(0) + 1)


IMAGES = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "input": (lambda m, x: m.inner(x.mul_(2)), ValueError, "must not modify its input in place"),
    "buffer": (lambda m, x: m.inner(x) + m.calls.add_(1), ValueError, "must not modify calls in place"),
    "random": (lambda m, x: nn.functional.dropout(m.inner(x), 0.5), ValueError, "must be deterministic"),
    "nan": (lambda m, x: m.inner(x) / 0, ValueError, "NaN or infinity"),
    "integers": (lambda m, x: m.inner(x).argmax(1), ValueError, "must return floating-point tensors"),
    "nothing": (lambda m, x: None, ValueError, "got NoneType"),
    "fp32": (lambda m, x: m.inner(x.float()), UnsupportedInputError, "fp64.*float32"),
    "lock": (lambda m, x: m.inner(x), UnsupportedInputError, "deepcopy of the model fails.*pickle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_verified_are_refused_and_not_changed(name: str) -> None:
    forward, error, message = REFUSED[name]
    model = Around(forward, **({"lock": threading.Lock()} if name == "lock" else {})).train()
    example, state = IMAGES[:2].clone(), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        vit_fast.optimize(model, example)
    assert torch.equal(example, IMAGES[:2]) and model.training and model.inner.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


ODD: dict[str, tuple[Callable[..., Any], Any]] = {
    "keywords": (lambda m, *, pixels, flag: m.inner(pixels) if flag else None, {"pixels": IMAGES, "flag": True}),
    "nested": (lambda m, x, by: (m.inner(x) * by, [x.mean(), {"names": ("a",)}], None), (IMAGES, 2.0)),
    "named": (lambda m, x: {"logits": m.inner(x), "best": m.inner(x).argmax(1)}, IMAGES),
    "tokens first": (lambda m, x: m.inner(x).transpose(0, 1), IMAGES),
    "scalar": (lambda m, x: m.inner(x).sum(), IMAGES),
    "half": (lambda m, x: m.inner(x).half(), IMAGES),
    "strided": (lambda m, x: m.inner(x), IMAGES.to(memory_format=torch.channels_last).flip(0)[::2]),
}


@pytest.mark.parametrize("name", ODD)
def test_signatures_and_output_structures(name: str) -> None:
    forward, example = ODD[name]
    model = Around(forward).eval()
    trials = Trials(model, example)
    trials.prepare(FUSED, 600)
    optimized, checked = trials.prepared[FUSED][0], trials.checked[FUSED]
    assert checked.allowed is not None and checked.error <= checked.allowed and checked.agreement == 1.0
    found, spec = pytree.tree_flatten(call(optimized, example))
    leaves, same = pytree.tree_flatten(trials.output)
    assert spec == same and all(type(one) is type(other) for one, other in zip(found, leaves))
    assert all(one.dtype == other.dtype for one, other in zip(found, leaves) if isinstance(one, Tensor))


def test_incorrect_outputs_are_refused(model, images, exported, monkeypatch) -> None:
    for change, precision, reason in (
        (lambda output: output + 1e-3, None, "error must be at most"),
        (lambda output: output.roll(1, 1), "bf16", "the agreement with the model must be at least"),
    ):
        trials = Trials(model, images)
        built = torch.no_grad()(lambda values, change=change: change(model(values)))
        monkeypatch.setattr("vit_fast.measure.trials.build", lambda *_, built=built: built)
        with pytest.raises(Refused, match=reason) as refused:
            trials.prepare(Candidate(split=3, precision=precision), 600)
        assert bool(refused.value.calls_ms) == (precision is not None), "incorrect outputs have no duration"
    monkeypatch.undo()
    trials = Trials(model, images, memory_limit=10)
    trials.prepare(Candidate(), 60)
    with pytest.raises(Refused, match="memory_limit"):
        trials.prepare(FUSED, 60)
    file = OnnxFile(exported("plain"))
    assert "error must be at most" in str(judge(file(images) * 1.001, expect(file, images)[1]).reason)
    dependent = Around(coupled).eval()  # a subset of the images gives another output: the whole batch is compared
    output, reference = expect(dependent, IMAGES)
    with torch.no_grad():
        assert judge(dependent(IMAGES), reference).reason is None
        halves = build(Candidate(split=5), dependent, IMAGES, output, ())
        assert "error must be at most" in str(judge(halves(IMAGES), reference).reason)


def test_a_result_is_cached_saved_and_loaded(model, images, one_engine, tmp_path) -> None:
    model.train()
    how: dict[str, Any] = {"latency_or_throughput": "latency"}
    first = vit_fast.optimize(model, images, budget_s=3, **how)
    assert model.training and model.blocks[0].training
    model.eval()
    assert first.table[0].candidate == Candidate() and first.table[0].speedup == 1
    assert {row.candidate.name for row in first.table} >= {"original", "fused sdpa"}
    (chosen,) = (row for row in first.table if row.reason is None)
    assert chosen.candidate == first.candidate == first.model.candidate
    assert first.speedup >= 1 and not first.from_cache and "images/s" in str(first)

    second = vit_fast.optimize(model, images, budget_s=3, **how)
    assert second.from_cache and second.candidate == first.candidate and second.table == ()
    second.save(tmp_path / "fast.json")
    loaded = vit_fast.load_optimized(tmp_path / "fast.json", model)
    for optimized in (first.model, second.model, loaded):
        torch.testing.assert_close(optimized(images), model(images), atol=1e-4, rtol=1e-4)
    assert not vit_fast.optimize(model, images[:2], budget_s=1, **how).from_cache, "another batch"
    assert not vit_fast.optimize(model, images, budget_s=1, again=True, **how).from_cache
    (tmp_path / "bad.json").write_text("{}")
    for file, other, message in (("fast", {"depth": 1}, "saved for another model"), ("bad", {}, "must be 3, got None")):
        with pytest.raises(ValueError, match=message):
            vit_fast.load_optimized(tmp_path / f"{file}.json", vit_fast.create_model("vit_test", **other))


def test_keys_of_cached_results(model, images, monkeypatch) -> None:
    """With --allow, a result is of these weights only; always, of a CPU with these instructions and settings."""

    def keys() -> list[dict[str, Any]]:
        return [cache.key_of(model, images, {"allow": allow}) for allow in ([], ["bf16"])]

    lossless, lossy = keys()
    with torch.no_grad():
        model.head.weight.add_(1)
    assert keys()[0] == lossless and keys()[1] != lossy
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    assert keys()[0] != lossless, "matmuls are rounded"
    torch.set_float32_matmul_precision(before)
    with monkeypatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "default")
        assert keys()[0] != lossless
        patch.undo()
        patch.setattr(fastest, "cpu_model", lambda: ["AMD EPYC"])
        assert keys()[0] != lossless, "cpu_name is the same"
    assert keys()[0] == lossless


def test_ctrl_c_ends_the_search_even_if_a_compiler_swallows_it(model, images, monkeypatch) -> None:
    never = Candidate(attention="sdpa", mlp="eager")
    monkeypatch.setattr("vit_fast.measure.optimization.candidates", lambda *_: [FUSED, never])

    def build_and_press(choice: Candidate, *how):
        if choice == FUSED:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
        return build(choice, *how)

    monkeypatch.setattr("vit_fast.measure.trials.build", build_and_press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        found = vit_fast.optimize(model, images, budget_s=600)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.candidate in [row.candidate for row in found.table] == [Candidate(), FUSED]  # FUSED passed its check
    assert found.model(images).shape == (4, 10)
    assert list(cache.all_results()) == [], "an interrupted search is not cached"


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"budget_s": 0}, ValueError, "budget_s must be positive, got 0"),
        ({"min_agreement": 2}, ValueError, "min_agreement must be .* got 2"),
        ({"latency_or_throughput": "both"}, ValueError, "latency_or_throughput must be one of .*'both'"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be .* got 0"),
        ({"allow": ["bf16"]}, ValueError, "lossless=False"),
        ({"lossless": False, "allow": ["int4"]}, ValueError, "allow must consist of .* got 'int4'"),
        ({"lossless": False, "allow": "bf16"}, TypeError, "allow must be a collection"),
        ({"example": torch.zeros(0, 3, 32, 32)}, ValueError, "example must contain tensors"),
        ({"example": torch.zeros(1, 3, 32, 32, device="meta")}, ValueError, "must be on one device, not on meta"),
        ({"calibration": ["missing.jpg"]}, ValueError, "missing.jpg"),
        ({"calibration": "photo.jpg"}, TypeError, r"must be a list, got 'photo.jpg'; pass \['photo.jpg'\]"),
        ({"images": torch.zeros(4, 3, 32, 32)}, TypeError, r"images must be a list of batches such as \[images\]"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module .* got int"),
    ],
)
def test_bad_arguments(model, images, how, error, message) -> None:
    with pytest.raises(error, match=message):
        vit_fast.optimize(**{"model": model, "example": images} | how)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        model, images = vit_fast.create_model("vit_test", backend="eager"), IMAGES[:2].clone()
        assert vit_fast.optimize(model, images, budget_s=1).model(images).shape == (2, 10)


def test_candidates_have_unique_names_and_are_read_from_files(monkeypatch) -> None:
    cpu, cuda, module = torch.device("cpu"), torch.device("cuda"), "vit_fast.measure.trials"
    everything = [*candidates(cpu, PRECISIONS), *CHOICES, *variations(Candidate(), cpu, 8)]
    assert len({choice.name for choice in everything}) == len(set(everything))
    assert all(Candidate.from_dict(choice.to_dict()) == choice for choice in everything)
    for foreign in ({"engine": "jax"}, {"precision": "int2"}, {"engine": True}, {"threads": [2]}, {"beam": 3}):
        with pytest.raises(ValueError, match=rf"must .*got .*{re.escape(repr(next(iter(foreign.values()))))}"):
            Candidate.from_dict(foreign)  # type: ignore[arg-type]  # what a file may hold
    monkeypatch.setattr(f"{module}.triton_unavailable_reasons", lambda device: ())
    names = {choice.name for choice in candidates(cuda, ["fp16"])}
    assert {"fused triton, frozen, graphs", "attention triton, MLP sdpa", "fused triton, fp16"} <= names
    assert not any("bf16" in name or "int8" in name or "threads" in name for name in names)
    monkeypatch.setattr(f"{module}.installed", lambda name: None)
    assert not any(choice.runs_file for choice in candidates(cuda, []))


@pytest.mark.parametrize("choice", [Candidate(), FUSED, Candidate("onnxruntime")], ids=lambda choice: choice.name)
def test_changing_the_model_does_not_change_the_result(choice, model, images, only) -> None:
    only(choice)
    result = vit_fast.optimize(model, images, budget_s=600)
    assert result.candidate == choice
    before = result.model(images)
    model.blocks[0].attn.qkv.weight.data.mul_(3)
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 0)
    model.head = nn.Linear(32, 5)
    assert torch.equal(result.model(images), before)


@pytest.mark.parametrize("choice", [Candidate(), Candidate("onnxruntime")], ids=lambda choice: choice.name)
def test_a_result_can_only_be_called(choice: Candidate, model, images) -> None:
    with torch.no_grad():
        result = build(choice, model, images, model(images), ())
    with pytest.raises(AttributeError, match="has no attribute 'parameters': to change the model"):
        result.parameters()
    with pytest.raises(AttributeError, match="head"):
        result.head = nn.Linear(32, 3)
    assert torch.equal(copy.deepcopy(result.eval())(images), result(images))
    if choice == Candidate():
        assert torch.equal(pickle.loads(pickle.dumps(result))(images), result(images))
        return
    with pytest.raises(UnsupportedInputError, match=r"cannot be pickled: use result\.save"):
        pickle.dumps(result)
