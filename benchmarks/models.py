"""Models to measure: variants of vit-fast, models of libraries, files, and functions that return a model.

vit_small_patch16_224, vit_*_patch16_224     variants of vit-fast, with random weights
model.safetensors, a folder, a Hub id        weights with their configuration, see vit_fast.load
timm:NAME                                    timm.create_model(NAME), random weights
hf:FOLDER or hf:ID                           a transformers model by its config, with weights if the folder has any
model.onnx                                   an ONNX file
module:function                              function() returns an nn.Module that takes images, or with an example
block:NAME                                   the first block of a variant or a weights file
attention:197x12x64, attention:64x3x32:bias  single operators, see operators.py; also mlp:197x768x3072
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import vit_fast
from vit_fast.apps.data import as_inputs, channels_of, read_images
from vit_fast.config import DataConfig, Size, ViTConfig
from vit_fast.errors import UnsupportedInputError
from vit_fast.files import FUNCTION, find_function
from vit_fast.measure.candidate import describe_error
from vit_fast.model import VisionTransformer
from vit_fast.variants import get_variant, list_models
from vit_fast.work import Counter, Work, work

if TYPE_CHECKING:
    from .operators import Operator

# Names of dtypes in tables; tf32 is fp32 with TF32 matmuls, amp is fp32 under autocast in bf16.
DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "amp": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
CPU = torch.device("cpu")
MAX_VIEWS = 64  # different images; more would cost time to prepare
CPU_CACHE_BYTES = 64 * 2**20  # larger than the last-level cache of most processors


@dataclass(frozen=True, eq=False)
class Model:
    """A model to measure, given by one of `config` (a vit-fast model), `make`, `onnx` and `operator`."""

    name: str
    shape: tuple[int, ...]  # of one input: [channels, height, width], or tokens first
    data: DataConfig | None  # None for random inputs
    config: ViTConfig | None = None
    weights: Mapping[str, Tensor] | None = None
    make: Callable[[], nn.Module] | None = None
    onnx: Path | None = None
    counted: tuple[Work, Work] | None = None  # counted work of one and of two images, for `make`
    precision: str | None = None
    block: bool = False
    operator: Operator | None = None
    source: str | None = None  # the word of `--models`

    @property
    def kind(self) -> str:
        """The kind, which selects candidates: "vit-fast", "given", "onnx", "block", "attention" or "mlp"."""
        if self.operator is not None:
            return self.operator.part
        kind = "block" if self.block else "vit-fast"
        return kind if self.config is not None else "onnx" if self.onnx is not None else "given"

    @property
    def is_whole(self) -> bool:
        return self.operator is None and not self.block

    @property
    def image_hw(self) -> Size:
        return self.shape[1], self.shape[2]

    @property
    def in_chans(self) -> int:
        return self.shape[0]


@dataclass(frozen=True)
class Group:
    """A model, dtype and batch size, on which candidates are compared."""

    model: Model
    dtype_name: str
    batch_size: int
    training: bool = False
    data: str = "device"
    device: torch.device = CPU

    def __str__(self) -> str:
        return f"{self.model.name} {self.dtype_name} batch {self.batch_size}{' training' if self.training else ''}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def config_and_weights(self) -> tuple[ViTConfig, Mapping[str, Tensor]]:
        """The configuration and the weights under timm's names, from which every library builds the model."""
        weights = weights_of(self.model, self.dtype)
        if self.model.config is None or weights is None:
            reason = f"the model must be one of `vit-fast models` or a weights file, got {self.model.name}"
            raise UnsupportedInputError("this candidate", [reason])
        return self.model.config, weights

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key of the group's rows; see records.key_of."""
        return self.model.name, self.dtype_name, self.batch_size, self.data, *self.sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Height and width of the images, or the shape of another input."""
        return self.model.shape if self.model.data is None else self.model.image_hw

    def about(self, candidate: str) -> dict[str, Any]:
        """Returns the fields that identify a row or a control of a candidate."""
        return {
            "candidate": candidate, "model": self.model.name, "dtype": self.dtype_name, "batch": self.batch_size,
            "img_size": list(self.sizes), "data": self.data,
        }  # fmt: skip

    def least(self) -> dict[str, Work]:
        """Returns a lower bound on the work of a call by part. In training, operators and blocks run only backward."""
        model, batch = self.model, self.batch_size
        if model.operator is not None:
            return model.operator.parts(batch, self.training)
        if model.block and model.config is not None:
            every = work(model.config.replace(depth=1), batch)
            return {part: every[part] * (2 if self.training else 1) for part in ("linears", "attention")}
        every = {} if model.config is None else work(model.config, batch)
        if model.counted is not None:
            first, both = model.counted
            every = {"all": first + (both + first * -1) * (batch - 1)}
        return {part: some * (3 if self.training else 1) for part, some in every.items()}


def resolve(given: str) -> Callable[[Size | None], list[Model]]:
    """Looks up a word of `--models`; returns a function of the image size (or None) that builds its models."""
    head, _, rest = given.partition(":")
    if head in ("attention", "mlp"):
        from .operators import Operator

        if (operator := Operator.parse(given)) is not None:
            return lambda size: [Model(given, operator.shape, None, operator=operator)]
    if head == "block":
        whole = resolve(rest)
        return lambda size: [_block(model) for model in whole(size)]
    if head == "timm" and rest:
        import timm

        if not timm.is_model(rest):
            nearest = ", ".join(timm.list_models(f"*{rest.partition('.')[0]}*")[:3])
            raise ValueError(f"{given}: unknown to timm {timm.__version__}: try {nearest or 'timm.list_models()'}")
        return lambda size: [_given(given, _timm, size)]
    if head == "hf" and rest:
        return lambda size: [_given(given, _transformers, size)]
    if FUNCTION.fullmatch(given):
        return lambda size: [_given(given, _function, size)]
    is_onnx = given.endswith(".onnx")
    if is_onnx or "/" in given or "." in given or Path(given).is_dir():  # names of variants have no such characters
        from vit_fast.weights.source import hub_id

        if not Path(given).exists() and (is_onnx or hub_id(given) is None):
            raise ValueError(f"{given}: no such file")
        return lambda size: [_onnx(Path(given), size) if is_onnx else _of_weights(given, size)]
    if not (names := list_models(given)):
        get_variant(given)  # raises an error with the nearest name
    return lambda size: [_variant(name, size) for name in names]


def _variant(name: str, img_size: Size | None) -> Model:
    config, data = get_variant(name).config, get_variant(name).data
    return describe_vit(name, config.replace(img_size=img_size or config.img_size), data)


def describe_vit(name: str, config: ViTConfig, data: DataConfig, weights: Mapping[str, Tensor] | None = None) -> Model:
    """Describes a vit-fast model; `weights` None means random weights."""
    return Model(name, (config.in_chans, *config.image_hw), data, config, weights)


def _block(model: Model) -> Model:
    if (config := model.config) is None:
        raise ValueError(f"block: must be followed by a name of `vit-fast models` or a weights file, got {model.name}")
    shape = config.seqlen, config.embed_dim
    return dataclasses.replace(model, name=f"block:{model.name}", shape=shape, data=None, block=True)


def _of_weights(source: str, img_size: Size | None) -> Model:
    model = vit_fast.load(source, backend="sdpa")
    name = Path(source).name if Path(source).exists() else source
    if img_size not in (None, model.config.image_hw):
        raise ValueError(f"--img-size must be {model.config.image_hw}, the image size of {name}, got {img_size}")
    weights = {key: tensor.float() for key, tensor in model.state_dict().items()}
    return dataclasses.replace(describe_vit(name, model.config, model.data_config, weights), source=source)


def _onnx(path: Path, img_size: Size | None) -> Model:
    from vit_fast.export import OnnxRunner
    from vit_fast.export.runtime.metadata import images_and_others

    runner = OnnxRunner(path, "cpu", image_hw=img_size)
    found: dict[str, Any] = {"onnx": path, "source": str(path), "precision": runner.info.precision}
    if runner.info.metadata.get("inputs"):
        _, dims, _ = images_and_others(runner.info)
        if img_size not in (None, tuple(dims[-2:])):
            raise ValueError(f"--img-size must be {tuple(dims[-2:])}, the image size of {path.name}, got {img_size}")
        return Model(path.name, tuple(dims), DataConfig() if len(dims) == 3 and dims[0] in (1, 3) else None, **found)
    if runner.image_hw is None:
        raise ValueError(f"{path.name}: the image size is dynamic; add --img-size N")
    data = runner.data_config if isinstance(runner.data_config, DataConfig) else DataConfig()
    return Model(path.name, (runner.in_chans, *runner.image_hw), data, **found)


Found = tuple[Callable[[], Any], Size | None, DataConfig]


def _given(given: str, find: Callable[[str, Size | None], Found], size: Size | None) -> Model:
    """Builds a model once, to check that it takes images, and counts its operations for batch sizes 1 and 2."""
    wrapped, example = False, None
    image_hw: Any = None

    def build() -> nn.Module:  # with the same random weights each time, without changing the caller's random state
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # the model is built on the CPU
            model = make()
        nonlocal example
        if isinstance(model, tuple):  # and an example of its inputs
            model, example = model
            if not isinstance(example, Tensor):
                model = OfImages(model, example)
                example = model.images
        if not isinstance(model, nn.Module):
            raise TypeError(f"the function must return an nn.Module, got {type(model).__name__}")
        model = OutputOf(model) if wrapped else model
        model.eval()
        return model.float()

    try:
        make, given_hw, data = find(given, size)
        model, counted = build(), []
        image_hw = given_hw or (example.shape[2:] if isinstance(example, Tensor) else (224, 224))
        in_chans = model.images.shape[1] if isinstance(model, OfImages) else channels_of(model)
        with torch.no_grad():
            wrapped = not isinstance(model(torch.zeros(1, in_chans, *image_hw)), Tensor)
        model = OutputOf(model) if wrapped else model
        for batch in (1, 2):
            with torch.no_grad(), Counter() as counter:  # type: ignore[no-untyped-call]  # torch's own __init__
                model(torch.zeros(batch, in_chans, *image_hw))
            counted.append(counter.work)
    except Exception as error:  # the model may raise any type
        raise ValueError(f"{given}: {describe_error(error)[:250]}") from error
    return Model(given, (in_chans, *image_hw), data, make=build, counted=(counted[0], counted[1]))


def _timm(given: str, size: Size | None) -> Found:
    import timm

    make = partial(timm.create_model, given.partition(":")[2], **({} if size is None else {"img_size": size}))
    known = timm.data.resolve_model_data_config(make())
    height, width = size or known["input_size"][1:]
    return make, (height, width), DataConfig(mean=tuple(known["mean"]), std=tuple(known["std"]))


def _transformers(given: str, size: Size | None) -> Found:
    from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

    name = given.partition(":")[2]
    config = AutoConfig.from_pretrained(name)
    config = getattr(config, "vision_config", config)
    if size is not None:
        config.image_size = size[0] if size[0] == size[1] else size
    if (side := getattr(config, "image_size", None)) is None:
        raise ValueError("must be a vision model, got a config without image_size")
    weights = any(Path(name).glob("*.safetensors"))

    def make() -> nn.Module:
        for auto in (AutoModelForImageClassification, AutoModel):
            try:
                return auto.from_pretrained(name, config=config) if weights else auto.from_config(config)
            except ValueError:  # no such head
                continue
        raise ValueError(f"transformers has no model for {type(config).__name__}")

    return make, ((side, side) if isinstance(side, int) else tuple(side)), DataConfig()


def _function(given: str, size: Size | None) -> Found:
    function: Any = find_function(given)
    return function, size, DataConfig()


class OutputOf(nn.Module):
    """Returns only the logits, the pooled features or the first tensor of what a model returns for images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        found = self.model(images)
        for name in ("logits", "pooler_output"):
            if (output := getattr(found, name, None)) is not None:
                return output
        if (tokens := getattr(found, "last_hidden_state", None)) is not None:
            return tokens[:, 0]
        return next(each for each in pytree.tree_leaves(found) if isinstance(each, Tensor))


class OfImages(nn.Module):
    """A model as a function of images; its other inputs are those of the first image in an example."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        from vit_fast.export.call import call_of
        from vit_fast.export.options import ExportOptions

        super().__init__()
        self._call = call_of(model, example, ExportOptions())
        self.model = self._call.vit.model
        self._batched = dict(zip(self._call.names, self._call.batched))
        if self._call.images is None:
            raise ValueError("the example must contain images [B, channels, height, width]")
        self.images: Tensor = self._call.leaves[self._call.images]
        for i, has in self._batched.items():
            self.register_buffer(f"input_{i}", self._call.leaves[i][:1] if has else self._call.leaves[i])

    def forward(self, images: Tensor) -> Any:
        others = {i: self.get_buffer(f"input_{i}") for i in self._batched}
        given = {i: x.expand(images.shape[0], *x.shape[1:]) if self._batched[i] else x for i, x in others.items()}
        args, kwargs = self._call.arguments(list((given | {self._call.images: images}).values()))
        return self.model(*args, **kwargs)


def random_weights(config: ViTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Draws fp32 parameters on the CPU, scaled so that each parameter and the image influence the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = VisionTransformer(config)
    model = model.to_empty(device="cpu").requires_grad_(False)
    for name, parameter in model.named_parameters():
        owner, mean, std = model.get_submodule(name.rpartition(".")[0]), 0.0, 0.3
        if isinstance(owner, nn.LayerNorm | nn.GroupNorm):
            mean, std = float(name.endswith("weight")), 0.2
        elif name.endswith("gamma"):
            mean, std = 0.5, 0.2
        elif name.endswith("bias"):
            std = 0.1
        elif isinstance(owner, nn.Linear | nn.Conv2d):
            std = parameter[0].numel() ** -0.5
        parameter.normal_(mean, std, generator=generator)
        if name.endswith("attn.qkv.weight"):
            parameter[: 2 * parameter.shape[1]] *= 2
    return dict(model.state_dict())


@functools.lru_cache(maxsize=2)
def weights_of(model: Model, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Returns a model's given or random parameters in a dtype; None for models of `make` or `onnx`."""
    weights = model.weights if model.operator is None else model.operator.weights()
    if weights is None and model.config is not None:
        weights = random_weights(model.config)
    return None if weights is None else {name: tensor.to(dtype) for name, tensor in weights.items()}


def image_views(paths: Sequence[Path], model: Model, count: int) -> Tensor:
    """Prepares whole images and then random crops [count, *model.shape] in fp32, or random numbers for other inputs."""
    if model.data is None:
        return torch.randn(count, *model.shape, generator=torch.Generator().manual_seed(0))
    return as_inputs(read_images(paths, count), model.data, model.image_hw, model.in_chans)


def rotating_batches(views: Tensor, batch_size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Makes so many different batches on a device that the next batch is not in the last-level cache."""
    on_device = views.to(device=device, dtype=dtype)
    cache = CPU_CACHE_BYTES if device.type == "cpu" else torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, math.ceil(2 * cache / (batch_size * on_device[0].nbytes)))
    rows = torch.arange(batch_size, device=device)
    return [on_device[(rows + number * (batch_size + 1)) % len(views)] for number in range(copies)]
