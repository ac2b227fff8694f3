"""Configuration of a Vision Transformer (ViTConfig) and its preprocessing (DataConfig). Both validate their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import MAX_SIZE, check_choice, check_integer, check_number, check_type, known_fields, pair

GlobalPool = Literal["token", "avg", "map", ""]
PosEmbed = Literal["learn", "sincos1d", "sincos2d", "none"]
Activation = Literal["gelu", "gelu_tanh", "relu", "quick_gelu", "silu"]
NormLayer = Literal["layer_norm", "rms_norm"]
MlpLayer = Literal["mlp", "swiglu"]
Interpolation = Literal["bicubic", "bilinear", "nearest", "lanczos"]
CropMode = Literal["center", "squash"]

Size = tuple[int, int]

MAX_DEPTH = 1024  # published models have up to 1,000 layers


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Preprocessing of images for a model, as in timm's data config.

    Attributes:
        mean: Mean per channel for pixel values in [0, 1].
        std: Standard deviation per channel.
        interpolation: Resize filter.
        crop_pct: Side of the center crop divided by the shorter side of the resized image, in (0, 1].
        crop_mode: "center" preserves the aspect ratio and crops; "squash" resizes both sides.
    """

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: Interpolation = "bicubic"
    crop_pct: float = 0.9
    crop_mode: CropMode = "center"

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            check_type(name, getattr(self, name), tuple, list)
            for value in getattr(self, name):
                check_number(name, value, positive=name == "std")
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        check_number("crop_pct", self.crop_pct)
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean and std must have equal lengths, got {len(self.mean)} and {len(self.std)}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], got {self.crop_pct}")
        check_choice("interpolation", self.interpolation, get_args(Interpolation))
        check_choice("crop_mode", self.crop_mode, get_args(CropMode))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DataConfig:
        return cls(**known_fields(cls, fields))


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Two-dimensional rotary position embedding of the patches.

    One half of the channel pairs of q and k encodes the row, the other half the column. Each half uses D/4 frequencies
    temperature^(-4 i / D).

    Attributes:
        coordinates: "centred": patch centers in (-1, 1), times 2 pi (DINOv3); "index": 0, 1, 2, ... (EVA-02).
        temperature: Base of the frequencies.
        layout: "half" pairs channels j and j + D/2, "interleaved" pairs 2j and 2j + 1.
        reference_grid: Grid (rows, columns) to which indices are scaled; None means no scaling.
        offset: Number added to the indices.
        columns_first: True if the first half of the pairs encodes the column.
    """

    coordinates: Literal["centred", "index"] = "centred"
    temperature: float = 100.0
    layout: Literal["half", "interleaved"] = "half"
    reference_grid: Size | None = None
    offset: float = 0.0
    columns_first: bool = False

    def __post_init__(self) -> None:
        check_choice("coordinates", self.coordinates, ("centred", "index"))
        check_choice("layout", self.layout, ("half", "interleaved"))
        check_number("temperature", self.temperature, positive=True)
        check_number("offset", self.offset)
        if self.reference_grid is not None:
            object.__setattr__(self, "reference_grid", pair("reference_grid", self.reference_grid))
        if self.coordinates == "centred" and (self.reference_grid is not None or self.offset):
            raise ValueError("reference_grid and offset require coordinates='index', got 'centred'")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Architecture of a Vision Transformer. Fields have timm's names.

    Attributes:
        img_size: Input height and width in pixels; one number means a square.
        patch_size: Patch height and width in pixels; with a convolutional stem, in elements of its feature map.
        in_chans: Number of channels of the input image.
        num_classes: Number of outputs of the linear head; 0 means no head.
        embed_dim: Width C of a token; a multiple of num_heads.
        depth: Number of encoder blocks.
        num_heads: Number of attention heads H.
        mlp_ratio: Hidden width of the MLP divided by embed_dim.
        qkv_bias: True if the qkv linear has a bias.
        proj_bias: True if the output linear of attention and the linears of the MLP have biases.
        init_values: Initial value of LayerScale; None means no LayerScale.
        class_token: True if a learned class token precedes the patches.
        distilled: True if the model has DeiT's distillation token and second head; requires class_token.
        reg_tokens: Register tokens after the class token ("Vision Transformers Need Registers", arXiv 2309.16588).
        pos_embed: "learn" (learned), "sincos1d" (fixed, arXiv 1706.03762, patches in reading order), "sincos2d"
            (fixed) or "none".
        no_embed_class: True if only patches have a position embedding.
        pre_norm: True if a norm precedes the blocks and the patch embedding has no bias (CLIP).
        embed_norm: True if a norm follows the patch embedding (AIMv2).
        global_pool: "token" (class token), "avg" (mean of the patches), "map" (SigLIP's attention pooling), "" (none).
        pool_include_prefix: True if global_pool="map" also pools class and register tokens.
        pool_heads: Heads of the attention pooling; None means num_heads.
        pool_mlp_ratio: mlp_ratio of the attention pooling; None means mlp_ratio.
        final_norm: True if a norm follows the blocks.
        fc_norm: True if the final norm follows pooling; None means True for global_pool="avg" only.
        act_layer: Activation of the MLP: "gelu" (exact), "gelu_tanh", "quick_gelu", "relu" or "silu".
        norm_layer: Type of all norms: "layer_norm" or "rms_norm".
        norm_eps: Epsilon of all norms.
        mlp_layer: "mlp": fc2(act(fc1(x))); "swiglu": fc2(act(gate(x)) * up(x)), where fc1 packs gate and up.
        scale_attn_norm: True if a norm precedes the output linear of attention (EVA-02 CLIP).
        scale_mlp_norm: True if a norm precedes fc2 (EVA-02).
        qk_norm: True if q and k are normalized per head.
        rope: Rotary position embedding of the patches; None means none.
        dynamic_img_size: True if the model takes images of other sizes and interpolates the position embedding.
        stem_channels: Output channels of the convolutional stem, one per layer of stride 2; () means no stem.
        drop_rate: Dropout before the head.
        pos_drop_rate: Dropout after the position embedding.
        proj_drop_rate: Dropout after the attention projection and both linear layers of the MLP.
        attn_drop_rate: Dropout on the attention weights.
        drop_path_rate: Drop path rate (stochastic depth) of the last block; it increases linearly from 0.

    Raises:
        ValueError: a field is invalid.
    """

    img_size: int | Size = 224
    patch_size: int | Size = 16
    in_chans: int = 3
    num_classes: int = 1000
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    proj_bias: bool = True
    init_values: float | None = None
    class_token: bool = True
    distilled: bool = False
    reg_tokens: int = 0
    pos_embed: PosEmbed = "learn"
    no_embed_class: bool = False
    pre_norm: bool = False
    embed_norm: bool = False
    global_pool: GlobalPool = "token"
    pool_include_prefix: bool = False
    pool_heads: int | None = None
    pool_mlp_ratio: float | None = None
    final_norm: bool = True
    fc_norm: bool | None = None
    act_layer: str = "gelu"
    norm_layer: NormLayer = "layer_norm"
    norm_eps: float = 1e-6
    mlp_layer: MlpLayer = "mlp"
    scale_attn_norm: bool = False
    scale_mlp_norm: bool = False
    qk_norm: bool = False
    rope: RopeConfig | None = None
    dynamic_img_size: bool = False
    stem_channels: tuple[int, ...] = ()
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "img_size", pair("img_size", self.img_size))
        object.__setattr__(self, "patch_size", pair("patch_size", self.patch_size))
        if not isinstance(self.stem_channels, tuple | list):
            raise ValueError(f"stem_channels must be a tuple of integers, got {self.stem_channels!r}")
        object.__setattr__(self, "stem_channels", tuple(self.stem_channels))
        _check_each(self)
        _check_together(self)

    @property
    def image_hw(self) -> Size:
        return pair("img_size", self.img_size)

    @property
    def patch_hw(self) -> Size:
        return pair("patch_size", self.patch_size)

    @property
    def stem_stride(self) -> int:
        """Stride of the convolutional stem in pixels; 1 without a stem."""
        return int(2 ** len(self.stem_channels))

    @property
    def patch_pixels(self) -> Size:
        """Height and width of the image region that one token covers."""
        return self.patch_hw[0] * self.stem_stride, self.patch_hw[1] * self.stem_stride

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
    def pool_hidden_dim(self) -> int:
        """Hidden width of the MLP of global_pool="map"."""
        return self.hidden_dim if self.pool_mlp_ratio is None else int(self.embed_dim * self.pool_mlp_ratio)

    @property
    def norm_after_pool(self) -> bool:
        return self.global_pool == "avg" if self.fc_norm is None else self.fc_norm

    def replace(self, **overrides: Any) -> ViTConfig:
        """Returns a validated copy with changed fields; unknown names raise ValueError."""
        return dataclasses.replace(self, **known_fields(ViTConfig, overrides))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ViTConfig:
        """Builds a config from the output of to_dict, also after JSON; unknown names raise ValueError."""
        known = known_fields(cls, fields)
        if isinstance(known.get("rope"), Mapping):
            known["rope"] = RopeConfig(**known_fields(RopeConfig, known["rope"]))
        return cls(**known)


_CHOICES: dict[str, Any] = {
    "global_pool": GlobalPool, "pos_embed": PosEmbed, "norm_layer": NormLayer, "mlp_layer": MlpLayer,
    "act_layer": Activation,
}  # fmt: skip
_MINIMA = {
    "depth": 1, "in_chans": 1, "embed_dim": 1, "num_heads": 1, "pool_heads": 1, "num_classes": 0, "reg_tokens": 0,
}  # fmt: skip


def _check_each(config: ViTConfig) -> None:
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if value is None and field.default is None:
            continue
        if name in _CHOICES:
            check_choice(name, value, get_args(_CHOICES[name]))
        elif name in _MINIMA:
            check_integer(name, value, _MINIMA[name], MAX_DEPTH if name == "depth" else MAX_SIZE)
        elif "bool" in str(field.type):
            check_choice(name, value, (True, False))
        elif "float" in str(field.type):
            check_number(name, value, positive=name == "norm_eps")
            if name.endswith("_rate") and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
    check_type("rope", config.rope, RopeConfig, type(None))
    for channels in config.stem_channels:
        check_integer("stem_channels", channels, minimum=1)


def _check_together(config: ViTConfig) -> None:
    width = config.embed_dim
    for name, ratio in (("mlp_ratio", config.mlp_ratio), ("pool_mlp_ratio", config.pool_mlp_ratio)):
        if ratio is not None and not 1 <= width * ratio <= MAX_SIZE:
            raise ValueError(f"{name} times embed_dim must be between 1 and {MAX_SIZE}, got {ratio} x {width}")
    for name, heads in (("num_heads", config.num_heads), ("pool_heads", config.pool_heads)):
        if heads is not None and width % heads:
            raise ValueError(f"embed_dim must be a multiple of {name}={heads}, got {width}")
    for axis, pixels, cell in zip(("height", "width"), config.image_hw, config.patch_pixels, strict=True):
        if pixels % cell:
            patch = f"(patch_size={config.patch_size}, stem stride {config.stem_stride})"
            raise ValueError(f"img_size must be a multiple of {cell} pixels in {axis} {patch}, got {pixels}")
    for kind, divisor in (("sincos1d", 2), ("sincos2d", 4)):
        if config.pos_embed == kind and width % divisor:
            raise ValueError(f"embed_dim must be a multiple of {divisor} for {kind}, got {width}")
    if config.rope is not None and config.head_dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4 for rope, got {config.head_dim}")
    if config.global_pool == "token" and not config.class_token:
        raise ValueError("global_pool must be 'avg', 'map' or '' for class_token=False, got 'token'")
    pools = config.pool_include_prefix or config.pool_heads is not None or config.pool_mlp_ratio is not None
    if pools and config.global_pool != "map":
        options = "pool_include_prefix, pool_heads and pool_mlp_ratio"
        raise ValueError(f"{options} require global_pool='map', got {config.global_pool!r}")
    if config.fc_norm and not config.final_norm:
        raise ValueError("final_norm must be True for fc_norm=True, got False")
    if config.distilled and not (config.class_token and config.global_pool == "token"):
        found = f"class_token={config.class_token} and global_pool={config.global_pool!r}"
        raise ValueError(f"distilled=True requires class_token=True and global_pool='token', got {found}")
    if config.distilled and config.reg_tokens:
        raise ValueError(f"reg_tokens must be 0 for distilled=True, got {config.reg_tokens}")
