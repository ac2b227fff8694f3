"""unfuse takes away what fuse added, and nothing that anyone else set."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import LIBRARIES, SUBJECTS
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedModule


def doubled(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = before(*args, **kwargs)
    return 2 * result if isinstance(result, Tensor) else (2 * result[0], *result[1:])


def set_forward(module: nn.Module) -> None:
    module.forward = functools.partial(doubled, module.forward)


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the attributes of modules beside parameters and children, and the items of containers."""
    hidden = {"_parameters", "_buffers", "_modules"}
    return {
        name: {key: repr(value) for key, value in vars(module).items() if key not in hidden}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("library", [*LIBRARIES, "torch"])
def test_nothing_is_left_and_nothing_is_missing(library: str, freeze: bool) -> None:
    model = SUBJECTS[LIBRARIES.get(library, "torch-encoder")].build().eval()
    classes, before = [type(module) for module in model.modules()], attributes_of(model)
    vit_fast.fuse(model, "triton")
    if freeze:
        vit_fast.freeze(model)
    vit_fast.unfuse(model)
    assert [type(module) for module in model.modules()] == classes
    after = attributes_of(model)
    assert after == before


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


def test_a_forward_set_before_fuse_stays() -> None:
    model, images = SUBJECTS["timm-vit"].build().eval(), torch.randn(1, 3, 32, 32)
    set_forward(model.blocks[0].attn)
    given = vars(model.blocks[0].attn)["forward"]
    expected = model(images)
    vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(model(images), expected)
    vit_fast.unfuse(model)
    assert vars(model.blocks[0].attn)["forward"] is given
    assert torch.equal(model(images), expected)


def test_a_forward_of_its_own_that_others_left_behind_goes_with_the_class() -> None:
    """A forward as accelerate leaves it when it takes its hooks away."""
    model, images = SUBJECTS["timm-vit"].build().eval(), torch.randn(1, 3, 32, 32)
    expected = model(images)
    vit_fast.fuse(model, "sdpa")
    attention = model.blocks[0].attn
    attention.forward = attention.forward
    vit_fast.unfuse(model)
    assert "forward" not in vars(attention)
    assert torch.equal(model(images), expected)
