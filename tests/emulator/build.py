"""Builds the emulator's libraries, and caches them by a hash of their sources."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "emulator"  # libraries by the hash of their sources, and the PTX that Triton compiled
DRIVER = ROOT / "kernels" / "inspect" / "stand_in_driver.c"
OLDEST_COMPILER = 12

# No contraction to fma: products and sums are rounded as written, also in vector code.
OPTIONS = [
    "-std=c++20",
    "-O2",
    "-ftree-vectorize",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
]
WARNINGS = ["-Wall", "-Wextra"]
X86_64_V3 = {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
RENAMED = [f"-D{name}=checked_{name}" for name in ("cuModuleLoadData", "cuLaunchKernelEx")]


def why_unavailable() -> str | None:
    """Returns the reason why the emulator cannot be built here, or None."""
    if sys.platform != "linux":
        return f"the emulator needs Linux, this is {sys.platform}"
    if importlib.util.find_spec("triton") is None:
        return "the emulator needs triton"
    if shutil.which("gcc") is None or shutil.which("g++") is None:
        return "the emulator needs gcc and g++: install them (Debian, Ubuntu: apt install g++)"
    if int(_compiler_version().split(".")[0]) < OLDEST_COMPILER:
        return f"the emulator needs g++ {OLDEST_COMPILER} or newer, found {_compiler_version()}"
    return None


def build() -> Path:
    """Returns the folder with libcuda.so.1 (for Triton), emulator.so (the same library) and preload.so."""
    sources = sorted((HERE / "source").iterdir())
    machine = _machine_options()
    key = hashlib.sha256(
        repr((OPTIONS, WARNINGS, machine, platform.machine(), _compiler_version(), _includes())).encode()
    )
    for path in (*sources, DRIVER):
        key.update(path.name.encode() + path.read_bytes())
    folder = CACHE / key.hexdigest()[:16]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test process builds, the others wait
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                _compile(Path(scratch), machine)
                Path(scratch).rename(folder)
                Path(scratch).mkdir()
    return folder


def _compile(out: Path, machine: list[str]) -> None:
    every = out / "emulator.cpp"  # one translation unit compiles faster
    parts = sorted(path for path in (HERE / "source").glob("*.cpp") if path.stem != "preload")
    every.write_text("".join(f'#include "{path}"\n' for path in parts))
    objects = [str(out / "driver.o"), str(out / "emulator.o")]
    _run(["gcc", "-c", "-std=c11", "-O1", "-fPIC", *RENAMED, _includes(), str(DRIVER), "-o", objects[0]])
    _run(["g++", "-c", *OPTIONS, *machine, *WARNINGS, _includes(), str(every), "-o", objects[1]])
    for name, options in (("libcuda.so.1", ["-Wl,-soname,libcuda.so.1"]), ("emulator.so", [])):
        _run(["g++", "-shared", *options, *objects, "-o", str(out / name), "-ldl"])
    _run(
        [
            "g++",
            "-shared",
            *OPTIONS,
            *WARNINGS,
            str(HERE / "source" / "preload.cpp"),
            "-o",
            str(out / "preload.so"),
            "-ldl",
        ]
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RuntimeError(f"the emulator could not be built: {' '.join(command)}\n{done.stderr[-3000:]}")


def _includes() -> str:
    """Returns the option for the include folder of cuda.h, which is part of Triton's wheel."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    return f"-I{Path(triton.origin).parent / 'backends' / 'nvidia' / 'include'}"


def _compiler_version() -> str:
    return subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()


def _machine_options() -> list[str]:
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = next((set(line.split(":")[1].split()) for line in cpu.splitlines() if line.startswith("flags")), set())
    return ["-march=x86-64-v3"] if flags >= X86_64_V3 else []
