"""The files that MNIST, Fashion-MNIST and CIFAR-10 come in, read without trusting them.

IDX: two zero bytes, the type (8: unsigned bytes), the number of axes, each axis' length in four bytes, the pixels.
CIFAR-10's "python version" is made of pickles. A pickle names functions and calls them; here it gets three of ours,
whatever it names, which only keep what they are given: nothing that a file asks for is imported or run.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..apps.data import ImageError

Pixels = NDArray[np.uint8]

CIFAR_ARCHIVE, CIFAR_FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
CIFAR_TRAIN, CIFAR_TEST, CIFAR_NAMES = tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"
_MOST_BYTES = 2**32  # of one file, as its header says


def read_idx(path: Path) -> Pixels:
    """An IDX file of unsigned bytes, also gzipped.

    Raises:
        ImageError: it is none, is damaged, or is shorter or longer than it says.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            return _idx(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise ImageError(f"{path}: cannot be read as IDX: {error}") from None


def _idx(path: Path, file: IO[bytes] | gzip.GzipFile) -> Pixels:
    head = file.read(4)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
        raise ImageError(f"{path}: not an IDX file of unsigned bytes")
    axes = file.read(4 * head[3])
    if len(axes) < 4 * head[3]:
        raise ImageError(f"{path}: ends within its header")
    shape = struct.unpack(f">{head[3]}I", axes)
    count = math.prod(shape)
    if count > _MOST_BYTES:
        raise ImageError(f"{path}: its header says {'x'.join(map(str, shape))}: more than 4 GiB")
    content = file.read(count + 1)
    if len(content) != count:
        there = f"{len(content)} follow" if len(content) < count else "more follow"
        raise ImageError(f"{path}: its header says {count} bytes, {there}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def find_cifar(path: Path) -> Path | None:
    """CIFAR-10's archive or unpacked folder: the path itself, or right inside it."""
    for candidate in (path, path / CIFAR_FOLDER, path / CIFAR_ARCHIVE):
        if (candidate / CIFAR_TEST).is_file() or (candidate.is_file() and tarfile.is_tarfile(candidate)):
            return candidate
    return None


def read_cifar(path: Path) -> tuple[tuple[Pixels, Pixels], tuple[Pixels, Pixels], tuple[str, ...]]:
    """CIFAR-10 from what find_cifar found: images [n, 32, 32, 3] and labels [n] to train on, to test on; class names.

    Raises:
        ImageError: a file of it is missing, damaged, or holds something else.
    """
    files = _cifar_files(path)
    names = _entry(path, CIFAR_NAMES, _unpickle(path, CIFAR_NAMES, files[CIFAR_NAMES]), "label_names")
    batches = [_cifar_batch(path, name, files[name]) for name in (*CIFAR_TRAIN, CIFAR_TEST)]
    images, labels = (np.concatenate([batch[i] for batch in batches[:-1]]) for i in range(2))
    return (images, labels), batches[-1], tuple(_text(name) for name in names)


def _cifar_files(path: Path) -> dict[str, bytes]:
    wanted = {*CIFAR_TRAIN, CIFAR_TEST, CIFAR_NAMES}
    found: dict[str, bytes] = {}
    try:
        if path.is_dir():
            found = {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
        else:
            with tarfile.open(path) as archive:  # read in memory: no file of it is written anywhere
                for member in archive:
                    name = Path(member.name).name
                    if name in wanted and member.isfile() and (content := archive.extractfile(member)) is not None:
                        found[name] = content.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ImageError(f"{path}: cannot be read as CIFAR-10: {error}") from None
    if missing := sorted(wanted - found.keys()):
        raise ImageError(f"{path}: lacks {', '.join(missing)} of CIFAR-10's python version")
    return found


def _cifar_batch(path: Path, name: str, content: bytes) -> tuple[Pixels, Pixels]:
    batch = _unpickle(path, name, content)
    data, labels = _entry(path, name, batch, "data"), _entry(path, name, batch, "labels")
    if not isinstance(data, _Array) or not isinstance(labels, list) or not all(isinstance(n, int) for n in labels):
        raise ImageError(f"{path}: {name} is no batch of CIFAR-10: its data is no array, or its labels are no integers")
    pixels = data.pixels(f"{path}: {name}")
    if pixels.shape != (len(labels), 3072) or not all(0 <= label < 10 for label in labels):
        raise ImageError(f"{path}: {name} has data {pixels.shape} and {len(labels)} labels: accepted are [n, 3072], n")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(labels, dtype=np.uint8)


class _Array:
    """What a pickle says of a numpy array; pixels() makes one of it."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self, name: str) -> Pixels:
        """The array, where it is one of unsigned bytes with as many of them as its shape says.

        Raises:
            ImageError: it is another.
        """
        match self.state:
            case (_, tuple() as shape, _Dtype(code="u1"), bool() | int() as fortran, bytes() as raw) if all(
                isinstance(n, int) and n >= 0 for n in shape
            ) and math.prod(shape) == len(raw):
                return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
        raise ImageError(f"{name}: its data is no array of unsigned bytes")


class _Dtype:
    """What a pickle says of a numpy dtype: its code."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = _text(code) if isinstance(code, str | bytes) else None

    def __setstate__(self, state: Any) -> None:
        pass


def _encode(text: Any, encoding: Any = None) -> bytes:
    """What Python 3 writes bytes as in pickles that Python 2 reads."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes that are not written as latin1")
    return text.encode("latin1")


class _StandIn:
    """All that a pickle gets hold of: it can be called, and nothing can be set on it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets attributes of a function")


_STAND_INS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _StandIn:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which an array has no use for")
        return _StandIn(_STAND_INS[module, name])


def _unpickle(path: Path, name: str, content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # of a damaged pickle, the reader raises nearly anything
        raise ImageError(f"{path}: {name} cannot be read as a pickled array: {error}") from None


def _entry(path: Path, name: str, content: Any, key: str) -> Any:
    if isinstance(content, dict):
        for known in (key.encode(), key):  # as Python 2 wrote it, and as Python 3 does
            if known in content:
                return content[known]
    raise ImageError(f"{path}: {name} has no {key!r}")


def _text(name: str | bytes) -> str:
    return name.decode("latin1") if isinstance(name, bytes) else str(name)
