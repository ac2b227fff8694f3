"""Classes that `fuse` gives to modules of other libraries.

A module is fused by changing the class of this instance to a subclass with another `forward`. The object, its
Parameters, children, hooks and state_dict keys stay the same, so optimizers, EMA copies, DDP and FSDP need no change.
Restoring the class undoes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from ..ops.attention_op import DTYPES, MAX_HEAD_DIM, MIN_HEAD_DIM
from ..ops.backends import resolve_backend
from ..ops.descriptions import Keys, Rope
from .block import forward_block, parts_of, run_blocks, run_mlp, runs_whole
from .fp8_scales import PLACE, make_room
from .packing import is_packable, run_packed_block
from .parts import AttentionParts, BlockParts, MlpParts, drops
from .reading import Reader, read_block
from .tracing import show_original_to_tracers, show_original_to_unfused

FusedClass = TypeVar("FusedClass", bound="type[FusedModule]")


@dataclass(frozen=True)
class Finding:
    """Result of inspecting a module before it is fused.

    Attributes:
        reasons: Reasons to skip it; empty if it can be fused.
        notes: Notes for the report if it is fused.
        bypassed: Modules inside it whose own forward will no longer run.
    """

    reasons: Sequence[str] = ()
    notes: Sequence[str] = ()
    bypassed: Sequence[nn.Module] = ()


class FusedModule(nn.Module):
    """A class that `fuse` gives to a module of another library, or that such a library instantiates itself.

    Attributes:
        original: The class that this one replaces.
        kind: What the operators compute, for the report.
        host_reads: Values that forward reads on the host, which a captured graph would not read again; "" if none.
        passes_for_original: True to print as the original class, because its library looks up classes by name.
        vit_fast_request: The requested backend, including "auto".
        vit_fast_backend: The backend that it resolves to on the module's current device.
    """

    original: ClassVar[type[nn.Module]]
    original_forward: ClassVar[Callable[..., Any]]
    kind: ClassVar[str]
    host_reads: ClassVar[str] = ""
    passes_for_original: ClassVar[bool] = False
    vit_fast_request: str = "auto"
    vit_fast_backend: str = "sdpa"

    if TYPE_CHECKING:  # the other base's attributes, which nn.Module types as Tensor | Module

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        original = cls.__bases__[-1]
        if original.__module__.startswith("transformers."):
            show_original_to_unfused(cls, original)
        super().__init_subclass__(**kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = self.examine(self).reasons
        if reasons:
            raise ValueError(f"{type(self).__qualname__} cannot be built: " + "; ".join(reasons))
        self.set_up()
        self.set_fused_backend("auto")

    @classmethod
    def examine(cls, module: Any) -> Finding:
        """Inspects an instance of `original`; by default it can be fused."""
        return Finding()

    @classmethod
    def head_width(cls, module: Any) -> int | None:
        """Width of an attention head in channels; None without attention."""
        return None

    @classmethod
    def triton_reasons(cls, module: Any) -> list[str]:
        """Returns all reasons why the kernels cannot run an instance."""
        return triton_reasons(cls.head_width(module), dtype_of(module))

    def set_up(self) -> None:
        """Sets attributes that forward needs beyond those of the original; runs after the class was set."""

    def set_fused_backend(self, request: str) -> None:
        """Resolves "auto" by device, dtype and head width: triton if it can run, otherwise sdpa."""
        self.vit_fast_request = request
        self.vit_fast_backend = resolve_backend(request, device_of(self), dtype_of(self))
        if request == "auto" and type(self).triton_reasons(self):
            self.vit_fast_backend = "sdpa"

    def is_idle(self) -> bool:
        """True if the original forward runs, because the fused one would be no faster."""
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> FusedModule:
        """Resolves "auto" again after .to(), .cuda() and similar, since it depends on the device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves _apply untyped
        self.set_fused_backend(self.vit_fast_request)
        return self

    def _get_name(self) -> str:
        return type(self).__qualname__


def fused_form_of(original: type[nn.Module], *, equivalent: bool = True) -> Callable[[FusedClass], FusedClass]:
    """Class decorator that links a fused class to its original.

    It copies the original's __name__, by which wrapping policies (transformers' _no_split_modules, accelerate's FSDP)
    find layers. pickle uses __qualname__, which does not change. torch.fx and torch.jit.script see the original's
    forward, see `tracing.py`.

    Args:
        original: The original class.
        equivalent: True if its forward gives the same results.
    """

    def decorate(cls: FusedClass) -> FusedClass:
        cls.original = original
        cls.original_forward = original.forward
        cls.__name__ = original.__name__
        if cls.passes_for_original:
            cls.__module__, cls.__qualname__ = original.__module__, original.__qualname__
        show_original_to_tracers(cls, original, equivalent)
        return cls

    return decorate


def fused_class(module: Any, mixin: type[FusedModule]) -> tuple[type, ...]:
    """Returns the class of a module if `fuse` made it from the mixin and it has not changed since."""
    cls = type(module)
    return (cls,) if issubclass(cls, mixin) and "original" in vars(cls) else ()


class Forms:
    """The fused classes of one library's file.

    Each one is created when its original is first seen, because the library may be missing and is slow to import. It
    becomes a global of the file, named "Fused" and the original's name, where pickle finds it.

    Args:
        file: Globals of the file.
        mixins: Mixin of a fused class by the dotted path of its original.
    """

    def __init__(self, file: dict[str, Any], mixins: Mapping[str, type[FusedModule]]) -> None:
        self._file, self._mixins = file, mixins

    def of(self, original: type[nn.Module]) -> type[FusedModule] | None:
        """Returns the fused class for instances of exactly this class, or None."""
        mixin = self._mixins.get(f"{original.__module__}.{original.__qualname__}")
        if mixin is None:
            return None
        name = f"Fused{original.__name__}"
        made: type[FusedModule] | None = self._file.get(name)
        if made is None or made.original is not original:
            about = {"__module__": self._file["__name__"], "__qualname__": name, "__doc__": mixin.__doc__}
            made = fused_form_of(original)(type(name, (mixin, original), about))
            self._file[name] = made
        return made

    def named(self, name: str) -> type[FusedModule]:
        """Returns the fused class with this name; imports its library.

        Raises:
            AttributeError: there is none.
        """
        for path in self._mixins:
            module, _, original = path.rpartition(".")
            if name == f"Fused{original}" and (made := self.of(getattr(importlib.import_module(module), original))):
                return made
        raise AttributeError(f"module {self._file['__name__']!r} has no attribute {name!r}")


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the first parameter or buffer; the CPU if there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first parameter; None if there is none, as in quantized layers."""
    return next((parameter.dtype for parameter in module.parameters()), None)


def triton_reasons(head_width: int | None, dtype: torch.dtype | None) -> list[str]:
    """Returns all reasons why the kernels cannot run heads of this width (None: no attention) and this weight dtype."""
    reasons = []
    if head_width is not None and not MIN_HEAD_DIM <= head_width <= MAX_HEAD_DIM:
        reasons.append(
            f"head_dim must be between {MIN_HEAD_DIM} and {MAX_HEAD_DIM} for the triton kernel, got {head_width}"
        )
    if dtype is not None and dtype not in DTYPES:
        reasons.append(f"the weights must be fp32, fp16 or bf16 for the triton kernels, got {dtype}")
    return reasons


class FusedNormMlp(FusedModule):
    """A module whose norm and MLP run as one operator; for a block, all kernels run in sequence if nothing intervenes.

    If a child gets a hook, a wrapper or another class after fuse, the modules that contain it run their original
    forward.
    """

    kind = "norm + MLP"
    reader: ClassVar[type[Reader]] = Reader
    vit_fast_parts: BlockParts | None = None

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        """Reads norm and MLP; returns None if they must stay modules, with the reasons in the reader."""
        raise NotImplementedError

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        """Reads the first half of a block; returns None if it must stay modules."""
        return None

    @classmethod
    def examine(cls, module: Any) -> Finding:
        reader = cls.reader(module)
        cls.read_mlp(reader)
        return Finding(reader.reasons, reader.notes, reader.modules)

    def read(self) -> BlockParts:
        """Reads the module as it is now."""
        return read_block(self, self.read_mlp, self.read_attention, self.reader)

    def ready(self) -> BlockParts | None:
        """Returns the parts; None if the original forward must run because of dropout, a hook or a wrapped child."""
        parts = parts_of(self)
        if parts.fp8 is not None:
            parts.fp8.check(self.vit_fast_backend)
        return None if parts.mlp is None or drops(parts.mlp.dropouts) else parts

    def runs_as_it_was(self) -> bool:
        return self.ready() is None

    def is_idle(self) -> bool:
        """True for sdpa without FP8 (which is emulated there) and packed weights: the original modules are as fast."""
        if self.vit_fast_backend != "sdpa" or PLACE in self._modules:
            return False
        if torch.compiler.is_compiling():  # a compiled block does not run packed
            return True
        parts = self.__dict__.get("vit_fast_parts")
        return parts is None or (parts.frozen is None and parts.fp8 is None)

    def drop_frozen(self) -> None:
        """Drops the folded or packed weights, because the weights are about to change or move."""
        parts = self.__dict__.get("vit_fast_parts")
        if parts is not None:
            parts.frozen = parts.reader = None

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.drop_frozen()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> FusedModule:
        """Drops cached weights on .to(), .cuda() and similar."""
        self.drop_frozen()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Drops cached weights when any module that contains this block loads a state dict."""
        self.drop_frozen()
        make_room(self, *args[:2])
        super()._load_from_state_dict(*args)

    def packable(self) -> BlockParts | None:
        parts = parts_of(self)
        attention: Any = parts.attention
        backend = self.vit_fast_backend
        return parts if is_packable(parts, backend) and attention.module.vit_fast_backend == backend else None

    def whole(self) -> BlockParts | None:
        """Returns the parts if kernels can run the whole block now."""
        parts = parts_of(self)
        return parts if self._runs_whole(parts) else None

    def _runs_whole(self, parts: BlockParts) -> bool:
        attention: Any = parts.attention
        backend = self.vit_fast_backend
        return runs_whole(parts, backend) and attention.module.vit_fast_backend == backend

    def norm_mlp(self, parts: BlockParts, x: Tensor) -> Tensor:
        """Computes x + drop_path(layer_scale * MLP(LN(x))) for x [..., C] with the parts of ready()."""
        mlp: Any = parts.mlp
        return run_mlp(mlp, x, self.vit_fast_backend)

    def run_as_block(
        self,
        parts: BlockParts,
        x: Tensor,
        attend: Callable[[Tensor], Tensor],
        ordinary: bool = True,
        rope: Rope | None = None,
        keys: Keys | None = None,
    ) -> Tensor:
        """Runs the module as a block, [B, N, C] -> [B, N, C].

        Args:
            parts: Result of ready().
            attend: Maps x to x + attention with the original modules, if they must run.
            ordinary: True if the call has no arguments besides x, rope and keys.
            rope: Rotary positions, if any.
            keys: Keys that queries attend to.
        """
        if ordinary and self.vit_fast_backend == "sdpa":
            output = run_packed_block(parts, x, rope, keys)
            if output is not None:
                return output
        by_modules = None if ordinary and self._runs_whole(parts) else attend
        return forward_block(self, parts, x, rope=rope, keys=keys, backend=self.vit_fast_backend, attend=by_modules)


class FusedBlocks(FusedModule):
    """A Sequential of fused blocks only, which passes LayerNorm statistics from each block to the next."""

    kind = "blocks"

    def forward(self, input: Tensor, *rope: Tensor) -> Tensor:
        """Maps [B, N, C] to [B, N, C]."""
        blocks: Any = self  # also a Sequential
        return run_blocks(blocks, input, *rope)
