"""Layers of the model other than attention: patch embedding, MLP, LayerScale, drop path, attention pooling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Size, ViTConfig
from .errors import check_type

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),  # of OpenAI's CLIP
    "silu": F.silu,
}


class PatchEmbed(nn.Module):
    """Projects patches of an image, or of a convolutional stem's feature map (arXiv 2010.11929), to tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = []
        channels = config.in_chans
        for out_chans in config.stem_channels:
            conv = nn.Conv2d(channels, out_chans, kernel_size=3, stride=2, padding=1, bias=False)
            layers += [conv, nn.GroupNorm(math.gcd(32, out_chans), out_chans), nn.ReLU()]
            channels = out_chans
        self.stem = nn.Sequential(*layers) if layers else nn.Identity()
        self.proj = nn.Conv2d(channels, config.embed_dim, config.patch_hw, config.patch_hw, bias=not config.pre_norm)
        self.norm = make_norm(config, config.embed_norm)

    def forward(self, images: Tensor) -> tuple[Tensor, Size]:
        """Returns the tokens [B, patches, C] of images [B, in_chans, height, width], and the grid (rows, columns)."""
        self._check(images)
        feature_map = self.proj(self.stem(images))
        return self.norm(feature_map.flatten(2).transpose(1, 2)), (feature_map.shape[2], feature_map.shape[3])

    def _check(self, images: Tensor) -> None:
        config = self.config
        check_type("images", images, Tensor)
        if images.dim() != 4 or images.shape[1] != config.in_chans:
            raise ValueError(f"images must have shape [B, {config.in_chans}, height, width], got {tuple(images.shape)}")
        dtype = getattr(self.proj, "weight", images).dtype  # a wrapper of the convolution may have no weight attribute
        # with `fuse(normalize=...)`, the convolution takes images of any dtype
        if images.dtype != dtype and not hasattr(self.proj, "vit_fast_mean"):
            if not images.is_floating_point():
                requirement = "images must have a floating dtype"
                raise ValueError(f"{requirement}, got {images.dtype}: scale and normalize the images")
            if not torch.is_autocast_enabled(images.device.type):
                raise ValueError(f"images must have the dtype of the weights, {dtype}, got {images.dtype}")
        (height, width), (rows, columns) = images.shape[2:], config.patch_pixels
        if config.dynamic_img_size and (height % rows or width % columns):
            requirement = f"image height and width must be multiples of the patch size {rows}x{columns}"
            raise ValueError(f"{requirement}, got {height}x{width}")
        if not config.dynamic_img_size and (height, width) != config.image_hw:
            advice = "build the model with dynamic_img_size=True, or with the img_size of the images"
            raise ValueError("images must be {}x{}, got {}x{}: {}".format(*config.image_hw, height, width, advice))


class LayerScale(nn.Module):
    """Multiplies a residual branch by a learned vector (CaiT, arXiv 2103.17239)."""

    def __init__(self, dim: int, init_values: float) -> None:
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.full((dim,), init_values))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DropPath(nn.Module):
    """Drops a residual branch per image with probability drop_prob (stochastic depth, arXiv 1603.09382)."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        keep_prob = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(keep_prob)
        return x * (mask / keep_prob)


def make_norm(config: ViTConfig, present: bool = True, width: int | None = None) -> nn.Module:
    """Builds the norm that config.norm_layer names, over embed_dim by default; an Identity if `present` is False."""
    kind = nn.RMSNorm if config.norm_layer == "rms_norm" else nn.LayerNorm
    return kind(width or config.embed_dim, eps=config.norm_eps) if present else nn.Identity()


class Mlp(nn.Module):
    """MLP: fc2(act(fc1(x))), or gated (arXiv 2002.05202): fc2(act(gate(x)) * up(x)), where fc1 computes gate and up."""

    def __init__(self, config: ViTConfig, drop: float = 0.0) -> None:
        super().__init__()
        C, F = config.embed_dim, config.hidden_dim
        self.activation, self.gated = config.act_layer, config.mlp_layer == "swiglu"
        self.fc1 = nn.Linear(C, 2 * F if self.gated else F, bias=config.proj_bias)
        self.norm = make_norm(config, config.scale_mlp_norm, F)
        self.fc2 = nn.Linear(F, C, bias=config.proj_bias)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        activate = ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = self.fc1(x).chunk(2, dim=-1)
            x = activate(gate) * up
        else:
            x = activate(self.fc1(x))
        return self.drop(self.fc2(self.norm(self.drop(x))))


class AttentionPool(nn.Module):
    """SigLIP's attention pooling (arXiv 2303.15343): a learned query attends to all patches, followed by an MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        C = config.embed_dim
        self.num_heads = config.pool_heads or config.num_heads
        self.head_dim = C // self.num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, C))
        self.q = nn.Linear(C, C)
        self.kv = nn.Linear(C, 2 * C)
        self.proj = nn.Linear(C, C)
        self.norm = make_norm(config)
        ratio = config.mlp_ratio if config.pool_mlp_ratio is None else config.pool_mlp_ratio
        self.mlp = Mlp(config.replace(mlp_ratio=ratio))

    def forward(self, x: Tensor) -> Tensor:
        """Pools patches [B, N, C] to [B, C]."""
        x = self.attend(x)
        return (x + self.mlp(self.norm(x)))[:, 0]

    def attend(self, x: Tensor) -> Tensor:
        """Computes the attention of the learned query over patches [B, N, C]; returns [B, 1, C]."""
        q = self.q(self.latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).expand(x.shape[0], -1, -1, -1)
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).transpose(1, 3).unbind(2)
        return self.proj(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes attention of q [B, H, 1, D] over k and v [B, H, N, D]."""
        return F.scaled_dot_product_attention(q, k, v)
