"""Models with dropout: fused in training and in evaluation mode; active dropout runs the original forward."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from fused_models import (
    SUBJECTS,
    Subject,
    images,
    plain_vit,
    timm_subject,
    torch_encoder,
    torchvision_vit,
    transformers_subject,
)  # fmt: skip
from kernel_support import DEVICE
from torch import nn

import vit_fast
from vit_fast.blocks.fused import FusedModule
from vit_fast.ops import attention_op, block

P = 0.25


tokens, logits = SUBJECTS["torch-encoder"].inputs, SUBJECTS["torch-encoder"].output
DROPPING: dict[str, Subject] = {
    "timm, attention": timm_subject("vit_tiny_patch16_224", attn_drop_rate=P),
    "timm, MLP": timm_subject("vit_tiny_patch16_224", proj_drop_rate=P),
    "transformers, attention": transformers_subject("DeiTModel", "DeiTConfig", attention_probs_dropout_prob=P),
    "transformers, MLP": transformers_subject("DeiTModel", "DeiTConfig", hidden_dropout_prob=P),
    "transformers, pooling": transformers_subject(
        "SiglipVisionModel", "SiglipVisionConfig", "pooler_output", attention_dropout=P
    ),
    "torchvision": Subject(functools.partial(torchvision_vit, dropout=P, attention_dropout=P), images("x"), logits),
    "torch": Subject(functools.partial(torch_encoder, P), tokens, logits),
    "ours": Subject(functools.partial(plain_vit, proj_drop_rate=P, attn_drop_rate=P), images("images"), logits),
}


def state_of(model: nn.Module) -> list[tuple[type, str | None]]:
    """Returns the decision of fuse for each module."""
    return [(type(module), getattr(module, "vit_fast_backend", None)) for module in model.modules()]


@pytest.mark.parametrize("case", DROPPING)
def test_fusing_in_training_and_in_evaluation_is_the_same(case: str) -> None:
    subject = DROPPING[case]
    model, inputs = subject.build().train(), subject.inputs()
    twin, evaluated = copy.deepcopy(model), copy.deepcopy(model).eval()
    report, other = (vit_fast.fuse(each, "sdpa").require_all() for each in (model, evaluated))
    assert [(row.name, row.notes) for row in report.modules] == [(row.name, row.notes) for row in other.modules]
    notes = [note for row in report.fused for note in row.notes]
    assert any(note.startswith("in training the original forward runs") and str(P) in note for note in notes)
    assert state_of(model) == state_of(evaluated.train())
    outputs = []
    for trained in (model, twin, evaluated):
        torch.manual_seed(3)
        outputs.append(subject.run(trained, inputs))
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[2], outputs[1])
    torch.testing.assert_close(subject.run(model.eval(), inputs), subject.run(twin.eval(), inputs))


@pytest.mark.parametrize("library", ["timm-vit", "transformers-vit", "torchvision-vit", "ours"])
def test_a_model_on_meta_is_fused_for_where_it_will_run(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[library]
    model, inputs = subject.build().to("meta").eval(), subject.inputs()
    inputs = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    plain = subject.build().to(DEVICE).eval()
    vit_fast.fuse(model, "triton").require_all()
    on_meta = subject.run(model, {name: tensor.to("meta") for name, tensor in inputs.items()})
    assert on_meta.is_meta
    model.to_empty(device=DEVICE).load_state_dict(plain.state_dict())
    fused = [part for part in model.modules() if isinstance(part, FusedModule)]
    assert {part.vit_fast_backend for part in fused} <= {"triton"}
    torch.testing.assert_close(subject.run(model, inputs), subject.run(plain, inputs), rtol=1e-4, atol=1e-4)
    assert on_meta.shape == subject.run(plain, inputs).shape
    for module in (attention_op, block):
        monkeypatch.setattr(module, "kernel_reasons", lambda device, dtype: ["this device is too old"])
    with pytest.raises(vit_fast.UnsupportedInputError, match="this device is too old"):
        subject.run(model, inputs)
