"""Images and training data: the transform equals timm's, augmentation, and errors for damaged files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import uninstall
from PIL import Image

from vit_fast import DataConfig, create_model
from vit_fast.apps.data import ImageError, ImageFolder, find_images, make_transform, read_image, sample_image
from vit_fast.apps.datasets import PreparedImages, open_data
from vit_fast.errors import MissingPackageError


def _noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("image_hw", "crop_pct", "crop_mode", "interpolation"),
    [
        ((224, 224), 0.9, "center", "bicubic"),
        ((96, 160), 0.875, "center", "bilinear"),
        ((64, 48), 1.0, "squash", "nearest"),
        ((98, 98), 0.95, "squash", "lanczos"),
    ],
)
def test_transform_equals_timms(image_hw: tuple[int, int], crop_pct: float, crop_mode: str, interpolation: str) -> None:
    import timm.data

    config = DataConfig(
        mean=(0.48, 0.45, 0.40), std=(0.26, 0.27, 0.28),
        crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation,
    )  # fmt: skip
    peer = timm.data.create_transform((3, *image_hw), **config.to_dict())
    transform = make_transform(config, image_hw)
    for image in (_noise(301, 200), _noise(97, 333), read_image(sample_image())):
        assert (transform(image) - peer(image)).abs().max() <= 1e-6


def test_transform_of_other_channels_and_aspect_ratios() -> None:
    config = DataConfig(mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3), crop_pct=1.0)
    gray = make_transform(config, (8, 8), in_chans=1)(Image.new("L", (8, 8), 255))
    torch.testing.assert_close(gray, torch.full((1, 8, 8), 2.5))
    with pytest.raises(ValueError, match="got 4"):
        make_transform(DataConfig(), (8, 8), 4)
    with pytest.raises(ValueError, match=r"one mean and std, or one per channel \(3\), got 4"):
        make_transform(DataConfig(mean=(0.5,) * 4, std=(0.5,) * 4), (8, 8), 3)
    with pytest.raises(ImageError, match="aspect ratio"):
        make_transform(DataConfig(), (512, 512))(Image.new("RGB", (1, 2000)))


def test_read_image_converts_every_kind_to_rgb(tmp_path: Path) -> None:
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16)
    opaque, alpha = Image.fromarray(gray), Image.new("L", (16, 16), 7)
    wide = Image.fromarray(gray.astype(np.uint16) * 256 + 255)
    for name, image in {
        "gray.png": opaque, "gray_alpha.png": Image.merge("LA", (opaque, alpha)), "palette.png": opaque.convert("P"),
        "alpha.png": Image.merge("RGBA", (*[opaque] * 3, alpha)), "sixteen.png": wide, "sixteen.tif": wide,
    }.items():  # fmt: skip
        image.save(tmp_path / name)
        found = read_image(tmp_path / name)
        assert found.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(found), np.repeat(gray[..., None], 3, axis=2), err_msg=name)
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "cmyk.tif")
    cmyk = read_image(tmp_path / "cmyk.tif")
    assert cmyk.mode == "RGB" and cmyk.getpixel((0, 0)) == (255, 0, 0)
    image, exif = Image.new("RGB", (6, 4), "black"), Image.Exif()
    image.putpixel((0, 0), (255, 0, 0))
    exif[0x0112] = 6  # the camera was held a quarter turn clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    turned = read_image(tmp_path / "turned.png")
    assert turned.size == (4, 6) and turned.getpixel((3, 0)) == (255, 0, 0)


def test_read_image_rejects_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sample_image().read_bytes()
    for name, content, message in (
        ("text.png", b"not an image", "not an image"),
        ("empty.jpg", b"", "not an image"),
        ("truncated.jpg", whole[: len(whole) // 2], "truncated"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=message):
            read_image(tmp_path / name)
    for pixels in (150_000, 250_000):  # Pillow only warns about images with up to twice its limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
        with pytest.raises(ImageError, match="decompression bomb"):
            read_image(sample_image())
    Image.new("F", (4, 4)).save(tmp_path / "float.tif")
    (tmp_path / "link.png").symlink_to("gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("link.png", "no such file"), ("pipe.png", "got a folder, pipe"), ("float.tif", "must be integers"),
        ("folder.png", "got a folder"),
    ):  # fmt: skip
        assert (tmp_path / name in find_images([tmp_path])) == (name != "folder.png"), "links and pipes are not ignored"
        with pytest.raises(ImageError, match=message):
            read_image(tmp_path / name)


def test_find_images_searches_folders_and_lists_every_problem(tmp_path: Path) -> None:
    for name in ("b/deep/2.PNG", "b/1.jpg", "b/notes.txt", "single.dat", "bare/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_images([tmp_path / "single.dat", tmp_path / "b"])
    assert found == [tmp_path / name for name in ("single.dat", "b/1.jpg", "b/deep/2.PNG")]
    with pytest.raises(ImageError, match=r"(?s)bare: no image in this folder.*absent: no such file"):
        find_images([tmp_path / "bare", tmp_path / "b", tmp_path / "absent"])
    for one in (".", tmp_path):  # not the list of its letters
        with pytest.raises(TypeError, match=r"must be a list, got '.+'; pass \['.+'\]"):
            find_images(one)


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
def test_mnist_of_torchvision(tmp_path: Path, name: str, opened: str, last: str) -> None:
    pytest.importorskip("torchvision")
    arrays = _write_mnist(tmp_path / name / "raw")
    data = open_data(tmp_path / opened)
    assert (len(data.class_names), data.class_names[9], data.mirrored) == (10, last, name == "FashionMNIST")
    for part, source in (("train", data.train), ("t10k", data.held_out)):
        images, labels = zip(*(source[i] for i in range(len(source))))
        np.testing.assert_array_equal(np.stack([*map(np.asarray, images)]), arrays[f"{part}-images-idx3"])
        assert list(labels) == arrays[f"{part}-labels-idx1"].tolist()
    pixels, _ = PreparedImages(data.train, create_model("vit_mnist"))[0]
    expected = (arrays["train-images-idx3"][0] / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(pixels[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_cifar_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision compares CIFAR-10 with checksums, so its class is replaced here."""
    datasets, folder = pytest.importorskip("torchvision.datasets"), tmp_path / "cifar-10-batches-py"
    fake = type("Fake", (list,), {"classes": ["cat", "dog"]})
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, train: fake([root == tmp_path, train]))
    folder.mkdir()
    for path in (tmp_path, str(folder)):
        assert open_data(path) == ([True, True], [True, False], ("cat", "dog"), True)


def test_errors_of_open_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    for place in ("one/a", "one/b", "other/a", "other/c"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / place / "1.png")
    _write_mnist(tmp_path / "MNIST" / "raw")
    _write_mnist(tmp_path / "FashionMNIST" / "raw")
    labels = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1])
    labels = tmp_path / "FashionMNIST" / "raw" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x0a")
    for paths, error, message in (
        ((tmp_path / "absent",), FileNotFoundError, "absent"),
        ((tmp_path / "one" / "a",), ImageError, "at least two subfolders, one per class, got 0"),
        ((tmp_path / "one", tmp_path / "other"), ValueError, "validation images must have the classes"),
        ((None, tmp_path / "one"), ValueError, "must be None for data that contain a test set"),
        ((tmp_path / "MNIST",), ImageError, "cannot read it as MNIST"),
        ((tmp_path / "FashionMNIST",), ImageError, "one label each, between 0 and 9"),
        ((tmp_path,), ImageError, "must contain one torchvision data set, got MNIST,"),
    ):
        with pytest.raises(error, match=message):
            open_data(*paths)
    uninstall(monkeypatch, "torchvision")
    with pytest.raises(MissingPackageError, match=r"vit-fast\[train\]"):
        open_data(tmp_path / "FashionMNIST")


def test_crops_are_those_of_random_resized_crop(tmp_path: Path) -> None:
    """Areas of 35 to 100 percent, aspect ratios of 3:4 to 4:3, all positions, half of them mirrored."""
    across = np.linspace(0, 255, 160).astype(np.uint8)  # red increases from left to right, green from top to bottom
    for name in "ab":
        (tmp_path / name).mkdir()
        ramps = np.stack(np.broadcast_arrays(across, across[:, None], np.uint8(0)), -1)
        Image.fromarray(ramps).save(tmp_path / name / "1.png")
    model = create_model("vit_test")
    images = PreparedImages(ImageFolder(tmp_path), model, augment=True)
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (model.data_config.mean, model.data_config.std))
    shares = []
    for images.epoch in range(200):
        red, green, _ = images[1][0].numpy() * std + mean
        shares.append((red[0, -1] - red[0, 0], green[-1, 0] - green[0, 0], min(red[0, 0], red[0, -1])))
    widths, heights, lefts = np.array(shares).T
    areas, ratios = np.abs(widths) * heights, np.abs(widths) / heights
    assert 0.3 < areas.min() < 0.4 and 0.85 < areas.max() <= 1.01
    assert 0.7 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.42
    assert 60 < (widths < 0).sum() < 140 and lefts.min() < 0.05 and lefts.max() > 0.25


@pytest.mark.parametrize("mirror", [False, True])
def test_shifts_are_small_and_digits_are_not_mirrored(mirror: bool) -> None:
    pixels = np.zeros((16, 16), dtype=np.uint8)
    pixels[8, 4] = 255
    model = create_model("vit_test", img_size=16, in_chans=1)
    images, places = PreparedImages([(Image.fromarray(pixels), 0)], model, augment=True, mirror=mirror), set()
    for images.epoch in range(60):
        places.add(images[0][0][0].argmax().item() % 16)
    assert places <= {*range(2, 7), *(range(9, 15) if mirror else ())}
    assert len(places) > 2 and any(place > 8 for place in places) == mirror
