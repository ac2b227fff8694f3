"""torch.compile for Vision Transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..arguments import check_choice
from ..blocks.frozen import Frozen
from ..errors import check_type
from ..fusion.freezing import frozen_of

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def compile(
    model: nn.Module, mode: CompileMode = "default", *, dynamic_batch: bool = False, fullgraph: bool = True
) -> nn.Module:
    """Compiles a Vision Transformer (ours, fused, or any other) to one graph without graph breaks.

    Args:
        model: The model; its parameters are shared, not copied.
        mode: "default" compiles fastest. "reduce-overhead" replays CUDA graphs; this helps for small batches, where
            launching kernels takes longer than running them. Each call overwrites the outputs of the previous one.
            "max-autotune" also times candidates for every matmul, which takes minutes. "max-autotune-no-cudagraphs"
            does so without CUDA graphs, so that GraphRunner can capture the model. To measure the gain, run
            `vit-fast bench --candidates sdpa,sdpa+compile`; benchmarks/results contains records.
        dynamic_batch: True compiles one graph for all batch sizes from 2, and one for size 1, instead of one graph per
            size. The first axis of all inputs must be the batch.
        fullgraph: True raises an error for a graph break.
    Returns:
        The compiled model, with the attributes and state_dict that torch.compile gives it.
    Raises:
        ValueError: the mode is unknown.
    """
    check_type("model", model, nn.Module)
    check_choice("mode", mode, get_args(CompileMode))
    compiled: Any = torch.compile(model, mode=mode, fullgraph=fullgraph, dynamic=None if dynamic_batch else False)
    if dynamic_batch:
        compiled.register_forward_pre_hook(_mark_batch_dynamic, with_kwargs=True)
    if mode in ("reduce-overhead", "max-autotune"):
        compiled.register_forward_pre_hook(_update_frozen)
    return compiled


def compile_frozen(function: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """Compiles a model for inference with its weights as constants, so that torch can optimize their layout.

    Later changes of the weights have no effect. Sets torch._inductor.config.freezing during each call, because torch
    also reads it while tracing; torch.compile(options=...) would not set it there.
    """
    from torch._inductor import config

    compiled = torch.compile(function, fullgraph=fullgraph, dynamic=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        with config.patch(freezing=True), torch.no_grad():
            return compiled(*args, **kwargs)

    return run


_at_fixed_addresses: weakref.WeakSet[Frozen] = weakref.WeakSet()


def _update_frozen(module: nn.Module, args: Any) -> None:
    """Updates frozen weights before a replay, and marks them as static, so that replays do not copy them."""
    for frozen in frozen_of(module):
        if frozen not in _at_fixed_addresses:
            for tensor in frozen.tensors:
                torch._dynamo.mark_static_address(tensor)
            _at_fixed_addresses.add(frozen)
        frozen.ensure_current()


def _mark_batch_dynamic(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Marks the first axis as dynamic, except for size 1, which torch always specializes."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] > 1:
            torch._dynamo.mark_dynamic(value, 0)
