"""Fused models record hidden states and attention weights like transformers, which saves and loads them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS
from packed_towers import TOWERS
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import vit_fast

transformers = pytest.importorskip("transformers")

NAMES = (*(name for name in SUBJECTS if name.startswith("transformers-")), *TOWERS)
HIDDEN, WEIGHTS = "output_hidden_states", "output_attentions"


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    subject = SUBJECTS[name] if name in SUBJECTS else TOWERS[name]
    return subject.build().eval(), subject.inputs()


def tensors(output: Any) -> dict[str, Tensor]:
    """Returns all tensors of an output by their paths."""

    paths, _ = pytree.tree_flatten_with_path(dict(output) if isinstance(output, dict) else output)
    return {pytree.keystr(path): leaf for path, leaf in paths if isinstance(leaf, Tensor)}


@torch.no_grad()
def outputs(model: nn.Module, inputs: dict[str, Any], *asked: str) -> dict[str, Tensor]:
    return tensors(model(**copy.deepcopy(inputs), **dict.fromkeys(asked, True)))


def make_eager(model: nn.Module) -> None:
    for config in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
        config._attn_implementation = "eager"


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_model_records_the_same_outputs(name: str) -> None:
    plain, inputs = build(name)
    fused = copy.deepcopy(plain)
    vit_fast.fuse(fused, "sdpa")
    undone = copy.deepcopy(fused)
    vit_fast.unfuse(undone)
    # a backbone always has hooks of transformers, which cannot be pickled
    copied = copy.deepcopy(fused if name == "transformers-vitpose" else pickle.loads(pickle.dumps(fused)))
    hidden = outputs(plain, inputs, HIDDEN)
    make_eager(plain)
    weights = outputs(plain, inputs, HIDDEN, WEIGHTS)
    assert len(weights) >= len(hidden) + 2 >= 5
    for model in (fused, copied, undone):
        torch.testing.assert_close(outputs(model, inputs, HIDDEN), hidden, rtol=1e-3, atol=1e-3)
        make_eager(model)
        torch.testing.assert_close(outputs(model, inputs, HIDDEN, WEIGHTS), weights, rtol=1e-3, atol=1e-3)
        for asked in (HIDDEN, WEIGHTS):
            setattr(model.config, asked, True)
        torch.testing.assert_close(outputs(model, inputs), weights, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["pixtral", "siglip2"])
def test_a_fused_tower_is_saved_and_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    plain, inputs = build(name)
    fused, expected = copy.deepcopy(plain), outputs(plain, inputs, HIDDEN)
    vit_fast.fuse(fused, "sdpa")
    fused.save_pretrained(tmp_path)
    for loaded in (type(plain).from_pretrained(tmp_path), type(fused).from_pretrained(tmp_path)):
        assert list(loaded.state_dict()) == list(plain.state_dict())
        vit_fast.fuse(loaded.eval(), "sdpa")
        torch.testing.assert_close(outputs(loaded, inputs, HIDDEN), expected, rtol=1e-3, atol=1e-3)
    in_tuples = [tensors(model(**inputs, output_hidden_states=True, return_dict=False)) for model in (plain, fused)]
    torch.testing.assert_close(in_tuples[1], in_tuples[0], rtol=1e-3, atol=1e-3)
