"""Our operators in compiled graphs and in calls: a graph without them computes the same, by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OurOperators(list[str]):
    """A backend of torch.compile that runs graphs as they are and lists our operators in them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        self.graphs += 1
        targets = (str(node.target) for node in graph.graph.nodes)
        self += [target.split(".")[1] for target in targets if target.startswith("vit_fast.")]
        return graph


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vit_fast":
            self.made.append((func, args))
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Our operators that a function calls, backwards included, with their arguments."""
    with _Calls() as calls:
        run()
    return calls.made


def each_tensor(function: Callable[[Tensor], Any], arguments: Any) -> Any:
    """The arguments of an operator with every tensor replaced."""
    return pytree.tree_map_only(Tensor, function, arguments)
