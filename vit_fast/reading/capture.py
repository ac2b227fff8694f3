"""Captures the computation of a module as a graph of pre-dispatch ATen operators with the value of each node.

Everything runs on a copy of the module on the CPU in fp64, with random weights. So the module itself never changes,
and parameters that are 0 or 1 by default (biases, LayerScale, bias tables) show their effect.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import sympy  # type: ignore[import-untyped]  # has no types
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..blocks.fused import FusedModule
from ..blocks.parts import Argument, Slot

# Operators whose result does not depend on the values of their input
CREATORS = {
    f"{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "full", "empty")
    for prefix, suffix in (("new_", ""), ("", "_like"))
}
LAYOUTS = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "contiguous", "clone", "slice", "to",
    "_to_copy",
}  # fmt: skip
_MOVES = LAYOUTS | {
    "", "chunk", "dropout", "expand", "expand_as", "flatten", "movedim", "narrow", "permute", "reshape_as", "select",
    "split", "split_with_sizes", "t", "transpose", "unbind", "unflatten",
}  # fmt: skip
HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
# Batch sizes to try if a forward converts its batch size to an int, and may compare it
BATCHES = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


class UnreadableError(Exception):
    """Reason in terms of the computation why a module cannot be read."""


def random_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a module, unfused, on the CPU in fp64, with random tensors."""
    try:
        copied: nn.Module = copy.deepcopy(module)
    except Exception as error:
        raise UnreadableError(f"it cannot be copied: {error}") from error
    for part in copied.modules():
        if isinstance(part, FusedModule):
            part.__class__ = type(part).original  # type: ignore[assignment]
    copied._apply(_to_fp64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in copied.modules():
            for tensor in list(tensors_in(part)):
                is_mask = tensor.dim() > 1 and not isinstance(tensor, nn.Parameter) and _has_two_values(tensor)
                tensor.copy_(tensor.flip(0, 1) if is_mask else _randomized(tensor, generator))
    copied.eval()  # returns None if the class has a train() that returns nothing
    return copied


def tensors_in(module: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters, buffers and other tensor attributes of a module itself."""
    for store in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in store.values() if isinstance(value, Tensor))


def _to_fp64(tensor: Tensor) -> Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype)


def _has_two_values(tensor: Tensor) -> bool:
    return bool(((tensor == tensor.min()) | (tensor == tensor.max())).all())


def _randomized(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.flip(tuple(range(tensor.dim())))  # e.g. an index, whose values must stay valid
    random = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    if tensor.dim() == 1 and not isinstance(tensor, nn.Parameter):
        return 0.7 + 0.3 * random.abs()  # e.g. a variance
    return 0.7 + 0.3 * random if tensor.dim() < 2 else random * tensor.shape[-1] ** -0.5


def tokens_like(shape: Iterable[int]) -> Tensor:
    """Returns random fp64 tokens. Some are small, so that the epsilon of a norm has an effect."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x.view(-1, x.shape[-1])[::3] *= 1e-3
    return x


def free_dimensions(
    forward: Callable[[Tensor], Tensor], shape: tuple[int, ...], least: Sequence[int]
) -> tuple[set[int], bool]:
    """Returns the dimensions whose size has no effect but on shapes, for sizes from `least` on.

    The second value is True if the forward converts the batch size to an int, e.g. by `len(x)`, and may compare it.
    """
    every = set(range(len(shape) - 1))
    for tried in (every, {0}, {1} & every):  # some operators support symbolic sizes of the batch only
        with contextlib.suppress(Exception):  # e.g. an operator without support for symbolic sizes
            used, is_int = _guarded(forward, shape, tried, least)
            if free := tried - used:
                return free, is_int and 0 in free
    return set(), False


def equal_batches(
    module: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], shape: tuple[int, ...]
) -> set[int]:
    """Returns the batch sizes for which a forward runs the same operators with the same numbers as for a shape."""
    calls: dict[int, Any] = {}
    copied = copy.deepcopy(module)._apply(lambda tensor: tensor.to("meta"))
    with torch.no_grad():
        for size in (base := max(shape[0], 2), *BATCHES):
            with contextlib.suppress(Exception), _Numbers() as seen:
                forward(copied, torch.empty(size, *shape[1:], dtype=torch.float64, device="meta"))
                calls[size] = seen.calls
    # a batch of one needs fewer copies; it is proved on its own
    return {1, shape[0], *(size for size, found in calls.items() if found == calls.get(base))}


class _Numbers(TorchDispatchMode):
    """Notes the operators that run, and the numbers that they get as values, not as sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = [*zip((each.name for each in func._schema.arguments), args), *(kwargs or {}).items()]
        values = {each.name for each in func._schema.arguments if isinstance(each.type, _VALUES)}
        self.calls.append((func, [each for name, each in named if name in values and isinstance(each, _NUMBERS)]))
        y = func(*args, **(kwargs or {}))
        if operator_name(func) in CREATORS - {"empty", "new_empty", "empty_like"}:
            self.calls[-1][1].extend(y.shape[:1])  # perhaps for a sum, which is the size
        return y


_VALUES = (torch.TensorType, torch.NumberType, torch.FloatType, torch.OptionalType)
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_NUMBERS = (int, float, *_SYMBOLIC)


class _Sizes(ShapeEnv):
    """Symbolic sizes without the source lines of guards, which load torch.export and take as long as the rest."""

    def _get_user_frame(self) -> None:
        return None


def _guarded(
    forward: Callable[[Tensor], Tensor], shape: tuple[int, ...], symbolic: set[int], least: Sequence[int]
) -> tuple[set[int], bool]:
    """Returns the dimensions that a forward compares or computes with, and True if the batch size becomes an int."""
    # one symbol per size: any branch on a size is recorded as a guard
    shapes = _Sizes(duck_shape=False)
    kinds = [DimDynamic.DYNAMIC if i in symbolic else DimDynamic.STATIC for i in range(len(shape))]
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    fake.cache_enabled = False  # the forward runs once
    x = fake.from_tensor(
        torch.empty([max(size, 2) for size in shape], dtype=torch.float64),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
    )
    sizes: list[Any] = list(x.shape)
    symbols = {i: sizes[i].node.expr for i in symbolic}  # forward may replace them by numbers, e.g. by len(x)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        with fake, _Numbers() as seen, _Shapes(), torch.no_grad():
            forward(x)
    finally:
        log.disabled = was_disabled
    every = {symbol: sympy.Dummy(integer=True, nonnegative=True) + least[i] for i, symbol in symbols.items()}
    guards: Any = [guard.expr for guard in shapes.guards if not _always_holds(guard.expr.subs(every))]
    numbers = [
        each.node.expr for _, given in seen.calls for each in given if isinstance(each, torch.SymInt | torch.SymFloat)
    ]
    compared: set[Any] = set().union(*(each.free_symbols for each in (*guards, *numbers)))
    is_int = symbols.get(0) in shapes.replacements  # usual, e.g. int(len(x) / windows) in Swin
    return {i for i, symbol in symbols.items() if symbol in compared and (i > 0 or not is_int)}, is_int


def _always_holds(guard: Any) -> bool:
    """Returns True for a comparison that is true, e.g. of a size that is at least 2 with 0 or 1."""
    if isinstance(guard, sympy.core.relational.Relational):
        guard = guard.func(sympy.expand(guard.lhs - guard.rhs), 0)
    return guard is sympy.true


class InDouble(TorchFunctionMode):
    """Casts to fp64 instead of fp32, for copies in fp64 of modules that compute norms or softmax in fp32.

    New tensors are fp64 too, for example slopes of positions. Convolutions of single positions run as linear layers.
    """

    def __enter__(self) -> Self:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self.default)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args, kwargs = tree_map(lambda each: torch.float64 if each is torch.float32 else each, (args, kwargs or {}))
        if func in (torch.conv1d, torch.conv2d, torch.conv3d) and _is_pointwise(*args, **kwargs):
            return _pointwise(*args, **kwargs)
        return func(*args, **kwargs)


def _is_pointwise(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> bool:  # fmt: skip
    ones = [*weight.shape[2:], *tree_leaves(stride), groups]
    return input.dim() == weight.dim() and {*ones} == {1} and {*tree_leaves(padding)} == {0}


def _pointwise(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return nn.functional.linear(input.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class _Shapes(TorchFunctionMode):
    """Computes only shapes of linear layers, norms and matmuls.

    With symbolic sizes, torch's functions take several times as long. Some fix the sizes: baddbmm in torch 2.13, matmul
    and linear in 2.11. Comparisons of sizes here are guards, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.baddbmm, Tensor.baddbmm) and not any(
            isinstance(each, _NUMBERS[2:]) for each in kwargs.values()
        ):
            func, args, kwargs = torch.bmm, args[1:3], None
        given: list[Any] = [*args, None, None]
        x, other = given[:2]
        if func is nn.functional.linear and isinstance(other, Tensor) and x.shape[-1] == other.shape[-1]:
            return x.new_empty((*x.shape[:-1], *other.shape[:-1]))
        if func is nn.functional.layer_norm and other is not None and x.shape[-len(other) :] == tuple(other):
            return x.new_empty(x.shape)  # contiguous, like the results of the others
        if func in _MATMULS and x.dim() == other.dim() > 2 and x.shape[-1] == other.shape[-2]:
            leading = zip(x.shape[:-2], other.shape[:-2])
            if all(str(a) == str(b) for a, b in leading):  # == would be a guard
                return x.new_empty((*x.shape[:-1], other.shape[-1]))
        # for all functions, the dispatcher takes ten times as long
        matmuls = (*_MATMULS, Tensor.__rmatmul__, nn.functional.linear)
        with enable_python_dispatcher() if func in matmuls else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


class Graph(fx.Interpreter):
    """The graph of a forward on tokens and other tensors; `values` holds the value of each node."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], *tensors: Tensor) -> None:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            traced = make_fx(forward, pre_dispatch=True, _allow_non_fake_inputs=True)(*tensors)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
        super().__init__(traced, garbage_collect_values=False)
        self.nodes = list(traced.graph.nodes)
        self.values: dict[fx.Node, Any] = {}
        slots: dict[int, Slot] = {}
        for part in module.modules():
            for store in (part._parameters, part._buffers, vars(part)):
                for name, tensor in store.items():
                    slots.setdefault(id(tensor), (part, name))
        held = {node: getattr(traced, node.target) for node in self.nodes if node.op == "get_attr"}
        self.root = module
        self.slots = {node: slots[id(tensor)] for node, tensor in held.items() if id(tensor) in slots}
        with torch.no_grad():
            self.run(*tensors)
        self.ancestors: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            sources = [] if operator_of(node) in CREATORS else node.all_input_nodes
            self.ancestors[node] = {*sources, *(each for source in sources for each in self.ancestors[source])}
        self.input, *self.others = (node for node in self.nodes if node.op == "placeholder")
        arguments = [(Argument(i, tensor), "tensor") for i, tensor in enumerate(tensors[1:])]
        self.slots |= dict(zip(self.others, arguments))

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value.detach().clone() if isinstance(value, Tensor) else value  # later nodes may write into it
        return value

    def is_live(self, node: fx.Node) -> bool:
        """Returns True if a node depends on values of the input."""
        depends = node is self.input or self.input in self.ancestors[node]
        return depends and not isinstance(self.values.get(node), int | float)

    def depends(self, node: fx.Node) -> bool:
        """Returns True if a node depends on parameters, buffers or arguments."""
        return bool(self.slots.keys() & {node, *self.ancestors[node]})

    def live_inputs(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if self.is_live(each)]

    def parameters_between(self, before: fx.Node, after: fx.Node) -> list[Slot]:
        """Returns the slots that enter the computation of `after` from `before`."""
        path = self.path(before, after)
        dead = {each for node in path for each in node.all_input_nodes if not self.is_live(each)}
        dead |= {each for node in dead for each in self.ancestors[node]}
        return [self.slots[node] for node in self.nodes if node in dead & self.slots.keys() - {*self.others}]

    def path(self, before: fx.Node, after: fx.Node) -> list[fx.Node]:
        """Returns the nodes that depend on `before` and lead to `after`, in order, with `after`."""
        leads = {after, *self.ancestors[after]}
        return [node for node in self.nodes if node in leads and before in self.ancestors[node]]

    def computed_between(self, before: fx.Node, after: fx.Node) -> str:
        """Returns the names of the operators between two nodes that change values, for a reason; "" if none does."""
        found = ", ".join(sorted({operator_of(node) for node in self.path(before, after)} - _MOVES))
        return f": {found}" if found else ""

    def makes_constants(self) -> bool:
        """Returns True if forward combines the input with tensors that it creates, e.g. a mask of its own."""
        made = [node for node in self.nodes if not self.depends(node)]
        sources = {each for node in self.nodes if self.is_live(node) for each in _read_by(node)}
        sources |= {each for node in sources & {*made} if not self.is_live(node) for each in self.ancestors[node]}
        values = [self.values.get(node) for node in made if node in sources and not self.is_live(node)]
        return any(isinstance(value, Tensor) and value.numel() > 1 for value in values)


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs of a node, without the first one of baddbmm if its beta is 0."""
    return node.all_input_nodes[1 if node.kwargs.get("beta") == 0 else 0 :]


def operator_of(node: fx.Node) -> str:
    return operator_name(node.target)


def operator_name(target: Any) -> str:
    """Returns the name of an ATen operator without overload and trailing underscore."""
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__.rstrip("_") if packet is not None else ""


def capture(module: nn.Module, forward: Callable[..., Tensor], *tensors: Tensor) -> Graph:
    """Captures `forward`, which calls the module; raises UnreadableError if it changes state or cannot be captured."""
    before = [tensor.clone() for part in module.modules() for tensor in tensors_in(part)]
    given = [tensor.clone() for tensor in tensors]
    try:
        graph = Graph(module, forward, *tensors)
    except Exception as error:  # of the forward, e.g. an assertion about shapes
        raise UnreadableError(f"its forward cannot be captured: {error}") from error
    after = [tensor for part in module.modules() for tensor in tensors_in(part)]
    if len(before) != len(after) or not all(map(torch.equal, (*before, *given), (*after, *tensors))):
        raise UnreadableError("its forward writes into its input or its tensors")
    held = [node for node in graph.nodes if node.op == "get_attr" and node not in graph.slots]
    if any(not operator_of(user).startswith("lift_fresh") for node in held for user in node.users):
        raise UnreadableError("its forward uses a tensor that is neither parameter, buffer nor attribute of a module")
    if any(operator_of(node) in HOST_READS for node in graph.nodes):
        raise UnreadableError("its forward reads values of tensors on the host")
    return graph
