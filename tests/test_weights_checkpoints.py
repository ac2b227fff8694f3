"""Weights in checkpoints of training code: the part that is used, what the report says, and errors."""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from vit_fast import VisionTransformer, create_model, load_weights
from vit_fast.weights import WeightsError

State = dict[str, Tensor]
FEATURES: dict[str, Any] = {"num_classes": 0}


def _state(number: int, **config: Any) -> State:
    """Returns weights that differ by number."""
    torch.manual_seed(number)
    return {name: torch.randn_like(t) for name, t in create_model("vit_test", **config).state_dict().items()}


def _with(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


PLAIN, OTHER, THIRD = _state(0), _state(1), _state(2)
BODY, TRAINED = _state(0, **FEATURES), _state(1, **FEATURES)
NO_CLASS = {"class_token": False, "global_pool": "avg", "fc_norm": False, **FEATURES}
TARGET, ENCODER = _state(0, **NO_CLASS), _state(1, **NO_CLASS)
AVERAGED = AveragedModel(torch.compile(create_model("vit_test")))
AVERAGED.module.load_state_dict(_with("_orig_mod.", PLAIN))
HOOKED = {n.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): t for n, t in PLAIN.items()}
LIGHTNING = {
    "state_dict": {**_with("net.", PLAIN), "criterion.weight": torch.ones(10), "criterion.scale": torch.ones(1)},
    "hyper_parameters": {"root": pathlib.PurePosixPath("/data"), "seed": 1, "when": datetime.timedelta(1)},
    "optimizer_states": [{}], "loops": {},
}  # fmt: skip
DINO_HEAD = {"head.mlp.0.weight": torch.ones(8, 64), "head.last_layer.weight_v": torch.ones(9, 8)}
DINO = {
    "student": _with("module.", {**_with("backbone.", TRAINED), **DINO_HEAD}),
    "teacher": {**_with("backbone.", BODY), **DINO_HEAD}, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
    "epoch": 3, "args": argparse.Namespace(arch="vit_small"), "dino_loss": {"center": torch.ones(1, 9)},
}  # fmt: skip
# both models in one state dict; blocks are grouped in chunks, e.g. blocks.1.1 for the second one
CHUNKS = {
    prefix + name.replace("blocks.1.", "blocks.1.1.").replace("blocks.0.", "blocks.0.0."): tensor
    for prefix, state in (("student.backbone.", TRAINED), ("teacher.backbone.", BODY))
    for name, tensor in state.items()
}
DINOV2 = {"model": {**CHUNKS, "teacher.dino_head.mlp.0.weight": torch.ones(8, 64)}, "iteration": 7}
DECODER = {
    "mask_token": torch.ones(1, 1, 32), "decoder_pos_embed": torch.ones(1, 17, 32),
    "decoder_embed.weight": torch.ones(32, 64), "decoder_blocks.0.attn.qkv.weight": torch.ones(96, 32),
}  # fmt: skip
PROJECTOR = {"head.0.weight": torch.ones(8, 64), "head.1.running_mean": torch.ones(8)}
MOCO = {
    "epoch": 1, "state_dict": {
        **_with("module.base_encoder.", {**BODY, **PROJECTOR}), "module.predictor.0.weight": torch.ones(8, 8),
        **_with("module.momentum_encoder.", {**TRAINED, **PROJECTOR}),
    },
}  # fmt: skip
JEPA = {
    "encoder": _with("module.", ENCODER), "target_encoder": _with("module.", TARGET),
    "predictor": {f"module.predictor_{name}.weight": torch.ones(32) for name in ("embed", "blocks.0.norm1")},
}  # fmt: skip
# content, weights that the model must get, the part with these weights, other parts, and fields of ViTConfig
LAYOUTS: dict[str, tuple[Any, State, str, str, dict[str, Any]]] = {
    "averaged": (AVERAGED.state_dict(), PLAIN, "prefix module.", "n_averaged", {}),
    "compiled": (_with("_orig_mod.module.", PLAIN), PLAIN, "prefix module.", "none", {}),
    "checkpointed blocks": (HOOKED, PLAIN, "", "", {}),
    "lightning": (LIGHTNING, PLAIN, "state_dict, prefix net.", "criterion.", {}),
    "lightning with ema": (
        {"state_dict": {**_with("model.", OTHER), **_with("ema_model.module.", PLAIN)}},
        PLAIN, "state_dict, prefix ema_model.module.", "model.", {},
    ),
    "dino": (DINO, BODY, "teacher, prefix backbone.", "student, head., optimizer.state, dino_loss", FEATURES),
    "dinov2": (DINOV2, BODY, "model, prefix teacher.backbone.", "student.backbone., teacher.dino", FEATURES),
    "mae": ({"model": BODY | DECODER, "args": argparse.Namespace(mask_ratio=0.75)}, BODY, "model", "none", FEATURES),
    "moco": (
        MOCO, BODY, "state_dict, prefix module.base_encoder.",
        "module.momentum_encoder., module.predictor.0.weight", FEATURES,
    ),
    "jepa": (JEPA, TARGET, "target_encoder, prefix module.", "encoder, predictor", NO_CLASS),
    "timm": (
        {"state_dict": OTHER, "model": THIRD, "state_dict_ema": PLAIN, "model_ema": THIRD, "metric": np.float64(0.5)},
        PLAIN, "state_dict_ema", "model_ema, state_dict, model", {},
    ),
    "model_ema": ({"model": OTHER, "model_ema": PLAIN, "n": types.SimpleNamespace()}, PLAIN, "model_ema", "model", {}),
    "ours": ({"model": OTHER, "average": PLAIN, "optimizer": {}}, PLAIN, "average", "model", {}),
    "no ema yet": ({"state_dict": PLAIN, "state_dict_ema": None}, PLAIN, "state_dict", "none", {}),
    "a list of averages": ({"model": PLAIN, "ema": {"shadow": [*OTHER.values()]}}, PLAIN, "model", "ema.shadow", {}),
    "copies": ({**_with("encoder.", PLAIN), **_with("student.", PLAIN)}, PLAIN, "prefix encoder.", "student.", {}),
}  # fmt: skip


def _same(model: VisionTransformer, state: State) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, tmp_path: Path) -> None:
    content, expected, used, unused, config = LAYOUTS[layout]
    torch.save(content, file := tmp_path / "checkpoint.pth.tar")
    model = create_model("vit_test", **config)
    report = load_weights(model, file)
    assert _same(model, expected) and report.used == used
    assert not unused or f"\n  used {used}; not used: {unused}" in str(report)
    assert layout != "mae" or {*DECODER} <= {*report.ignored}


def test_ema_key_and_prefix(tmp_path: Path) -> None:
    file, model = tmp_path / "c.pth", create_model("vit_test")
    both = {**_with("x.", PLAIN), **_with("y.", OTHER)}
    nested = {"a": both, "b": {"c": THIRD}, "state_dict_ema": OTHER, "state_dict": PLAIN}
    torch.save(nested, file)
    for options, expected in (
        ({}, OTHER), ({"ema": False}, PLAIN), ({"key": "b.c"}, THIRD), ({"key": "b"}, THIRD), ({"prefix": "y."}, OTHER),
        ({"key": "a", "prefix": "x."}, PLAIN), ({"key": "state_dict_ema", "ema": False}, OTHER),
    ):  # fmt: skip
        assert load_weights(model, file, **options) and _same(model, expected), options
        assert _same(create_model("vit_test", weights=file, **options), expected), options
        text = ",".join(f"{name}={str(value).lower()}" for name, value in options.items())
        assert not text or _same(create_model("vit_test", weights=f"{file}#{text}"), expected), text
    for options, message in (
        ({"key": "a"}, "a, prefix x. and a, prefix y. fit equally well: pass key or prefix"),
        ({"prefix": "z."}, "prefix='z.': must have"),
        ({"key": "z"}, r"key='z': must have the tensor names .*, got a \(x\., y\.\), b\.c \(.*\), state_dict_ema .*\)"),
    ):
        with pytest.raises(WeightsError, match=message):
            load_weights(model, file, **options)
    with pytest.raises(WeightsError, match=r"ema=False: must have .*, got model_ema"):
        load_weights(model, {"model_ema": PLAIN}, ema=False)
    with pytest.raises(TypeError, match="ema must be a bool, got 'false'"):
        load_weights(model, file, ema="false")
    for text in ("keys=a", "ema=no", "ema", ""):
        with pytest.raises(WeightsError, match=r"# must precede key=\.\.\., prefix="):
            create_model("vit_test", weights=f"{file}#{text}")
    (tmp_path / "c#ema=false.pth").write_bytes(file.read_bytes())
    assert _same(create_model("vit_test", weights=str(tmp_path / "c#ema=false.pth")), OTHER), "the name of a file"


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize(
    ("own", "averaged", "unused"),
    [
        ("", "ema.", "names without prefix"), ("model.", "model.ema.", "model."), ("module.", "swa.module.", "module."),
        ("student.backbone.", "teacher.backbone.", "student.backbone."), ("net.module.", "avg.module.", "net.module."),
    ],
)  # fmt: skip
def test_both_copies_in_one_dict(own: str, averaged: str, unused: str, ema: bool) -> None:
    """The choice applies also if one prefix is inside the other, and below a preferred key."""
    model = create_model("vit_test")
    report = load_weights(model, {"state_dict": {**_with(own, OTHER), **_with(averaged, PLAIN)}}, ema=ema)
    assert _same(model, PLAIN if ema else OTHER)
    assert any(each.startswith(unused) or (not ema and averaged.startswith(each)) for each in report.unused)


def test_what_does_not_fit_is_listed() -> None:
    """The error describes the best part, and lists all keys and prefixes."""
    del (state := dict(PLAIN))["norm.bias"]
    with pytest.raises(WeightsError) as caught:
        load_weights(create_model("vit_test"), {"state_dict": _with("net.", state), "optimizer": {0: state}})
    other = "used state_dict, prefix net.; not used: optimizer.0"
    for part in ("missing: norm.bias", other, "found: state_dict (net.), optimizer.0 (cls_token, "):
        assert part in str(caught.value)


def test_projector_in_place_of_the_head() -> None:
    model = create_model("vit_test")
    with pytest.raises(WeightsError, match=r"(?s)missing: head.weight.*unexpected: head.0.weight.*replace_head=True"):
        load_weights(model, MOCO)
    report = load_weights(model, MOCO, replace_head=True)
    assert report.ignored == [*PROJECTOR] and len(report.replaced) == 2
    assert torch.equal(model.norm.weight, BODY["norm.weight"])


def test_callers_without_the_report_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"state_dict": OTHER, "state_dict_ema": PLAIN}, tmp_path / "c.pth")
    create_model("vit_test", weights=tmp_path / "c.pth")
    assert f"{tmp_path / 'c.pth'}: used state_dict_ema; not used: state_dict" in caplog.text
    caplog.clear()
    create_model("vit_test", weights=f"{tmp_path / 'c.pth'}#key=state_dict_ema")
    torch.save(PLAIN, tmp_path / "plain.pth")
    create_model("vit_test", weights=tmp_path / "plain.pth")
    assert "plain" not in caplog.text


class _Executed:
    """Runs code when it is loaded or when its state is restored."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        Path("executed").touch()

    def __reduce__(self) -> Any:
        return _Executed, (1,)


@pytest.mark.parametrize("zipped", [True, False])
def test_data_beside_the_weights(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects with data are skipped, not built; classes that can run code are errors that name them."""
    monkeypatch.chdir(tmp_path)
    beside = {
        "args": argparse.Namespace(path=pathlib.PurePosixPath("/x"), n=np.float32(1)), "path": Path("/x"),
        "best": np.float64(0.5), "rng": np.arange(3), "version": torch.torch_version.TorchVersion("2.0"),
        "type": np.dtype("f4"), "date": datetime.datetime(2026, 1, 1), "names": types.SimpleNamespace(a={"b": [1]}),
        "counts": collections.defaultdict(list, a=[1]),
    }  # fmt: skip
    beside = beside if zipped else {"args": argparse.Namespace(n=1)}
    torch.save({"model": PLAIN, **beside}, "c.ckpt", _use_new_zipfile_serialization=zipped)
    model = create_model("vit_test", weights="c.ckpt")
    assert _same(model, PLAIN)
    for attack in (_Executed(), argparse.Namespace(inner=_Executed())):
        torch.save({"model": OTHER, "attack": attack}, "c.ckpt", _use_new_zipfile_serialization=zipped)
        Path("executed").unlink()
        with pytest.raises(WeightsError, match=r"can run code, got .*_Executed" if zipped else "can run code"):
            load_weights(model, "c.ckpt")
        assert _same(model, PLAIN) and not Path("executed").exists()
        _Executed()
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
