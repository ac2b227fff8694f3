"""A step of each of torch's optimizers, in each of its implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[nn.Module, Callable[[], Tensor]], None]


def _way(optimizer: type[torch.optim.Optimizer], lr: float, options: dict[str, bool]) -> Step:
    def step(model: nn.Module, loss: Callable[[], Tensor]) -> None:
        # Muon takes matrices alone
        parameters = [p for p in model.parameters() if p.dim() == 2 or optimizer is not torch.optim.Muon]

        def closure() -> Tensor:
            stepping.zero_grad()
            value = loss()
            value.backward()
            return value

        stepping: Any = optimizer(parameters, lr=lr, **options)  # type: ignore[call-arg]  # every optimizer's
        stepping.step(closure)

    return step


def optimizer_ways(lr: float) -> dict[str, Step]:
    """Returns by name functions that take an optimizer step on a module, for all optimizers with dense gradients."""
    ways = {}
    for name in torch.optim.__all__:
        optimizer = getattr(torch.optim, name)
        if not inspect.isclass(optimizer) or optimizer in (torch.optim.Optimizer, torch.optim.SparseAdam):
            continue
        accepted = {"fused", "foreach"} & set(inspect.signature(optimizer).parameters)
        for way in sorted(accepted):
            ways[f"{name} {way}"] = _way(optimizer, lr, {way: True})
        ways[name] = _way(optimizer, lr, dict.fromkeys(accepted, False))
    return ways
