"""The operators of vit-fast in compiled graphs and in calls. A graph without them would give the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class OurOperators(list[str]):
    """A backend of torch.compile that runs graphs unchanged and lists our operators in them."""

    graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        self.graphs += 1
        targets = (str(node.target) for node in graph.graph.nodes)
        self += [target.split(".")[1] for target in targets if target.startswith("vit_fast.")]
        return graph


class _Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vit_fast":
            self.made.append((func, args))
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[[], object]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns our operators that a function calls, also backward, with their arguments."""
    calls = _Calls()
    calls.made = []
    with calls:
        run()
    return calls.made


def each_tensor(function: Callable[[Tensor], Any], arguments: Any) -> Any:
    """Replaces every tensor in the arguments of an operator."""
    return pytree.tree_map_only(Tensor, function, arguments)
