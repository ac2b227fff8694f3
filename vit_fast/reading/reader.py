"""Reads the modules of a model that a forward of an example calls."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.outlines import detached
from ..blocks.parts import Derived, slots_of
from ..blocks.plain import touch_reasons
from ..version import memory_bytes
from .arguments import BOUNDS, Probe, Ties, bound, margin, of_other_batch, ties_of
from .calls import Call, state_of, structure_of
from .capture import Graph, UnreadableError, capture, equal_batches, free_dimensions, random_copy, tokens_like
from .dependencies import Count, attributes_of, questions_of
from .elements import is_matrix
from .forms import Recipe, hidden_name
from .matcher import LAYOUTS, Reading, read_graph
from .proof import (
    check_complete,
    is_same_compiled,
    is_same_in_training,
    masks_of,
    prove,
    prove_in_contexts,
    prove_other_weights,
    proved_dtypes,
    run_reading,
    with_drop_paths,
)
from .recorder import Found, Record, recorded, restore
from .terms import check_pairs

SMALL = (2, 7)  # batch size and number of tokens of a capture, if the forward supports any
# Relative error of a module's parts on the example in the model's dtype
EXAMPLE_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-5}


def read(
    module: nn.Module, x: Tensor, call: Call | None = None, others: Sequence[Tensor] = (), computed: int = 0
) -> Recipe:
    """Reads a module that maps tokens to tokens of a layout in `LAYOUTS`, and proves what it read.

    `recipe.reading(module)` returns `AttentionParts` and `MlpParts`, also for other modules of equal structure.

    Args:
        module: A block, a half of a block, an attention layer, or an MLP with a norm. It stays unchanged.
        x: Tokens as the module gets them. Only the shape is used.
        call: The structure of arguments and output; by default, forward gets and returns one tensor.
        others: The other tensors that the module gets.
        computed: Elements of all tensors that the module computes from x, to estimate the memory; 0 if unknown.
    Raises:
        UnreadableError: states in terms of the computation why the module cannot be read.
    """
    call = call or Call.of((x,), {}, x.clone())[0]
    if x.dim() not in LAYOUTS:
        raise UnreadableError(f"its tokens must have two to five dimensions, got shape {tuple(x.shape)}")
    if reasons := touch_reasons([(name or "it", part) for name, part in module.named_modules()]):
        raise UnreadableError("; ".join(reasons))
    attributes = [each for part in module.modules() for each in attributes_of(part)]
    for _, name, value in attributes:
        is_mutable = (
            hasattr(value, "__setitem__") and not isinstance(value, list | dict) and not hasattr(value, "__dict__")
        )
        if is_mutable or hasattr(value, "__next__"):
            raise UnreadableError(f"changes in its {type(value).__name__} {name!r} would not be noticed: use a buffer")
    if (hidden := hidden_name(module)) is not None:
        raise UnreadableError(f"its attribute {hidden!r} has the name of an attribute of fused modules: rename it")
    copied = random_copy(module)

    def attempt(ties: Ties) -> Recipe:
        probe, small, shape = Probe(call, others, ties), _small(x, ties), tuple(x.shape)
        try:
            graph, reading = _captured(copied, probe, small)
            fixed = graph.makes_constants()  # the reading is valid for this number of tokens only
        except UnreadableError:
            _, reading = _captured(copied, probe, shape, computed)
            small, fixed = shape, True
        least = [2 + margin(ties, axis) for axis in range(len(shape) - 1)]
        if BOUNDS in ties:  # the split into sequences reads lengths, so it does not support symbolic sizes
            is_int, free = False, {axis for axis, size in enumerate(shape[:-1]) if size == math.prod(shape[:-1])}
        else:
            free, is_int = free_dimensions(functools.partial(probe.run, copied), shape, least)
        attention = reading.attention
        slots = slots_of(attention and (attention.terms, attention.rope))
        if is_derived := any(isinstance(owner, Derived) for owner, _ in slots):
            fixed = fixed or small == shape
        if small != shape and (fixed or is_derived or len(free) < len(shape) - 1):
            _, whole = _captured(copied, probe, shape, computed)
            # do operators of tables and masks contain sizes?
            fixed = fixed or (is_derived and detached(copied, whole.attention) != detached(copied, attention))
            if fixed or len(free) < len(shape) - 1:
                reading, small = whole, shape
        free = free & {reading.batch_axis} if fixed else free
        batches = equal_batches(copied, probe.run, small) if is_int and 0 in free else ()
        allowed = tuple(None if i in free else size for i, size in enumerate(shape))
        try:
            return _proved(copied, probe, reading, small, shape, allowed, batches)
        except (UnreadableError, RuntimeError) as error:
            if small != shape or allowed == shape or not (others or isinstance(error, RuntimeError)):
                raise
        return _proved(copied, probe, reading, small, shape, shape)  # masks may contain the batch size

    tried = ties_of(x.shape, others)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), _restored(attributes):
        try:
            fixed = attempt(tried[0])
            if len(tried) == 1 or x.shape[0] > 1 or fixed.shape[0] is None:
                return fixed
        except (UnreadableError, RuntimeError):
            if len(tried) == 1:
                raise
            fixed = attempt(tried[-1])
        for ties in tried[1:-1]:
            with contextlib.suppress(UnreadableError, RuntimeError):
                return attempt(ties)
        return fixed


@contextlib.contextmanager
def _restored(attributes: Sequence[tuple[Any, str, object]]) -> Iterator[None]:
    """Restores global containers afterwards, e.g. a cache of masks, and clears caches of functions."""
    held = [
        owner.container if isinstance(owner, Count) else getattr(owner, name, None) for owner, name, _ in attributes
    ]
    before = [(each, copy.copy(each)) for each in held if type(each) in (dict, list, set)]
    try:
        yield
    finally:
        for each, content in before:
            restore(each, content)
        for clear in (getattr(each, "cache_clear", None) for each in held):
            if clear is not None:
                clear()


def _captured(copied: nn.Module, probe: Probe, shape: tuple[int, ...], computed: int = 0) -> tuple[Graph, Reading]:
    """Captures and matches a random copy for tokens of a shape, for which it computes a number of elements."""
    memory, needed = memory_bytes(torch.device("cpu")), 16 * computed  # in fp64, in the graph and of the operators
    if memory is not None and needed > memory // 2:
        text = f"reading it for {math.prod(shape[1:-1])} tokens needs about {needed / 2**30:.0f} GiB of memory"
        raise UnreadableError(f"{text}: pass an example of fewer tokens")

    def attributes() -> list[tuple[Any, str, object]]:
        return [row for part in copied.modules() for row in attributes_of(part)]

    before, tokens = attributes(), tokens_like(shape)
    graph = capture(copied, functools.partial(probe.call.run, copied), tokens, *probe.others(tokens))
    try:
        is_same = before == attributes()
    except (RuntimeError, ValueError):  # of other tensors or arrays
        is_same = False
    if not is_same:
        raise UnreadableError("its forward changes attributes")
    with torch.no_grad():
        reading = read_graph(graph, copied)
    check_complete(graph, reading, probe.call.names)
    return graph, reading


def _small(x: Tensor, ties: Ties) -> tuple[int, ...]:
    """Returns the shape of a capture if the forward supports any batch size and number of tokens."""
    batch = 1 if BOUNDS in ties else SMALL[0]
    sizes = SMALL[1:] if x.dim() == 2 else (batch, *(SMALL[1:] * (x.dim() - 2)))
    return (*(size + margin(ties, axis) for axis, size in enumerate(sizes)), x.shape[-1])


def _proved(
    copied: nn.Module, call: Probe, reading: Reading, probe: tuple[int, ...], shape: tuple[int, ...],
    allowed: tuple[int | None, ...], batches: Collection[int] = (),
) -> Recipe:  # fmt: skip
    asked, variables = questions_of(lambda: call.run(copied, tokens_like(probe).requires_grad_() * 1))
    prove(copied, call, reading, probe)
    step = 1 if probe == shape else 3  # the example may have many tokens
    other = tuple(size + step * (fixed is None) for size, fixed in zip(probe, allowed))
    if any(allowed[:-1]):  # the others may have another size
        prove(copied, call, reading, other)
    if BOUNDS in call.ties:  # the forward may branch on the number of sequences and on their lengths
        for total, cuts in ((1025, 0), (1025, 3), *((48, number) for number in (*range(13), 40))):
            packed = tuple(total if fixed is None else size for size, fixed in zip(probe, allowed))
            prove(copied, replace(call, cuts=cuts), reading, packed)
    for magnitude in (1e3, 1e9):  # e.g. for a clamp
        prove(copied, call, reading, other, magnitude)
    free = [i for i, fixed in enumerate(allowed) if fixed is None and probe[i] > 1 and not margin(call.ties, i)]
    for i in free:  # symbolic sizes are never 1
        try:
            prove(copied, call, reading, (*probe[:i], 1, *probe[i + 1 :]))
        except UnreadableError:
            allowed = (*allowed[:i], shape[i], *allowed[i + 1 :])
    batch = reading.batch_axis
    every, swapped = [call.ties], call.ties if batch is None else of_other_batch(call.ties, batch)
    with contextlib.suppress(UnreadableError, RuntimeError):
        if swapped != call.ties:
            prove(copied, replace(call, ties=swapped), reading, other)
            every.append(swapped)
    tokens, differentiates = tokens_like(probe), True
    try:
        if masks := masks_of(reading):
            prove(copied, replace(call, masks=masks), reading, probe)
    except UnreadableError:
        differentiates = reading.uses_sdpa  # whose implementations in torch differ in these gradients
    prove_in_contexts(copied, call, reading, tokens)
    prove_other_weights(copied, call, reading, tokens)
    reading = with_drop_paths(copied, call, reading, tokens)
    trains = is_same_in_training(copied, call, reading, tokens)
    attention, mlp = detached(copied, reading.attention), detached(copied, reading.mlp)
    with torch.no_grad():
        dtypes = proved_dtypes(copied, call, reading, probe)
    return Recipe(
        attention, mlp, reading.layout, reading.uses_sdpa, reading.kind, call.call, tuple(shape), allowed, tuple(every),
        dtypes, trains, differentiates, frozenset(batches if allowed[0] is None else ()), bool(asked),
        bool(asked) and not is_same_compiled(copied, call, tokens, asked), variables,
    )  # fmt: skip


def read_model(model: nn.Module, example: Any, is_known: Callable[[nn.Module], bool]) -> Found:
    """Reads all modules of a model that are not inside a module which was read or `is_known`.

    Args:
        model: The model. It stays unchanged.
        example: A tensor, a tuple of arguments, or a dictionary of keyword arguments for one forward.
        is_known: Returns True for modules that must not be read, because their class is supported.
    """
    found = Found(is_read=True)
    records = recorded(model, example, found)
    found.problems = {module: record.problem for module, record in records.items()}
    known: dict[Any, list[tuple[Any, Recipe | UnreadableError]]] = {}

    @torch.inference_mode(False)  # proofs need gradients
    def visit(module: nn.Module) -> None:
        if is_known(module):
            return
        record = records.get(module)
        if (
            record is not None
            and (record.x is not None or found.cores[module])
            and _is_candidate(module, found, records)
        ):
            with torch.device("cpu"):  # of the copies; a user may have set another default device
                result = _read_once(module, record, known)
            if isinstance(result, Recipe):
                found.recipes[module] = result
                return
            found.reasons[module] = str(result)
        for child in module.children():
            visit(child)

    visit(model)
    return found


def _is_candidate(module: nn.Module, found: Found, records: dict[nn.Module, Record]) -> bool:
    """Returns True if a module may be one block, half, attention layer or MLP."""
    sizes = [each.dim() for each in module.parameters() if is_matrix(each)]
    cores = found.cores[module]
    if not cores and any(size > 2 for size in sizes):  # are these convolutions an MLP?
        mixes = any(each.dim() > 3 and not is_matrix(each) for each in module.parameters())  # positions
        if mixes or not any(found.mlps[part] for part in module.modules()):
            return False
    if sum(found.own[part] > 0 for part in module.modules()) > 1:  # a module per head, or several attention layers
        inside = [part for part in module.modules() if part is not module and found.cores[part]]
        if any(part in records and records[part].x is not None for part in inside):
            return False
    if any(child in records and records[module].equals(records[child]) for child in module.children()):
        return False  # e.g. a Sequential of one block
    return 2 <= len(sizes) <= 3 * cores + 6


def _read_once(
    module: nn.Module, record: Record, known: dict[Any, list[tuple[Any, Recipe | UnreadableError]]]
) -> Recipe | UnreadableError:
    """Reads a module, or binds the recipe of a module with equal structure and compares both on the example."""
    if record.call is None or record.x is None:
        return UnreadableError(record.problem or "it does not map tokens to tokens of the same shape")
    structure, state = structure_of(module), state_of(module)
    record = _with_channels_last(module, record, record.call)
    x, *others = record.tensors
    key = (structure, record.call, x.shape)
    try:
        for before, result in known.get(key, []):
            if before == state:
                break
            if isinstance(result, Recipe):  # e.g. another index of the layer
                try:
                    result = _rebound(module, result, x, others)
                    break
                except UnreadableError:
                    continue
        else:
            try:
                result = read(module, x, record.call, others, record.computed)
            except UnreadableError as error:
                result = UnreadableError(str(error))  # without frames, which hold the values of graphs
        known.setdefault(key, []).append((state, result))
        if isinstance(result, Recipe):
            _check_example(module, result, record)
        return result
    except UnreadableError as error:
        return error
    except Exception as error:
        return UnreadableError(f"its forward fails on other inputs than the example: {error}")


def _with_channels_last(module: nn.Module, record: Record, call: Call) -> Record:
    """Returns a record with tokens [B, ..., C] if the weights of convolutions show that they are [B, C, ...]."""
    x, *others = record.tensors
    weights = [each for each in module.parameters() if is_matrix(each)]
    last = any(each.shape[1] == x.shape[-1] for each in weights if each.dim() == 2)
    if last or not any(each.shape[1] == x.shape[1] for each in weights if each.dim() == x.dim() > 2):
        return record
    call = replace(call, channels_first=True)
    return replace(record, call=call, tensors=[call.tokens(x), *others], y=call.tokens(record.y))


def _rebound(module: nn.Module, recipe: Recipe, x: Tensor, others: Sequence[Tensor]) -> Recipe:
    """Proves a recipe for a module with equal structure, but other attributes."""
    copied = random_copy(module)
    shape = tuple(x.shape)
    ties = recipe.ties[0]
    probe = shape if any(recipe.shape[:-1]) else _small(x, ties)
    call, reading = Probe(recipe.call, others, ties), recipe.reading(copied)
    return _proved(copied, call, reading, probe, shape, recipe.shape, recipe.batches)


def _check_example(module: nn.Module, recipe: Recipe, record: Record) -> None:
    x, y = record.x, record.y
    assert x is not None
    reading = recipe.reading(module)
    halves = {name: getattr(reading, name) for name in ("attention", "mlp")}  # the module may be in training mode
    reading = replace(reading, **{name: half and replace(half, drop_path=None) for name, half in halves.items()})
    with torch.no_grad():
        attention = bound(reading.attention, record.tensors[1:])
        if attention is not None and attention.rope is not None:
            check_pairs(attention.rope.now(), attention.head_dim)
        parts = run_reading(reading, x, "sdpa", record.tensors[1:])
    base = reading.base(x)
    limit = EXAMPLE_LIMITS.get(x.dtype, 0.05)
    if not (parts - y).norm() <= limit * (y - base).norm() + 1e-6 * y.norm():
        raise UnreadableError("its parts were read, but their output on the example differs from that of the module")
