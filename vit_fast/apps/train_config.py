"""Training settings: TrainConfig, and recipes for some variants."""

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
    """Training settings. 0 disables weight decay, warm-up, mixup and other optional settings.

    Attributes:
        epochs: Passes over the images.
        batch_size: Images per step, summed over all processes; the last batch of an epoch may be smaller.
        lr: Learning rate at the end of the warm-up.
        weight_decay: AdamW's weight decay of matrices. Biases, norms, LayerScale, tokens and positions have none.
        warmup_epochs: Epochs of linear warm-up.
        schedule: Learning rate after the warm-up: "cosine" decays to 0, "constant" stays at lr.
        layer_decay: Multiplies the learning rate of each block relative to the next one (BEiT, arXiv 2106.08254). The
            head has the learning rate lr, the patch embedding the smallest one.
        label_smoothing: Label smoothing of the cross entropy.
        mixup: alpha of mixup's Beta distribution (arXiv 1710.09412).
        max_grad_norm: Maximum norm for gradient clipping.
        ema_decay: Decay of the exponential moving average of the weights, at most (1 + step) / (10 + step). The
            averaged weights are evaluated and saved.
        accumulation: Number of gradient accumulation steps into which a batch is split, to reduce memory.
        patience: Stops after this number of epochs without a better held-out accuracy, and saves the weights of the
            best epoch.
        dtype: Autocast dtype of the forward pass; "fp32" means no autocast.
        grad_checkpointing: Recomputes blocks in the backward pass instead of storing their activations.
        augment: True augments the images, see PreparedImages; False applies the evaluation transform.
        seed: Seed of shuffling, augmentation, mixup, dropout and drop path.

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


# Recipes by variant.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    # as in tutorials on this variant: Adam with a constant learning rate
    "vit_mnist": {
        "epochs": 5, "batch_size": 128, "lr": 5e-3, "weight_decay": 0.0, "warmup_epochs": 0.0, "schedule": "constant",
        "max_grad_norm": 0.0, "augment": False,
    },
    "vit_micro_patch7_28": {"epochs": 60, "batch_size": 32, "lr": 2e-3, "warmup_epochs": 2.0},
}  # fmt: skip


def config_for(variant: str, given: Mapping[str, Any], settings: Iterable[str] = ()) -> TrainConfig:
    """Returns the recipe of a variant with changed fields.

    Args:
        variant: A name of `vit-fast models`; TrainConfig's defaults apply to names without a recipe.
        given: Fields of TrainConfig; None means the value of the recipe.
        settings: More fields, as NAME=VALUE.
    Raises:
        ValueError, TypeError: a field is unknown, given twice, or invalid.
    """
    fields_given = {name: value for name, value in given.items() if value is not None}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name in fields_given:
            raise ValueError(f"--set must be NAME=VALUE, once per name, got {setting}")
        try:
            fields_given[name] = json.loads(text)
        except ValueError:
            fields_given[name] = text
    known = {field.name for field in fields(TrainConfig)}
    if unknown := sorted(fields_given.keys() - known):
        raise ValueError(f"--set NAME must be one of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return TrainConfig(**{**RECIPES.get(variant, {}), **fields_given})
