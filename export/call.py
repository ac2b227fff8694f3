"""A call of a model: its file has all tensors among the arguments as inputs, and all tensors returned as outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from PIL import Image
from torch import Tensor, nn

from vit_fast.apps.data import as_inputs
from vit_fast.config import Size
from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries.interface.image_model import ImageModel, Outputs
from vit_fast.libraries.known import exportable, find, prepare_attention, recognize

from .options import ExportOptions

Batch = np.ndarray | dict[str, np.ndarray]


class AnyModel(ImageModel):
    """A model of which only an example of a call is known."""

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Outputs, dynamic_size: bool) -> Any:
        return self.model(*args, **kwargs)

    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        prepare_attention(self, undo)


@dataclasses.dataclass(kw_only=True)
class Call:
    """A model and the arguments of one call. The first floating-point tensor with 4 axes is taken for images."""

    vit: ImageModel
    options: ExportOptions
    leaves: list[Any]  # of the arguments
    spec: Any  # their structure
    names: dict[int, str]  # of the tensors among the leaves, by index
    images: int | None  # index of the images; None if no input is like images
    batch: int  # of the example, and of files with a fixed batch

    def __call__(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Runs the model on tensors, and returns its outputs by name."""
        args, kwargs = self.arguments(inputs)
        value = self.vit.call(args, kwargs, self.options.outputs, self.options.dynamic_size)
        outputs = distinct(named(value, ""), self.names.values(), "_output")
        kinds = {name: type(y).__name__ for name, y in outputs.items() if not isinstance(y, Tensor)}
        if other := [f"{name} must be a tensor, got {kind}" for name, kind in kinds.items()]:
            raise UnsupportedInputError(f"outputs of {self.vit.name}", other)
        if self.vit.num_classes and list(outputs) == ["output"]:
            return {"logits": outputs["output"]}
        return outputs

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the model, with these tensors."""
        given = dict(zip(self.names, inputs))
        return pytree.tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(self.leaves)], self.spec)

    @property
    def takes_images(self) -> bool:
        """True if images are the only input."""
        return self.images is not None and len(self.names) == 1

    @property
    def batched(self) -> list[bool]:
        """True for each input whose axis 0 is the batch."""
        return [bool(self.leaves[i].ndim) and len(self.leaves[i]) == self.batch for i in self.names]

    def feed(self, count: int, images: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns inputs for a batch: the example's, repeated, and the given images."""
        found = {i: self.leaves[i] for i in self.names}
        found = {i: x[torch.arange(count) % len(x)] if has else x for (i, x), has in zip(found.items(), self.batched)}
        return tuple((found | ({} if images is None else {self.images: images})).values())

    def example(self) -> tuple[Tensor, ...]:
        """Returns the example's inputs, with at least two in a dynamic batch: torch would specialize a batch of 1."""
        return self.feed(max(2, self.batch) if self.options.dynamic_batch else self.batch)

    def batches(self, images: Sequence[Image.Image], size: Size, most: int | None = None) -> list[tuple[Tensor, ...]]:
        """Returns inputs for images, in batches of 1, 3, 4, 8, 8, ..., or of `most`; repeats images to fill a batch."""
        count, step, vit = len(images), most, self.vit
        planes = as_inputs(images, vit.data_config, size, vit.in_chans) if count and vit.in_chans else None
        if not self.options.dynamic_batch:
            count, step = -(-count // self.batch) * self.batch, self.batch
        cuts = range(step, count, step) if step else (1, 4, *range(8, count, 8))
        pieces = [each for each in torch.arange(count).tensor_split(list(cuts)) if len(each)]
        return [self.feed(len(i), None if planes is None else planes[i % len(planes)]) for i in pieces]

    def fed(self, inputs: Sequence[Tensor]) -> Batch:
        """Returns a batch for the file."""
        arrays = dict(zip(self.names.values(), (x.numpy() for x in inputs)))
        return arrays.popitem()[1] if self.takes_images else arrays


def cast(inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


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


def distinct(pairs: Iterable[tuple[str, Any]], taken: Collection[str], suffix: str) -> dict[str, Any]:
    """Returns values by name; adds a suffix to names that are taken or occur twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        while name in found or name in taken:
            name += suffix
        found[name] = value
    return found


def call_of(model: nn.Module, example: Any, options: ExportOptions) -> Call:
    """Describes a call of a model. `example` is one tensor, a tuple of arguments, or a dict of arguments.

    Without example, the model must be of a known library, and takes images.
    """
    if example is None:
        vit = recognize(model)
        images = torch.randn(1, vit.in_chans, *vit.image_hw, device="cpu")
        spec = pytree.tree_structure(((images,), {}))
        return Call(vit=vit, options=options, leaves=[images], spec=spec, names={0: "images"}, images=0, batch=1)
    what = f"export of {type(model).__name__}"
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    by_name = isinstance(example, Mapping) and (takes_any or set(example) <= set(parameters))
    args, kwargs = ((), dict(example)) if by_name else (example if isinstance(example, tuple) else (example,), {})
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [cast([x.detach().cpu()], torch.float32)[0] if isinstance(x, Tensor) else x for x in leaves]
    indexed, by_keyword = pytree.tree_unflatten(list(range(len(leaves))), spec)
    bound = inspect.signature(model.forward).bind(*indexed, **by_keyword).arguments
    given = ((name, i) for name, i in named(dict(bound), "") if isinstance(leaves[i], Tensor))
    names = {i: name for name, i in distinct(given, (), "_input").items()}
    if any(leaves[i].is_complex() for i in names):
        raise UnsupportedInputError(what, ["example must not contain complex numbers: pass torch.view_as_real of them"])
    axes = [leaves[i] for i in names if leaves[i].ndim]
    if not axes or not len(axes[0]):
        raise UnsupportedInputError(what, ["example must contain a tensor whose first axis is a batch of at least 1"])
    if options.outputs.names or options.dynamic_size:
        reason = (
            "output and dynamic_size must not be given with example: the file has the outputs and sizes of the call"
        )
        raise UnsupportedInputError(what, [reason])
    first = next((i for i in names if leaves[i].ndim == 4 and leaves[i].is_floating_point()), None)
    if options.preprocess and (first is None or len(names) > 1):
        raise UnsupportedInputError(what, ["preprocess requires images [B, C, H, W] as the only input"])
    if len(names) == 1 and first is not None:
        names = {first: "images"}
    shape = (1, 0, 0, 0) if first is None else leaves[first].shape
    known = find(model)
    vit = AnyModel(
        model=exportable(model), library=type(model).__module__.partition(".")[0], name=type(model).__name__,
        image_hw=(shape[2], shape[3]), in_chans=shape[1], patch_hw=(1, 1), blocks="", num_classes=0,
    )  # fmt: skip
    if known is not None:
        vit.set_data_config(known.data_config)
        vit.name, vit.num_classes, vit.class_names = known.name, known.num_classes, known.class_names
    batch = len(axes[0] if first is None else leaves[first])
    return Call(vit=vit, options=options, leaves=leaves, spec=spec, names=names, images=first, batch=batch)
