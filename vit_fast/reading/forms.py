"""Fused classes of modules that were read by their computation. They are created for the class of each module."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.block import parts_of, run_attention, run_halves
from ..blocks.fastest import Timed, fastest, is_traced
from ..blocks.fused import Finding, FusedModule, FusedNormMlp
from ..blocks.outlines import Node, attached
from ..blocks.packed import packed_for, run_packed
from ..blocks.parts import Argument, AttentionParts, BlockParts, Derived, MlpParts, keys_at, origins, slots_of
from ..blocks.reading import Reader
from ..ops.registration import is_exporting, matmul_dtype, needs_gradient
from .arguments import Ties, bound, fits
from .calls import Call, Kind, state_of, structure_of
from .dependencies import attributes_of, drop_slots
from .matcher import Reading
from .proof import Dtypes
from .scores import Attends


@dataclass(frozen=True)
class Recipe:
    """A proved reading with paths instead of modules, valid for all modules of equal structure."""

    attention: Node
    mlp: Node
    layout: str
    uses_sdpa: bool
    kind: str  # the parts, for the report
    call: Call
    captured: tuple[int, ...]  # shape of the tokens in the example
    shape: tuple[int | None, ...]  # of the tokens; None for sizes that the forward does not depend on
    ties: tuple[Ties, ...]  # of the sizes of other tensors, one of which must hold
    dtypes: tuple[Dtypes, ...]
    trains: bool  # True if training mode computes the same as evaluation mode, apart from dropout
    differentiates: bool  # True if the gradients are equal also for masks that hide all keys of a query
    batches: frozenset[int]  # the supported sizes of the first dimension; any if it is empty
    asks_if_traced: bool  # True if the forward may depend on whether it is traced
    asks_if_compiled: bool  # the same for torch.compile
    variables: dict[str, str | None]  # of the environment that the forward reads
    # True if the module gets and returns one tensor [B, N, C]: nothing to convert, which takes microseconds
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        plain = self.layout in ("[B, N, C]", "[..., C]") and self.call.has_one_tensor
        object.__setattr__(self, "is_plain", plain)

    def reading(self, module: nn.Module) -> Reading:
        return Reading(attached(module, self.attention), attached(module, self.mlp), self.layout, self.uses_sdpa)


class CoreModule(FusedModule):
    """A module whose attention cores run with the backend; the rest stays the same."""

    kind = "attention core"

    @classmethod
    def head_width(cls, module: Any) -> int | None:
        return vars(module).get("vit_fast_width")

    def is_idle(self) -> bool:
        return True  # torch's function is often slower than a forward's products and softmax

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() or is_traced():  # also by fuse itself
            return super().forward(*args, **kwargs)
        return Attends.run(self.vit_fast_backend, super().forward, *args, **kwargs)


class ReadModule(FusedNormMlp):
    """A module that was read by its computation. Calls that differ from the captured call run the original."""

    in_sequence, stands_alone = False, True
    vit_fast_recipe: Recipe
    vit_fast_state: tuple[Any, ...]
    vit_fast_structure: tuple[Any, ...]

    @classmethod
    def kind_of(cls, module: Any) -> str:
        return module.vit_fast_recipe.kind

    @classmethod
    def head_width(cls, module: Any) -> int | None:
        attention = module.vit_fast_recipe.reading(module).attention
        return None if attention is None else int(attention.head_dim)

    @classmethod
    def triton_reasons(cls, module: Any) -> list[str]:
        return super().triton_reasons(module) if "vit_fast_recipe" in vars(module) else []

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        return cls._read_half(block, "attention")

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return cls._read_half(block, "mlp")

    @classmethod
    def _read_half(cls, block: Reader, name: str) -> Any:
        owner: Any = block.owner
        reading = owner.vit_fast_recipe.reading(owner)
        half = getattr(reading, name)
        block.watch_children(list(owner._modules))
        for part in owner.modules():
            block.values += attributes_of(part)
        derived = [slot for slot in slots_of(half) if isinstance(slot[0], Derived)]
        kinds = [Kind(each) for slot in derived for each in origins(slot) if not isinstance(each[0], Argument)]
        block.values += [(kind, "now", kind.now) for kind in kinds]
        if (structure_of(owner), state_of(owner)) != (owner.vit_fast_structure, owner.vit_fast_state):
            block.reasons.append("a module or attribute inside it changed: call fuse again with example=")
        if not block.check_fusible() or half is None:
            return None
        drop_paths = [each.drop_path for each in (reading.attention, reading.mlp) if each is not None]
        return replace(half, dropouts=tuple(slot for slot in drop_slots(owner) if slot[0] not in drop_paths))

    @classmethod
    def examine(cls, module: Any) -> Finding:
        reader = cls.reader(module)
        cls._read_half(reader, "attention")
        return Finding(tuple(reader.reasons), bypassed=[each for each in module.modules() if each is not module])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = self.vit_fast_recipe
        plain = recipe.is_plain and len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        tensors = args if plain else recipe.call.tensors(args, kwargs)
        if tensors is None or not self._is_captured(*tensors) or (parts := self.ready()) is None:
            return super().forward(*args, **kwargs)
        (x, *others), (attention, mlp) = tensors, parts.halves
        attention = bound(attention, others) if others else attention
        rope = None if attention is None or attention.rope is None else attention.rope.now()
        if rope is not None and needs_gradient(rope.cos, rope.sin):  # kernels do not compute gradients of tables
            return super().forward(*args, **kwargs)
        terms = attention.terms if attention is not None and attention.terms and attention.terms.per_call else None
        if terms is not None:
            frozen = (parts.frozen is not None or terms.per_call != "bias") and needs_gradient(*others)
            frozen = frozen or (not recipe.differentiates and needs_gradient(x, *others, *self.parameters()))
            # in fp16, torch's function cannot return the mean of all values for a query whose keys are all masked
            if frozen or (matmul_dtype(x) == torch.float16 and self.vit_fast_backend == "sdpa"):
                return super().forward(*args, **kwargs)
            parts = replace(parts, attention=attention)
        reading, backend = None if plain else Reading(attention, mlp, recipe.layout), self.vit_fast_backend
        y = x if reading is None else reading.batched(x)
        keys = None if attention is None else keys_at(attention.cu_seqlens, y)
        if backend == "sdpa" and (packed := packed_for(parts, y)) is not None:
            y = run_packed([packed], y, rope, keys, terms=None if terms is None else terms.now(x.device))
        elif attention is not None and parts.is_pre_norm:
            y = self.run_as_block(
                parts, y, functools.partial(run_attention, attention, backend=backend), rope=rope, keys=keys
            )
        else:
            y = run_halves(attention, mlp, y, backend, parts.frozen)
        return y if reading is None else recipe.call.returned(reading.restored(y, x), *tensors)

    def _is_captured(self, x: Tensor, *others: Tensor) -> bool:
        recipe = self.vit_fast_recipe
        shape = x.shape
        if recipe.asks_if_traced and is_traced():
            compiles = torch.compiler.is_compiling() and not is_exporting()
            if recipe.asks_if_compiled or not compiles:
                return False
        if not torch.compiler.is_compiling():
            if not all(map(_is_plain, (x, *others))):
                return False
            if recipe.variables and any(os.environ.get(name) != each for name, each in recipe.variables.items()):
                return False
        if len(shape) != len(recipe.shape) or (x.dtype, *[each.dtype for each in others]) not in recipe.dtypes:
            return False
        if others and not any(fits(ties, shape, others) for ties in recipe.ties):
            return False
        if recipe.batches and (not isinstance(shape[0], int) or shape[0] not in recipe.batches):  # symbolic: any
            return False
        for size, wanted in zip(shape, recipe.shape):
            if wanted is not None and size != wanted:
                return False
        return recipe.trains or not any(part.training for part in self.modules())

    def gains_by_packing(self) -> bool:
        """Compares packed weights with the module as it is, on the tokens of the example, and on four times as many."""
        recipe, parts = self.vit_fast_recipe, parts_of(self)
        frozen, x = parts.frozen, torch.zeros(recipe.captured, dtype=parts.frozen.dtype)
        kinds = [
            half and (half.residual, half.norm.kind, half.branch_norm.kind, half.end_norm.kind) for half in parts.halves
        ]
        shapes = *x.shape, *[tuple(p.shape) for p in self.parameters()]
        key = f"module, {recipe.layout}, {kinds}, {frozen.dtype}, {shapes}"
        axis = recipe.reading(self).batch_axis
        inputs = [x] if axis is None or recipe.shape[axis] else [x, torch.cat([x] * 4, axis)]
        if recipe.call.names or not all(self._is_captured(each) for each in inputs):
            return True

        def build(by: Mapping[str, str], timed: Timed) -> Callable[[], object]:
            def call(x: Tensor) -> Any:
                parts.frozen = frozen if by[key] == "packed" else None
                _, args, kwargs = recipe.call.arguments(x)
                return self.forward(*args, **kwargs)

            call = timed(key, call)
            return lambda: [call(each) for each in inputs]

        selected = fastest({key: ["as it is", "packed"]}, build)[key]
        parts.frozen = frozen
        return selected == "packed"

    def ready(self) -> BlockParts | None:
        """Returns the parts; None if the module changed, so that a half cannot be read, or drops at random."""
        recipe, parts = self.vit_fast_recipe, parts_of(self)
        if parts.fp8 is not None:
            parts.fp8.check(self.vit_fast_backend)
        for half, read in ((parts.attention, recipe.attention), (parts.mlp, recipe.mlp)):
            if (half is None) is not (read[1] is None) or (half is not None and half.dropouts and half.drops()):
                return None
        return parts


def _is_plain(tensor: Tensor) -> bool:
    """Returns False if a forward may see that a tensor is a parameter, has attributes, or changes functions."""
    cls = tensor.__class__
    if cls is Tensor:
        return not tensor.__dict__
    return cls is not nn.Parameter and cls.__torch_function__ is torch._C._disabled_torch_function_impl


def attributes(module: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Returns the attributes that a fused class needs."""
    return {
        "vit_fast_recipe": recipe, "vit_fast_structure": structure_of(module), "vit_fast_state": state_of(module),
        "vit_fast_idle": recipe.uses_sdpa,
    }  # fmt: skip


def hidden_name(module: nn.Module) -> str | None:
    """Returns the name of an attribute of a module that its fused class would hide; None if there is none."""
    classes = itertools.takewhile(lambda cls: cls is not nn.Module, ReadModule.__mro__)
    names = {name for cls in classes for name in (*vars(cls), *vars(cls).get("__annotations__", ()))}
    own = itertools.takewhile(lambda cls: cls is not nn.Module, type(module).__mro__)
    stores = (vars(module), module._parameters, module._buffers, module._modules, *map(vars, own))
    return next((name for store in stores for name in store if name in names and not hasattr(nn.Module, name)), None)
