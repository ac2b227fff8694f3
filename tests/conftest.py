"""Setup of all tests: execution of kernels, markers, options, seeds, fixtures."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import tiers
import torch
from kernel_execution import HAS_GPU, INTERPRETED, KERNEL_ARCH, pytest_runtest_call  # noqa: F401  # a hook
from torch import nn

import torchvision_cpu

torchvision_cpu.install_import_hook()
STARTED = time.monotonic()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests must not read cached results of this machine. Not even root can create this folder.
os.environ["VIT_FAST_CACHE"] = f"{os.devnull}/nowhere"

import pytest  # noqa: E402  # the environment above must be set before anything imports triton
from hypothesis import HealthCheck, settings  # noqa: E402  # as above

if INTERPRETED:
    import interpreter

    interpreter.correct()
    interpreter.accelerate()

settings.register_profile(
    "quick", max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("full", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("executed", settings.get_profile("quick"), max_examples=5)  # each compiles kernels
settings.load_profile("executed" if KERNEL_ARCH else os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tests, like `make test-full`")
    parser.addoption("--only-slow", action="store_true", help="run only slow tests, without slow(minutes=True)")
    parser.addoption("--minutes", type=float, help="start no test after this many minutes")
    parser.addoption("--versions", action="store_true", help="run version-dependent tests, and a tenth of the rest")


# Tests that depend on the versions of libraries: compile, export, launches, public API.
DEPENDENT = re.compile(
    r"test_(export_errors|export_options|fuse_matrix|model|onnx_runner|packaging|runtime|stand_in_driver|static_kernels|"
    r"warm_up)\.py|::.*(compile|export)"
)
# Tests of this repository's tools, which do not depend on the versions of libraries.
TOOLS = ("test_bench_", "test_docs", "test_emulator_", "test_structure", "test_tiers")


def _of_versions(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that DEPENDENT matches, and every tenth of each other file except TOOLS."""
    groups = groupby((item for item in items if not item.path.stem.startswith(TOOLS)), key=lambda item: item.path)
    numbered = [numbers for _, group in groups for numbers in enumerate(group)]
    chosen = {item for number, item in numbered if number % 10 == 0 or DEPENDENT.search(item.nodeid)}
    return {item for item in chosen if not tiers.takes_minutes(item)}


def pytest_report_header() -> str:
    from vit_fast.version import PACKAGES, installed

    versions = {name: installed(name) for name in PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--versions") and KERNEL_ARCH is None:
        tiers.keep(config, items, _of_versions(items))
    elif config.getoption("--only-slow"):
        tiers.keep(config, items, {item for item in tiers.left_out(items) if not tiers.takes_minutes(item)})
    elif KERNEL_ARCH is None and not config.getoption("--slow"):  # emulator/plugin.py chooses its own
        tiers.keep(config, items, set(items) - tiers.left_out(items))
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of capability 8.0 or higher"))
        if "executed" in item.keywords and KERNEL_ARCH is None:
            item.add_marker(pytest.mark.skip(reason="needs the PTX emulator: make test-execute"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"not started within {minutes:g} minutes")


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_untimed_calls() -> None:
    """Timings in tests need not be fair; the test of these calls sets SETTLE_MS itself."""
    from vit_fast.measure import clock

    clock.SETTLE_MS = 0.0


@pytest.fixture(autouse=True, scope="session")
def _default_implementations() -> None:
    """Frozen layers run by the second implementation, so that weights are packed and tests do not depend on timings."""
    from vit_fast.blocks import fastest

    fastest._measure = lambda layers, _: {layer: names[:2][-1] for layer, names in layers.items()}


if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures ceilings on tiny inputs and intervals from few samples, without garbage collection."""
    from bench_support import shrink

    shrink(monkeypatch)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers a candidate of `bench` during a test."""
    from bench_support import named

    from vit_fast.benchmarks import candidates

    def add(name: str, build: Callable[..., object], **fields: object) -> None:
        monkeypatch.setitem(candidates.CANDIDATES, name, named(name, build, **fields))

    return add


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with two pretend GPUs, whose caches are small."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter, and a machine without a GPU")
    from pretend_gpu import Machine

    from vit_fast.measure import clock

    monkeypatch.setattr(clock, "MIN_FLUSH_BYTES", 2**10)
    with Machine(2, L2_cache_size=2**9).installed() as machine:
        yield machine


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gives a test its own cache of optimize results."""
    monkeypatch.setenv("VIT_FAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restricts `optimize` to candidates that are fast to build."""
    from vit_fast.measure import trials

    every = trials.candidates
    module = "vit_fast.measure.optimization.candidates"
    monkeypatch.setattr(module, lambda *how: [choice for choice in every(*how) if choice.engine == "torch"])


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch):
    """Restricts `optimize` to one candidate, which is always the fastest."""
    from vit_fast.measure import trials
    from vit_fast.measure.candidate import Candidate

    def choose(choice: Candidate) -> None:
        take = trials.Trials.call_ms
        monkeypatch.setattr("vit_fast.measure.optimization.candidates", lambda *_: [choice])
        monkeypatch.setattr(trials, "variations", lambda *_: [])
        monkeypatch.setattr(
            trials.Trials, "call_ms",
            lambda self, candidate, number: take(self, candidate, number) * (0.01 if candidate == choice else 1.0),
        )  # fmt: skip

    return choose


@pytest.fixture
def model() -> nn.Module:
    """The eager test model with noise on all parameters, because zeros and ones would hide errors."""
    import vit_fast

    model = vit_fast.create_model("vit_test", backend="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture
def images() -> torch.Tensor:
    """A batch for the test model."""
    return torch.randn(4, 3, 32, 32)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ONNX files of a small model, by the names of `onnx_models.FILES`: exported("plain")."""
    from onnx_models import FILES, Exports, make

    return Exports(tmp_path_factory.mktemp("onnx"), make("vit"), FILES)
