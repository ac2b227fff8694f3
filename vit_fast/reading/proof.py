"""Proves a reading: module and parts compute the same outputs and gradients, on random weights and tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..blocks.block import run_halves
from ..blocks.parts import Argument, origins, slots_of, tensor_at
from .arguments import LOWEST, Probe, arguments_of, bound
from .capture import Graph, UnreadableError, operator_of, tokens_like
from .dependencies import drop_slots
from .matcher import Reading

Dtypes = tuple[torch.dtype, ...]  # of the tokens, then of other tensors
# Relative errors of the branches, root mean square. Modules that compute norms or softmax in fp32 differ by 1e-6.
LIMITS = {torch.float64: 2e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


# Operators of tokens that are linear in them or smooth, so that equal results on random values show equal functions.
# Any other operator, e.g. a comparison, may change values that no proof tries.
_SMOOTH = frozenset(
    """
    add addcmul addmm alias as_strided atleast_3d baddbmm batch_norm bmm broadcast_to cat channel_shuffle chunk
    clone complex concat conj constant_pad_nd contiguous conv1d conv2d conv3d convolution copy cumsum
    detach diagonal div divide dropout einsum expand expand_as feature_dropout flatten flip gather group_norm hsplit
    hstack imag index index_select layer_norm lift_fresh linalg_vector_norm linear mH mT masked_fill matmul matrix_H
    mean mm moveaxis movedim mul multiply narrow native_layer_norm neg norm numpy_T outer pad permute pixel_shuffle
    pixel_unshuffle pow real reciprocal repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg
    rms_norm roll rsqrt rsub scaled_dot_product_attention select slice softmax _softmax _safe_softmax split
    split_with_sizes sqrt square squeeze stack std std_mean sub subtract sum swapaxes swapdims t tensor_split tile
    to _to_copy transpose true_divide type_as unbind unflatten unfold unsafe_chunk unsafe_split _unsafe_view
    unsqueeze var var_mean view view_as view_as_complex view_as_real vstack where zeros_like
    """.split()  # noqa: SIM905  # a list would take a line per name
)
_ACTIVATIONS = {"erf", "exp", "gelu", "relu", "sigmoid", "silu", "tanh"}  # flat for large values


def run_reading(reading: Reading, x: Tensor, backend: str, others: Sequence[Tensor] = ()) -> Tensor:
    """Computes the module from its parts and the other tensors of a call. Keeps the module's layout."""
    attention = bound(reading.attention, others)
    return reading.restored(run_halves(attention, reading.mlp, reading.batched(x), backend), x)


def check_complete(graph: Graph, reading: Reading, names: Sequence[int | str]) -> None:
    """Raises UnreadableError if the output depends on a tensor of the module that is not among the parts."""
    slots = [origin for half in (reading.attention, reading.mlp) for slot in slots_of(half) for origin in origins(slot)]
    held = {id(tensor_at(slot)) for slot in slots}
    constant = reading.attention and replace(reading.attention, rope=None, cu_seqlens=None)
    if constant is not None and constant.terms is not None and constant.terms.per_call:
        constant = replace(constant, terms=constant.terms.with_term(constant.terms.per_call, None))
    if any(arguments_of(slot) for slot in slots_of((constant, reading.mlp))):
        raise UnreadableError("its linear layers, norms, scales or windows depend on an argument")
    _check_operators(graph, reading.mlp is not None)
    for node in graph.nodes:
        if node in graph.slots and node in graph.ancestors[graph.nodes[-1]]:
            owner, name = graph.slots[node]
            if id(tensor_at((owner, name))) not in held:
                what = f"argument {names[owner.number]}" if isinstance(owner, Argument) else repr(name)
                raise UnreadableError(f"its output depends on {what}, which is not a part of attention or MLP")


def _drops_nothing(node: fx.Node) -> bool:
    """Returns True for inactive dropout, also of attention."""
    args: Any = node.args
    rate, training = args[4] if len(args) > 4 else node.kwargs.get("dropout_p", 0.0), True
    if operator_of(node) == "dropout":
        _, rate, training = args
    return operator_of(node) in _SMOOTH and not (rate and training)


def _check_operators(graph: Graph, activations: int) -> None:
    """Raises UnreadableError if operators on tokens may have an effect on other values than those of proofs."""
    for node in graph.nodes:
        name = operator_of(node)
        if not name or node not in graph.ancestors[graph.nodes[-1]]:
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags and not _drops_nothing(node):
            problem = f"computes random numbers ({name})"
        elif not graph.is_live(node):
            problem = ""
        else:
            numbers: list[float] = [
                each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, int | float)
            ]
            usual = name in _SMOOTH and (name != "pow" or [-3.0] <= numbers[:1] <= [3.0])
            if name in ("clamp", "clamp_min") and len(numbers) == 1 and node.kwargs.get("max") is None:
                usual = 0 < numbers[0] <= 1e-3 or numbers[0] <= LOWEST  # e.g. of a norm, or of scores
            activations -= name in _ACTIVATIONS
            usual = usual or (name in _ACTIVATIONS and activations >= 0)
            problem = "" if usual else f"applies {name} to its tokens, whose effect on other values is unknown"
        if problem:
            raise UnreadableError(f"its forward {problem}")


def prove(copied: nn.Module, call: Probe, reading: Reading, shape: tuple[int, ...], magnitude: float = 1.0) -> None:
    """Raises UnreadableError if outputs or gradients differ in evaluation mode; `copied` is a random copy."""
    x = tokens_like(shape) * magnitude
    parameters = list(copied.parameters())
    for parameter in parameters:
        parameter.requires_grad_(parameter.is_floating_point())
    results: list[list[Any]] = []
    runs: tuple[Callable[..., Tensor], ...] = (
        lambda x, *others: call.call.run(copied, x, *others),
        lambda x, *others: run_reading(reading, x, "eager", others),
    )
    biases = masks_of(reading, "bias")
    for run in runs:
        given, others = x.clone().requires_grad_(), call.others(x)
        floats = [each.requires_grad_() for i, each in enumerate(others) if i in biases and each.is_floating_point()]
        y = run(given.clone(), *others)  # no leaf, like the tokens of most blocks
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
        sources = [given, *floats, *parameters] if magnitude <= 1e3 else []  # otherwise only rounding errors, or NaN
        gradients = torch.autograd.grad((y * weight).sum(), sources, allow_unused=True) if sources else ()
        results.append([y.detach() - reading.base(x), *gradients])
    names = ["outputs", "gradients of its tokens", *["gradients of its mask"] * len(floats)]
    names += [f"gradients of {name}" for name, _ in copied.named_parameters()]
    # gradients that are zero up to rounding, e.g. of the bias of keys, or of keys of a saturated softmax
    norms = (float(each.norm().nan_to_num(posinf=0.0)) for each in results[0][1:] if each is not None)
    zero = 1e-8 + 1e-12 * magnitude * max(norms, default=0.0)
    if results[0][0].isnan().any():  # then so are gradients, for example because of a mask that hides all keys
        names = names[:1]
    for name, a, b in zip(names, *results):
        if (a is None) is not (b is None) or (a is not None and not _is_same(b, a, 10 * LIMITS[torch.float64], zero)):
            raise UnreadableError(f"its parts were read, but the {name} of module and parts differ")


def prove_in_contexts(copied: nn.Module, call: Probe, reading: Reading, x: Tensor) -> None:
    """Raises UnreadableError if outputs differ under autocast, for other strides or masks, zeros, infinity or NaN."""
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    zero, infinite, invalid = x.clone(), x.clone(), x.clone()
    zero.view(-1, x.shape[-1])[::2] = 0
    zero.view(-1, x.shape[-1])[1::4] *= 1e-8
    infinite.view(-1)[0], invalid.view(-1)[0] = torch.inf, torch.nan
    contexts = [
        ("under autocast to bf16", x, torch.bfloat16, call), ("under autocast to fp16", x, torch.float16, call),
        ("of other strides", other, None, call), ("of zeros", zero, None, call),
        ("of infinity", infinite, None, call), ("of NaN", invalid, None, call),
    ]  # fmt: skip
    if masks := masks_of(reading):
        contexts.append(("of masks that hide all keys", x, None, replace(call, masks=masks)))
    for name, given, dtype, probe in contexts:
        devices = ("cpu", "cuda")
        before = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]
        for device, _, default in before:
            torch.set_autocast_enabled(device, dtype is not None)  # leaves fp64 as it is
            torch.set_autocast_dtype(device, dtype or default)
        try:
            with torch.no_grad():
                expected, found = probe.run(copied, given), run_reading(reading, given, "eager", probe.others(given))
        finally:
            for device, was_enabled, default in before:
                torch.set_autocast_enabled(device, was_enabled)
                torch.set_autocast_dtype(device, default)
        if not _is_same(found, expected, 10 * LIMITS[torch.float64]):
            raise UnreadableError(f"its parts were read, but the outputs {name} of module and parts differ")


def prove_other_weights(copied: nn.Module, call: Probe, reading: Reading, x: Tensor) -> None:
    """Raises UnreadableError if outputs differ for large or negative weights, e.g. because of a clamp."""
    held = [(each, each.clone()) for each in copied.parameters() if each.is_floating_point()]
    with torch.no_grad():
        for factor, limit in (
            (-1.0, 10 * LIMITS[torch.float64]),
            (100.0, 0.01),
            (-100.0, 0.01),
            (1e6, 0.01),
        ):  # fp32 rounds scores
            for parameter, before in held:
                parameter.copy_(before * factor)
            expected, found = call.run(copied, x), run_reading(reading, x, "eager", call.others(x))
            for parameter, before in held:
                parameter.copy_(before)
            if expected.isfinite().all() and not _is_near(found, expected, limit):
                raise UnreadableError("its parts were read, but the outputs for large or negative weights differ")


def masks_of(reading: Reading, *names: str) -> set[int]:
    """Returns the numbers of the arguments that change scores, by default by any term."""
    terms = None if reading.attention is None else reading.attention.terms
    name = "" if terms is None else terms.per_call
    return arguments_of(terms.given[name]) if terms is not None and name and (not names or name in names) else set()


def _is_same(a: Tensor, b: Tensor, limit: float, zero: float = 1e-8) -> bool:
    """Returns True if tensors agree and are NaN at the same places."""
    if _is_near(a, b, limit, zero):  # usual: there is no NaN
        return True
    return torch.equal(a.isnan(), b.isnan()) and _is_near(a.nan_to_num(), b.nan_to_num(), limit, zero)


def _is_near(a: Tensor, b: Tensor, limit: float, zero: float = 1e-8) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= limit * b.norm() + zero)


def proved_dtypes(copied: nn.Module, call: Probe, reading: Reading, shape: tuple[int, ...]) -> tuple[Dtypes, ...]:
    """Returns the dtypes of the tensors for which module and parts agree; rounds the weights of `copied`."""
    found = []
    for dtype, limit in LIMITS.items():
        copied._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)  # noqa: B023
        x = tokens_like(shape).to(dtype)
        base = reading.base(x)
        masks = masks_of(reading)
        for of_others in dict.fromkeys((None, torch.float32)) if call.tensors else (None,):
            for hiding in (masks, ()) if masks else ((),):
                probe = replace(call, dtype=of_others, masks=hiding)
                try:
                    y, expected = run_reading(reading, x, "eager", probe.others(x)), probe.run(copied, x)
                except (RuntimeError, TypeError, ValueError, UnreadableError):
                    break
                if (
                    y.dtype is not dtype
                    or expected.dtype is not dtype
                    or not _is_same(y - base, expected - base, limit)
                ):
                    break
            else:
                found.append((dtype, *probe.dtypes(dtype)))
    copied._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    return tuple(found)


def is_same_in_training(copied: nn.Module, call: Probe, reading: Reading, x: Tensor) -> bool:
    """Returns True if training mode with inactive dropout computes the same as evaluation mode."""
    with _training(copied), torch.no_grad():
        try:
            before = [tensor.clone() for tensor in copied.buffers()]
            y = call.run(copied, x)
        except (RuntimeError, ValueError, UnreadableError):
            return False
        same = all(map(torch.equal, before, copied.buffers()))
        return same and _is_near(y, run_reading(reading, x, "eager", call.others(x)), LIMITS[torch.float64])


def is_same_compiled(copied: nn.Module, call: Probe, x: Tensor, asked: Collection[str]) -> bool:
    """Returns True if a forward that asked these functions computes the same while torch.compile traces it."""
    if "is_dynamo_compiling" in asked or not hasattr(torch.compiler, "_is_compiling_flag"):  # the answer is a constant
        return False
    with torch.no_grad():
        expected = call.run(copied, x)
        torch.compiler._is_compiling_flag = True
        try:
            found = call.run(copied, x)
        except Exception:
            return False
        finally:
            torch.compiler._is_compiling_flag = False
    return _is_near(found, expected, LIMITS[torch.float64])


@contextmanager
def _training(copied: nn.Module) -> Iterator[None]:
    slots = drop_slots(copied)
    rates = [getattr(*slot) for slot in slots]
    for owner, name in slots:
        setattr(owner, name, 0.0)
    copied.train()
    try:
        yield
    finally:
        copied.eval()
        for (owner, name), rate in zip(slots, rates):
            setattr(owner, name, rate)


def with_drop_paths(copied: nn.Module, call: Probe, reading: Reading, x: Tensor) -> Reading:
    """Adds the drop paths of the halves: where a module multiplied by 0 removes a half, it is the half's drop path."""
    halves = {name: half for name in ("attention", "mlp") if (half := getattr(reading, name)) is not None}
    if reading.batch_axis != 0 or any(half.residual in ("none", "attention") for half in halves.values()):
        return reading
    with torch.no_grad():
        for part in [part for part, name in drop_slots(copied) if name == "drop_prob" and _drops_samples(part)]:
            hook = part.register_forward_hook(lambda _, __, output: output * 0)
            y = call.run(copied, x)
            hook.remove()
            for removed in [*([name] for name in halves), list(halves)]:
                without: Any = {name: replace(halves[name], drop_path=_Drops()) for name in removed}
                rest = run_reading(replace(reading, **without), x, "eager", call.others(x))
                if _is_near(y, rest, LIMITS[torch.float64]):
                    found: Any = {name: replace(getattr(reading, name), drop_path=part) for name in removed}
                    reading = replace(reading, **found)
    return reading


class _Drops(nn.Module):
    """A drop path that drops every sample."""

    drop_prob = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def _drops_samples(part: Any) -> bool:
    """Returns True if a module drops samples of a batch at random, and scales the others by 1 / (1 - drop_prob)."""
    rate, part.drop_prob = part.drop_prob, 0.5
    part.train()
    try:
        kept = part(torch.ones(64, 3, 2, dtype=torch.float64)).flatten(1)
    except (RuntimeError, TypeError):
        return False
    finally:
        part.eval()
        part.drop_prob = rate
    values = set(kept.unique().tolist())
    return values == {0.0, 2.0} and bool((kept == kept[:, :1]).all())
