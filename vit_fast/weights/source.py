"""Source: a state dict with metadata from a state dict, a file, a folder or the Hugging Face Hub.

Files in the local Hub cache are used without network access.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import DataConfig, ViTConfig
from ..errors import VitFastError, check_type, type_name
from ..files import read_object
from ..libraries.interface.image_model import Facts
from ..libraries.known import CONFIGURATIONS
from ..libraries.transformers import hf_model
from .checkpoint import StateDicts, state_dicts

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz")  # .pth.tar is a common name of .pth
METADATA_KEY = "vit_fast"
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)  # fmt: skip

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # exceptions of reading malformed JSON
# Classes of data beside the weights in checkpoints. `_Skipped` stands for them, so that none of their code runs.
_DATA = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|pathlib\.(\w+\.)?(Pure)?(Posix|Windows)?Path|datetime\.\w+|typing\.Any|"
    r"torch\.torch_version\.TorchVersion|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.multiarray\.(scalar|_reconstruct))|"
    r"omegaconf\..+|collections\.defaultdict|builtins\.(bool|bytes|dict|float|int|list|object|slice|str|tuple)"
)
_HUB_ID = re.compile(r"(?:hf-hub:|hf_hub:|hf://)?(\w[\w.-]*/\w[\w.-]*(?:@[\w./-]+)?)")

Find = Callable[..., Path | None]  # returns the local path of the first of the given file names that exists


class WeightsError(VitFastError, ValueError):
    """Weights cannot be read or do not fit the model; the message lists all problems."""


@dataclass
class Source(Facts):
    """The state dicts of a file with the parameter names of their library, metadata, and the selected part."""

    name: str
    found: StateDicts
    key: str | None = None  # of the state dict to use; None: the one that fits
    prefix: str | None = None  # of the names to use
    ema: bool = True  # prefer averaged weights


def open_source(source: str | Path | Mapping[str, Any] | Source) -> Source:
    """Reads weights from a state dict, a file, a folder like a Hub repository, or a Hub id `owner/name[@revision]`.

    A name may end in `#key=K,prefix=P,ema=false`, which selects the part to use.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        return Source("a state dict", _state_dicts_of(source, "a state dict"))
    if isinstance(source, str) and "#" in source and not Path(source).exists():
        place, _, selection = source.partition("#")
        chosen: dict[str, Any] = dict(part.partition("=")[::2] for part in selection.split(","))
        if chosen.keys() - {"key", "prefix", "ema"} or chosen.get("ema", "true") not in ("true", "false"):
            raise WeightsError(f"{source}: # must precede key=..., prefix=..., ema=true or ema=false, got {selection}")
        return dataclasses.replace(open_source(place), **chosen | {"ema": chosen.get("ema") != "false"})
    check_type("source of weights", source, str, Path, Mapping)
    path = Path(source)
    if path.is_file():
        return read_file(path)
    if path.is_dir():
        return _open(str(path), lambda *names: next(filter(Path.is_file, (path / name for name in names)), None))
    if (repository := hub_id(source)) is not None:
        repo_id, _, revision = repository.partition("@")
        return _open(repository, lambda *names: _find_on_hub(repo_id, revision or "main", names))
    raise WeightsError(
        f"{source}: no such file: weights must be a file ({', '.join(SUFFIXES)}), a folder with the files of a "
        "Hugging Face Hub repository, or a Hub id such as google/vit-base-patch16-224"
    )


def hub_id(source: str | Path) -> str | None:
    """Returns the `owner/name[@revision]` of a Hub id, which may have a prefix such as `hf-hub:`; otherwise None."""
    found = _HUB_ID.fullmatch(source) if isinstance(source, str) and not source.lower().endswith(SUFFIXES) else None
    return found and found[1]


def read_file(path: Path) -> Source:
    """Reads a weights file. Its suffix determines the format."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise WeightsError(f"{path}: must end in one of {', '.join(SUFFIXES)}")
    try:
        if suffix == ".safetensors":
            return _read_safetensors(path)
        tensors = _read_npz(path) if suffix == ".npz" else _read_torch(path)
    except VitFastError:
        raise
    except Exception as error:  # for a damaged file, these libraries raise exceptions of many types
        raise WeightsError(f"{path}: cannot be read as {suffix}: {_first_line(error)}") from None
    return Source(str(path), _state_dicts_of(tensors, str(path)))


def _read_safetensors(path: Path) -> Source:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        source = Source(str(path), state_dicts(tensors))
    if METADATA_KEY in metadata:
        try:
            saved = json.loads(metadata[METADATA_KEY])
            source.config = ViTConfig.from_dict(saved["config"])
            source.data_config = DataConfig.from_dict(saved["data_config"])
            names = saved["class_names"]
            if not isinstance(names, list | None):
                raise ValueError(f"class_names must be a list or null, got {names!r}")
            source.class_names = None if names is None else tuple(map(str, names))
        except _DAMAGE as error:
            raise WeightsError(f"{path}: its vit-fast metadata cannot be read: {_first_line(error)}") from None
    return source


class _Skipped:
    """Replaces an object whose class is in _DATA; drops its arguments and its state."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # raised for the format before torch 1.6, and for damaged files, for which torch.load raises, too
        others = ["argparse.Namespace"]
    dicts: dict[str, Any] = {"collections.defaultdict": lambda *args: {}}  # torch fills dicts only
    safe: list[Any] = [(dicts.get(name, _Skipped), name) for name in others if _DATA.fullmatch(name)]
    try:
        with torch.serialization.safe_globals(safe):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        unsafe = sorted(name for name in others if not _DATA.fullmatch(name)) or ["other objects, or damaged data"]
        raise WeightsError(
            f"{path}: must contain tensors and plain data only, because loading other objects can run code, got "
            f"{', '.join(unsafe)}: save only the state dict, preferably as .safetensors"
        ) from None
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path}: must contain a state dict, got {type_name(content)}")
    return content


def _read_npz(path: Path) -> dict[str, Tensor]:
    def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
        if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # JAX's bfloat16
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    with np.load(path, allow_pickle=False) as arrays:
        return {name: as_tensor(arrays[name]) for name in arrays.files}


def _state_dicts_of(content: Mapping[str, Any], name: str) -> StateDicts:
    if not (found := state_dicts(content)):
        raise WeightsError(f"{name}: must contain tensors, got none")
    return found


def _first_line(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def weights_digest(model: nn.Module) -> str:
    """Returns a short hash of the values of a model's tensors."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _find_on_hub(repo_id: str, revision: str, names: tuple[str, ...]) -> Path | None:
    """Returns the first of the files in the cache; if it has none of them, downloads the first that exists."""
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache

    name = names[0]
    try:
        # a path, None if unknown, or a marker that the repository does not have this file
        cached = {name: try_to_load_from_cache(repo_id, name, revision=revision) for name in names}
        if found := [path for path in cached.values() if isinstance(path, str)]:
            return Path(found[0])
        for name in [name for name, marker in cached.items() if marker is None]:
            try:
                return Path(hf_hub_download(repo_id, name, revision=revision))
            except errors.LocalEntryNotFoundError:  # also an EntryNotFoundError
                raise
            except errors.EntryNotFoundError:
                continue
    except (errors.HFValidationError, OSError) as error:  # OSError is the base class of connection errors
        reason = " ".join(str(error).split())
        raise WeightsError(f"{repo_id}@{revision}: {name} cannot be downloaded: {reason}") from None
    return None


def _open(name: str, find: Find) -> Source:
    """Reads weights and configuration files of a folder or repository."""
    config_file = find("config.json")
    weights_file = find(*WEIGHT_FILES)
    if weights_file is None:
        raise WeightsError(f"{name}: must contain one of {', '.join(WEIGHT_FILES)}")
    source = read_file(weights_file) if weights_file.suffix != ".json" else _read_shards(weights_file, find)
    source.name = name
    if config_file is None:
        if source.config is None:  # otherwise, vit_fast.save stored it in the file
            source.notes.append("no config.json: the model keeps its head size, preprocessing and class names")
        return source
    config = read_object(config_file, WeightsError)
    library = next((library for library in CONFIGURATIONS if library.CONFIG_KEYS & config.keys()), None)
    if library is None:
        return Source(name, source.found, notes=["config.json is ignored: no supported library wrote it"])
    try:
        found = Source(name, source.found, **vars(library.read_config(config)))
    except ValueError as error:
        raise WeightsError(f"{name}: its config.json describes an unsupported model: {error}") from None
    except _DAMAGE as error:
        raise WeightsError(f"{name}: its config.json is malformed: {type(error).__name__}: {error}") from None
    if library is hf_model:
        try:
            if (file := find("preprocessor_config.json")) is None:
                raise ValueError("it does not exist")
            found.data_config = hf_model.data_config_from_processor(read_object(file))
        except _DAMAGE as error:
            found.notes.append(f"preprocessor_config.json is not used: {error}")
    return found


def _read_shards(index_file: Path, find: Find) -> Source:
    source, shards = Source(str(index_file), {}), read_object(index_file, WeightsError).get("weight_map")
    files = shards.values() if isinstance(shards, dict) else [shards]
    if any(not isinstance(file, str) or Path(file).name != file for file in files):
        raise WeightsError(f"{index_file}: weight_map must map each tensor name to a file name in the same folder")
    for filename in sorted(set(files)):
        if (path := find(filename)) is None:
            raise WeightsError(f"{index_file}: lists {filename}, which does not exist")
        for key, tensors in read_file(path).found.items():
            source.found.setdefault(key, {}).update(tensors)
    return source
