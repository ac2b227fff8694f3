"""OnnxRunner: images and outputs, errors, providers that are not available, files of other exporters."""

from __future__ import annotations

import ctypes
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command_line import run
from fused_models import transformers_subject
from onnx_models import NAMES
from pretend_gpu import Machine
from torch import Tensor, nn

from vit_fast.apps.data import make_transform, read_image, sample_image
from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner, ProviderError, export_onnx


@torch.inference_mode()
def eager(model: Any, images: torch.Tensor) -> Any:
    return model(images).numpy()


@pytest.mark.parametrize("file", ["plain", "fixed"])
def test_any_batch_is_split(exported: Any, file: str) -> None:
    model, runner = exported.model, OnnxRunner(exported(file), "cpu", max_batch=4, threads=1)
    every = torch.randn(9, 3, 32, 32)
    expected = eager(model if file == "plain" else lambda x: model.forward_head(model.forward_features(x), True), every)
    for batch in (0, 1, 4, 9):
        images = every[:batch]
        for given in (images, images.numpy(), images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)):
            got = runner(given)
            assert type(got) is type(given) and tuple(got.shape) == (batch, *expected.shape[1:])
            np.testing.assert_allclose(np.asarray(got), expected[:batch], atol=1e-5)
    first = runner(every[:4].numpy())
    runner(every[4:8].numpy())
    np.testing.assert_allclose(first, expected[:4], atol=1e-5, err_msg="overwritten by the next call")


def test_pixels(exported: Any) -> None:
    runner, image = OnnxRunner(exported("pixels"), "cpu"), read_image(sample_image())
    expected = eager(exported.model, make_transform(DataConfig(), (32, 32))(image)[None])
    for pixels in (np.asarray(image), np.asarray(image)[None]):
        assert np.abs(runner(pixels) - expected).max() < 0.01 * np.abs(expected).max()
    probabilities = runner.probabilities([image, image.resize((100, 60))])
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-12)
    assert runner.probabilities([]).shape == (0, 10)
    with pytest.raises(TypeError, match="image must be an Image"):
        runner.probabilities(["image.jpg"])  # type: ignore[list-item]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("file", "options", "images", "message"),
    [
        ("plain", {}, zeros(1, 3, 32, 40), r"must be \['batch', 3, 32, 32\], got \(1, 3, 32, 40\)"),
        ("plain", {}, zeros(3, 32, 32), r"shape must be .*, got \(3, 32, 32\)"),
        ("plain", {}, torch.zeros(1, 3, 32, 32).bfloat16(), "dtype must be float32, got bfloat16"),
        ("plain", {}, [zeros(3, 32, 32)], "images must be a numpy array or a torch tensor, got list"),
        ("pixels", {}, zeros(1, 32, 32, 3), r"dtype must be uint8, got float32"),
        ("pixels", {}, zeros(1, 0, 32, 3, dtype=np.uint8), r"no axis except the batch may be empty"),
        ("sizes", {}, zeros(1, 3, 42, 64), "multiples of the patch size 8x8"),
        ("plain", {"device": "gpu"}, None, "device must be .*got 'gpu'"),
        ("plain", {"threads": 10**6}, None, "threads must be at most 1024, got 1000000"),
        ("plain", {"max_batch": -1}, None, "max_batch must be .*got -1"),
        ("plain", {"class_names": ["a"]}, None, "class_names must have 10 names.*got 1"),
        ("plain", {"class_names": []}, None, "class_names must have 10 names.*got 0"),
        ("plain", {"image_hw": (40, 32)}, None, r"image_hw must be \(32, 32\), .* got \(40, 32\)"),
        ("plain", {"output": "features"}, None, "output must be 'logits', the output of the file"),
        ("plain", {"cuda_graph": True}, None, "must be cuda, got cpu"),
    ],
)
def test_invalid_arguments(exported: Any, file: str, options: dict[str, Any], images: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        OnnxRunner(exported(file), **{"device": "cpu"} | options)(images)


DRIVER = r"libcuda\.so\.1 is missing: there is no NVIDIA driver"


@pytest.mark.parametrize(
    ("device", "missing", "message"),
    [
        ("cuda", "libcu", rf"{DRIVER}.*; libcudnn\.so\.9 is missing: .*cuDNN 9"),
        ("cuda", "libcuda.so", rf"{DRIVER}[^;]*$"),  # cuDNN is installed, as with a CUDA build of torch
        ("tensorrt", "libnv", r"available: libnvinfer\.so\.\d+, libnvonnxparser\S* are missing: pip install tensorrt$"),
        ("openvino", "", "pip install onnxruntime-openvino"),
    ],
)
def test_an_unavailable_provider(
    exported: Any, device: str, missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does not depend on the installed libraries: those that start with `missing` fail to load, all others load."""

    def load(name: str, *_: object) -> None:
        if name.startswith(missing):
            raise OSError

    monkeypatch.setattr("vit_fast.export.runtime.runner.ctypes", SimpleNamespace(CDLL=load))
    monkeypatch.setattr("onnxruntime.preload_dlls", lambda: None)
    with pytest.raises(ProviderError, match=message):
        OnnxRunner(exported("plain"), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the provider is available")
def test_auto_selects_the_cpu_and_notes_the_reason(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the libraries of CUDA seem to be installed, but ONNX Runtime uses the CPU."""
    assert "libcuda" in OnnxRunner(exported("plain"), "auto").notes[0]
    failure = "CUDAExecutionProvider could not be initialized"
    monkeypatch.setattr("vit_fast.export.runtime.runner.reasons_against", lambda kind: [])
    with pytest.raises(ProviderError, match=failure):
        OnnxRunner(exported("plain"), "cuda")
    runner = OnnxRunner(exported("plain"), "auto")
    assert runner.providers == ("CPUExecutionProvider",) and failure in runner.notes[0]


def test_fp32_is_not_rounded_to_tf32(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the options passed to ONNX Runtime, whose default is TF32."""
    asked: list[Any] = []

    def refuse(path: str, settings: Any, providers: list[Any]) -> Any:
        asked.extend(providers)
        raise RuntimeError("there is no CUDA")

    monkeypatch.setattr("vit_fast.export.runtime.runner.reasons_against", lambda kind: [])
    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    with pytest.raises(ProviderError, match="there is no CUDA"):
        OnnxRunner(exported("plain"), "tensorrt:1")
    assert ("CUDAExecutionProvider", {"device_id": 1, "use_tf32": "0"}) in asked


def test_a_file_of_another_exporter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has no metadata, and all its dimensions are dynamic, as optimum writes it."""
    model: Any = transformers_subject("ViTForImageClassification", num_labels=10).make().eval()
    path = tmp_path / "o.onnx"
    torch.onnx.export(
        model, (torch.randn(2, 3, 32, 32),), path, dynamo=True, input_names=["pixel_values"],
        output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("n")},), verbose=False,
    )  # fmt: skip
    image, images = read_image(sample_image()), torch.randn(3, 3, 32, 32)
    prepared = make_transform(DataConfig(), (32, 32))(image)[None]
    of_images, of_image = (eager(lambda x: model(x).logits, inputs) for inputs in (images, prepared))
    runner = OnnxRunner(path, "cpu", max_batch=2)
    np.testing.assert_allclose(runner(images), of_images, atol=1e-5)
    with pytest.raises(UnsupportedInputError, match="has no data_config"):
        runner.probabilities([image])

    proto = onnx.load(path)
    for value in (proto.graph.input[0], proto.graph.output[0]):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}{axis}"
    onnx.save(proto, path)
    with pytest.raises(UnsupportedInputError, match="pass image_hw"):
        OnnxRunner(path, "cpu", data_config=DataConfig()).probabilities([image])
    given: dict[str, Any] = {"data_config": DataConfig().to_dict(), "class_names": NAMES, "image_hw": (32, 32)}
    complete, expected = OnnxRunner(path, "cpu", **given), torch.from_numpy(of_image).softmax(-1).expand(2, -1)
    np.testing.assert_allclose(complete.probabilities([image] * 2), expected, atol=1e-6)
    assert complete.class_names == tuple(NAMES) and complete.probabilities([]).shape == (0, 10)
    with pytest.raises(ValueError, match=r"does not support images of shape \(2, 3, 64, 32\)"):
        complete(zeros(2, 3, 64, 32))
    with pytest.raises(UnsupportedInputError, match="got features"):
        OnnxRunner(path, "cpu", **given, output="features").probabilities([image])
    (tmp_path / "data.json").write_text(json.dumps(DataConfig().to_dict() | {"img_size": 32}))
    capsys.readouterr()  # torch 2.11 prints what it exported
    arguments = ["--weights", str(path), "--data-config", str(tmp_path / "data.json"), "--json"]
    assert run("predict", str(sample_image()), *arguments) == 0
    assert json.loads(capsys.readouterr().out)[0]["top"][0]["index"] == int(of_image.argmax())


def test_predict_needs_nothing_but_the_file(exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("pixels", "plain"):
        assert run("predict", str(sample_image()), "--weights", str(exported(file)), "--json", "--top-k", "10") == 0
        (result,) = json.loads(capsys.readouterr().out)
        assert sum(row["probability"] for row in result["top"]) == pytest.approx(1)
        assert {row["class"] for row in result["top"]} == set(NAMES)


class DependsOnAll(nn.Module):
    """Outputs of all images of a batch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.mean((2, 3))
        similarity = rows @ rows.mT
        found = {"matrix": similarity, "pairs": similarity.flatten(), "mean": rows.mean(0), "centered": x - x.mean(0)}
        return found[self.name]


@pytest.mark.parametrize("name", ["matrix", "pairs", "mean", "centered"])
def test_outputs_of_all_images_need_one_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is verified on whole batches, also if images are large."""
    monkeypatch.setattr("vit_fast.export.verification.PIXELS_LARGE", 0)
    model = DependsOnAll(name)
    assert export_onnx(model, tmp_path / "m.onnx", example=torch.randn(1, 3, 8, 8)).verified
    runner, images = OnnxRunner(tmp_path / "m.onnx", "cpu", max_batch=2), torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(runner(images[:2]), model(images[:2]))
    if name != "centered":  # has the shape of an output per image
        with pytest.raises(ValueError, match=r"depends on all images of a batch: .*max_batch"):
            runner(images)


class Bound:
    """An IO binding of ONNX Runtime; `run` computes on the CPU, from and into the bound memory."""

    def __init__(self) -> None:
        self.places, self.inputs, self.outputs = [], {}, {}
        self.bind_input, self.bind_output = partial(self._bind, self.inputs), partial(self._bind, self.outputs)

    def _bind(self, bound: dict[str, Any], name: str, kind: str, index: int, *rest: Any) -> None:
        self.places.append((kind, index))
        bound[name] = rest

    def run(self, session: Any) -> None:
        fed = {name: np.empty(shape, dtype) for name, (dtype, shape, _) in self.inputs.items()}
        for name, array in fed.items():
            ctypes.memmove(array.ctypes.data, self.inputs[name][2], array.nbytes)
        for y, (dtype, shape, address) in zip(session.run(list(self.outputs), fed), self.outputs.values(), strict=True):
            assert (y.dtype, y.shape) == (dtype, shape)
            ctypes.memmove(address, y.ctypes.data, y.nbytes)


class OutputsOfAnySize(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {"rows": x.flatten(0, 1), "class": x.mean((2, 3)).argmax(1), "large": x[:, 0] > 0, "grid": torch.eye(2)}
        return found | {"pairs": x.flatten(1) @ x.flatten(1).mT}


def test_an_onnx_session_writes_outputs_of_any_size_on_its_own_gpu(gpus: Machine, tmp_path: Path) -> None:
    model, images = OutputsOfAnySize(), torch.randn(2, 3, 4, 4)
    export_onnx(model, tmp_path / "m.onnx", example=images)
    runner, bindings = OnnxRunner(tmp_path / "m.onnx", "cpu"), list[Bound]()
    session = runner._session
    runner._bind, runner._gpu = True, torch.device("cuda", 1)

    def binding() -> Bound:
        bindings.append(Bound())
        return bindings[-1]

    runner._session = SimpleNamespace(io_binding=binding, run_with_iobinding=lambda bound: bound.run(session))
    found = runner(images.to("cuda:0"))
    assert {y.device for y in found.values()} == {torch.device("cuda:0")}
    assert bindings[0].places == [("cuda", 1)] * 6
    for name, expected in model(images).items():
        torch.testing.assert_close(found[name].cpu(), expected)
