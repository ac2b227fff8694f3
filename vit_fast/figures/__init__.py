"""Figures of what a model attends to and learns, by matplotlib: for notebooks and `vit-fast show`.

    from vit_fast import figures

    figures.attention(model, "cat.jpg", blocks=[0, -1]).savefig("attention.png")

Accepts every model that `vit_fast.fuse` supports, and does not change it. `sight.py` records, `drawing.py` draws.
"""

from .drawing import attention, attention_distance, features, filters, patches, positions, rollout
from .sight import Picture, Sight, look, open_picture

__all__ = [
    "Picture",
    "Sight",
    "attention",
    "attention_distance",
    "features",
    "filters",
    "look",
    "open_picture",
    "patches",
    "positions",
    "rollout",
]
