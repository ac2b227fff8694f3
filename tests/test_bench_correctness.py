"""The check before a candidate is timed: correct candidates pass, and every mistake is noticed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from bench_support import QUICK, build, group_of, plan, with_weights
from torch import Tensor

from vit_fast.apps.data import sample_image
from vit_fast.benchmarks import runner
from vit_fast.benchmarks.candidates import CANDIDATES, make
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import (
    DTYPES,
    Group,
    describe_vit,
    image_views,
    random_weights,
    resolve,
    rotating_batches,
)
from vit_fast.benchmarks.preparation import TrainingStep, cold_start, expect
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.candidate import Candidate, Reference, judge
from vit_fast.variants import get_variant

PARTS = ("attention:20x2x16", "attention:20x2x16:bias", "mlp:14x32x64", "block:vit_test")
HALF = ("fp32", "bf16", "fp16")


@functools.cache
def make_group(dtype: str = "fp32", **changes: Any) -> tuple[Group, Tensor]:
    """A small model and images; a fixed one, because a model's random weights are cached by identity."""
    variant = get_variant("vit_test")
    model = describe_vit("vit_test", variant.config.replace(**changes), variant.data)
    return Group(model, dtype, 4), image_views([sample_image()], model, 4).to(DTYPES[dtype])


def reason_of(candidate: Candidate, group: Group, images: Tensor, expected: Reference) -> str | None:
    with torch.inference_mode():
        return judge(make(candidate, group)(images), expected, candidate.tolerance).reason


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(("eager", "sdpa", "timm", "transformers", "torchvision"), HALF),
        ("onnxruntime", "fp32"),
        ("onnxruntime-int8-dynamic", "fp32"),
        pytest.param("onnxruntime-int8", "fp32", marks=pytest.mark.slow),
        pytest.param("openvino", "fp32", marks=pytest.mark.slow),
        pytest.param("openvino", "bf16", marks=pytest.mark.slow),
        ("triton-fp8", "bf16"),
    ],
)
def test_every_candidate_passes_with_the_same_weights_but_not_with_other_images(name: str, dtype: str) -> None:
    group, images = make_group(dtype)
    candidate, expected = CANDIDATES[name], expect(group, images)
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {missing}")
    try:
        run = make(candidate, group)
    except UnsupportedInputError as error:
        assert (name, dtype) == ("openvino", "bf16") and "this CPU has no bf16 matmuls" in str(error)
        pytest.skip(str(error))
    with torch.inference_mode():
        output = run(images)
    assert judge(output, expected, candidate.tolerance).reason is None
    assert name != "triton-fp8" or judge(output, expected).reason is not None, "it computes in fewer bits"
    assert judge(output.roll(1, dims=0), expected, candidate.tolerance).reason is not None


@pytest.mark.parametrize("dtype", HALF)
def test_equal_images_pass_although_eager_may_be_exact_for_them_by_chance(dtype: str) -> None:
    for seed in range(2):
        group = with_weights(make_group(dtype)[0], random_weights(get_variant("vit_test").config, seed))
        images = torch.full((4, 3, 32, 32), 0.1 * seed).to(group.dtype)
        expected = expect(group, images)
        for name in ("sdpa", "timm", "transformers", "torchvision"):
            assert reason_of(CANDIDATES[name], group, images, expected) is None, (seed, name)


@pytest.mark.parametrize("changes", [{}, {"init_values": 0.5, "reg_tokens": 4, "no_embed_class": True}], ids=len)
def test_a_change_of_any_parameter_or_of_the_activation_is_noticed(changes: dict[str, Any]) -> None:
    group, images = make_group(**changes)
    expected, sdpa = expect(group, images), CANDIDATES["sdpa"]
    config, weights = group.config_and_weights
    changed = {name: with_weights(group, {name: tensor * 1.1}) for name, tensor in weights.items()}
    quick = describe_vit("quick", config.replace(act_layer="quick_gelu"), group.model.data, weights)
    changed["gelu"] = dataclasses.replace(group, model=quick)
    assert [name for name, other in changed.items() if reason_of(sdpa, other, images, expected) is None] == []


def test_incorrect_outputs_are_refused_with_the_reason() -> None:
    group, images = make_group("bf16")
    expected, correct = expect(group, images), build("sdpa", group)(images)
    with_nan = correct.clone()
    with_nan[2, 3] = float("nan")
    large = 0.5 * correct.abs().max()
    for output, tolerance, reason in (
        (correct, None, None),
        (with_nan, None, "NaN"),
        (correct[:2], None, "must be (4, 10), got (2, 10)"),
        ((correct,), None, "must be Tensor, got tuple"),
        (correct[:1].expand(4, -1), None, "error must be at most"),  # ignores other images
        (correct + 0.1 * large, None, "error must be at most"),
        (correct + 0.1 * large, 0.1, None),
        (correct + large, 0.1, "error must be at most"),
    ):
        found = judge(output, expected, tolerance).reason
        assert found is None if reason is None else reason in str(found)


DINO = "vit_small_patch14_reg4_dinov2"


@pytest.mark.parametrize(
    ("name", "word", "dtype", "reasons"),
    [
        ("onnxruntime", "vit_test", "bf16", ["bf16 is not supported on a CPU"]),
        ("onnxruntime-int8", "vit_test", "fp16", ["must be fp32 for int8"]),
        ("openvino", "vit_test", "fp16", ["fp32 or bf16 on a CPU is required, got torch.float16"]),
        ("triton-fp8", "vit_test", "fp32", ["float32"]),
        ("triton-fp8", "block:vit_test", "bf16", ["a single block or operator"]),
        ("cublaslt", "mlp:14x32x64", "fp32", ["a GPU is required", "the activation must be gelu_tanh"]),
        ("flex", "vit_test", "fp32", ["must be a single operator, got vit_test"]),
        ("eager", "timm:test_vit", "fp32", ["must be one of `vit-fast models`"]),
        ("transformers", DINO, "fp32", ["reg_tokens must be 0", "no_embed_class", "init_values"]),
        ("torchvision", DINO, "fp32", ["reg_tokens must be 0", "no_embed_class", "init_values"]),
    ],
)
def test_unsupported_models_are_refused_with_all_reasons(name, word, dtype, reasons) -> None:
    (model,) = resolve(word)((64, 64) if word.startswith("timm") else None)
    with pytest.raises(UnsupportedInputError) as refusal:
        make(CANDIDATES[name], Group(model, dtype, 1))
    assert all(reason in str(refusal.value) for reason in reasons), refusal.value


def test_batches_are_different_images_in_memory_of_their_own() -> None:
    views = image_views([sample_image()], make_group()[0].model, 6)
    batches = rotating_batches(views.repeat(1, 1, 16, 16), 3, torch.float32, torch.device("cpu"))
    assert len({batch.data_ptr() for batch in batches}) == len(batches) >= 2
    assert not torch.equal(batches[0], batches[1])
    assert len({image.numpy().tobytes() for image in batches[0]}) == 3


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("training", [False, True])
def test_operators_and_blocks_are_measured(training: bool) -> None:
    names = ["eager", "sdpa", "timm", "timm+fused"]
    rows = runner.run(plan(*names, models=PARTS, batch_sizes=(3,), train=training))["rows"]
    found = {(row["model"], row["candidate"]): row for row in rows}
    for (model, name), row in found.items():
        is_supported = model == "block:vit_test" or name in ("eager", "sdpa")
        assert row["status"] == ("measured" if is_supported else "unsupported"), (model, name)
    row = found["mlp:14x32x64", "eager"]
    assert row["img_size"] == [14, 32] and row["peer"] and row["FLOP"] > 0 < row["bytes"]
    assert not found["block:vit_test", "sdpa"]["peer"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("word", PARTS)
def test_an_error_in_the_last_image_is_noticed(word: str, training: bool, dtype: str) -> None:
    """In the timed batch size; in training, also in the gradient of a single parameter."""
    group = group_of(word, dtype, training)
    images = torch.randn(5, *group.model.shape).to(group.dtype)
    expected, correct = expect(group, images), make(CANDIDATES["sdpa"], group)
    for factor in (1.0, 1.1):

        def scaled(x: Tensor, factor: float = factor) -> Tensor:
            return torch.cat([(out := correct(x))[:-1], factor * out[-1:]])

        if training:
            found = TrainingStep(group, correct, scaled).gradients(images, expected.rows, range(5))
        else:
            found = scaled(images).detach()
        assert (judge(found, expected).reason is None) == (factor == 1)


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
def test_a_cold_start_includes_the_export_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = make_configuration(models=["vit_test"], batch_sizes=[2], dtypes=["fp32"], device="cpu").request
    made = make_configuration(**request | {"candidates": ["onnxruntime"], "cold": True, "protocol": QUICK})
    (row,) = runner.run(made)["rows"]
    assert row["status"] == "measured" and row["cold_s"] > row["first_call_s"] > 0
    assert 100 < row["cold_MiB"] < 20_000
    failed = cold_start(request, made.groups()[0], "triton")
    assert set(failed) == {"cold_failed"} and "TRITON_INTERPRET" in failed["cold_failed"]
