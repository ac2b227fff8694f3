"""unfuse removes everything that fuse added, and nothing that users set."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import LIBRARIES, SUBJECTS, attributes_of, classes_of
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule


def doubled(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = before(*args, **kwargs)
    return 2 * result if isinstance(result, Tensor) else (2 * result[0], *result[1:])


def set_forward(module: nn.Module) -> None:
    module.forward = functools.partial(doubled, module.forward)


@pytest.mark.parametrize("library", [*LIBRARIES, "torch"])
def test_unfuse_restores_a_frozen_model(library: str) -> None:
    model = SUBJECTS[LIBRARIES.get(library, "torch-encoder")].build().eval()
    classes, before = classes_of(model), attributes_of(model)
    vit_fast.fuse(model, "triton")
    vit_fast.freeze(model)
    vit_fast.unfuse(model)
    assert classes_of(model) == classes and attributes_of(model) == before


@pytest.mark.each_value
@pytest.mark.parametrize("how", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forward_that_was_set_stays_and_may_call_the_one_before(
    library: str, how: Callable[[nn.Module], nn.Module]
) -> None:
    subject = SUBJECTS[LIBRARIES[library]]
    model, inputs = subject.build().eval(), subject.inputs()
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    paths = [name for name, module in model.named_modules() if name and isinstance(module, FusedModule | nn.LayerNorm)]
    for path in paths[::2]:
        set_forward(model.get_submodule(path))
        set_forward(twin.get_submodule(path))
    with torch.no_grad():
        expected = subject.run(twin, inputs)
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)
        model = how(model)
        vit_fast.unfuse(model)
        assert not any(isinstance(module, FusedModule) for module in model.modules())
        assert all("forward" in vars(model.get_submodule(path)) for path in paths[::2])
        torch.testing.assert_close(subject.run(model, inputs), expected, rtol=1e-4, atol=1e-4)


def test_a_forward_set_before_fuse_stays_and_one_left_by_accelerate_is_removed() -> None:
    model, images = SUBJECTS["timm-vit"].build().eval(), torch.randn(1, 3, 32, 32)
    first, second = (block.attn for block in model.blocks)
    set_forward(first)
    given, expected = vars(first)["forward"], model(images)
    vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(model(images), expected)
    second.forward = second.forward  # as accelerate leaves it after removing its hooks
    vit_fast.unfuse(model)
    assert vars(first)["forward"] is given and "forward" not in vars(second)
    assert torch.equal(model(images), expected)
