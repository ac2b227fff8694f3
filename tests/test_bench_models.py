"""Models of one's own in the benchmark: by id, file and function; and training steps, held by their gradients."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch
from bench_support import QUICK, build
from command_line import run
from onnx_models import randomised
from PIL import Image
from torch import Tensor, nn

import vit_fast
from vit_fast.benchmarks import candidates, models, runner
from vit_fast.benchmarks.candidates import choose
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import Task, resolve
from vit_fast.benchmarks.report import command
from vit_fast.variants import get_variant
from vit_fast.work import Counter, total, work

pytestmark = pytest.mark.usefixtures("small_ceilings")
MODULE = """
import torch
from torch import nn

def convolution():
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(), nn.Linear(256, 5))

def number():
    return 5

def sized(size):
    return convolution()
"""


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a folder with an importable module of models, and small files of every kind."""
    (tmp_path / "my_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measure(model: str, *labels: str, **fields: object) -> list[dict]:
    plan = make_configuration(
        models=[model], batch_sizes=[2], candidates=labels or None, device="cpu", protocol=QUICK, **fields
    )
    return runner.run(plan)["rows"]


def assert_measured(rows: list[dict], *labels: str) -> None:
    assert {row["candidate"]: row["status"] for row in rows} == dict.fromkeys(labels, "measured"), rows


@pytest.mark.slow
def test_a_timm_id_is_measured_as_it_is_and_fused_and_exported() -> None:
    rows = measure("timm:test_vit", "given", "given+fused", "onnxruntime", img_size=[64])
    assert_measured(rows, "given", "given+fused", "onnxruntime")
    given = rows[0]
    assert given["model"] == "timm:test_vit" and given["img_size"] == [64, 64] and given["TFLOP_per_s"] > 0
    assert given["best_peer"] in ("given", "onnxruntime") and given["precision"] == "fp32"


def test_a_model_counts_what_our_formula_counts() -> None:
    ours, timms = (resolve(name)((64, 64))[0] for name in ("vit_tiny_patch16_224", "timm:vit_tiny_patch16_224"))
    counted, expected = (total(model.parts(1, False).values()).flop for model in (timms, ours))
    assert counted == expected


@pytest.mark.slow
def test_a_transformers_folder_is_measured_with_its_weights(in_a_folder: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    made = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=7)).eval()
    made.save_pretrained(in_a_folder / "mine")
    (model,) = resolve("hf:mine")(None)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.make()(images), made(pixel_values=images).logits)
    assert_measured(measure("hf:mine", "given", "given+fused"), "given", "given+fused")


def test_weights_are_measured_beside_the_peers(in_a_folder: Path) -> None:
    model = vit_fast.create_model("vit_test")
    vit_fast.save(model, "mine.safetensors")
    (found,) = resolve("mine.safetensors")(None)
    assert torch.equal(found.weights["head.weight"], model.head.weight)
    assert_measured(measure("mine.safetensors", "sdpa", "timm"), "sdpa", "timm")
    with pytest.raises(ValueError, match=r"must be \(32, 32\)"):
        resolve("mine.safetensors")((64, 64))


@pytest.mark.slow
def test_an_onnx_file_is_measured_as_it_is(in_a_folder: Path) -> None:
    model = randomised(vit_fast.create_model("vit_test", backend="sdpa"))
    vit_fast.export.export_onnx(model, in_a_folder / "mine.onnx", verify=False)
    rows = measure("mine.onnx", "onnxruntime", "openvino")
    assert_measured(rows, "onnxruntime", "openvino")
    with torch.no_grad(), Counter() as counter:
        model(torch.zeros(2, 3, 32, 32))
    for row in rows:
        assert (row["FLOP"], row["bytes"]) == (counter.work.flop, 4 * counter.work.elements)
        assert row["model"] == "mine.onnx" and row["TFLOP_per_s"] > 0
    vit_fast.export.export_onnx(model, in_a_folder / "half.onnx", precision="fp16", verify=False)
    (row,) = measure("half.onnx", "onnxruntime")  # which is no share of the ceiling of fp32
    assert (row["precision"], row["dtype"], row["ceiling_share"], row["defect"]) == ("fp16", "fp32", None, None)
    assert row["TFLOP_per_s"] > 0


def test_a_function_gives_a_model(in_a_folder: Path) -> None:
    rows = measure("my_models:convolution", "given", "given+fused", img_size=[32, 64])
    given, fused = rows
    assert given["status"] == "measured" and given["img_size"] == [32, 64]
    assert fused["status"] == "unsupported" and "no attention or MLP" in fused["reason"]


def test_an_installed_command_finds_modules_in_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    """Also `show`, which takes the same words; sys.path as it is in a script of an environment's bin folder."""
    (tmp_path / "only_here.py").write_text("import torch\ndef make(): return torch.nn.Conv2d(3, 8, 4, 4)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".", str(tmp_path))])
    assert run("show", "only_here:make", "--figures", "filters", "--out", "seen", "--img-size", "32") == 0
    assert (tmp_path / "seen" / "filters.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("text.jpg", "not an image"),
        ("bomb.png", "bomb"),
        ("folder", "no image"),
        ("--models vit_bse_patch16_224", "vit_base_patch16_224"),
        ("--models vit_nothing_*", "unknown model"),
        ("--models ,", "models must not be empty"),
        ("--models my_models:none", "my_models:none"),
        ("--models my_models:number", "must return an nn.Module, got int"),
        ("--models my_models:sized", "TypeError: sized() missing"),
        ("--models vit_test,timm:test_vitt", "timm:test_vitt"),
        ("--models hf:nowhere", "hf:nowhere"),
        ("--models vit_test,none.onnx", "none.onnx"),
        ("--models vit_test,none.safetensors", "none.safetensors"),
        ("--models vit_test,no_such_module:none", "no_such_module"),
        ("--models vit_test --candidates tim", "did you mean timm"),
        ("--models vit_test --candidates eager+compile:fastest", "max-autotune"),
        ("--models vit_test --candidates eager+compiled", "+compile must be followed by"),
        ("--models vit_test --candidates flex+compile", "cannot be compiled"),
        ("--models vit_test --batch-sizes 0", "batch size must be >= 1, got 0"),
        ("--batch-sizes 1,x", "1,x"),
        ("--batch-sizes 99999999999", "which needs at least"),
        ("--models vit_test --dtypes float32", "fp32, fp16, bf16"),
        ("--models vit_test none.jpg", "none.jpg"),
        ("--resume folder --train", "must be the only option"),
        ("--resume folder --explain", "must be the only option"),
        ("--resume folder --data host", "must be the only option"),
        ("--resume text.jpg --models vit_test", "must be the only option"),
        ("--models vit_test --device toaster", "toaster"),
        ("--models vit_test --device cuda:63", "CUDA devices"),
        ("--data disk", "--data must be device, or"),
        ("--data host --device cpu", "got host"),
        ("--models vit_test --time-budget -1", "time_budget_s"),
        ("--models vit_test --out text.jpg", "new or empty folder"),
        ("--models vit_test --out text.jpg/below", "is a file"),
        ("--models vit_test --out .", "is not empty"),
        ("--models timm:test_vit --img-size 63", "timm:test_vit"),
        ("--models vit_test --img-size 1x2x3", "got 1x2x3"),
        ("--models vit_test --img-size ax2", "got ax2"),
        ("--models vit_test --amp", "--amp requires --train"),
        ("--models vit_test --train --amp --dtypes bf16", "parameters stay in fp32"),
    ],
)
def test_bad_input_is_one_line_before_any_model_is_built(
    in_a_folder: Path, arguments: str, message: str, capsys, monkeypatch
) -> None:
    (in_a_folder / "text.jpg").write_text("no image")
    (in_a_folder / "folder").mkdir()
    Image.new("RGB", (30, 30)).save(in_a_folder / "bomb.png")
    if "bomb" in arguments:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    if arguments.startswith("--models vit_test"):  # the others are known only once they are called
        for name in ("_given", "_onnx", "_of_weights", "_variant"):
            monkeypatch.setattr(models, name, lambda *_: pytest.fail("built before all names were known"))
    assert run("bench", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error, error


@pytest.mark.fast_cases("amp")
@pytest.mark.parametrize("fields", [{}, {"dtypes": ["bf16"]}, {"amp": True}], ids=["fp32", "bf16", "amp"])
def test_training_steps_of_every_library_pass_and_count_three_times(fields: dict) -> None:
    rows = measure("vit_test", "sdpa", "timm", "transformers", "torchvision", train=True, **fields)
    assert_measured(rows, "sdpa", "timm", "transformers", "torchvision")
    assert {(row["task"], row["dtype"]) for row in rows} == {
        ("training", "amp" if "amp" in fields else fields.get("dtypes", ["fp32"])[0])
    }
    assert rows[0]["FLOP"] == 3 * total(work(get_variant("vit_test").config, 2).values()).flop


class _Scale(torch.autograd.Function):
    """The identity, whose gradient is too large."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return 1.01 * gradient


class _Wrong(nn.Module):
    def __init__(self, model: nn.Module, forgets: bool) -> None:
        super().__init__()
        self.model, self.forgets = model, forgets

    def forward(self, images: Tensor) -> Tensor:
        if not self.forgets:
            return self.model(_Scale.apply(images))
        bias = self.model.blocks[0].mlp.fc1.bias
        return torch.func.functional_call(self.model, {"blocks.0.mlp.fc1.bias": bias.detach()}, (images,))


def test_a_wrong_gradient_gets_no_speed(add) -> None:
    """Outputs are right: of a gradient that is too large, and of a parameter that is forgotten."""
    add("too large", lambda task: _Wrong(build("sdpa", task), forgets=False))
    add("forgotten", lambda task: _Wrong(build("sdpa", task), forgets=True))
    assert_measured(measure("vit_test", "too large", "forgotten"), "too large", "forgotten")
    large, forgotten = measure("vit_test", "too large", "forgotten", train=True)
    assert large["status"] == forgotten["status"] == "incorrect" and large["ms"] is forgotten["ms"] is None
    assert "error must be at most" in large["reason"]
    assert "the norm of all parameters' gradients" in forgotten["reason"]


@pytest.mark.slow
def test_only_modules_are_trained() -> None:
    (row,) = measure("vit_test", "onnxruntime", train=True)
    assert row["status"] == "unsupported" and "training needs an nn.Module" in row["reason"]
    labels = {selection.name for selection in choose(None, torch.device("cpu"), "ours", training=True)}
    assert {"sdpa", "timm", "timm+fused"} <= labels and not any("onnx" in label for label in labels)


@pytest.mark.parametrize("supported", [True, False])
def test_a_cpu_measures_peers_and_ours_in_every_dtype_that_they_have_there(supported, monkeypatch) -> None:
    monkeypatch.setattr("vit_fast.benchmarks.configuration.has_bf16", lambda: supported)
    plan = make_configuration(models=["vit_test"], device="cpu")
    assert {group.dtype_name for group in plan.groups()} == ({"fp32", "bf16"} if supported else {"fp32"})
    for group, found in dataclasses.replace(plan, time_budget_s=math.inf).plan()[0].items():
        labels = {candidate.name for candidate in found}
        assert {"timm", "timm+fused+frozen", "openvino", "timm+compile", "timm+compile:freezing"} <= labels
        assert ("onnxruntime" in labels) == (group.dtype_name == "fp32"), "it has no kernels in bf16"
        assert not any("optimized" in label for label in labels), "nothing is cached on a first run"
    assert {
        group.dtype_name for group in make_configuration(models=["vit_test"], train=True, device="cpu").groups()
    } == {"fp32"}


def test_the_command_of_a_record_measures_the_same(in_a_folder: Path) -> None:
    plan = make_configuration(
        models=["timm:test_vit"], train=True, amp=True, img_size=[64], batch_sizes=[2], device="cpu"
    )
    text = command({"configuration": plan.to_dict()})
    assert "--models timm:test_vit" in text and "--train --amp --img-size 64" in text and "--dtypes" not in text
    again = make_configuration(**plan.request)
    assert dataclasses.replace(again, models=()) == dataclasses.replace(plan, models=())


def test_our_candidates_refuse_a_model_of_another_shape() -> None:
    (model,) = resolve("timm:test_vit")((64, 64))
    task = Task(model, None, torch.float32, torch.device("cpu"), 1)
    for name in ("eager", "timm", "given"):
        candidate = candidates.get_candidate(name)
        if name == "given":
            assert isinstance(candidates.make(candidate, task), nn.Module)
        else:
            with pytest.raises(vit_fast.UnsupportedInputError, match="must be one of `vit-fast models`"):
                candidates.make(candidate, task)
