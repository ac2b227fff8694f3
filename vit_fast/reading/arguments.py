"""Tensors that a forward gets beside the tokens: their sizes, and random tensors of the same kind."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..blocks.fastest import is_traced
from ..blocks.parts import Argument, AttentionParts, Derived, Slot, origins
from .calls import Call

# Size of a dimension: a number, or an axis of the tokens, and how much smaller than this axis it is
Tie = int | tuple[int, int]
Ties = tuple[tuple[Tie, ...], ...]  # of each tensor
BOUNDS: tuple[Tie, ...] = ((-1, 0),)  # of cu_seqlens, which has any size
LOWEST = -3e38  # less than any score; bf16 and fp32 contain it
PREFIX = 16  # most leading tokens that a tensor may leave out, e.g. class token and registers


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
