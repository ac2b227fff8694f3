"""Training settings: TrainConfig, and the recipes of the variants that have one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..arguments import MAX_SIZE, check_choice, check_integer, check_number
from ..errors import check_type

_SHARES = ("label_smoothing", "ema_decay")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training settings; 0 disables those that can be disabled.

    Attributes:
        epochs: Passes over the images.
        batch_size: Images per step, of all processes together; the last batch of an epoch may be smaller.
        lr: Learning rate at the end of the warm-up.
        weight_decay: AdamW's weight decay of matrices (0 makes it Adam); biases, norms, LayerScale, tokens and
            positions have none.
        warmup_epochs: Epochs in which the learning rate rises linearly from 0.
        schedule: Learning rate after the warm-up: "cosine" falls to 0, "constant" stays.
        layer_decay: Multiplies the learning rate of each block relative to the next one; the head's is lr, the
            embedding's the smallest (BEiT, arXiv 2106.08254). 1 means lr everywhere.
        label_smoothing: Share of the target that is spread over all classes.
        mixup: alpha of the Beta distribution that mixes pairs of images (arXiv 1710.09412).
        max_grad_norm: Clips the norm of all gradients together.
        ema_decay: Decay of the exponential moving average of the weights, which is evaluated and saved in their place;
            in the first steps at most (1 + step) / (10 + step).
        accumulation: Number of parts in which a batch is computed, to save memory.
        patience: Stops after this number of epochs without a better accuracy on the held-out images, and saves the
            weights of the best epoch.
        dtype: Autocast dtype of the forward pass; "fp32" means no autocast.
        grad_checkpointing: Recomputes blocks in the backward pass instead of storing their activations.
        augment: Augments the images, see PreparedImages; otherwise they get the evaluation transform.
        seed: Seed of order, augmentation, mixing, dropout and drop path.

    Raises:
        ValueError, TypeError: a field is invalid.
    """

    epochs: int = 10
    batch_size: int = 64
    lr: float = 5e-4
    weight_decay: float = 0.05
    warmup_epochs: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    layer_decay: float = 1.0
    label_smoothing: float = 0.0
    mixup: float = 0.0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    accumulation: int = 1
    patience: int = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    grad_checkpointing: bool = False
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulation"):
            check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, -MAX_SIZE)
        for name in ("lr", "layer_decay"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("weight_decay", "warmup_epochs", "mixup", "max_grad_norm", "patience", *_SHARES):
            check_number(name, value := getattr(self, name))
            if value < 0 or (name in _SHARES and value >= 1):
                limit = "a share in [0, 1)" if name in _SHARES else "non-negative"
                raise ValueError(f"{name} must be {limit}, got {value!r}")
        if self.layer_decay > 1:
            raise ValueError(f"layer_decay must be at most 1, got {self.layer_decay!r}")
        for name in ("grad_checkpointing", "augment"):
            check_type(name, getattr(self, name), bool)
        check_choice("schedule", self.schedule, ("cosine", "constant"))
        check_choice("dtype", self.dtype, ("fp32", "bf16"))


# Recipes of the variants that have one.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    # Adam with a constant rate, as in the tutorials of this variant
    "vit_mnist": {
        "epochs": 5, "batch_size": 128, "lr": 5e-3, "weight_decay": 0.0, "warmup_epochs": 0.0, "schedule": "constant",
        "max_grad_norm": 0.0, "augment": False,
    },
    "vit_micro_patch7_28": {"epochs": 60, "batch_size": 32, "lr": 2e-3, "warmup_epochs": 2.0},
}  # fmt: skip


def config_for(variant: str, given: Mapping[str, Any], settings: Iterable[str] = ()) -> TrainConfig:
    """Returns the variant's recipe with the given changes.

    Args:
        variant: A name of `vit-fast models`; other names have no recipe.
        given: Fields of TrainConfig; None keeps the recipe's value.
        settings: More fields, as NAME=VALUE.
    Raises:
        ValueError, TypeError: a field is unknown, given twice, or invalid.
    """
    fields_given = {name: value for name, value in given.items() if value is not None}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name in fields_given:
            raise ValueError(f"settings must be NAME=VALUE, each name once, got {setting}")
        try:
            fields_given[name] = json.loads(text)
        except ValueError:
            fields_given[name] = text
    known = {field.name for field in fields(TrainConfig)}
    if unknown := sorted(fields_given.keys() - known):
        raise ValueError(f"settings must be of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return TrainConfig(**{**RECIPES.get(variant, {}), **fields_given})
