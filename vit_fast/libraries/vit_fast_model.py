"""Our own VisionTransformer: models for export, and fused attention and blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..blocks.fused import FusedBlocks as BlocksMixin
from ..blocks.fused import FusedModule, FusedNormMlp
from ..blocks.parts import AttentionParts, MlpParts
from ..blocks.reading import Reader
from ..layers import DropPath, LayerScale, Mlp
from ..model import VisionTransformer
from ..ops import Rope, attention
from ..variants import get_variant, list_models
from .interface.image_model import ImageModel, switch
from .timm.timm_blocks import AttentionLayer, read_attention

NAME = "vit-fast"


def recognize(model: nn.Module) -> ImageModel | None:
    """Describes a VisionTransformer for export; returns None for another model."""
    if not isinstance(model, VisionTransformer):
        return None
    config = model.config
    # the name of a variant of this shape with any head; prefers a variant with the same preprocessing
    fields = {"num_classes": config.num_classes, "dynamic_img_size": config.dynamic_img_size}
    same = [name for name in list_models() if get_variant(name).config.replace(**fields) == config]
    same.sort(key=lambda name: get_variant(name).data != model.data_config)
    return OurModel(
        model=model, library=NAME, name=next(iter(same), type(model).__name__), image_hw=config.image_hw,
        in_chans=config.in_chans, patch_hw=config.patch_pixels, blocks="blocks",
        num_classes=config.num_classes,
        data_config=model.data_config, class_names=model.class_names, config=config.to_dict(),
    )  # fmt: skip


class OurModel(ImageModel):
    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        model: Any = self.model
        config = model.config.replace(dynamic_img_size=dynamic_size)
        switch(undo, model, "config", config)
        switch(undo, model.patch_embed, "config", config)


class AttentionMixin(AttentionLayer):
    """Our Attention with fused operators between its linear layers."""

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        if self.vit_fast_backend == "sdpa" or self.needs_original_forward(None, False):
            return super().forward(x, *rope)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        return self.project_out(self.mix(qkv, None, self.rope_of(*rope)), x)

    def rope_of(self, *rope: Tensor) -> Rope | None:
        return Rope(rope[0], rope[1], self.num_prefix_tokens, self.rope_layout) if rope else None


class BlockMixin(FusedNormMlp):
    """Our Block, fused as a whole or in parts."""

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        inside = {"ls1": (LayerScale, nn.Identity), "drop_path1": (DropPath,)}
        return read_attention(block, "ls1.gamma", inside, block.value("attn.rope_layout") == "half")

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        inside = {"ls2": (LayerScale, nn.Identity), "drop_path2": (DropPath,)}
        return _read_mlp(block, "norm2", inside, layer_scale="ls2.gamma", drop_path="drop_path2")

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        parts = self.ready()
        if parts is None:
            return super().forward(x, *rope)

        def attend(x: Tensor) -> Tensor:
            return x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *rope)))

        tables = parts.attention.module.rope_of(*rope) if rope and parts.attention is not None else None
        return self.run_as_block(parts, x, attend, rope=tables)


class AttentionPoolMixin(FusedNormMlp):
    """Our AttentionPool: a learned query attends to all patches, then norm, MLP and residual."""

    kind = "attention, norm + MLP"

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        return _read_mlp(block, "norm", {})

    def forward(self, x: Tensor) -> Tensor:
        """Maps patches [B, N, C] to [B, C]."""
        parts = self.ready()
        return super().forward(x) if parts is None else self.norm_mlp(parts, self.attend(x))[:, 0]

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend=self.vit_fast_backend)


def _read_mlp(block: Reader, norm: str, inside: Mapping[str, tuple[type, ...]], **rest: Any) -> MlpParts | None:
    return block.mlp(
        norm, "mlp.fc1", "mlp.activation", "mlp.fc2", gate_chunk=0 if block.value("mlp.gated") else None,
        inner_norm="mlp.norm", inside={"mlp": (Mlp,), **inside}, dropouts=("mlp.drop",), **rest,
    )  # fmt: skip


MIXINS: dict[str, type[FusedModule]] = {
    "vit_fast.model.Attention": AttentionMixin,
    "vit_fast.model.Block": BlockMixin,
    "vit_fast.model.Blocks": BlocksMixin,
    "vit_fast.layers.AttentionPool": AttentionPoolMixin,
}
