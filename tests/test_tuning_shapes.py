"""Backends by part and class of shapes: what the classes are, that the search finds the best of each, who uses them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import vit_fast
from vit_fast.tuning import answers, choices
from vit_fast.tuning.answers import Answer
from vit_fast.tuning.build import build
from vit_fast.tuning.choices import Choice
from vit_fast.tuning.search import search
from vit_fast.tuning.shapes import backends_of, choice_by_classes, shape_classes

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
    choice = Choice(attention="sdpa", mlp="sdpa", by_shape=((SMALL, "eager"),))
    expected = pit(IMAGES)
    optimized = build(choice, pit, IMAGES, expected, ())
    torch.testing.assert_close(optimized(IMAGES), expected, atol=1e-5, rtol=1e-5)
    classes = shape_classes(pit, IMAGES)
    backends = {name: optimized._function.get_submodule(name).vit_fast_backend for name in classes}
    assert backends == backends_of(choice, classes)
    assert {kind: backends[name] for name, kind in classes.items()}[SMALL] == "eager"
    assert Choice.from_dict(choice.to_dict()) == choice and SMALL in choice.name
    assert choice.plainness > Choice(attention="sdpa", mlp="sdpa").plainness


class Parts:
    """A machine on which a call takes what its parts take, each by its class and backend, and some noise."""

    def __init__(self, seed: int, classes: Sequence[str]) -> None:
        self.random, self.classes, self.now = random.Random(seed), classes, 0.0
        self.ms = {kind: {b: self.random.uniform(2, 20) for b in ("given", "sdpa", "triton")} for kind in classes}

    def exact_ms(self, choice: Choice) -> float:
        by_class = dict(choice.by_shape)
        backends = {kind: by_class.get(kind) or choice.backend_of(kind) or "given" for kind in self.classes}
        slow = 1.0 if choice.split is None and not choice.channels_last and choice.engine == "torch" else 1.5
        return slow * sum(self.ms[kind][backend] for kind, backend in backends.items())

    def elapsed_s(self) -> float:
        return self.now

    def seconds(self, candidate: Choice) -> float:
        return 0.5 if candidate.engine == "torch" else 20.0

    def prepare(self, candidate: Choice, seconds: float) -> None:
        self.now += self.seconds(candidate)

    def call_ms(self, candidate: Choice, number: int) -> float:
        ms = self.exact_ms(candidate) * self.random.lognormvariate(0, 0.02)
        self.now += ms / 1e3
        return ms

    def compare(self, candidates: Sequence[Choice]) -> None: ...

    def release(self, candidate: Choice) -> None:
        pass

    def variations(self, candidate: Choice) -> Sequence[Choice]:
        return choices.variations(candidate, torch.device("cuda"), 8, self.classes)


@pytest.mark.parametrize("machines", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_the_best_of_each_class_is_found(machines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 % of the best backend of each class, on 95 % of the machines, in two minutes of theirs."""
    monkeypatch.setattr(choices, "triton_unavailable_reasons", lambda device: ())
    classes = [LARGE, SMALL, "norm + MLP 2x64x16", "norm + MLP 2x32x32"]
    good, mixed = 0, 0
    for seed in range(machines):
        machine = Parts(seed, classes)
        first = choices.candidates(torch.device("cuda"), ())
        found = search(machine, Choice(), first, budget_s=120)
        best = sum(min(ms["sdpa"], ms["triton"]) for ms in machine.ms.values())
        given = machine.exact_ms(Choice())
        good += machine.exact_ms(found.chosen) <= 1.03 * min(best, given)
        mixed += bool(found.chosen.by_shape)
        assert machine.now < 125
    assert good >= 0.95 * machines
    assert mixed >= 0.3 * machines, "where the best differs by shape, the choice does"


def test_parts_of_one_class_are_not_varied_by_it() -> None:
    cpu = torch.device("cpu")
    fused = Choice(attention="sdpa", mlp="sdpa")
    assert not any(choice.by_shape for choice in choices.variations(fused, cpu, 8, [LARGE, "norm + MLP 2x32x32"]))
    found = choices.variations(fused, cpu, 8, [LARGE, SMALL])
    assert [choice.by_shape for choice in found if choice.by_shape] == [((SMALL, "eager"),), ((LARGE, "eager"),)]
    assert not any(choice.by_shape for choice in choices.variations(Choice(), cpu, 8, [LARGE, SMALL]))
    back = choices.variations(found[0], cpu, 8, [LARGE, SMALL])
    assert fused in back, "what was changed can be changed back"


def test_what_is_known_of_a_class_is_tried_first_in_other_models(pit: nn.Module, monkeypatch) -> None:
    classes = sorted(set(shape_classes(pit, IMAGES).values()))
    known = {kind: "eager" if kind == SMALL else "sdpa" for kind in classes}
    likely = choice_by_classes(classes, known)
    assert likely == Choice(attention="eager", mlp="sdpa", by_shape=((LARGE, "sdpa"),))
    assert choice_by_classes([*classes, "attention 2x8x8"], known) is None and choice_by_classes([], known) is None
    figures = dict.fromkeys(answers.FIGURES) | {"parts": {kind: (kind, known[kind]) for kind in classes}}
    key = {"machine": answers.machine(torch.device("cpu")), "model": "another", "example": [], "asked": {}}
    answers.keep(Answer(key, Choice(attention="sdpa", mlp="sdpa"), figures))
    assert answers.known_by_shape(torch.device("cpu")) == known
    monkeypatch.setattr("vit_fast.tuning.optimization.candidates", lambda *_: [])
    found = vit_fast.optimize(pit, IMAGES, budget_s=2)
    assert [row.choice for row in found.table][:2] == [Choice(), likely]
