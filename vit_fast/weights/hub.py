"""Opens a state dict, a file, a folder or a Hugging Face Hub repository as a Source.

Files in the local Hub cache are used without network access.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import type_name
from ..libraries.known import CONFIGURATIONS
from ..libraries.transformers import hf_config
from .source import SUFFIXES, Source, WeightsError, read_file, tensors_of

WEIGHT_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)

_HUB_PREFIXES = ("hf-hub:", "hf_hub:", "hf://")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
_Fetch = Callable[[str], Path | None]


def open_source(source: str | Path | Mapping[str, Any] | Source) -> Source:
    """Reads weights from a state dict, a file, a folder or the Hub.

    Args:
        source: A state dict; a .safetensors, .pth, .pt, .bin (read with `weights_only=True`) or .npz file; a folder
            with config.json and weights, like a Hub repository; or a Hub id such as "google/vit-base-patch16-224",
            optionally followed by `@revision`.
    Raises:
        WeightsError: the source cannot be read.
        TypeError: source has another type.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        return Source("a state dict", tensors_of(source, "a state dict"))
    if not isinstance(source, str | Path):
        raise TypeError(f"source of weights must be a path, a Hub id or a state dict, got {repr(source)[:60]}")
    path = Path(source)
    if path.is_file():
        return read_file(path)
    if path.is_dir():
        return _open_folder(path)
    if (repository := hub_id(source)) is not None:
        return _open_repository(repository)
    raise WeightsError(
        f"{source}: no such file: weights must be a file ({', '.join(SUFFIXES)}), a folder with config.json, or a "
        "Hugging Face Hub id such as google/vit-base-patch16-224"
    )


def hub_id(source: str | Path) -> str | None:
    """Returns `owner/name[@revision]` without a prefix such as hf-hub: if source is a Hub id; otherwise None."""
    text = str(source)
    for prefix in _HUB_PREFIXES:
        text = text.removeprefix(prefix)
    is_id = isinstance(source, str) and _HUB_ID.fullmatch(text) and not text.lower().endswith(SUFFIXES)
    return text if is_id else None


def _open_folder(folder: Path) -> Source:
    def fetch(filename: str) -> Path | None:
        return folder / filename if (folder / filename).is_file() else None

    return _open(str(folder), fetch)


def _open_repository(repository: str) -> Source:
    repo_id, _, revision = repository.partition("@")
    unreachable: _Unreachable | None = None

    def fetch(filename: str) -> Path | None:
        nonlocal unreachable
        try:
            return _download(repo_id, revision or "main", filename, cache_only=unreachable is not None)
        except _Unreachable as error:
            unreachable = unreachable or error  # wait for the network only once, then use only the cache
            raise unreachable from None

    return _open(repository, fetch)


def _download(repo_id: str, revision: str, filename: str, *, cache_only: bool) -> Path | None:
    """Returns the local path of a file; None if the repository does not have it."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{repo_id}@{revision}"
    try:
        cached = try_to_load_from_cache(repo_id, filename, revision=revision)
        if cached is not None:  # a path, or a marker that the repository does not have this file
            return Path(cached) if isinstance(cached, str) else None
        with _without_retry_warnings():
            return Path(hf_hub_download(repo_id, filename, revision=revision, local_files_only=cache_only))
    except LocalEntryNotFoundError:
        raise _Unreachable(
            f"{where}: {filename} is not in the local cache, and huggingface.co cannot be reached (no network, or "
            "HF_HUB_OFFLINE is set)"
        ) from None
    except EntryNotFoundError:
        return None
    except GatedRepoError:
        raise WeightsError(f"{where}: access is restricted: accept the license on huggingface.co and log in") from None
    except RevisionNotFoundError:
        raise WeightsError(f"{where}: the repository has no such revision") from None
    except RepositoryNotFoundError:
        raise WeightsError(f"{where}: no such repository on huggingface.co, or it is private") from None
    except HFValidationError as error:
        raise WeightsError(f"{where}: not a repository id: {error}") from None
    except OSError as error:  # base class of the connection errors of HTTP libraries
        raise _Unreachable(f"{where}: {filename} cannot be downloaded: {error}") from None


@contextmanager
def _without_retry_warnings() -> Iterator[None]:
    """Silences huggingface_hub's warnings about retries; the final error contains the reason."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


class _Unreachable(WeightsError):
    """The file is not in the cache, and the Hub cannot be reached."""


def _open(name: str, fetch: _Fetch) -> Source:
    config_file = fetch("config.json")
    weights_file = _find_weights(name, fetch)
    source = read_file(weights_file) if weights_file.suffix != ".json" else _read_shards(weights_file, fetch)
    if source.config is not None and config_file is None:
        source.name = name
        return source  # vit_fast.save stores the config in the file
    found = Source(name, source.tensors)
    if config_file is None:
        found.notes.append("no config.json: the model keeps its head size, preprocessing and class names")
        return found
    config = _read_json(config_file)
    library = next((library for library in CONFIGURATIONS if library.wrote(config)), None)
    if library is None:
        found.notes.append("config.json is ignored: no supported library wrote it")
        return found
    try:
        facts = library.read_config(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise WeightsError(f"{name}: its config.json is malformed: {type(error).__name__}: {error}") from None
    except ValueError as error:
        raise WeightsError(f"{name}: its config.json describes an unsupported model: {error}") from None
    found = Source(name, source.tensors, **vars(facts))
    if library is hf_config:
        _read_preprocessor(found, fetch)
    return found


def _find_weights(name: str, fetch: _Fetch) -> Path:
    unreachable: _Unreachable | None = None
    for filename in (WEIGHT_FILES[0], "model.safetensors.index.json", *WEIGHT_FILES[1:]):
        try:
            path = fetch(filename)
        except _Unreachable as error:
            unreachable = unreachable or error  # the cache may contain another of these files
            continue
        if path is not None:
            return path
    if unreachable is not None:
        raise unreachable
    raise WeightsError(f"{name}: must contain one of {', '.join(WEIGHT_FILES)}")


def _read_shards(index_file: Path, fetch: _Fetch) -> Source:
    source, shards = Source(str(index_file), {}), _read_json(index_file).get("weight_map")
    files = shards.values() if isinstance(shards, dict) else [shards]
    if any(not isinstance(file, str) or Path(file).name != file for file in files):
        raise WeightsError(f"{index_file}: weight_map must map each tensor to a file of this folder")
    for filename in sorted(set(files)):
        path = fetch(filename)
        if path is None:
            raise WeightsError(f"{index_file}: lists {filename}, which does not exist")
        source.tensors |= read_file(path).tensors
    return source


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: must contain a JSON object, got {type_name(content)}")
    return content


def _read_preprocessor(source: Source, fetch: _Fetch) -> None:
    try:
        preprocessor_file = fetch("preprocessor_config.json")
    except _Unreachable as error:
        source.notes.append(f"the model keeps its preprocessing: {error}")
        return
    if preprocessor_file is None:
        source.notes.append("no preprocessor_config.json: the model keeps its preprocessing")
        return
    try:
        source.data_config = hf_config.data_config_from_processor(_read_json(preprocessor_file))
    except (ValueError, KeyError, TypeError) as error:
        source.notes.append(f"preprocessor_config.json is ignored: {error}")
