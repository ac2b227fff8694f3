"""Towers for images of any size, packed or padded, and models of transformers that record their hidden states."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_models import SUBJECTS, Subject, assert_same_results, classes_of, gradients
from kernel_support import DEVICE
from packed_towers import BATCHES, ENCODER, NAFLEX, TOWERS, grids, siglip2
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import vit_fast
from vit_fast.errors import UnsupportedInputError
from vit_fast.export import export_onnx
from vit_fast.figures import record_activations

ALL = TOWERS | NAFLEX


FAST = {"triton": ("qwen2_5_vl", "pooled by attention", "any query"), "sdpa": ALL}


@pytest.mark.fast_cases(*(f"{backend}-{name}" for backend, names in FAST.items() for name in names))
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", FAST)
def test_a_fused_tower_matches(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs training and evaluation with batches of several sizes; NaFlexVit must not run timm's forward."""
    tower = ALL[name]
    model = tower.build()
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, backend).require_all()
    for batch in (0, 1, 2) if backend == "sdpa" else (2,):
        inputs = tower.inputs(batch)
        expected = gradients(tower, plain.train(batch != 1), inputs)
        with monkeypatch.context() as patched:
            patched.setattr("vit_fast.libraries.timm.timm_blocks.additive", None)
            assert_same_results(gradients(tower, model.train(batch != 1), inputs), expected)
    with torch.no_grad():
        frozen = vit_fast.freeze(model.eval())
        assert backend == "sdpa" or len(frozen) == 2
        for scale in (1.0, 0.8):
            for parameter in (*model.parameters(), *plain.eval().parameters()):
                parameter.mul_(scale)
            torch.testing.assert_close(tower.run(model, inputs), tower.run(plain, inputs), rtol=1e-4, atol=2e-5)
    vit_fast.unfuse(model)
    assert classes_of(model) == classes_of(plain)


@pytest.mark.parametrize("change", ["dropout", "own mask", "hook"])
def test_the_original_forward_of_timm_gets_additive_masks(change: str) -> None:
    """Without torch's attention, timm adds masks to the scores. A boolean mask would be added as 0 and 1."""
    tower = NAFLEX["pooled by attention"]
    model: Any = tower.build().eval()
    inputs = tower.inputs()
    if change == "own mask":
        tokens = inputs["x"].shape[1]
        inputs["attn_mask"] = torch.randn(3, 1, tokens, tokens, device=DEVICE)
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.p = 0.3 if change == "dropout" else 0.0
    model.train(change == "dropout")
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    if change == "hook":
        for layer in (model.attn_pool.q, model.blocks[0].attn.attn_drop, model.blocks[1].mlp.fc1):
            layer.register_forward_hook(lambda *args: None)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = plain(**inputs)
        torch.manual_seed(1)
        torch.testing.assert_close(model(**inputs), expected, rtol=1e-4, atol=1e-5)


def test_images_of_one_size_and_padding() -> None:
    model, images = NAFLEX["averaged"].build().eval(), torch.randn(2, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        expected = model(images)
        vit_fast.fuse(model, "sdpa").require_all()
        torch.testing.assert_close(model(images), expected)
        inputs = NAFLEX["averaged"].inputs()
        padded = inputs["x"].masked_fill(~inputs["patch_valid"][..., None], 7.0)
        assert torch.equal(model(**inputs | {"x": padded}), model(**inputs))


def test_nan_in_one_image_stays_in_it() -> None:
    tower = TOWERS["qwen2_5_vl"]
    model = tower.build().eval()
    vit_fast.fuse(model, "sdpa")
    inputs = grids(BATCHES[0], frames=2)
    expected = model(**inputs).pooler_output
    inputs["hidden_states"][48:56] = float("nan")  # both frames of the second image
    found = model(**inputs).pooler_output
    assert found[12:14].isnan().all()
    assert torch.equal(found[:12], expected[:12]) and torch.equal(found[14:], expected[14:])


def test_a_whole_model_of_images_and_texts_is_fused() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    vision = ENCODER | {"num_hidden_layers": 2, "num_patches": 9, "patch_size": 4}
    texts = ENCODER | {"num_hidden_layers": 2, "vocab_size": 50, "projection_size": 64}
    texts |= {"max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = transformers.Siglip2Config(text_config=texts, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).to(DEVICE)
    plain = copy.deepcopy(model)
    vit_fast.fuse(model, "sdpa").require_all()
    words = torch.randint(2, 50, (3, 6), device=DEVICE)
    present = torch.arange(6, device=DEVICE) < torch.tensor([[6], [2], [4]], device=DEVICE)
    pair = Subject(lambda: model, dict, lambda result: result.logits_per_image)
    for masks in ({}, {"attention_mask": present.long()}):
        inputs = siglip2(BATCHES[0]) | {"input_ids": words} | masks
        assert_same_results(*(gradients(pair, each, inputs) for each in (model, plain)))


def test_a_mask_per_query_reaches_the_original() -> None:
    layer = TOWERS["siglip2"].build().eval().encoder.layers[0]
    x, mask = torch.randn(2, 9, 64, device=DEVICE), torch.rand(2, 1, 9, 9, device=DEVICE) < 0.7
    mask[..., 0] = True
    expected = layer(x, mask)
    vit_fast.fuse(layer, "sdpa")
    torch.testing.assert_close(layer(x, mask), expected)


@pytest.mark.parametrize(
    ("name", "captured", "exported"),
    [
        ("qwen2_5_vl", "must require only images, but also requires grid_thw", "also requires grid_thw"),
        ("siglip2", "also requires pixel_attention_mask", "also requires pixel_attention_mask"),
        ("pixtral", "the tower reads the sizes of its images on the host", "torch cannot export the model"),
        ("idefics3", "copies its patch mask to the host", None),
    ],
)
def test_functions_for_images_report_why_they_do_not_support_a_tower(
    name: str, captured: str, exported: str | None, tmp_path: Path
) -> None:
    model, first = TOWERS[name].build().eval(), next(iter(TOWERS[name].inputs().values()))
    vit_fast.fuse(model, "sdpa")
    with pytest.raises(UnsupportedInputError, match=captured):
        vit_fast.GraphRunner(model, first)
    if exported is not None:
        with pytest.raises(UnsupportedInputError, match=exported):
            export_onnx(model, tmp_path / "m.onnx")
    if exported is not None and exported in captured:
        with pytest.raises(UnsupportedInputError, match=exported):
            record_activations(model, first)


# --- hidden states and attention weights are recorded like those of transformers, which saves and loads towers -------

RECORDING = (*(name for name in SUBJECTS if name.startswith("transformers-")), *TOWERS)
HIDDEN, WEIGHTS = "output_hidden_states", "output_attentions"


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    subject = (SUBJECTS | TOWERS)[name]
    return subject.build().eval(), subject.inputs()


def tensors(output: Any) -> dict[str, Tensor]:
    """Returns all tensors of an output by their paths."""

    paths, _ = pytree.tree_flatten_with_path(dict(output) if isinstance(output, dict) else output)
    return {pytree.keystr(path): leaf for path, leaf in paths if isinstance(leaf, Tensor)}


@torch.no_grad()
def outputs(model: nn.Module, inputs: dict[str, Any], *asked: str) -> dict[str, Tensor]:
    return tensors(model(**copy.deepcopy(inputs), **dict.fromkeys(asked, True)))


def make_eager(model: nn.Module) -> None:
    for config in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
        config._attn_implementation = "eager"


@pytest.mark.parametrize("name", RECORDING)
def test_a_fused_model_records_the_same_outputs(name: str) -> None:
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


@pytest.mark.parametrize("name", ["pixtral", "siglip2"])
def test_a_fused_tower_is_saved_and_loaded_by_transformers(name: str, tmp_path: Path) -> None:
    plain, inputs = build(name)
    fused, expected = copy.deepcopy(plain), outputs(plain, inputs, HIDDEN)
    vit_fast.fuse(fused, "sdpa")
    fused.save_pretrained(tmp_path)
    for loaded in (type(plain).from_pretrained(tmp_path), type(fused).from_pretrained(tmp_path)):
        assert list(loaded.state_dict()) == list(plain.state_dict())
        vit_fast.fuse(loaded.eval(), "sdpa")
        torch.testing.assert_close(outputs(loaded, inputs, HIDDEN), expected, rtol=1e-3, atol=1e-3)
    in_tuples = [tensors(model(**inputs, output_hidden_states=True, return_dict=False)) for model in (plain, fused)]
    torch.testing.assert_close(in_tuples[1], in_tuples[0], rtol=1e-3, atol=1e-3)
