"""Files that are written whole or not at all: on a full disk every writer says so in one line and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vit_fast import create_model, save
from vit_fast.files import file_aside, folder_aside

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "cpu-2core"
FULL_DISK = """
import contextlib, io, resource, signal
from pathlib import Path
import torch
from vit_fast import create_model, save
from vit_fast.cli import main
from vit_fast.export import export_onnx
from vit_fast.measure.candidate import Candidate
from vit_fast.measure.optimization import _write_program
from vit_fast.files import folder_aside

def command(*arguments):
    try:
        main([*arguments])
    except SystemExit as ended:
        assert ended.code == 2, ended.code

def program():
    with folder_aside(Path("new/program")) as aside:
        _write_program(torch.nn.Linear(4, 4), Candidate(attention="sdpa"), torch.zeros(1, 4), aside / "model.pt2")

writers = {
    "new/m.safetensors": lambda: save(create_model("vit_test"), "new/m.safetensors"),
    "new/m.onnx": lambda: export_onnx(create_model("vit_test"), "new/m.onnx", verify=False),
    "new/program": program,
    "new/deep/out/checkpoint.pth": lambda: command(
        "train", "images", "--model", "vit_test", "--epochs", "1", "--out", "new/deep/out"),
    "new/filters.png": lambda: command("show", "vit_test", "--figures", "filters", "--out", "new"),
    "new/p.parquet.parts/task.json": lambda: command(
        "predict", "images", "--weights", "m.safetensors", "--out", "new/p.parquet", "--workers", "0"),
    "new/c.png": lambda: command("evaluate", "images", "--weights", "m.safetensors", "--confusion", "new/c.png"),
    "new/r.html": lambda: command("report", RECORD, "--out", "new/r.html"),
}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for path, write in writers.items():
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(io.StringIO()):
        try:
            write()
        except OSError as error:
            told.write(f"vit-fast: error: {error}\\n")
    said = told.getvalue().lstrip("\\n")  # rich 13.7 ends a bar of progress with an empty line
    print(path, Path("new").exists(), said, sep="|", end="")
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A real limit on the size of files, in a process of its own."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (90 * number, 9, 200)).save(tmp_path / "images" / name / f"{number}.png")
    save(create_model("vit_test", num_classes=2), tmp_path / "m.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", f"RECORD = {str(RECORD)!r}\n{FULL_DISK}"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"MPLBACKEND": "agg"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == FULL_DISK.count("lambda:") + 1, done.stdout + done.stderr
    for line in lines:
        path, left, told = line.split("|")
        assert left == "False", line
        assert told.startswith(f"vit-fast: error: {path}: cannot be written: "), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "m.safetensors"]


def test_an_error_about_another_file_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), file_aside(tmp_path / "new" / "file"):
        (tmp_path / "absent").read_text()
    assert list(tmp_path.iterdir()) == []


def test_missing_folders_are_created_and_those_that_cannot_be_are_named(tmp_path: Path) -> None:
    model = create_model("vit_test")
    assert save(model, tmp_path / "a" / "b" / "m.safetensors").is_file()
    (tmp_path / "text").write_text("")
    with pytest.raises(NotADirectoryError, match=r"m\.safetensors: cannot be written: .*text is a file, must"):
        save(model, tmp_path / "text" / "deep" / "m.safetensors")


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    pipe, device, folder = tmp_path / "m.onnx", tmp_path / "link", tmp_path / "n.onnx.data"
    os.mkfifo(pipe)
    device.symlink_to("/dev/null")
    folder.mkdir()
    other = "a device, pipe or socket"
    for taken, kind in ((pipe, other), (device, other), (Path("/dev/null"), other), (folder, "a folder")):
        with pytest.raises(OSError, match=rf"{taken}: is {kind}, must be"), file_aside(taken):
            raise AssertionError
    with (
        pytest.raises(IsADirectoryError, match=r"n\.onnx\.data: is a folder"),
        file_aside(tmp_path / "n.onnx") as aside,
    ):
        for part in (aside, aside.with_name("n.onnx.data")):
            part.write_text("new")
    assert pipe.is_fifo() and device.is_symlink() and Path("/dev/null").is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "m.onnx", "n.onnx.data"]


def test_a_folder_of_a_killed_process_is_removed_after_a_day(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from vit_fast.files import file_aside
with file_aside(Path({str(tmp_path / "m.onnx")!r})) as aside:
    aside.write_text("weights")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    (left,) = tmp_path.iterdir()
    foreign = tmp_path / ".m.onnx.mine"
    foreign.mkdir()
    with file_aside(tmp_path / "m.onnx") as aside:
        aside.write_text("first")
        assert left.exists()
        for folder in (left, foreign):
            os.utime(folder, (0, 0))
        with file_aside(tmp_path / "m.onnx") as other:
            other.write_text("second")
        assert not left.exists() and aside.exists()
    assert (tmp_path / "m.onnx").read_text() == "first"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.onnx.mine", "m.onnx"]


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    name = "\u00e4" * 120 + ".safetensors"  # 252 bytes of 255
    assert save(create_model("vit_test"), tmp_path / name).is_file()
    with folder_aside(tmp_path / ("f" * 255)) as aside:
        (aside / "text").write_text("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f" * 255, name]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_appears_where_a_link_leads(exists: bool, tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    link.symlink_to(target)
    if exists:
        target.mkdir(parents=True)
    with folder_aside(link) as aside:
        (aside / "text").write_text("")
    assert link.is_symlink() and [path.name for path in target.iterdir()] == ["text"]
    with pytest.raises(OSError, match="cannot be written"), folder_aside(link):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "link", "target", "text"]


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("old")
    for path in (tmp_path / "m.onnx", tmp_path / "new" / "deep" / "m.onnx"):
        with pytest.raises(KeyboardInterrupt), file_aside(path) as aside:
            aside.write_text("half")
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == ["m.onnx"] and (tmp_path / "m.onnx").read_text() == "old"


def test_a_file_replaces_a_link_of_its_name_and_not_what_that_leads_to(tmp_path: Path) -> None:
    link, target = tmp_path / "new" / "m.onnx", tmp_path / "old" / "other.onnx"
    for path in (link, target):
        path.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    with file_aside(link) as aside:
        aside.write_text("new")
        aside.with_name("m.onnx.data").write_text("weights")
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("new", "old")
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["m.onnx", "m.onnx.data", "other.onnx"]


def test_links_in_a_circle_are_named(tmp_path: Path) -> None:
    for name, target in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(OSError, match=r"a/file: cannot be written: "), file_aside(tmp_path / "a" / "file"):
        raise AssertionError
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]
