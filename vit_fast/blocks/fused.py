"""Fused classes: subclasses of a library's classes with another `forward`.

`fuse` changes the class of a module to its fused class, and `unfuse` restores the original class. Object, Parameters,
children, hooks and state_dict keys of the module stay the same, so optimizers, DDP and FSDP still work.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..ops.attention_operator import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..ops.backends import resolve_backend
from ..ops.descriptions import DTYPES
from .block import parts_of, run_as_block, run_blocks, run_mlp, runs_whole
from .fp8_scales import PLACE, prepare_to_load
from .parts import AttentionParts, BlockParts, MlpParts
from .plain import has_global_hooks
from .reading import Reader, read_block

Function = TypeVar("Function", bound=Callable[..., Any])

_LEAVES = ("torch.nn.", "torch.ao.nn.")  # torch.fx never traces into modules whose class is in these packages


@dataclass(frozen=True)
class Finding:
    """Result of inspecting a module before it is fused."""

    reasons: Sequence[str] = ()  # why the module cannot be fused
    notes: Sequence[str] = ()  # for the report
    bypassed: Sequence[nn.Module] = ()  # submodules whose forward will no longer be called
    condition: str = ""  # calls that run fused, if it is unknown whether there are any


class FusedModule(nn.Module):
    """Base of the fused classes."""

    original: ClassVar[type[nn.Module]]  # the class that is replaced
    original_forward: ClassVar[Callable[..., Any]]
    kind: ClassVar[str]  # the part that the operators compute, for the report
    equivalent: ClassVar[bool] = True  # True if `forward` computes the same as the original
    host_reads: ClassVar[str] = ""  # values that `forward` reads on the host; CUDA graphs do not repeat this
    # Use the original's __module__ and __qualname__, by which transformers finds the outputs and weights of a model
    passes_for_original: ClassVar[bool] = False
    vit_fast_request: str = "auto"  # the requested backend
    vit_fast_backend: str = "sdpa"  # the resolved backend

    if TYPE_CHECKING:  # attributes of the original class, which nn.Module types as Tensor | Module

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes `cls` the fused class of its last base if this base is a class of a library."""
        original: Any = cls.__bases__[-1]
        is_form = not hasattr(cls, "original") and not issubclass(original, FusedModule) and original is not nn.Module
        if is_form:
            _show_original(cls, original)  # before transformers wraps forward for gradient checkpointing
        super().__init_subclass__(**kwargs)
        if is_form:
            cls.original, cls.original_forward = original, original.forward
            # wrapping policies (of transformers and accelerate's FSDP) find layers by __name__, pickle by __qualname__
            cls.__name__ = original.__name__
            if cls.passes_for_original:
                cls.__module__, cls.__qualname__ = original.__module__, original.__qualname__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = self.examine(self).reasons
        if reasons:
            raise ValueError(f"{type(self).__qualname__} cannot be built: " + "; ".join(reasons))
        self.prepare("auto")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies by mixin and original, because pickle does not find a class that was created."""
        reduced: Any = super().__reduce_ex__(protocol)
        if "original" not in vars(type(self)):  # fully_shard has changed its class
            return reduced
        return _new, type(self).__bases__, *reduced[2:]

    @classmethod
    def replaces(cls, original: type[nn.Module]) -> bool:
        """Returns False for a class that has the name of a supported class, but not its forward."""
        return True

    @classmethod
    def kind_of(cls, module: Any) -> str:
        """Returns the `kind` of a module."""
        return cls.kind

    @classmethod
    def examine(cls, module: Any) -> Finding:
        """Inspects an instance of `original`."""
        return Finding()

    @classmethod
    def examine_call(cls, owner: nn.Module, problem: str | None) -> Finding:
        """Inspects how a module is called in its `owner`.

        `problem` states why the call in the example has more than tokens and constants as inputs and outputs; it is ""
        for other calls, and None if the call is unknown.
        """
        return Finding()

    @classmethod
    def head_width(cls, module: Any) -> int | None:
        """Returns head_dim; None without attention."""
        return getattr(module, "head_dim", None)

    @classmethod
    def triton_reasons(cls, module: Any) -> list[str]:
        """Returns all reasons why the kernels do not support head_dim or the dtype of the weights."""
        width, dtype = cls.head_width(module), dtype_of(module)
        limits = f"head_dim must be between {MIN_HEAD_DIM} and {MAX_HEAD_DIM} for the triton kernel"
        reasons = [] if width is None or MIN_HEAD_DIM <= width <= MAX_HEAD_DIM else [f"{limits}, got {width}"]
        if dtype is not None and dtype not in DTYPES:
            reasons.append(f"the weights must be fp32, fp16 or bf16 for the triton kernels, got {dtype}")
        return reasons

    def prepare(self, request: str) -> None:
        self.set_up()
        self.set_fused_backend(request)

    def set_up(self) -> None:
        """Records what forward needs beyond the original's attributes."""

    def set_fused_backend(self, request: str) -> None:
        """Sets the backend. "auto" selects triton or sdpa by device, dtype and head_dim."""
        self.vit_fast_request = self.vit_fast_backend = request
        if request == "auto":
            unable = type(self).triton_reasons(self)
            self.vit_fast_backend = "sdpa" if unable else resolve_backend("auto", device_of(self), dtype_of(self))

    def is_idle(self) -> bool:
        """True if the original forward is as fast as the fused forward with the backend sdpa."""
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> FusedModule:
        """Resolves "auto" again after .to(), .cuda() and similar, because it depends on device and dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves _apply untyped
        self.set_fused_backend(self.vit_fast_request)
        return self

    def _get_name(self) -> str:
        return type(self).__qualname__


def _show_original(cls: type[Any], original: type[nn.Module]) -> None:
    """Wraps a fused forward, so that torch.fx and torch.jit.script trace the original forward.

    If `cls` is not equivalent to `original`, torch.fx treats the module as a leaf, and torch.jit.script fails. After
    `unfuse`, or if a user replaced `original.forward`, the wrapper calls `original.forward`.
    """
    fused_forward, original_forward = cls.forward, original.forward
    leaf = original.__module__.startswith(_LEAVES) and not issubclass(original, nn.Sequential)
    proxies, stays_whole = Proxy, leaf or not cls.equivalent
    is_hooked = has_global_hooks if cls.equivalent else bool  # not a global, see `shown`

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, cls) or original.forward is not original_forward:
            return original.forward(self, *args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, proxies):
                break
        else:
            idle = (self.vit_fast_backend == "sdpa" and self.is_idle()) or is_hooked()
            run: Any = original_forward if idle else fused_forward
            return run(self, *args, **kwargs)
        tracer: Any = argument.tracer
        if stays_whole and self is not tracer.root:
            # torch.fx does not treat this class as a leaf: record a call of the module, which stays fused
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return original_forward(self, *args, **kwargs)

    if not cls.equivalent or original.__module__.startswith("transformers."):  # not supported by torch.jit.script
        cls.forward = functools.update_wrapper(forward, fused_forward)
        return
    # torch.jit.script unwraps to the original's source, and resolves names of that source in the globals of `shown`
    shown = FunctionType(forward.__code__, original_forward.__globals__, "forward", None, forward.__closure__)
    cls.forward = functools.update_wrapper(shown, original_forward)
    # torch.jit.script reads attribute types from the first class that has annotations: nn.Module at the latest
    cls.__annotations__ = dict(next(filter(None, map(inspect.get_annotations, original.__mro__))))


def fused_class(module: Any, mixin: type[FusedModule]) -> tuple[type, ...]:
    """Returns (type(module),) if this type is a fused class of `mixin`, but not a subclass of one; else ()."""
    cls = type(module)
    return (cls,) if issubclass(cls, mixin) and "original" in vars(cls) else ()


cached: Callable[[Function], Function] = functools.cache  # type: ignore[assignment]  # classes are hashable


@cached
def form_of(mixin: type[FusedModule], original: type[nn.Module]) -> type[FusedModule]:
    """Returns the fused class of a library's class; creates it at the first call."""
    name = f"Fused{original.__name__}"
    return type(
        name, (mixin, original), {"__module__": mixin.__module__, "__qualname__": name, "__doc__": mixin.__doc__}
    )


def _new(mixin: type[FusedModule], original: type[nn.Module]) -> FusedModule:
    form = form_of(mixin, original)
    return form.__new__(form)


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the first parameter or buffer; the CPU if there is none."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def dtype_of(module: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in module.parameters()), None)


def resolve_again(model: nn.Module) -> None:
    """Selects the backends of modules with backend "auto" again, e.g. because autocast is enabled now."""
    for module in model.modules():
        if isinstance(module, FusedModule):
            module.set_fused_backend(module.vit_fast_request)


class FusedNormMlp(FusedModule):
    """A module whose norm and MLP run as one operator; if possible, one operator runs the whole block."""

    kind = "norm + MLP"
    reader: ClassVar[type[Reader]] = Reader
    stands_alone: ClassVar[bool] = False  # True if forward runs only the halves that were read
    in_sequence: ClassVar[bool] = True  # False if `FusedBlocks` must call forward, which checks more than the parts
    vit_fast_parts: BlockParts | None = None
    vit_fast_idle: bool = True  # True if the original is as fast with the backend sdpa, unless weights are cached

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        """Reads the second half of a block. If this half must run as modules, adds reasons and returns None."""
        raise NotImplementedError

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        """Reads the first half of a block. If this half must run as modules, returns None."""
        return None

    @classmethod
    def examine(cls, module: Any) -> Finding:
        reader = cls.reader(module)
        cls.read_mlp(reader)
        return Finding(reader.reasons, reader.notes, [child for _, _, child in reader.edges.values()])

    read = read_block  # a method

    def ready(self) -> BlockParts | None:
        """Returns the parts; None if dropout, hooks or wrapped children require the original forward."""
        parts = parts_of(self)
        if parts.fp8 is not None:
            parts.fp8.check(self.vit_fast_backend)
        return None if parts.mlp is None or parts.mlp.drops() else parts

    def is_idle(self) -> bool:
        if not self.vit_fast_idle or PLACE in self._modules:
            return False
        if torch.compiler.is_compiling():  # compiled blocks use no packed weights
            return True
        parts = self.__dict__.get("vit_fast_parts")
        return parts is None or (parts.frozen is None and parts.fp8 is None)

    def gains_by_packing(self) -> bool:
        """True unless the module is faster without its packed weights."""
        return True

    def drop_frozen(self) -> None:
        parts = self.__dict__.get("vit_fast_parts")
        if parts is not None:
            parts.frozen = parts.reader = None

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.drop_frozen()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> FusedModule:
        self.drop_frozen()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.drop_frozen()
        prepare_to_load(self, *args[:2])
        super()._load_from_state_dict(*args)

    def whole(self) -> BlockParts | None:
        """Returns the parts if one operator can run the whole block now; else None."""
        parts = parts_of(self)
        return parts if runs_whole(parts, self.vit_fast_backend) else None

    def norm_mlp(self, parts: BlockParts, x: Tensor) -> Tensor:
        """Computes x + drop_path(layer_scale * MLP(LN(x))) for x [..., C]; `parts` are from `ready`."""
        return run_mlp(parts.halves[1], x, self.vit_fast_backend)

    run_as_block = run_as_block  # a method


class FusedContainer(FusedModule):
    """A module that contains fused blocks. Containers have no row in the report of `fuse`."""

    kind = "blocks"

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        """Returns True if the fused class can run `module`; `blocks` are all fused blocks."""
        raise NotImplementedError


class FusedBlocks(FusedContainer):
    """A Sequential of fused blocks, which passes LayerNorm statistics from block to block."""

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        return len(module) > 1 and all(block in blocks for block in module)

    def forward(self, input: Tensor, *rope: Tensor) -> Tensor:
        blocks: Any = self  # also a Sequential
        return run_blocks(blocks, input, *rope)
