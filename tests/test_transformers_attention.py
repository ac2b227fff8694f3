"""Tests of the attention function for transformers: calls that it computes, passes to sdpa, or rejects."""

from __future__ import annotations

import pytest
import torch
import transformers
from fused_models import SUBJECTS
from torch import Tensor, nn

import vit_fast


@pytest.mark.parametrize("name", ["transformers-vit", "transformers-siglip2"])
def test_models_with_the_attention_function(name: str) -> None:
    import vit_fast.integrations.transformers as integration

    subject = SUBJECTS[name]
    model, inputs = subject.build().eval(), subject.inputs()
    if name == "transformers-siglip2":  # the second image is padded, so the mask matters
        inputs["pixel_attention_mask"][1, 2:] = 0
        inputs["spatial_shapes"][1, 0] = 1
    expected = subject.run(model, inputs)
    model.config._attn_implementation = integration.ATTENTION_NAME  # like set_attn_implementation, which 4.53 lacks
    torch.testing.assert_close(subject.run(model, inputs), expected)


def interface_inputs() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    module = nn.Module()
    module.is_causal = False
    return module, *(torch.randn(2, 2, 5, 32) for _ in range(3))


def test_keywords_that_sdpa_would_ignore_are_rejected() -> None:
    from vit_fast.integrations.transformers import REFUSED, attention_forward

    for name in REFUSED:
        attention_forward(*interface_inputs(), None, **{name: None})
        with pytest.raises(vit_fast.UnsupportedInputError, match=rf"in Module:\n  - {name} must not be set"):
            attention_forward(*interface_inputs(), None, **{name: torch.ones(2)})


def test_other_calls_are_passed_to_sdpa() -> None:
    from vit_fast.integrations.transformers import ALL_ATTENTION_FUNCTIONS, REFUSED, attention_forward

    module, q, k, v = interface_inputs()
    # without an attribute is_causal, transformers assumes a decoder
    calls = [(module, v, {"is_causal": True}), (module, v[..., :16], {}), (nn.Module(), v, {})]
    if "position_bias" not in REFUSED:  # transformers 5
        calls.append((module, v, {"position_bias": torch.randn(1, 2, 5, 5)}))
    for owner, values, options in calls:
        expected = ALL_ATTENTION_FUNCTIONS["sdpa"](owner, q, k, values, None, **options)[0]
        assert torch.equal(attention_forward(owner, q, k, values, None, **options)[0], expected)


def test_a_position_bias_reaches_a_fused_attention_layer() -> None:
    subject = SUBJECTS["transformers-vit"]
    model, inputs = subject.build().eval(), subject.inputs()
    keywords = {"position_bias": torch.randn(1, 2, 5, 5), "output_hidden_states": True}
    expected = model(**inputs, **keywords).logits
    vit_fast.fuse(model).require_all()
    torch.testing.assert_close(model(**inputs, **keywords).logits, expected)


def test_padding_masks_have_stride_zero_and_others_equal_those_of_sdpa() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    config, present = transformers.Siglip2VisionConfig(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    for make, options in ((create_bidirectional_mask, {}), (create_causal_mask, {"past_key_values": None})):
        masks = []
        for name in ("sdpa", "vit_fast"):
            config._attn_implementation = name
            masks.append(make(config=config, inputs_embeds=torch.randn(2, 5, 32), attention_mask=present, **options))
        assert torch.equal(*masks)
        assert (masks[1].stride(2) == 0) == (make is create_bidirectional_mask)
