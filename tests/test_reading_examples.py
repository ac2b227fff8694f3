"""fuse makes an example for models that state the size of their input."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from spellings import Net, Packed
from torch import Tensor, nn

import vit_fast


class Stated(Net):
    def __init__(self, **config: object) -> None:
        super().__init__(Packed)
        self.config = SimpleNamespace(**{"image_size": 16} | config)


class Clips(Stated):
    """Gets a clip [B, frames, 3, height, width], as VideoMAE and V-JEPA 2."""

    def forward(self, clip: Tensor) -> Tensor:
        B, frames = clip.shape[:2]
        assert frames == getattr(self.config, "num_frames", 2)
        return super().forward(clip.flatten(0, 1)).view(B, frames, -1).mean(1)


class Frames(Stated):
    """Gets the frames of clips as a batch, as X-CLIP."""

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(frames.view(-1, self.config.num_frames, *frames.shape[1:]).flatten(0, 1))


class Patches(Stated):
    """Gets flattened patches."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)
        self.patches = nn.Linear(48, 32)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Text(Stated):
    """Gets text with boxes, and an image, as LayoutLMv3."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 32)

    def forward(self, input_ids: Tensor, bbox: Tensor, pixel_values: Tensor) -> Tensor:
        x = torch.cat([self.words(input_ids) + bbox.sum(-1, True), self.patches(pixel_values).flatten(2).mT], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Medical(Net):
    """States its channels, which the first convolution does not get."""

    def __init__(self) -> None:
        super().__init__(Packed)
        self.pretrained_cfg = {"input_size": (2, 16, 16)}

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[1] == 2
        return super().forward(torch.cat([images, images[:, :1]], 1))


STATED = Clips(num_frames=3), Frames(num_frames=3), Patches(patch_size=4), Text(), Medical()


@pytest.mark.parametrize("model", [*STATED, Clips(image_size=None, crop_size=16, tubelet_size=2)])
def test_a_stated_input_needs_no_example(model: nn.Module) -> None:
    assert len(vit_fast.fuse(model.eval(), "eager").require_all().fused) == 2


class Builtin(nn.Module):
    forward = torch.nn.functional.linear  # has no signature


@pytest.mark.parametrize("part", [torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.GELU())), Builtin()], ids=str)
def test_parts_without_a_signature_need_no_example(part: nn.Module) -> None:
    model = nn.Sequential(part, Packed(32, 4))
    assert not vit_fast.fuse(model).fused
