"""The peers after vit_fast.fuse: the libraries' own models with our operators inside."""

from __future__ import annotations

import functools

from torch import nn

from vit_fast.fusion import fuse

from . import subjects_peers
from .subjects import Subject, Task, register


def build(peer: str, task: Task) -> nn.Module:
    """The peer's model with every attention and MLP fused, by the kernels where they can run.

    Raises:
        UnsupportedInputError: the peer cannot do the task, or something in it could not be fused; all reasons.
    """
    model = subjects_peers.build(peer, task)
    fuse(model).require_all()
    return model


for name in subjects_peers.PEERS:
    register(
        Subject(
            f"{name}+fused",
            f"{name}'s model after vit_fast.fuse",
            functools.partial(build, name),
            packages=(name,),
            fullgraph=True,
        )
    )
