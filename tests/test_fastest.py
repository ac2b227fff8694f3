"""Implementations of frozen layers are selected by a measurement, once per machine; no file can make freeze fail."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS
from spellings import Net, PostNorm, SequenceFirst
from torch._subclasses.fake_tensor import FakeTensorMode

import vit_fast
from vit_fast.blocks import fastest, packed
from vit_fast.files import cache_folder
from vit_fast.measure import cache
from vit_fast.ops.packed_linear import can_pack
from vit_fast.reading import forms

pytestmark = [
    pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN or MKL"),
    pytest.mark.usefixtures("own_cache"),
]
NAMES = ("default", "second", "third")
MEASURE = fastest._measure  # which conftest.py replaces


class Machine:
    """A clock that advances by given ms per image, or for each number of images; `busy` maps call numbers to ms."""

    def __init__(self, ms: dict[str, Any], busy: dict[int, float]) -> None:
        self.now, self.calls, self.ms, self.busy = 0.0, 0, ms, busy

    def build(self, by: dict[str, str], timed: Any) -> Callable[[], None]:
        layers = [timed(layer, functools.partial(self.run, name)) for layer, name in by.items()]
        return lambda: [layer(torch.empty(images)) for images in fastest.IMAGES for layer in layers] and None

    def run(self, name: str, images: torch.Tensor) -> None:
        self.calls += 1
        ms = self.ms[name]
        ms = ms[fastest.IMAGES.index(len(images))] if isinstance(ms, tuple) else ms * len(images)
        self.now += self.busy.get(self.calls, ms) / 1e3


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, int]]]:
    """Returns a function that returns the selected implementation and the number of calls, as in a new process."""

    def select(layer: str = "layer", busy: dict[int, float] | None = None, **ms: Any) -> tuple[str, int]:
        machine = Machine(ms, busy or {})
        monkeypatch.setattr(fastest, "perf_counter", lambda: machine.now)
        monkeypatch.setattr(fastest, "_measure", MEASURE)
        fastest._known.cache_clear()
        return fastest.fastest({layer: NAMES}, machine.build)[layer], machine.calls

    yield select
    fastest._known.cache_clear()


def the_file() -> Path:
    (path,) = (cache_folder() / "cpu").iterdir()
    return path


def test_the_fastest_is_selected(select: Any) -> None:
    assert select("a", default=3, second=1, third=2)[0] == "second"
    assert select("b", default=1, second=0.99, third=2)[0] == "default", "within the noise"
    assert select("d", default=(10, 40), second=(5, 44), third=(11, 40))[0] == "default", "slower for four images"
    assert select("e", default=(10, 40), second=(5, 44), third=(8, 40.5))[0] == "third", "not slower within the noise"
    interrupted = dict.fromkeys(range(7, 90, 7), 50.0)
    assert select("c", interrupted, default=3, second=1, third=2)[0] == "second"


def test_layers_with_different_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is measured by its own implementations, and only one of them was measured before."""
    monkeypatch.setattr(fastest, "_measure", MEASURE)
    fastest._known.cache_clear()
    machine = Machine({"default": 3, "second": 1, "third": 2, "graph": 2, "flash": 1, "only": 1}, {})
    monkeypatch.setattr(fastest, "perf_counter", lambda: machine.now)
    layers = {"linear": NAMES, "attention": ["graph", "flash"], "other": ["only"]}
    found = {"linear": "second", "attention": "flash", "other": "only"}
    assert fastest.fastest(layers, machine.build) == found
    machine.ms |= {"second": 9, "new": 1}
    assert fastest.fastest(layers | {"new": ["default", "new"]}, machine.build) == found | {"new": "new"}
    fastest._known.cache_clear()


def test_a_disturbed_result_is_not_stored(select: Any) -> None:
    """In every second round, the second implementation takes longer than in the others."""
    calls = [(number, (number - 1) // 6, (number - 1) % 6 // 2) for number in range(1, 999)]
    rounds = {number: at for number, at, run in calls if (run + at) % len(NAMES) == 1}
    disturbed = {number: 70.0 for number, at in rounds.items() if at % 2}
    assert select(busy=disturbed, default=30, second=10, third=20)[0] == "default"
    slow = {number: 500.0 for number, *_ in calls} | {number: 100.0 + at % 2 * 800 for number, at in rounds.items()}
    assert select(busy=slow, default=30, second=10, third=20) == ("default", 18), "ends after two rounds"
    assert not (cache_folder() / "cpu").exists()
    assert select(default=30, second=10, third=20)[0] == "second"


def test_results_are_cached(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(default=3, second=1, third=2)[1] > 0
    assert select(default=1, second=3, third=3) == ("second", 0)
    assert select("other", default=1, second=3, third=3)[0] == "default"
    assert set(json.loads(the_file().read_text())["selected"]) == {"layer", "other"}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert select(default=1, second=3, third=3)[0] == "default", "with other instructions"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert select(default=1, second=3, third=3)[0] == "default"
    finally:
        torch.set_num_threads(threads)
    assert select(default=1, second=3, third=3) == ("second", 0)
    assert cache.clear() == 0 and not list((cache_folder() / "cpu").iterdir())


def test_another_process_writes_the_same_file(select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    select("first", default=3, second=1, third=2)
    path, machine = the_file(), Machine(dict.fromkeys(NAMES, 1), {})
    monkeypatch.setattr(fastest, "perf_counter", lambda: machine.now)
    text = json.loads(path.read_text())
    path.write_text(json.dumps(text | {"selected": text["selected"] | {"of the other process": "third"}}))
    fastest.fastest({"second": NAMES}, machine.build)
    assert set(json.loads(path.read_text())["selected"]) >= {"first", "of the other process"}


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"{}", b'{"selected": 3}', b'{"selected": {"layer": "removed"}}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_file_is_measured_again(text: bytes, select: Any) -> None:
    select(default=3, second=1, third=2)
    the_file().write_bytes(text)
    assert select(default=3, second=1, third=2)[1] > 0
    assert select(default=3, second=1, third=2) == ("second", 0)


@pytest.mark.parametrize("blocked", ["folder", "file", "pipe"])
def test_a_cache_that_cannot_be_used(blocked: str, select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    select(default=3, second=1, third=2)
    if blocked == "folder":
        monkeypatch.setenv("VIT_FAST_CACHE", f"{os.devnull}/nowhere")
    else:
        (path := the_file()).unlink()
        path.mkdir() if blocked == "file" else os.mkfifo(path)
    for _ in range(2):
        name, calls = select(default=3, second=1, third=2)
        assert name == "second" and calls > 0


def test_freeze_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another block, another process, and an update of the weights measure nothing."""
    measured: list[str] = []

    def measure(layers: dict[str, list[str]], build: Any) -> dict[str, str]:
        found = MEASURE(layers, build)
        measured.extend(found)
        return {layer: names[-1] for layer, names in layers.items()}

    monkeypatch.setattr(fastest, "_measure", measure)
    monkeypatch.setattr(fastest, "NOISE", float("inf"))
    for number in (4 + len(packed.TOKENS), 0):
        fastest._known.cache_clear()
        measured.clear()
        model = SUBJECTS["vit-fast"].build().eval()
        vit_fast.fuse(model, "sdpa")
        vit_fast.freeze(model)
        with torch.no_grad():
            model.blocks[0].mlp.fc1.weight.mul_(2)
            model(**SUBJECTS["vit-fast"].inputs())
        assert len(measured) == number
        for block in model.blocks:
            steps = block.vit_fast_parts.frozen.steps()
            assert {steps.qkv._by, steps.proj._by, steps.fc1._by, steps.fc2._by} == {"conv"}
            assert steps.attend.args == (dict.fromkeys(packed.TOKENS, "graph"),)
    fastest._known.cache_clear()


@pytest.mark.parametrize("block", [PostNorm, SequenceFirst])
@pytest.mark.parametrize("seconds", [-1.0, 1.0])
def test_modules_that_are_faster_as_they_are(block: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that were read are measured as a whole; calls with packed weights take `seconds` more than two."""
    now, images, sizes = 0.0, torch.randn(1, 3, 20, 16), set()
    model = Net(block).eval()
    vit_fast.fuse(model, "sdpa", example=images)
    expected, run_packed = model(images), forms.run_packed

    def clock() -> float:
        nonlocal now
        now += 2.0
        return now

    def run(packed: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal now
        now += seconds
        sizes.add(len(x))
        return run_packed(packed, x, *args, **options)

    monkeypatch.setattr(fastest, "perf_counter", clock)
    monkeypatch.setattr(forms, "run_packed", run)
    monkeypatch.setattr(fastest, "_measure", MEASURE)
    fastest._known.cache_clear()
    frozen = vit_fast.freeze(model)
    assert max(sizes) == 4 * min(sizes) and len(frozen) == (2 if seconds < 0 else 0)
    assert seconds < 0 or "packed weights are not measurably faster" in str(frozen)
    sizes.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    assert len(sizes) == (1 if seconds < 0 else 0)
    assert vit_fast.freeze(model).skipped == frozen.skipped, "a result of this process"
    fastest._known.cache_clear()


def test_nothing_is_measured_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        assert fastest.fastest({"layer": NAMES}, lambda *_: pytest.fail("built")) == {"layer": "default"}
        return x + 1

    with FakeTensorMode():
        call(torch.zeros(2))
    torch.jit.trace(call, torch.zeros(2), check_trace=False)
    torch.vmap(call)(torch.zeros(2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    call(torch.zeros(2))
    assert not cache_folder().exists()


def test_attention_of_the_nearest_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(packed, "_graph_of", lambda qkv, scale: lambda: used.append(qkv.shape[1]))
    for tokens in (1, 49, 65, 196, 257, 1025):
        packed._attend({197: "graph", 50: "flash", 577: "graph"}, torch.zeros(1, tokens, 3, 2, 8), None, None)
    assert used == [196, 257, 1025]
