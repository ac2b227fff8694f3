"""Tests that files are written atomically, and that a full disk is reported in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from children import environment, run_python
from PIL import Image

from vit_fast import create_model, save
from vit_fast.files import file_aside, folder_aside

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "amd-epyc-family-26-avx512-2-threads"
FULL_DISK = """
import contextlib, io, resource, signal, sys
from pathlib import Path
import torch
from vit_fast import create_model, save
from vit_fast.cli import main
from vit_fast.export import export_onnx

weights = ("--weights", "m.safetensors")
commands = {
    "new/deep/out/checkpoint.pth": ("train", "images", "--model", "vit_test", "--epochs", "1", "--out", "new/deep/out"),
    "new/filters.png": ("show", "vit_test", "--figures", "filters", "--out", "new"),
    "new/p.parquet.parts/task.json": ("predict", "images", *weights, "--out", "new/p.parquet", "--workers", "0"),
    "new/c.png": ("evaluate", "images", *weights, "--confusion", "new/c.png"),
    "new/r.html": ("report", sys.argv[1], "--out", "new/r.html"),
}
writers = {path: lambda path=path: main([*commands[path]]) for path in commands}
writers["new/m.safetensors"] = lambda: save(create_model("vit_test"), "new/m.safetensors")
writers["new/m.onnx"] = lambda: export_onnx(create_model("vit_test"), "new/m.onnx", verify=False)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for path, write in writers.items():
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
        try:
            write()
        except OSError as error:
            stderr.write(f"vit-fast: error: {error}\\n")
        except SystemExit as ended:
            assert ended.code == 2, ended.code
    error = stderr.getvalue().lstrip("\\n")  # rich 13.7 ends a progress bar with an empty line
    assert error.startswith(f"vit-fast: error: {path}: cannot be written: ") and error.count("\\n") == 1, error
    assert not Path("new").exists(), path
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """Limits the size of files of a child process."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (90 * number, 9, 200)).save(tmp_path / "images" / name / f"{number}.png")
    save(create_model("vit_test", num_classes=2), tmp_path / "m.safetensors")
    run_python(["-c", FULL_DISK, str(RECORD)], environment() | {"MPLBACKEND": "agg"}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "m.safetensors"]


def test_errors_name_the_file_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), file_aside(tmp_path / "new" / "file"):
        (tmp_path / "absent").read_text()  # an error of another file stays unchanged
    with pytest.raises(KeyboardInterrupt), file_aside(tmp_path / "new" / "deep" / "m.onnx") as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "text").write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path, message in (("text/deep/file", ".*text must be a folder, got a file"), ("circle/file", "")):
        with pytest.raises(OSError, match=f"{path}: cannot be written: {message}"), file_aside(tmp_path / path):
            raise AssertionError
    assert sorted(each.name for each in tmp_path.iterdir()) == ["circle", "text"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    pipe, device, folder = tmp_path / "m.onnx", tmp_path / "link", tmp_path / "n.onnx.data"
    os.mkfifo(pipe)
    device.symlink_to("/dev/null")
    folder.mkdir()
    other = "a device, pipe or socket"
    for taken, kind in ((pipe, other), (device, other), (Path("/dev/null"), other), (folder, "a folder")):
        with pytest.raises(OSError, match=rf"{taken}: must be .*, got {kind}"), file_aside(taken):
            raise AssertionError
    with pytest.raises(IsADirectoryError, match=r"n\.onnx\.data: must be"), file_aside(tmp_path / "n.onnx") as aside:
        for part in (aside, aside.with_name("n.onnx.data")):
            part.write_text("new")
    assert pipe.is_fifo() and device.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "m.onnx", "n.onnx.data"]


def test_folder_aside_follows_links_and_names_may_have_the_maximum_length(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "elsewhere" / ("f" * 255)
    link.symlink_to(target)
    with folder_aside(link) as aside, file_aside(aside / ("\u00e4" * 120 + ".onnx")) as file:
        file.write_text("")
    assert link.is_symlink() and len(list(target.iterdir())) == 1
    with pytest.raises(OSError, match="cannot be written"), folder_aside(link):
        pass  # it is not empty
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "link"]


def test_file_aside_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    link, target = tmp_path / "m.onnx", tmp_path / "other.onnx"
    target.write_text("old")
    link.symlink_to(target)
    with file_aside(link) as aside:
        aside.write_text("new")
        aside.with_name("m.onnx.data").write_text("weights")
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("new", "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data", "other.onnx"]
