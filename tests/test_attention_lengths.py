"""Attention's kernels at the ends of their lengths: a folded loop must not ask for more than a multiprocessor has."""

from __future__ import annotations

import itertools
import json

import pytest
from children import environment, run_python

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.kernels.inspect import offline

LENGTHS = (1, 2, 15, 16, 17, 197, 577, 1025)
ALL = [*itertools.product(LENGTHS, LENGTHS), *((n, n) for n in range(4, 257, 8))]  # the latter: one of each class
# one query, one key, and both kernels of the forward
DECISIVE = [(1, 1), (1, 577), (17, 2)]

_COMPILE = """
import json, sys
import torch
from vit_fast.kernels.inspect import offline, static_checks
from vit_fast.ops import attention
arch, lengths = sys.argv[1], json.loads(sys.argv[2])
builds, bad = {}, []
for n_q, n_kv in lengths:
    q, k, v = (torch.empty(256, 4, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (n_q, n_kv, n_kv))
    with offline.recorded(offline.gpu(arch)) as launches:
        o = attention(q, k, v, backend="triton")
        o.backward(torch.empty_like(o))
    for launch in launches:
        builds[offline.specialization(launch)] = offline.Build(launch.kernel.__name__, f"{n_q} {n_kv}", launch)
for build in builds.values():
    try:
        problems = static_checks.problems(build, static_checks.compile_stats(build.launch, arch), arch)
    except Exception as error:
        problems = [repr(error)]
    bad += [f"{build.kernel} {build.case}: {problem}" for problem in problems]
print(json.dumps([len(builds), bad]))
"""


@pytest.mark.parametrize(
    ("arch", "lengths"),
    [
        pytest.param("sm_90", DECISIVE, id="sm_90-decisive", marks=pytest.mark.slow),
        *(pytest.param(arch, ALL, id=arch, marks=pytest.mark.slow(minutes=True)) for arch in offline.ARCHS),
    ],
)
def test_every_length_compiles_within_the_limits(arch: str, lengths: list[tuple[int, int]]) -> None:
    compiled, bad = json.loads(run_python(["-c", _COMPILE, arch, json.dumps(lengths)], environment()))
    assert compiled >= 5 and bad == []
