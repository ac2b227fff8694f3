"""Models to measure: variants of ours, and models as they are given, by id, file or function.

vit_small_patch16_224, vit_*_patch16_224     our variants, with random weights
model.safetensors, a folder, a Hub id        weights that say their shape, see vit_fast.load
timm:NAME                                    timm.create_model(NAME), random weights
hf:FOLDER or hf:ID                           transformers, by its config; with the weights of a folder that has them
model.onnx                                   a file for ONNX Runtime
module:function                              function() gives an nn.Module of images
block:NAME                                   the first block of a variant of ours
attention:197x12x64, mlp:..., matmul:...     single operators, see operators.py
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vit_fast
from vit_fast.config import DataConfig, Size, ViTConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.variants import get_variant, list_models
from vit_fast.work import Counter, Work, total, work

from .operators import Operator

_WITH_LIBRARY = re.compile(r"(timm|hf):(.+)")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, eq=False)
class Model:
    """A model to measure.

    Attributes:
        name: As it is written in tables: what was asked for, of a file its name alone.
        shape: Of one input: channels, height and width of an image; else tokens first.
        data: How photographs are prepared for it; None where it takes random numbers.
        parts: What it does by part, of a batch size, in inference or in training; None where nobody counts it.
        config: Its shape, where it is one of ours: every library then builds it, with the same weights.
        weights: Of that shape, under our names; None means random ones.
        make: Where it is not: makes the model itself, in fp32 on the CPU.
        onnx: Where it is a file: its path; precision: of its weights, where that is fewer bits than fp32.
        block: Whether its first block alone is meant.
        operator: Where it is a single operator: that.
        source: What resolve makes it of again, where that is not its name.
    """

    name: str
    shape: tuple[int, ...]
    data: DataConfig | None
    parts: Callable[[int, bool], dict[str, Work]] | None
    config: ViTConfig | None = None
    weights: Mapping[str, Tensor] | None = None
    make: Callable[[], nn.Module] | None = None
    onnx: Path | None = None
    precision: str | None = None
    block: bool = False
    operator: Operator | None = None
    source: str | None = None

    @property
    def kind(self) -> str:
        """The candidates that can compute it: those of "ours", "given", "onnx", "block", or of an operator's part."""
        if self.operator is not None:
            return self.operator.part
        ours = "block" if self.block else "ours"
        return ours if self.config is not None else "onnx" if self.onnx is not None else "given"

    @property
    def image_hw(self) -> Size:
        """Height and width of its images."""
        return self.shape[1], self.shape[2]

    @property
    def in_chans(self) -> int:
        return self.shape[0]

    @property
    def flops(self) -> int | None:
        """Multiplications and additions for one input."""
        return None if self.parts is None else total(self.parts(1, False).values()).flop


def resolve(given: str) -> Callable[[Size | None], list[Model]]:
    """Looks up the models that a word of `--models` means, see the head of this file; builds nothing.

    Returns:
        A function of the images' height and width, None for the model's own, that makes the models. It raises
        ValueError where one cannot be made.
    Raises:
        ValueError: the word names no model; the message lists the forms that do.
    """
    if (operator := Operator.parse(given)) is not None:
        return lambda size: [Model(given, operator.shape, None, operator.parts, operator=operator)]
    if given.startswith("block:"):
        whole = resolve(given.removeprefix("block:"))
        return lambda size: [_block(model) for model in whole(size)]
    if matched := _WITH_LIBRARY.fullmatch(given):
        make = {"timm": _timm, "hf": _transformers}[matched[1]]
        if matched[1] == "timm":
            _check_timm(matched[2])
        return lambda size: [_given(given, *make(matched[2], size))]
    if _FUNCTION.fullmatch(given):
        function = _function(given)
        return lambda size: [_given(given, function, size or (224, 224), DataConfig())]
    is_onnx = given.endswith(".onnx")
    if is_onnx or "/" in given or "." in given or Path(given).is_dir():  # none of our names has them
        from vit_fast.weights.hub import hub_id

        if not Path(given).exists() and (is_onnx or hub_id(given) is None):
            raise ValueError(f"{given}: no such file")
        return lambda size: [_onnx(Path(given), size) if is_onnx else _of_weights(given, size)]
    names = list_models(given)
    if not names:
        get_variant(given)  # raises, naming the nearest
    return lambda size: [_variant(name, size) for name in names]


def _variant(name: str, img_size: Size | None) -> Model:
    variant = get_variant(name)
    config = variant.config if img_size is None else variant.config.replace(img_size=img_size)
    return describe_ours(name, config, variant.data, None)


def describe_ours(name: str, config: ViTConfig, data: DataConfig, weights: Mapping[str, Tensor] | None) -> Model:
    """A model of one of our shapes; without weights they are random."""

    def parts(batch: int, training: bool) -> dict[str, Work]:
        return {part: some * (3 if training else 1) for part, some in work(config, batch).items()}

    return Model(name, (config.in_chans, *config.image_hw), data, parts, config=config, weights=weights)


def _block(model: Model) -> Model:
    config = model.config
    if config is None or model.parts is None:
        raise ValueError(f"block:{model.name}: expected one of our variants, or weights that say their shape")
    whole = model.parts

    def parts(batch: int, training: bool) -> dict[str, Work]:
        of_all = whole(batch, False)
        times = 2 if training else 1  # its backward alone
        return {
            part: Work(times * of_all[part].flop // config.depth, times * of_all[part].elements // config.depth)
            for part in ("linears", "attention")
        }

    shape = (config.seqlen, config.embed_dim)
    return dataclasses.replace(model, name=f"block:{model.name}", shape=shape, data=None, parts=parts, block=True)


def _of_weights(source: str, img_size: Size | None) -> Model:
    model = vit_fast.load(source, backend="sdpa")
    name = Path(source).name if Path(source).exists() else source
    if img_size not in (None, model.config.image_hw):
        raise ValueError(f"--img-size with {name}: its weights are for {model.config.image_hw}; expected that")
    weights = {key: tensor.float() for key, tensor in model.state_dict().items()}
    return dataclasses.replace(describe_ours(name, model.config, model.data_config, weights), source=source)


def _onnx(path: Path, img_size: Size | None) -> Model:
    from vit_fast.export import OnnxRunner
    from vit_fast.export.runtime.work import UncountedError, count_work, narrow_precision

    runner = OnnxRunner(path, "cpu", image_hw=img_size)
    if runner.image_hw is None:
        raise ValueError(f"{path.name}: leaves the size of its images open: expected --img-size N with it")
    data = runner.data_config if isinstance(runner.data_config, DataConfig) else DataConfig()
    shape = (runner.in_chans, *runner.image_hw)

    @functools.cache
    def parts(batch: int, training: bool) -> dict[str, Work]:
        return {"all": count_work(path, (batch, *shape))}

    model = Model(path.name, shape, data, parts, onnx=path, source=str(path), precision=narrow_precision(path))
    try:
        parts(1, False)
    except UncountedError:
        return dataclasses.replace(model, parts=None)
    return model


def _given(name: str, make: Callable[[], nn.Module], image_hw: Size, data: DataConfig) -> Model:
    """A model as it is; made once here, to see that it takes images and what one of them, and one more, costs."""
    model = make()
    in_chans = next((part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)), 3)
    counted = []
    for batch in (1, 2):
        try:
            with torch.no_grad(), Counter() as counter:  # type: ignore[no-untyped-call]  # torch's own __init__
                model(torch.zeros(batch, in_chans, *image_hw))
        except Exception as error:  # a model may refuse in any way
            raise ValueError(f"{name}: does not take images {image_hw}: {' '.join(str(error).split())[:200]}") from None
        counted.append(counter.work)
    first, both = counted

    def parts(batch: int, training: bool) -> dict[str, Work]:
        return {"all": (first + (both + first * -1) * (batch - 1)) * (3 if training else 1)}

    return Model(name, (in_chans, *image_hw), data, parts, make=make)


def _check_timm(name: str) -> None:
    import timm

    if not timm.is_model(name):
        nearest = ", ".join(timm.list_models(f"*{name.partition('.')[0]}*")[:3])
        raise ValueError(f"timm:{name}: timm {timm.__version__} has none; {nearest or 'see timm.list_models'}")


def _timm(name: str, img_size: Size | None) -> tuple[Callable[[], nn.Module], Size, DataConfig]:
    import timm

    options: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    try:
        model = timm.create_model(name, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ValueError(f"timm:{name}: {error}") from None
    known = timm.data.resolve_model_data_config(model)
    data = DataConfig(mean=tuple(known["mean"]), std=tuple(known["std"]))
    height, width = img_size or known["input_size"][1:]
    return functools.partial(_seeded, functools.partial(timm.create_model, name, **options)), (height, width), data


def _transformers(name: str, img_size: Size | None) -> tuple[Callable[[], nn.Module], Size, DataConfig]:
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"hf:{name}: {' '.join(str(error).split())[:200]}") from None
    config = getattr(config, "vision_config", config)
    if img_size is not None:
        config.image_size = img_size[0] if img_size[0] == img_size[1] else img_size
    if getattr(config, "image_size", None) is None:
        raise ValueError(f"hf:{name}: its config says no image_size; expected a vision model")
    weights = any(Path(name).glob("*.safetensors"))

    def make() -> nn.Module:
        for auto in (AutoModelForImageClassification, AutoModel):
            try:
                model = auto.from_pretrained(name, config=config) if weights else auto.from_config(config)
            except ValueError:  # this kind of model has no such head
                continue
            return OutputOf(model)
        raise UnsupportedInputError(f"hf:{name}", [f"transformers makes no model of {type(config).__name__}"])

    side = config.image_size
    height, width = (side, side) if isinstance(side, int) else side
    return functools.partial(_seeded, make), (height, width), DataConfig()


def _function(name: str) -> Callable[[], nn.Module]:
    module, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python script.py` has it; an installed command has not
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: {error}; expected module:function, importable from here") from None

    def checked() -> nn.Module:
        try:
            model = make()
        except Exception as error:  # whatever theirs raises
            raise ValueError(f"{name}() raises {type(error).__name__}: {error}; it is given no arguments") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name}() gives a {type(model).__name__}: expected an nn.Module of images")
        return model.eval()

    return functools.partial(_seeded, checked)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same random weights each time; the caller's random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().float()


class OutputOf(nn.Module):
    """A transformers model, taking images alone and giving its logits, or pooled features, alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found = self.model(pixel_values=images)
        for name in ("logits", "pooler_output"):
            if (output := getattr(found, name, None)) is not None:
                return output
        return found.last_hidden_state[:, 0]
