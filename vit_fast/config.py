"""Configuration of a Vision Transformer (ViTConfig) and of its preprocessing (DataConfig)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from .errors import MAX_SIZE, check_choice, check_integer, check_number, check_type, known_fields, pair

Interpolation = Literal["bicubic", "bilinear", "nearest", "lanczos"]
Size = tuple[int, int]
MAX_DEPTH = 1024  # published models have up to 1,000 layers


class _Config:
    """Conversion to JSON and back."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Builds a config from the output of to_dict, directly or via JSON; unknown names raise ValueError."""
        known = known_fields(cls, fields)
        if isinstance(known.get("rope"), Mapping):
            known["rope"] = RopeConfig(**known_fields(RopeConfig, known["rope"]))
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Config):
    """Preprocessing of images for a model, as in timm's data config; an invalid field raises ValueError."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # per channel, for pixel values in [0, 1]
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: Interpolation = "bicubic"
    crop_pct: float = 0.9  # side of the center crop divided by the shorter side of the resized image, in (0, 1]
    # "center" preserves the aspect ratio and crops; "squash" resizes height and width independently
    crop_mode: Literal["center", "squash"] = "center"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            check_type(name, getattr(self, name), tuple, list)
            for value in getattr(self, name):
                check_number(name, value, positive=name == "std")
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        check_fields(self)
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have equal lengths, got {len(self.mean)} and {len(self.std)}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], got {self.crop_pct}")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Two-dimensional rotary position embedding of the patches.

    By default, the first half of the channel pairs of a head encodes the row, the second half the column. Each half has
    the frequencies temperature^(-4 i / D) for i < D/4, where D is head_dim.
    """

    # "centred": patch centers from -1 to 1, times 2 pi (DINOv3); "index": 0, 1, 2, ... (EVA-02)
    coordinates: Literal["centred", "index"] = "centred"
    temperature: float = 100.0  # base of the frequencies
    layout: Literal["half", "interleaved"] = "half"  # "half" pairs channels j and j + D/2, "interleaved" 2j and 2j + 1
    reference_grid: Size | None = None  # (rows, columns) to which indices are scaled; None: no scaling
    offset: float = 0.0  # added to the indices before scaling
    columns_first: bool = False  # True if the first half of the pairs encodes the column

    def __post_init__(self) -> None:
        check_fields(self, positive=("temperature",))
        if self.reference_grid is not None:
            object.__setattr__(self, "reference_grid", pair("reference_grid", self.reference_grid))
        if self.coordinates == "centred" and (self.reference_grid is not None or self.offset):
            raise ValueError("reference_grid and offset require coordinates='index', got 'centred'")


@dataclass(frozen=True, kw_only=True)
class ViTConfig(_Config):
    """Architecture of a Vision Transformer. Most fields have timm's names; an invalid field raises ValueError."""

    img_size: int | Size = 224  # height and width in pixels; one number means a square
    patch_size: int | Size = 16  # in pixels; with a convolutional stem, in elements of its feature map
    in_chans: int = 3
    num_classes: int = 1000  # outputs of the linear head; 0 means no head
    embed_dim: int = 768  # width C of a token; a multiple of num_heads
    depth: int = 12  # number of encoder blocks
    num_heads: int = 12
    mlp_ratio: float = 4.0  # hidden width of the MLP divided by embed_dim
    qkv_bias: bool = True
    proj_bias: bool = True  # of the output linear of attention, and of the MLP
    init_values: float | None = None  # initial value of LayerScale; None means no LayerScale
    class_token: bool = True  # a learned class token precedes the patches
    distilled: bool = False  # DeiT's distillation token and second head; requires class_token
    reg_tokens: int = 0  # register tokens after the class token (arXiv 2309.16588)
    # "sincos1d" encodes the patch number, "sincos2d" row and column, in fixed sines and cosines (arXiv 1706.03762)
    pos_embed: Literal["learn", "sincos1d", "sincos2d", "none"] = "learn"
    no_embed_class: bool = False  # only patches have a position embedding
    pre_norm: bool = False  # a norm precedes the blocks, and the patch embedding has no bias (CLIP)
    embed_norm: bool = False  # a norm follows the patch embedding (AIMv2)
    # "token": class token; "avg": mean of the patches; "map": SigLIP's attention pooling; "": none
    global_pool: Literal["token", "avg", "map", ""] = "token"
    pool_include_prefix: bool = False  # global_pool="map" also pools class and register tokens
    pool_heads: int | None = None  # heads of the attention pooling; None means num_heads
    pool_mlp_ratio: float | None = None  # mlp_ratio of the attention pooling; None means mlp_ratio
    final_norm: bool = True  # a norm follows the blocks
    fc_norm: bool | None = None  # the final norm follows pooling; None means global_pool == "avg"
    act_layer: Literal["gelu", "gelu_tanh", "relu", "quick_gelu", "silu"] = "gelu"  # of the MLP; "gelu" is exact
    norm_layer: Literal["layer_norm", "rms_norm"] = "layer_norm"  # of all norms
    norm_eps: float = 1e-6
    # "mlp": fc2(act(fc1(x))); "swiglu": fc2(act(gate(x)) * up(x)), where fc1 computes gate and up
    mlp_layer: Literal["mlp", "swiglu"] = "mlp"
    scale_attn_norm: bool = False  # a norm precedes the output linear of attention (EVA-02 CLIP)
    scale_mlp_norm: bool = False  # a norm precedes fc2 (EVA-02)
    qk_norm: bool = False  # q and k are normalized per head
    rope: RopeConfig | None = None  # rotary position embedding of the patches
    dynamic_img_size: bool = False  # images may have other sizes; a learned position embedding is resized
    stem_channels: tuple[int, ...] = ()  # output channels of a convolutional stem, one per layer of stride 2
    drop_rate: float = 0.0  # dropout before the head
    pos_drop_rate: float = 0.0  # dropout after the position embedding
    proj_drop_rate: float = 0.0  # dropout after the output linear of attention, fc1 and fc2
    attn_drop_rate: float = 0.0  # dropout on the attention weights
    drop_path_rate: float = 0.0  # stochastic depth of the last block; it increases linearly from 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "img_size", pair("img_size", self.img_size))
        object.__setattr__(self, "patch_size", pair("patch_size", self.patch_size))
        check_type("stem_channels", self.stem_channels, tuple, list)
        object.__setattr__(self, "stem_channels", tuple(self.stem_channels))
        check_fields(self, {"num_classes": 0, "reg_tokens": 0}, ("norm_eps",))
        check_type("rope", self.rope, RopeConfig, type(None))
        for channels in self.stem_channels:
            check_integer("stem_channels", channels, minimum=1)
        _check_together(self)

    @property
    def image_hw(self) -> Size:
        return pair("img_size", self.img_size)

    @property
    def patch_hw(self) -> Size:
        return pair("patch_size", self.patch_size)

    @property
    def patch_pixels(self) -> Size:
        """Height and width of the image region that one token covers; each layer of the stem has stride 2."""
        stride = int(2 ** len(self.stem_channels))
        return self.patch_hw[0] * stride, self.patch_hw[1] * stride

    @property
    def grid_size(self) -> Size:
        """Number of patches along height and width."""
        return self.image_hw[0] // self.patch_pixels[0], self.image_hw[1] // self.patch_pixels[1]

    @property
    def num_patches(self) -> int:
        return self.grid_size[0] * self.grid_size[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class, distillation and register tokens, which precede the patches."""
        return int(self.class_token) + int(self.distilled) + self.reg_tokens

    @property
    def pos_embed_covers_prefix(self) -> bool:
        """True if prefix tokens also have a learned position embedding."""
        return self.pos_embed == "learn" and not self.no_embed_class

    @property
    def seqlen(self) -> int:
        """Number of tokens N per image."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Hidden width F of the MLP."""
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def norm_after_pool(self) -> bool:
        return self.global_pool == "avg" if self.fc_norm is None else self.fc_norm

    def replace(self, **overrides: Any) -> ViTConfig:
        """Returns a validated copy with changed fields; unknown names raise ValueError."""
        return dataclasses.replace(self, **known_fields(ViTConfig, overrides))


_hints: Any = functools.cache(get_type_hints)


def check_fields(config: Any, least: Mapping[str, int] | None = None, positive: Collection[str] = ()) -> None:
    """Checks each field by its annotated type. Integers have a minimum of 1 unless `least` contains another."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if value is None and type(None) in get_args(hint):
            continue
        if get_origin(hint) is Literal:
            check_choice(name, value, get_args(hint))
        elif hint in (int, int | None):
            check_integer(name, value, (least or {}).get(name, 1), MAX_DEPTH if name == "depth" else MAX_SIZE)
        elif hint in (bool, bool | None):
            check_choice(name, value, (True, False))
        elif hint in (float, float | None):
            check_number(name, value, positive=name in positive)
            if name.endswith("_rate") and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")


def _check_together(config: ViTConfig) -> None:
    width, pooling = config.embed_dim, config.global_pool
    for name, ratio in (("mlp_ratio", config.mlp_ratio), ("pool_mlp_ratio", config.pool_mlp_ratio)):
        if ratio is not None and not 1 <= width * ratio <= MAX_SIZE:
            raise ValueError(f"{name} times embed_dim must be between 1 and {MAX_SIZE}, got {ratio} x {width}")
    for name, heads in (("num_heads", config.num_heads), ("pool_heads", config.pool_heads)):
        if heads is not None and width % heads:
            raise ValueError(f"embed_dim must be a multiple of {name}={heads}, got {width}")
    for axis, pixels, cell in zip(("height", "width"), config.image_hw, config.patch_pixels, strict=True):
        if pixels % cell:
            stem = f" times stride {2 ** len(config.stem_channels)} of the stem" if config.stem_channels else ""
            patch = f"(patch_size={config.patch_size}{stem})"
            raise ValueError(f"img_size must be a multiple of {cell} pixels in {axis} {patch}, got {pixels}")
    divisor = {"sincos1d": 2, "sincos2d": 4}.get(config.pos_embed, 1)
    if width % divisor:
        raise ValueError(f"embed_dim must be a multiple of {divisor} for pos_embed={config.pos_embed!r}, got {width}")
    if config.rope is not None and config.head_dim % 4:
        raise ValueError(f"embed_dim / num_heads must be a multiple of 4 for rope, got {config.head_dim}")
    if pooling == "token" and not config.class_token:
        raise ValueError("global_pool must be 'avg', 'map' or '' for class_token=False, got 'token'")
    for name in ("pool_include_prefix", "pool_heads", "pool_mlp_ratio"):
        if pooling != "map" and getattr(config, name) not in (None, False):
            raise ValueError(f"{name} requires global_pool='map', got {pooling!r}")
    if config.fc_norm and not config.final_norm:
        raise ValueError("final_norm must be True for fc_norm=True, got False")
    if config.distilled and pooling != "token":  # which requires class_token
        raise ValueError(f"global_pool must be 'token' for distilled=True, got {pooling!r}")
    if config.distilled and config.reg_tokens:
        raise ValueError(f"reg_tokens must be 0 for distilled=True, got {config.reg_tokens}")
