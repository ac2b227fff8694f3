"""Graphs of packed towers, captured and replayed by a tape, in Triton's interpreter and on the PTX emulator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_tapes import install
from kernel_execution import DTYPES
from packed_towers import EVERY_CODE, FAMILIES, MIXED
from torch import Tensor

import vit_fast

pytest.importorskip("triton", reason="the kernels need triton")
pytest.importorskip("transformers.vision_utils")


def halved(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {name: halved(value) for name, value in inputs.items()}
    return inputs.to(DTYPES[0]) if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


@pytest.mark.fast_cases("qwen2_5_vl-32")
@pytest.mark.parametrize("budget", [32, 64])
@pytest.mark.parametrize("name", EVERY_CODE)
def test_a_graph_is_replayed_with_other_images(name: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records launches once per budget. Replays run no code of the tower."""
    tapes = install(monkeypatch)
    family = FAMILIES[name]
    tower = family.build().to(DTYPES[0]).eval()
    plain = copy.deepcopy(tower)
    vit_fast.fuse(tower, "triton")
    runner = vit_fast.GraphRunner(tower, budgets=(budget,), max_images=4)
    assert runner.captured and not tapes

    def compare(sizes: Any, **options: Any) -> None:
        inputs = halved(family.call(sizes)) | options
        with torch.no_grad():
            expected = plain(**copy.deepcopy(inputs))
        for one, other in zip(family.real(runner(**inputs), sizes), family.real(expected, sizes), strict=True):
            if isinstance(other, Tensor):
                # in half precision, of some layers: the rounding of a layer is 1e-3 of the largest element
                scale = float(other.abs().max())
                close = {"rtol": 0, "atol": 2e-2 * scale} if other.dtype == torch.half else {"rtol": 1e-4, "atol": 2e-5}
                torch.testing.assert_close(one, other, **close)

    first, *others = (MIXED, ((2, 4),), ((4, 4),) * 5) if budget == 64 else (((2, 4), (2, 2)), ((4, 4),))
    for sizes in (first, *others):
        compare(sizes)
    (tape,) = tapes
    assert tape.launches >= 10 and tape.replays > len(others)
    assert runner.stats().graphs == 1 and runner.stats().hits == {budget: tape.replays}

    def shrink_weights() -> None:
        with torch.no_grad():
            for parameter in (*tower.parameters(), *plain.parameters()):
                parameter.mul_(0.9)

    shrink_weights()
    compare(first)
    if budget == 64 and "naflexvit" not in name:
        vit_fast.freeze(tower.train().eval())  # the second graph reads other frozen weights than the first
        compare(first, output_hidden_states=True)
        assert len(tapes) == 2
        shrink_weights()
        compare(first)
        compare(first, output_hidden_states=True)
