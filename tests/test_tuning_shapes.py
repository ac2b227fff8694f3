"""Backends by part and class of shapes: what the classes are, and that the search finds the best of each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import vit_fast
from vit_fast.measure.build import backends_of, build, shape_classes
from vit_fast.measure.candidate import Candidate, candidates, variations
from vit_fast.measure.search import search

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pit() -> nn.Module:
    """A hierarchy of two stages: 50 tokens (a class token with them) of 16, then 17 of 32."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 64, "base_dims": (8, 8), "depth": (1, 1), "heads": (2, 4), "num_classes": 5}
    return timm.create_model("pit_ti_224", **sizes).eval()


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
LARGE, SMALL = "attention 2x64x16", "attention 2x32x32"


def test_classes_are_parts_with_their_shapes(pit: nn.Module) -> None:
    classes = shape_classes(pit, IMAGES)
    assert {LARGE, SMALL} <= set(classes.values())
    assert not any(module._forward_pre_hooks for module in pit.modules())
    ours = vit_fast.create_model("vit_test").eval()
    classes = shape_classes(ours, torch.randn(3, 3, 32, 32))
    assert Counter(classes.values()) == {"attention 4x32x64": 2, "norm + MLP 4x32x64": 2}


def test_each_class_runs_the_backend_that_was_chosen(pit: nn.Module) -> None:
    choice = Candidate(attention="sdpa", mlp="sdpa", by_shape=((SMALL, "eager"),))
    expected = pit(IMAGES)
    optimized = build(choice, pit, IMAGES, expected, ())
    torch.testing.assert_close(optimized(IMAGES), expected, atol=1e-5, rtol=1e-5)
    classes = shape_classes(pit, IMAGES)
    backends = {name: optimized._function.get_submodule(name).vit_fast_backend for name in classes}
    assert backends == backends_of(choice, classes)
    assert {kind: backends[name] for name, kind in classes.items()}[SMALL] == "eager"
    assert Candidate.from_dict(choice.to_dict()) == choice and SMALL in choice.name
    assert choice.plainness > Candidate(attention="sdpa", mlp="sdpa").plainness


class Parts:
    """A machine on which a call takes what its parts take, each by its class and backend, and some noise."""

    def __init__(self, seed: int, classes: Sequence[str]) -> None:
        self.random, self.classes, self.now = random.Random(seed), classes, 0.0
        self.ms = {kind: {b: self.random.uniform(2, 20) for b in ("given", "sdpa", "triton")} for kind in classes}

    def exact_ms(self, choice: Candidate) -> float:
        by_class = dict(choice.by_shape)
        backends = {kind: by_class.get(kind) or choice.backend_of(kind) or "given" for kind in self.classes}
        slow = 1.0 if choice.split is None and not choice.channels_last and choice.engine == "torch" else 1.5
        return slow * sum(self.ms[kind][backend] for kind, backend in backends.items())

    def elapsed_s(self) -> float:
        return self.now

    def seconds(self, candidate: Candidate) -> float:
        return 0.5 if candidate.engine == "torch" else 20.0

    def prepare(self, candidate: Candidate, seconds: float) -> None:
        self.now += self.seconds(candidate)

    def call_ms(self, candidate: Candidate, number: int) -> float:
        ms = self.exact_ms(candidate) * self.random.lognormvariate(0, 0.02)
        self.now += ms / 1e3
        return ms

    def compare(self, candidates: Sequence[Candidate]) -> None: ...

    def release(self, candidate: Candidate) -> None:
        pass

    def variations(self, candidate: Candidate) -> Sequence[Candidate]:
        return variations(candidate, torch.device("cuda"), 8, self.classes)


@pytest.mark.parametrize("machines", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_the_best_of_each_class_is_found(machines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 % of the best backend of each class, on 95 % of the machines, in two minutes of theirs."""
    monkeypatch.setattr("vit_fast.measure.candidate.triton_unavailable_reasons", lambda device: ())
    classes = [LARGE, SMALL, "norm + MLP 2x64x16", "norm + MLP 2x32x32"]
    good, mixed = 0, 0
    for seed in range(machines):
        machine = Parts(seed, classes)
        first = candidates(torch.device("cuda"), ())
        found = search(machine, Candidate(), first, budget_s=120)
        best = sum(min(ms["sdpa"], ms["triton"]) for ms in machine.ms.values())
        given = machine.exact_ms(Candidate())
        good += machine.exact_ms(found.chosen) <= 1.03 * min(best, given)
        mixed += bool(found.chosen.by_shape)
        assert machine.now < 125
    assert good >= 0.95 * machines
    assert mixed >= 0.3 * machines, "where the best differs by shape, the choice does"


def test_parts_of_one_class_are_not_varied_by_it() -> None:
    cpu = torch.device("cpu")
    fused = Candidate(attention="sdpa", mlp="sdpa")
    assert not any(choice.by_shape for choice in variations(fused, cpu, 8, [LARGE, "norm + MLP 2x32x32"]))
    found = variations(fused, cpu, 8, [LARGE, SMALL])
    assert [choice.by_shape for choice in found if choice.by_shape] == [((SMALL, "eager"),), ((LARGE, "eager"),)]
    assert not any(choice.by_shape for choice in variations(Candidate(), cpu, 8, [LARGE, SMALL]))
    back = variations(found[0], cpu, 8, [LARGE, SMALL])
    assert fused in back, "what was changed can be changed back"
