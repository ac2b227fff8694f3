"""Figures of a model's attention and features, drawn with matplotlib, for notebooks and `vit-fast show`.

    from vit_fast import figures

    figures.attention(model, "cat.jpg", blocks=[0, -1]).savefig("attention.png")

The functions support each model that `vit_fast.fuse` supports, and do not change it. `activations.py` records the
activations, and `drawing.py` draws the figures.
"""

from .activations import Activations, ModelImage, open_image, record_activations
from .drawing import attention, attention_distance, features, filters, patches, positions, rollout

__all__ = [
    "Activations",
    "ModelImage",
    "attention",
    "attention_distance",
    "features",
    "filters",
    "open_image",
    "patches",
    "positions",
    "record_activations",
    "rollout",
]
