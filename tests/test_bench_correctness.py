"""The check before a candidate is timed: it passes with the same weights, and any mistake is noticed."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from bench_support import QUICK, build, named, task_of
from torch import Tensor

from vit_fast import ViTConfig
from vit_fast.apps.data import sample_image
from vit_fast.benchmarks import candidates, machine, runner
from vit_fast.benchmarks.candidates import get_candidate, make
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import (
    Task,
    describe_vit,
    image_views,
    random_weights,
    resolve,
    rotating_batches,
    rounded,
)
from vit_fast.benchmarks.preparation import Expected, TrainingStep, cold_start, expect, judge_outputs
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.candidate import Candidate
from vit_fast.variants import get_variant

CPU = torch.device("cpu")
PARTS = ("attention:20x2x16", "mlp:14x32x64", "matmul:14x32x64", "block:vit_test")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2}


def shrunk(name: str, **overrides: object) -> ViTConfig:
    config = get_variant(name).config
    return config.replace(**{**SMALL, "img_size": tuple(2 * pixels for pixels in config.patch_pixels), **overrides})


@functools.cache
def make_task(config: ViTConfig, dtype: torch.dtype = torch.float32, batch_size: int = 4) -> tuple[Task, Tensor]:
    data = get_variant("vit_test").data
    weights = rounded(random_weights(config), dtype)
    model = describe_vit("vit_test", config, data, None)
    task = Task(model, weights, dtype, CPU, batch_size=4)
    return task, image_views([sample_image()], model, 4).to(dtype)


def verdict_of(candidate: Candidate, task: Task, images: Tensor, expected: Expected) -> str | None:
    with torch.inference_mode():
        return judge_outputs(candidate, task, expected, make(candidate, task)(images)).reason


IMPLEMENTATIONS = ("eager", "sdpa", "timm", "transformers", "torchvision")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(IMPLEMENTATIONS, DTYPES),
        ("onnxruntime", torch.float32),
        pytest.param("onnxruntime-int8", torch.float32, marks=pytest.mark.slow),
        pytest.param("openvino", torch.float32, marks=pytest.mark.slow),
        pytest.param("openvino", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_every_implementation_passes_with_the_same_weights_and_not_with_other_images(name, dtype) -> None:
    task, images = make_task(get_variant("vit_test").config, dtype)
    candidate, expected = get_candidate(name), expect(task, images)
    if missing := candidate.missing_packages():
        pytest.skip(f"not installed: {missing}")
    if name == "openvino" and dtype == torch.bfloat16 and not machine.has_bf16():
        pytest.skip("needs a CPU with bf16 matmuls")
    with torch.inference_mode():
        outputs = make(candidate, task)(images)
    assert judge_outputs(candidate, task, expected, outputs).passed
    assert not judge_outputs(candidate, task, expected, outputs.roll(1, dims=0)).passed


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 10), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identical_images_are_no_matter_of_luck(dtype: torch.dtype, seeds: range) -> None:
    """One image is few outputs, and eager may be right on it by luck: its error elsewhere is the yardstick too."""
    for seed in seeds:
        weights = rounded(random_weights(get_variant("vit_test").config, seed), dtype)
        task = dataclasses.replace(make_task(get_variant("vit_test").config, dtype)[0], weights=weights)
        images = torch.full((4, 3, 32, 32), 0.1 * seed).to(dtype)
        expected = expect(task, images)
        for name in ("sdpa", "timm", "transformers", "torchvision"):
            assert verdict_of(get_candidate(name), task, images, expected) is None, (seed, name)


@pytest.mark.fast_cases("vit_test")
@pytest.mark.parametrize("name", ["vit_test", "vit_small_patch14_reg4_dinov2"])
def test_a_changed_parameter_is_noticed_whichever_it_is(name: str) -> None:
    """A check behind which a parameter can hide is none: each, a tenth off, must be seen."""
    task, images = make_task(get_variant(name).config if name == "vit_test" else shrunk(name, num_classes=10))
    expected = expect(task, images)
    hidden = []
    for parameter, tensor in task.weights.items():
        changed = dataclasses.replace(task, weights={**task.weights, parameter: tensor * 1.1})
        with torch.inference_mode():
            if judge_outputs(get_candidate("sdpa"), task, expected, build("sdpa", changed)(images)).passed:
                hidden.append(parameter)
    assert hidden == []


def ignores_the_image(task: Task) -> object:
    model = build("sdpa", task)
    return lambda images: model(images[:1].expand_as(images))


def reshaped(task: Task, **fields: object) -> Task:
    config = task.config_and_weights[0].replace(**fields)
    return dataclasses.replace(task, model=describe_vit("vit_test", config, task.model.data, None))


def uses_another_gelu(task: Task) -> object:
    return build("sdpa", reshaped(task, act_layer="quick_gelu"))


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        (ignores_the_image, torch.float32),
        (ignores_the_image, torch.bfloat16),
        (uses_another_gelu, torch.float32),
        (uses_another_gelu, torch.float16),  # too alike for bf16's eight bits in so small a model
    ],
)
def test_a_mistake_is_noticed_also_in_half_precision(mistake, dtype: torch.dtype) -> None:
    task, images = make_task(get_variant("vit_test").config, dtype)
    reason = verdict_of(named("mistake", mistake), task, images, expect(task, images))
    assert reason is not None and "error must be at most" in reason


def test_nan_and_other_shapes_are_refused() -> None:
    task, images = make_task(get_variant("vit_test").config)
    expected = expect(task, images)
    right = build("sdpa", task)(images)
    poisoned = right.clone()
    poisoned[2, 3] = float("nan")
    assert judge_outputs(get_candidate("sdpa"), task, expected, right).passed
    assert "NaN" in judge_outputs(get_candidate("sdpa"), task, expected, poisoned).reason
    assert "must be (4, 10), got" in judge_outputs(get_candidate("sdpa"), task, expected, right[:2]).reason
    assert "must be (4, 10), got" in judge_outputs(get_candidate("sdpa"), task, expected, (right,)).reason


def test_a_candidate_of_fewer_bits_is_held_to_its_own_tolerance() -> None:
    task, images = make_task(get_variant("vit_test").config)
    expected = expect(task, images)
    coarse = expected.exact[0].float() + 0.01
    candidate = named("coarse", lambda task: lambda images: coarse)
    assert not judge_outputs(candidate, task, expected, coarse).passed
    roomy = dataclasses.replace(candidate, tolerance=0.02)
    assert judge_outputs(roomy, task, expected, coarse).passed
    assert not judge_outputs(roomy, task, expected, coarse + 1).passed


def test_our_model_in_e4m3_passes_and_is_not_what_it_is_in_bf16() -> None:
    candidate = get_candidate("triton-fp8")
    task, images = make_task(get_variant("vit_test").config, torch.bfloat16)
    with torch.inference_mode():
        found = make(candidate, task)(images)
        assert judge_outputs(candidate, task, expect(task, images), found).passed
        assert not torch.equal(found, make(get_candidate("triton"), task)(images))


@pytest.mark.parametrize(
    ("name", "word", "dtype", "reasons"),
    [
        ("onnxruntime", "vit_test", torch.bfloat16, ["no bf16 kernels for CPUs"]),
        ("onnxruntime-int8", "vit_test", torch.float16, ["must be fp32 for int8"]),
        ("openvino", "vit_test", torch.float16, ["must run on the CPU in fp32 or bf16, got torch.float16"]),
        ("triton-fp8", "vit_test", torch.float32, ["float32"]),
        ("triton-fp8", "block:vit_test", torch.bfloat16, ["a single block or operator"]),
        ("torchao-fp8", "block:vit_test", torch.bfloat16, ["a single block or operator"]),
        ("cublaslt", "mlp:14x32x64", torch.float32, ["it needs a GPU", "the activation must be gelu_tanh"]),
        ("cublaslt", "attention:20x2x16", torch.float32, ["has no attention"]),
        ("flex", "vit_test", torch.float32, ["must be a single operator, got vit_test"]),
        ("eager", "timm:test_vit", torch.float32, ["must be one of `vit-fast models`"]),
        *(
            (
                name,
                "vit_small_patch14_reg4_dinov2",
                torch.float32,
                ["reg_tokens must be 0", "no_embed_class", "init_values"],
            )
            for name in ("transformers", "torchvision")
        ),
    ],
)
def test_unsupported_tasks_are_refused_before_anything_is_built(name, word, dtype, reasons, monkeypatch) -> None:
    monkeypatch.setattr(candidates, "_exported", None)
    monkeypatch.setattr("vit_fast.measure.build.changed_copy", None)
    (model,) = resolve(word)((64, 64)) if word.startswith("timm") else resolve(word)(None)
    weights = None if model.config is None and model.operator is None else {}
    with pytest.raises(UnsupportedInputError) as refusal:
        make(get_candidate(name), Task(model, weights, dtype, CPU, 1))
    assert all(reason in str(refusal.value) for reason in reasons), refusal.value


def test_batches_are_real_different_images_in_memory_of_their_own() -> None:
    (model,) = resolve("vit_test")(None)
    views = image_views([sample_image()], model, 6)
    whole = image_views([sample_image()], model, 1)
    assert torch.equal(views[0], whole[0])
    assert len({view.numpy().tobytes() for view in views}) == 6
    assert torch.equal(views, image_views([sample_image()], model, 6))
    batches = rotating_batches(views.repeat(1, 1, 16, 16), 3, torch.float32, CPU)
    assert len({batch.data_ptr() for batch in batches}) == len(batches) >= 2
    assert all(batch.shape == (3, 3, 512, 512) and batch.std() > 0.1 for batch in batches)
    assert not torch.equal(batches[0], batches[1])
    assert len({image.numpy().tobytes() for image in batches[0]}) == 3


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("training", [False, True])
def test_all_that_can_run_here_is_right_and_measured(training: bool) -> None:
    labels = ["eager", "sdpa", "timm", "timm+fused"]
    plan = make_configuration(
        models=PARTS, batch_sizes=[3], dtypes=["fp32"], candidates=labels, device="cpu", train=training, protocol=QUICK
    )
    rows = {(row["model"], row["candidate"]): row for row in runner.run(plan)["rows"]}
    measured = {key for key, row in rows.items() if row["status"] == "measured"}
    assert measured == {
        ("attention:20x2x16", "eager"), ("attention:20x2x16", "sdpa"), ("mlp:14x32x64", "eager"),
        ("mlp:14x32x64", "sdpa"), ("matmul:14x32x64", "eager"), *(("block:vit_test", label) for label in labels),
    }  # fmt: skip
    assert {row["status"] for key, row in rows.items() if key not in measured} == {"unsupported"}
    row = rows["mlp:14x32x64", "eager"]
    assert row["img_size"] == [14, 32] and row["peer"] and row["FLOP"] > 0 < row["bytes"]
    assert not rows["block:vit_test", "sdpa"]["peer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("word", PARTS)
def test_a_fault_in_the_last_image_is_noticed(word: str, training: bool, dtype: torch.dtype) -> None:
    """Checks the timed size; for a backward, also the gradient of a single parameter."""
    task = task_of(word, dtype, training)
    images = torch.randn(5, *task.model.shape).to(dtype)
    expected, candidate = expect(task, images), get_candidate("sdpa" if word != PARTS[2] else "eager")
    factor = torch.ones(5, *[1] * len(task.model.shape), dtype=dtype)
    right = make(candidate, task)

    def faulty(x: torch.Tensor) -> torch.Tensor:
        out = right(x)
        return out * factor.view(-1, *[1] * (out.ndim - 1))

    def passes() -> bool:
        if training:
            found = TrainingStep(task, right, faulty).gradients(images, range(5), range(5))
            return judge_outputs(candidate, task, expected, found).passed
        with torch.no_grad():
            return judge_outputs(candidate, task, expected, faulty(images)).passed

    if training:  # all rows that the definition was asked for
        step = TrainingStep(task, right, right)
        found = step.gradients(images, expected.rows, range(5))
        assert judge_outputs(candidate, task, expected, found).passed
    else:
        assert passes()
    factor[-1] = 1.1
    assert not passes()


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
def test_a_cold_start_counts_the_export_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = make_configuration(models=["vit_test"], batch_sizes=[2], dtypes=["fp32"], device="cpu").request
    plan = make_configuration(**request | {"candidates": ["onnxruntime"], "cold": True, "protocol": QUICK})
    (row,) = runner.run(plan)["rows"]
    assert row["status"] == "measured" and row["cold_s"] > row["first_call_s"] > 0
    assert 100 < row["cold_MiB"] < 20_000
    failed = cold_start(request, plan.groups()[0], "triton")
    assert set(failed) == {"cold_failed"} and "TRITON_INTERPRET" in failed["cold_failed"]
