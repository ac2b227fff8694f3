"""Runtimes of files in vit_fast.optimize: ONNX files as models, and models that are exported to one."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from command_line import run
from fused_models import assert_within
from onnx_models import randomized
from torch import nn

import vit_fast
from vit_fast.commands.optimize import open_model
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import OnnxRunner, export_onnx
from vit_fast.measure import trials
from vit_fast.measure.build import build
from vit_fast.measure.candidate import Candidate, judge
from vit_fast.measure.optimization import FIGURES, deploy
from vit_fast.measure.runtimes import OnnxFile, open_file

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return randomized(vit_fast.create_model("vit_test", backend="eager")).eval()


@pytest.fixture(scope="module")
def files(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    export_onnx(model, folder / "plain.onnx", verify=False)
    ir.save(ir.load(folder / "plain.onnx"), folder / "beside.onnx", external_data="beside.onnx.data")
    export_onnx(model, folder / "pixels.onnx", verify=False, preprocess=True)
    half, make = onnx.TensorProto.FLOAT16, onnx.helper  # a file whose images are in fp16: means of their channels
    nodes = [make.make_node("GlobalAveragePool", ["x"], ["pooled"]), make.make_node("Flatten", ["pooled"], ["y"])]
    ends = (("x", ["b", 3, 32, 32]), ("y", ["b", 3]))
    graph = make.make_graph(nodes, "half", *([make.make_tensor_value_info(name, half, shape)] for name, shape in ends))
    opset = [make.make_opsetid("", 20)]
    onnx.save(make.make_model(graph, opset_imports=opset, ir_version=10), folder / "half.onnx")
    return folder


@pytest.mark.fast_cases("plain-original", "beside-ONNX Runtime, 2 threads")
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("plain", Candidate()),
        ("beside", Candidate("onnxruntime", threads=2)),
        ("plain", Candidate("onnxruntime", split=1)),
        ("beside", Candidate("onnxruntime", precision="int8")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_candidates_of_a_file(files: Path, name: str, choice: Candidate, model, images) -> None:
    file = OnnxFile(files / f"{name}.onnx")
    optimized = build(choice, file, images, file(images), ())
    output = optimized(images)
    if choice.precision is None:
        assert_within(output, model(images), copy.deepcopy(model).double()(images.double()), 2, choice.name)
    else:
        assert torch.nn.functional.cosine_similarity(output, model(images)).min() > 0.9
        assert not torch.equal(output, file(images)), "it computes in fewer bits"
    assert optimized(images[:1]).shape == (1, 10)
    with pytest.raises((ValueError, UnsupportedInputError), match=r"must|expected"):
        optimized(images.double())


def test_unavailable_candidates_of_a_file_name_the_reason(files: Path, images) -> None:
    file, with_pixels = OnnxFile(files / "plain.onnx"), OnnxFile(files / "pixels.onnx")
    with pytest.raises(UnsupportedInputError, match="an ONNX file needs"):
        build(Candidate("compile"), file, images, file(images), ())
    pixels = torch.zeros(2, 40, 40, 3, dtype=torch.uint8)
    assert with_pixels(pixels).shape == (2, 10)
    with pytest.raises(UnsupportedInputError, match="got uint8"):
        build(Candidate("onnxruntime", precision="int8"), with_pixels, pixels, with_pixels(pixels), ())
    _, reference = trials.expect(file, images)
    assert "error must be at most" in str(judge(file(images) * 1.001, reference).reason)


@pytest.mark.slow
def test_a_file_is_optimized_cached_saved_and_exported(files: Path, images, tmp_path: Path) -> None:
    found = vit_fast.optimize(files / "beside.onnx", images, budget_s=60)
    assert {row.candidate.name for row in found.table} >= {"original", "ONNX Runtime, split into 1"}
    assert all(row.ms is not None for row in found.table if row.candidate.split == 1), "opening a file takes no time"
    assert found.model(images).shape == (4, 10)
    assert vit_fast.optimize(str(files / "beside.onnx"), images, budget_s=60).from_cache
    assert not vit_fast.optimize(files / "plain.onnx", images, budget_s=1).from_cache, "another file"
    found.save(tmp_path / "fast.json")
    assert vit_fast.load_optimized(tmp_path / "fast.json", files / "beside.onnx").candidate == found.candidate
    with pytest.raises(ValueError, match="another"):
        vit_fast.load_optimized(tmp_path / "fast.json", files / "plain.onnx")
    written = deploy(found.cached, OnnxFile(files / "beside.onnx"), images, tmp_path / "deployed")
    assert {path.name for path in written} == {"model.onnx", "beside.onnx.data", FIGURES}
    output = OnnxRunner(tmp_path / "deployed" / "model.onnx", "cpu")(images)
    torch.testing.assert_close(output, found.model(images))


@pytest.mark.fast_cases("plain-torch.float32")
@pytest.mark.parametrize(
    ("name", "dtype"), [("plain", torch.float32), ("pixels", torch.uint8), ("half", torch.float16)], ids=str
)
def test_the_command_takes_files(files: Path, name: str, dtype, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("optimize", str(files / f"{name}.onnx"), "--batch", "2", "--budget", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["table"][0]["name"] == "original" and found["figures"]["images_per_s"] > 0
    assert open_model(str(files / f"{name}.onnx"), 2, ()).example.dtype == dtype


def test_openvino(files: Path, images) -> None:
    pytest.importorskip("openvino")
    plain, rounded = Candidate("openvino"), Candidate("openvino", precision="bf16")
    for tried in (trials.candidates, trials.candidates_of_file):
        assert {plain, rounded} <= set(tried(torch.device("cpu"), ["bf16"]))
    file, choice = OnnxFile(files / "plain.onnx"), Candidate("openvino", threads=1, split=3)
    tried = trials.Trials(file, images)
    tried.prepare(choice, 60)
    torch.testing.assert_close(tried.prepared[choice][0](images), file(images), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_signals_are_handled_after_openvino_models_are_deleted(files: Path) -> None:
    """In a process of its own, which a signal would crash."""
    pytest.importorskip("openvino")
    code = f"""if True:
        import signal, torch
        from pathlib import Path
        from vit_fast.measure.candidate import Candidate
        from vit_fast.measure.runtimes import open_file

        path = Path({str(files / "plain.onnx")!r})
        models = [open_file(Candidate("openvino"), path, torch.zeros(2, 3, 32, 32), None) for _ in range(2)]
        del models[0], models[0]
        signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
        signal.raise_signal(signal.SIGUSR1)
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr


def test_openvino_takes_images_in_bf16(files: Path, images) -> None:
    pytest.importorskip("openvino")
    path, candidate, rounded = files / "plain.onnx", Candidate("openvino", precision="bf16"), images.bfloat16()
    exact = open_file(Candidate("openvino"), path, images, None)(rounded.float())
    try:
        run = open_file(candidate, path, rounded, None)
    except UnsupportedInputError as error:
        pytest.skip(str(error))
    expected = open_file(candidate, path, images, None)(rounded.float())
    for given in (rounded, rounded.contiguous(memory_format=torch.channels_last)):
        assert (found := run(given)).dtype == torch.float32
        # the error of images in fp32, doubled because OpenVINO converts them elsewhere in the graph
        assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()
