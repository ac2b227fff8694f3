"""The result of vit_fast.optimize: a callable that is independent of the model, for every engine."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vit_fast
from vit_fast.export import export_onnx
from vit_fast.measure.build import build
from vit_fast.measure.candidate import Candidate

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

FUSED = Candidate(attention="sdpa", mlp="sdpa")
CHOICES = [
    FUSED,
    Candidate("onnxruntime"),
    *(pytest.param(choice, marks=pytest.mark.slow) for choice in (
        Candidate(), Candidate(split=1), Candidate(threads=1), dataclasses.replace(FUSED, precision="bf16"),
        Candidate("compile"), Candidate("compile", frozen=True),
    )),
]  # fmt: skip


# In this order, each on top of the ones before.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "eps": lambda model: setattr(model.blocks[1].norm1, "eps", 0.5),
    "data": lambda model: model.blocks[0].attn.qkv.weight.data.mul_(3),
    "numpy": lambda model: model.blocks[1].mlp.fc1.weight.detach().numpy().fill(0.5),
    "hook": lambda model: model.blocks[0].register_forward_hook(lambda module, args, output: output * 0),
    "forward": lambda model: setattr(model.blocks[1].mlp, "forward", lambda x: x * 0),
    "load_state_dict": lambda model: model.load_state_dict({n: v * 2 for n, v in model.state_dict().items()}),
    "module": lambda model: setattr(model, "head", nn.Linear(32, 5)),
    "training": lambda model: model.train(),
    "device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_changing_the_model_does_not_change_the_result(choice, model, images, only, tmp_path) -> None:
    only(choice)
    allow: Any = {"lossless": False, "allow": [choice.precision], "min_agreement": 0.0} if choice.precision else {}
    result = vit_fast.optimize(model, images, budget_s=600, **allow)
    assert result.candidate == choice
    result.save(tmp_path / "fast.json")
    results = [result.model, vit_fast.load_optimized(tmp_path / "fast.json", model)]
    before = [each(images) for each in results]
    torch.testing.assert_close(before[0], model(images), atol=2e-2 if choice.precision else 1e-4, rtol=1e-2)
    for name, change in CHANGES.items():
        change(model)
        assert all(torch.equal(each(images), output) for each, output in zip(results, before)), name


@pytest.mark.slow
def test_changing_the_file_does_not_change_the_result(model, images, tmp_path: Path, only) -> None:
    """ONNX Runtime maps external weights."""
    only(Candidate())
    path = tmp_path / "model.onnx"
    export_onnx(model, path, verify=False, external_data=True)
    found = vit_fast.optimize(path, images, budget_s=600)
    before = found.model(images)
    (weights,) = (part for part in tmp_path.iterdir() if part.name.startswith("model.onnx."))
    with weights.open("r+b") as file:
        file.write(bytes(weights.stat().st_size))
    assert torch.equal(found.model(images), before)


@pytest.mark.parametrize("choice", [Candidate(), Candidate("onnxruntime")], ids=lambda choice: choice.name)
def test_a_result_can_only_be_called(choice: Candidate, model, images) -> None:
    with torch.no_grad():
        result = build(choice, model, images, model(images), ())
    with pytest.raises(AttributeError, match="has no parameters: change the original model"):
        result.parameters()
    with pytest.raises(AttributeError, match="head"):
        result.head = nn.Linear(32, 3)
    assert torch.equal(copy.deepcopy(result)(images), result(images))
    if choice == Candidate():
        assert torch.equal(pickle.loads(pickle.dumps(result))(images), result(images))
        return
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError), match=r"pickle|local object"):
        pickle.dumps(result)
