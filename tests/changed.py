"""Runs the parts of `make test-full` that a change requires, by the folders that it touches.

    python tests/changed.py                 # what differs from where this branch left main, or from the last commit
    python tests/changed.py --list          # prints the commands and runs nothing

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
    "attention_*", "matmul_*", "mlp_*", "modern_blocks", "rotary*",
    "weight_gradients", "scaled_weights", "block_operator", "operators", "fp8_block",
)  # fmt: skip
COMPILED = ("static_kernels", "stand_in_driver", "new_batch_sizes", "warm_up")
FUSED = (
    "fuse*", "traced_parts", "handed_statistics", "freeze", "mlp_operator",
    "transformers_attention", "packed", "graph_*",
)  # fmt: skip
FP8 = ("fp8_*", "calibrate")
EXPORT = ("export_*", "onnx_*", "deployment", "fixed_grid")
TUNING = ("optimize*", "tuning_*")
BENCH = ("bench_*", "gpu_check")
LIBRARIES = (*FUSED, *FP8, "onnx_families", "export_options", "model_*", "weights_*", "bench_models")
MODEL = ("model*", "mlp_operator", "rotary_models")
PREDICTION = ("predict*", "evaluate", "data", "files")
TRAINING = ("train*",)
# The tests of a folder, by names without test_ and .py; a path is one of the folders that it begins with.
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": (*KERNELS, *COMPILED, "fp8_*", "autocast"),
    "kernels/attention": ("attention_*", *COMPILED, "packed", "block_operator", "fp8_block"),
    "kernels/linear": (*KERNELS, *COMPILED, "fp8_*", "autocast"),
    "kernels/matmul": (*KERNELS, *COMPILED, "fp8_*", "autocast"),
    "kernels/inspect": (*COMPILED, "attention_tuning", "packaging"),
    "vit_fast": (*FUSED, *FP8, *PREDICTION, *MODEL, "stand_in_driver", "autocast", "runtime", "cli"),
    "vit_fast/blocks": (*FUSED, *FP8, *MODEL, "stand_in_driver", "autocast", "runtime"),
    "vit_fast/fusion": (*FUSED, *FP8, *MODEL, "stand_in_driver", "autocast", "runtime"),
    "vit_fast/quantization": (*FP8, "export_eight_bit*"),
    "vit_fast/run": ("runtime", "graph_*", "warm_up", "new_batch_sizes", "stand_in_driver"),
    "vit_fast/apps": (*PREDICTION, *TRAINING, "docs"),
    "vit_fast/ops": (*KERNELS, *FP8, "stand_in_driver", "autocast", "transforms", "auto_backend"),
    "vit_fast/libraries": LIBRARIES,
    "vit_fast/libraries/interface": LIBRARIES,
    "vit_fast/libraries/timm": LIBRARIES,
    "vit_fast/libraries/transformers": LIBRARIES,
    "vit_fast/integrations": FUSED,
    "vit_fast/weights": ("weights_*", "model_against_timm", "calibrate"),
    "vit_fast/measure": (*TUNING, *BENCH),
    "vit_fast/figures": ("figures", "bench_report"),
    "vit_fast/commands": ("cli", "*_cli", "docs", "predict*", "train", "deployment"),
    "export": (*EXPORT, "tuning_runtimes", "optimize_*"),
    "export/runtime": (*EXPORT, "tuning_runtimes", "optimize_*"),
    "benchmarks": BENCH,
    "docs": ("docs",),
    "examples": ("deployment",),
    "tests": (),  # only the file that changed, or the files that import it
    "tests/emulator": ("emulator_*", "execute"),
    "pyproject.toml": ("packaging", "docs"),
    "constraints.txt": (*EXPORT, *FUSED, "packaging", "interpreter_speed"),
}
# Whoever changes these also runs some kernels as PTX; all of them are `make test-execute`.
EXECUTED = ("kernels", "kernels/attention", "kernels/linear", "kernels/matmul", "tests/emulator")
EXECUTE = ["tests/execute.py", "sm_90", "tests/test_executed_kernels.py"]


def folders_of(path: str) -> list[str]:
    """Returns the keys of PARTS for a path: the longest that it lies in, none for a file without tests."""
    found = [key for key in PARTS if path == key or path.startswith(f"{key}/")]
    return [max(found, key=len)] if found else []


def tests_of(paths: Iterable[str]) -> list[str]:
    """Returns the test files that changed paths require."""
    paths = set(paths)
    patterns = {pattern for path in paths for folder in folders_of(path) for pattern in PARTS[folder]}
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


def base_commit() -> str | None:
    """Returns where HEAD left main; on main itself its parent; None where git knows neither."""
    head = _git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        base = _git("merge-base", "HEAD", main)
        if base is not None and base != head:
            return base
    return _git("rev-parse", "--verify", "-q", "HEAD~1")


def changed_paths(base: str) -> list[str]:
    """Returns what differs from a commit, with what is not committed yet."""
    listed = (_git("diff", "--name-only", base), _git("ls-files", "--others", "--exclude-standard"))
    return [path for part in listed if part for path in part.splitlines()]


def main(arguments: list[str]) -> int:
    base = base_commit()
    if base is None:
        print("git knows no earlier commit to compare with: nothing but `make test` is required")
        return 0
    paths = changed_paths(base)
    files = tests_of(paths)
    workers = ["-n", os.environ.get("JOBS", "auto"), "--dist", "worksteal"]
    commands = [["-m", "pytest", "--only-slow", *workers, *files]] if files else []
    if any(folder in EXECUTED for path in paths for folder in folders_of(path)):
        commands.append([*EXECUTE, *workers])
    print(f"{len(paths)} files differ from {base[:10]}; required of `make test-full`: {len(files)} files of tests")
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
