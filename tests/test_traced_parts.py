"""Block parts under torch.compile: the same parts, each module by one path, and every change of them is guarded."""

from __future__ import annotations

import copy
from typing import Any

import fused_models
import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import vit_fast

torch.manual_seed(0)

# an unfused model does not follow it either: the check of a dictionary's version spares that of its owner's class
sees_classes = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="torch.compile does not see an assigned __class__ before 2.13"
)


def fused(library: str) -> nn.Module:
    model = fused_models.of_depth(2)[library].build().eval()
    vit_fast.fuse(model, "eager")
    return model


def blocks_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "read") and hasattr(module, "whole")]


def compiled(model: nn.Module) -> Any:
    torch.compiler.reset()  # the tests share the functions that are compiled, and torch counts how often
    return torch.compile(model, backend="eager", fullgraph=True, dynamic=False)


def larger_eps(block: Any) -> None:
    block.norm2.eps = 0.5


def other_heads(block: Any) -> None:
    block.attn.num_heads = 1


def other_layer(block: Any) -> None:
    block.mlp.fc2 = copy.deepcopy(block.mlp.fc2)
    nn.init.normal_(block.mlp.fc2.weight)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def other_class(block: Any) -> None:
    block.attn.proj.__class__ = Doubled


def other_parameter(block: Any) -> None:
    block.norm1.weight = nn.Parameter(torch.randn_like(block.norm1.weight))


@pytest.mark.fast_cases("vit-fast-larger_eps")
@pytest.mark.parametrize(
    "change", [larger_eps, other_heads, other_layer, pytest.param(other_class, marks=sees_classes), other_parameter]
)
@pytest.mark.parametrize("library", ["timm", "vit-fast"])
def test_a_compiled_block_follows(library: str, change: Any) -> None:
    model = fused(library)
    images = torch.randn(1, 3, fused_models.IMAGE, fused_models.IMAGE)
    run = compiled(model)
    with torch.no_grad():
        before = run(images)
        torch.testing.assert_close(before, model(images))
        change(blocks_of(model)[1])
        after = run(images)
        torch.testing.assert_close(after, model(images))
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)
