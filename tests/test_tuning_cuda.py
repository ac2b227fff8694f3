"""Candidates that optimize tries on CUDA only, on a pretend GPU."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from fused_models import assert_within
from pretend_gpu import Machine
from torch import Tensor, nn

import vit_fast
from vit_fast.measure.build import build
from vit_fast.measure.candidate import AS_FILE, Candidate
from vit_fast.measure.trials import Trials

FUSED = Candidate(attention="sdpa", mlp="sdpa")
GRAPHED = dataclasses.replace(FUSED, graphs=True)


@pytest.mark.parametrize("changes", [{}, {"split": 3}, {"precision": "bf16"}], ids=str)
def test_graphs_are_a_drop_in(model, images, gpus: Machine, changes: dict[str, Any]) -> None:
    choice, images = dataclasses.replace(GRAPHED, **changes), images.cuda()
    trials = Trials(model.cuda(), images, min_agreement=0.0)
    trials.prepare(choice, 600)
    optimized = trials.prepared[choice][0]
    assert len(gpus.captures) == 1 and gpus.counts["graph"] >= 2
    first = optimized(images)
    kept = first.clone()
    optimized(images + 1)
    assert torch.equal(first, kept), "the next replay does not overwrite an output"
    assert first.dtype == torch.float32 and optimized(images[:2]).shape == (2, 10)
    with pytest.raises(ValueError, match="like the example"):
        optimized(images[:, :, :16])


@pytest.mark.parametrize("choice", [GRAPHED, pytest.param(AS_FILE, marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("gpus")
def test_a_result_takes_and_returns_what_the_model_does(images, choice: Candidate) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=32, patch_size=16, num_labels=5, **sizes)
    device = "cuda" if choice.graphs else "cpu"
    model, images = transformers.ViTForImageClassification(config).eval().to(device), images.to(device)
    example = {"pixel_values": images}
    trials = Trials(model, example)
    trials.prepare(choice, 600)
    optimized, expected = trials.prepared[choice][0], trials.output
    for output in (optimized(**example), optimized(images), optimized(images, output_attentions=None)):
        assert type(output) is type(expected) and output.keys() == expected.keys()
        torch.testing.assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(vit_fast.UnsupportedInputError, match="got Tensor, output_attentions"):
        optimized(images, output_attentions=True)
    with pytest.raises(vit_fast.UnsupportedInputError, match="got nothing"):
        optimized()
    with pytest.raises(vit_fast.UnsupportedInputError, match="one tensor"):
        build(choice, model, example | {"interpolate_pos_encoding": False}, expected, ())


def test_compiled_models_return_memory_of_their_own(model, images, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler whose graphs write all their outputs into one place, like max-autotune."""
    place = torch.empty(4, 10)

    def compile_to_graphs(work: nn.Module, **how: Any) -> nn.Module:
        assert how == {"backend": "inductor", "mode": "max-autotune", "fullgraph": False, "dynamic": False}
        work.register_forward_hook(lambda module, args, output: place.copy_(output))
        return work

    monkeypatch.setattr(torch, "compile", compile_to_graphs)
    optimized = build(dataclasses.replace(FUSED, engine="max-autotune"), model, images, model(images), ())
    first = optimized(images)
    optimized(images + 1)
    assert_within(first, model(images), copy.deepcopy(model).double()(images.double()), 2, "max-autotune")


def test_fp8_is_calibrated_and_computes(images, gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On photographs, or on the example if the model's preprocessing is unknown."""
    model = vit_fast.create_model("vit_test", backend="eager", depth=1, device="cuda").eval()
    example, plain = images[:2].cuda(), Candidate(attention="triton", mlp="triton", precision="fp8")
    with torch.no_grad():
        expected = model(example)
    seen: list[list[Tensor]] = []
    calibrate = vit_fast.measure.build.calibrate
    monkeypatch.setattr(
        "vit_fast.measure.build.calibrate", lambda work, batches: calibrate(work, seen.append([*batches]) or seen[-1])
    )
    for choice, given in ((plain, nn.Sequential(model)), (dataclasses.replace(plain, graphs=True), model)):
        output = build(choice, given, example, expected, ())(example)
        assert output.dtype == torch.float32 and not torch.equal(output, expected)
        assert torch.nn.functional.cosine_similarity(output, expected).min() > 0.98
    on_example, on_photographs = seen
    assert len(gpus.captures) == 1 and torch.equal(on_example[0], example)
    assert sum(map(len, on_photographs)) == 32 and on_photographs[0].shape == example.shape
