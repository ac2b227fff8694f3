"""The peers: the same architecture in timm, transformers and torchvision, with the very same weights; and all fused.

Each is built by the library's own class, then given our weights under its own names; a model that the library cannot
express is refused with every reason.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

from torch import nn

from vit_fast.fusion import fuse
from vit_fast.libraries import transformers
from vit_fast.libraries.known import PEERS
from vit_fast.libraries.peers import take_weights

from .models import OutputOf
from .subjects import Subject, Task, register


def build(peer: ModuleType, task: Task, *, fused: bool = False) -> nn.Module:
    """The model of a library's with our weights, all of them, on the task's device.

    Args:
        peer: See vit_fast.libraries.
        task: What it is to compute.
        fused: Whether every attention and MLP of it is fused, by the kernels where they can run.
    Raises:
        UnsupportedInputError: the library has no such model, or something in it could not be fused; every reason.
    """
    config, weights = task.ours
    model = peer.build_peer(config).to(device=task.device, dtype=task.dtype)
    take_weights(model, weights, peer.convert, config)
    model = model.eval().requires_grad_(False)
    model = OutputOf(model) if peer is transformers else model
    if fused:
        fuse(model).require_all()
    return model


for library in PEERS:
    name, packages = library.NAME, (library.NAME,)
    register(Subject(name, library.PEER, partial(build, library), packages=packages, peer=True))
    summary, build_fused = f"{name}'s model after vit_fast.fuse", partial(build, library, fused=True)
    register(Subject(f"{name}+fused", summary, build_fused, packages=packages, fullgraph=True))
