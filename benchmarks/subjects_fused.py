"""The peers after vit_fast.fuse: the libraries' own models with our operators inside."""

from __future__ import annotations

import functools
from types import ModuleType

from torch import nn

from vit_fast.fusion import fuse
from vit_fast.libraries.known import PEERS

from . import subjects_peers
from .subjects import Subject, Task, register


def build(peer: ModuleType, task: Task) -> nn.Module:
    """The peer's model with every attention and MLP fused, by the kernels where they can run.

    Raises:
        UnsupportedInputError: the peer cannot do the task, or something in it could not be fused; all reasons.
    """
    model = subjects_peers.build(peer, task)
    fuse(model).require_all()
    return model


for library in PEERS:
    register(
        Subject(
            f"{library.NAME}+fused",
            f"{library.NAME}'s model after vit_fast.fuse",
            functools.partial(build, library),
            packages=(library.NAME,),
            fullgraph=True,
        )
    )
