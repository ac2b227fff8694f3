"""The judge of "may this module be read past", and the watch over what was read: no change below a block is missed."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vit_fast import create_model
from vit_fast.blocks.block import BlockParts, parts_of
from vit_fast.model import Block


def a_block() -> Block:
    block = create_model("vit_test", backend="sdpa", init_values=0.5).blocks[0]
    assert isinstance(block, Block)
    return block


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shard(nn.Parameter):
    pass


def hook_in_a_new_dictionary(block: Block) -> None:
    block.mlp.fc2._forward_hooks = OrderedDict()
    block.mlp.fc2.register_forward_hook(lambda *_: None)


def set_weight_of_a_class(block: Block) -> None:
    block.attn.proj._parameters["weight"] = Shard(block.attn.proj.weight.detach())


def change_class(block: Block) -> None:
    block.mlp.fc1.__class__ = Doubled


# Beside forward hooks, forwards that were set, and other children: see test_fuse_hooks.py.
FORBIDDEN: dict[str, Callable[[Block], object]] = {
    "backward hook": lambda block: block.mlp.fc1.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda block: block.mlp.fc1.register_full_backward_pre_hook(lambda *_: None),
    "hook in a new dictionary": hook_in_a_new_dictionary,
    "weight of a class": set_weight_of_a_class,
    "class": change_class,
    "another child": lambda block: setattr(block.mlp, "fc1", Doubled(64, 256)),
    "a child taken away": lambda block: setattr(block, "norm2", None),
}


@pytest.mark.parametrize("change", FORBIDDEN)
def test_what_forbids_reading_past_is_seen_in_the_next_forward(change: str) -> None:
    block = a_block()
    before = parts_of(block)
    assert before.attention is not None and before.mlp is not None
    assert parts_of(block) is before, "read once"
    FORBIDDEN[change](block)
    after = parts_of(block)
    assert after.attention is None or after.mlp is None
    assert after.attention_reasons or after.mlp_reasons
    assert parts_of(block) is after, "a changed block is read once, too"


ALLOWED: dict[str, Callable[[Block], object]] = {
    "another linear": lambda block: setattr(block.mlp, "fc1", nn.Linear(64, 256)),
    "another activation": lambda block: setattr(block.mlp, "activation", "relu"),
    "other heads": lambda block: setattr(block.attn, "num_heads", 1),
    "LayerScale taken away": lambda block: setattr(block, "ls1", nn.Identity()),
}


@pytest.mark.parametrize("change", ALLOWED)
def test_what_it_may_become_is_followed(change: str) -> None:
    block = a_block()
    x = torch.randn(2, 5, 64)
    before = parts_of(block)
    ALLOWED[change](block)
    after = parts_of(block)
    assert after is not before
    assert after.attention is not None and after.mlp is not None
    found = block(x)
    hidden = x + block.ls1(block.attn(block.norm1(x)))
    torch.testing.assert_close(found, hidden + block.ls2(block.mlp(block.norm2(hidden))))


def test_parameters_are_not_kept() -> None:
    """A new Parameter needs no new reading: parts hold no tensors."""
    block, x = a_block(), torch.randn(2, 5, 64)
    before = parts_of(block)
    block.mlp.fc1.weight = nn.Parameter(torch.randn(block.mlp.fc1.weight.shape))
    assert parts_of(block) is before
    hidden = x + block.ls1(block.attn(block.norm1(x)))
    torch.testing.assert_close(block(x), hidden + block.ls2(block.mlp(block.norm2(hidden))))


@pytest.mark.parametrize("path", ["norm2.weight", "norm2.bias", "mlp.fc1.bias", "mlp.fc2.weight", "ls2.gamma"])
def test_a_parameter_that_became_a_buffer_is_still_used(path: str) -> None:
    block, x = a_block(), torch.randn(2, 5, 64)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    expected = block(x)
    owner, _, name = path.rpartition(".")
    layer = block.get_submodule(owner)
    value = getattr(layer, name).detach()
    delattr(layer, name)
    layer.register_buffer(name, value)
    torch.testing.assert_close(block(x), expected)


def shallow(block: Block) -> Block:
    return copy.copy(block)


def pickled(block: Block) -> Block:
    again: Block = pickle.loads(pickle.dumps(block))
    return again


@pytest.mark.parametrize("duplicate", [shallow, copy.deepcopy, pickled])
def test_a_copy_is_read_for_itself(duplicate: Callable[[Block], Block]) -> None:
    block = a_block()
    parts = parts_of(block)
    twin = duplicate(block)
    twin.norm1 = nn.LayerNorm(64)
    assert parts_of(twin).attention.norm.module is twin.norm1
    assert isinstance(parts_of(twin), BlockParts)
    if duplicate is not shallow:  # which shares its children
        assert parts_of(block) is parts
