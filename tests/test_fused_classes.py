"""docs/classes.md matches the results of fuse."""

from __future__ import annotations

import importlib

import pytest
from fused_classes import LIBRARIES, TABLE, row, table, timm_outcome, transformers_outcome, versions

for library in LIBRARIES:
    pytest.importorskip(library)
COMMITTED = TABLE.read_text()
pytestmark = pytest.mark.skipif(versions() not in COMMITTED, reason="the table is of other versions")


@pytest.mark.parametrize(("where", "name"), [("qwen3_vit", "qwen3_vit_88m"), ("hiera", "hiera_base_224")])
def test_a_class_of_timm_is_as_the_table_says(where: str, name: str) -> None:
    cls, found = timm_outcome(name)
    line = next(line for line in COMMITTED.splitlines() if line.startswith(f"| {where} | {cls} | {name}"))
    assert line.endswith(f" | {found} |")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("dinov3_vit", "DINOv3ViTModel"),
        ("swin", "SwinModel"),
        ("qwen3_vl", "Qwen3VLVisionModel"),
    ],
)
def test_a_class_of_transformers_is_as_the_table_says(folder: str, name: str) -> None:
    cls = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    assert row(folder, name, "default", str(transformers_outcome(cls))) in COMMITTED


@pytest.mark.slow
def test_the_whole_table() -> None:
    assert table() == COMMITTED, "make classes"
