"""An image model of any library: input size, preprocessing, class names, and a common way to call it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...config import DataConfig, Size, ViTConfig
from ...errors import UnsupportedInputError

Output = Literal["logits", "probabilities", "features", "tokens", "intermediate"]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Requested outputs; no names mean the first that the model has of logits, pooled features and tokens."""

    names: tuple[Output, ...] = ()
    layers: tuple[int, ...] = ()  # encoder blocks whose outputs are "intermediate"; negative: counted from the last
    normed: bool = False  # apply the norm that follows the last block to "intermediate"
    spatial: bool = False  # patch tokens as [B, C, rows, columns] instead of [B, N, C]


@dataclass(kw_only=True)
class ImageModel:
    """A model with the facts that export needs. Each library whose models lack timm's methods has a subclass."""

    model: nn.Module
    library: str  # "vit-fast", "timm", "transformers" or "torchvision"
    name: str  # of the model if it stores one, otherwise of its class
    image_hw: Size
    in_chans: int
    patch_hw: Size  # of the image region that one token covers
    blocks: str  # name of the list of encoder blocks
    num_classes: int  # 0 if there is no head
    data_config: DataConfig | None = None  # None if unknown
    no_data_config: str = "the model has no data_config"  # the reason if it is unknown
    class_names: tuple[str, ...] | None = None  # None if unknown
    config: dict[str, Any] = field(default_factory=dict)  # of the library, as plain data

    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        """Prepares the model for export, with any image size if requested; `undo` restores it."""

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Outputs, dynamic_size: bool) -> Any:
        """Runs the model; a model of a library takes images and returns the wanted outputs."""
        return self.outputs(args[0], wanted, dynamic_size)

    @property
    def depth(self) -> int:
        blocks: Any = self.model.get_submodule(self.blocks)
        return len(blocks)

    def run(self, images: Tensor, wanted: Collection[str], dynamic_size: bool) -> dict[str, Tensor]:
        """Maps images [B, in_chans, height, width] to those of "logits", "features" and "tokens" that the model has.

        May omit outputs that are not wanted. Returns features [B, C], and tokens [B, N, C] or [B, rows, columns, C].
        """
        model: Any = self.model
        if set(wanted) == {"logits"}:
            return {"logits": model(images)}
        tokens = model.forward_features(images)
        found = {"features": model.forward_head(tokens, pre_logits=True)}
        if self.num_classes:
            found["logits"] = model.forward_head(tokens)
        if tokens.ndim == 4 and getattr(model, "output_fmt", "NCHW") == "NCHW":
            tokens = tokens.movedim(1, -1)
        return {name: y for name, y in found.items() if y.ndim == 2} | {"tokens": tokens}

    def set_data_config(self, data_config: DataConfig | None) -> None:
        """Sets the preprocessing, without the normalization if `fuse` folded it into the model."""
        if data_config is not None and any(hasattr(module, "vit_fast_mean") for module in self.model.modules()):
            zeros, scale = (0.0,) * self.in_chans, (1 / 255,) * self.in_chans
            data_config = dataclasses.replace(data_config, mean=zeros, std=scale)
        self.data_config = data_config

    def outputs(self, images: Tensor, wanted: Outputs, dynamic_size: bool = False) -> dict[str, Tensor]:
        """Maps images [B, in_chans, height, width] to the requested outputs.

        Names are "logits", "probabilities", "features", "tokens" and "prefix_tokens" [B, P, C], for each layer i
        "intermediate_i" and "intermediate_i_prefix". Prefix tokens are class and register tokens, if there are any.

        Raises:
            UnsupportedInputError: the model does not have an output.
        """
        blocks: Any = self.model.get_submodule(self.blocks) if wanted.layers else ()
        inner = {module for block in blocks for module in block.modules()}
        watched = [*blocks, *(each for each in self.model.modules() if blocks and _is_norm(each) and each not in inner)]
        calls: dict[nn.Module, Any] = {}  # outputs of blocks, and of norms outside of them, in the order of the calls
        by_default = ("logits",) if self.num_classes else ("features", "tokens")
        sources = {name: "logits" if name == "probabilities" else name for name in wanted.names or by_default}

        def record(module: nn.Module, _: Any, y: Any) -> None:
            calls.setdefault(module, y)

        with contextlib.ExitStack() as stack:
            for module in watched:
                stack.callback(module.register_forward_hook(record).remove)
            found = self.run(images, [source for source in sources.values() if source != "intermediate"], dynamic_size)
        if not wanted.names:
            sources = {name: name for name in [name for name in by_default if name in found][:1]}
        results: dict[str, Tensor] = {}
        for name, source in sources.items():
            if name == "intermediate":
                continue
            if source not in found:
                raise UnsupportedInputError(f"output of {self.name}", [f"{name!r} must be one of {', '.join(found)}"])
            if name == "tokens":
                results |= self._separated(found["tokens"], "tokens", "prefix_tokens", images, wanted.spatial)
            else:
                y = found[source]
                in_fp32 = torch.promote_types(y.dtype, torch.float32)
                results[name] = y.softmax(-1, in_fp32) if name == "probabilities" else y
        order = list(calls)
        for i in sorted({layer % len(blocks) for layer in wanted.layers}):
            y = calls[blocks[i]]
            y = y[0] if isinstance(y, tuple) else y
            if wanted.normed:
                if blocks[-1] is order[-1]:
                    raise UnsupportedInputError(f"normed outputs of {self.name}", ["no norm follows the last block"])
                y = order[order.index(blocks[-1]) + 1](y)
            results |= self._separated(y, f"intermediate_{i}", f"intermediate_{i}_prefix", images, wanted.spatial)
        return results

    def _separated(self, y: Tensor, name: str, prefix: str, images: Tensor, spatial: bool) -> dict[str, Tensor]:
        """Separates tokens [B, P + N, C] into patch tokens and prefix tokens; a map [B, rows, columns, C] has none."""
        rows, columns = (side // patch for side, patch in zip(images.shape[2:], self.patch_hw))
        results = {}
        if y.ndim == 4:
            y = y.movedim(-1, 1) if spatial else y.flatten(1, 2)
        else:
            if (count := y.shape[1] - rows * columns) < 0:
                reason = f"there must be {rows * columns} patch tokens, got {y.shape[1]}"
                raise UnsupportedInputError(f"{name} of {self.name}", [reason])
            if count:
                results[prefix] = y[:, :count]
            y = y[:, count:]
            y = y.transpose(1, 2).unflatten(2, (rows, columns)) if spatial else y
        return {name: y} | results

    def copy_in(self, dtype: torch.dtype) -> ImageModel:
        """Returns this description with a copy of the model in another dtype."""
        memo: dict[int, Any] = {}  # converts tensors without a copy of all in their own dtype
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point() and type(tensor) in (nn.Parameter, Tensor):
                converted = tensor.detach().to(dtype, copy=True)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(converted, tensor.requires_grad) if is_parameter else converted
        return dataclasses.replace(self, model=cast_module(deep_copy(self.model, memo), dtype))

    @contextlib.contextmanager
    def exporting(self, backend: str, dynamic_size: bool) -> Iterator[None]:
        """Sets the backend and, if requested, allows any image size. Restores the model at the end.

        With backend "eager", the model computes the reference, by its own code.
        """
        with contextlib.ExitStack() as undo:
            undo.enter_context(torch.autocast("cpu", enabled=False))  # of the caller
            for module in self.model.modules():
                if hasattr(module, "vit_fast_backend"):
                    switch(undo, module, "vit_fast_backend", backend)
            if backend != "eager" or dynamic_size:
                self.make_exportable(undo, dynamic_size)
            yield


def deep_copy(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Copies a model, also with tensors that are computed from others, such as those of torch.nn.utils.weight_norm."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    computed = {id(x): x.detach() for x in attributes if isinstance(x, Tensor) and not x.is_leaf}
    copied: nn.Module = copy.deepcopy(model, computed | dict(memo or {}))
    return copied


def cast_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a module in place. Complex tensors stay complex: `module.to(dtype)` would discard their imaginary parts."""
    in_complex = torch.complex128 if dtype == torch.float64 else torch.complex64
    module._apply(lambda x: x.to(dtype if x.is_floating_point() else in_complex) if _is_float(x) else x)
    return module


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_norm(module: nn.Module) -> bool:
    return re.search("norm", type(module).__name__, re.IGNORECASE) is not None


@dataclass(kw_only=True)
class Facts:
    """Contents of the configuration files beside weights; None if unknown."""

    config: ViTConfig | None = None
    data_config: DataConfig | None = None
    class_names: tuple[str, ...] | None = None  # of the head's outputs
    notes: list[str] = field(default_factory=list)  # for the report


def required_input_reasons(model: nn.Module) -> list[str]:
    """Returns a reason if the forward of a model requires more arguments than images."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [each for each in inspect.signature(model.forward).parameters.values() if each.kind in kinds]
    names = [each.name for each in parameters[1:] if each.default is inspect.Parameter.empty]
    if not names:
        return []
    packed = {"grid_thw", "spatial_shapes"} & set(names)
    advice = ": to export, use vit_fast.FixedGrid; for CUDA graphs, pass budgets to GraphRunner" if packed else ""
    return [f"the model's forward must require only images, but also requires {' and '.join(names)}{advice}"]


def comes_from(package: str, model: nn.Module, *class_names: str) -> bool:
    """Returns True if a model's class or one of its bases is from a package and has one of the names, if given."""
    bases = [cls for cls in type(model).__mro__ if cls.__module__.partition(".")[0] == package]
    return any(not class_names or cls.__name__ in class_names for cls in bases)


def switch(undo: contextlib.ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute until `undo` closes."""
    undo.callback(setattr, owner, attribute, getattr(owner, attribute))
    setattr(owner, attribute, value)
