"""The cache of vit_fast.optimize: its location, ignored entries, and concurrent writers."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vit_fast
from vit_fast.measure import cache
from vit_fast.measure.candidate import Candidate
from vit_fast.weights.source import weights_digest

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32)


def test_weights_of_any_kind_have_a_digest() -> None:
    norm = torch.nn.BatchNorm2d(3)
    before = weights_digest(norm)
    norm.num_batches_tracked += 1
    assert weights_digest(norm) != before == weights_digest(torch.nn.BatchNorm2d(3))


def test_where_answers_are_kept(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("VIT_FAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "vit_fast" / "answers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "vit_fast" / "answers"


def test_auto_does_not_depend_on_what_was_found(model, images, only) -> None:
    only(Candidate(attention="eager", mlp="eager"))
    assert vit_fast.optimize(model, images, budget_s=600).candidate.attention == "eager"
    assert vit_fast.fuse(model).backend == "sdpa"
    assert vit_fast.create_model("vit_test").blocks[0].vit_fast_backend == "sdpa"


def _no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VIT_FAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)


def _a_file_for_a_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "taken").write_text("a file")
    monkeypatch.setenv("VIT_FAST_CACHE", str(folder / "taken"))


@pytest.mark.parametrize(
    ("prevent", "reason"), [(_no_home, "home directory.*VIT_FAST_CACHE"), (_a_file_for_a_folder, "taken")]
)
def test_a_search_is_not_lost_where_nothing_can_be_kept(
    prevent, reason, model, images, one_engine, monkeypatch, tmp_path
) -> None:
    prevent(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match=f"not cached: .*{reason}"):
        found = vit_fast.optimize(model, images, budget_s=1)
    assert found.model(images).shape == (4, 10) and not found.from_cache


def test_what_cannot_be_read_is_no_answer(monkeypatch) -> None:
    """A folder, a pipe, which would be waited for, and what nobody may look at."""
    (cache.folder() / "folder.json").mkdir(parents=True)
    os.mkfifo(cache.folder() / "pipe.json")
    assert list(cache.all_results()) == [] and cache.clear() == 0

    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    (cache.folder() / "one.json").touch()
    monkeypatch.setattr(Path, "is_file", forbidden)
    assert list(cache.all_results()) == []


def test_a_search_that_was_cut_off_is_repeated_where_there_is_more_time(model, images, only) -> None:
    only(Candidate(attention="sdpa", mlp="sdpa"))
    first = vit_fast.optimize(model, images, budget_s=1e-3)
    figures = first.cached.figures
    assert not first.from_cache and (figures["tried"], figures["candidates"]) == (1, 2) and figures["finish_s"] > 1e-3
    told = "1 of 2 candidates tried in 0.001 s; about "
    assert told in str(first) and "s would finish the search" in str(first)
    same = vit_fast.optimize(model, images, budget_s=1e-3)
    assert same.from_cache and told in str(same), "as much time finds as much"
    whole = vit_fast.optimize(model, images, budget_s=600)
    assert not whole.from_cache and whole.candidate == Candidate(attention="sdpa", mlp="sdpa")
    long = dataclasses.replace(first.cached, figures=figures | {"finish_s": 460.2, "images_per_s": 12345.6})
    assert "12,346 images/s" in (text := str(dataclasses.replace(first, cached=long))) and "about 460 s" in text
    assert whole.cached.figures["finish_s"] is None and "(2 of 2 candidates tried in 600 s)" in str(whole)
    for budget_s in (1e-3, 6000):
        assert vit_fast.optimize(model, images, budget_s=budget_s).from_cache, "a whole search is never repeated"


def test_foreign_answers_are_ignored_with_a_word(model, images, one_engine) -> None:
    vit_fast.optimize(model, images, budget_s=1e-3)
    (path,) = cache.folder().glob("*.json")
    good = json.loads(path.read_text())
    foreign = [good | {"figures": {}}, good | {"key": {}}, good | {"candidate": {"x": 1}}]
    foreign += [good | {"candidate": {"threads": [3]}}]
    for text in (b"", b"[1]", b'{"format": 99}', b"\xff", *(json.dumps(each).encode() for each in foreign)):
        path.write_bytes(text)
        with pytest.warns(UserWarning, match="ignored"):
            assert not vit_fast.optimize(model, images, budget_s=1e-3).from_cache
    assert cache.clear() == 1 and list(cache.all_results()) == []


RACED = {"machine": {}, "model": "m", "example": [], "request": {}}


def _keep_many(number: int) -> None:
    for turn in range(20):
        cache.store(cache.CachedResult(RACED, Candidate(split=number + 1), dict.fromkeys(cache.FIGURES) | {"ms": turn}))


def test_processes_may_race_for_an_answer() -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_keep_many, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = cache.look_up(RACED)
    assert found is not None and found.figures["ms"] == 19
    assert [path.name for path in cache.folder().iterdir()] == [path.name for path in cache.folder().glob("*.json")]
