"""The gate before a speed row: peers with the same weights pass it, and anything that is wrong does not."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from bench_support import build, named
from torch import Tensor

from vit_fast import ViTConfig
from vit_fast.apps.data import sample_image
from vit_fast.benchmarks.candidates import get_candidate, make
from vit_fast.benchmarks.models import (
    Task,
    describe_ours,
    image_views,
    random_weights,
    resolve,
    rotating_batches,
    rounded,
)
from vit_fast.benchmarks.preparation import Expected, expect, judge_outputs
from vit_fast.errors import UnsupportedInputError
from vit_fast.measure.candidate import Candidate
from vit_fast.variants import get_variant

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2}


def shrunk(name: str, **overrides: object) -> ViTConfig:
    config = get_variant(name).config
    return config.replace(**{**SMALL, "img_size": tuple(2 * pixels for pixels in config.patch_pixels), **overrides})


@functools.cache
def make_task(config: ViTConfig, dtype: torch.dtype = torch.float32, batch_size: int = 4) -> tuple[Task, Tensor]:
    data = get_variant("vit_test").data
    weights = rounded(random_weights(config), dtype)
    model = describe_ours("vit_test", config, data, None)
    task = Task(model, weights, dtype, CPU, batch_size=4)
    return task, image_views([sample_image()], model, 4).to(dtype)


def verdict_of(candidate: Candidate, task: Task, images: Tensor, expected: Expected) -> str | None:
    with torch.inference_mode():
        return judge_outputs(candidate, task, expected, make(candidate, task)(images)).reason


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["eager", "sdpa", "timm", "transformers", "torchvision"])
def test_every_implementation_passes_with_the_same_weights(name: str, dtype: torch.dtype) -> None:
    task, images = make_task(get_variant("vit_test").config, dtype)
    assert verdict_of(get_candidate(name), task, images, expect(task, images)) is None


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


@pytest.mark.fast_cases("deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2")
@pytest.mark.parametrize(
    "name",
    [
        "deit_tiny_distilled_patch16_224",
        "deit3_small_patch16_224",
        "vit_small_patch14_dinov2",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch32_clip_quickgelu_224",
        "vit_base_patch16_siglip_224",
    ],
)
def test_timm_takes_the_weights_of_every_family(name: str) -> None:
    task, images = make_task(shrunk(name))
    assert verdict_of(get_candidate("timm"), task, images, expect(task, images)) is None


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


def forgets_positions(task: Task) -> object:
    return build(
        "sdpa", dataclasses.replace(task, weights={**task.weights, "pos_embed": 0 * task.weights["pos_embed"]})
    )


def attends_uniformly(task: Task) -> object:
    weights = dict(task.weights)
    width = task.ours[0].embed_dim
    for name in [name for name in weights if ".attn.qkv." in name]:
        weights[name] = torch.cat([0 * weights[name][:width], weights[name][width:]])
    return build("sdpa", dataclasses.replace(task, weights=weights))


def reshaped(task: Task, **fields: object) -> Task:
    config = task.ours[0].replace(**fields)
    return dataclasses.replace(task, model=describe_ours("vit_test", config, task.model.data, None))


def uses_another_gelu(task: Task) -> object:
    return build("sdpa", reshaped(task, act_layer="quick_gelu"))


def forgets_a_block(task: Task) -> object:
    weights = {name: tensor for name, tensor in task.weights.items() if not name.startswith("blocks.1.")}
    return build("sdpa", dataclasses.replace(reshaped(task, depth=1), weights=weights))


@pytest.mark.parametrize(
    ("mistake", "dtype"),
    [
        *itertools.product(
            (ignores_the_image, forgets_positions, attends_uniformly, forgets_a_block), (torch.float32, torch.bfloat16)
        ),
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


def test_our_model_in_e4m3_passes_and_is_not_what_it_is_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, config = get_candidate("triton-fp8"), get_variant("vit_test").config
    task, images = make_task(config, torch.bfloat16)
    with torch.inference_mode():
        found = make(candidate, task)(images)
        assert judge_outputs(candidate, task, expect(task, images), found).passed
        assert not torch.equal(found, make(get_candidate("triton"), task)(images))
    monkeypatch.setattr(
        "vit_fast.measure.build.changed_copy", lambda *_: pytest.fail("what cannot run is not calibrated")
    )
    with pytest.raises(UnsupportedInputError, match="float32"):
        make(candidate, make_task(config)[0])
    block = dataclasses.replace(task, model=dataclasses.replace(task.model, block=True))
    for name in ("triton-fp8", "torchao-fp8"):
        with pytest.raises(UnsupportedInputError, match="a single block or operator"):
            make(get_candidate(name), block)


def test_peers_refuse_what_they_cannot_express_with_all_reasons() -> None:
    task, _ = make_task(shrunk("vit_small_patch14_reg4_dinov2", num_classes=10))
    for name in ("transformers", "torchvision"):
        with pytest.raises(UnsupportedInputError) as refusal:
            make(get_candidate(name), task)
        text = str(refusal.value)
        assert all(reason in text for reason in ("reg_tokens must be 0", "no_embed_class must be", "init_values"))


def test_no_parameter_is_zero_or_uniform() -> None:
    for name in (
        "vit_test",
        "deit_tiny_distilled_patch16_224",
        "vit_base_patch16_siglip_224",
        "vit_small_hybrid_patch1_224",
    ):
        for parameter, tensor in random_weights(shrunk(name)).items():
            assert tensor.std() > 1e-3, parameter
            assert torch.isfinite(tensor).all(), parameter


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
