"""Loads weights of timm, transformers, torchvision and Google's JAX code into a VisionTransformer, and saves them.

If some weights do not fit, the error lists all missing and unexpected names and all different shapes, and the model
stays unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_device
from ..blocks.fp8_scales import buffers_to_load, prepare_to_load
from ..config import Size
from ..errors import check_type
from ..files import file_aside
from ..fusion.fuse import set_backend
from ..libraries import known
from ..libraries.interface.weight_names import Converted
from ..model import VisionTransformer
from ..positions import resample_pos_embed
from ..version import __version__
from .source import METADATA_KEY, Source, WeightsError, open_source

_HEADS = ("head.", "head_dist.")
_LISTED = 12  # names in a list before "and N more"


@dataclass
class WeightsReport:
    """Report of load_weights.

    Attributes:
        source: Path, repository, or "a state dict".
        layout: Library whose parameter names the source uses.
        loaded: Number of loaded tensors of the model.
        renamed: Pairs (name in the source, name in the model). Several tensors of the source may form one.
        interpolated: Interpolated position embeddings, with both grids.
        replaced: Head tensors that were not loaded because of replace_head, with the reason.
        ignored: Tensors of the source that the model does not use.
        notes: Other notes.
    """

    source: str
    layout: str
    loaded: int = 0
    renamed: list[tuple[str, str]] = field(default_factory=list)
    interpolated: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.layout} layout, {self.loaded} tensors loaded, {len(self.renamed)} renamed"]
        lines += [f"interpolated {entry}" for entry in self.interpolated]
        lines += [f"replaced {entry}" for entry in self.replaced]
        if self.ignored:
            lines.append(f"ignored {_listed(self.ignored)}")
        return "\n  ".join(lines + self.notes)


def load_weights(
    model: VisionTransformer,
    source: str | Path | Mapping[str, Any] | Source,
    *,
    replace_head: bool = False,
) -> WeightsReport:
    """Loads weights of any supported library into a model.

    If some weights do not fit, the model stays unchanged.

    Args:
        model: A model of the same architecture. If the image size differs, the position embedding is interpolated
            (bicubic, antialiased). Parameters keep their dtype and device.
        source: A state dict, a file (.safetensors, .pth, .pt, .bin, .npz), a folder, or a Hub id. If it contains
            preprocessing and class names, they are copied to the model.
        replace_head: True keeps the model's head if the source has no head or one of another size.
    Returns:
        A report of the loaded, renamed, interpolated and ignored tensors.
    Raises:
        WeightsError: the source cannot be read or does not fit; lists all differences.
        TypeError: model is not a VisionTransformer.
    """
    check_type("model", model, VisionTransformer)
    opened = open_source(source)
    fit = _Fit(model, opened, replace_head)
    fit.make_room_for_scales(model)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in fit.fitted.items():
            state[name].copy_(tensor)
    if opened.data_config is not None:
        model.data_config = opened.data_config
    if not fit.report.replaced and opened.class_names and len(opened.class_names) == model.config.num_classes:
        model.class_names = opened.class_names
    return fit.report


def save(model: VisionTransformer, path: str | Path) -> Path:
    """Writes a model to one .safetensors file, with config, preprocessing and class names in its metadata.

    The write is atomic. `load` builds the model from the file.

    Args:
        model: The model. Parameters are stored in their dtype, tied parameters as copies.
        path: File name ending in .safetensors. An existing file is replaced; missing folders are created.
    Returns:
        path.
    Raises:
        ValueError: path has another suffix, or the model was fused with `normalize`, which the file cannot store.
        TypeError: model is not a VisionTransformer.
        OSError: the file cannot be written.
    """
    check_type("model", model, VisionTransformer)
    check_type("path", path, str, Path)
    return save_tensors(model, model.state_dict(), path)


def save_tensors(model: VisionTransformer, state: Mapping[str, Tensor], path: str | Path) -> Path:
    """Saves a model with the given tensors instead of its own, e.g. gathered shards or averaged weights; see `save`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {str(path)!r}")
    if "vit_fast_mean" in vars(model.patch_embed.proj):
        raise ValueError("model must not be fused with normalize: call vit_fast.unfuse first")
    description = {
        "version": __version__,
        "config": model.config.to_dict(),
        "data_config": model.data_config.to_dict(),
        "class_names": model.class_names,
    }
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    with file_aside(path, SafetensorError) as aside:
        save_file(tensors, aside, metadata={"format": "pt", METADATA_KEY: json.dumps(description)})
    return path


def load(
    source: str | Path | Source, *, backend: str = "auto", device: torch.device | str | None = None
) -> VisionTransformer:
    """Builds a model from weights that contain a config, with their dtype, preprocessing and class names.

    Args:
        source: A file of `save`, or a folder or Hub id with a config.json.
        backend: See set_backend.
        device: Device of the model; None means the CPU.
    Returns:
        The model, in evaluation mode.
    Raises:
        WeightsError: the source cannot be read or contains no config.
    """
    opened = open_source(source)
    if opened.config is None:
        raise WeightsError(f"{opened.name} has no config: call create_model(name, weights=...)")
    opened.check_size()
    place = as_device(device or "cpu")
    names = opened.class_names
    if names is not None and len(names) != opened.config.num_classes:
        names = None
    with torch.device("meta"):
        model = VisionTransformer(opened.config, data_config=opened.data_config, class_names=names)
    fit = _Fit(model, opened, replace_head=False)
    tensors = fit.fitted
    if fit.report.layout != "vit-fast":
        dtype = tensors["patch_embed.proj.weight"].dtype  # tensors computed during conversion may have a wider dtype
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    fit.make_room_for_scales(model)
    model.load_state_dict(tensors, assign=True)
    model = model.to(place)
    set_backend(model, backend)
    return model.eval()


class _Fit:
    """Converts the tensors of a source to the tensors of a model (`fitted`), or raises WeightsError."""

    def __init__(self, model: VisionTransformer, source: Source, replace_head: bool) -> None:
        self.config = model.config
        self.source = source
        self.wanted = model.state_dict() | buffers_to_load(source.tensors, model.config.embed_dim)
        converted = known.convert(source.tensors, model.config)
        if converted is None:
            raise WeightsError(
                f"{source.name}: must have the names of a known layout ({known.known_names()}), got "
                f"{_listed(sorted(source.tensors))}"
            )
        layout = "vit-fast" if source.name.endswith(".safetensors") and source.config else converted.layout
        self.report = WeightsReport(source.name, layout, notes=list(source.notes))
        self.problems: list[str] = []
        self.fitted = dict(converted.tensors)
        self._drop_unused(converted)
        self._interpolate_positions()
        self._compare_configs()
        if replace_head:
            self._keep_own_head(converted)
        self._check(converted)
        if self.problems:
            raise WeightsError(
                f"{source.name} ({converted.layout} layout) does not fit:\n  - " + "\n  - ".join(self.problems)
            )
        self.report.loaded = len(self.fitted)
        self.report.renamed = [
            (theirs, ours) for ours in self.fitted for theirs in converted.origins[ours] if theirs != ours
        ]

    def make_room_for_scales(self, model: VisionTransformer) -> None:
        for name, block in model.blocks.named_children():
            prepare_to_load(block, self.fitted, f"blocks.{name}.")

    def _drop_unused(self, converted: Converted) -> None:
        useless: list[str] = []
        if self.config.num_classes == 0:
            useless += _HEADS
        if self.config.global_pool != "map":
            useless.append("attn_pool.")
        self.report.ignored = list(converted.ignored)
        for ours in [name for name in self.fitted if name.startswith(tuple(useless))]:
            del self.fitted[ours]
            self.report.ignored += [name for name in converted.origins[ours] if name in self.source.tensors]

    def _interpolate_positions(self) -> None:
        positions, wanted = self.fitted.get("pos_embed"), self.wanted.get("pos_embed")
        if positions is None or wanted is None or positions.dim() != 3 or positions.shape[-1] != wanted.shape[-1]:
            return
        prefix = wanted.shape[1] - self.config.num_patches
        old_grid = self._grid_of_source(positions.shape[1] - prefix)
        if old_grid is None or old_grid == self.config.grid_size:
            return
        self.fitted["pos_embed"] = resample_pos_embed(positions, old_grid, self.config.grid_size, prefix)
        new_grid = self.config.grid_size
        self.report.interpolated.append(
            f"pos_embed: {old_grid[0]}x{old_grid[1]} -> {new_grid[0]}x{new_grid[1]} patches"
        )

    def _grid_of_source(self, patches: int) -> Size | None:
        """Returns the patch grid of the source: from its config, or a square; None if unknown."""
        config = self.source.config
        if config is not None and config.num_patches == patches:
            return config.grid_size
        if patches == self.config.num_patches:
            return self.config.grid_size
        side = math.isqrt(max(patches, 0))
        return (side, side) if side and side * side == patches else None

    def _compare_configs(self) -> None:
        # tensor shapes do not determine these fields
        theirs = self.source.config
        if theirs is None:
            return
        if theirs.embed_dim == self.config.embed_dim and theirs.num_heads != self.config.num_heads:
            self.problems.append(f"num_heads: the source has {theirs.num_heads}, the model {self.config.num_heads}")
        for name in ("act_layer", "norm_eps"):
            if getattr(theirs, name) != getattr(self.config, name):
                self.report.notes.append(
                    f"{name}: the source has {getattr(theirs, name)!r}, the model {getattr(self.config, name)!r}"
                )

    def _keep_own_head(self, converted: Converted) -> None:
        reason = converted.head_problem(self.config)
        for name in [name for name in self.wanted if name.startswith(_HEADS)]:
            there = self.fitted.get(name)
            if reason is not None or there is None or there.shape != self.wanted[name].shape:
                was = "missing in the source" if there is None else f"{_shape(there)} in the source"
                self.report.replaced.append(f"{name}: {was}, the model keeps its {_shape(self.wanted[name])}")
                self.fitted.pop(name, None)
                del self.wanted[name]

    def _check(self, converted: Converted) -> None:
        missing = [name for name in self.wanted if name not in self.fitted]
        unexpected = [name for name in self.fitted if name not in self.wanted]
        if missing:
            self.problems.append(f"missing: {', '.join(missing)}")
        if unexpected:
            theirs = [origin for name in unexpected for origin in converted.origins[name]]
            self.problems.append(f"unexpected: {', '.join(theirs)}")
        for name in self.wanted:
            tensor = self.fitted.get(name)
            if tensor is None:
                continue
            if tensor.shape != self.wanted[name].shape:
                self.problems.append(
                    f"shape of {name}: {_shape(tensor)} in the source, {_shape(self.wanted[name])} in the model"
                )
            elif tensor.is_floating_point() != self.wanted[name].is_floating_point():
                self.problems.append(f"dtype of {name}: must be floating, got {tensor.dtype}")
        has_head = any(name.startswith(_HEADS) for name in self.fitted)
        if has_head and (reason := converted.head_problem(self.config)):
            self.problems.append(f"head: {reason}")
        if any(name.startswith(_HEADS) for name in missing) or any("shape of head" in p for p in self.problems):
            self.problems.append("pass replace_head=True to keep the model's head")


def overrides_from(source: Source) -> dict[str, Any]:
    """Returns the config fields of the weights that override the named model: num_classes, act_layer, norm_eps."""
    if source.config is None:
        return {}
    return {name: getattr(source.config, name) for name in ("num_classes", "act_layer", "norm_eps")}


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
