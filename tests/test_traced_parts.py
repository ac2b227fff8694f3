"""What torch.compile is shown of a block: the same parts, each module by one path, and every change of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import fused_models
import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import vit_fast
from vit_fast.blocks.parts import BlockParts
from vit_fast.blocks.traced_parts import built, outline

torch.manual_seed(0)

# an unfused model does not follow it either: the check of a dictionary's version spares that of its owner's class
sees_classes = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="torch.compile does not see an assigned __class__ before 2.13"
)


def ours(depth: int = 2) -> nn.Module:
    model = fused_models.of_depth(depth)["ours"].build().eval()
    vit_fast.fuse(model, "eager")
    return model


def blocks_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "read") and hasattr(module, "whole")]


def same(one: Any, other: Any) -> bool:
    """Equal parts of the very same modules."""
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other if isinstance(one, nn.Module) else one == other


@pytest.mark.parametrize("library", ["timm", "transformers", "torchvision", "ours"])
def test_an_outline_says_all_of_a_reading(library: str) -> None:
    model = fused_models.of_depth(1)[library].build()
    vit_fast.fuse(model, "sdpa")
    blocks = blocks_of(model)
    assert blocks
    for block in blocks:
        parts: BlockParts = block.read()
        block.__dict__["vit_fast_parts"] = parts
        found = outline(block, parts)
        assert found is not None
        again = built(block, found)
        assert parts.mlp is not None and same(parts.mlp, again.mlp) and same(parts.attention, again.attention)


def test_what_is_no_module_of_the_block_has_no_outline() -> None:
    model = ours(1)
    (block,) = blocks_of(model)
    parts = block.read()
    assert outline(block, parts) is not None
    elsewhere = dataclasses.replace(parts.mlp, fc2=nn.Linear(2, 2))
    assert outline(block, dataclasses.replace(parts, mlp=elsewhere)) is None
    parts.watch.values = (*parts.watch.values, (block, "training", object()))
    assert outline(block, parts) is None


def compiled(model: nn.Module) -> tuple[Any, list[str]]:
    """Compiled as one graph; and the sources of what is guarded, filled when it is."""
    sources: list[str] = []

    def note(entries: Any) -> list[bool]:
        sources.extend(entry.name for entry in entries)
        return [True] * len(entries)

    torch.compiler.reset()  # the tests share the functions that are compiled, and torch counts how often
    options = {"guard_filter_fn": note}
    return torch.compile(model, backend="eager", fullgraph=True, dynamic=False, options=options), sources


@pytest.mark.fast_cases("ours")
@pytest.mark.parametrize("library", ["timm", "ours"])
def test_no_module_is_guarded_by_two_paths(library: str) -> None:
    model = fused_models.of_depth(2)[library].build().eval()
    vit_fast.fuse(model, "sdpa")
    run, sources = compiled(model)
    with torch.no_grad():
        run(torch.randn(1, 3, fused_models.IMAGE, fused_models.IMAGE))
    assert any("fc1" in source for source in sources)
    through = [source for source in sources if "vit_fast_parts." in source]
    own = tuple(f"vit_fast_parts.{name}" for name in ("watch", "frozen", "fp8"))
    assert not [source for source in through if not source.endswith(own)]


def larger_eps(block: Any) -> None:
    block.norm2.eps = 0.5


def other_heads(block: Any) -> None:
    block.attn.num_heads = 1


def other_layer(block: Any) -> None:
    block.mlp.fc2 = copy.deepcopy(block.mlp.fc2)
    nn.init.normal_(block.mlp.fc2.weight)


@pytest.mark.slow
@sees_classes
def test_what_is_called_as_a_module_hides_nothing_behind_it() -> None:
    """A hook keeps the attention a module; the MLP is still guarded."""
    model = ours()
    for block in blocks_of(model):
        block.attn.register_forward_hook(lambda module, args, out: 2 * out)
    images = torch.randn(1, 3, fused_models.IMAGE, fused_models.IMAGE)
    run, _ = compiled(model)
    with torch.no_grad():
        run(images)
        blocks_of(model)[1].ls2.__class__ = DoubledIdentity
        torch.testing.assert_close(run(images), model(images))


class DoubledIdentity(nn.Identity):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def other_class(block: Any) -> None:
    block.attn.proj.__class__ = Doubled


def other_parameter(block: Any) -> None:
    block.norm1.weight = nn.Parameter(torch.randn_like(block.norm1.weight))


@pytest.mark.fast_cases("larger_eps")
@pytest.mark.parametrize(
    "change", [larger_eps, other_heads, other_layer, pytest.param(other_class, marks=sees_classes), other_parameter]
)
def test_a_compiled_block_follows(change: Any) -> None:
    model = ours()
    images = torch.randn(1, 3, fused_models.IMAGE, fused_models.IMAGE)
    run, _ = compiled(model)
    with torch.no_grad():
        before = run(images)
        torch.testing.assert_close(before, model(images))
        change(blocks_of(model)[1])
        after = run(images)
        torch.testing.assert_close(after, model(images))
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)
