"""What can be trained on: the bundled digits, IDX files, CIFAR-10; damaged and hostile files are refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit_fast import create_model
from vit_fast.apps.data import ImageError
from vit_fast.training import archives
from vit_fast.training.archives import read_cifar, read_idx
from vit_fast.training.datasets import FASHION, PreparedImages, SmallImages, open_data


def _idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape) + array.tobytes()


def _write_mnist(folder: Path, *, zipped: bool, dot: bool = False) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 7), ("t10k", 3)):
        arrays[f"{part}-images-idx3"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        name = (name.replace("-idx", ".idx") if dot else name) + "-ubyte" + (".gz" if zipped else "")
        (folder / name).write_bytes(gzip.compress(_idx(array)) if zipped else _idx(array))
    return arrays


def test_the_bundled_digits_are_digits() -> None:
    data = open_data()
    assert (len(data.train), len(data.held_out)) == (1437, 360)
    assert data.train.class_names == tuple("0123456789")
    sums = np.zeros((10, 8, 8))
    for i in range(len(data.train)):
        image, label = data.train.read(i)
        assert image.mode == "L" and image.size == (8, 8)
        sums[label] += np.asarray(image)
    means = sums / np.linalg.norm(sums, axis=(1, 2), keepdims=True)
    right = [
        np.tensordot(means, np.asarray(image)).argmax() == label for image, label in map(data.held_out.read, range(360))
    ]
    assert np.mean(right) > 0.8, "the nearest mean digit is mostly the right one"


@pytest.mark.parametrize(
    ("zipped", "dot", "inside"), [(False, False, ""), (True, False, "MNIST/raw"), (False, True, "raw")]
)
def test_mnist_is_read_as_it_is_given_away(tmp_path: Path, zipped: bool, dot: bool, inside: str) -> None:
    arrays = _write_mnist(tmp_path / "given" / inside, zipped=zipped, dot=dot)
    data = open_data(tmp_path / "given")
    assert data.train.class_names == tuple("0123456789")
    for part, source in (("train", data.train), ("t10k", data.held_out)):
        assert len(source) == len(arrays[f"{part}-labels-idx1"])
        for i in range(len(source)):
            image, label = source.read(i)
            np.testing.assert_array_equal(np.asarray(image), arrays[f"{part}-images-idx3"][i])
            assert label == arrays[f"{part}-labels-idx1"][i]
    pixels, _ = PreparedImages(data.train, create_model("vit_mnist"))[0]
    expected = (arrays["train-images-idx3"][0] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(pixels[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_fashion_has_names_and_may_be_mirrored(tmp_path: Path) -> None:
    _write_mnist(tmp_path / "FashionMNIST" / "raw", zipped=True)
    data = open_data(tmp_path / "FashionMNIST")
    assert data.train.class_names == FASHION and data.train.mirrored


def test_shifts_are_small_and_digits_are_not_mirrored() -> None:
    pixels = np.zeros((1, 16, 16), dtype=np.uint8)
    pixels[0, 8, 4] = 255
    for mirrored in (False, True):
        source = SmallImages(pixels, np.zeros(1, dtype=np.uint8), ("a", "b"), mirrored=mirrored)
        images = PreparedImages(source, create_model("vit_test", img_size=16, in_chans=1), augment=True)
        places = set()
        for images.epoch in range(60):
            x = images[0][0][0]
            if x.max() > 0:
                places.add((x == x.max()).nonzero()[0][1].item())
        assert {2, 3, 4, 5, 6} >= {place for place in places if place < 8}
        assert any(place > 8 for place in places) == mirrored


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    whole = _idx(np.zeros((3, 4, 4), dtype=np.uint8))
    for content, message in (
        (b"", "not an IDX file"),
        (b"not an IDX file", "not an IDX file"),
        (b"\0\0\x0d" + whole[3:], "unsigned bytes"),
        (whole[:9], "within its header"),
        (whole[:-1], "48 bytes, 47 follow"),
        (whole + b"\0", "48 bytes, more follow"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "more than 4 GiB"),
        (gzip.compress(whole)[:-12], "cannot be read"),
        (gzip.compress(whole)[:-8] + bytes(8), "cannot be read"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ImageError, match=message):
            read_idx(tmp_path / "file")
    arrays = _write_mnist(tmp_path / "mnist", zipped=False)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(_idx(arrays["train-labels-idx1"]))
    with pytest.raises(ImageError, match=r"t10k.*do not fit together"):
        open_data(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(_idx(np.full(3, 10, dtype=np.uint8)))
    with pytest.raises(ImageError, match="a label is 10"):
        open_data(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ImageError, match="lacks t10k-labels"):
        open_data(tmp_path / "mnist")


NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _cifar(python: int) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """The files of CIFAR-10, two images a batch, pickled as Python 2 wrote them or as Python 3 does."""
    rng = np.random.default_rng(0)
    files, images = {}, {}
    for name in (*archives.CIFAR_TRAIN, archives.CIFAR_TEST):
        images[name] = rng.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
        data = np.ascontiguousarray(images[name].transpose(0, 3, 1, 2)).reshape(2, 3072)
        files[name] = _python_2(data) if python == 2 else pickle.dumps({"data": data, "labels": [3, 9]}, protocol=2)
    names = {b"label_names": [name.encode() for name in NAMES]} if python == 2 else {"label_names": list(NAMES)}
    files[archives.CIFAR_NAMES] = pickle.dumps(names, protocol=2)
    return files, images


def _python_2(data: np.ndarray) -> bytes:
    """As cPickle of Python 2 wrote a batch: its byte strings are opcodes of their own."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING

    raw = b"T" + struct.pack("<i", data.nbytes) + data.tobytes()  # BINSTRING
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + b"K\0\x85" + text(b"b") + b"tR"
    kind = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\0K\1tR(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    shape = b"K" + bytes([data.shape[0]]) + b"M" + struct.pack("<H", data.shape[1]) + b"\x86"
    array = empty + b"(K\1" + shape + kind + b"\x89" + raw + b"tb"  # \x89: not in Fortran's order
    return b"\x80\2}(" + text(b"data") + array + text(b"labels") + b"](K\3K\te" + b"u."


def _write_cifar(folder: Path, files: dict[str, bytes], *, archive: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not archive:
        (folder / archives.CIFAR_FOLDER).mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / archives.CIFAR_FOLDER / name).write_bytes(content)
        return folder
    with tarfile.open(folder / archives.CIFAR_ARCHIVE, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{archives.CIFAR_FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return folder / archives.CIFAR_ARCHIVE


@pytest.mark.parametrize("python", [2, 3])
@pytest.mark.parametrize("archive", [False, True])
def test_cifar_is_read_as_it_is_given_away(tmp_path: Path, python: int, archive: bool) -> None:
    files, images = _cifar(python)
    if python == 2:  # what is written here by hand is what numpy reads
        assert pickle.loads(files["test_batch"], encoding="bytes")[b"data"].shape == (2, 3072)
    data = open_data(_write_cifar(tmp_path, files, archive=archive))
    assert data.train.class_names == NAMES and data.train.mirrored
    assert (len(data.train), len(data.held_out)) == (10, 2)
    for i in range(10):
        image, label = data.train.read(i)
        np.testing.assert_array_equal(np.asarray(image), images[f"data_batch_{i // 2 + 1}"][i % 2])
        assert label == (3, 9)[i % 2]


class _Hostile:
    def __init__(self, function: object, *arguments: object) -> None:
        self.told = function, arguments

    def __reduce__(self) -> object:
        return self.told


def test_pickles_run_nothing(tmp_path: Path) -> None:
    files, _ = _cifar(2)
    trace = tmp_path / "trace"
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\n"
    hostile = {
        "os.system": (pickle.dumps(_Hostile(os.system, f"touch {trace}"), protocol=2), "asks for posix.system"),
        "open": (pickle.dumps(_Hostile(open, str(trace), "w"), protocol=2), "asks for (_io|io).open"),
        "eval": (b"c__builtin__\neval\n(X\4\0\0\0exittR.", "asks for __builtin__.eval"),
        "our own": (b"cvit_fast.training.archives\n_Array\n(tR.", "asks for vit_fast"),
        "attributes": (reconstruct + b"N}X\6\0\0\0pixelsNs\x86b.", "sets attributes of a function"),
        "new": (b"\x80\2" + reconstruct + b")\x81.", "cannot be read"),
        "persistent": (b"Pname\n.", "cannot be read"),
        "truncated": (files["test_batch"][:-20], "cannot be read"),
        "no dictionary": (pickle.dumps([1, 2]), "no 'data'"),
        "no array": (pickle.dumps({"data": [1], "labels": [3]}), "no batch of CIFAR-10"),
        "objects": (pickle.dumps({"data": np.array([None, {}]), "labels": [3, 9]}, protocol=2), "unsigned bytes"),
        "floats": (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [3, 9]}, protocol=2), "unsigned bytes"),
        "other shape": (_python_2(np.zeros((2, 300), dtype=np.uint8)), r"accepted are \[n, 3072\]"),
        "other labels": (
            pickle.dumps({"data": np.zeros((2, 3072), dtype=np.uint8), "labels": [3, 10]}, protocol=2), "accepted",
        ),
    }  # fmt: skip
    for name, (content, message) in hostile.items():
        path = _write_cifar(tmp_path / name, files | {"test_batch": content}, archive=False)
        with pytest.raises(ImageError, match=message):
            open_data(path)
    assert not trace.exists()
    assert archives._Array.pixels is not None
    assert read_cifar(_write_cifar(tmp_path / "good", files, archive=True))[2] == NAMES


def test_an_archive_writes_nothing_and_lacks_nothing(tmp_path: Path) -> None:
    files, _ = _cifar(2)
    outside = _write_cifar(tmp_path / "a", files | {"../../../escaped": b"x"}, archive=True)
    open_data(outside)
    assert {path.name for path in tmp_path.rglob("*")} == {"a", archives.CIFAR_ARCHIVE}
    del files["data_batch_4"]
    with pytest.raises(ImageError, match="lacks data_batch_4"):
        open_data(_write_cifar(tmp_path / "b", files, archive=True))
    path = _write_cifar(tmp_path / "c", _cifar(2)[0], archive=True)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ImageError, match=r"cannot be read|lacks|at least two classes"):
        open_data(path)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no such file"):
        open_data(tmp_path / "absent")
    with pytest.raises(ImageError, match="at least two classes"):
        open_data(tmp_path)
    for label in ("a", "b"):
        (tmp_path / "one" / label).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "one" / label / "1.png")
    (tmp_path / "other").mkdir()
    for label in ("a", "c"):
        (tmp_path / "other" / label).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / "other" / label / "1.png")
    with pytest.raises(ValueError, match="validation has classes"):
        open_data(tmp_path / "one", tmp_path / "other")
    with pytest.raises(ValueError, match="test set of its own"):
        open_data(None, tmp_path / "one")
