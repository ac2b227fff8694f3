"""Runs the parts of `make test-full` that a change requires, by the folders that it touches.

    python tests/changed.py                 # compares with the commit at which this branch left main, or on main, with
                                            # the previous commit
    python tests/changed.py --list          # prints the commands and runs nothing
    python tests/changed.py --minutes 20    # starts no test after 20 minutes; other options are passed to pytest, too

Fast tests are left out: `make test` runs all of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

KERNELS = (
    "attention_*", "kernel_shapes", "matmul_*", "mlp_*", "rotary_*",
    "block_operator", "operators", "fp8_block",
)  # fmt: skip
COMPILED = ("static_kernels", "stand_in_driver", "warm_up")
FUSED = (
    "fuse*", "reading*", "handed_statistics", "freeze", "mlp_operator",
    "transformers_attention", "packed", "graph_*",
)  # fmt: skip
FP8 = ("fp8_*", "calibrate")
EXPORT = ("export_*", "onnx_*", "deployment", "fixed_grid")
TUNING = ("optimize*", "tuning_*")
BENCH = ("bench_*", "gpu_check*", "on_gpus")
LIBRARIES = (*FUSED, *FP8, "onnx_families", "export_options", "model_*", "weights_*", "bench_models")
MODEL = ("model*", "mlp_operator")
PREDICTION = ("predict*", "data", "files")
TRAINING = ("train*",)
# The tests of a folder, by names without test_ and .py; a path is one of the folders that it begins with.
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": (*KERNELS, *COMPILED, "fp8_*", "transforms", "packed"),
    "kernels/inspect": (*COMPILED, "kernel_shapes", "packaging"),
    "vit_fast": (*FUSED, *FP8, *PREDICTION, *MODEL, "stand_in_driver", "transforms", "runtime", "cli"),
    "vit_fast/quantization": (*FP8, "export_eight_bit*"),
    "vit_fast/run": ("compile_backend", "runtime", "graph_*", "warm_up", "stand_in_driver"),
    "vit_fast/apps": (*PREDICTION, *TRAINING, "docs"),
    "vit_fast/ops": (*KERNELS, *FP8, "stand_in_driver", "transforms", "auto_backend"),
    "vit_fast/libraries": LIBRARIES,
    "vit_fast/integrations": FUSED,
    "vit_fast/weights": ("weights_*", "model_against_timm", "calibrate"),
    "vit_fast/measure": (*TUNING, *BENCH),
    "vit_fast/figures": ("figures", "bench_report"),
    "vit_fast/commands": ("cli", "*_cli", "docs", "predict*", "train", "deployment"),
    "export": (*EXPORT, "optimize_*"),
    "benchmarks": BENCH,
    "docs": ("docs", "fused_classes", "bench_report"),
    "examples": ("deployment",),
    "tests": (),  # only the file that changed, or the files that import it
    "tests/emulator": ("emulator_*", "tiers"),
    "pyproject.toml": ("packaging", "docs"),
    "constraints.txt": (*EXPORT, *FUSED, "packaging"),
}
EXECUTED = ("kernels", "tests/emulator")  # folders for which some kernels run on the PTX emulator
EXECUTE = ["tests/execute.py", "sm_90", "tests/test_executed_kernels.py"]


def folder_of(path: str) -> str | None:
    """Returns the longest key of PARTS that contains a path."""
    return max((key for key in PARTS if path == key or path.startswith(f"{key}/")), key=len, default=None)


def tests_of(paths: Iterable[str]) -> list[str]:
    """Returns the test files that changed paths require."""
    paths = set(paths)
    patterns = {pattern for path in paths if (folder := folder_of(path)) for pattern in PARTS[folder]}
    files = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").glob("test_*.py"))
    shared = [Path(path).stem for path in paths if fnmatch(path, "tests/*.py") and path not in files]
    imports = re.compile(rf"^(?:import|from) ({'|'.join(shared)})\b", re.MULTILINE) if shared else None
    return [
        file
        for file in files
        if file in paths
        or any(fnmatch(Path(file).stem.removeprefix("test_"), pattern) for pattern in patterns)
        or (imports is not None and imports.search((ROOT / file).read_text()))
    ]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def changed_paths() -> list[str] | None:
    """Returns the paths that differ from the commit at which HEAD left main, or on main from its parent.

    Includes uncommitted files. Returns None if git knows no such commit.
    """
    bases = [_git("merge-base", "HEAD", "origin/main"), _git("merge-base", "HEAD", "main")]
    bases = [base for base in bases if base not in (None, _git("rev-parse", "HEAD"))]
    base = bases[0] if bases else _git("rev-parse", "--verify", "-q", "HEAD~1")
    if base is None:
        return None
    listed = (_git("diff", "--name-only", base), _git("ls-files", "--others", "--exclude-standard"))
    return [path for part in listed if part for path in part.splitlines()]


def main(arguments: list[str]) -> int:
    paths = changed_paths()
    if paths is None:
        print("git knows no earlier commit to compare with: only `make test` is required")
        return 0
    files = tests_of(paths)
    options = ["-n", os.environ.get("JOBS", "auto"), "--dist", "worksteal"]
    options += [argument for argument in arguments if argument != "--list"]
    commands = [["-m", "pytest", "--only-slow", *options, *files]] if files else []
    if any(path.startswith(EXECUTED) and not path.startswith("kernels/inspect") for path in paths):
        commands.append([*EXECUTE, *options])
    print(f"{len(paths)} files differ, which requires slow tests of {len(files)} files")
    for command in commands:
        print("python", *command, flush=True)
        if "--list" in arguments:
            continue
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode
        if code not in (0, 5):  # 5: none of these files has a slow test
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
