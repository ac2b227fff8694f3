"""Fused models and the recorders and class registries of transformers: hidden states, attention weights, names."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS
from torch import Tensor, nn

import vit_fast

transformers = pytest.importorskip("transformers")

PACKED = ("pixtral", "siglip2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "llama4")
NAMES = (*(name for name in SUBJECTS if name.startswith("transformers-")), *PACKED)
HIDDEN, WEIGHTS = "output_hidden_states", "output_attentions"


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if name in SUBJECTS:
        return SUBJECTS[name].build().eval(), SUBJECTS[name].inputs()
    from packed_towers import TOWERS

    return TOWERS[name].build().eval(), TOWERS[name].inputs(0)


def tensors(output: Any) -> dict[str, Tensor]:
    """Returns all tensors of an output by their paths."""

    def walk(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield place, value
        elif isinstance(value, (dict, tuple, list)):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(f"{place}.{key}", part)

    return dict(walk("", output))


@torch.no_grad()
def outputs(model: nn.Module, inputs: dict[str, Any], *asked: str) -> dict[str, Tensor]:
    return tensors(model(**copy.deepcopy(inputs), **dict.fromkeys(asked, True)))


def make_eager(model: nn.Module) -> None:
    for config in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
        config._attn_implementation = "eager"


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_model_records_what_it_recorded(name: str) -> None:
    plain, inputs = build(name)
    fused = copy.deepcopy(plain)
    vit_fast.fuse(fused, "sdpa")
    undone = copy.deepcopy(fused)
    vit_fast.unfuse(undone)
    # a backbone always has hooks of transformers, which cannot be pickled
    copied = copy.deepcopy(fused if name == "transformers-vitpose" else pickle.loads(pickle.dumps(fused)))
    hidden = outputs(plain, inputs, HIDDEN)
    make_eager(plain)
    weights = outputs(plain, inputs, HIDDEN, WEIGHTS)
    assert len(weights) >= len(hidden) + 2 >= 5
    for model in (fused, copied, undone):
        torch.testing.assert_close(outputs(model, inputs, HIDDEN), hidden, rtol=1e-3, atol=1e-3)
        make_eager(model)
        torch.testing.assert_close(outputs(model, inputs, HIDDEN, WEIGHTS), weights, rtol=1e-3, atol=1e-3)
        for asked in (HIDDEN, WEIGHTS):
            setattr(model.config, asked, True)
        torch.testing.assert_close(outputs(model, inputs), weights, rtol=1e-3, atol=1e-3)


def test_a_tower_that_was_wrapped_is_not_pickled_as_its_original() -> None:
    model, _ = build("transformers-siglip2")
    vit_fast.fuse(model, "sdpa")
    assert str(model).startswith("FusedSiglip2VisionModel(")
    model.__class__ = type("Wrapped", (type(model),), {})
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(model)


VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"model_type": "pixtral", "image_size": 32, "patch_size": 4}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 100}
CHATS = {"Llava": ("Llama", {"vision_feature_select_strategy": "full"}, 24), "Mistral3": ("Mistral", {}, 6)}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_model_finds_the_hidden_states_of_its_tower(name: str) -> None:
    text, settings, tokens = CHATS[name]
    shared = {"image_token_index": 90, "vision_feature_layer": -1, "vision_config": VISION}
    written = getattr(transformers, f"{text}Config")(**TEXT)
    config = getattr(transformers, f"{name}Config")(text_config=written, **shared, **settings)
    torch.manual_seed(0)
    plain = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    ids = torch.tensor([[1, *[90] * tokens, 2, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    inputs |= {"pixel_values": torch.randn(1, 3, 24, 16), "image_sizes": torch.tensor([[24, 16]])}
    fused = copy.deepcopy(plain)
    assert len(vit_fast.fuse(fused, "sdpa").fused) == 5
    right = outputs(plain, inputs)
    for model in (fused, copy.deepcopy(fused)):
        torch.testing.assert_close(outputs(model, inputs), right)


@pytest.mark.parametrize("backend", ("sdpa", "triton"))
@pytest.mark.parametrize("container", (nn.ModuleList, nn.Sequential))
def test_a_user_model_records_the_parts_of_layers(container: type[nn.Module], backend: str) -> None:
    """A recorder on an MLP, or on a layer in a fused Sequential, is treated like any other hook."""
    pytest.importorskip("transformers", minversion="5.6")
    vit = importlib.import_module("transformers.models.vit.modeling_vit")
    recording = importlib.import_module("transformers.utils.output_capturing")

    class Model(vit.ViTPreTrainedModel):  # type: ignore[misc, name-defined]
        _can_record_outputs = {  # noqa: RUF012  # as in transformers
            "hidden_states": vit.ViTLayer,
            "mlps": recording.OutputRecorder(vit.ViTMLP, index=0),
            "mixed": recording.OutputRecorder(vit.ViTAttention, index=0),
        }

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            layers = [vit.ViTLayer(config) for _ in range(2)]
            self.layers = container(layers) if container is nn.ModuleList else container(*layers)
            self.post_init()

        @recording.capture_outputs
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            for layer in self.layers if container is nn.ModuleList else [self.layers]:
                hidden_states = layer(hidden_states)
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=hidden_states)

    torch.manual_seed(0)
    config = transformers.ViTConfig(hidden_size=64, num_attention_heads=2, intermediate_size=96)
    plain, inputs = Model(config).eval(), {"hidden_states": torch.randn(1, 5, 64)}
    for asked, count in ((HIDDEN, 4), ("output_mlps", 3), ("output_mixed", 3)):
        fused = copy.deepcopy(plain)
        vit_fast.fuse(fused, backend)
        right = outputs(plain, inputs, asked)
        assert len(right) == count
        torch.testing.assert_close(outputs(fused, inputs, asked), right, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pixtral", "siglip2"])
def test_a_fused_tower_passes_the_checks_of_transformers_own_suite(name: str, tmp_path: Path) -> None:
    """Checks tuples, gradients of recorded tensors, checkpointing, saving, loading, other attention and batches."""
    plain, inputs = build(name)
    fused = copy.deepcopy(plain)
    vit_fast.fuse(fused, "sdpa")
    right = outputs(plain, inputs, HIDDEN)
    close = {"rtol": 1e-3, "atol": 1e-3}

    in_tuples = {model: model(**inputs, output_hidden_states=True, return_dict=False) for model in (plain, fused)}
    torch.testing.assert_close(tensors(in_tuples[fused]), tensors(in_tuples[plain]), **close)

    fused.save_pretrained(tmp_path)
    for loaded in (type(plain).from_pretrained(tmp_path), type(fused).from_pretrained(tmp_path)):
        assert list(loaded.state_dict()) == list(plain.state_dict())
        torch.testing.assert_close(outputs(loaded.eval(), inputs, HIDDEN), right, **close)
        vit_fast.fuse(loaded, "sdpa")
        torch.testing.assert_close(outputs(loaded, inputs, HIDDEN), right, **close)

    gradients = []
    for model, checkpointing in ((plain, False), (fused, False), (fused, True)):
        model.train().zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        output = model(**inputs, output_hidden_states=not checkpointing)
        recorded = list(output.hidden_states or ())[:-1]
        for each in recorded:
            each.retain_grad()
        output.last_hidden_state.square().mean().backward()
        assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in recorded)
        gradients.append({key: value.grad for key, value in model.named_parameters() if value.grad is not None})
    assert len(gradients[0]) >= 20
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2, **close)

    for model in (plain, fused):
        model.gradient_checkpointing_disable()
        model.eval().set_attn_implementation("eager")
    output = fused(**inputs, output_attentions=True)
    for each in output.attentions:
        each.retain_grad()
    output.last_hidden_state.square().mean().backward()
    assert len(output.attentions) == 2 and all(each.grad.abs().sum() > 0 for each in output.attentions)
    torch.testing.assert_close(outputs(fused, inputs, WEIGHTS), outputs(plain, inputs, WEIGHTS), **close)
