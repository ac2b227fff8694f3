"""Towers for images of any size, packed or padded, against transformers' own modules: outputs and gradients."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_support import DEVICE
from packed_towers import ENCODER, QWEN, TOWERS, siglip2_inputs
from torch import Tensor, nn

import vit_fast
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import export_onnx
from vit_fast.figures.sight import look
from vit_fast.libraries.transformers_packed import LIKE_QWEN

transformers = pytest.importorskip("transformers", minversion="5.0")

Pick = Callable[[Any], Tensor]


def results(pick: Pick, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of every parameter that has one."""
    model.zero_grad()
    out = pick(model(**copy.deepcopy(inputs)))
    out.sin().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_agree(found: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], right[0], rtol=1e-4, atol=2e-5)
    assert found[1].keys() == right[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in right[1].values())
    for name, gradient in right[1].items():
        # of the bias of a key it is 0 but for rounding
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        torch.testing.assert_close(found[1][name] / scale, gradient / scale, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_is_fused_and_agrees(name: str) -> None:
    """In training and in evaluation, for batches of other sizes after each other."""
    tower = TOWERS[name]
    model = tower.build()
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    for batch in range(3):
        inputs = tower.inputs(batch)
        assert_agree(
            results(tower.pick, model.train(batch != 1), inputs), results(tower.pick, plain.train(batch != 1), inputs)
        )
    vit_fast.unfuse(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


@pytest.mark.fast_cases("qwen2_5_vl", "siglip2")
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_runs_by_kernels(name: str) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    tower = TOWERS[name]
    model = tower.build()
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "triton").require_all()
    inputs = tower.inputs(2)
    assert_agree(results(tower.pick, model, inputs), results(tower.pick, plain, inputs))
    with torch.no_grad():
        assert len(vit_fast.freeze(model.eval())) == 2
        torch.testing.assert_close(tower.pick(model(**inputs)), tower.pick(plain(**inputs)), rtol=1e-4, atol=2e-5)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(0.8)
        torch.testing.assert_close(tower.pick(model(**inputs)), tower.pick(plain(**inputs)), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", LIKE_QWEN)
def test_a_layer_like_qwens_agrees(family: str) -> None:
    """Of every model whose layer is taken for a copy of Qwen's, by itself."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "hidden_act": "gelu_pytorch_tanh"}
    sizes |= {"rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "out_hidden_size": 96}
    torch.manual_seed(0)
    layer = getattr(module, f"{LIKE_QWEN[family]}Block")(SimpleNamespace(**sizes, _attn_implementation="sdpa"))
    x, angles = torch.randn(15, 64), torch.randn(15, 16).repeat(1, 2)
    given = {"cu_seqlens": torch.tensor([0, 4, 15]), "position_embeddings": (angles.cos(), angles.sin())}
    right = layer(x, **given)
    vit_fast.fuse(layer, "sdpa").require_all()
    torch.testing.assert_close(layer(x, **given), right)


def test_nan_in_one_image_stays_in_it() -> None:
    tower = TOWERS["qwen2_5_vl"]
    model = tower.build().eval()
    vit_fast.fuse(model, "sdpa")
    inputs = tower.inputs(0)
    right = model(**inputs).pooler_output
    inputs["hidden_states"][24:32] = float("nan")  # the second image's two frames
    found = model(**inputs).pooler_output
    assert found[6:8].isnan().all()
    assert torch.equal(found[:6], right[:6]) and torch.equal(found[8:], right[8:])


def test_a_whole_chat_model_runs_its_tower_by_ours() -> None:
    """fuse(model) as well as fuse(model.visual): all that sees is fused; what reads is named, and none of ours."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text |= {"num_key_value_heads": 2, "vocab_size": 100, "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 0}
    vision = QWEN | {"window_size": 16, "fullatt_block_indexes": [1]}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).to(DEVICE)
    plain = copy.deepcopy(model)
    report = vit_fast.fuse(model, "sdpa")
    assert {row.name for row in report.fused} == {
        f"model.visual.blocks.{i}{part}" for i in (0, 1) for part in ("", ".attn")
    }
    assert report.require_all().elsewhere == ("model.language_model (Qwen2_5_VLTextModel)",)
    assert "model.language_model (Qwen2_5_VLTextModel): a language model" in str(report)
    grid = torch.tensor([[1, 4, 6], [1, 2, 2]], device=DEVICE)
    ids = torch.tensor([[1, 92, *[90] * 6, 93, 7, 92, 90, 93, 5]], device=DEVICE)
    types = (ids == 90).int()
    inputs = {"pixel_values": torch.randn(28, 96, device=DEVICE), "image_grid_thw": grid, "input_ids": ids}
    inputs |= {"mm_token_type_ids": types}
    assert_agree(*(results(lambda result: result.logits, each, inputs) for each in (model, plain)))


def test_a_whole_model_of_images_and_texts_is_fused() -> None:
    texts = ENCODER | {"vocab_size": 50, "projection_size": 64, "max_position_embeddings": 8}
    texts |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = transformers.Siglip2Config(text_config=texts, vision_config=ENCODER | {"num_patches": 9, "patch_size": 4})
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).to(DEVICE)
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    words = torch.randint(2, 50, (3, 6), device=DEVICE)
    present = torch.arange(6, device=DEVICE) < torch.tensor([[6], [2], [4]], device=DEVICE)
    for masks in ({}, {"attention_mask": present.long()}):
        inputs = siglip2_inputs(0) | {"input_ids": words} | masks
        assert_agree(*(results(lambda result: result.logits_per_image, each, inputs) for each in (model, plain)))


def test_calls_that_ask_for_more_run_the_original() -> None:
    """Weights, hooks on what is read past, and a mask of its own for each query."""
    tower = TOWERS["siglip2"]
    model, inputs = tower.build().eval(), tower.inputs(0)
    layer = model.encoder.layers[0]
    x, mask = torch.randn(2, 9, 64, device=DEVICE), torch.rand(2, 1, 9, 9, device=DEVICE) < 0.7
    mask[..., 0] = True
    right, expected = layer(x, mask), tower.pick(model(**inputs))
    vit_fast.fuse(model, "sdpa")
    torch.testing.assert_close(layer(x, mask), right)
    seen: list[Any] = []
    layer.self_attn.register_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(tower.pick(model(**inputs)), expected)
    assert len(seen) == 1


NEEDS = {
    "qwen2_vl": "grid_thw",
    "qwen2_5_vl": "grid_thw",
    "qwen3_vl": "grid_thw",
    "siglip2": "pixel_attention_mask",
}


@pytest.mark.fast_cases("pixtral")
@pytest.mark.parametrize("name", [*NEEDS, "pixtral", "llama4"])
def test_what_takes_images_alone_says_why_it_does_not_take_a_tower(name: str, tmp_path: Path) -> None:
    """Export, a graph runner, and looking at what a model attends to."""
    tower = TOWERS[name]
    model = tower.build().eval()
    vit_fast.fuse(model, "sdpa")
    first = next(iter(tower.inputs(0).values()))
    reason = rf"its forward must take images alone, but also needs {NEEDS.get(name)}"
    exported = {"pixtral": "torch.export", "llama4": r"positions are complex numbers \(rotary_embedding"}.get(
        name, reason
    )
    with pytest.raises(UnsupportedInputError, match=exported):
        export_onnx(model, tmp_path / "m.onnx")
    if name != "llama4":
        captured = "it reads the sizes of its images on the host" if name == "pixtral" else reason
        with pytest.raises(UnsupportedInputError, match=captured):
            vit_fast.GraphRunner(model, first)
    if name in NEEDS:
        with pytest.raises(UnsupportedInputError, match=reason):
            look(model, first)


def test_what_a_packed_tower_attends_to_can_be_seen() -> None:
    images = torch.randn(2, 3, 32, 32, device=DEVICE)
    model = TOWERS["pixtral"].build().eval()
    seen, alone = look(model, images), look(model, images[1:])
    assert seen.grid == (8, 8) and len(seen.attention) == 2
    torch.testing.assert_close(seen.attention[1][1:], alone.attention[1])
    torch.testing.assert_close(seen.features[1:], alone.features)


@pytest.mark.slow(minutes=True)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "siglip2"])
def test_compiled_towers_agree_for_other_sizes(name: str) -> None:
    """With graph breaks, where transformers reads sizes on the host."""
    tower = TOWERS[name]
    model = tower.build().eval()
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa")
    compiled = torch.compile(model, backend="aot_eager")
    for batch in (0, 2):
        inputs = tower.inputs(batch)
        with torch.no_grad():
            torch.testing.assert_close(
                tower.pick(compiled(**inputs)), tower.pick(plain(**inputs)), rtol=1e-4, atol=2e-5
            )
