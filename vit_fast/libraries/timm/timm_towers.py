"""Fused models of timm: VisionTransformer and NaFlexVit, and NaFlexVit packed for CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocks.block import run_blocks, run_packed_blocks
from ...blocks.fused import FusedContainer, FusedModule
from ...blocks.plain import is_touched
from ...ops.descriptions import Keys
from ...ops.registration import is_exporting
from ..interface.image_model import comes_from
from ..interface.packed_tower import Call, PaddedTower, read_grids
from .timm_blocks import AttentionLayer, AttentionPoolLatentMixin, BlockMixin

_METHODS = ("forward_features", "forward_head", "pool")  # which a user may have replaced


class VisionTransformerMixin(FusedContainer):
    """timm's VisionTransformer. If frozen for the CPU or compiled, the last block may compute only the first token."""

    @classmethod
    def fits(cls, module: Any, blocks: Collection[nn.Module]) -> bool:
        return len(module.blocks) > 0 and all(block in blocks for block in module.blocks)

    def forward(self, x: Tensor, *masks: Any, **options: Any) -> Tensor:
        if masks or options or not self._reads_one_token():
            output: Tensor = super().forward(x, *masks, **options)
        else:
            tokens = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
            output = self.forward_head(self.norm(_run_for_one_token(self.blocks, tokens)))
        return output

    def _reads_one_token(self) -> bool:
        if torch.is_grad_enabled() or self.training or is_exporting():
            return False
        if self.global_pool != "token" or self.attn_pool is not None or not isinstance(self.blocks, nn.Sequential):
            return False
        cls = type(self)
        if any(name in vars(self) or getattr(cls, name).__module__ != cls.original.__module__ for name in _METHODS):
            return False
        return not any(part._forward_hooks or is_touched(part) for part in (self.blocks, self.norm))


def _run_for_one_token(blocks: Any, x: Tensor) -> Any:
    """Runs blocks on [B, N, C]; returns the first token [B, 1, C], or all if the last block cannot compute only one."""
    if not torch.compiler.is_compiling():
        output = run_packed_blocks(blocks, x, outputs=1)
        return blocks(x) if output is None else output
    if not len(blocks) or not isinstance(blocks[-1], BlockMixin):  # blocks were replaced or removed after fuse
        return blocks(x)
    *others, last = blocks
    attn, changed = last.attn, last._forward_hooks or is_touched(last)
    parts = None if changed or last.vit_fast_backend != "sdpa" else last.ready()
    if parts is None or parts.attention is None or parts.attention.terms is not None or parts.fp8 is not None:
        return blocks(x)
    if attn.needs_original_forward(None, False):
        return blocks(x)
    x = run_blocks(others, x)
    normed = last.norm1(x)
    q, k, v = attn.packed(normed).transpose(1, 3).unbind(2)
    q, k = attn.q_norm(q[:, :, :1]).to(v.dtype), attn.k_norm(k).to(v.dtype)
    mixed = F.scaled_dot_product_attention(q, k, v, scale=parts.attention.scale).transpose(1, 2)
    x = x[:, :1] + last.drop_path1(last.ls1(attn.project_out(mixed, normed[:, :1])))
    return x + last.drop_path2(last.ls2(last.mlp(last.norm2(x))))


class NaFlexVitMixin(FusedModule):
    """timm's NaFlexVit. Its mask [B, 1, 1, N] masks only keys, because nothing reads the outputs of padding tokens."""

    kind = "padding mask"

    def _forward_embeds(self, x: Tensor, patch_coord: Any, patch_valid: Any, attn_mask: Any) -> dict[str, Any]:
        use_keys = attn_mask is None and patch_valid is not None and not is_exporting()
        # timm's own attention layers may add a mask to the scores
        use_keys = use_keys and all(isinstance(block.attn, AttentionLayer) for block in self.blocks)
        mask = False if use_keys else attn_mask
        embeds: dict[str, Any] = super()._forward_embeds(x, patch_coord, patch_valid, mask)  # type: ignore[misc]
        if use_keys:  # after timm's patch dropout, which selects the valid patches in training
            embeds["attn_mask"] = padding_mask(embeds["patch_valid"], self.num_prefix_tokens)
        return embeds

    def _pool(self, x: Tensor, pool_type: str | None = None, patch_valid: Tensor | None = None) -> Any:
        if patch_valid is None or not isinstance(self.attn_pool, AttentionPoolLatentMixin) or is_exporting():
            return super()._pool(x, pool_type, patch_valid)  # type: ignore[misc]
        prefix = self.num_prefix_tokens if self.pool_include_prefix else 0
        return self.attn_pool(x[:, self.num_prefix_tokens - prefix :], attn_mask=padding_mask(patch_valid, prefix))


def padding_mask(valid: Tensor, prefix: int) -> Tensor:
    """Returns the mask [B, 1, 1, prefix + N] for valid patches [B, N] behind prefix tokens, which are always valid."""
    there = torch.cat([valid.new_ones((valid.shape[0], prefix), dtype=torch.bool), valid.bool()], 1)
    return there[:, None, None]


class NaFlexTower(PaddedTower):
    """Packs the calls of a NaFlexVit. timm's own code computes its positions, outside of the graph."""

    def __init__(self, tower: Any) -> None:
        shapes: dict[str, tuple[int, ...]] = {"tokens": (tower.embed_dim,)}
        if (rope := tower.rope) is not None:
            depth, heads = (rope.depth, rope.num_heads) if tower.rope_is_mixed else (1, 1)
            shapes["rope"] = (depth, heads, 2 * rope.dim // heads)
        super().__init__(tower, shapes)
        self.prefix = tower.num_prefix_tokens

    def read(
        self, x: Tensor | dict[str, Tensor], patch_coord: Tensor | None = None, patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Call:  # fmt: skip
        if isinstance(x, dict):
            patch_coord, patch_valid = x.get("patch_coord", patch_coord), x.get("patch_valid", patch_valid)
            attn_mask, x = x.get("attn_mask", attn_mask), x["patches"]
        reasons = [] if attn_mask is None else ["attn_mask must be None"]
        if patch_coord is None or patch_valid is None:
            reason = "patch_coord and patch_valid must be given: for images, use GraphRunner(model, example)"
            return Call([1] * len(x), [1] * len(x), (x,), (), [*reasons, reason])
        _, lengths, fits = read_grids((patch_coord * patch_valid[..., None]).amax(1) + 1, patch_valid)
        if not fits:
            first = "the first rows * columns patches of each image (rows and columns: patch_coord)"
            reasons.append(f"patch_valid must be true for exactly {first}")
        lengths = [self.prefix + length for length in lengths]
        return Call(lengths, [1] * len(x), (x, patch_coord, patch_valid), (), reasons)

    def tokens(self, call: Call, images: Sequence[int]) -> dict[str, Sequence[Tensor]]:
        inputs = (given if len(images) == len(given) else given[list(images)] for given in call.inputs)
        embeds = self.tower._forward_embeds(*inputs, attn_mask=False)  # False: without a mask
        found = {"tokens": embeds["patches"]}
        if "rope" in self.shapes:
            ropes = embeds["rope_embeds"]
            tables = torch.stack(list(ropes) if self.tower.rope_is_mixed else [ropes])
            tables = tables.permute(1, 3, 0, 2, 4)  # [B, N, depth, heads, sin and cos]
            unrotated = tables.new_zeros((len(images), self.prefix, *tables.shape[2:]))  # prefix tokens: sin 0, cos 1
            unrotated.chunk(2, -1)[1].fill_(1)
            found["rope"] = torch.cat([unrotated, tables], 1)
        lengths = [call.lengths[image] for image in images]
        return {name: [one[:length] for one, length in zip(padded, lengths)] for name, padded in found.items()}

    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        x = buffers["tokens"][None]
        keys = Keys(buffers["cu_seqlens"], x.shape[1])
        for index, block in enumerate(self.tower.blocks):
            extra = {}
            if "rope" in buffers:
                table = buffers["rope"][:, index if self.tower.rope_is_mixed else 0]
                extra["rope"] = block.attn.rope_of(table.transpose(0, 1))._replace(prefix=0)
            x = block(x, attn_mask=keys, **extra)
        return self.tower.norm(x)

    def finish(self, call: Call, outputs: Any) -> Any:
        return self.tower.forward_head(outputs, patch_valid=call.inputs[2])


def packed_tower(tower: nn.Module) -> NaFlexTower | None:
    return NaFlexTower(tower) if comes_from("timm", tower, "NaFlexVit") else None


MIXINS: dict[str, type[FusedModule]] = {
    "timm.models.vision_transformer.VisionTransformer": VisionTransformerMixin,
    "timm.models.naflexvit.NaFlexVit": NaFlexVitMixin,
}
