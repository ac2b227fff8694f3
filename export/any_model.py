"""Any model, described by an example of its inputs: its file has all tensors of the call as inputs and outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries.interface.image_model import ImageModel, Outputs
from vit_fast.libraries.known import find, prepare_attention

from .options import ExportOptions


@dataclasses.dataclass(kw_only=True)
class AnyModel(ImageModel):
    """A model with the arguments of one call; the first floating-point tensor with 4 axes is taken for images."""

    is_known = False
    leaves: list[Any]  # of the arguments
    spec: Any  # their structure
    names: dict[int, str]  # of the tensors among the leaves, by index
    images: int | None  # index of the images; None if no input is like images
    is_dynamic: bool  # the batch is dynamic

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the example, with at least two in each batch: torch.export would specialize a batch of 1."""
        tensors = self.feed(torch.empty(0))
        return dict(zip(self.names.values(), tensors))

    def feed(self, images: Tensor) -> tuple[Tensor, ...]:
        """Returns all inputs for as many images as given, or for the example's batch; repeats those of the example."""
        count = len(images) or (max(2, self.batch) if self.is_dynamic else self.batch)
        tensors = []
        for i in self.names:
            x: Tensor = self.leaves[i]
            batched = x.ndim and len(x) == self.batch
            has_images = i == self.images and len(images)
            tensors.append(images if has_images else x[torch.arange(count) % self.batch] if batched else x)
        return tuple(tensors)

    def batched(self) -> list[bool]:
        """Returns True for each input whose axis 0 is the batch."""
        return [bool(self.leaves[i].ndim) and len(self.leaves[i]) == self.batch for i in self.names]

    @property
    def example(self) -> Any:
        args, kwargs = self._arguments(tuple(self.inputs.values()))
        return kwargs or args

    def _arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(self.names, inputs))
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            [given.get(i, leaf) for i, leaf in enumerate(self.leaves)], self.spec
        )
        return arguments

    def compute(self, inputs: Sequence[Tensor], wanted: Outputs, dynamic_size: bool) -> dict[str, Tensor]:
        args, kwargs = self._arguments(inputs)
        outputs = dict(named(self.model(*args, **kwargs), ""))
        kinds = {name: type(y).__name__ for name, y in outputs.items() if not isinstance(y, Tensor)}
        if other := [f"{name} must be a tensor, got {kind}" for name, kind in kinds.items()]:
            raise UnsupportedInputError(f"outputs of {self.name}", other)
        if self.num_classes and list(outputs) == ["output"]:
            return {"logits": outputs["output"]}
        taken = set(self.names.values())
        return {f"{name}_output" if name in taken else name: y for name, y in outputs.items()}

    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        prepare_attention(self, undo)


def named(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts, dataclasses and sequences, with their keys joined by "_"; skips None."""
    parts: Any = None
    if isinstance(value, Mapping):
        parts = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif hasattr(value, "_fields"):
        parts = zip(value._fields, value)
    elif isinstance(value, list | tuple):
        name, parts = name or "output", enumerate(value)
    if parts is None:
        if value is not None:
            yield name or "output", value
        return
    for key, part in parts:
        yield from named(part, re.sub(r"\W", "_", f"{name}_{key}" if name else str(key)))


def describe(model: nn.Module, example: Any, options: ExportOptions) -> AnyModel:
    """Describes a call of a model. `example` is one tensor, a tuple of arguments, or a dict of arguments."""
    what = f"export of {type(model).__name__}"
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    by_name = isinstance(example, Mapping) and (takes_any or set(example) <= set(parameters))
    args, kwargs = ((), dict(example)) if by_name else (example if isinstance(example, tuple) else (example,), {})
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [x.detach().cpu() if isinstance(x, Tensor) else x for x in leaves]
    leaves = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    indexed, by_keyword = pytree.tree_unflatten(list(range(len(leaves))), spec)
    bound = inspect.signature(model.forward).bind(*indexed, **by_keyword).arguments
    names = {i: name for name, i in named(dict(bound), "") if isinstance(leaves[i], Tensor)}
    axes = [leaves[i] for i in names if leaves[i].ndim]
    if not axes or not len(axes[0]):
        raise UnsupportedInputError(what, ["example must contain a tensor whose first axis is a batch of at least 1"])
    if options.outputs.names or options.dynamic_size:
        reason = (
            "output and dynamic_size must not be given with example: the file has the outputs and sizes of the call"
        )
        raise UnsupportedInputError(what, [reason])
    images = next((i for i in names if leaves[i].ndim == 4 and leaves[i].is_floating_point()), None)
    if options.preprocess and (images is None or len(names) > 1):
        raise UnsupportedInputError(what, ["preprocess requires images [B, C, H, W] as the only input"])
    if len(names) == 1 and images is not None:
        names = {images: "images"}
    shape = (1, 0, 0, 0) if images is None else leaves[images].shape
    known = find(model)
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in model.parameters()) or model.training:
        model = copy.deepcopy(model).to("cpu", torch.float32).eval()
    found = AnyModel(
        model=model, library=type(model).__module__.partition(".")[0], name=type(model).__name__,
        image_hw=(shape[2], shape[3]), in_chans=shape[1], patch_hw=(1, 1), blocks="", num_classes=0,
        leaves=leaves, spec=spec, names=names, images=images, batch=len(axes[0]), is_dynamic=options.dynamic_batch,
    )  # fmt: skip
    if known is not None:
        found.set_data_config(known.data_config)
        found.name, found.num_classes, found.class_names = known.name, known.num_classes, known.class_names
    return found
