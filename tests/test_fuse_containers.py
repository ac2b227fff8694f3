"""A Sequential of fused blocks behaves like a Sequential: slices, sums, inserted and removed blocks."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import IMAGE, of_depth, rotary_of_depth
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedBlocks

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


def pop(blocks: Any) -> nn.Module:
    blocks.pop(1)
    return blocks


OPERATIONS: dict[str, Callable[[Any], nn.Module]] = {
    "first": lambda blocks: blocks[:1],
    "none": lambda blocks: blocks[:0],
    "slice of a slice": lambda blocks: blocks[1:][:1],
    "sum": lambda blocks: blocks + blocks[:2],
    "added to another": lambda blocks: nn.Sequential(nn.Tanh()) + blocks,
    "product": lambda blocks: 2 * blocks,
    "sum in place": lambda blocks: operator.iadd(blocks, blocks[:1]),
    "append": lambda blocks: blocks.append(nn.Tanh()),
    "pop": pop,
    "pickle of a slice": lambda blocks: pickle.loads(pickle.dumps(blocks[1:])),
}
PATHS = {"timm": "blocks", "torchvision": "encoder.layers", "vit-fast": "blocks"}


@pytest.mark.each_value
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("library", PATHS)
def test_containers_do_what_they_do_without_fuse(library: str, operation: str) -> None:
    model = of_depth(3)[library].build().eval()
    expected = OPERATIONS[operation](copy.deepcopy(model).get_submodule(PATHS[library]))
    vit_fast.fuse(model, "sdpa").require_all()
    blocks: Any = model.get_submodule(PATHS[library])
    assert isinstance(blocks, FusedBlocks)
    found: Any = OPERATIONS[operation](blocks)
    with torch.no_grad():
        assert list(found.state_dict()) == list(expected.state_dict())
        assert len(found) == len(list(found)) == len(list(expected))
        undo = (lambda: vit_fast.unfuse(model), lambda: vit_fast.unfuse(found))  # they share their blocks
        for each in (lambda: None, lambda: vit_fast.fuse(found, "eager"), *undo):
            each()
            torch.testing.assert_close(found(X), expected(X), rtol=1e-4, atol=1e-4)
    assert not isinstance(found, FusedBlocks)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_a_block_that_is_not_fused_in_a_fused_sequential(backend: str) -> None:
    model, other = (of_depth(2)["timm"].build().eval() for _ in range(2))
    expected = nn.Sequential(*copy.deepcopy(model).blocks[:1], copy.deepcopy(other).blocks[1])
    vit_fast.fuse(model, backend)
    blocks = model.blocks[:1].append(other.blocks[1])
    with torch.no_grad():
        torch.testing.assert_close(blocks(X), expected(X), rtol=1e-4, atol=1e-4)
        assert vit_fast.fuse(blocks, backend).require_all()
        torch.testing.assert_close(blocks(X), expected(X), rtol=1e-4, atol=1e-4)


def test_a_slice_of_our_blocks_passes_rotary_positions_on() -> None:
    model, images = rotary_of_depth(3)["vit-fast"].build().eval(), torch.randn(1, 3, IMAGE, IMAGE)
    vit_fast.set_backend(model, "sdpa")
    model.blocks = model.blocks[:2]
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad():
        model(images)
    assert len(seen) == 2 and all(positions is not None for positions in seen)
