"""vit_fast.optimize: every choice is a right drop-in, what is found is kept, and nothing answers stale."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
import signal
import time

import pytest
import torch
from fused_models import assert_within
from torch import Tensor, nn

import vit_fast
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure import cache
from vit_fast.measure import trials as enumerated
from vit_fast.measure.build import build
from vit_fast.measure.candidate import PRECISIONS, Candidate
from vit_fast.measure.search import Refused
from vit_fast.measure.trials import Trials

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


FROZEN = Candidate(attention="sdpa", mlp="sdpa", frozen=True)
CHOICES = [
    Candidate(),
    Candidate(attention="sdpa", mlp="sdpa"),
    FROZEN,
    Candidate(attention="sdpa", mlp="eager"),
    Candidate(attention="sdpa"),
    Candidate(channels_last=True),
    Candidate(split=3),
    Candidate(threads=1),
    Candidate(attention="sdpa", mlp="sdpa", precision="bf16", split=2),
    Candidate("onnxruntime"),
    pytest.param(Candidate("onnxruntime", precision="int8", split=1), marks=pytest.mark.slow),
    pytest.param(Candidate("compile", frozen=True), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_every_choice_is_a_drop_in(model, images, choice) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(images)
    optimized = build(choice, model, images, expected, ())
    output = optimized(images)
    assert output.dtype == expected.dtype and output.shape == expected.shape and not output.requires_grad
    if choice.precision is None:
        assert_within(output, expected, copy.deepcopy(model).double()(images.double()), 2, choice.name)
    else:
        assert torch.nn.functional.cosine_similarity(output, expected).min() > 0.9
        assert not torch.equal(output, expected), "it computes in fewer bits"
    assert optimized(images[:1]).shape[0] == 1
    assert optimized.config == model.config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(images), expected)


class Dictionary(nn.Module):
    """Gives what transformers' models give: named outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        logits = self.model(images) * scale
        return {"logits": logits, "best": logits.argmax(1)}


def test_a_batch_that_is_cut_may_be_empty_or_none(model, images) -> None:
    with torch.no_grad():
        fast = build(Candidate(split=3), model, images, model(images), ())
    assert fast(images[:0]).shape == (0, 10)
    for wrong in (None, images.numpy()):
        with pytest.raises(TypeError, match="images must be"):  # no StopIteration, by which a loop would end
            fast(wrong)


def test_named_outputs_and_arguments(model, images) -> None:
    given = Dictionary(model)
    expected = given(images, 2.0)
    optimized = build(
        Candidate(attention="sdpa", mlp="sdpa", precision="bf16", split=3), given, (images, 2.0), expected, ()
    )
    output = optimized(images, scale=2.0)
    assert output.keys() == expected.keys()
    assert [value.dtype for value in output.values()] == [torch.float32, torch.int64]
    with pytest.raises(UnsupportedInputError, match="must return one tensor"):
        build(Candidate("onnxruntime"), given, images, expected, ())


def test_hooks_are_refused(model, images) -> None:
    model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedInputError, match=r"blocks\.0 has hooks"):
        build(Candidate("compile"), model, images, model(images), ())
    build(Candidate(), model, images, model(images), ())(images)


def test_what_cannot_be_had_says_why(model, images) -> None:
    with pytest.raises(UnsupportedInputError, match="CUDA"):
        build(Candidate(graphs=True), model, images, model(images), ())
    with pytest.raises(UnsupportedInputError, match="no module of the model can be frozen"):
        build(Candidate(frozen=True), model, images, model(images), ())
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    with pytest.raises(UnsupportedInputError, match="supports no module of the model"):
        build(Candidate(attention="sdpa", mlp="sdpa"), plain, images, plain(images), ())


def test_wrong_answers_are_refused(model, images, monkeypatch) -> None:
    trials = Trials(model, images)
    for change, reason in (
        (lambda output: output + 1e-3, "error must be at most"),
        (lambda output: output[:2], "the output must be"),
        (lambda output: output * float("nan"), "NaN"),
    ):
        function = lambda values, change=change: change(model(values))  # noqa: E731
        with pytest.raises(Refused, match=reason):
            trials.expected.check(function, Candidate(channels_last=True))
    turned = lambda values: model(values).roll(1, 1)  # noqa: E731
    with pytest.raises(Refused, match="the top-1 agreement must be at least"):
        trials.expected.check(turned, Candidate(precision="bf16"))


def test_memory_limit(model, images) -> None:
    trials = Trials(model, images, memory_limit=10)
    with pytest.raises(Refused, match="memory_limit"):
        trials.prepare(Candidate(attention="sdpa", mlp="sdpa"), 60)
    trials.prepare(Candidate(), 60)


@pytest.mark.fast_cases("latency")
@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_finds_keeps_and_gives_again(model, images, one_engine, objective) -> None:
    model.train()
    told: list[str] = []
    first = vit_fast.optimize(
        model, images, budget_s=3, latency_or_throughput=objective, progress=lambda what, seconds: told.append(what)
    )
    assert model.training and model.blocks[0].training
    model.eval()
    assert told[:2] == ["the reference in fp64", "original"]
    assert first.table[0].candidate == Candidate() and first.table[0].speedup == 1
    assert {row.candidate.name for row in first.table} >= {"original", "fused sdpa"}
    assert [row.reason for row in first.table].count(None) == 1
    chosen = next(row for row in first.table if row.reason is None)
    assert chosen.candidate == first.candidate == first.model.candidate
    assert first.speedup >= 1 and not first.from_cache
    assert "images/s" in str(first)
    torch.testing.assert_close(first.model(images), model(images), atol=1e-4, rtol=1e-4)

    second = vit_fast.optimize(model, images, budget_s=3, latency_or_throughput=objective)
    assert second.from_cache and second.candidate == first.candidate and second.table == ()
    assert "cached result, checked again" in str(second)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    assert cache.look_up(cache.key_of(model, images, first.cached.key["request"])) is None, "products are rounded"
    torch.set_float32_matmul_precision(before)
    other = vit_fast.optimize(model, images[:2], budget_s=1, latency_or_throughput=objective)
    assert not other.from_cache, "another batch"
    assert not vit_fast.optimize(model, images, budget_s=1, latency_or_throughput=objective, again=True).from_cache


def test_ctrl_c_ends_the_search_whatever_swallows_it(model, images, monkeypatch) -> None:
    """A compiler that takes the exception for one of its own."""
    fused, never = Candidate(attention="sdpa", mlp="sdpa"), Candidate(attention="sdpa", mlp="eager")
    monkeypatch.setattr("vit_fast.measure.optimization.candidates", lambda *_: [fused, never])

    def build_and_press(choice: Candidate, *how):
        if choice == fused:
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
    assert found.candidate == Candidate() and [row.candidate for row in found.table] == [Candidate(), fused]
    assert found.model(images).shape == (4, 10)
    assert list(cache.all_results()) == [], "half a search is no answer to keep"


@pytest.mark.slow
def test_answers_with_loss_hold_for_these_weights_alone(model, images, one_engine) -> None:
    how = {"lossless": False, "allow": ["bf16"], "min_agreement": 0.0}
    found = vit_fast.optimize(model, images, budget_s=60, **how)
    assert any(row.candidate.precision == "bf16" and row.ms for row in found.table)
    assert vit_fast.optimize(model, images, budget_s=60, **how).from_cache
    with torch.no_grad():
        model.head.weight.add_(1)
    assert not vit_fast.optimize(model, images, budget_s=1, **how).from_cache


def test_save_and_load(model, images, one_engine, tmp_path) -> None:
    found = vit_fast.optimize(model, images, budget_s=2)
    found.save(tmp_path / "fast.json")
    loaded = vit_fast.load_optimized(tmp_path / "fast.json", model)
    old = json.loads((tmp_path / "fast.json").read_text())  # as format 1 named its fields
    names = {"speedup": "gain", "speedup_over_compile": "over_compile"}
    old["figures"] = {names.get(name, name): value for name, value in old["figures"].items()}
    old["key"]["asked"] = old["key"].pop("request")
    (tmp_path / "old.json").write_text(json.dumps(old | {"format": 1, "choice": old.pop("candidate")}))
    assert vit_fast.load_optimized(tmp_path / "old.json", model).candidate == found.candidate
    assert loaded.candidate == found.candidate
    torch.testing.assert_close(loaded(images), model(images), atol=1e-4, rtol=1e-4)
    other = vit_fast.create_model("vit_test", depth=1)
    with pytest.raises(ValueError, match="another architecture"):
        vit_fast.load_optimized(tmp_path / "fast.json", other)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="format None"):
        vit_fast.load_optimized(tmp_path / "bad.json", model)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"budget_s": 0}, ValueError, "budget_s must be positive, got 0"),
        ({"min_agreement": 2}, ValueError, "min_agreement must be .* got 2"),
        ({"latency_or_throughput": "both"}, ValueError, "latency_or_throughput must be one of .*'both'"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be .* got 0"),
        ({"allow": ["bf16"]}, ValueError, "lossless=False"),
        ({"lossless": False, "allow": ["int4"]}, ValueError, "allow must consist of .* got 'int4'"),
        ({"example": torch.zeros(0, 3, 32, 32)}, ValueError, "example"),
        ({"example": "images"}, ValueError, "example"),
        ({"calibration": ["missing.jpg"]}, ValueError, "missing.jpg"),
        ({"budget_s": "60"}, ValueError, "budget_s must be a finite number, got '60'"),
        ({"min_agreement": None}, ValueError, "min_agreement must be a finite number"),
        ({"memory_limit": "1 GB"}, ValueError, "memory_limit must be a finite number"),
        ({"lossless": False, "allow": "bf16"}, TypeError, "allow must be a collection"),
        ({"calibration": "photo.jpg"}, TypeError, r"must be a list, got 'photo.jpg'; pass \['photo.jpg'\]"),
        ({"images": torch.zeros(4, 3, 32, 32)}, TypeError, r"images must be a list of batches such as \[images\]"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module .* got int"),
    ],
)
def test_bad_arguments(model, images, how, error, message) -> None:
    with pytest.raises(error, match=message):
        vit_fast.optimize(**{"model": model, "example": images} | how)


def test_a_choice_has_one_name_and_comes_back_from_a_file() -> None:
    everything = [*enumerated.candidates(torch.device("cpu"), PRECISIONS), *CHOICES[:-2]]
    everything += enumerated.variations(Candidate(), torch.device("cpu"), 8)
    assert len({choice.name for choice in everything}) == len(set(everything))
    assert all(Candidate.from_dict(choice.to_dict()) == choice for choice in everything)
    for foreign in ({"engine": "jax"}, {"precision": "int2"}, {"engine": True}, {"threads": [2]}, {"beam": 3}):
        with pytest.raises(ValueError, match=rf"must .*got .*{re.escape(repr(next(iter(foreign.values()))))}"):
            Candidate.from_dict(foreign)  # type: ignore[arg-type]  # what a file may hold
    with pytest.raises(ValueError, match="must consist of engine"):
        Candidate.from_dict({"colour": "red"})
    assert Candidate().changes == 0 < Candidate(attention="sdpa", mlp="sdpa").changes < Candidate("compile").changes


def test_a_cpu_tries_frozen_blocks_in_every_dtype() -> None:
    found = enumerated.candidates(torch.device("cpu"), ["bf16"])
    compiled = {Candidate("compile", frozen=True), dataclasses.replace(FROZEN, engine="compile")}
    assert {FROZEN, dataclasses.replace(FROZEN, precision="bf16"), *compiled} <= set(found)


def test_what_is_tried_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(enumerated, "triton_unavailable_reasons", lambda device: ())
    names = [choice.name for choice in enumerated.candidates(torch.device("cuda"), ["fp16"])]
    assert {"fused triton", "fused triton, frozen, graphs", "attention triton, MLP sdpa"} <= set(names)
    assert {"fused triton, torch.compile", "fused triton, fp16", "ONNX Runtime, fp16"} <= set(names)
    assert not any("bf16" in name or "int8" in name or "threads" in name for name in names)
    for device in (torch.device("cuda"), torch.device("cpu")):
        lossless = enumerated.candidates(device, ())
        assert lossless == sorted(lossless, key=lambda choice: enumerated.ENGINE_S[choice.engine]), (
            "where nothing may be lost, by time"
        )
        lossy = enumerated.candidates(device, PRECISIONS)
        assert lossless == [choice for choice in lossy if choice.precision is None], "and else in the same order"
    assert enumerated.candidates_of_file(torch.device("cuda"), ["int8"]) == [
        Candidate("onnxruntime", graphs=True), Candidate("tensorrt")
    ]  # fmt: skip
    monkeypatch.setattr(enumerated, "triton_unavailable_reasons", lambda device: ("no compiler",))
    assert not any("triton" in choice.name for choice in enumerated.candidates(torch.device("cuda"), []))
