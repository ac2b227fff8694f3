"""Tests that docs/classes.md lists the results of `fuse`."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[1] / "docs"
COMMITTED = (DOCS / "classes.md").read_text()
generator = SimpleNamespace(**runpy.run_path(str(DOCS / "make_classes.py")))


@pytest.fixture(autouse=True)
def same_versions() -> None:
    if generator.versions() not in COMMITTED:
        pytest.skip("the table is of other versions")


@pytest.mark.parametrize("name", ["qwen3_vit_306m", "test_vit_relpos"])
def test_a_class_of_timm_matches_the_table(name: str) -> None:
    cls, found = generator.timm_outcome(name)
    assert re.search(rf"^\| \w+ \| {cls} \| {name} \| {re.escape(str(found))} \|$", COMMITTED, re.MULTILINE)


@pytest.mark.parametrize("path", ["dinov3_vit.DINOv3ViTModel", "flava.FlavaImageModel", "qwen3_vl.Qwen3VLVisionModel"])
def test_a_class_of_transformers_matches_the_table(path: str) -> None:
    folder, _, name = path.partition(".")
    cls = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    assert generator.row(folder, name, "default", str(generator.transformers_outcome(cls))) in COMMITTED


@pytest.mark.slow(minutes=True)
def test_the_whole_table() -> None:
    assert generator.table() == COMMITTED, "make classes"
