"""Fused layers and towers of transformers for images of any size, and those of Llama 4.

- Qwen's towers, and models with their code, pass cu_seqlens of images or of windows to each layer.
- Pixtral packs the images of a batch and creates a block mask. Its fused tower also passes the lengths to its layers.
- SigLIP 2 (NaFlex) pads. Its fused tower creates a padding mask that layers recognize by its strides.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.fused import Finding, FusedModule, fused_class
from ...blocks.parts import AttentionParts
from ...blocks.reading import Reader, describe
from ...ops import Rope, qk_norm_rope
from ...ops.attention import attention_among
from ...ops.descriptions import Keys
from ...ops.registration import is_exporting
from .encoder_layer import FusedLayer, Layer, layer_of
from .self_attention import (
    FusedPoolingHead,
    FusedRotarySelfAttention,
    FusedSelfAttention,
    eager_reasons,
    is_set,
    without,
)

KEYS = "vit_fast_keys"  # keyword argument by which a packed tower passes the lengths to its layers


class FusedPackedAttention(FusedRotarySelfAttention):
    """Attention of packed tokens [total, C] with one linear layer for q, k and v, and cu_seqlens from the caller.

    transformers reads the lengths on the host to split the tokens; this class does not.
    """

    @classmethod
    def examine(cls, module: Any) -> Finding:
        return Finding(eager_reasons(module))

    def set_up(self) -> None:
        """Does nothing, because one linear layer computes q, k and v."""

    def needs_original_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        rest = without(kwargs, "cu_seqlens", "max_seqlen")
        return kwargs.get("cu_seqlens") is None or super().needs_original_forward(args, rest)

    def rope_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Rope:
        cos, sin = kwargs["position_embeddings"]
        return Rope(cos, sin, layout="half")

    def keys_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Keys:
        # cu_seqlens is int64 while traced. The maximum length only selects tiles, so the total is enough.
        return Keys(kwargs["cu_seqlens"].to(torch.int32), hidden_states.shape[0])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Maps [total, C] to [total, C]."""
        if self.needs_original_forward(args, kwargs):
            return super(FusedSelfAttention, self).forward(hidden_states, *args, **kwargs)
        qkv, backend = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)), self.vit_fast_backend
        qkv = qk_norm_rope(qkv, rope=self.rope_of(hidden_states, kwargs), backend=backend)
        mixed = attention_among(qkv, self.keys_of(hidden_states, kwargs), scale=self.vit_fast_scale, backend=backend)
        return self.proj(mixed.flatten(1))


class FusedPackedLayer(FusedLayer):
    """A `FusedLayer` for packed tokens [total, C]."""

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        layer = cls.layer_spec
        name, module = layer.attention, block.watch(layer.attention)
        if not fused_class(module, FusedPackedAttention):
            block.reasons.append(f"{name} must be fused, got {describe(module)}")
            return None
        return block.attention(
            name,
            layer.norms[0],
            (f"{name}.qkv",),
            f"{name}.proj",
            num_heads=module.num_heads,
            scale=block.value(f"{name}.scaling"),
            rotates_halves=True,
        )


class FusedAttentionWithLengths(FusedRotarySelfAttention):
    """Attention of packed tokens [1, total, C]; the fused tower passes their lengths in addition to the mask."""

    def needs_original_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        rest = without(kwargs, KEYS, "attention_mask")
        masked = is_set(kwargs.get("attention_mask")) and kwargs.get(KEYS) is None
        return masked or super().needs_original_forward(args, rest)

    def keys_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Keys | None:
        return kwargs.get(KEYS)


class FusedTower(FusedModule):
    """A whole model of transformers.

    Its class has the `__module__` and `__name__` of the original, by which transformers finds outputs and weight names.
    """

    passes_for_original = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies by the original class, because pickle looks up classes by name."""
        if "original" not in vars(type(self)):  # fully_shard has changed its class
            return super().__reduce_ex__(protocol)
        return _new_tower, (type(self).original,), self.__dict__

    def _get_name(self) -> str:
        return f"Fused{type(self).__qualname__}"


def _new_tower(original: type[nn.Module]) -> nn.Module:
    families: Any = importlib.import_module(".families", __package__)  # which imports this file
    form = families.FORMS.of(original)
    tower: nn.Module = form.__new__(form)
    return tower


class FusedTowerWithLengths(FusedTower):
    """Pixtral's tower, which passes the lengths of the packed images to its layers."""

    kind = "lengths of packed images"
    host_reads = "it reads the sizes of its images on the host to pack them"

    def forward(self, pixel_values: Tensor, image_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Maps images [B, 3, H, W], with the (height, width) of each in pixels, to tokens [1, total, C]."""
        if not is_exporting():
            if image_sizes is not None:
                image_sizes = [(int(height), int(width)) for height, width in image_sizes]
            sizes = image_sizes or [tuple(pixel_values.shape[2:])] * pixel_values.shape[0]
            lengths = [(height // self.patch_size) * (width // self.patch_size) for height, width in sizes]
            bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=pixel_values.device)
            kwargs = {**kwargs, KEYS: Keys(bounds, max(lengths, default=0))}
        return super().forward(pixel_values, image_sizes, *args, **kwargs)


class FusedPaddedTower(FusedTower):
    """SigLIP 2's tower. Its layers get a padding mask that they recognize by its strides.

    For a mask [B, N], transformers would create a mask of queries and keys and synchronize with the device to detect
    padding. It does not change a four-dimensional mask.
    """

    kind = "padding mask"

    @classmethod
    def examine(cls, module: Any) -> Finding:
        if hasattr(module, "use_head"):
            return Finding()
        return Finding(notes=["before transformers 5.6, padded images run the original attention"])

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs patches [B, N, P] with a mask [B, N]."""
        fits = isinstance(pixel_attention_mask, Tensor) and pixel_attention_mask.shape == pixel_values.shape[:2]
        # before 5.6 the head is in an inner tower, which does not support four-dimensional masks
        supported = hasattr(self, "use_head") and (not self.use_head or isinstance(self.head, FusedPoolingHead))
        supported = supported and self.config._attn_implementation in ("sdpa", "vit_fast")
        if fits and supported and not is_exporting():
            batch, tokens = pixel_values.shape[:2]
            pixel_attention_mask = pixel_attention_mask.bool()[:, None, None, :].expand(batch, 1, tokens, tokens)
        return super().forward(pixel_values, pixel_attention_mask, *args, **kwargs)


class FusedLlama4Attention(FusedSelfAttention):
    """Llama 4's attention, whose positions are complex numbers, and which ignores masks."""

    def needs_original_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        rest = without(kwargs, "freqs_ci", "attention_mask")
        rotations = kwargs.get("freqs_ci")  # real after model.half(), which drops the imaginary part
        return rotations is None or not rotations.is_complex() or super().needs_original_forward(args, rest)

    def rope_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Rope:
        rotations = kwargs["freqs_ci"].reshape(hidden_states.shape[1], -1)
        return Rope(rotations.real.contiguous(), rotations.imag.contiguous(), layout="interleaved")

    def keys_of(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Keys | None:
        return None


class FusedLlama4Layer(FusedLayer):
    """Llama 4's layer, whose input is named hidden_state."""

    def forward(self, hidden_state: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # HF's name
        return super().forward(hidden_state, *args, **kwargs)


QWEN = layer_of(Layer(("norm1", "norm2"), "attn"), FusedPackedLayer)
PIXTRAL = layer_of(Layer(("attention_norm", "ffn_norm"), mlp="feed_forward"))
LLAMA4 = layer_of(Layer(("input_layernorm", "post_attention_layernorm"), "self_attn"), FusedLlama4Layer)
