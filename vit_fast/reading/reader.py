"""Reads the modules of a model that a forward of an example calls."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..blocks.parts import Derived, detached
from ..blocks.plain import touch_reasons
from ..ops.attention import as_attention
from .arguments import Probe, Ties, ties_of
from .calls import Call, attributes_of, state_of, structure_of
from .capture import Graph, UnreadableError, capture, free_dimensions, random_copy, tokens_like
from .forms import SDPA, Recipe, hidden_name
from .matcher import Reading, read_graph
from .proof import (
    check_complete,
    is_same_in_training,
    prove,
    prove_in_contexts,
    prove_other_weights,
    proved_dtypes,
    run_reading,
    slots_of,
    with_drop_paths,
)

SMALL = (2, 7)  # batch size and number of tokens of a capture, if the forward supports any
_SOFTMAX = {"_softmax", "_safe_softmax"}  # their inputs may be no scores, e.g. of a router
_ACTIVATIONS = {"gelu", "relu", "silu", "sigmoid", "tanh", "erf"}
_PRODUCTS = {"bmm", "baddbmm", "mm", "addmm"}
_KINDS = ("", "parameter", "activation", "scores", "attention")  # "scores" is any product of two activations
_NOTHING: tuple[str, list[nn.Module]] = ("", [])
# Relative error of a module's parts on the example in the model's dtype
EXAMPLE_LIMITS = {torch.float32: 1e-3, torch.float64: 1e-5}


def read(module: nn.Module, x: Tensor, call: Call | None = None, others: Sequence[Tensor] = ()) -> Recipe:
    """Reads a module that maps tokens to tokens, [B, N, C], [N, B, C] or [B, H, W, C], and proves what it read.

    `recipe.reading(module)` returns `AttentionParts` and `MlpParts`, also for other modules of equal structure.

    Args:
        module: A block, a half of a block, an attention layer, or an MLP with a norm. It stays unchanged.
        x: Tokens as the module gets them. Only the shape is used.
        call: The structure of arguments and output; by default, forward gets and returns one tensor.
        others: The other tensors that the module gets.
    Raises:
        UnreadableError: states in terms of the computation why the module cannot be read.
    """
    call = call or Call.of((x,), {}, x.clone())[0]
    if x.dim() not in (3, 4):
        raise UnreadableError(f"its tokens must have three or four dimensions, got shape {tuple(x.shape)}")
    if reasons := touch_reasons([(name or "it", part) for name, part in module.named_modules()]):
        raise UnreadableError("; ".join(reasons))
    if (name := hidden_name(module)) is not None:
        raise UnreadableError(f"its attribute {name!r} has the name of an attribute of fused modules: rename it")
    copied = random_copy(module)

    def attributes() -> list[tuple[Any, str, object]]:
        return [row for part in copied.modules() for row in attributes_of(part)]

    def captured(shape: tuple[int, ...], probe: Probe) -> tuple[Graph, Reading]:
        before, tokens = attributes(), tokens_like(shape)
        graph = capture(copied, functools.partial(call.run, copied), tokens, *probe.others(tokens))
        try:
            is_same = before == attributes()
        except (RuntimeError, ValueError):  # of other tensors or arrays
            is_same = False
        if not is_same:
            raise UnreadableError("its forward changes attributes")
        with torch.no_grad():
            reading = read_graph(graph, copied)
        check_complete(graph, reading, call.names)
        return graph, reading

    def attempt(ties: Ties) -> Recipe:
        probe, small, shape = Probe(call, others, ties), _small(x), tuple(x.shape)
        try:
            graph, reading = captured(small, probe)
            slots = slots_of(reading.attention and reading.attention.terms)
            fixed = graph.makes_constants() or any(isinstance(owner, Derived) for owner, _ in slots)
        except UnreadableError:
            _, reading = captured(shape, probe)
            small, fixed = shape, True
        free = free_dimensions(functools.partial(probe.run, copied), shape)
        if (
            fixed or len(free) < len(shape) - 1
        ) and small != shape:  # the reading is valid for this number of tokens only
            _, reading = captured(shape, probe)
            small = shape
        batch = 1 if reading.layout == "[N, B, C]" else 0
        free = free & {batch} if fixed else free
        allowed = tuple(None if i in free else size for i, size in enumerate(shape))
        return _proved(copied, probe, reading, small, shape, allowed)

    tried = ties_of(x.shape, others)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            return attempt(tried[0])
        except (UnreadableError, RuntimeError):
            if len(tried) == 1:
                raise
        fixed = attempt(tried[-1])
        for ties in tried[1:-1]:
            with contextlib.suppress(UnreadableError, RuntimeError):
                return attempt(ties)
        return fixed


def _small(x: Tensor) -> tuple[int, ...]:
    """Returns the shape of a capture if the forward supports any batch size and number of tokens."""
    return (SMALL[0], *(SMALL[1:] * (x.dim() - 2)), x.shape[-1])


def _proved(
    copied: nn.Module, call: Probe, reading: Reading, probe: tuple[int, ...], shape: tuple[int, ...],
    allowed: tuple[int | None, ...],
) -> Recipe:  # fmt: skip
    prove(copied, call, reading, probe)
    if any(allowed[:-1]):  # the others may have another size
        prove(copied, call, reading, tuple(size + (fixed is None) for size, fixed in zip(probe, allowed)))
    prove(copied, call, reading, probe, magnitude=1e3)  # e.g. for a clamp
    for i in [i for i, fixed in enumerate(allowed) if fixed is None]:  # symbolic sizes are never 1
        try:
            prove(copied, call, reading, (*probe[:i], 1, *probe[i + 1 :]))
        except UnreadableError:
            allowed = (*allowed[:i], shape[i], *allowed[i + 1 :])
    tokens = tokens_like(probe)
    prove_in_contexts(copied, call, reading, tokens)
    prove_other_weights(copied, call, reading, tokens)
    reading = with_drop_paths(copied, call, reading, tokens)
    trains = is_same_in_training(copied, call, reading, tokens)
    attention, mlp = detached(copied, reading.attention), detached(copied, reading.mlp)
    with torch.no_grad():
        dtypes = proved_dtypes(copied, call, reading, probe)
    return Recipe(
        attention, mlp, reading.layout, reading.uses_sdpa, reading.kind, call.call, allowed, call.ties, dtypes, trains
    )


@dataclass
class Record:
    """A call of a module in the forward of the example."""

    call: Call | None
    problem: str  # why there is no `call`
    tensors: Sequence[Tensor] = ()  # the tokens, then other tensors
    y: Any = None

    @property
    def x(self) -> Tensor | None:
        return self.tensors[0] if self.tensors else None

    def equals(self, other: Record) -> bool:
        """Returns True if tokens and output are equal."""
        pairs = (self.x, other.x), (self.y, other.y)
        return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


@dataclass
class Found:
    """The modules of a model that were read, or the reasons why not."""

    is_read: bool = False  # False without an example
    recipes: dict[nn.Module, Recipe] = field(default_factory=dict)
    reasons: dict[nn.Module, str] = field(default_factory=dict)
    problems: dict[nn.Module, str] = field(default_factory=dict)  # of the call of each module that ran; "" if none
    cores: Counter[nn.Module] = field(default_factory=Counter)  # softmax attention computed in a module
    own: Counter[nn.Module] = field(default_factory=Counter)  # of these, not in one of its submodules
    mlps: Counter[nn.Module] = field(default_factory=Counter)  # linear layers of activations, not in a submodule
    # head_dim of the cores that a module computes by torch's function and `attention` can compute
    widths: dict[nn.Module, list[int]] = field(default_factory=dict)

    def width_of_cores(self, module: nn.Module) -> int | None:
        """Returns the largest head_dim if `attention` can compute all attention cores of a module."""
        widths = self.widths.get(module, [])
        fits = len(widths) == self.own[module] > 0 and hidden_name(module) is None
        return max(widths) if fits else None


class _Recorder(TorchDispatchMode):
    """Records the first call of each module, and counts the attention cores and MLPs in it."""

    def __init__(self, model: nn.Module, found: Found) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.stack: list[nn.Module] = []  # modules whose forward runs
        self.records: dict[nn.Module, Record] = {}
        self.found, self.model = found, model
        self.origins: Any = WeakTensorKeyDictionary()  # of tensors; see `_origin`
        for tensor in (*model.parameters(), *model.buffers()):
            self.origins[tensor] = "parameter", []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        origin = self._origin(
            func.overloadpacket.__name__.rstrip("_"), [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        )
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and (origin[0] or each in self.origins):
                self.origins[each] = origin
        return output

    def _origin(self, name: str, tensors: Sequence[Tensor]) -> tuple[str, list[nn.Module]]:
        """Returns what an operator computes, one of _KINDS, and the modules in which this began."""
        given: list[tuple[str, list[nn.Module]]] = [self.origins.get(each, _NOTHING) for each in tensors]
        kind, began = strongest = max(given, key=lambda each: _KINDS.index(each[0]), default=_NOTHING)
        kinds, now = {each for each, _ in given}, list(self.stack)
        if "scaled_dot_product" in name:
            return "attention", self._count(now)
        if name in _PRODUCTS:
            inside = [part for part, other in zip(began, now) if part is other]  # e.g. the softmax may be a module
            if "parameter" not in kinds:
                return ("attention", self._count(inside)) if kind == "scores" else ("scores", now)
            if kind == "activation":
                self.found.mlps.update(inside[-1:])
            return strongest if kind == "scores" else _NOTHING  # a linear layer may mix the scores of heads
        if name in _SOFTMAX:
            return "scores", now
        if name in _ACTIVATIONS and kind in ("", "activation"):
            return "activation", now
        is_sum = name == "add" and sum(each.dim() > 0 for each in tensors) > 1
        ends = is_sum if kind in ("activation", "attention") else kind == "parameter" and len(kinds) > 1
        return _NOTHING if ends else strongest

    def _count(self, stack: list[nn.Module]) -> list[nn.Module]:
        self.found.cores.update(set(stack))
        self.found.own.update(stack[-1:])
        return list(stack)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(module)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.stack.pop()
        if module in self.records:
            return
        try:
            call, tensors = Call.of(args, kwargs, output)
        except UnreadableError as error:
            self.records[module] = Record(None, str(error))
            return
        x, y = tensors[0], call.computed(output, tensors)
        self.records[module] = Record(call, call.problem)
        if y.shape == x.shape and x.dim() in (3, 4) and x.is_floating_point():
            copies = [each.detach().clone() for each in (*tensors, y)]
            self.records[module] = Record(call, call.problem, copies[:-1], copies[-1])


class _Functions(TorchFunctionMode):
    """Records the calls of torch's scaled_dot_product_attention that `attention` can compute."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SDPA and self.recorder.stack and as_attention(*args, **(kwargs or {})) is not None:
            widths = self.recorder.found.widths.setdefault(self.recorder.stack[-1], [])
            widths.append((args[0] if args else kwargs["query"]).shape[-1])
        return func(*args, **(kwargs or {}))


def read_model(model: nn.Module, example: Any, is_known: Callable[[nn.Module], bool]) -> Found:
    """Reads all modules of a model that are not inside a module which was read or `is_known`.

    Args:
        model: The model. It stays unchanged.
        example: A tensor, a tuple of arguments, or a dictionary of keyword arguments for one forward.
        is_known: Returns True for modules that must not be read, because their class is supported.
    """
    found = Found(is_read=True)
    records = _recorded(model, example, found)
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


def _recorded(model: nn.Module, example: Any, found: Found) -> dict[nn.Module, Record]:
    """Runs the model in evaluation mode on at most two images."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example, dict):
        kwargs = example
    else:
        args = example if isinstance(example, tuple) else (example,)
    recorder, modes = _Recorder(model, found), [(part, part.training) for part in model.modules()]
    with ExitStack() as undo:
        for part, mode in modes:
            undo.callback(setattr, part, "training", mode)
            part.training = False
            undo.callback(part.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            undo.callback(part.register_forward_hook(recorder.leave, with_kwargs=True).remove)
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            recorder,
            _Functions(recorder),
        ):
            model(*args, **kwargs)
    return recorder.records


def _is_candidate(module: nn.Module, found: Found, records: dict[nn.Module, Record]) -> bool:
    """Returns True if a module may be one block, half, attention layer or MLP."""
    matrices = sum(parameter.dim() == 2 for parameter in module.parameters())
    cores = found.cores[module]
    if cores > 1:  # one per head, or several attention layers
        inside = [part for part in module.modules() if part is not module and found.cores[part]]
        if any(part in records and records[part].x is not None for part in inside):
            return False
    if any(child in records and records[module].equals(records[child]) for child in module.children()):
        return False  # e.g. a Sequential of one block
    return 2 <= matrices <= 3 * cores + 6


def _read_once(
    module: nn.Module, record: Record, known: dict[Any, list[tuple[Any, Recipe | UnreadableError]]]
) -> Recipe | UnreadableError:
    """Reads a module, or binds the recipe of a module with equal structure and compares both on the example."""
    if record.call is None or record.x is None:
        return UnreadableError(record.problem or "it does not map tokens to tokens of the same shape")
    structure, state = structure_of(module), state_of(module)
    key = (structure, record.call, record.x.shape)
    x, *others = record.tensors
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
                result = read(module, x, record.call, others)
            except UnreadableError as error:
                result = error
        known.setdefault(key, []).append((state, result))
        if isinstance(result, Recipe):
            _check_example(module, result, record)
        return result
    except UnreadableError as error:
        return error
    except Exception as error:
        return UnreadableError(f"its forward fails on other inputs than the example: {error}")


def _rebound(module: nn.Module, recipe: Recipe, x: Tensor, others: Sequence[Tensor]) -> Recipe:
    """Proves a recipe for a module with equal structure, but other attributes."""
    copied = random_copy(module)
    shape = tuple(x.shape)
    probe = shape if any(recipe.shape[:-1]) else _small(x)
    return _proved(copied, Probe(recipe.call, others, recipe.ties), recipe.reading(copied), probe, shape, recipe.shape)


def _check_example(module: nn.Module, recipe: Recipe, record: Record) -> None:
    x, y = record.x, record.y
    assert x is not None
    reading = recipe.reading(module)
    halves = {name: getattr(reading, name) for name in ("attention", "mlp")}  # the module may be in training mode
    reading = replace(reading, **{name: half and replace(half, drop_path=None) for name, half in halves.items()})
    with torch.no_grad():
        parts = run_reading(reading, x, "sdpa")
    base = reading.base(x)
    limit = EXAMPLE_LIMITS.get(x.dtype, 0.05)
    if not (parts - y).norm() <= limit * (y - base).norm() + 1e-6 * y.norm():
        raise UnreadableError("its parts were read, but their output on the example differs from that of the module")
