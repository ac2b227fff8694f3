"""torchvision's VisionTransformer: weight names, peer, models for export; fused modules of torchvision and torch.nn."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..blocks.fused import Finding, FusedBlocks, FusedModule, FusedNormMlp, fused_class
from ..blocks.parts import AttentionParts, MlpParts
from ..blocks.plain import PLAIN, is_touched, tensor_reasons, touch_reasons
from ..blocks.reading import Reader, dropout_notes
from ..config import ViTConfig
from ..errors import raise_unsupported, type_name
from ..ops import attention_qkvpacked
from .interface.image_model import ImageModel, comes_from
from .interface.weight_names import PLAIN_VIT, Converted, Rule, config_reasons, rename

NAME = "torchvision"
SIGNATURE = r"^encoder\.layers\.encoder_layer_0\."

_BLOCK = r"encoder\.layers\.encoder_layer_(\d+)\."

RULES: tuple[Rule, ...] = (
    (r"class_token", "cls_token"),
    (r"conv_proj\.(weight|bias)", r"patch_embed.proj.\1"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (_BLOCK + r"ln_([12])\.(weight|bias)", r"blocks.\1.norm\2.\3"),
    (_BLOCK + r"self_attention\.in_proj_(weight|bias)", r"blocks.\1.attn.qkv.\2"),
    (_BLOCK + r"self_attention\.out_proj\.(weight|bias)", r"blocks.\1.attn.proj.\2"),
    (_BLOCK + r"mlp\.(?:0|linear_1)\.(weight|bias)", r"blocks.\1.mlp.fc1.\2"),
    (_BLOCK + r"mlp\.(?:3|linear_2)\.(weight|bias)", r"blocks.\1.mlp.fc2.\2"),
    (r"encoder\.ln\.(weight|bias)", r"norm.\1"),
    (r"heads\.head\.(weight|bias)", r"head.\1"),
)


def convert(state: Mapping[str, Tensor], config: ViTConfig) -> Converted:
    """Converts torchvision's names to timm's. MultiheadAttention packs its projection like timm's qkv."""
    return rename(state, NAME, RULES)


def build_peer(config: ViTConfig) -> nn.Module:
    """Builds torchvision's model of this shape; raises UnsupportedInputError with all reasons if there is none."""
    problems = config_reasons(config, **PLAIN_VIT, act_layer="gelu", qkv_bias=True, in_chans=3)
    sizes = {"img_size": config.image_hw, "patch_size": config.patch_hw}
    problems += [f"{name} must be square, got {h}x{w}" for name, (h, w) in sizes.items() if h != w]
    problems += [] if config.num_classes else ["num_classes must be at least 1, got 0"]
    raise_unsupported(NAME, problems)
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        image_size=config.image_hw[0], patch_size=config.patch_hw[0], num_layers=config.depth,
        num_heads=config.num_heads, hidden_dim=config.embed_dim, mlp_dim=config.hidden_dim,
        num_classes=config.num_classes, norm_layer=functools.partial(nn.LayerNorm, eps=config.norm_eps),
    )  # fmt: skip


def recognize(model: Any) -> ImageModel | None:
    """Describes a VisionTransformer of torchvision for export; returns None for another model."""
    if not comes_from(NAME, model, "VisionTransformer"):
        return None
    size, patch = int(model.image_size), int(model.patch_size)
    linears = [module for module in model.heads.modules() if isinstance(module, nn.Linear)]
    return TorchvisionModel(
        model=model, library=NAME, name=type(model).__name__, image_hw=(size, size), in_chans=3,
        patch_hw=(patch, patch), blocks="encoder.layers", num_classes=linears[-1].out_features if linears else 0,
        config={"image_size": size, "patch_size": patch, "hidden_dim": int(model.hidden_dim)},
    )  # fmt: skip


class TorchvisionModel(ImageModel):
    def make_exportable(self, undo: contextlib.ExitStack, dynamic_size: bool) -> None:
        reasons = ["the model supports one image size only"] if dynamic_size else []
        raise_unsupported("dynamic_size with torchvision's VisionTransformer", reasons)
        # disable the fast path of nn.MultiheadAttention, an operator that ONNX cannot represent
        enabled = torch.backends.mha.get_fastpath_enabled()
        undo.callback(torch.backends.mha.set_fastpath_enabled, enabled)
        torch.backends.mha.set_fastpath_enabled(False)

    def run(self, images: Tensor, wanted: Collection[str], dynamic_size: bool) -> dict[str, Tensor]:
        model: Any = self.model
        if set(wanted) == {"logits"}:
            return {"logits": model(images)}
        tokens = model._process_input(images)
        tokens = model.encoder(torch.cat([model.class_token.expand(tokens.shape[0], -1, -1), tokens], dim=1))
        found = {"tokens": tokens, "features": tokens[:, 0]}
        return found | ({"logits": model.heads(tokens[:, 0])} if self.num_classes else {})


class MultiheadAttentionMixin(FusedModule):
    """Runs mha(x, x, x, need_weights=False) without masks as a fused operator, and other calls by torch's forward."""

    kind = "attention"

    @classmethod
    def examine(cls, module: Any) -> Finding:
        if module.in_proj_weight is None:
            return Finding(["kdim and vdim must equal embed_dim"])
        reasons = tensor_reasons("in_proj_weight", module.in_proj_weight)
        if module.bias_k is not None or module.bias_v is not None:
            reasons.append("add_bias_kv must be False, got True")
        if module.add_zero_attn:
            reasons.append("add_zero_attn must be False, got True")
        if type(module.out_proj) is not NonDynamicallyQuantizableLinear:
            reasons.append(f"out_proj must be a NonDynamicallyQuantizableLinear, got {type_name(module.out_proj)}")
        notes = dropout_notes("attention", module.dropout) if isinstance(module.dropout, float) else []
        return Finding(reasons + touch_reasons([("out_proj", module.out_proj)]), notes)

    @classmethod
    def examine_call(cls, owner: nn.Module, problem: str | None) -> Finding:
        condition = "with need_weights=False, one tensor as query, key and value, and no mask"
        if problem:
            return Finding([f"{problem}: it runs fused only {condition}"])
        if type(owner) is nn.TransformerEncoderLayer and TransformerEncoderLayerMixin.examine(owner).reasons:
            fast = "in evaluation mode without gradients, torch's fast path of TransformerEncoderLayer replaces it"
            return Finding(condition=f"with gradients: {fast}")
        caller = MIXINS.get(f"{type(owner).__module__}.{type(owner).__qualname__}", type(owner))
        is_known = problem is not None or issubclass(caller, TransformerEncoderLayerMixin | EncoderBlockMixin)
        return Finding() if is_known else Finding(condition=condition)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Maps [B, N, C] (or [N, B, C] without batch_first) to the same shape; returns None as attention weights."""
        masked = key_padding_mask is not None or attn_mask is not None or is_causal
        self_attention = query is key and key is value and query.dim() == 3 and not query.is_nested
        dropping = self.training and self.dropout > 0
        changed = type(self.out_proj) is not NonDynamicallyQuantizableLinear
        changed = changed or any(type(parameter) not in PLAIN for parameter in self._parameters.values())
        if masked or need_weights or not self_attention or dropping or changed or is_touched(self.out_proj):
            masks = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return super().forward(query, key, value, *masks)
        x = query if self.batch_first else query.transpose(0, 1)
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        mixed = attention_qkvpacked(qkv, backend=self.vit_fast_backend).flatten(2)
        mixed = F.linear(mixed, self.out_proj.weight, self.out_proj.bias)
        return (mixed if self.batch_first else mixed.transpose(0, 1)), None


def _read_attention(block: Reader, name: str, norm: str, dropout: str) -> AttentionParts | None:
    return block.attention(
        name, norm, (name,), f"{name}.out_proj", dropouts=(dropout,), rates=(f"{name}.dropout",),
        inside={name: fused_class(block.at(name), MultiheadAttentionMixin)}, num_heads=block.value(f"{name}.num_heads"),
    )  # fmt: skip


class TransformerEncoderLayerMixin(FusedNormMlp):
    """A pre-norm TransformerEncoderLayer, fused as a whole if batch_first, else in parts."""

    in_sequence = False  # also takes tokens [N, C] without a batch

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        if not block.value("self_attn.batch_first"):
            block.reasons.append("self_attn.batch_first must be True, got False")
            return None
        return _read_attention(block, "self_attn", "norm1", "dropout1")

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        if not block.value("norm_first"):
            block.reasons.append("norm_first must be True, got False")
            return None
        return block.mlp("norm2", "linear1", "activation", "linear2", dropouts=("dropout", "dropout2"))

    @classmethod
    def examine_call(cls, owner: nn.Module, problem: str | None) -> Finding:
        if problem:
            return Finding([f"{problem}: it runs fused only without masks"])
        return Finding(notes=["calls with masks run torch's forward"])

    def is_idle(self) -> bool:
        return False  # torch's fast path would not call the attention layer

    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Maps [B, N, C] (or [N, B, C] without batch_first) or [N, C] to the same shape."""
        given = is_causal or src_mask is not None or src_key_padding_mask is not None
        parts = self.ready()
        if given or src.is_nested or parts is None:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

        def attend(x: Tensor) -> Tensor:
            normed = self.norm1(x)
            mixed, _ = self.self_attn(normed, normed, normed, need_weights=False)
            return x + self.dropout1(mixed)

        return self.run_as_block(parts, src, attend, ordinary=src.dim() == 3)


class EncoderBlockMixin(FusedNormMlp):
    """torchvision's EncoderBlock, fused as a whole or in parts."""

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        return _read_attention(block, "self_attention", "ln_1", "dropout")

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        from torchvision.models.vision_transformer import MLPBlock

        return block.mlp("ln_2", "mlp.0", "mlp.1", "mlp.3", inside={"mlp": (MLPBlock,)}, dropouts=("mlp.2", "mlp.4"))

    def forward(self, input: Tensor) -> Tensor:
        parts = self.ready()
        if parts is None:
            return super().forward(input)
        torch._assert(input.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {input.shape}")

        def attend(x: Tensor) -> Tensor:
            normed = self.ln_1(x)
            mixed, _ = self.self_attention(normed, normed, normed, need_weights=False)
            return self.dropout(mixed) + x

        return self.run_as_block(parts, input, attend)


MIXINS: dict[str, type[FusedModule]] = {
    "torch.nn.modules.activation.MultiheadAttention": MultiheadAttentionMixin,
    "torch.nn.modules.transformer.TransformerEncoderLayer": TransformerEncoderLayerMixin,
    "torch.nn.modules.container.Sequential": FusedBlocks,
    "torchvision.models.vision_transformer.EncoderBlock": EncoderBlockMixin,
}
