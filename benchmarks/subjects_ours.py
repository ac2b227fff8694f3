"""Our model as a subject, on each of its backends, and with torch's attention confined to one of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast.freezing import freeze
from vit_fast.model import VisionTransformer, set_backend
from vit_fast.runtime import GraphRunner

from . import subjects_operators
from .subjects import Subject, Task, register


def build(backend: str, task: Task) -> nn.Module:
    """Our model with the task's weights, or our operator."""
    if task.model.operator is not None:
        return subjects_operators.build(backend, task)
    config, weights = task.ours
    with torch.device("meta"):
        model = VisionTransformer(config, data_config=task.model.data, backend="eager")
    model = model.to_empty(device=task.device).to(task.dtype)
    model.load_state_dict(dict(weights))
    set_backend(model, backend)
    return model.eval().requires_grad_(False)


def build_frozen(backend: str, task: Task) -> nn.Module:
    """The same with what weights decide computed once."""
    model = build(backend, task)
    freeze(model)
    return model


def build_graphs(backend: str, task: Task) -> Callable[[Tensor], Tensor]:
    """The same, frozen, in a captured CUDA graph: as it should be served for one batch size.

    Raises:
        UnsupportedInputError: the task is for a CPU.
    """
    example = torch.zeros(1, *task.model.shape, dtype=task.dtype, device=task.device)
    return GraphRunner(build(backend, task), example, batch_sizes=(task.batch_size,))


for backend, summary in (
    ("eager", "our model, plain formulas: the definition"),
    ("sdpa", "our model, torch's scaled_dot_product_attention"),
    ("triton", "our model, our Triton kernels"),
):
    register(Subject(backend, summary, partial(build, backend), fullgraph=True))
frozen, graphs = "the same, its weights folded and laid out once", "the same, frozen, in a captured CUDA graph"
register(Subject("triton-frozen", frozen, partial(build_frozen, "triton"), trainable=False))
register(Subject("triton-graphs", graphs, partial(build_graphs, "triton"), trainable=False, compilable=False))
for name, kernel in (
    ("flash", SDPBackend.FLASH_ATTENTION),
    ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ("efficient", SDPBackend.EFFICIENT_ATTENTION),
):
    register(
        Subject(
            f"sdpa-{name}",
            f"our model, torch's attention confined to its {name} kernel",
            partial(build, "sdpa"),
            fullgraph=True,
            context=partial(sdpa_kernel, kernel),
        )
    )
