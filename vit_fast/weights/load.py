"""Builds models, loads weights of timm, transformers, torchvision and Google's JAX code into them, and saves them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..blocks.fp8_scales import buffers_to_load, prepare_to_load
from ..config import ViTConfig
from ..errors import as_device, check_type
from ..files import file_aside
from ..fusion.fuse import fuse, set_backend
from ..libraries import known
from ..model import VisionTransformer
from ..positions import resample_pos_embed
from ..variants import get_variant
from ..version import __version__
from .checkpoint import choose, contents, listed
from .source import METADATA_KEY, Source, WeightsError, open_source

_HEADS = ("head.", "head_dist.")
_LOG = logging.getLogger(__name__)


@dataclass
class WeightsReport:
    """Report of load_weights."""

    source: str  # path, repository, or "a state dict"
    layout: str  # library whose parameter names the source uses
    used: str = ""  # key and prefix of the loaded tensors in the source, e.g. "teacher, prefix backbone."
    unused: list[str] = field(default_factory=list)  # other keys and prefixes; first those that fit equally well
    loaded: int = 0  # number of tensors
    renamed: list[tuple[str, str]] = field(default_factory=list)  # (name in the source, name in the model)
    interpolated: list[str] = field(default_factory=list)  # position embeddings, with both grids
    replaced: list[str] = field(default_factory=list)  # head tensors that replace_head did not load, with the reason
    ignored: list[str] = field(default_factory=list)  # tensors of the source that the model does not use
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.layout} layout, {self.loaded} tensors loaded, {len(self.renamed)} renamed"]
        lines += self.selection()
        lines += [f"interpolated {entry}" for entry in self.interpolated]
        lines += [f"not loaded {entry}" for entry in self.replaced]
        if self.ignored:
            lines.append(f"ignored {listed(self.ignored)}")
        return "\n  ".join(lines + self.notes)

    def selection(self) -> list[str]:
        """Returns a line about the used and unused parts of a checkpoint with several parts."""
        names = f"used {self.used or 'names without prefix'}; not used: {listed(self.unused) or 'none'}"
        return [names] if self.used or self.unused else []


def load_weights(
    model: VisionTransformer, source: str | Path | Mapping[str, Any] | Source, *, replace_head: bool = False,
    key: str | None = None, prefix: str | None = None, ema: bool = True,
) -> WeightsReport:  # fmt: skip
    """Loads weights of any supported library into a model.

    Loads the part of a checkpoint (nested dict and prefix) with the most tensors that fit. If several fit equally well,
    prefers averaged weights, e.g. state_dict_ema, then a teacher, target_encoder or base_encoder, then the keys
    state_dict and model. If some weights do not fit, the model stays unchanged.

    Args:
        model: A model of the same architecture. If the image size differs, the position embedding is interpolated
            (bicubic, antialiased). Parameters keep their dtype and device.
        source: A state dict, a file (.safetensors, .pth, .ckpt, .npz, ...), a folder, or a Hub id. "#" separates the
            options below from a name, e.g. "FILE#key=student,ema=false". The model also gets the preprocessing and
            class names of the source, if any.
        replace_head: True keeps the model's head if the source has no head or one of another size.
        key: Key of the nested dict to load, e.g. "student"; keys of several levels are joined by dots.
        prefix: Beginning of the names to load, e.g. "backbone."; it is removed.
        ema: False does not load averaged weights, a teacher or a target_encoder, unless `key` names them.
    Returns:
        A report of the loaded, renamed, interpolated and ignored tensors, and of the parts that were not used.
    Raises:
        WeightsError: the source cannot be read or does not fit, or several parts fit and none is preferred; lists all
            differences, or the keys and prefixes found.
        TypeError: model is not a VisionTransformer.
    """
    check_type("model", model, VisionTransformer)
    check_type("ema", ema, bool)
    opened = open_source(source)
    given: dict[str, Any] = {name: value for name, value in (("key", key), ("prefix", prefix)) if value is not None}
    opened = replace(opened, **given, ema=ema and opened.ema)
    tensors, report = _fit(model, opened, replace_head)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    if opened.data_config is not None:
        model.data_config = opened.data_config
    if not report.replaced:
        _take_class_names(model, opened)
    return report


def save(model: VisionTransformer, path: str | Path) -> Path:
    """Writes a model to one .safetensors file, with config, preprocessing and class names in its metadata.

    The write is atomic. `load` builds the model from the file. Returns the path.

    Args:
        model: The model. Parameters are stored in their dtype, tied parameters as copies.
        path: File name ending in .safetensors. An existing file is replaced; missing folders are created.
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
        "version": __version__, "config": model.config.to_dict(), "data_config": model.data_config.to_dict(),
        "class_names": model.class_names,
    }  # fmt: skip
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    with file_aside(path, SafetensorError) as aside:
        save_file(tensors, aside, metadata={"format": "pt", METADATA_KEY: json.dumps(description)})
    return path


def load(
    source: str | Path | Source, *, backend: str = "auto", device: torch.device | str | None = None
) -> VisionTransformer:
    """Builds a model in evaluation mode from a config and weights, with their dtype, preprocessing and class names.

    Args:
        source: A file of `save`, or a folder or Hub id with a config.json.
        backend: "auto", "eager", "sdpa" or "triton"; see `vit_fast.fuse`.
        device: Device of the model; None means the CPU.
    Raises:
        WeightsError: the source cannot be read or contains no config.
    """
    opened = open_source(source)
    if opened.config is None:
        advice = "call create_model(name, weights=...), or pass --model, with one of `vit-fast models`"
        raise WeightsError(f"{opened.name} has no config: {advice}")
    place = as_device(device or "cpu")
    with torch.device("meta"):
        model = VisionTransformer(opened.config, data_config=opened.data_config)
    tensors, report = _fit(model, opened, replace_head=False)
    _take_class_names(model, opened)
    _log(report)
    if report.layout != "vit-fast":
        dtype = tensors["patch_embed.proj.weight"].dtype  # tensors computed during conversion may have a wider dtype
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    model = model.to(place)
    set_backend(model, backend)
    return model.eval()


def _log(report: WeightsReport) -> None:
    """Logs what a caller without the report should know: the part of a checkpoint, and facts that were not used."""
    for line in report.selection() + report.notes:
        _LOG.warning("%s: %s", report.source, line)


def _take_class_names(model: VisionTransformer, source: Source) -> None:
    if source.class_names and len(source.class_names) == model.config.num_classes:
        model.class_names = source.class_names


def create_model(
    name: str, *, backend: str = "auto", weights: str | Path | None = None, device: torch.device | str | None = None,
    dtype: torch.dtype | None = None, precision: str | None = None, key: str | None = None, prefix: str | None = None,
    ema: bool = True, **config_overrides: Any,
) -> VisionTransformer:  # fmt: skip
    """Builds a Vision Transformer in evaluation mode by its timm name, and fuses it.

    Args:
        name: One of list_models(), or a Hugging Face Hub id or folder with config and weights.
        backend: "auto", "eager", "sdpa" or "triton"; see `vit_fast.fuse`.
        weights: A file (.safetensors, .pth, .ckpt, .npz, ...), a folder or a Hugging Face Hub id; None means random
            weights. The config of the weights, if any, sets num_classes, act_layer and norm_eps; config_overrides take
            precedence. If num_classes is given and differs, the head stays random.
        device: Device of the parameters; None means torch's default device.
        dtype: Dtype of the parameters; None means torch's default dtype.
        precision: "fp8" runs the linear layers of blocks in e4m3; see `vit_fast.fuse`. The weights must contain the
            scales of `vit_fast.calibrate`. None means no FP8.
        key, prefix, ema: The part of a checkpoint to load; see `load_weights`.
        **config_overrides: Fields of ViTConfig, e.g. depth=2, img_size=(320, 240), num_classes=7.
    Raises:
        ValueError: name or a field is unknown, a field is invalid, or the weights do not fit.
        UnsupportedInputError: the requested backend cannot run the model; lists all reasons.
    """
    check_type("name", name, str)
    check_type("dtype", dtype, torch.dtype, type(None))
    head_is_given = "num_classes" in config_overrides
    source = None if weights is None else open_source(weights)
    if "/" in name:
        if weights is not None:
            raise ValueError(f"if weights are given, the model must be one of `vit-fast models`, got {name!r}")
        source = open_source(name)
        if source.config is None:
            raise ValueError(f"{name} has no config: pass a name of `vit-fast models` and weights={name!r}")
        config, data_config = source.config, source.data_config
    else:
        variant = get_variant(name)
        config, data_config = variant.config, variant.data
    if source is not None and source.config is not None:
        inherited = {name: getattr(source.config, name) for name in ("num_classes", "act_layer", "norm_eps")}
        config_overrides = inherited | config_overrides
    config = config.replace(**config_overrides)
    with as_device(device):
        model = VisionTransformer(config, data_config=data_config)
    model = model if dtype is None else model.to(dtype)
    if source is not None:
        _log(load_weights(model, source, replace_head=head_is_given, key=key, prefix=prefix, ema=ema))
    set_backend(model, backend)
    if precision is not None:
        fuse(model.eval(), backend, precision=precision)
    return model.eval()


def _fit(model: VisionTransformer, source: Source, replace_head: bool) -> tuple[dict[str, Tensor], WeightsReport]:
    """Converts the tensors of a source to those of a model, or raises WeightsError with all differences."""
    config, given = model.config, source.config
    wanted = model.state_dict()
    choice = choose(source.found, wanted, config, source.key, source.prefix, source.ema)
    if choice is None:
        layouts = ", ".join(library.NAME for library in known.NAMED_WEIGHTS)
        limits = {"key": source.key, "prefix": source.prefix, "ema": source.ema}
        which = "".join(f", {name}={value!r}" for name, value in limits.items() if value not in (None, True))
        names = contents(source.found)
        raise WeightsError(f"{source.name}{which}: must have the tensor names of one of {layouts}, got {names}")
    part, undecided, unused_parts = choice
    converted = known.convert(part.tensors, config)
    assert converted is not None
    wanted |= buffers_to_load(part.tensors, config.embed_dim)
    layout = "vit-fast" if source.name.endswith(".safetensors") and given else converted.layout
    report = WeightsReport(source.name, layout, str(part), unused_parts, notes=list(source.notes))
    report.ignored = list(converted.ignored)
    tensors, origins, head_problem = dict(converted.tensors), converted.origins, converted.head_problem

    unused = (*(_HEADS if config.num_classes == 0 else ()), *(("attn_pool.",) if config.global_pool != "map" else ()))
    extra_heads = _HEADS if replace_head else ()  # e.g. a projector in place of the head
    for name in [n for n in tensors if n.startswith(unused) or (n.startswith(extra_heads) and n not in wanted)]:
        del tensors[name]
        report.ignored += [name for name in origins[name] if name in part.tensors]
    _interpolate_positions(tensors, wanted.get("pos_embed"), config, given, report)
    problems = []
    if given is not None:
        for name in ("act_layer", "norm_eps"):
            if (there := getattr(given, name)) != (own := getattr(config, name)):
                report.notes.append(f"{name}: the source has {there!r}, the model {own!r}")
        if given.embed_dim == config.embed_dim and given.num_heads != config.num_heads:
            problems.append(f"num_heads: the source has {given.num_heads}, the model {config.num_heads}")
    for name in [name for name in wanted if replace_head and name.startswith(_HEADS)]:
        there = tensors.get(name)
        if head_problem is not None or there is None or there.shape != wanted[name].shape:
            was = "missing in the source" if there is None else f"{_shape(there)} in the source"
            report.replaced.append(f"{name}: {was}, the model keeps its {_shape(wanted.pop(name))}")
            tensors.pop(name, None)
    problems += _differences(tensors, wanted, origins, head_problem)
    if problems and report.selection():
        problems += [*report.selection(), f"found: {contents(source.found)}"]
    elif undecided:
        equal = " and ".join(map(str, (part, *undecided)))
        problems.append(f"{equal} fit equally well: pass key or prefix (FILE#key=...,prefix=...)")
    if problems:
        raise WeightsError(f"{source.name} ({converted.layout} layout) does not fit:\n  - " + "\n  - ".join(problems))
    report.loaded = len(tensors)
    report.renamed = [(origin, name) for name in tensors for origin in origins[name] if origin != name]
    for name, block in model.blocks.named_children():
        prepare_to_load(block, tensors, f"blocks.{name}.")
    return tensors, report


def _differences(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], origins: Mapping[str, Sequence[str]],
    head_problem: str | None,
) -> list[str]:  # fmt: skip
    """Returns how the converted tensors of a source differ from those of the model; empty if they fit."""
    missing = [name for name in wanted if name not in tensors]
    unexpected = [origin for name in tensors if name not in wanted for origin in origins[name]]
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    for name, own in ((name, wanted[name]) for name in wanted if name in tensors):
        if (there := tensors[name]).shape != own.shape:
            problems.append(f"shape of {name}: {_shape(there)} in the source, {_shape(own)} in the model")
        elif there.is_floating_point() != own.is_floating_point():
            problems.append(f"dtype of {name}: {there.dtype} in the source, {own.dtype} in the model")
    if head_problem and any(name.startswith(_HEADS) for name in tensors):
        problems.append(f"head: {head_problem}")
    if any(name.startswith(_HEADS) for name in missing) or any("shape of head" in problem for problem in problems):
        problems.append("to load all but the head, use create_model(num_classes=N) or load_weights(replace_head=True)")
    return problems


def _interpolate_positions(
    tensors: dict[str, Tensor], own: Tensor | None, config: ViTConfig, given: ViTConfig | None, report: WeightsReport
) -> None:
    positions = tensors.get("pos_embed")
    if positions is None or own is None or positions.dim() != 3 or positions.shape[-1] != own.shape[-1]:
        return
    prefix = own.shape[1] - config.num_patches
    patches = positions.shape[1] - prefix
    side = math.isqrt(max(patches, 0))
    grids = [known.grid_size for known in (given, config) if known is not None] + [(side, side)]
    old = next((grid for grid in grids if 0 < math.prod(grid) == patches), None)  # None if unknown
    if old is not None and old != (new := config.grid_size):
        tensors["pos_embed"] = resample_pos_embed(positions, old, new, prefix)
        report.interpolated.append(f"pos_embed: {old[0]}x{old[1]} -> {new[0]}x{new[1]} patches")


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
