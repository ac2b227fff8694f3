"""The peers: the same architecture in timm, transformers and torchvision, with the very same weights.

Each is built by the library's own class, then given our weights under its own names; a model that the library cannot
express is refused with every reason.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import nn

from vit_fast.libraries import transformers
from vit_fast.libraries.known import PEERS
from vit_fast.libraries.peers import take_weights

from .models import OutputOf
from .subjects import Subject, Task, register


def build(peer: ModuleType, task: Task) -> nn.Module:
    """The model of a library's with our weights, all of them, on the task's device.

    Raises:
        UnsupportedInputError: the library has no such model; every reason.
    """
    config, weights = task.ours
    model = peer.build_peer(config).to(device=task.device, dtype=task.dtype)
    take_weights(model, weights, peer.convert, config)
    model = model.eval().requires_grad_(False)
    return OutputOf(model) if peer is transformers else model


for library in PEERS:
    register(
        Subject(library.NAME, library.PEER, functools.partial(build, library), packages=(library.NAME,), peer=True)
    )
