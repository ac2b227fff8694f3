"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.

    z_0  = [x_class; x_p^1 E; ...; x_p^P E] + E_pos            (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                          (2)
    z_l  = MLP(LN(z'_l)) + z'_l                                (3)
    y    = LN(z_L^0)                                           (4)

E projects the P patches x_p, E_pos is the position embedding, and L is the number of blocks. Parameters have timm's
names, so timm's state dicts load directly. Shapes: B images, N tokens, C = embed_dim, H heads, D = C / H.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import DataConfig, Size, ViTConfig
from .errors import check_type
from .layers import AttentionPool, DropPath, LayerScale, Mlp, PatchEmbed, make_norm
from .positions import fixed_pos_embed, resample_pos_embed, rope_of, rotate


class Attention(nn.Module):
    """Multi-head self-attention (MSA in equation 2): qkv projection, softmax attention per head, output projection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.num_prefix_tokens = config.num_prefix_tokens
        self.rope_layout = None if config.rope is None else config.rope.layout
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.qkv_bias)
        self.q_norm, self.k_norm = (make_norm(config, config.qk_norm, config.head_dim) for _ in range(2))
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.norm = make_norm(config, config.scale_attn_norm)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim, bias=config.proj_bias)
        self.proj_drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        """Applies attention to tokens [B, N, C]. `rope` contains cosines and sines of the rotary embedding, if any."""
        q, k, v = self.project(x, *rope)
        drop = self.attn_drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))

    def attention_map(self, x: Tensor, *rope: Tensor) -> Tensor:
        """Returns the attention weights softmax(q k^T / sqrt(D)) [B, H, N, N] of tokens [B, N, C]."""
        q, k, _ = self.project(x, *rope)
        return (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)

    def project(self, x: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects tokens [B, N, C] to q, k and v [B, H, N, D]; applies qk-norm and the rotary embedding."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope:
            (cos, sin), P, layout = rope, self.num_prefix_tokens, str(self.rope_layout)
            q, k = (torch.cat([x[:, :, :P], rotate(x[:, :, P:], cos, sin, layout)], dim=2) for x in (q, k))
        return q, k, v


class Block(nn.Module):
    """Pre-norm encoder block (equations 2 and 3), with optional LayerScale and drop path on each branch."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attn = Attention(config)
        self.ls1 = _layer_scale(config)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = make_norm(config)
        self.mlp = Mlp(config, config.proj_drop_rate)
        self.ls2 = _layer_scale(config)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        """Maps tokens [B, N, C] to [B, N, C]. See `Attention.forward` for `rope`."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *rope)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Blocks(nn.Sequential):
    """Runs blocks in sequence and passes the rotary embedding to each."""

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        """Maps tokens [B, N, C] to [B, N, C]."""
        for block in self:
            x = block(x, *rope)
        return x


class VisionTransformer(nn.Module):
    """Vision Transformer in plain PyTorch: patch and position embedding, blocks, pooling and linear head.

    `create_model` builds the model and selects a backend for its blocks.

    Args:
        config: Architecture; see ViTConfig.
        data_config: Preprocessing of images; None means DataConfig's defaults.
        class_names: Names of the num_classes outputs; None if unknown.
    """

    def __init__(
        self, config: ViTConfig, *, data_config: DataConfig | None = None, class_names: Iterable[str] | None = None
    ) -> None:
        super().__init__()
        check_type("config", config, ViTConfig)
        check_type("data_config", data_config, DataConfig, type(None))
        check_type("class_names", class_names, Iterable, type(None))
        self.config, self.data_config = config, data_config or DataConfig()
        self.class_names = None if class_names is None else tuple(class_names)
        if self.class_names is not None and len(self.class_names) != config.num_classes:
            got = f"got {len(self.class_names)} names for num_classes={config.num_classes}"
            raise ValueError(f"class_names must contain one name per class, {got}")
        self.num_classes, self.num_prefix_tokens = config.num_classes, config.num_prefix_tokens
        self.embed_dim = self.num_features = C = config.embed_dim
        self.distilled_training = self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, C)) if config.class_token else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, C)) if config.distilled else None
        self.reg_token = nn.Parameter(torch.empty(1, config.reg_tokens, C)) if config.reg_tokens else None
        positions = config.num_patches + (config.num_prefix_tokens if config.pos_embed_covers_prefix else 0)
        self.pos_embed = nn.Parameter(torch.empty(1, positions, C)) if config.pos_embed == "learn" else None
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        self.norm_pre = make_norm(config, config.pre_norm)
        drop_paths = [config.drop_path_rate * i / max(config.depth - 1, 1) for i in range(config.depth)]
        self.blocks = Blocks(*(Block(config, drop_path) for drop_path in drop_paths))
        self.norm = make_norm(config, config.final_norm and not config.norm_after_pool)
        self.attn_pool = AttentionPool(config) if config.global_pool == "map" else None
        self.fc_norm = make_norm(config, config.final_norm and config.norm_after_pool)
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = _head(config)
        self.head_dist = _head(config) if config.distilled else None
        self.init_weights()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Maps images [B, in_chans, height, width] to logits [B, num_classes], or to features [B, C] without a head.

        With global_pool="", returns logits per token. After `set_distilled_training`, training mode returns the logits
        of the two heads.
        """
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """Maps images to tokens [B, N, C]; applies the final norm if the norm precedes pooling."""
        z = self.embed(images)
        rope = self.rope(images, z)
        if self.grad_checkpointing and self.training:
            for block in self.blocks:
                z = checkpoint(block, z, *rope, use_reentrant=False)
        else:
            z = self.blocks(z, *rope)
        return self.norm(z)

    def embed(self, images: Tensor) -> Tensor:
        """Maps images to tokens [B, N, C], starting with the prefix tokens (equation 1)."""
        patches, grid = self.patch_embed(images)
        pos_embed = self._pos_embed(grid, patches)
        if pos_embed is not None and not self.config.pos_embed_covers_prefix:
            patches = patches + pos_embed
        tokens = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        z = torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in tokens), patches], dim=1)
        if pos_embed is not None and self.config.pos_embed_covers_prefix:
            z = z + pos_embed
        return self.norm_pre(self.pos_drop(z))

    def _pos_embed(self, grid: Size, patches: Tensor) -> Tensor | None:
        """Returns the position embedding of a patch grid in the dtype of the patches; None if the config has none."""
        config, learned = self.config, self.pos_embed
        if config.pos_embed == "none":
            return None
        if learned is None:
            return fixed_pos_embed(config.pos_embed, grid, config.embed_dim, patches.device).to(patches.dtype)
        if not config.dynamic_img_size:
            return learned.to(patches.dtype)
        prefix = config.num_prefix_tokens if config.pos_embed_covers_prefix else 0
        return resample_pos_embed(learned, config.grid_size, grid, prefix).to(patches.dtype)

    def rope(self, images: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        """Returns cosines and sines of the rotary embedding for tokens z; () if the model has none."""
        config, (height, width) = self.config, self.config.patch_pixels
        if config.rope is None:
            return ()
        return rope_of(config.rope, (images.shape[2] // height, images.shape[3] // width), config.head_dim, like=z)

    def pool(self, tokens: Tensor) -> Tensor:
        """Pools tokens [B, N, C] to [B, C] as config.global_pool defines; for "", returns the tokens."""
        patches = tokens[:, self.num_prefix_tokens :]
        if self.attn_pool is not None:
            return self.attn_pool(tokens if self.config.pool_include_prefix else patches)
        if self.config.global_pool == "avg":
            return patches.mean(dim=1)
        return tokens[:, 0] if self.config.global_pool == "token" else tokens

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Pools tokens [B, N, C] and applies the head. With pre_logits=True, returns the input of the head.

        With DeiT's distillation token, returns the mean of the outputs of class and distillation token.
        """
        if self.head_dist is None:
            features = self.head_drop(self.fc_norm(self.pool(tokens)))
            return features if pre_logits else self.head(features)
        x, x_dist = (self.head_drop(self.fc_norm(tokens[:, i])) for i in range(2))
        if not pre_logits:
            x, x_dist = self.head(x), self.head_dist(x_dist)
            if self.training and self.distilled_training:
                return x, x_dist
        return (x + x_dist) / 2

    def attention_maps(self, images: Tensor, blocks: Iterable[int] | None = None) -> dict[int, Tensor]:
        """Returns the attention weights [B, H, N, N] for images [B, in_chans, height, width], by block index.

        Row i contains the weights of query token i. `blocks` contains indices, which may be negative; None means all
        blocks. Raises ValueError if an index is out of range, or the block is not a `Block` of this file.
        """
        depth, maps = self.config.depth, dict[int, Tensor]()
        wanted = list(range(depth) if blocks is None else blocks)
        if unknown := [index for index in wanted if not -depth <= index < depth]:
            raise ValueError(f"indices in blocks must be between {-depth} and {depth - 1}, got {unknown[0]}")
        z = self.embed(images)
        rope = self.rope(images, z)
        for index, block in enumerate(self.blocks):
            if index in wanted or index - depth in wanted:
                if not isinstance(block, Block):
                    raise ValueError(f"blocks.{index} must be a vit_fast.model.Block, got {type(block).__name__}")
                maps[index] = block.attn.attention_map(block.norm1(z), *rope)
            z = block(z, *rope)
        return maps

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enables or disables activation checkpointing: training recomputes each block in the backward pass."""
        self.grad_checkpointing = enable

    def set_distilled_training(self, enable: bool = True) -> None:
        """Makes forward in training mode return the logits of DeiT's two heads instead of their mean."""
        self.distilled_training = enable

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters that timm's optimizer factory excludes from weight decay."""
        return {"pos_embed", "cls_token", "dist_token", "reg_token"}

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initializes parameters like timm. Linear layers get truncated normal weights (std 0.02) and zero biases."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        for token in (self.dist_token, self.pos_embed):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02)
        if self.attn_pool is not None:
            nn.init.trunc_normal_(self.attn_pool.latent, std=self.embed_dim**-0.5)


def _layer_scale(config: ViTConfig) -> nn.Module:
    return nn.Identity() if config.init_values is None else LayerScale(config.embed_dim, config.init_values)


def _head(config: ViTConfig) -> nn.Module:
    return nn.Linear(config.embed_dim, config.num_classes) if config.num_classes else nn.Identity()
