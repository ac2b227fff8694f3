"""Source: a state dict of any library with metadata, read from a state dict or a file."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import DataConfig, ViTConfig
from ..errors import VitFastError, type_name
from ..libraries.interface.image_model import Facts

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")
METADATA_KEY = "vit_fast"

_WRAPPERS = ("model", "state_dict", "model_state_dict")


class WeightsError(VitFastError, ValueError):
    """Weights cannot be read or do not fit the model; the message lists all problems."""


@dataclass
class Source(Facts):
    """A state dict with the parameter names of its library, and its metadata.

    Attributes:
        name: Path or repository, for messages.
        tensors: The state dict.
    """

    name: str
    tensors: dict[str, Tensor]

    def check_size(self) -> None:
        """Raises WeightsError if the blocks of the config need more parameters than the source has."""
        needed = 0 if self.config is None else self.config.block_parameters()
        if needed > (held := sum(tensor.numel() for tensor in self.tensors.values())):
            raise WeightsError(
                f"{self.name}: must contain the {needed:,} parameters of its config's blocks, got {held:,}"
            )


def read_file(path: Path) -> Source:
    """Reads a weights file. Its suffix determines the format.

    Raises:
        WeightsError: the file is missing or damaged, has another format, or contains objects other than tensors.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise WeightsError(f"{path}: must end in one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    try:
        if suffix == ".safetensors":
            return _read_safetensors(path)
        tensors = _read_npz(path) if suffix == ".npz" else _read_torch(path)
    except VitFastError:
        raise
    except Exception as error:  # for a damaged file, torch and numpy raise exceptions of many types
        raise WeightsError(f"{path}: cannot be read as {suffix}: {_first_line(error)}") from None
    return Source(str(path), tensors_of(tensors, str(path)))


def _read_safetensors(path: Path) -> Source:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except SafetensorError as error:
        raise WeightsError(f"{path}: cannot be read as .safetensors: {_first_line(error)}") from None
    source = Source(str(path), tensors)
    if METADATA_KEY in metadata:
        try:
            saved = json.loads(metadata[METADATA_KEY])
            source.config = ViTConfig.from_dict(saved["config"])
            source.data_config = DataConfig.from_dict(saved["data_config"])
            names = saved["class_names"]
            if not isinstance(names, list | None):
                raise ValueError(f"class_names must be a list, got {names!r}")
            source.class_names = None if names is None else tuple(map(str, names))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightsError(f"{path}: its vit-fast metadata cannot be read: {_first_line(error)}") from None
    return source


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: must contain tensors only, because loading other objects can run code "
            f"({_first_line(error)}): save only the state dict, preferably as .safetensors"
        ) from None
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path}: must contain a state dict, got {type_name(content)}")
    return content


def _read_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise WeightsError(f"{path}: must be an .npz archive, got a single array")
        return {name: _from_numpy(arrays[name]) for name in arrays.files}


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # JAX's bfloat16
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def tensors_of(content: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Returns the state dict of a checkpoint, which may be nested under a key such as "model"."""
    for key in _WRAPPERS:
        inner = content.get(key)
        if isinstance(inner, Mapping):
            return tensors_of(inner, name)
    tensors = {str(key): value.detach() for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise WeightsError(f"{name}: must contain tensors, got none")
    return tensors


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def weights_digest(model: nn.Module) -> str:
    """Returns a short hash of the values of a model's tensors."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
