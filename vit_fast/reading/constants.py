"""Converts parts of a graph that do not depend on the tokens to `Computed` slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..blocks.computed import DEVICE, DTYPE, LARGEST, RESULT, Computed, Step
from ..blocks.parts import Slot
from .capture import CREATORS, Graph, UnreadableError, operator_of

_VIEWS = {"slice", "select", "view", "unsqueeze", "squeeze", "transpose", "permute", "alias", "diagonal"}


def computed(graph: Graph, node: fx.Node) -> Slot:
    """Returns the slot of a node's tensor; raises UnreadableError if the tensor depends on the tokens."""
    if node in graph.slots:
        return graph.slots[node]
    wanted = _sources(graph, node)
    read = [each for each in wanted if each in graph.slots]
    made = [each for each in wanted if each not in graph.slots]
    numbers = {each: i for i, each in enumerate((*read, *made))}
    slots = tuple(graph.slots[each] for each in read)
    return _slot(graph, slots, tuple(_step(graph, each, numbers) for each in made), numbers[node])


def derived(graph: Graph, slots: Sequence[Slot], name: str, *args: Any, **kwargs: Any) -> Slot:
    """Returns the slot of an operator's result; its first arguments are the tensors at `slots`."""
    results = tuple((RESULT, i) for i in range(len(slots)))
    step = name, (*results, *(_encoded(each, {}) for each in args)), tuple(kwargs.items())
    return _slot(graph, tuple(slots), (step,), len(slots))


def _slot(graph: Graph, slots: tuple[Slot, ...], steps: tuple[Step, ...], output: int) -> Slot:
    parts = graph.root.modules()
    like = next(((part, name) for part in parts for name, each in part._parameters.items() if each is not None), None)
    if like is None:
        raise UnreadableError("it has no parameters")
    return Computed(slots, steps, output, like), "value"


def _sources(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """Returns what a node is computed from, in order, with the nodes that write into these tensors."""
    wanted: set[fx.Node] = set()
    stack = [node]
    while stack:
        each = stack.pop()
        if graph.is_live(each):
            raise UnreadableError("its scores are changed by a bias, mask or scale that depends on its tokens")
        wanted.add(each)
        sources = [] if operator_of(each) in CREATORS else each.all_input_nodes
        stack += [source for source in sources if source not in wanted]
        if not stack:
            stack = [write for write in graph.nodes if write not in wanted and _writes_into(graph, write, wanted)]
    return [each for each in graph.nodes if each in wanted]


def _writes_into(graph: Graph, node: fx.Node, wanted: set[fx.Node]) -> bool:
    """Returns True if a node writes in place into a tensor that one of the `wanted` nodes creates."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return False
    written: Any = node.args[0]
    while written not in wanted and operator_of(written) in _VIEWS:
        written = written.args[0]
    return written in wanted and written not in graph.slots


def _step(graph: Graph, node: fx.Node, numbers: dict[fx.Node, int]) -> Step:
    value = graph.values[node]
    if node.op == "get_attr" or operator_of(node) in CREATORS:
        if not isinstance(value, Tensor) or value.numel() == 0 or (node.op == "get_attr" and value.numel() > 1):
            raise UnreadableError("its forward contains a constant tensor")
        fill = value.flatten()[0].item()
        kwargs = ("dtype", _encoded(value.dtype, numbers)), ("device", (DEVICE,))
        return "full.default", (tuple(value.shape), _encoded(fill, numbers)), kwargs
    target: Any = node.target
    named = tuple((own, _encoded(each, numbers)) for own, each in node.kwargs.items())
    name = f"{target.overloadpacket.__name__}.{target._overloadname}" if operator_of(node) else target.__name__
    return name, tuple(_encoded(each, numbers) for each in node.args), named


def _encoded(given: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(given, fx.Node):
        return RESULT, numbers[given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_encoded(each, numbers) for each in given)
    if isinstance(given, torch.device):
        return (DEVICE,)
    if given is torch.float64:
        return (DTYPE,)
    if isinstance(given, float) and 1e300 < abs(given) < float("inf"):
        return LARGEST, given / torch.finfo(torch.float64).max
    return given
