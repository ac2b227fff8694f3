"""Files for deployment: a repository for the server with clients, TensorRT's shapes, a model card."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits import DATA_CONFIG, digits, digits_vit, inputs
from onnx_models import Exports, with_metadata
from PIL import Image
from triton_server import answer, read_config, schema

import vit_fast
from vit_fast.apps.data import sample_image
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner, export_onnx, inspect_onnx, trtexec_line, write_card, write_triton_repository

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES: dict[str, dict[str, Any]] = {
    "pixels": {"preprocess": True, "output": "probabilities"},
    "half": {"precision": "fp16", "target": "tensorrt"},
    "any size": {"dynamic_size": True, "target": "tensorrt"},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Files of the digits' model by the names of FILES."""
    return Exports(tmp_path_factory.mktemp("files"), digits_vit(), FILES)


@pytest.mark.slow
def test_a_client_over_http(file: Exports, tmp_path: Path, monkeypatch: Any) -> None:
    """Runs the example against a stand-in that reads the configuration like the server."""
    ask = runpy.run_path(str(EXAMPLES / "triton_client.py"))["ask"]
    for name in ("pixels", "half"):
        write_triton_repository(file(name), tmp_path, name=name, device="cpu")
    monkeypatch.setattr("urllib.request.urlopen", functools.partial(answer, tmp_path))
    with torch.inference_mode():
        shares = digits_vit()(inputs()[:5]).softmax(-1)
    for image, label, expected in zip(*digits(), shares):
        best = ask("http://localhost:8000", "pixels", np.asarray(image)[..., None], top=3)
        assert [int(name) for name, _ in best] == expected.topk(3).indices.tolist() and label == int(best[0][0])
        np.testing.assert_allclose([value for _, value in best], expected.topk(3).values, atol=1e-3)
    with pytest.raises(ValueError, match="half must take UINT8, got FP32"):
        ask("http://localhost:8000", "half", np.zeros((8, 8, 1), np.uint8), top=1)


@pytest.mark.slow
def test_a_client_in_cpp(file: Exports, tmp_path: Path) -> None:
    """The example prints the probabilities of the runner, for pixels and for preprocessed images."""
    import onnxruntime

    compiler, headers = shutil.which("c++"), os.environ.get("VIT_FAST_ORT_INCLUDE", "/usr/include/onnxruntime")
    header = next(Path(headers).rglob("onnxruntime_cxx_api.h"), None)
    if compiler is None or header is None:
        pytest.skip("needs c++ and ONNX Runtime's C++ headers: set VIT_FAST_ORT_INCLUDE to their folder")
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*")
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # to link, and to load
        (tmp_path / name).symlink_to(library)
    command = [compiler, "-std=c++17", "-isystem", header.parent, EXAMPLES / "onnx_client.cpp", "-L", tmp_path]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}", "-lonnxruntime", "-o", tmp_path / "client"], check=True)

    names = ("null", 'a "quoted" one', "back\\slash", "a/b", "tab\tbed", "f\u00fcnf", "\u516d", "\U0001f986", "8", "9")
    pixels = with_metadata(file("pixels"), tmp_path / "pixels.onnx", "class_names", json.dumps(names))
    in_color = tmp_path / "color.onnx"
    export_onnx(vit_fast.create_model("vit_test", num_classes=10), in_color, preprocess=True, verify=False)
    photo = Image.open(sample_image())
    digits()[0][0].save(tmp_path / "0.pgm")
    photo.save(tmp_path / "0.ppm")
    inputs()[0].numpy().tofile(tmp_path / "0.raw")
    for model, suffix, shown in (
        (pixels, "pgm", digits()[0][0]),
        (file("half"), "raw", digits()[0][0]),
        (in_color, "ppm", photo),
    ):
        runner = OnnxRunner(model, "cpu")
        (shares,) = runner.probabilities([shown])
        printed = subprocess.check_output([tmp_path / "client", model, tmp_path / f"0.{suffix}"], encoding="utf-8")
        for line, best in zip(printed.split("\n"), np.argsort(-shares)[:5]):
            name = runner.class_names[best] if runner.class_names else f"class {best}"
            assert float(line[:9]) == pytest.approx(shares[best], abs=1e-4) and line[11:] == name


def test_the_server_builds_engines_for_a_tensorrt_file(file: Exports, tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = write_triton_repository(file("half"), models, max_batch=4)
    config = read_config(folder)
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt" and dict(accelerator.parameters) == {"precision_mode": "FP16"}
    assert config.HasField("dynamic_batching")
    assert [request.batch_size for request in config.model_warmup] == [1, 4]
    value = config.model_warmup[1].inputs["images"]
    assert list(value.dims) == [1, 8, 8] and value.data_type == schema().TYPE_FP32
    assert config.output[0].label_filename == "labels.txt"
    assert (folder / "labels.txt").read_text().splitlines() == [str(i) for i in range(10)]
    for target, kind in (("generic", "KIND_AUTO"), ("ort-cpu", "KIND_CPU"), ("ort-cuda", "KIND_GPU")):
        other = with_metadata(file("half"), tmp_path / "for.onnx", "target", f'"{target}"')
        (group,) = read_config(write_triton_repository(other, tmp_path / target, name=target)).instance_group
        assert group.Kind.Name(group.kind) == kind
    on_cpu = read_config(write_triton_repository(file("half"), models, name="c", device="cpu"))
    assert not on_cpu.HasField("optimization")
    in_fp8 = with_metadata(file("half"), tmp_path / "fp8.onnx", "precision", '"fp8"')
    with pytest.raises(UnsupportedInputError, match=r"one of fp32, fp16, int8, got fp8\n.*build an engine"):
        write_triton_repository(in_fp8, models)
    assert sorted(path.name for path in models.iterdir()) == ["c", "half"]


def test_a_repository_of_a_file_with_a_fixed_batch(exported: Any, tmp_path: Path) -> None:
    path, models = exported("fixed"), tmp_path / "models"
    folder = write_triton_repository(path, models, instances=2, device="cpu")
    names = ["1", "1/fixed.onnx.data", "1/model.onnx", "config.pbtxt"]
    assert sorted(str(found.relative_to(folder)) for found in folder.rglob("*")) == names
    config = read_config(folder)
    assert (config.name, config.backend, config.max_batch_size) == ("fixed", "onnxruntime", 0)
    assert list(config.input[0].dims) == [1, 3, 32, 32] and not config.HasField("dynamic_batching")
    assert config.instance_group[0].count == 2 and config.instance_group[0].kind == 2  # KIND_CPU
    with pytest.raises(FileExistsError, match="already exists"):
        write_triton_repository(path, models)
    for wrong in ({"name": "a/b"}, {"name": ".."}, {"max_batch": 0}, {"instances": 0}, {"device": "tpu"}):
        with pytest.raises(ValueError, match="must"):
            write_triton_repository(path, models, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must not end in \.md.*, got .*m\.md"):
        write_card(tmp_path / "m.md")


@pytest.mark.slow
def test_shapes_of_an_engine(file: Exports) -> None:
    words = shlex.split(trtexec_line(inspect_onnx(file("half"))))
    assert words[:2] == ["trtexec", f"--onnx={file('half')}"] and "--stronglyTyped" in words
    assert words[-3:] == ["--minShapes=images:1x1x8x8", "--optShapes=images:8x1x8x8", "--maxShapes=images:64x1x8x8"]
    any_size = trtexec_line(inspect_onnx(file("any size")))
    assert "--minShapes=images:1x1x4x4" in any_size and "--maxShapes=images:64x1x16x16" in any_size
    assert OnnxRunner(file("any size"), "cpu")(torch.randn(4, 1, 16, 16)).shape == (4, 10), "the largest"


@pytest.mark.slow
def test_a_model_card(file: Exports, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    given: dict[str, Any] = {"dynamic_batch": False, "external_data": True, "target": "tensorrt", "source": "a test"}
    report = export_onnx(digits_vit(), path, **given)
    text = write_card(path, "cc-by-4.0").read_text()
    for name in ("m.onnx", "m.onnx.data"):
        content = (tmp_path / name).read_bytes()
        assert f"| {name} | {len(content)} | {hashlib.sha256(content).hexdigest()} |" in text
    for part in (
        "| source | a test |", "| precision | fp32 |", f"{report.checks[-1].line()} against eager fp64",
        "on CPU; allowed: max error", json.dumps(DATA_CONFIG.to_dict()),
        "trtexec --onnx=m.onnx --saveEngine=m.plan --stronglyTyped",
    ):  # fmt: skip
        assert part in text
    assert text.startswith("---\nlicense: cc-by-4.0\n") and str(tmp_path) not in text
    text = write_card(file("pixels")).read_text()
    assert "| preprocessing | in the file (uint8 input) |" in text and "| verification | not verified |" in text
    assert "license: unknown" in text and "trtexec" not in text
