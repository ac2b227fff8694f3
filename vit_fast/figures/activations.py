"""Records attention weights and patch features of a forward pass, and reads position embeddings and filters.

A copy of the model is fused with backend "sdpa", so that the attention of every library calls torch's function. The
output shape of the patch embedding's convolution determines which tokens are patches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..apps.data import make_transform, read_image, sample_image
from ..config import DataConfig, Size
from ..errors import UnsupportedInputError, check_type
from ..fusion.fuse import fuse, unfuse
from ..libraries.interface.image_model import required_input_reasons
from ..libraries.known import recognize

# Largest number of class, distillation and register tokens.
MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True)
class ModelImage:
    """A preprocessed image."""

    images: Tensor  # input of the model [1, channels, height, width]
    shown: np.ndarray  # the same region as RGB in 0..1, [height, width, 3]


@dataclass(frozen=True)
class Activations:
    """Activations of one forward pass, in fp32."""

    grid: Size  # rows and columns of the patch grid
    prefix: int  # number of tokens before the patches
    attention: tuple[Tensor, ...]  # weights [B, H, N, N] per block; row i contains the weights of query token i
    features: Tensor  # patch features after the last block and norm, [B, rows, columns, C]

    def rollout(self) -> Tensor:
        """Returns attention rollout: the contribution of each patch to each token after all blocks, [B, N, patches].

        Source: "Quantifying Attention Flow in Transformers", arXiv 2005.00928.
        """
        identity = torch.eye(self.attention[0].shape[-1])
        flow = identity.expand(self.attention[0].shape[0], -1, -1)
        for weights in self.attention:
            flow = (0.5 * weights.mean(1) + 0.5 * identity) @ flow
        return flow[..., self.prefix :]

    def distances(self, patch_px: Sequence[float]) -> Tensor:
        """Returns the mean attention distance [blocks, H] in pixels, measured between patch centers."""
        places = torch.cartesian_prod(*(torch.arange(count) * float(side) for count, side in zip(self.grid, patch_px)))
        apart = torch.cdist(places, places)
        between = [weights[..., self.prefix :, self.prefix :] for weights in self.attention]
        return torch.stack([((weights * apart).sum(-1) / weights.sum(-1)).mean((0, 2)) for weights in between])


class _Watcher(TorchFunctionMode):
    """Records attention weights, output shapes of convolutions, and the last tensor [B, N, C] of each N and C."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[Tensor] = []
        self.convolutions: list[torch.Size] = []
        self.tokens: dict[tuple[int, int], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.attention.append(_attention_weights(*args, **kwargs))
        elif func is F.conv2d:
            self.convolutions.append(output.shape)
        elif isinstance(output, Tensor) and output.dim() == 3:
            self.tokens[output.shape[1], output.shape[2]] = output
        return output


def _attention_weights(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *args: Any,
    **kwargs: Any
) -> Tensor:  # fmt: skip
    """Returns attention weights [B, H, N_q, N_kv]: the output of torch's function with the identity as value."""
    identity = torch.eye(key.shape[-2], device=key.device).expand(*key.shape[:-1], -1)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.float()
    return F.scaled_dot_product_attention(query.float(), key.float(), identity, attn_mask, 0.0, *args, **kwargs).cpu()


@torch.no_grad()
def record_activations(model: nn.Module, images: Tensor) -> Activations:
    """Runs a copy of a model on images and records attention weights and features.

    Args:
        model: A model that `vit_fast.fuse` supports; it does not change.
        images: Inputs of the model [B, channels, height, width].
    Raises:
        UnsupportedInputError: the model has no supported attention, or no patch embedding that matches its tokens.
    """
    what = f"figures of a {type(model).__name__}"
    if reasons := required_input_reasons(model):
        raise UnsupportedInputError(what, reasons)
    work = copy.deepcopy(model).eval()
    unfuse(work)
    fuse(work, "sdpa")
    with _Watcher() as seen:
        work(images)
    attention = [weights for weights in seen.attention if weights.dim() == 4 and weights.shape[2] == weights.shape[3]]
    if not attention:
        raise UnsupportedInputError(what, ["the model must have attention layers that vit_fast.fuse supports"])
    count = max(weights.shape[-1] for weights in attention)
    of_patches = [shape for shape in seen.convolutions if 0 <= count - math.prod(shape[2:]) <= MOST_PREFIX_TOKENS]
    if not of_patches:
        shapes = [tuple(shape) for shape in seen.convolutions]
        reason = f"a convolution must output one vector per patch, got {count} tokens and convolution outputs {shapes}"
        raise UnsupportedInputError(what, [reason])
    _, width, rows, columns = of_patches[-1]
    prefix = count - rows * columns
    weights = tuple(weights for weights in attention if weights.shape[-1] == count)
    tokens = seen.tokens.get((count, width))
    if tokens is None:  # a packed batch [1, B * N, C]
        tokens = seen.tokens[len(images) * count, width].unflatten(1, (len(images), count))[0]
    features = tokens[:, prefix:].float().cpu().unflatten(1, (rows, columns))
    return Activations((rows, columns), prefix, weights, features)


def open_image(
    model: nn.Module,
    image: str | Path | Image.Image | None = None,
    *,
    data_config: DataConfig | None = None,
    image_hw: Size | None = None,
    in_chans: int | None = None,
) -> ModelImage:
    """Opens an image and preprocesses it for a model.

    Args:
        model: The model.
        image: A file or a Pillow image; None means matplotlib's sample image.
        data_config: Preprocessing; None means the model's.
        image_hw: Height and width in pixels; None means the model's.
        in_chans: 3 (RGB) or 1 (gray); None means the model's.
    Raises:
        ImageError: the file is missing or not an image.
        UnsupportedInputError: a value is None, and the model is not of a supported library.
    """
    if image_hw is None or data_config is None or in_chans is None:
        known = recognize(model)
        image_hw, data_config = image_hw or known.image_hw, data_config or known.data_config or DataConfig()
        in_chans = in_chans or known.in_chans
    image = image if isinstance(image, Image.Image) else read_image(sample_image() if image is None else image)
    prepared = make_transform(data_config, image_hw, in_chans)(image)
    plain = DataConfig.from_dict({**vars(data_config), "mean": (0.0,) * 3, "std": (1.0,) * 3})
    shown = make_transform(plain, image_hw, 3)(image)
    parameter = next(model.parameters())
    return ModelImage(prepared.unsqueeze(0).to(parameter), shown.permute(1, 2, 0).numpy())


def position_embedding(model: nn.Module, patches: int) -> Tensor:
    """Returns the learned position embedding [patches, C] of a model, without other tokens."""
    for name, parameter in model.named_parameters():
        if "pos" not in name.lower() or parameter.dim() < 2:
            continue
        found = parameter.detach().float().cpu()
        if found.dim() == 4 and found.shape[0] == 1:  # [1, C, rows, columns] or [1, rows, columns, C]
            found = found.flatten(2).transpose(1, 2) if math.prod(found.shape[2:]) == patches else found.flatten(1, 2)
        found = found.reshape(-1, found.shape[-1])
        if 0 <= len(found) - patches <= MOST_PREFIX_TOKENS:
            return found[len(found) - patches :]
    reason = f"the model must have a learned position embedding for {patches} patches, got none"
    raise UnsupportedInputError(f"positions of a {type(model).__name__}", [reason])


def patch_filters(model: nn.Module) -> Tensor:
    """Returns the filters of the patch embedding, [C, channels, height, width]."""
    check_type("model", model, nn.Module)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.shape[1] in (1, 3):
            return module.weight.detach().float().cpu()
    reason = "the model must have a convolution with 1 or 3 input channels, got none"
    raise UnsupportedInputError(f"filters of a {type(model).__name__}", [reason])


def components(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the first principal components [count, C] of vectors [n, C], and their coordinates [n, count]."""
    centered = (rows - rows.mean(0)).double()
    found = torch.linalg.svd(centered, full_matrices=False).Vh[:count]
    # choose the sign that makes the largest entry positive, so that the figure is reproducible
    found = found * found.gather(1, found.abs().argmax(1, keepdim=True)).sign()
    return found.float(), (centered @ found.T).float()
