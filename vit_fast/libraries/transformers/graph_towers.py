"""Packed towers of transformers: for images of any size (Qwen and its copies, Pixtral, SigLIP 2) and of one size."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import Size
from ...errors import pair, raise_unsupported
from ...ops.descriptions import Keys
from ..interface.image_model import comes_from
from ..interface.packed_tower import Call, ImageTower, PackedTower, PaddedTower, pad_to, read_grids
from .families import LIKE_QWEN
from .self_attention import KEYS


class GridTower(PackedTower):
    """Qwen's towers, which accept the metadata that transformers computes from the grids on the host."""

    def __init__(self, tower: Any) -> None:
        super().__init__(tower, {"hidden_states": (tower.patch_embed.proj.weight[0].numel(),)})
        self.unit = tower.spatial_merge_size**2

    def read(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Call:
        """Reads patches [tokens, P], and frames, height and width of each image in patches, [images, 3]."""
        options, reasons = self.options_of(kwargs)
        grids = grid_thw.tolist()
        lengths = [frames * height * width for frames, height, width in grids]
        inputs = hidden_states.split(lengths), torch.tensor(grids, device="cpu")
        return Call(lengths, [grid[0] for grid in grids], inputs, options, reasons)

    def tokens(self, call: Call, images: Sequence[int]) -> dict[str, Sequence[Tensor]]:
        return {"hidden_states": [call.inputs[0][image] for image in images]}

    def metadata(self, call: Call, images: Sequence[int], budget: int, sequences: int) -> dict[str, Tensor]:
        grids, tower, merged = call.inputs[1][list(images)], self.tower, budget // self.unit
        frames = grids.repeat_interleave(grids[:, 0], 0).index_fill_(1, torch.tensor(0), 1)
        found = {"grid_thw": pad_to(frames, sequences + 1, 1)} | super().metadata(call, images, budget, sequences)
        for name, values in grid_layout(tower, grids).items():
            if name == "window_index":  # a permutation; padding stays in place
                found[name] = torch.cat([values, torch.arange(len(values), merged)])
            elif name == "cu_window_seqlens":
                side = tower.window_size // tower.spatial_merge_size // tower.patch_size
                # a frame of a by b merged tokens has ceil(a/side) ceil(b/side) < ab/side + 1 windows
                found[name] = pad_to(values, merged // side + sequences + 2, budget)
            elif name != "cu_seqlens":
                found[name] = pad_to(values, budget)
        return found

    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        names = ["max_seqlen", *(["max_window_seqlen"] if "cu_window_seqlens" in buffers else [])]
        return self.eager(**buffers, **dict.fromkeys(names, len(buffers["hidden_states"])), **options)


def grid_layout(tower: Any, grids: Tensor) -> dict[str, Tensor]:
    """Returns the metadata of grids [images, 3], as keyword arguments of transformers' towers."""
    from transformers import vision_utils

    merge = tower.spatial_merge_size
    found = {
        "position_ids": vision_utils.get_vision_position_ids(grids, merge),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
    }
    if hasattr(tower, "window_size"):
        found["window_index"], found["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grids, merge, tower.window_size, tower.patch_size
        )
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
    return found


class PixtralTower(PackedTower):
    axis = 1

    def __init__(self, tower: Any) -> None:
        super().__init__(tower, {"patches": tuple(tower.patch_conv.weight.shape[1:])})

    def read(self, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any) -> Call:
        """Reads images [B, C, H, W], and (height, width) of each in pixels, or None if none is padded."""
        options, reasons = self.options_of(kwargs)
        size = pixel_values.shape[-2:]
        given = torch.as_tensor([size] * len(pixel_values) if image_sizes is None else image_sizes, device="cpu")
        patch = self.tower.patch_size
        grids = [(int(height) // patch, int(width) // patch) for height, width in given.tolist()]
        both = zip(pixel_values, grids, strict=True)
        cropped = [image[:, : patch * rows, : patch * columns] for image, (rows, columns) in both]
        return Call([rows * columns for rows, columns in grids], [1] * len(grids), (cropped, grids), options, reasons)

    def tokens(self, call: Call, images: Sequence[int]) -> dict[str, Sequence[Tensor]]:
        cropped, patch = call.inputs[0], self.tower.patch_size
        return {"patches": [patchify(cropped[image][None], (patch, patch)).flatten(0, 2) for image in images]}

    def metadata(self, call: Call, images: Sequence[int], budget: int, sequences: int) -> dict[str, Tensor]:
        positions = torch.cat([torch.cartesian_prod(*map(torch.arange, call.inputs[1][image])) for image in images])
        return super().metadata(call, images, budget, sequences) | {"position_ids": pad_to(positions, budget)}

    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        from transformers.utils.output_capturing import capture_outputs

        return capture_outputs(_run_pixtral)(self.tower, **buffers, **options)


def _run_pixtral(tower: Any, patches: Tensor, position_ids: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    tokens = tower.ln_pre(tower.patch_conv(patches).flatten(1)[None])
    positions = tower.patch_positional_embedding(tokens, position_ids)
    keys = {KEYS: Keys(cu_seqlens, len(patches))}
    return tower.transformer(tokens, attention_mask=None, position_embeddings=positions, **keys, **options)


class Siglip2Tower(PaddedTower):
    def __init__(self, tower: Any) -> None:
        super().__init__(tower, {"patches": (tower.embeddings.patch_embedding.in_features,)})

    def read(
        self, pixel_values: Tensor, pixel_attention_mask: Tensor | None, spatial_shapes: Tensor, **kwargs: Any
    ) -> Call:
        """Reads patches [B, N, P], the mask [B, N], and height and width in patches, [B, 2]."""
        options, reasons = self.options_of(kwargs)
        batch, width = pixel_values.shape[:2]
        mask = pixel_values.new_ones((batch, width)) if pixel_attention_mask is None else pixel_attention_mask
        shapes, lengths, fits = read_grids(spatial_shapes, mask)
        if not fits:
            first = "the first rows * columns patches of each image (rows and columns: spatial_shapes)"
            reasons.append(f"pixel_attention_mask must be 1 for exactly {first}")
        return Call(lengths, [1] * batch, (pixel_values, mask, shapes.tolist()), options, reasons)

    def tokens(self, call: Call, images: Sequence[int]) -> dict[str, Sequence[Tensor]]:
        return {"patches": [call.inputs[0][image, : call.lengths[image]] for image in images]}

    def metadata(self, call: Call, images: Sequence[int], budget: int, sequences: int) -> dict[str, Tensor]:
        resizing = torch.cat([resizing_weights(self.tower.embeddings, *call.inputs[2][image]) for image in images])
        return super().metadata(call, images, budget, sequences) | {"resizing": pad_to(resizing, budget)}

    def run(self, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
        from transformers.utils.output_capturing import capture_outputs

        body = capture_outputs(_run_siglip2, tie_last_hidden_states=False)
        return body(self.tower, **buffers, **options | {"return_dict": True})

    def finish(self, call: Call, outputs: Any) -> Any:
        _, mask, _ = call.inputs
        tokens = outputs.last_hidden_state
        mask = mask.bool()[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        pooled = self.tower.head(tokens, mask) if self.tower.use_head else None
        named = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        found = type(outputs)(last_hidden_state=tokens, pooler_output=pooled, **named)
        return found.to_tuple() if dict(call.options).get("return_dict") is False else found


def _run_siglip2(tower: Any, patches: Tensor, resizing: Tensor, cu_seqlens: Tensor, **options: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    tokens = embed_patches(tower.embeddings, patches, resizing)[None]
    encoded = tower.encoder(inputs_embeds=tokens, attention_mask=Keys(cu_seqlens, len(patches)), **options)
    return BaseModelOutputWithPooling(last_hidden_state=tower.post_layernorm(encoded.last_hidden_state))


def resizing_weights(embeddings: Any, height: int, width: int) -> Tensor:
    """Returns weights [N, 2, side] that interpolate the rows and columns of SigLIP 2's positions for each patch."""
    rows, columns = (_axis_weights(embeddings.position_embedding_size, length) for length in (height, width))
    return torch.stack([rows[:, None].expand(-1, width, -1), columns.expand(height, -1, -1)], 2).flatten(0, 1)


@functools.lru_cache(maxsize=1024)
def _axis_weights(side: int, length: int) -> Tensor:
    unit = torch.eye(side, device="cpu")[None, :, None]  # [1, channels, 1, side]
    return F.interpolate(unit, (1, length), mode="bilinear", align_corners=False, antialias=True)[0, :, 0].T


def embed_patches(embeddings: Any, patches: Tensor, resizing: Tensor) -> Tensor:
    """Embeds patches [..., N, P] like SigLIP 2, but resizes the positions without reading sizes on the host."""
    table = embeddings.position_embedding.weight
    rows, columns = resizing.float().unbind(1)
    positions = (rows[:, :, None] * columns[:, None]).flatten(1) @ table.float()
    return embeddings.patch_embedding(patches) + positions.to(table.dtype)


def patchify(images: Tensor, patch_hw: Size) -> Tensor:
    """Cuts images [B, C, H, W] into patches [B, rows, columns, C, height, width]."""
    height, width = patch_hw
    return images.unflatten(3, (-1, width)).unflatten(2, (-1, height)).permute(0, 2, 4, 1, 3, 5)


def packed_tower(tower: Any) -> PackedTower | None:
    if not comes_from("transformers", tower):
        return None
    forms: dict[str, Any] = {"PixtralVisionModel": PixtralTower, "Siglip2VisionModel": Siglip2Tower}
    form = next((form for name, form in forms.items() if comes_from("transformers", tower, name)), None)
    if {"qwen2_vl", *LIKE_QWEN} & set(type(tower).__module__.split(".")) and hasattr(tower, "patch_embed"):
        form = GridTower
    if form is not None:
        raise_unsupported("token budgets", version_reasons())
        return form(tower)
    config, takes = getattr(tower, "config", None), inspect.signature(type(tower).forward).parameters
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    read_on_host = {"patch_attention_mask", "grid_thw"} & takes.keys()
    if not size or not patch or "pixel_values" not in takes or read_on_host:
        return None
    (height, width), (rows, columns) = pair("image_size", size), pair("patch_size", patch)
    shape, tokens = (getattr(config, "num_channels", 3), height, width), (height // rows) * (width // columns)
    return ImageTower(tower, shape, tokens, next(tower.parameters()))


def version_reasons() -> list[str]:
    """Returns a reason if transformers cannot compute the metadata of packed towers."""
    known = importlib.util.find_spec("transformers.vision_utils") is not None
    return [] if known else ["this version of transformers has no transformers.vision_utils: use 5.23 or newer"]
