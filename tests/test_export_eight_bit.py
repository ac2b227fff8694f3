"""int8 and fp8 files of a trained model preserve its classes, even if single channels are very large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from digits import digits_vit, held_out, write_digits

from vit_fast.apps.data import sample_image
from vit_fast.export import OnnxRunner, QuantisationError, VerificationError, export_onnx, graphs, inspect_onnx
from vit_fast.export.quantize import quantize_file
from vit_fast.export.report import loss_of
from vit_fast.export.saturation import saturate
from vit_fast.quantization.schemes import Scheme

LAYOUTS = [
    ("int8", "generic"), ("int8", "ort-cpu"), ("int8", "tensorrt"), ("int8-dynamic", "ort-cpu"), ("fp8", "tensorrt"),
    ("int8-dynamic", "generic"),
]  # fmt: skip
POINTS = 0.006  # of accuracy that a file may lose


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of the training set, for calibration."""
    return write_digits(tmp_path_factory.mktemp("digits"), 0, 150)


@torch.inference_mode()
def accuracy_of(path: Path | None = None) -> float:
    """Returns the accuracy of a file, or of the model."""
    images, labels = held_out()
    run = digits_vit() if path is None else OnnxRunner(path, "cpu")
    return float((run(images).argmax(1) == labels).float().mean())


@pytest.mark.fast_cases("int8-ort-cpu-300.0", "fp8-tensorrt-100.0")
@pytest.mark.parametrize("outlier", [1.0, 100.0, 300.0])
@pytest.mark.parametrize(("precision", "target"), LAYOUTS)
def test_accuracy_is_preserved(precision: Any, target: Any, outlier: float, folder: Path, tmp_path: Path) -> None:
    """Tests 597 images that were not used before, with one channel 300 times as large as the rest."""
    given: dict[str, Any] = {"images": [folder]} if precision == "int8-dynamic" else {"calibration": [folder]}
    given |= {"precision": precision, "target": target, "validation": folder}
    report = export_onnx(digits_vit(outlier), tmp_path / "m.onnx", **given)
    assert report.verified and report.checks[0].images == 64
    assert report.accuracy is not None and report.accuracy.images == 150 and report.accuracy.acceptable
    assert report.accuracy.model > 0.97 and f"{report.accuracy.model:.2%}" in str(report)
    assert not any("crops of them" in warning for warning in report.warnings)
    emulated = ", with and without VNNI" if target != "tensorrt" else ""
    assert report.device == f"CPU{emulated}" and report.device in str(report)
    assert ("on a CPU only" in str(report.warnings)) == (target == "tensorrt")
    assert accuracy_of() > 0.97 and accuracy_of(tmp_path / "m.onnx") >= accuracy_of() - POINTS


def make_outlier(attention: Any, factor: float) -> None:
    """Makes one channel of v larger and the column of proj smaller: the same function."""
    attention.qkv.weight[2 * 64 + 5] *= factor
    attention.qkv.bias[2 * 64 + 5] *= factor
    attention.proj.weight[:, 5] /= factor


@pytest.mark.slow
@torch.no_grad()
def test_layers_with_outliers_stay_in_float_or_the_model_is_rejected(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = digits_vit(), {"precision": "int8", "target": "ort-cpu", "calibration": [folder]}
    make_outlier(model.blocks[1].attn, 1000)
    sizes: dict[Path, list[int]] = {}  # of the file with weights, after each graph
    move = graphs.move_weights

    def recorded(graph: ir.Model, file: Path) -> None:
        move(graph, file)
        sizes.setdefault(file, []).append(file.stat().st_size)

    monkeypatch.setattr(graphs, "move_weights", recorded)
    report = export_onnx(model, tmp_path / "m.onnx", **options)
    evaluated = max(sizes.values(), key=len)
    assert len(evaluated) > 5 and len(set(evaluated[2:])) == 1, "each graph is evaluated with the same weights"
    assert report.eight_bit is not None and "blocks.1.attn.proj" in report.eight_bit.in_float
    assert report.eight_bit.matmuls + len(report.eight_bit.in_float) == 12 and "blocks.1.attn.proj" in str(report)
    assert accuracy_of(tmp_path / "m.onnx") >= accuracy_of() - POINTS
    for block in model.blocks:  # every proj and fc2: more than may stay in float
        make_outlier(block.attn, 1e4)
        block.mlp.fc1.weight[3] = 0  # a hidden unit that is always 10,000, and read by a small weight
        block.mlp.fc1.bias[3] = 1e4
        block.mlp.fc2.weight[:, 3] = 1e-6
        block.norm1.bias += 1e4  # and a norm's output far from zero, which a scale does not bring nearer
        block.attn.qkv.bias -= 1e4 * block.attn.qkv.weight.sum(1)
    with pytest.raises(QuantisationError, match=r"6 of 12 MatMuls in float: the rms error must be at most 0.045"):
        export_onnx(model, tmp_path / "n.onnx", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.slow
def test_fp8_is_written_as_tensorrt_fuses_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two DequantizeLinear feed each MatMul. All are in e4m3 with scales in fp16; that of softmax is 1/448."""
    monkeypatch.setattr("vit_fast.export.report.RMS", 0.2)  # nothing stays in float
    report = export_onnx(digits_vit(), tmp_path / "m.onnx", precision="fp8", target="tensorrt", calibration=[folder])
    matmuls = [node for node in ir.load(tmp_path / "m.onnx").graph if node.op_type == "MatMul"]
    assert len(matmuls) == 12 + 6
    for restore in (value.producer() for matmul in matmuls for value in matmul.inputs):
        assert restore.op_type == "DequantizeLinear"
        stored, scale, zero = restore.inputs
        assert scale.const_value.dtype == ir.DataType.FLOAT16 and scale.const_value.shape.rank() == 0
        assert zero.const_value.dtype == ir.DataType.FLOAT8E4M3FN
        if stored.producer() is None:
            assert stored.const_value.dtype == ir.DataType.FLOAT8E4M3FN
        elif stored.producer().inputs[0].producer().op_type == "Softmax":
            assert float(scale.const_value.numpy()) == pytest.approx(1 / 448, rel=1e-3)
    assert report.nodes["QuantizeLinear"] == 12 + 4 * 3, "one per activation"


def test_a_file_with_a_batch_of_more_images_than_calibrate_it(exported: Any, tmp_path: Path) -> None:
    proto = onnx.load(exported("generic"))
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 40
    onnx.save(proto, tmp_path / "float.onnx")
    done = quantize_file(tmp_path / "float.onnx", tmp_path / "int8.onnx", "ort-cpu", [sample_image()])
    assert done.matmuls == 8 and inspect_onnx(tmp_path / "int8.onnx").precision == "int8"
    before, after = (inspect_onnx(tmp_path / f"{name}.onnx") for name in ("float", "int8"))
    changed = {"precision": "int8", "target": "ort-cpu", "eight_bit": {"matmuls": 8, "in_float": []}}
    assert after.metadata["checked"] == {"verification": "not verified"}
    assert after.metadata == before.metadata | changed and after.data_config == before.data_config is not None
    images = torch.randn(40, 3, 32, 32)
    got, expected = (OnnxRunner(tmp_path / f"{name}.onnx", "cpu")(images) for name in ("int8", "float"))
    assert (got - expected).std() < 0.1 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_weights_that_do_not_fit_into_one_file(
    precision: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lower limit, they are external, also in measurements and verification. int8 is symmetric, in fp16."""
    monkeypatch.setattr(graphs, "PROTOBUF_LIMIT", 1000)
    given: dict[str, Any] = {"precision": precision, "target": "tensorrt", "dynamic_batch": False}
    pictures = sorted(folder.rglob("*.png"))  # a photograph is no digit, so that 8 bits may change its class
    given |= {"calibration": pictures[:64]} if precision == "int8" else {}
    report = export_onnx(digits_vit(), tmp_path / "m.onnx", images=pictures[-8:], **given)
    inputs = held_out()[0][:1]  # with logits of up to 7
    torch.testing.assert_close(OnnxRunner(tmp_path / "m.onnx", "cpu")(inputs), digits_vit()(inputs), atol=0.5, rtol=0)
    with pytest.raises(ValueError, match="exceed protobuf's limit of 2 GB per file"):
        export_onnx(digits_vit(), tmp_path / "inside.onnx", external_data=False)
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", report.external_data}
    tensors = onnx.load(tmp_path / "m.onnx").graph.initializer
    if precision == "fp16":
        return
    zeros = [onnx.numpy_helper.to_array(tensor) for tensor in tensors if "_zero_point" in tensor.name]
    assert zeros and all(zero.dtype == np.int8 and not zero.any() for zero in zeros)
    assert {t.data_type for t in tensors if t.name.endswith("_scale")} == {onnx.TensorProto.FLOAT16}
    for part in ("slower than fp16 on a GPU", "used few images (8) and crops of them: pass at least 64"):
        assert any(part in warning for warning in report.warnings)


def test_a_loss_that_a_user_would_notice_does_not_pass() -> None:
    """Random errors of growing size, and small errors that change the class of 2 % of the images."""
    with torch.inference_mode():
        logits = digits_vit()(held_out()[0]).double().numpy()
    noise = logits.std() * np.random.default_rng(0).standard_normal(logits.shape)
    for size in (0.01, 0.04, 0.1, 1.0):
        assert loss_of(logits + size * noise, logits, "logits").acceptable() == (size < 0.05)
    swapped, ordered = logits.copy(), np.sort(logits)
    rows = np.flatnonzero(ordered[:, -1] - ordered[:, -2] > 4)[:12]
    swapped[rows, logits[rows].argmax(1)] = ordered[rows, -2] - 1e-3
    loss = loss_of(swapped, logits, "logits")
    assert loss.flips == 12 and not loss.acceptable()
    constant = np.full(8, 100.0)
    assert loss_of(constant + 1e-5, constant, "scale").acceptable(), "a rounding error"
    assert not loss_of(constant + 1e-3, constant, "scale").acceptable()
    masked = np.append(constant, -np.inf)
    assert loss_of(masked, masked, "scores").max_error == 0 and not loss_of(-masked, masked, "scores").acceptable()


def vpmaddubsw(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Multiplies uint8 [M, C] by int8 [C, F] like x86 CPUs without VNNI."""
    products = np.pad(x[..., None] * weight.astype(np.int32), ((0, 0), (0, len(weight) % 2), (0, 0)))
    return (products[:, ::2] + products[:, 1::2]).clip(-(2**15), 2**15 - 1).sum(1)


def integer_matmul(weight: np.ndarray, in_float: bool) -> ir.Model:
    """Returns a graph that multiplies uint8 [M, C] by int8 [C, F], as MatMulInteger or as MatMul in QDQ format."""
    images = ir.val("images", ir.DataType.UINT8, ["tokens", len(weight)])
    graph = ir.Graph([images], [], nodes=[], opset_imports={"": 21}, name="m")
    zeros = np.uint8(0), np.zeros(weight.shape[1], np.int8)
    if in_float:
        scales = np.float32(0.5), np.full(weight.shape[1], 2, np.float32)
        restored = graphs.append(graph, "DequantizeLinear", images, scales[0], zeros[0])
        weights = graphs.append(
            graph, "DequantizeLinear", graphs.add_constant(graph, weight), scales[1], zeros[1], axis=1
        )
        y = graphs.append(graph, "MatMul", restored, weights)
    else:
        y = graphs.append(graph, "MatMulInteger", images, weight, *zeros)
    y = graphs.append(graph, "Cast", y, to=ir.DataType.INT32)
    y.shape = ir.Shape(["tokens", weight.shape[1]])
    y.dtype = ir.DataType.INT32
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("in_float", [True, False])
def test_saturation_matches_vpmaddubsw(in_float: bool) -> None:
    """Compares the evaluation with numpy on every CPU, and ONNX Runtime's kernel on CPUs where it saturates."""
    random = np.random.default_rng(0)
    for channels, most in ((64, 127), (193, 127), (7, 127), (192, 90)):
        x = random.integers(0, 256, (5, channels), np.uint8)
        weight = random.integers(-most, most + 1, (channels, 24), np.int8)
        expected, exact = vpmaddubsw(x, weight), x.astype(np.int32) @ weight
        assert (expected != exact).any()
        model = integer_matmul(weight, in_float)
        if not in_float:
            (kernel,) = next(graphs.run_graph(model, [x]))
            (one,) = next(
                graphs.run_graph(integer_matmul(np.full((2, 1), 127, np.int8), False), [np.full((1, 2), 255, np.uint8)])
            )
            np.testing.assert_array_equal(kernel, expected if one.item() == 2**15 - 1 else exact)
        assert saturate(model)
        np.testing.assert_array_equal(next(graphs.run_graph(model, [x]))[0], expected)


def test_quantized_weights_do_not_saturate_any_activation() -> None:
    random = np.random.default_rng(0)
    for shape, size in (((64, 200), 1.0), ((193, 50), 1e-30), ((2, 500), 1e4), ((1, 9), 1.0)):
        weight = (size * random.standard_normal(shape)).astype(np.float32)
        weight[:, 0] = 0
        weight[:, 1] = size  # the hardest: all of the same size
        scales = Scheme("uint8").weight_scales(weight)
        stored = np.rint(weight / scales).astype(np.int8)
        for in_float in (True, False):
            assert not saturate(integer_matmul(stored, in_float))
        exact = vpmaddubsw(x := np.where(np.pad(stored, 0)[:, 1:2].T > 0, 255, 0).astype(np.uint8), stored)
        np.testing.assert_array_equal(exact, x.astype(np.int32) @ stored)
        assert np.abs(weight - stored * scales).max() <= 0.501 * scales.max()
        assert (scales <= Scheme("int8").weight_scales(weight) * 2.001).all(), "at least 7 bits"


def test_a_file_that_saturates_fails_also_on_a_cpu_that_does_not(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Emulates a CPU with VNNI, and quantizes weights with all 8 bits."""

    class Exact(OnnxRunner):
        def __call__(self, images: Any) -> Any:
            return next(graphs.run_graph(ir.load(self.path), [images]))[0]

    monkeypatch.setattr("vit_fast.export.verification.OnnxRunner", Exact)
    monkeypatch.setattr(Scheme, "weight_scales", lambda self, weight: np.abs(weight).max(axis=0) / 127)
    with pytest.raises(VerificationError, match="eager on logits, 64 images of 8x8, batch 8, without VNNI: max"):
        export_onnx(digits_vit(), tmp_path / "m.onnx", precision="int8", target="ort-cpu", calibration=[folder])
    assert not list(tmp_path.iterdir())
