"""Runs the attention cores of a forward with a backend: torch's function, and softmax(scale * q k^T + bias) v.

A product of queries and keys returns `Unvalued` scores. Factors, biases, casts and the softmax add to their
description, from which the product with the values computes attention. Any other use computes the values first, by the
functions of the forward. So nothing is assumed about the shapes, modes or branches of later calls.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops.attention import attend_as_torch
from ..ops.registration import matmul_dtype
from .capture import UnreadableError
from .cores import labels_of

SDPA = torch._C._nn.scaled_dot_product_attention  # torch.nn.functional's, which other libraries may replace
_PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")
_FACTORS = {"mul": 1, "multiply": 1, "div": -1, "divide": -1, "true_divide": -1}  # exponents
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_NAMES = {
    getattr(owner, name + suffix): (name, suffix)
    for name in (*_PRODUCTS, *_FACTORS, *_CASTS, "to", "type_as", "add", "softmax", "dropout")
    for owner in (torch, Tensor, F)
    for suffix in ("", "_")
    if hasattr(owner, name + suffix)
} | dict.fromkeys((torch.transpose, Tensor.transpose, vars(torch._C.TensorBase)["mT"].__get__), ("transpose", ""))
_ABOUT = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "is_floating_point")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
}
# Relative errors on the example, by the dtype of the output
_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}


_NO_HOOKS = (lambda tensor: tensor, lambda tensor: tensor)


class ValuesNeededError(RuntimeError):
    """Unvalued scores reached a function whose gradients they would lose, e.g. a custom autograd.Function."""


@dataclass(eq=False)
class Scores:
    """The scores of attention, or after the softmax its weights, and the call that computes them."""

    q: Tensor  # [..., N, D]
    k: Tensor  # [..., M, D]
    dtype: torch.dtype
    call: Any  # function, arguments, and keyword arguments; with `Scores` instead of `Unvalued`
    state: tuple[Any, ...]
    others: list[str]  # uses of what this product began, apart from those that the core contains
    factor: float = 1.0
    bias: Tensor | None = None
    are_weights: bool = False
    are_transposed: bool = False  # [..., M, N]
    before: Scores | None = None
    value: Tensor | None = None  # if it was computed
    is_followed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        n, m = self.q.shape[-2], self.k.shape[-2]
        return *self.q.shape[:-2], *((m, n) if self.are_transposed else (n, m))

    def line(self) -> Iterator[Scores]:
        """Yields this object and those that it was computed from."""
        each: Scores | None = self
        while each is not None:
            yield each
            each = each.before

    def values(self) -> Tensor:
        """Computes the values as the forward does."""
        if self.value is None:
            func, args, kwargs = tree_map(lambda each: each.values() if isinstance(each, Scores) else each, self.call)
            with ExitStack() as contexts:
                if self.state != _state(device := self.q.device.type):
                    gradients, inference, cast, dtype, hooks = self.state
                    contexts.enter_context(saved_tensors_hooks(*(hooks or _NO_HOOKS)))
                    contexts.enter_context(torch.inference_mode(inference))
                    contexts.enter_context(torch.set_grad_enabled(gradients))
                    contexts.enter_context(torch.autocast(device, dtype, enabled=cast))
                self.value = func(*args, **kwargs)
        return self.value


@dataclass
class Core:
    """The product of weights and values."""

    weights: Scores
    v: Tensor  # [..., M, D]
    order: tuple[int, ...]  # permutation of the output [..., N, D]

    def arguments(self) -> tuple[Any, ...] | None:
        """Returns the arguments of torch's function; None if `attention` cannot compute the core."""
        weights, v = self.weights, self.v
        (q, k), mask, is_cast = (weights.q, weights.k), weights.bias, weights.state[2]
        are_plain = type(v) in (Tensor, nn.Parameter) and v.device == q.device
        if not are_plain or not weights.are_weights or not (is_cast or weights.dtype is v.dtype is q.dtype):
            return None
        if any(each.value is not None for each in weights.line()):  # which may have hooks
            return None
        if mask is not None:
            if q.dim() > 4 or mask.dtype not in (torch.float32, q.dtype):
                return None
            mask = mask + 0.0 * mask.detach().amax(-1, keepdim=True)  # softmax returns NaN for queries without keys
        return q, k, v, mask

    def run(self, backend: str, arguments: Sequence[Any]) -> Tensor:
        y = attend_as_torch(backend, *arguments, scale=self.weights.factor)
        y = y.contiguous().permute(self.order)  # as the product returns it
        return y.contiguous() if self.weights.are_transposed else y


def step(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Scores | Core | None:
    """Returns what a function of torch computes if it may be a part of a core; its arguments contain `Scores`."""
    name, suffix = _NAMES.get(func, ("", ""))
    given = [each for each in args if isinstance(each, Scores)]
    if not name or "out" in kwargs or (suffix and (not args or not isinstance(args[0], Scores))):
        return None
    if not given:
        found = _product(name, args, kwargs) if name in _PRODUCTS else None
    elif len(given) > 1 or given[0].value is not None or given[0].state != _state(given[0].q.device.type):
        return None
    else:
        if name in _PRODUCTS:
            return _mixed(given[0], name, args)
        found = _changed(given[0], name, args, kwargs)
    before = given[0] if given else None
    if found is None or found is before:
        return found
    return replace(found, call=(func, args, kwargs), before=before, is_followed=False)


def _state(device: str) -> tuple[Any, ...]:
    is_cast = torch.is_autocast_enabled(device)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), is_cast
    return *modes, torch.get_autocast_dtype(device) if is_cast else None, _hooks()


def _hooks() -> Any:
    """Returns the hooks on tensors that are saved for the backward pass."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _product(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Scores | None:
    """Returns the scores if a function multiplies two batches as queries and keys."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    beta = kwargs.get("beta", 1) if name == "baddbmm" else 0
    if len(tensors) < 2 or not all(type(each) in (Tensor, nn.Parameter) and each.dim() > 2 for each in tensors[-2:]):
        return None
    if beta not in (0, 1):
        return None
    try:
        a, b, of_a, of_b, out = labels_of(name, tensors[-2:] if name != "einsum" else args)
    except UnreadableError:
        return None
    if out[-2] in of_b:
        a, b, of_a, of_b = b, a, of_b, of_a
    batch, n, m, d = out[:-2], out[-2], out[-1], "".join(set(of_a) & set(of_b) - set(out))
    q, k = _permuted(a, of_a, batch + n + d), _permuted(b, of_b, batch + m + d)
    if q is None or k is None or len(d) != 1 or not q.is_floating_point() or q.dtype is not k.dtype:
        return None
    factor = float(kwargs.get("alpha", 1)) if name == "baddbmm" else 1.0
    scores = Scores(q, k, matmul_dtype(q), None, _state(q.device.type), [], factor)
    return _biased(scores, tensors[0]) if beta else scores


def _permuted(x: Tensor, before: str, after: str) -> Tensor | None:
    if sorted(before) != sorted(after):
        return None
    return x if before == after else x.permute([before.index(each) for each in after])


def _mixed(weights: Scores, name: str, args: Sequence[Any]) -> Core | None:
    try:
        a, b, of_a, of_b, out = labels_of(name, args)
    except UnreadableError:
        return None
    if b is weights:
        a, b, of_a, of_b = b, a, of_b, of_a
    batch, n, m, d = of_a[:-2], of_a[-2], of_a[-1], "".join(set(of_b) - set(of_a))
    n, m = (m, n) if weights.are_transposed else (n, m)
    v = _permuted(b, of_b, batch + m + d)
    is_other = name == "einsum" and weights.are_transposed  # whose strides are unknown
    if is_other or v is None or len(d) != 1 or sorted(out) != sorted(batch + n + d):
        return None
    return Core(weights, v, tuple((batch + n + d).index(each) for each in out))


def _changed(scores: Scores, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Scores | None:
    """Returns the scores after a function other than a product; the same object for a function that returns it."""
    at = 0 if args[0] is scores else 1
    others = [each for each in args if each is not scores]
    if name == "add":
        return None if scores.are_weights or kwargs or len(others) != 1 else _biased(scores, others[0])
    if name in _FACTORS:
        usual = not scores.are_weights and not kwargs and len(others) == 1 and (at == 0 or _FACTORS[name] == 1)
        return _scaled(scores, others[0], _FACTORS[name]) if usual else None
    if at == 1:
        return None
    if name == "transpose":
        last = {each % len(scores.shape) for each in (*others, *kwargs.values()) or (-1, -2)}
        is_last = last == {len(scores.shape) - 1, len(scores.shape) - 2}
        return replace(scores, are_transposed=not scores.are_transposed) if scores.are_weights and is_last else None
    if name == "softmax":
        dim = kwargs.get("dim", others[0] if others else None)
        dtypes = [each for each in (*others, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
        if scores.are_weights or type(dim) is not int or dim not in (-1, len(scores.shape) - 1):
            return None
        dtype = dtypes[0] if dtypes else scores.dtype
        if scores.state[2]:  # autocast
            dtype = scores.q.new_empty(0, dtype=scores.dtype).softmax(-1, *dtypes).dtype
        return replace(scores, are_weights=True, dtype=dtype)
    if name == "dropout":
        rate = kwargs.get("p", others[0] if others else 0.5)
        training = kwargs.get("training", kwargs.get("train", others[1] if len(others) > 1 else True))
        return scores if rate == 0 or not training else None
    (target, *rest) = [*others, *kwargs.values()] or [_CASTS.get(name)]
    dtype = target.dtype if isinstance(target, Tensor) else target
    if rest or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return scores if dtype is scores.dtype else replace(scores, dtype=dtype)


def _biased(scores: Scores, bias: Any) -> Scores | None:
    if not isinstance(bias, Tensor) or not bias.is_floating_point() or not 2 <= bias.dim() <= len(scores.shape):
        return None
    if any(a not in (1, b) for a, b in zip(reversed(bias.shape), reversed(scores.shape))):
        return None
    dtype = torch.promote_types(scores.dtype, bias.dtype)
    return replace(scores, bias=bias if scores.bias is None else scores.bias + bias, dtype=dtype)


def _scaled(scores: Scores, factor: Any, exponent: int) -> Scores | None:
    q, bias = scores.q, scores.bias
    if type(factor) in (int, float) and math.isfinite(factor) and factor != 0:
        number = float(factor) ** exponent
        return replace(scores, factor=scores.factor * number, bias=bias if bias is None else bias * number)
    if not isinstance(factor, Tensor) or not factor.is_floating_point() or factor.dim() > len(scores.shape):
        return None
    if factor.dim() and factor.shape[-2:] != (1, 1):
        return None
    factor = factor if exponent > 0 else 1 / factor
    dtype = torch.promote_types(scores.dtype, q.dtype)
    return replace(scores, q=q * factor, bias=bias if bias is None else bias * factor, dtype=dtype)


class Unvalued(Tensor):
    """Scores in a forward. Any use but those of `step` computes the values."""

    scores: Scores

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(with_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValuesNeededError


def with_values(each: Any) -> Any:
    return each.scores.values() if type(each) is Unvalued else each


class Attends(TorchFunctionMode):
    """Runs attention cores with a backend."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend, self.hooks = backend, _hooks()
        self.pending: weakref.WeakSet[Scores] = weakref.WeakSet()

    @classmethod
    def run(cls, backend: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function; its output has values."""
        try:
            with cls(backend):
                output = forward(*args, **kwargs)
        except ValuesNeededError:
            return forward(*args, **kwargs)
        are_returned = any(type(each) is Unvalued for each in tree_leaves(output))
        return tree_map(with_values, output) if are_returned else output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_rerun = _hooks() != self.hooks  # in a checkpoint, whose second run is outside of this mode
        if func is SDPA and not is_rerun:
            return attend_as_torch(self.backend, *args, **kwargs)
        unvalued = [each for each in args if type(each) is Unvalued]
        if func in _ABOUT or not (unvalued or self.pending or func in _NAMES) or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        given_scores = [each.scores if type(each) is Unvalued else each for each in args]
        found = None if is_rerun else step(func, given_scores, kwargs)
        if isinstance(found, Core) and (arguments := found.arguments()) is not None:
            self.pending.difference_update(found.weights.line())
            return found.run(self.backend, arguments)
        if isinstance(found, Scores):
            given = unvalued[0] if unvalued else None
            if given is not None and found is given.scores:
                return given
            if given is None or not _writes(func, args, kwargs):
                return self._unvalued(found)
            if not given.scores.is_followed:
                given.scores = self._unvalued(found).scores
                return given
        if self.pending and _writes(func, args, kwargs):  # perhaps into q, k or a bias
            for scores in list(self.pending):
                scores.values()
        for each in unvalued:
            if each.scores.state[0] and not torch.is_grad_enabled() and each.scores.value is None:
                raise ValuesNeededError  # perhaps in the forward of an autograd.Function
        return func(*args, **kwargs)

    def _unvalued(self, scores: Scores) -> Unvalued:
        if scores.before is not None:
            scores.before.is_followed = True
        self.pending.add(scores)
        found: Any = Tensor._make_wrapper_subclass(Unvalued, scores.shape, dtype=scores.dtype, device=scores.q.device)
        found.scores = scores
        return found


def _writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True if a function may write into a tensor; a positional True may be `inplace`."""
    name = getattr(func, "__name__", "_")
    by_name = name.startswith(("__i", "__set")) or (name.endswith("_") and not name.endswith("__"))
    return by_name or "out" in kwargs or kwargs.get("inplace", False) or any(each is True for each in args[1:])


class Follower:
    """Follows the scores of a forward that runs unchanged."""

    def __init__(self) -> None:
        self._scores: Any = WeakTensorKeyDictionary()
        self.cores: list[tuple[nn.Module, Scores, int]] = []  # with the module and the head_dim

    def see(self, module: nn.Module, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Notes a call of a function of torch in the forward of a module."""
        if func in _ABOUT:
            return
        given = [self._scores.get(each, each) if isinstance(each, Tensor) else each for each in args]
        found = step(func, given, kwargs)
        if isinstance(found, Scores):
            self._scores[output] = found
        elif isinstance(found, Core) and (arguments := found.arguments()) is not None:
            with _disable_current_modes():  # which count attention cores
                y = found.run("eager", arguments)
            if (y - output).norm() <= _LIMITS.get(y.dtype, 0.05) * output.norm():
                self.cores.append((module, found.weights, max(found.weights.q.shape[-1], found.v.shape[-1])))
        else:
            self.use((args, kwargs), getattr(func, "__name__", ""))

    def use(self, values: Any, name: str, only: bool = False) -> None:
        """Notes that something else uses scores; with `only`, those of cores that ended."""
        ended = [id(each.others) for _, each, _ in self.cores]
        for each in tree_leaves(values):
            scores = self._scores.get(each) if isinstance(each, Tensor) else None
            if scores is not None and (not only or id(scores.others) in ended):
                scores.others.append(name)
