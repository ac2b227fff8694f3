"""What a model sees, as figures of matplotlib: for notebooks, and for `vit-fast show`.

    from vit_fast import figures

    figures.attention(model, "cat.jpg", blocks=[0, -1]).savefig("attention.png")

Any model that `vit_fast.fuse` knows, from any library; the model itself is not changed. `sight.py` looks, `drawing.py`
draws.
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
