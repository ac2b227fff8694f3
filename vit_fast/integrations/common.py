"""What every integration shares: the mixin of fused classes, and the reasons why a module is left as it is.

A module is fused by giving this one instance another class, a subclass of its own with another `forward`. Nothing else
about it changes: the object, its Parameters, its children, its hooks and its state_dict keys are the ones that were
there, so optimizers, EMA copies, DDP and FSDP notice nothing, and undoing it is giving the class back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import forward_is_replaced, is_plain, is_touched
from ..ops import layer_norm_mlp, reference
from ..ops.backends import resolve_backend
from .tracing import show_original_to_tracers

FusedClass = TypeVar("FusedClass", bound="type[FusedModule]")

ACTIVATION_CLASSES = {
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}
ACTIVATION_FUNCTIONS: dict[Any, str] = {F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", F.silu: "silu"}
NORM_CLASSES = ("torch.nn.modules.normalization.LayerNorm", "timm.layers.norm.LayerNorm")


class FusedModule(nn.Module):
    """A class that a module of another library is given by `fuse`, or that such a library constructs itself.

    Attributes:
        original: The class whose instances can be given this one.
        kind: What is computed by our operators, for the report.
        vit_fast_request: The backend that was asked for, "auto" included.
        vit_fast_backend: The backend that it stands for where the module is now.
    """

    original: ClassVar[type[nn.Module]]
    original_forward: ClassVar[Callable[..., Any]]
    kind: ClassVar[str]
    vit_fast_request: str = "auto"
    vit_fast_backend: str = "sdpa"

    if TYPE_CHECKING:  # the other base's attributes, which nn.Module types as Tensor | Module

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = type(self).reasons(self)
        if reasons:
            raise ValueError(f"{type(self).__qualname__} cannot be built so: " + "; ".join(reasons))
        self.prepare()
        self.set_fused_backend("auto")

    @classmethod
    def reasons(cls, module: Any) -> list[str]:
        """Why this instance of `original` must stay as it is; empty when it can be fused."""
        raise NotImplementedError

    @classmethod
    def bypassed(cls, module: Any) -> list[nn.Module]:
        """Children whose own forward no longer runs."""
        return []

    @classmethod
    def notes(cls, module: Any) -> list[str]:
        """What a user of the fused module should know."""
        return []

    @classmethod
    def head_width(cls, module: Any) -> int | None:
        """Width of an attention head, in channels; None where there is no attention."""
        return None

    def prepare(self) -> None:
        """Records what forward needs beyond the original's attributes; runs once the class is set."""

    def set_fused_backend(self, request: str) -> None:
        """Resolves "auto" for the device, the dtype and the head width: triton where it can run, else sdpa."""
        self.vit_fast_request = request
        self.vit_fast_backend = resolve_backend(request, device_of(self), dtype_of(self))
        if request == "auto" and triton_reasons(type(self).head_width(self), dtype_of(self)):
            self.vit_fast_backend = "sdpa"

    def _apply(self, fn: Any, recurse: bool = True) -> FusedModule:
        """Runs on .to(), .cuda() and the like: "auto" is resolved again, since it depends on the device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves _apply untyped
        self.set_fused_backend(self.vit_fast_request)
        return self

    def _get_name(self) -> str:
        return type(self).__qualname__


def fused_form_of(original: type[nn.Module], *, equivalent: bool = True) -> Callable[[FusedClass], FusedClass]:
    """Class decorator: ties a fused class to the class it stands for.

    It takes over the original's __name__, because wrapping policies (transformers' _no_split_modules, accelerate's
    FSDP) find layers by it; pickle goes by __qualname__, which stays its own. torch.fx and torch.jit.script meet the
    original's forward, see `tracing.py`.

    Args:
        original: The class.
        equivalent: Whether its forward gives the same results.
    """

    def decorate(cls: FusedClass) -> FusedClass:
        cls.original = original
        cls.original_forward = original.forward
        cls.__name__ = original.__name__
        show_original_to_tracers(cls, original, equivalent)
        return cls

    return decorate


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter, or buffer; the CPU where there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first parameter; None where there is none, as in quantised layers."""
    return next((parameter.dtype for parameter in module.parameters()), None)


def at(root: Any, path: str) -> Any:
    """The attribute at a dotted path, or None when some part of the path is missing."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def class_path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def touch_reasons(name: str, module: nn.Module) -> list[str]:
    """is_touched, in words."""
    reasons = []
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        reasons.append(f"{name} carries hooks, which would no longer run")
    if forward_is_replaced(module):
        reasons.append(f"{name}.forward was replaced on the instance")
    for own, parameter in module._parameters.items():
        reasons += tensor_reasons(f"{name}.{own}", parameter)
    return reasons


def activation_name(activation: Any) -> str | None:
    """The operator's name of an activation module or function; None when it has none."""
    if type(activation) is nn.GELU:
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if isinstance(activation, nn.Module):
        return ACTIVATION_CLASSES.get(class_path(activation))
    return ACTIVATION_FUNCTIONS.get(activation)


def dropout_notes(name: str, p: float) -> list[str]:
    return [f"in training it runs as it was, because {name} drops with probability {p}"] if p else []


def linear_reasons(name: str, linear: Any) -> list[str]:
    """Why a linear's weight cannot be read past its forward: it is wrapped (LoRA), quantised or parametrized."""
    if type(linear) is not nn.Linear:
        return [f"{name} is a {class_path(linear)}: accepted is torch.nn.Linear itself"]
    return []


def tensor_reasons(name: str, tensor: Tensor | None) -> list[str]:
    if is_plain(tensor):
        return []
    return [f"{name} is a {type(tensor).__name__}: accepted is an ordinary tensor"]


def norm_reasons(name: str, norm: Any) -> list[str]:
    if class_path(norm) not in NORM_CLASSES:
        return [f"{name} is {describe(norm)}: accepted is LayerNorm"]
    if len(norm.normalized_shape) != 1:
        return [f"{name} normalises over {tuple(norm.normalized_shape)}: accepted is the last axis"]
    if getattr(norm, "_fast_norm", False):
        return [f"{name} uses timm's fast norm, which rounds its statistics: call timm.layers.set_fast_norm(False)"]
    return []


def describe(thing: object) -> str:
    if thing is None:
        return "absent"
    name = type(thing).__qualname__
    return ("an " if name[:1] in "AEIO" else "a ") + name


def triton_reasons(head_width: int | None, dtype: torch.dtype | None) -> list[str]:
    """Why the kernels cannot do a module of this head width (None: it has no attention) and weight dtype."""
    from ..ops.attention_op import DTYPES, MAX_HEAD_DIM, MIN_HEAD_DIM

    reasons = []
    if head_width is not None and not MIN_HEAD_DIM <= head_width <= MAX_HEAD_DIM:
        reasons.append(f"a head is {head_width} wide: the triton kernel takes {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    if dtype is not None and dtype not in DTYPES:
        reasons.append(f"the weights are {dtype}: the triton kernels take fp32, fp16 and bf16")
    return reasons


@dataclass(frozen=True)
class NormMlp:
    """Where a block keeps the parts of x + drop_path(layer_scale * fc2(act(fc1(norm(x))))).

    All are dotted attribute paths from the block. Modules in `containers` and `identities` hold or pass on what is
    between the parts; `layer_scale` names the Parameter.
    """

    norm: str
    fc1: str
    activation: str
    fc2: str
    containers: tuple[str, ...] = ()
    identities: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    layer_scale: str | None = None
    drop_path: str | None = None

    def fits(self, block: nn.Module) -> bool:
        """Whether the block has these attributes."""
        return all(at(block, path) is not None for path in (self.norm, self.fc1, self.activation, self.fc2))

    def modules(self, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose forward is bypassed, with their paths."""
        paths = (self.norm, self.fc1, self.activation, self.fc2, *self.containers, *self.identities, *self.dropouts)
        for path in (*paths, *([self.drop_path] if self.drop_path else [])):
            module = at(block, path)
            if isinstance(module, nn.Module):
                yield path, module

    def reasons(self, block: nn.Module, container_classes: tuple[type, ...]) -> list[str]:
        """Why these parts cannot be computed by one operator.

        Args:
            block: The owner of the parts.
            container_classes: What `containers` may be.
        """
        reasons = []
        for path in self.containers:
            container = at(block, path)
            if type(container) not in container_classes:
                reasons.append(f"{path} is {describe(container)}: not a layer that vit_fast knows")
        if reasons:
            return reasons
        reasons += norm_reasons(self.norm, at(block, self.norm))
        reasons += linear_reasons(self.fc1, at(block, self.fc1))
        reasons += linear_reasons(self.fc2, at(block, self.fc2))
        activation = at(block, self.activation)
        if activation_name(activation) is None:
            known = ", ".join(reference.ACTIVATIONS)
            reasons.append(f"{self.activation} is {describe(activation)}: accepted are {known}")
        for path in self.identities:
            if type(at(block, path)) is not nn.Identity:
                reasons.append(f"{path} is {describe(at(block, path))}: accepted is none")
        for path in self.dropouts:
            dropout = at(block, path)
            if type(dropout) is not nn.Dropout:
                reasons.append(f"{path} is {describe(dropout)}: accepted is torch.nn.Dropout")
        if self.drop_path:
            drop_path = at(block, self.drop_path)
            if type(drop_path) is not nn.Identity and not hasattr(drop_path, "drop_prob"):
                reasons.append(f"{self.drop_path} is {describe(drop_path)}: accepted is a DropPath with drop_prob")
        if self.layer_scale:
            scale = at(block, self.layer_scale)
            if scale is not None and not isinstance(scale, Tensor):
                reasons += [] if scale == 1.0 else [f"{self.layer_scale} is {scale!r}: accepted is a Parameter"]
        for path, module in self.modules(block):
            reasons += touch_reasons(path, module)
        return reasons

    def notes(self, block: nn.Module) -> list[str]:
        return [note for path in self.dropouts for note in dropout_notes(path, at(block, path).p)]


class FusedNormMlp(FusedModule):
    """A block whose second half, x + MLP(LN(x)), is one operator.

    A child that gets a hook, a wrapper or another class after fuse is honoured: the block then runs as it was.
    """

    kind = "norm + MLP"
    vit_fast_parts: NormMlp
    vit_fast_activation: str
    vit_fast_children: tuple[tuple[tuple[str, ...], type], ...]  # path and class of every bypassed child

    @classmethod
    def parts_of(cls, module: Any) -> NormMlp | None:
        """Where this instance keeps its parts; None when it has no norm and MLP of a known shape."""
        raise NotImplementedError

    @classmethod
    def container_classes(cls, module: Any) -> tuple[type, ...]:
        """What the MLP's containers may be."""
        raise NotImplementedError

    @classmethod
    def reasons(cls, module: Any) -> list[str]:
        parts = cls.parts_of(module)
        if parts is None:
            mlp = getattr(module, "mlp", None)
            return [f"its MLP is {describe(mlp)}: accepted is fc2(activation(fc1(x))) where vit_fast knows it"]
        return parts.reasons(module, cls.container_classes(module))

    @classmethod
    def bypassed(cls, module: Any) -> list[nn.Module]:
        parts = cls.parts_of(module)
        return [] if parts is None else [child for _, child in parts.modules(module)]

    @classmethod
    def notes(cls, module: Any) -> list[str]:
        parts = cls.parts_of(module)
        return [] if parts is None else parts.notes(module)

    def prepare(self) -> None:
        parts = type(self).parts_of(self)
        activation = None if parts is None else activation_name(at(self, parts.activation))
        if parts is None or activation is None:
            raise ValueError(f"{type(self).__qualname__} cannot be prepared: " + "; ".join(type(self).reasons(self)))
        self.vit_fast_parts, self.vit_fast_activation = parts, activation
        self.vit_fast_children = tuple((tuple(path.split(".")), type(child)) for path, child in parts.modules(self))

    def runs_as_it_was(self) -> bool:
        """Whether something between the parts has to run: dropout in training, a hook, a wrapped or replaced child."""
        if not self.untouched(self.vit_fast_children):
            return True
        # an activation may be a function, or differ by an attribute of the same class
        return activation_name(at(self, self.vit_fast_parts.activation)) != self.vit_fast_activation

    def untouched(self, children: tuple[tuple[tuple[str, ...], type], ...]) -> bool:
        """Whether children, by path, are of the classes they were, carry no hooks, and drop nothing."""
        for path, expected in children:
            child: nn.Module = self
            for name in path:
                found = child._modules.get(name)  # a dict look-up: this runs in every forward
                if found is None:
                    return False
                child = found
            if type(child) is not expected or is_touched(child):
                return False
            if expected is nn.Dropout and child.p and child.training:
                return False
        return True

    def norm_mlp(self, x: Tensor) -> Tensor:
        """x + drop_path(layer_scale * MLP(LN(x))) for x [..., C]."""
        parts = self.vit_fast_parts
        norm, fc1, fc2 = at(self, parts.norm), at(self, parts.fc1), at(self, parts.fc2)
        drop_path = at(self, parts.drop_path) if parts.drop_path else None
        layer_scale = at(self, parts.layer_scale) if parts.layer_scale else None
        dropping = drop_path is not None and drop_path.training and getattr(drop_path, "drop_prob", 0)
        branch_or_sum = layer_norm_mlp(
            x, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias,
            eps=norm.eps, activation=self.vit_fast_activation,
            layer_scale=layer_scale if isinstance(layer_scale, Tensor) else None,
            residual=not dropping, backend=self.vit_fast_backend,
        )  # fmt: skip
        return branch_or_sum if drop_path is None or not dropping else x + drop_path(branch_or_sum)
