"""Attention's kernels at the ends of their lengths: a folded loop must not ask for more than a multiprocessor has."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels import offline

LENGTHS = (1, 2, 15, 16, 17, 197, 577, 1025)
ALL = list(itertools.product(LENGTHS, LENGTHS))
# one query, one key, and both kernels of the forward
DECISIVE = [(1, 1), (1, 577), (17, 2)]

_COMPILE = """
import json, sys
from vit_fast.kernels import offline
from vit_fast.kernels.attention_offline import builds_of_lengths
arch, lengths = sys.argv[1], json.loads(sys.argv[2])
seen, bad = set(), []
for build in builds_of_lengths(arch, lengths):
    variant = (build.kernel, repr(offline._specialise(build.launch)), repr(build.launch.options()))
    if variant in seen:
        continue
    seen.add(variant)
    try:
        problems = offline.problems(build, offline.compile_build(build, arch), arch)
    except Exception as error:
        problems = [repr(error)]
    bad += [f"{build.kernel} {build.case}: {problem}" for problem in problems]
print(json.dumps([len(seen), bad]))
"""


@pytest.mark.parametrize(
    ("arch", "lengths"),
    [
        pytest.param("sm_90", DECISIVE, id="sm_90-decisive"),
        *(pytest.param(arch, ALL, id=arch, marks=pytest.mark.slow) for arch in offline.ARCHS),
    ],
)
def test_every_length_compiles_within_the_limits(arch: str, lengths: list[tuple[int, int]]) -> None:
    """In a process that is not the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE, arch, json.dumps(lengths)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    compiled, bad = json.loads(run.stdout)
    assert compiled >= 5 and bad == []
