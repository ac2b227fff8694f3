"""Pytest plugin: runs each test on the emulator under several schedules, and fails it if a defect is reported."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator

import pytest
import tiers
from execute import ARCHS

from .binding import Emulator, Schedule
from .process import start

# ptxas removes such a copy or serializes all wgmma of the function, which is correct but slow. `vit-fast kernels` shows
# which one.
MERGED_OR_SERIALIZED = "register-of-wgmma-in-flight"
_emulator = pytest.StashKey[Emulator]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1, help="of the random schedules of the PTX emulator")
    parser.addoption("--schedules", default="fixed,random", help="of the PTX emulator: fixed, random or both")
    parser.addoption("--share", action="store_true", help="run this architecture's share of the cases; see execute.py")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.stash[_emulator] = start(os.environ["VIT_FAST_EXECUTE"])


def pytest_report_header(config: pytest.Config) -> str:
    return f"PTX emulator: {os.environ['VIT_FAST_EXECUTE']}, seed {config.getoption('seed')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" in metafunc.fixturenames:
        metafunc.parametrize("schedule", metafunc.config.getoption("schedules").split(","), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("slow"):
        return
    versions = config.getoption("versions")
    left_out = tiers.left_out(items, cases=config.getoption("share") and not versions)
    kept = set(items) - left_out
    if versions:
        kept = tiers.each_value([item for item in items if item in kept])
    elif config.getoption("share"):
        number = ARCHS.index(os.environ["VIT_FAST_EXECUTE"]) + config.getoption("seed")
        kept |= tiers.share([item for item in items if item in left_out], number, len(ARCHS))
    tiers.keep(config, items, kept)


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Emulator:
    return request.config.stash[_emulator]


@pytest.fixture(autouse=True)
def schedule(request: pytest.FixtureRequest, emulator: Emulator) -> Schedule:
    """Sets the order of execution. A random order depends only on the seed and the name of the test."""
    seed = zlib.crc32(f"{request.config.getoption('seed')} {request.node.nodeid}".encode()) or 1
    chosen = Schedule() if request.param == "fixed" else Schedule(seed, early=2, reverse=bool(seed & 1))
    emulator.schedule(chosen)
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    emulator = item.config.stash[_emulator]
    emulator.reports()
    try:
        result = yield
    except BaseException:
        item.add_report_section("call", "PTX emulator", _explain(item, emulator))
        raise
    explanation = _explain(item, emulator)
    if explanation:
        pytest.fail(explanation, pytrace=False)
    return result


def _explain(item: pytest.Item, emulator: Emulator) -> str:
    found = emulator.reports()
    for report in found:
        if report.kind == MERGED_OR_SERIALIZED:
            warnings.warn(str(report), stacklevel=1)
    reports = "\n".join(str(report) for report in found if report.kind != MERGED_OR_SERIALIZED)
    how = f"{os.environ['VIT_FAST_EXECUTE']} --seed {item.config.getoption('seed')} '{item.nodeid}'"
    return f"{reports}\nto repeat: python tests/execute.py {how}" if reports else ""
