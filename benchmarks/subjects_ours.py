"""Our model as a subject, on each of its backends, and with torch's attention confined to one of its kernels."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast.model import VisionTransformer, set_backend

from .subjects import Subject, Task, register


def build(backend: str, task: Task) -> VisionTransformer:
    """Our model with the task's weights."""
    config, weights = task.ours
    with torch.device("meta"):
        model = VisionTransformer(config, data_config=task.model.data, backend="eager")
    model = model.to_empty(device=task.device).to(task.dtype)
    model.load_state_dict(dict(weights))
    set_backend(model, backend)
    return model.eval().requires_grad_(False)


def _only(kernel: SDPBackend) -> AbstractContextManager[object]:
    return sdpa_kernel(kernel)


def _register_all() -> None:
    for backend, summary in (
        ("eager", "our model, plain formulas: the definition"),
        ("sdpa", "our model, torch's scaled_dot_product_attention"),
        ("triton", "our model, our Triton kernels"),
    ):
        register(Subject(backend, summary, functools.partial(build, backend), fullgraph=True))
    for name, kernel in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    ):
        register(
            Subject(
                f"sdpa-{name}",
                f"our model, torch's attention confined to its {name} kernel",
                functools.partial(build, "sdpa"),
                fullgraph=True,
                context=functools.partial(_only, kernel),
            )
        )


_register_all()
