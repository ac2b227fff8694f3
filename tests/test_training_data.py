"""Training data: the bundled digits, and what torchvision downloaded; damaged files are refused."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from command_line import uninstall
from PIL import Image

from vit_fast import create_model
from vit_fast.apps.data import ImageError
from vit_fast.apps.datasets import PreparedImages, SmallImages, open_data
from vit_fast.errors import MissingPackageError


def test_the_bundled_digits_are_digits() -> None:
    data = open_data()
    assert (len(data.train), len(data.held_out)) == (1437, 360)
    assert data.train.class_names == tuple("0123456789")
    sums = np.zeros((10, 8, 8))
    for image, label in map(data.train.read, range(1437)):
        assert image.mode == "L" and image.size == (8, 8)
        sums[label] += np.asarray(image)
    means = sums / np.linalg.norm(sums, axis=(1, 2), keepdims=True)
    held_out = map(data.held_out.read, range(360))
    hits = [np.tensordot(means, np.asarray(image)).argmax() == label for image, label in held_out]
    assert np.mean(hits) > 0.8, "most images are nearest to the mean of their own digit"


def _write_mnist(folder: Path) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 7), ("t10k", 3)):
        arrays[f"{part}-images-idx3"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        head = b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape)
        (folder / f"{name}-ubyte").write_bytes(head + array.tobytes())
    return arrays


@pytest.mark.parametrize(
    ("name", "opened", "last"), [("MNIST", ".", "9"), ("FashionMNIST", "FashionMNIST", "Ankle boot")]
)
def test_mnist_as_torchvision_keeps_it(tmp_path: Path, name: str, opened: str, last: str) -> None:
    pytest.importorskip("torchvision")
    arrays = _write_mnist(tmp_path / name / "raw")
    data = open_data(tmp_path / opened)
    assert len(data.train.class_names) == 10 and data.train.class_names[9] == last
    assert data.train.mirrored == (name == "FashionMNIST")
    for part, source in (("train", data.train), ("t10k", data.held_out)):
        assert len(source) == len(arrays[f"{part}-labels-idx1"])
        for i in range(len(source)):
            image, label = source.read(i)
            np.testing.assert_array_equal(np.asarray(image), arrays[f"{part}-images-idx3"][i])
            assert label == arrays[f"{part}-labels-idx1"][i]
    pixels, _ = PreparedImages(data.train, create_model("vit_mnist"))[0]
    expected = (arrays["train-images-idx3"][0] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(pixels[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_cifar_as_torchvision_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    folder, rng = tmp_path / "cifar-10-batches-py", np.random.default_rng(0)
    folder.mkdir()
    images = {f"data_batch_{i}": rng.integers(0, 256, (2, 3, 32, 32), dtype=np.uint8) for i in range(1, 6)}
    for name, pixels in (images | {"test_batch": images["data_batch_1"]}).items():
        (folder / name).write_bytes(pickle.dumps({"data": pixels.reshape(2, 3072), "labels": [3, 9]}))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    with pytest.raises(ImageError, match="torchvision cannot read it as CIFAR10: Dataset not found or corrupted"):
        open_data(tmp_path)  # of another checksum than the data set's: nothing of it is unpickled
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "meta", datasets.CIFAR10.meta | {"md5": None})
    data = open_data(folder)
    assert data.train.class_names == tuple(names) and data.train.mirrored
    assert (len(data.train), len(data.held_out)) == (10, 2)
    for i in range(10):
        image, label = data.train.read(i)
        np.testing.assert_array_equal(np.asarray(image), images[f"data_batch_{i // 2 + 1}"][i % 2].transpose(1, 2, 0))
        assert label == (3, 9)[i % 2]


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


def test_damaged_and_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    _write_mnist(tmp_path / "MNIST" / "raw")
    labels = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    whole = labels.read_bytes()
    for content, message in (
        (whole[:-1], "cannot read it as MNIST"),
        (b"not an IDX file", "cannot read it as MNIST"),
        (whole[:7] + b"\2" + whole[8:-1], "n >= 1, got .3, 28, 28. and .2."),
        (whole[:-1] + b"\x0a", "labels must be between 0 and 9"),
    ):
        labels.write_bytes(content)
        with pytest.raises(ImageError, match=message):
            open_data(tmp_path)
    for change, message in (
        (labels.unlink, "Dataset not found"),
        (
            lambda: _write_mnist(tmp_path / "FashionMNIST" / "raw"),
            "must contain one torchvision data set, got MNIST,",
        ),
    ):
        change()
        with pytest.raises(ImageError, match=message):
            open_data(tmp_path)
    uninstall(monkeypatch, "torchvision")
    with pytest.raises(MissingPackageError, match=r"vit-fast\[train\]"):
        open_data(tmp_path / "FashionMNIST")


def test_other_paths_are_refused(tmp_path: Path) -> None:
    for place in ("one/a", "one/b", "other/a", "other/c"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / place / "1.png")
    for paths, message in (
        ((tmp_path / "absent",), "no such file"),
        ((tmp_path / "one" / "a",), "at least two classes"),
        ((tmp_path / "one", tmp_path / "other"), "validation images must have the classes"),
        ((None, tmp_path / "one"), "data that contain a test set"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            open_data(*paths)
        assert isinstance(refused.value, ImageError) == (len(paths) == 1)
