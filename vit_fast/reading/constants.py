"""Converts parts of a graph that do not depend on the tokens to `Computed` slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..blocks.computed import DEVICE, DTYPE, LARGEST, RESULT, Computed, Step
from ..blocks.parts import Slot
from .capture import CREATORS, Graph, UnreadableError, operator_of

FIXES_SIZES = {"view", "_unsafe_view", "reshape", "expand", "slice"}  # their arguments may be sizes of the capture
_VIEWS = {"slice", "select", "view", "unsqueeze", "squeeze", "transpose", "permute", "alias", "diagonal"}


def computed(graph: Graph, node: fx.Node, any_size: bool = False) -> Slot:
    """Returns the slot of a node's tensor; raises UnreadableError if the tensor depends on the tokens.

    With `any_size`, leaves out operators that only change dimensions, so that the tensor may have another shape.
    """
    if node in graph.slots:
        return graph.slots[node]
    wanted = _sources(graph, node, any_size)
    read = [each for each in wanted if each in graph.slots]
    made = [each for each in wanted if each not in graph.slots and not (any_size and _only_reshapes(graph, each))]
    numbers = {each: i for i, each in enumerate((*read, *made))}
    for each in wanted:
        if each not in numbers:
            numbers[each] = numbers[each.all_input_nodes[0]]
    slots = tuple(graph.slots[each] for each in read)
    return _slot(graph, slots, tuple(_step(graph, each, numbers) for each in made), numbers[node])


def _only_reshapes(graph: Graph, node: fx.Node) -> bool:
    """Returns True if an operator with fixed sizes returns the numbers of its input, or repeats them."""
    if operator_of(node) not in FIXES_SIZES:
        return False
    value, source = graph.values[node], graph.values[node.all_input_nodes[0]]
    return operator_of(node) == "expand" or torch.equal(value.flatten(), source.flatten())


def derived(graph: Graph, slots: Sequence[Slot], name: str, *args: Any, **kwargs: Any) -> Slot:
    """Returns the slot of an operator's result; its first arguments are the tensors at `slots`.

    Steps of these slots become steps of the result, equal ones once.
    """
    read: dict[Slot, int] = {}
    steps: dict[Any, int] = {}  # results of steps have numbers from 0, and `read` negative ones
    writes = any(step[0].partition(".")[0].endswith("_") for slot in slots for step in getattr(slot[0], "steps", ()))

    def number(slot: Slot) -> int:
        if not isinstance(slot[0], Computed):
            return ~read.setdefault(slot, len(read))
        numbers = [number(each) for each in slot[0].slots]
        for step in slot[0].steps:
            renamed = _renumbered(step, numbers.__getitem__)
            numbers.append(steps.setdefault((renamed, len(steps)) if writes else renamed, len(steps)))
        return numbers[slot[0].output]

    results = tuple((RESULT, number(slot)) for slot in slots)
    last = name, (*results, *(_encoded(each, {}) for each in args)), tuple(kwargs.items())
    every = [*((key[0] for key in steps) if writes else steps), last]
    ordered = tuple(_renumbered(step, lambda i: i + len(read) if i >= 0 else ~i) for step in every)
    return _slot(graph, tuple(read), ordered, len(read) + len(every) - 1)


def _renumbered(given: Any, number: Callable[[int], int]) -> Any:
    """Returns a step, or a part of one, with other numbers of results."""
    if not isinstance(given, tuple):
        return given
    if len(given) == 2 and given[0] == RESULT:
        return RESULT, number(given[1])
    return tuple(_renumbered(each, number) for each in given)


def _slot(graph: Graph, slots: tuple[Slot, ...], steps: tuple[Step, ...], output: int) -> Slot:
    parts = graph.root.modules()
    like = next(((part, name) for part in parts for name, each in part._parameters.items() if each is not None), None)
    if like is None:
        raise UnreadableError("it has no parameters")
    return Computed(slots, steps, output, like), "value"


def _sources(graph: Graph, node: fx.Node, any_size: bool) -> list[fx.Node]:
    """Returns what a node is computed from, in order, with the nodes that write into these tensors."""
    wanted: set[fx.Node] = set()
    stack = [node]
    while stack:
        each = stack.pop()
        if graph.is_live(each):
            raise UnreadableError("its scores are changed by a bias, mask or scale that depends on its tokens")
        wanted.add(each)
        is_filled = operator_of(each) in CREATORS and not (any_size and operator_of(each).endswith("_like"))
        sources = [] if is_filled else each.all_input_nodes
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
    is_like = operator_of(node).endswith("_like") and node.args[0] in numbers
    if node.op == "get_attr" or (operator_of(node) in CREATORS and not is_like):
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
