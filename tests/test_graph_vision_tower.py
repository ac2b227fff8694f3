"""Vision-language models, fused and with graph_vision_tower: same gradients and generated tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fused_models import Subject, assert_same_results, gradients
from packed_towers import ENCODER, QWEN
from torch import nn

import vit_fast

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("transformers.vision_utils")
integration = pytest.importorskip("vit_fast.integrations.transformers")

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}
IMAGE = 90  # the placeholder token of images
Inputs = dict[str, Any]


def generator(name: str, text: Any, vision: Any, tokens: Sequence[int], **settings: Any) -> tuple[nn.Module, Inputs]:
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **settings)
    ids = torch.tensor([[1, *tokens, 5]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), inputs


def qwen() -> tuple[nn.Module, Inputs]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    model, inputs = generator(
        "Qwen2_5_VL", TEXT | {"rope_parameters": rope, "head_dim": 16},
        QWEN | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]}, (92, *[IMAGE] * 6, 93, 7, 92, IMAGE, 93),
        image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    inputs |= {"pixel_values": torch.randn(28, 96), "image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}
    return model, inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}


def mistral() -> tuple[nn.Module, Inputs]:
    text = transformers.MistralConfig(**TEXT)
    vision = transformers.PixtralVisionConfig(**ENCODER, num_hidden_layers=2, image_size=32, patch_size=4)
    tokens = *[IMAGE] * 6, 7, *[IMAGE] * 4
    model, inputs = generator("Mistral3", text, vision, tokens, image_token_index=IMAGE, spatial_merge_size=2)
    sizes = torch.tensor([[16, 24], [16, 16]])
    return model, inputs | {"pixel_values": torch.randn(2, 3, 24, 24), "image_sizes": sizes}


MODELS = {"qwen2_5_vl": qwen, "mistral3": mistral}


def build(name: str) -> tuple[Any, Inputs]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3 if parameter.dim() == 1 else 0, 0.3)
    return model.eval(), inputs


def generated(model: Any, inputs: Inputs) -> list[int]:
    tokens = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]  # of transformers


@pytest.mark.parametrize("name", MODELS)
def test_generate_returns_the_same_tokens(name: str) -> None:
    model, inputs = build(name)
    calls = inputs, inputs | {"pixel_values": torch.randn_like(inputs["pixel_values"])}
    expected = [generated(model, call) for call in calls]
    vit_fast.fuse(model, "sdpa")
    runner = integration.graph_vision_tower(model, budgets=(32, 64), fallback="error")
    assert [generated(model, call) for call in calls] == expected
    assert sum(runner.stats().hits.values()) == 2
    copied = copy.deepcopy(model)
    integration.ungraph_vision_tower(model)
    assert [generated(each, inputs) for each in (model, copied)] == [expected[0]] * 2
    assert sum(runner.stats().hits.values()) == 2, "the copy and the model run without graphs"


def test_gradients_of_a_chat_model_and_its_report() -> None:
    model, inputs = build("qwen2_5_vl")
    plain = copy.deepcopy(model)
    report = vit_fast.fuse(model, "sdpa").require_all()
    assert "model.language_model (Qwen2_5_VLTextModel) is a language model" in str(report)
    assert {row.name for row in report.fused} == {
        f"model.visual.blocks.{i}{part}" for i in (0, 1) for part in ("", ".attn")
    }
    chat = Subject(lambda: model, dict, lambda result: result.logits)
    assert_same_results(*(gradients(chat, each, copy.deepcopy(inputs)) for each in (model, plain)))


def test_training_pickles_and_errors_of_a_model_with_a_runner() -> None:
    model, inputs = build("qwen2_5_vl")
    visual = model.model.visual
    vit_fast.fuse(visual, "sdpa")
    runner = integration.graph_vision_tower(model, budgets=(32,))
    tower_inputs = {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}
    expected = visual(**tower_inputs).pooler_output
    assert not expected.requires_grad
    trained = visual.train()(**tower_inputs).pooler_output
    assert trained.requires_grad and runner.stats().fallbacks == 1
    torch.testing.assert_close(trained.detach(), expected, rtol=1e-4, atol=1e-5)
    visual.eval()
    loaded, hits = pickle.loads(pickle.dumps(visual)), runner.stats().hits
    torch.testing.assert_close(loaded(**tower_inputs).pooler_output.detach(), expected, rtol=1e-4, atol=1e-5)
    assert runner.stats().hits == hits
    with pytest.raises(vit_fast.UnsupportedInputError, match="forward was replaced on the instance"):
        integration.graph_vision_tower(model)
    integration.ungraph_vision_tower(model)
    assert "forward" not in vars(visual)
    with pytest.raises(vit_fast.UnsupportedInputError, match=r"must have a vision tower .*, got Linear"):
        integration.graph_vision_tower(nn.Linear(2, 2))
