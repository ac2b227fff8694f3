"""Models and modes of the benchmark: every form of --models, training, latency, batch size, data on the host."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import build, measure, plan
from command_line import run
from onnx_models import randomized
from torch import Tensor, nn

import vit_fast
from vit_fast.benchmarks import report, runner
from vit_fast.benchmarks.candidates import CANDIDATES
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import Group, resolve
from vit_fast.benchmarks.records import PERCENTILE_REPEATS, add_timing, compare_records, make_row
from vit_fast.measure.clock import Protocol, Samples
from vit_fast.variants import get_variant
from vit_fast.work import total, work

pytestmark = pytest.mark.usefixtures("small_ceilings")
MODULE = """
import torch
from torch import nn

def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(), nn.Linear(256, 5))

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = convolution()

    def forward(self, x):
        return {"hidden": self.parts[0](x), "logits": self.parts(x)}

def named():
    return Named()

def with_example():
    return Named(), torch.randn(1, 3, 32, 64)

class Masked(Named):
    def forward(self, inputs, mask):
        return self.parts(inputs["x"] * mask[:, None])

def several_inputs():
    return Masked(), ({"x": torch.randn(2, 3, 32, 64)}, torch.rand(2, 32, 64))

def number():
    return 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an importable module of models."""
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(model: str, *names: str, **fields: object) -> list[dict]:
    """The rows of these candidates, which must be measured."""
    rows = measure(model, *names, **fields)["rows"]
    assert {row["candidate"]: row["status"] for row in rows} == dict.fromkeys(names, "measured"), rows
    return rows


@pytest.mark.slow
def test_a_transformers_folder_is_measured_with_its_weights(folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    made = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=7)).eval()
    made.save_pretrained(folder / "mine")
    (model,) = resolve("hf:mine")(None)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.make()(images), made(pixel_values=images).logits)
    measured("hf:mine", "given", "given+fused")


def test_a_weights_file_is_measured_beside_the_peers(folder: Path) -> None:
    model = vit_fast.create_model("vit_test")
    vit_fast.save(model, "mine.safetensors")
    (found,) = resolve("mine.safetensors")(None)
    assert torch.equal(found.weights["head.weight"], model.head.weight)
    measured("mine.safetensors", "sdpa", "timm")
    with pytest.raises(ValueError, match=r"must be \(32, 32\)"):
        resolve("mine.safetensors")((64, 64))


@pytest.mark.slow
def test_an_onnx_file_is_measured_unchanged(folder: Path) -> None:
    model = randomized(vit_fast.create_model("vit_test", backend="sdpa"))
    vit_fast.export.export_onnx(model, folder / "mine.onnx", output=["tokens", "logits"], verify=False)
    for row in measured("mine.onnx", "onnxruntime", "openvino"):
        assert row["model"] == "mine.onnx" and row["FLOP"] is None
    vit_fast.export.export_onnx(model, folder / "half.onnx", precision="fp16", verify=False)
    (row,) = measured("half.onnx", "onnxruntime")
    assert (row["precision"], row["dtype"]) == ("fp16", "fp32")


class Pairs(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        tokens = x.flatten(2).mean(-1) * mask[:, None] * scale + ids
        return {"pairs": tokens @ tokens.mT, "class": tokens.argmax(-1), "tokens": tokens}


def test_an_onnx_file_with_several_inputs(folder: Path) -> None:
    """Other inputs are random; the output of all images of a batch is not compared. Also runs volumes alone."""
    inputs = (torch.randn(2, 3, 8, 8), torch.rand(2), torch.tensor([[1], [0]]), torch.tensor(2.0))
    volumes, flat = torch.randn(2, 1, 4, 8, 8), nn.Sequential(nn.Conv3d(1, 2, 4), nn.Flatten())
    for model, example, shape in ((Pairs(), inputs, (3, 8, 8)), (flat, volumes, (1, 4, 8, 8))):
        vit_fast.export.export_onnx(model, folder / "mine.onnx", example=example)
        (found,) = resolve("mine.onnx")(None)
        assert found.shape == shape and (found.data is None) == (len(shape) == 4)
        for row in measured("mine.onnx", "onnxruntime", "openvino", batch_sizes=(9,)):
            assert row["batch"] == 9 and row["agreement"] == 1


def test_a_function_returns_a_model(folder: Path) -> None:
    given, fused = measure("my_models:convolution", "given", "given+fused", img_size=[32, 64])["rows"]
    assert given["status"] == "measured" and given["img_size"] == [32, 64]
    assert given["FLOP"] == 2 * 2 * (32 * 8 * 3 * 64 + 256 * 5), "of two images"
    assert fused["status"] == "unsupported" and "no attention or MLP" in fused["reason"]


@pytest.mark.slow
def test_a_model_of_any_class_runs_in_onnx_runtime(folder: Path) -> None:
    """Compares the logits of a model that returns several tensors."""
    measured("my_models:named", "given", "onnxruntime", img_size=[32, 64])
    for name in ("with_example", "several_inputs"):
        (row, _) = measured(f"my_models:{name}", "given", "onnxruntime")
        assert row["img_size"] == [32, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("text.jpg", "not an image"),
        ("folder", "no image"),
        ("--models vit_bse_patch16_224", "vit_base_patch16_224"),
        ("--models my_models:number", "must return an nn.Module, got int"),
        ("--models vit_test,none.onnx", "none.onnx"),
        ("--models vit_test --candidates tim", "must be one of eager, sdpa, triton"),
        ("--models vit_test --candidates eager+compile:fastest", "max-autotune"),
        ("--models vit_test --candidates flex+compile", "cannot be compiled"),
        ("--models vit_test --batch-sizes 0", "--batch-sizes must be >= 1, got 0"),
        ("--batch-sizes 1,x", "1,x"),
        ("--latency --batch-sizes 1,8", "must be 1 or absent with --latency"),
        ("--batch-sizes 99999999999", "batch size 99999999999 needs at least"),
        ("--resume folder --train", "must be the only argument"),
        ("--models vit_test --device toaster", "toaster"),
        ("--models vit_test --device meta", "device must be auto, cpu, cuda or cuda:N, got 'meta'"),
        ("--data host --device cpu", "got host"),
        ("--models vit_test --time-budget -1", "--time-budget must be >= 0"),
        ("--seconds -1", "--seconds must be finite and >= 0"),
        ("--models vit_test --out .", "must be a new or empty folder"),
        ("--models timm:test_vit --img-size 63", "timm:test_vit"),
        ("--models vit_test --img-size 1x2x3", "got 1x2x3"),
        ("--models vit_test --dtypes amp", "must consist of fp32, fp16, bf16 on cpu, got 'amp'"),
    ],
)
def test_bad_input_is_one_line(folder: Path, arguments: str, message: str, capsys) -> None:
    (folder / "text.jpg").write_text("no image")
    (folder / "folder").mkdir()
    assert run("bench", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error, error


def test_the_guide_lists_every_candidate() -> None:
    guide = (Path(__file__).resolve().parents[1] / "docs" / "howto" / "benchmark.md").read_text()
    assert [name for name in CANDIDATES if f"`{name.partition('+')[0]}`" not in guide] == []


@pytest.mark.fast_cases("amp")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "amp"])
def test_training_steps_of_every_library_pass_and_count_three_times(dtype: str) -> None:
    rows = measured("vit_test", "sdpa", "timm", "transformers", "torchvision", train=True, dtypes=[dtype])
    assert {(row["task"], row["dtype"]) for row in rows} == {("training", dtype)}
    assert rows[0]["FLOP"] == 3 * total(work(get_variant("vit_test").config, 2).values()).flop


def test_an_incorrect_gradient_gets_no_speed(add) -> None:
    def forgetful(group: Group) -> nn.Module:
        model = build("sdpa", group).requires_grad_(True)
        model.blocks[0].mlp.fc1.bias.register_hook(torch.zeros_like)
        return model

    add("forgetful", forgetful)
    measured("vit_test", "forgetful")
    (row,) = measure("vit_test", "forgetful", train=True)["rows"]
    assert (row["status"], row["ms"]) == ("incorrect", None) and "the gradients'" in row["reason"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"train": True, "dtypes": ["amp"], "img_size": [64], "batch_sizes": [2]}, "--train --img-size 64"),
        ({"latency": True}, "--latency"),
        ({"batch_sizes": "best"}, "--batch-sizes best"),
        ({"seconds": 0.2}, "--seconds 0.2"),
        ({"img_size": [[32], [64, 32]]}, "--img-size 32,64x32"),
    ],
)
def test_the_command_of_a_record_and_its_request_repeat_the_run(fields: dict, words: str) -> None:
    made = make_configuration(models=["vit_test"], candidates=["sdpa"], device="cpu", **fields)
    text = report.command({"configuration": made.to_dict()})
    assert words in text and "--models vit_test" in text
    again = make_configuration(**json.loads(json.dumps(made.request)))
    assert again.to_dict() == made.to_dict() and again.time_budget_s == math.inf


def test_latency_is_of_one_image_and_has_percentiles() -> None:
    (group,) = make_configuration(models=["vit_test"], candidates=["sdpa"], latency=True, device="cpu").groups()
    assert group.batch_size == 1
    for count, percentiles in ((PERCENTILE_REPEATS, (9.91, 10.801)), (PERCENTILE_REPEATS - 1, (None, None))):
        row = make_row(group, CANDIDATES["sdpa"], "measured")
        samples = Samples(lambda _: None, group.device, Protocol())
        samples.extend(1 + number / 10 for number in range(count))
        add_timing(row, samples, group)
        assert (row["ms_p90"], row["ms_p99"]) == pytest.approx(percentiles)


def test_the_batch_is_doubled_while_throughput_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """At batch size 8, throughput is not higher than at 4; sdpa takes twice as long."""

    def simulate(self: Any, group: Group, candidates: list) -> None:
        for candidate in candidates:
            ms = max(1 + group.batch_size / 2, group.batch_size * 0.75) * (1 if candidate.name == "eager" else 2)
            figures = {"ms": ms, "images_per_s": 1e3 * group.batch_size / ms, "samples_ms": [ms] * 4}
            self.journal.add("row", make_row(group, candidate, "measured") | figures)

    monkeypatch.setattr(runner._Run, "_measure_group", simulate)
    record = runner.run(plan("eager", "sdpa", batch_sizes="best"))
    assert {row["batch"] for row in record["rows"]} == {1, 2, 4, 8}
    lines = [line for line in report.remarks(record) if "highest throughput" in line]
    assert len(lines) == 2 and all("at batch 4, " in line for line in lines)


def test_image_sizes_are_compared_separately() -> None:
    record = measure("vit_test", "eager", img_size=[[32], [64, 32]], dtypes=["fp32"])
    found = [(row["img_size"], row["tokens"], row["status"]) for row in record["rows"]]
    assert found == [([32, 32], 17, "measured"), ([64, 32], 33, "measured")]
    assert [control["img_size"] for control in record["controls"]] == [[32, 32], [64, 32]]
    assert report.closing(record).endswith("vit-fast optimize vit_test --batch 2 --img-size 64x32")
    assert list(report.groups(record)) == ["vit_test, fp32, batch 2, 32x32", "vit_test, fp32, batch 2, 64x32"]


def test_tf32_rounds_matmuls_of_its_own_group_only(add) -> None:
    with pytest.raises(ValueError, match="must consist of fp32, fp16, bf16 on cpu, got 'tf32'"):
        plan("eager", dtypes=["tf32"])
    seen: list[str] = []

    def watched(group: Group) -> object:
        seen.append(torch.get_float32_matmul_precision())
        return build("sdpa", group)

    add("watched", watched)
    before = torch.get_float32_matmul_precision()
    record = runner.run(dataclasses.replace(plan("watched"), dtypes=("fp32", "tf32")))
    assert [(row["dtype"], row["status"]) for row in record["rows"]] == [("fp32", "measured"), ("tf32", "measured")]
    assert seen == [before, "high"] and torch.get_float32_matmul_precision() == before
    assert set(record["ceilings"]["matmul_TFLOP_per_s"]) == {"fp32", "tf32"}


def test_data_on_the_host_is_named_and_pairs_with_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated on a CPU, because pinned memory needs CUDA."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: batch.clone())
    made = plan("eager", "timm")
    record = runner.run(dataclasses.replace(made, request=made.request | {"data": "host"}))
    assert {(row["status"], row["data"], row["best_peer"]) for row in record["rows"]} == {("measured", "host", "timm")}
    text = report.markdown(record)
    for part in ("vit_test, fp32, batch 2, 32x32, data on the host", "timm (data on the host)", "--data host"):
        assert part in text
    other = json.loads(json.dumps(record))
    for row in [*other["rows"], *other["controls"]]:
        row["data"] = "device"
    assert not compare_records(record, other)["pairs"] and len(compare_records(record, record)["pairs"]) == 2
