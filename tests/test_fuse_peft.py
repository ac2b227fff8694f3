"""LoRA adapters of peft: trained, merged and unmerged after fuse, and fused again."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_models import SUBJECTS, assert_same_results, gradients
from kernel_support import DEVICE
from torch import Tensor, nn

import vit_fast

# Linear layers of attention and MLP, by library.
TARGETS = {
    "timm-vit": ".*blocks.*(qkv|proj|fc1|fc2)",
    "transformers-vit": "(?!.*embeddings).*(q_proj|query|v_proj|value|fc1|fc2|intermediate.dense|output.dense)",
}


def with_lora(name: str, model: nn.Module) -> nn.Module:
    """Returns the model with an adapter that changes the output; peft initializes adapters to zero."""
    peft = pytest.importorskip("peft")  # imported here, because that takes seconds
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS[name]))
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.3)
    return wrapped.eval()


def assert_alike(name: str, model: nn.Module, twin: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found, expected = (SUBJECTS[name].run(each, inputs) for each in (model, twin))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return expected


@pytest.mark.fast_cases("transformers-vit-triton", "timm-vit-sdpa")
@pytest.mark.parametrize("backend", ["sdpa", "triton"])
@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_on_a_fused_model_is_trained_and_merged(name: str, backend: str) -> None:
    model, inputs = SUBJECTS[name].build().to(DEVICE).eval(), SUBJECTS[name].inputs()
    inputs = {key: value.to(DEVICE) for key, value in inputs.items()}
    twin = copy.deepcopy(model)
    vit_fast.fuse(model, backend).require_all()
    plain = assert_alike(name, model, twin, inputs)
    model, twin = with_lora(name, model), with_lora(name, twin)
    adapted = assert_alike(name, model, twin, inputs)
    assert (adapted - plain).abs().max() > 0.1
    if backend == "sdpa":
        found, expected = (gradients(SUBJECTS[name], each, inputs) for each in (model, twin))
        assert all("lora" in key for key in found[1])
        assert_same_results(found, expected)
    for step in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        model, twin = (getattr(each, step)() or each for each in (model, twin))
        assert_alike(name, model, twin, inputs)
        if step == "unmerge_adapter":
            report = vit_fast.fuse(model, backend)
            assert {row.part for row in report.fused} == {"attention"}
            assert all("must be torch.nn.Linear itself, got " in row.reasons[0] for row in report.skipped)
            assert_alike(name, model, twin, inputs)
    assert vit_fast.fuse(model, backend).require_all()
    torch.testing.assert_close(assert_alike(name, model, twin, inputs), adapted, rtol=1e-4, atol=1e-4)
