"""Models of all kinds under vit_fast.optimize: what cannot be judged is refused, what can is judged right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import vit_fast
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.build import build
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.search import Refused
from vit_fast.measure.trials import Expected

pytestmark = pytest.mark.usefixtures("own_cache")


class Around(nn.Module):
    """A small model of ours inside one that does something more."""

    def __init__(self, forward: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = vit_fast.create_model("vit_test", backend="eager")
        self.register_buffer("calls", torch.zeros(1))
        self.__dict__.update(attributes)
        self.how = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(self, *args, **kwargs)


def count(model: Any, images: Tensor) -> Tensor:
    model.calls += 1
    return model.inner(images)


def coupled(model: Any, images: Tensor) -> Tensor:
    output = model.inner(images)
    return (output - output.mean(0)) / (output.std(0) + 1)


IMAGES = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
FUSED, SPLIT = Candidate(attention="sdpa", mlp="sdpa"), Candidate(split=5)

REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = {
    "input": (lambda m, x: m.inner(x.mul_(2)), {}, ValueError, "must not modify its input in place"),
    "buffer": (count, {}, ValueError, "must not modify calls in place"),
    "chance": (lambda m, x: nn.functional.dropout(m.inner(x), 0.5), {}, ValueError, "must be deterministic"),
    "nan": (lambda m, x: m.inner(x) / 0, {}, ValueError, "NaN or infinity"),
    "integers": (lambda m, x: m.inner(x).argmax(1), {}, ValueError, "must return floating-point tensors"),
    "nothing": (lambda m, x: None, {}, ValueError, "got NoneType"),
    "fp32": (lambda m, x: m.inner(x.float()), {}, UnsupportedInputError, "fp64.*float32"),
    "attribute": (lambda m, x: m.inner(x) @ m.turn, {"turn": torch.eye(10)}, UnsupportedInputError, "fp64.*dtype"),
    "lock": (lambda m, x: m.inner(x), {"lock": threading.Lock()}, UnsupportedInputError, "copying it fails.*pickle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_and_left_alone(name: str) -> None:
    forward, attributes, error, message = REFUSED[name]
    model = Around(forward, **attributes).train()
    example, state = IMAGES[:2].clone(), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        vit_fast.optimize(model, example)
    assert torch.equal(example, IMAGES[:2]) and model.training and model.inner.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


ODD: dict[str, tuple[Callable[..., Any], Any]] = {
    "keywords": (lambda m, *, pixels, flag: m.inner(pixels) if flag else None, {"pixels": IMAGES, "flag": True}),
    "nested": (lambda m, x, by: (m.inner(x) * by, [x.mean(), {"names": ("a",)}], None), (IMAGES, 2.0)),
    "tokens first": (lambda m, x: m.inner(x).transpose(0, 1), IMAGES),
    "scalar": (lambda m, x: m.inner(x).sum(), IMAGES),
    "views": (lambda m, x: (y := m.inner(x), y[:, :3], y.expand(2, *y.shape)), IMAGES),
    "half": (lambda m, x: m.inner(x).half(), IMAGES),
    "mask": (lambda m, x, mask: m.inner(x) * mask.mean(), (IMAGES, torch.ones(50, 2))),
    "strided": (lambda m, x: m.inner(x), IMAGES.to(memory_format=torch.channels_last).flip(0)[::2]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_calls_and_outputs_are_a_drop_in(name: str) -> None:
    forward, example = ODD[name]
    model = Around(forward).eval()
    expected = Expected(model, example)
    with torch.no_grad():
        output = model(*example) if isinstance(example, tuple) else (
            model(**example) if isinstance(example, dict) else model(example)
        )  # fmt: skip
    optimized = build(FUSED, model, example, output, ())
    error, allowed, agreement = expected.check(optimized, FUSED)
    assert allowed is not None and error <= allowed and agreement == 1.0
    found, spec = pytree.tree_flatten(expected.output)
    leaves, same = pytree.tree_flatten(output)
    assert spec == same and all(type(one) is type(other) for one, other in zip(found, leaves))
    wrong = lambda *args, **kwargs: pytree.tree_map(  # noqa: E731  # a name would say no more
        lambda leaf: leaf + 0.3 if isinstance(leaf, Tensor) else leaf, model(*args, **kwargs)
    )
    with pytest.raises(Refused, match="error must be at most"):
        expected.check(wrong, FUSED)


def test_images_that_look_at_one_another_are_judged_together() -> None:
    """A subset of the images gives another output, so the whole batch must be compared."""
    model = Around(coupled).eval()
    expected = Expected(model, IMAGES)
    with torch.no_grad():
        expected.check(model, FUSED)
        split = build(SPLIT, model, IMAGES, expected.output, ())
        with pytest.raises(Refused, match="error must be at most"):
            expected.check(split, SPLIT)


def test_outputs_of_another_structure_are_refused() -> None:
    model = Around(lambda m, x: {"logits": m.inner(x)}).eval()
    expected = Expected(model, IMAGES)
    with torch.no_grad(), pytest.raises(Refused, match="must be dict, got Tensor"):
        expected.check(lambda images: model(images)["logits"], FUSED)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modes_of_making_tensors() -> None:
    with torch.inference_mode():
        model, images = vit_fast.create_model("vit_test", backend="eager"), IMAGES[:2].clone()
        found = vit_fast.optimize(model, images, budget_s=1)
        assert found.model(images).shape == (2, 10)
    with pytest.raises(ValueError, match="must not be on the meta device"):
        vit_fast.optimize(model, images.to("meta"))
