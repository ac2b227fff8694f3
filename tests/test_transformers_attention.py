"""Tests of the attention function for transformers: calls that it computes, passes to sdpa, or rejects."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from fused_models import SUBJECTS
from torch import Tensor, nn
from transformers import AttentionInterface

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


# --- attention functions of a user ---------------------------------------------------------------------------------


def hot(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Computes attention with three times the scale."""
    mask = mask if isinstance(mask, Tensor) else None  # the mask of flex_attention masks nothing here
    scale = 3 * options["scaling"]
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale).transpose(1, 2), None


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[AttentionInterface]]:
    """Returns the registry of attention functions, and restores it after the test."""
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    yield AttentionInterface


@pytest.mark.parametrize("name", ["hot", "sdpa", "flash_attention_2", "flex_attention", "user/kernels", "eager"])
def test_a_function_registered_before_fuse_runs(name: str, interface: type[AttentionInterface]) -> None:
    """Under a new name, a name of transformers, or a name of the Hub."""
    subject = SUBJECTS["transformers-vit"]
    model, inputs = subject.build().eval(), subject.inputs()
    model.config._attn_implementation = name
    if name != "eager" or transformers.__version__ >= "5":  # transformers 4 never replaces its own function
        interface.register(name, hot)
    expected = subject.run(model, inputs)
    report = vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(subject.run(model, inputs), expected)
    assert {row.part for row in report.skipped} == {"attention"} and f"{name!r}" in str(report)
    with pytest.raises(vit_fast.UnsupportedInputError, match=f"attn_implementation='{name}'"):
        report.require_all()


def test_every_function_of_transformers_is_fused_or_named() -> None:
    subject = SUBJECTS["transformers-vit"]
    for name in ("eager", *AttentionInterface._global_mapping):
        model = subject.build().eval()
        model.config._attn_implementation = name
        report = vit_fast.fuse(model, "sdpa")
        plain = name == "sdpa" or name.startswith(("flash_attention_", "vit_fast"))
        assert bool(report.skipped) != plain and (plain or f"attn_implementation={name!r}" in str(report)), name


def test_a_sequence_of_layers_runs_a_function_selected_after_fuse(interface: type[AttentionInterface]) -> None:
    """fuse runs Sequentials of some blocks by one call, which must not bypass the layers' own forward."""
    model = SUBJECTS["transformers-vit"].build().eval()
    layers = [each for each in model.modules() if type(each).__name__.endswith("Layer")]
    sequence, x = nn.Sequential(*layers, *copy.deepcopy(layers)), torch.randn(2, 5, model.config.hidden_size)
    model.config._attn_implementation = sequence[-1].attention.config._attn_implementation = "hot"
    interface.register("hot", hot)
    changed = sequence(x)
    model.config._attn_implementation = sequence[-1].attention.config._attn_implementation = "sdpa"
    vit_fast.fuse(sequence, "sdpa")
    assert not torch.allclose(sequence(x), changed)
    model.config._attn_implementation = sequence[-1].attention.config._attn_implementation = "hot"
    torch.testing.assert_close(sequence(x), changed)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_function_selected_after_fuse_runs(compiled: bool, frozen: bool, interface: type[AttentionInterface]) -> None:
    subject = SUBJECTS["transformers-vit"]
    model, inputs = subject.build().eval(), subject.inputs()
    twin: Any = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    if frozen:
        vit_fast.freeze(model)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    interface.register("hot", hot)
    plain = interface._global_mapping["sdpa"]
    with torch.no_grad():
        before = subject.run(run, inputs)
        for change in (
            lambda: [setattr(each.config, "_attn_implementation", "hot") for each in (model, twin)],
            lambda: [setattr(each.config, "_attn_implementation", "sdpa") for each in (model, twin)],
            lambda: interface.register("sdpa", hot),
        ):
            change()
            torch.testing.assert_close(subject.run(run, inputs), subject.run(twin, inputs), rtol=1e-4, atol=1e-4)
        interface.register("sdpa", plain)
        assert torch.equal(subject.run(run, inputs), before)
    causal = next(module for module in model.modules() if hasattr(module, "is_causal"))
    causal.is_causal = True
    assert any(row.reasons == ("is_causal must be False, got True",) for row in vit_fast.fuse(model, "sdpa").skipped)


def test_each_tower_has_its_own_attention_function(interface: type[AttentionInterface]) -> None:
    interface.register("hot", hot)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.SiglipConfig(
        text_config=sizes | {"vocab_size": 50}, vision_config=sizes | {"image_size": 32, "patch_size": 16}
    )
    config.vision_config._attn_implementation = "hot"
    with torch.device("meta"):  # where no tower can be read
        report = vit_fast.fuse(transformers.SiglipModel(config), "sdpa")
    assert {row.name.partition(".")[0] for row in report.skipped} == {"vision_model"}
    (reason,) = {reason for row in report.skipped for reason in row.reasons}
    assert reason.startswith("attn_implementation='hot' selects hot, which may compute something else")


def test_a_mask_function_of_a_user_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.6")
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    subject = SUBJECTS["transformers-siglip2"]
    model, inputs = subject.build().eval(), subject.inputs()
    inputs["pixel_attention_mask"][1, 2:] = 0

    def first_key(*args: Any, **options: Any) -> Any:
        mask = sdpa_mask(*args, **options | {"allow_is_bidirectional_skip": False})
        return mask & (torch.arange(mask.shape[-1]) == 0)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", first_key)
    expected = subject.run(model, inputs)
    vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(subject.run(model, inputs), expected)


def test_towers_and_exports_respect_the_function(interface: type[AttentionInterface], tmp_path: Any) -> None:
    from vit_fast.libraries.known import packed_tower

    subject = SUBJECTS["transformers-vit"]
    model, inputs = subject.build().eval(), subject.inputs()
    model.config._attn_implementation = "hot"
    settings = []
    for function in (hot, interface._global_mapping["sdpa"]):
        interface.register("hot", function)
        settings.append(packed_tower(model).settings())  # type: ignore[union-attr]  # not None
    assert settings[0] != settings[1], "a graph of the other function is not replayed"
    interface.register("hot", hot)
    expected = subject.run(model, inputs)
    path = tmp_path / "hot.onnx"
    vit_fast.export.export_onnx(model, path)
    found = vit_fast.export.OnnxRunner(path)(inputs["pixel_values"].numpy())
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-3, atol=1e-3)
