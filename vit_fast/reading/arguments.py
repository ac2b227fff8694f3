"""Tensors that do not depend on the tokens: what a forward gets beside them, and what it computes from this."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..blocks.computed import DEVICE, DTYPE, LARGEST, RESULT, Computed, Step
from ..blocks.fastest import is_traced
from ..blocks.parts import Argument, AttentionParts, Derived, Slot, origins
from .calls import Call
from .capture import CREATORS, Graph, UnreadableError, operator_of

# Size of a dimension: a number, or an axis of the tokens, and how much smaller than this axis it is
Tie = int | tuple[int, int]
Ties = tuple[tuple[Tie, ...], ...]  # of each tensor
BOUNDS: tuple[Tie, ...] = ((-1, 0),)  # of cu_seqlens, which has any size
LOWEST = -3e38  # less than any score; bf16 and fp32 contain it
PREFIX = 16  # most leading tokens that a tensor may leave out, e.g. class token and registers
FIXES_SIZES = {"view", "_unsafe_view", "reshape", "expand", "slice"}  # their arguments may be sizes of the capture
_VIEWS = {"slice", "select", "view", "unsqueeze", "squeeze", "transpose", "permute", "alias", "diagonal"}


def ties_of(shape: Sequence[int], tensors: Sequence[Tensor]) -> list[Ties]:
    """Returns assumptions about the sizes of tensors for tokens of a shape; the last one is that they never change."""

    def tie(size: int, is_last: bool, axes: Sequence[int], prefix: int, sizes: torch.Size) -> Tie:
        same = (axis for axis in axes if shape[axis] == size > 1)
        others = (axis for axis in axes if shape[axis] not in sizes)  # of [H, N, D], H may be less than N
        less = (axis for axis in others if not is_last and size > 1 and 0 < shape[axis] - size <= prefix)
        axis = next(same, next(less, None))
        return size if axis is None else (axis, shape[axis] - size)

    axes, tokens = (0, 1) if len(shape) == 3 else (0,), math.prod(shape[:-1])
    found: list[Ties] = []
    for used, of_last, prefix in (
        (axes, True, PREFIX),  # sizes follow batch and tokens
        (axes, False, PREFIX),  # the same, but the last one, e.g. a head_dim, is constant
        ((0,), True, 0),  # only the batch
        ((1,), True, 0),  # only the tokens
        ((), True, 0),  # no size
    ):
        last = [None if of_last else each.dim() - 1 for each in tensors]
        found.append(
            tuple(
                BOUNDS
                if _is_bounds(each, tokens)
                else tuple(
                    size if i == end else tie(size, i == each.dim() - 1, used, prefix, each.shape)
                    for i, size in enumerate(each.shape)
                )
                for each, end in zip(tensors, last)
            )
        )
    if shape[0] == 1:
        found.insert(1, of_other_batch(found[0], 0))
    return list(dict.fromkeys(found))


def _is_bounds(tensor: Tensor, tokens: int) -> bool:
    """True for cu_seqlens of packed sequences: integers that rise from 0 to the number of tokens."""
    if tensor.dim() != 1 or len(tensor) < 2 or tensor.dtype not in (torch.int32, torch.int64):
        return False
    values = tensor.tolist()
    return values[0] == 0 and values[-1] == tokens and values == sorted(values)


def sizes_for(ties: Ties, shape: Sequence[int]) -> list[list[int]]:
    """Returns the shapes of the tensors for tokens of a shape."""
    return [[size if isinstance(size, int) else shape[size[0]] - size[1] for size in each] for each in ties]


def margin(ties: Ties, axis: int) -> int:
    """Returns how much smaller than an axis of the tokens sizes of the tensors are."""
    return max((tie[1] for each in ties for tie in each if not isinstance(tie, int) and tie[0] == axis), default=0)


def of_other_batch(ties: Ties, batch: int) -> Ties:
    """Returns ties where the first dimension of each tensor follows an axis of the tokens, or is 1, instead."""
    other: dict[Tie, Tie] = {1: (batch, 0), (batch, 0): 1}
    return tuple((other.get(sizes[0], sizes[0]), *sizes[1:]) if len(sizes) > 1 else sizes for sizes in ties)


def fits(ties: Ties, shape: Sequence[int], tensors: Sequence[Tensor]) -> bool:
    for sizes, tensor in zip(ties, tensors):
        if tensor.dim() != len(sizes):
            return False
        if sizes == BOUNDS:  # on a GPU, reading its values would synchronize
            if tensor.is_cpu and not is_traced() and not _is_bounds(tensor, math.prod(shape[:-1])):
                return False
            continue
        for size, tied in zip(tensor.shape, sizes):
            if size != (tied if isinstance(tied, int) else shape[tied[0]] - tied[1]):
                return False
            if size < 2 and not isinstance(tied, int) and tied[1]:  # see `least` of `free_dimensions`
                return False
    return True


def random_like(
    tensors: Sequence[Tensor], ties: Ties, shape: Sequence[int], masks: Collection[int] = (), cuts: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns tensors in fp64 for tokens of a shape: random numbers and values of the tensors of the example.

    Tensors of zeros and ones stay such tensors, and cu_seqlens gets other sequences, which `cuts` separate. The tensors
    whose numbers are `masks` have rows that hide all keys.
    """
    generator = torch.Generator().manual_seed(3)
    found = []
    for number, (tensor, sizes) in enumerate(zip(tensors, sizes_for(ties, shape))):
        if not all(type(size) is int for size in shape):  # symbolic: values have no effect
            found.append(torch.zeros(sizes, dtype=tensor.dtype))
            continue
        if ties[number] == BOUNDS:
            tokens = math.prod(shape[:-1])
            number_of_cuts = 1 + tokens % 3 if cuts is None else cuts
            inner = torch.randperm(tokens - 1, generator=generator)[:number_of_cuts] + 1
            found.append(torch.tensor([0, *sorted(inner.tolist()), tokens], dtype=tensor.dtype))
            continue
        values = tensor.detach().cpu().flatten()
        picked = values[torch.randint(max(len(values), 1), sizes, generator=generator)] if len(values) else values
        is_boolean = torch.equal(values, values.bool().to(values.dtype))
        is_boolean = is_boolean and (bool(values.any()) or not values.is_floating_point())
        if is_boolean and picked.numel() > 1:
            picked = (torch.rand(sizes, generator=generator) > 0.4).to(tensor.dtype)
            if picked.shape[-1:] > (1,):
                picked[..., 0], picked[..., -1] = 1, 0
        elif tensor.is_floating_point() or tensor.is_complex():
            dtype = torch.complex128 if tensor.is_complex() else torch.float64
            random = torch.randn(sizes, generator=generator, dtype=dtype)
            mixed = torch.where(torch.rand(sizes, generator=generator) < 0.5, random, picked.to(dtype))
            mixed[..., :1] = random[..., :1]  # a row of a mask is not -inf everywhere
            picked = mixed
        if number in masks and picked.numel() > 1:
            rows = picked.flatten(0, -2)
            rows[0], rows[-1] = (0, 1) if is_boolean or not picked.is_floating_point() else (-torch.inf, LOWEST)
            picked = rows
        found.append(picked.reshape(sizes))
    return found


@dataclass
class Probe:
    """A call whose other tensors are random, with sizes that follow the tokens."""

    call: Call
    tensors: Sequence[Tensor] = ()  # of the example
    ties: Ties = ()
    dtype: torch.dtype | None = None  # of floating-point tensors; None means that of the tokens
    masks: Collection[int] = ()  # see `random_like`
    cuts: int | None = None  # see `random_like`

    def others(self, x: Tensor) -> list[Tensor]:
        found = random_like(self.tensors, self.ties, x.shape, self.masks, self.cuts)
        return [each.to(dtype) for each, dtype in zip(found, self.dtypes(x.dtype))]

    def dtypes(self, of_tokens: torch.dtype) -> list[torch.dtype]:
        of_complex = torch.complex128 if of_tokens == torch.float64 else torch.complex64
        return [
            (self.dtype or of_tokens) if each.is_floating_point() else of_complex if each.is_complex() else each.dtype
            for each in self.tensors
        ]

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        return self.call.run(module, x, *(each.to(x.device) for each in self.others(x)))


def arguments_of(slot: Slot) -> set[int]:
    """Returns the numbers of the arguments that a slot depends on."""
    return {owner.number for owner, _ in origins(slot) if isinstance(owner, Argument)}


def bound(parts: AttentionParts | None, tensors: Sequence[Tensor]) -> AttentionParts | None:
    """Returns an attention half whose arguments are the tensors of a call."""
    if parts is not None and parts.rope is not None:
        cos, sin = (_bound(slot, tensors) for slot in (parts.rope.cos, parts.rope.sin))
        parts = replace(parts, rope=replace(parts.rope, cos=cos, sin=sin))
    if parts is not None and parts.cu_seqlens is not None:
        parts = replace(parts, cu_seqlens=_bound(parts.cu_seqlens, tensors))
    if parts is not None and parts.terms is not None and parts.terms.per_call:
        terms, name = parts.terms, parts.terms.per_call
        parts = replace(parts, terms=terms.with_term(name, _bound(terms.given[name], tensors)))
    return parts


def _bound(slot: Slot, tensors: Sequence[Tensor]) -> Slot:
    owner, name = slot
    if type(owner) is Argument:
        return Argument(owner.number, tensors[owner.number]), name
    if isinstance(owner, Derived):
        slots = tuple(_bound(each, tensors) for each in owner.slots)
        return replace(owner, slots=slots), name  # type: ignore[type-var]  # a dataclass
    return slot


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
