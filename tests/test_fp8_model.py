"""Models in FP8: blocks in e4m3 match the reference, sensitive layers stay in half precision, accuracy is preserved."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from digits import digits_vit, held_out, inputs
from fused_models import SUBJECTS
from mlp_support import DEVICE
from our_operators import OurOperators
from torch import Tensor, nn

import vit_fast
from vit_fast import UnsupportedInputError, fuse
from vit_fast.blocks import fp8_scales
from vit_fast.blocks.block import parts_of, run_block
from vit_fast.blocks.fp8_scales import Fp8Scales, FrozenFp8, scales_of
from vit_fast.fusion.fuse import frozen_of, sharing_copy
from vit_fast.ops.descriptions import BlockScales, Keys
from vit_fast.quantization import fp8
from vit_fast.quantization.fp8 import emulate

POINTS, WANTED = 0.006, 0.995
"""Accuracy that e4m3 may cost; top-1 agreement required in the tests that keep layers for it."""


def in_bf16(name: str) -> tuple[Any, dict[str, Tensor]]:
    model = SUBJECTS[name].build().eval().to(DEVICE, torch.bfloat16)
    return model, {key: value.to(DEVICE, torch.bfloat16) for key, value in SUBJECTS[name].inputs().items()}


def calibrated(name: str) -> tuple[Any, dict[str, Tensor]]:
    model, given = in_bf16(name)
    vit_fast.calibrate(model, next(iter(given.values())))
    return model, given


def in_fp8(name: str) -> tuple[Any, dict[str, Tensor]]:
    model, given = calibrated(name)
    fuse(model, precision="fp8")
    return model, given


def emulated(model: Any, choice: Any = None) -> nn.Module:
    """Returns a copy whose blocks run the reference in e4m3, except for the layers kept in half precision."""
    copied = sharing_copy(model)
    for block in emulate(copied)[0]:
        own: Any = scales_of(model.get_submodule(block.name))
        block.scales = own.now() if choice is None else own.all()._replace(**dict.fromkeys(choice.kept[block.name]))
    return copied


def chosen(model: Any, keep: Any = None, min_agreement: float | None = None) -> fp8.Choice:
    return fp8.choose(model, sharing_copy(model), keep, min_agreement)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    "name",
    ["vit-fast", "timm-vit", "timm-dinov3", "timm-gated", "transformers-vit", "transformers-dinov3", "torchvision-vit"],
)
@torch.no_grad()
def test_models_of_every_library_match_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, given), subject = in_bf16(name), SUBJECTS[name]
    names, half = dict(model.named_modules()), subject.run(model, given)
    linears = vit_fast.calibrate(model, next(iter(given.values()))).linears
    assert torch.equal(subject.run(model, given), half), "calibrate adds nothing but buffers"
    assert len(linears) == 2 * len(fp8_scales.LINEARS) and all(1e-4 < linear.error < 0.1 for linear in linears)
    for linear in linears:
        assert isinstance(names[linear.name.removesuffix(".in_proj")], nn.Linear | nn.MultiheadAttention)
    for scale in (scale for part in model.modules() if isinstance(part, Fp8Scales) for scale in part.all()):
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)), "powers of two"

    run, in_e4m3 = fp8_scales.fused_block, []

    def noted(*args: Any, **options: Any) -> Any:
        in_e4m3.append(options["x8"] is not None)
        return run(*args, **options)

    monkeypatch.setattr(fp8_scales, "fused_block", noted)
    expected = subject.run(emulated(model), given)
    report = fuse(model, precision="fp8")
    assert report.precision == "fp8" and "in e4m3: qkv, proj, fc1, fc2" in str(report)
    found, again = (subject.run(model, given) for _ in range(2))
    assert in_e4m3[2:] == [False, True], "tokens in e4m3 go from block to block"
    of_rounding = distance(expected, half)
    assert 1e-3 < of_rounding < 0.3
    assert distance(found, expected) < of_rounding and distance(again, expected) < of_rounding


@torch.no_grad()
def test_fuse_switches_back_and_follows_new_scales() -> None:
    model, given = calibrated("timm-vit")
    fuse(model, "triton")
    half = model(**given)
    fuse(model, precision="fp8")
    eight = model(**given)
    fuse(model, "triton")
    assert torch.equal(model(**given), half) and not torch.equal(eight, half)
    fuse(model, precision="fp8")
    assert torch.equal(model(**given), eight)
    vit_fast.calibrate(model, 50 * given["x"])
    found = model(**given)
    fuse(model, precision="fp8")
    assert torch.equal(found, model(**given)), "weights rounded by the former scales were used"
    for block in model.blocks:
        scales_of(block).fc1.mul_(8)
    assert torch.equal(found, model(**given)), "cached weights go with the scales that they were rounded by"
    vit_fast.unfuse(model)
    assert not any(isinstance(module, Fp8Scales) for module in model.modules())


@torch.no_grad()
def test_a_model_in_fp8_is_copied_pickled_saved_and_loaded(tmp_path: Path) -> None:
    model, given = calibrated("vit-fast")
    x = given["images"]
    fuse(model, precision="fp8", keep=("*.fc2",))
    path = vit_fast.save(model, tmp_path / "model.safetensors")
    loaded, expected = vit_fast.load(path, backend="triton", device=DEVICE), model(x)
    assert not torch.equal(loaded(x), expected), "the precision is not saved"
    report = fuse(loaded, precision="fp8")
    assert "fc2 stays in bfloat16: selected by an earlier fuse" in " ".join(str(report).split())
    made = vit_fast.create_model(
        "vit_tiny_patch16_224", weights=path, precision="fp8", device=DEVICE, dtype=torch.bfloat16,
        img_size=32, depth=2, embed_dim=64, num_heads=2,
    )  # fmt: skip
    other, _ = in_bf16("vit-fast")
    other.blocks[0].norm1.weight.mul_(20)
    vit_fast.calibrate(other, x)
    fuse(other, precision="fp8")
    assert not torch.equal(other(x), expected)
    vit_fast.load_weights(other, path)  # also replaces the scales and what the block cached
    for each in (loaded, made, other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(x), expected)


@torch.no_grad()
def test_layers_kept_by_name() -> None:
    model, given = calibrated("transformers-vit")
    first = next(name for name, module in model.named_modules() if name.endswith(("query", "q_proj")))
    fuse(model, precision="fp8")
    everything = model(**given).logits
    report = fuse(model, precision="fp8", keep=(first, "*.o_proj", "*.mlp.fc2"))
    some = model(**given).logits
    assert "qkv stays in bfloat16: requested by keep" in str(report) and not torch.equal(some, everything)
    kept = [own.names_kept() for module in model.modules() if (own := scales_of(module)) is not None]
    assert kept == [["qkv", "proj", "fc2"], ["proj", "fc2"]]
    for keep, message in (
        (("*.fc7",), rf"keep must match .* such as {re.escape(first)}.*, got '\*.fc7'"),
        ("*.fc2", r"keep must be an iterable of names, .* got '\*.fc2'"),
        (3, r"keep must be an iterable of names, .* got 3"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            fuse(model, precision="fp8", keep=keep)
    assert torch.equal(model(**given).logits, some), "an error changes nothing"
    fuse(model, "triton")
    half = model(**given).logits
    report = fuse(model, precision="fp8", keep=("*",))
    assert "in e4m3: nothing" in str(report) and torch.equal(model(**given).logits, half)


@torch.no_grad()
def test_an_error_halfway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = calibrated("timm-vit")
    scales = [module for module in model.modules() if isinstance(module, Fp8Scales)]
    fuse(model, precision="fp8", keep=("*.mlp.fc2",))
    before, cached_of = model(**given), Fp8Scales.cached_of

    def failing(self: Fp8Scales, parts: Any) -> FrozenFp8:
        if self is scales[1]:
            raise MemoryError("no room for the weights")
        return cached_of(self, parts)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Fp8Scales, "cached_of", failing)
        fuse(model, precision="fp8", keep=("*.attn.qkv",))
    assert [own.names_kept() for own in scales] == [["fc2"], ["fc2"]]
    assert torch.equal(model(**given), before)


def test_unsupported_requests_raise_with_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ready, _) = SUBJECTS["timm-vit"].build().to(DEVICE), calibrated("timm-vit")
    with pytest.raises(UnsupportedInputError) as raised:
        fuse(model.train(), "sdpa", precision="fp8")
    backend, convert = "backend must be 'auto' or 'triton', got 'sdpa'", "model.to(torch.bfloat16)"
    for part in (backend, "float32", convert, "dtype=torch.bfloat16", "eval()", "vit_fast.calibrate"):
        assert part in str(raised.value)
    assert type(model).__name__ == "VisionTransformer"
    monkeypatch.setattr(fp8, "fp8_reasons", lambda device: ["no FP8 here"] if given is None else [])
    for given, options, message in (
        (model, {"precision": "int4"}, "precision must be one of None, 'fp8', got 'int4'"),
        (model, {"keep": ()}, "require precision='fp8', got precision=None"),
        (ready, {"precision": "fp8", "min_agreement": 2}, r"min_agreement must be in \(0, 1\], got 2"),
        (copy.deepcopy(ready), {"precision": "fp8", "min_agreement": 0.9}, r"requires .*calibrate\(model, images\)"),
        (None, {"precision": "fp8"}, "no FP8 here"),
    ):
        with pytest.raises(ValueError, match=message):
            fuse(given or ready, **options)


def test_a_forward_that_is_not_inference_raises(tmp_path: Path) -> None:
    model, given = in_fp8("timm-vit")
    with pytest.raises(UnsupportedInputError, match=r"does not support gradients.*torch.no_grad"):
        model(**given)
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=r"evaluation mode: call eval\(\)"):
        model.train()(**given)
    model.eval()
    with torch.inference_mode():
        expected = model(**given)
    model.requires_grad_(False)
    assert torch.equal(model(**given), expected), "gradients may be recorded if nothing requires them"
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=r"does not support FP8 blocks.*precision='fp8'"):
        torch.export.export(model, (given["x"],))
    with pytest.raises(UnsupportedInputError, match=r"pass the original model, .*precision='fp8'"):
        vit_fast.export.export_onnx(model, tmp_path / "model.onnx")
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match="float32"):
        model.float()(given["x"].float())
    normed, given = in_fp8("timm-qk-norm")
    normed.requires_grad_(False).blocks[0].attn.q_norm.weight.requires_grad_()
    with pytest.raises(UnsupportedInputError, match="does not support gradients"):
        normed(**given)


@torch.no_grad()
def test_blocks_and_calls_that_the_kernels_do_not_run_stay_in_half_precision() -> None:
    model, given = in_bf16("timm-vit")
    model.blocks[1].mlp.norm = nn.LayerNorm(model.blocks[1].mlp.fc2.in_features).to(DEVICE, torch.bfloat16)
    vit_fast.calibrate(model, given["x"])
    assert "in e4m3: qkv, proj, fc1, fc2" in str(fuse(model, precision="fp8")) and scales_of(model.blocks[1]) is None
    seen: list[int] = []
    model.blocks[0].mlp.fc2.register_forward_hook(lambda *_: seen.append(1))
    assert torch.isfinite(model(**given)).all() and seen, "a block with a hook runs its original forward"
    model, _ = calibrated("vit-fast")
    half: Any = copy.deepcopy(model)
    fuse(half, "triton")
    fuse(model, precision="fp8")
    x, keys = torch.randn(2, 5, 64, device=DEVICE, dtype=torch.bfloat16), Keys(mask=torch.ones(2, 5, dtype=torch.bool))
    outputs = [run_block(parts_of(each.blocks[0]), x, keys=keys)[0] for each in (model, half)]
    assert torch.equal(*outputs), "so does a call with a mask"


@pytest.mark.fast_cases("vit-fast")
@pytest.mark.parametrize("name", ["vit-fast", "transformers-vit"])
@torch.no_grad()
def test_a_compiled_model_is_one_graph_that_follows_its_weights(name: str) -> None:
    model, given = in_fp8(name)
    run, seen = SUBJECTS[name].run, OurOperators()
    compiled: Any = torch.compile(model, backend=seen, fullgraph=True, dynamic=False)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    layer = next(module for module in linears if name != "vit-fast" or module.out_features == 3 * 64)
    expected = run(model, given)
    assert distance(run(compiled, given), expected) < 0.02
    for factor in (2, 0.5, 2):
        layer.weight.mul_(factor)
        changed = run(model, given)
        assert distance(run(compiled, given), changed) < 0.02
    assert distance(changed, expected) > 0.02
    assert seen == ["block"] * 2 * seen.graphs


def test_cached_weights_are_copies_and_follow_the_weights() -> None:
    model, given = in_fp8("timm-vit")
    addresses = {tensor.data_ptr() for each in frozen_of(model) for tensor in each.tensors}
    assert addresses and not {parameter.data_ptr() for parameter in model.parameters()} & addresses
    vit_fast.unfreeze(model)
    with torch.inference_mode():  # weights cached here are followed outside of it
        before = model(**given)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.mul_(1.5)
        assert not torch.equal(model(**given), before)


@torch.inference_mode()
def agreement(model: Any, classes: Tensor) -> float:
    """Returns the share of the held-out images with these classes."""
    return float((model(held_out()[0]).argmax(1) == classes).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("massive", [100.0, 1000.0])
def test_massive_activations_cost_no_accuracy(massive: float) -> None:
    """Two channels of the residual stream are hundreds of times the rest, as in DINOv2 and CLIP; nothing is kept."""
    model, labels = digits_vit(massive=massive), held_out()[1]
    vit_fast.calibrate(model, inputs()[:64])
    share = agreement(model, labels)
    assert share > 0.95 and agreement(emulated(model, chosen(model, ())), labels) >= share - POINTS


@pytest.mark.slow
def test_channels_beyond_the_range_of_e4m3_are_smoothed() -> None:
    first, *_ = vit_fast.calibrate(digits_vit(massive=1e5), inputs()[:16]).linears
    assert first.smoothed and first.error < 0.1


@pytest.mark.fast_cases("1.0")
@pytest.mark.parametrize("outlier", [1.0, 100.0])
def test_as_many_layers_are_kept_as_the_agreement_requires(outlier: float) -> None:
    model, (images, labels) = digits_vit(outlier), held_out()
    vit_fast.calibrate(model, images)
    with torch.inference_mode():
        classes = model(images).argmax(1)
    nothing = chosen(model, ())
    assert 0.99 <= agreement(emulated(model, nothing), classes) < WANTED, "some layers must be kept"
    choice = chosen(model, ("blocks.0.mlp.fc2",), WANTED)
    reasons = [why for layers in choice.kept.values() for why in layers.values()]
    assert choice.kept["blocks.0"]["fc2"] == "requested by keep"
    assert 1 <= reasons.count("required by min_agreement") <= 8
    eight = emulated(model, choice)
    share = agreement(eight, classes)
    assert share >= WANTED and f"{share:.1%} on {len(images)} calibration images" in choice.notes[0]
    assert agreement(eight, labels) >= agreement(model, labels) - POINTS


def test_an_agreement_that_cannot_be_reached_or_measured_raises() -> None:
    model = digits_vit()
    vit_fast.calibrate(model, inputs()[:100])
    for block in model.blocks:
        for name in BlockScales._fields:
            getattr(block.vit_fast_fp8, name).fill_(2.0**15)  # rounds everything to zero
    keep = ("*.proj", "*.mlp.*", "blocks.0.attn.qkv")
    message = r"agreement on 100 images must be at least 1, got [0-9.]+ with 1 of 2 linear layers in half"
    with pytest.raises(UnsupportedInputError, match=message):
        chosen(model, keep, 1.0)
    subject = SUBJECTS["transformers-dinov2"]  # without classes
    model = subject.build().eval()
    vit_fast.calibrate(model, subject.inputs()["pixel_values"])
    with pytest.raises(ValueError, match=r"must return logits \[B, classes\] for min_agreement, got transformers"):
        chosen(model, None, 0.9)
    subject = SUBJECTS["timm-vit"]
    model = subject.build().eval().to(DEVICE)
    vit_fast.calibrate(model, subject.inputs()["x"])
    report = fuse(model.to(torch.bfloat16), precision="fp8", min_agreement=0.01)
    assert "calibration images" in str(report), "the images are converted like the model"
