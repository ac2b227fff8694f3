"""A Sequential of fused blocks behaves like a Sequential: slices, sums, inserted and removed blocks."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_models import IMAGE, Subject, of_depth, rotary_of_depth
from torch import Tensor, nn

import vit_fast
from vit_fast.blocks.fused import FusedBlocks

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
Operation = Callable[[Any], nn.Module]


def in_place(change: Callable[[Any], object]) -> Operation:
    def apply(blocks: Any) -> nn.Module:
        change(blocks)
        return blocks

    return apply


def inplace_sum(blocks: Any) -> nn.Module:
    blocks += blocks[:1]
    return blocks


def inplace_product(blocks: Any) -> nn.Module:
    blocks *= 2
    return blocks


OPERATIONS: dict[str, Operation] = {
    "first": lambda blocks: blocks[:1],
    "every second": lambda blocks: blocks[::2],
    "none": lambda blocks: blocks[:0],
    "slice of a slice": lambda blocks: blocks[1:][:1],
    "last": lambda blocks: blocks[-1],
    "sum": lambda blocks: blocks + blocks[:2],
    "added to another": lambda blocks: nn.Sequential(nn.Tanh()) + blocks,
    "product": lambda blocks: 2 * blocks,
    "sum in place": inplace_sum,
    "product in place": inplace_product,
    "append": lambda blocks: blocks.append(nn.Tanh()),
    "insert": lambda blocks: blocks.insert(1, nn.Tanh()),
    "pop": in_place(lambda blocks: blocks.pop(1)),
    "delete a slice": in_place(lambda blocks: blocks.__delitem__(slice(1, 3))),
    "set": in_place(lambda blocks: blocks.__setitem__(1, nn.Tanh())),
    "named": lambda blocks: nn.Sequential(*[block for _, block in blocks.named_children()]),
    "pickle of a slice": lambda blocks: pickle.loads(pickle.dumps(blocks[1:])),
}
# nn.Sequential expects "0", "1", but these blocks have names
BY_NUMBER = {("torchvision", "insert"), ("torchvision", "product in place")}
MODELS: dict[str, tuple[Subject, str]] = {
    "timm": (of_depth(3)["timm"], "blocks"),
    "torchvision": (of_depth(3)["torchvision"], "encoder.layers"),
    "ours": (of_depth(3)["ours"], "blocks"),
}
CASES = [case for case in itertools.product(MODELS, OPERATIONS) if case not in BY_NUMBER]


@pytest.mark.each_value
@pytest.mark.parametrize(("library", "operation"), CASES)
def test_containers_do_what_they_do_without_fuse(library: str, operation: str) -> None:
    subject, path = MODELS[library]
    model = subject.build().eval()
    expected = OPERATIONS[operation](copy.deepcopy(model).get_submodule(path))
    vit_fast.fuse(model, "sdpa").require_all()
    blocks: Any = model.get_submodule(path)
    assert isinstance(blocks, FusedBlocks)
    found: Any = OPERATIONS[operation](blocks)
    with torch.no_grad():
        torch.testing.assert_close(found(X), expected(X), rtol=1e-4, atol=1e-4)
        assert list(found.state_dict()) == list(expected.state_dict())
        assert [name for name, _ in found.named_children()] == [name for name, _ in expected.named_children()]
        if isinstance(found, nn.Sequential):
            assert len(found) == len(list(found)) == len(list(expected))
        for each in (
            lambda: vit_fast.fuse(found, "eager"),
            lambda: vit_fast.unfuse(model),
            lambda: vit_fast.unfuse(found),
        ):
            each()  # they share their blocks
            torch.testing.assert_close(found(X), expected(X), rtol=1e-4, atol=1e-4)
    assert not isinstance(found, FusedBlocks)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_a_block_that_is_not_fused_in_a_fused_sequential(backend: str) -> None:
    subject, _ = MODELS["timm"]
    model, other = subject.build().eval(), subject.build().eval()
    expected = nn.Sequential(*copy.deepcopy(model).blocks[:1], copy.deepcopy(other).blocks[1])
    vit_fast.fuse(model, backend)
    blocks = model.blocks[:1].append(other.blocks[1])
    with torch.no_grad():
        torch.testing.assert_close(blocks(X), expected(X), rtol=1e-4, atol=1e-4)
        assert vit_fast.fuse(blocks, backend).require_all()
        assert all(block.ready() is not None for block in blocks)
        torch.testing.assert_close(blocks(X), expected(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", ["first", "sum", "product"])
def test_blocks_of_a_model_with_rotary_positions_of_ours(operation: str) -> None:
    model, images = rotary_of_depth(3)["ours"].build().eval(), torch.randn(1, 3, IMAGE, IMAGE)
    vit_fast.set_backend(model, "sdpa")
    model.blocks = OPERATIONS[operation](model.blocks)
    seen: list[Tensor] = []
    for block in set(model.blocks):
        block.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad():
        model(images)
    assert len(seen) == len(model.blocks) and all(positions is not None for positions in seen)
