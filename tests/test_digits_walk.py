"""One small model that really sees, through everything one does with a model: each step takes what the last one left.

A grey picture of 8 x 8, a head of ten, a weights file: nothing here is asked for by a variant's name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import TRAINED_ON, digits, digits_vit, inputs, write_digits

import vit_fast
from vit_fast.benchmarks.records import read_record
from vit_fast.cli import main
from vit_fast.export import OnnxRunner

FIRST, LAST = 1700, 1797  # of the digits that nothing was trained on


def _run(*arguments: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, arguments)])
    assert not exit_.value.code


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
def test_a_digits_model_goes_all_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIT_FAST_CACHE", str(tmp_path / "cache"))
    assert FIRST > TRAINED_ON
    images, labels = inputs()[FIRST:LAST], digits()[1][FIRST:LAST]
    write_digits(Path("images"), FIRST, LAST)
    model = digits_vit()
    with torch.inference_mode():
        logits = model(images)
    right = (logits.argmax(1) == labels).float().mean().item()
    assert right > 0.9, "what it says means something"
    vit_fast.save(model, "digits.safetensors")

    report = vit_fast.fuse(model)
    report.require_all()
    vit_fast.freeze(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), logits, atol=1e-4, rtol=1e-4)
    vit_fast.unfreeze(model)

    _run("evaluate", "images", "--weights", "digits.safetensors", "--json")
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(right)

    _run("export", "digits.safetensors", "-o", "digits.onnx", "--target", "ort-cpu", "--validation", "images")
    assert "random" not in capsys.readouterr().out
    torch.testing.assert_close(OnnxRunner("digits.onnx", "cpu")(images), logits, atol=1e-4, rtol=1e-4)
    _run("evaluate", "images", "--weights", "digits.onnx", "--against", "digits.safetensors", "--json")
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(right)

    _run("predict", "images/7", "--weights", "digits.onnx", "--top-k", "1", "--json")
    assert {row["top"][0]["class"] for row in json.loads(capsys.readouterr().out)} <= set("0123456789")
    _run("show", "digits.safetensors", next(Path("images/7").iterdir()), "--out", "seen")
    assert len(list(Path("seen").glob("*.png"))) == 7

    _run("optimize", "digits.safetensors", "--batch", "4", "--images", "images", "--budget", "2", "--save", "fast.pt")
    fast = vit_fast.load_optimized("fast.pt", vit_fast.load("digits.safetensors"))
    torch.testing.assert_close(fast(images[:4]), logits[:4], atol=1e-4, rtol=1e-4)

    _run(
        "bench", "images", "--models", "digits.safetensors", "--batch-sizes", "4", "--dtypes", "fp32",
        "--subjects", "eager,sdpa,onnxruntime", "--time-budget", "0", "--out", "bench",
    )  # fmt: skip
    rows = read_record(Path("bench"))["rows"]
    assert [row["status"] for row in rows] == ["measured"] * 3
