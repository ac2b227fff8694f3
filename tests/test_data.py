"""Finding, reading and preparing images: held against timm's evaluation transform, and against damaged files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit_fast.apps.data import ImageError, find_images, load_images, make_transform, read_image, sample_image
from vit_fast.config import DataConfig
from vit_fast.weights.factory import create_model


def _noise(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest", "lanczos"])
@pytest.mark.parametrize(
    ("image_hw", "crop_pct", "crop_mode"),
    [((224, 224), 0.9, "center"), ((96, 160), 0.875, "center"), ((64, 48), 1.0, "squash"), ((98, 98), 0.95, "squash")],
)
def test_transform_equals_timms(image_hw: tuple[int, int], crop_pct: float, crop_mode: str, interpolation: str) -> None:
    import timm.data

    config = DataConfig(
        mean=(0.48, 0.45, 0.40), std=(0.26, 0.27, 0.28),
        crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation,
    )  # fmt: skip
    theirs = timm.data.create_transform((3, *image_hw), **config.to_dict())
    ours = make_transform(config, image_hw)
    for image in (_noise(301, 200), _noise(97, 333), read_image(sample_image())):
        assert (ours(image) - theirs(image)).abs().max() <= 1e-6


def test_transform_of_grey_input_averages_the_channel_statistics() -> None:
    config = DataConfig(mean=(0.4, 0.5, 0.6), std=(0.1, 0.2, 0.3), crop_pct=1.0)
    x = make_transform(config, (8, 8), in_chans=1)(Image.new("L", (8, 8), 255))
    torch.testing.assert_close(x, torch.full((1, 8, 8), 2.5))


def test_transform_refuses_other_channels_and_absurd_aspect_ratios() -> None:
    of_four = DataConfig(mean=(0.5,) * 4, std=(0.5,) * 4)
    for config, channels, message in (
        (DataConfig(), 4, "got 4"),
        (of_four, 3, "one mean and std per channel, 3, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            make_transform(config, (8, 8), channels)
    with pytest.raises(ImageError, match="aspect ratio"):
        make_transform(DataConfig(), (512, 512))(Image.new("RGB", (1, 2000)))


def _read(image: Image.Image, path: Path, **options: object) -> Image.Image:
    image.save(path, **options)
    return read_image(path)


def test_read_image_makes_rgb_of_every_kind(tmp_path: Path) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    opaque, alpha = Image.fromarray(grey), Image.new("L", (16, 16), 7)
    wide = Image.fromarray(grey.astype(np.uint16) * 256 + 255)
    for name, image in {
        "grey.png": opaque, "grey_alpha.png": Image.merge("LA", (opaque, alpha)), "palette.png": opaque.convert("P"),
        "alpha.png": Image.merge("RGBA", (*[opaque] * 3, alpha)), "sixteen.png": wide, "sixteen.tif": wide,
    }.items():  # fmt: skip
        found = _read(image, tmp_path / name)
        assert found.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(found), np.repeat(grey[..., None], 3, axis=2), err_msg=name)
    cmyk = _read(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), tmp_path / "cmyk.tif")
    assert cmyk.mode == "RGB" and cmyk.getpixel((0, 0)) == (255, 0, 0)


def test_read_image_applies_the_exif_orientation(tmp_path: Path) -> None:
    image, exif = Image.new("RGB", (6, 4), "black"), Image.Exif()
    image.putpixel((0, 0), (255, 0, 0))
    exif[0x0112] = 6  # the camera was held a quarter turn clockwise
    turned = _read(image, tmp_path / "turned.png", exif=exif)
    assert turned.size == (4, 6) and turned.getpixel((3, 0)) == (255, 0, 0)


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def test_read_image_says_in_one_error_what_is_wrong(tmp_path: Path) -> None:
    whole = sample_image().read_bytes()
    for name, content in {
        "text.png": b"not an image", "empty.jpg": b"", "truncated.jpg": whole[: len(whole) // 2],
        "bomb.png": _png_header(10_000, 10_000),  # Pillow only warns of this one
        "larger_bomb.png": _png_header(60_000, 60_000), "broken.png": _png_header(40, 40),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    Image.new("F", (4, 4)).save(tmp_path / "float.tif")
    (tmp_path / "link.png").symlink_to("gone.png")
    assert tmp_path / "link.png" in find_images([tmp_path]), "a folder's are not left out"
    for name, message in {
        "text.png": "not an image", "empty.jpg": "not an image", "truncated.jpg": "truncated",
        "bomb.png": "decompression bomb", "larger_bomb.png": "decompression bomb", "broken.png": "cannot be read",
        "link.png": r"link\.png: is a link to gone\.png, which does not exist", "float.tif": "must be integers",
        ".": "got a folder", "absent.png": "no such file",
    }.items():  # fmt: skip
        with pytest.raises(ImageError, match=message):
            read_image(tmp_path / name)


def test_one_path_is_not_taken_for_its_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among which "/" and "." are folders of images."""
    monkeypatch.chdir(tmp_path)
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    for one in (".", tmp_path):
        with pytest.raises(TypeError, match=r"must be a list, got '.+'; pass \['.+'\]"):
            find_images(one)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="images must be"):
        find_images([5])  # type: ignore[list-item]  # likewise


def test_find_images_searches_folders_and_names_every_missing_path(tmp_path: Path) -> None:
    for name in ("b/deep/2.PNG", "b/1.jpg", "b/notes.txt", "single.dat", "bare/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_images([tmp_path / "single.dat", tmp_path / "b"])
    assert found == [tmp_path / name for name in ("single.dat", "b/1.jpg", "b/deep/2.PNG")]
    with pytest.raises(ImageError, match=r"(?s)bare: no image in this folder.*absent: no such file"):
        find_images([tmp_path / "bare", tmp_path / "b", tmp_path / "absent"])


def test_load_images_prepares_each(tmp_path: Path) -> None:
    model = create_model("vit_test")
    for i, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (40, 50), colour).save(tmp_path / f"{i}.png")
    found = load_images([tmp_path], model)
    assert found.shape == (3, 3, 32, 32) and found.dtype == torch.float32
    assert found.mean((2, 3)).argmax(1).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="at least one image or folder"):
        load_images([], model)


def test_sample_image_is_a_photo() -> None:
    pixels = np.asarray(read_image(sample_image()))
    assert min(pixels.shape[:2]) > 224 and pixels.std() > 20
