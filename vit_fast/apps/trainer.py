"""Trainer, which runs training steps, and its settings: TrainConfig, and recipes for some variants."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..arguments import MAX_SIZE, check_choice, check_integer, check_number
from ..errors import VitFastError, check_type
from ..model import VisionTransformer
from .processes import ALONE, Processes

# Recipes by variant.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    # as in tutorials on this variant: Adam with a constant learning rate
    "vit_mnist": {
        "epochs": 5, "batch_size": 128, "lr": 5e-3, "weight_decay": 0.0, "warmup_epochs": 0.0, "schedule": "constant",
        "max_grad_norm": 0.0, "augment": False,
    },
    "vit_micro_patch7_28": {"epochs": 60, "batch_size": 32, "lr": 2e-3, "warmup_epochs": 2.0},
}  # fmt: skip

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
        patience: Stops after this number of epochs without a better validation accuracy, and saves the weights of the
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


class TrainingError(VitFastError, RuntimeError):
    """Training cannot continue or be resumed."""


class Measure(NamedTuple):
    """Mean cross entropy over `seen` images, and the number of correctly classified ones."""

    loss: float
    correct: int
    seen: int


class Trainer:
    """Trains a model in place on its device: optimizer, learning rate schedule and averaged weights.

    With several processes, each calls the same methods on its own copy of the model.
    """

    def __init__(
        self,
        model: VisionTransformer,
        config: TrainConfig,
        total_steps: int,
        warmup_steps: int,
        processes: Processes = ALONE,
    ) -> None:
        self.model, self.config, self.processes = model, config, processes
        model.set_grad_checkpointing(config.grad_checkpointing)
        self.forward = processes.wrap(model)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, config), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, warmup_steps, total_steps, config.schedule)
        )
        self.parameters = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.parameters] if config.ema_decay else []
        self.step_count = 0

    def step(self, images: Tensor, labels: Tensor) -> Measure:
        """Updates the parameters with a batch [B, C, H, W] per process.

        Returns:
            The measure over all processes, before the update.
        Raises:
            TrainingError: the loss is not finite; the parameters are unchanged.
        """
        self.model.train()
        device = self.parameters[0].device
        images, labels = images.to(device), labels.to(device)
        images, mixed_with, share = self._mixed(images, labels)
        found = torch.zeros(3, dtype=torch.float64, device=device)
        parts = list(zip(*(tensor.chunk(self.config.accumulation) for tensor in (images, labels, mixed_with))))
        for i, (part, own, other) in enumerate(parts):
            with self.processes.synchronizing(self.forward, last=i == len(parts) - 1):
                with torch.autocast(device.type, torch.bfloat16, enabled=self.config.dtype == "bf16"):
                    logits = self.forward(part)
                loss = share * self._loss(logits, own)
                if share < 1:
                    loss = loss + (1 - share) * self._loss(logits, other)
                (loss * (len(part) / len(images))).backward()
            correct = (logits.detach().argmax(1) == own).sum()
            found += torch.stack([loss.detach().double() * len(part), correct, torch.full_like(correct, len(part))])
        measure = self._sum(found)
        if not math.isfinite(measure.loss):
            self.optimizer.zero_grad(set_to_none=True)
            advice = f"got {measure.loss} in step {self.step_count}: try a smaller lr"
            raise TrainingError(f"the loss must be finite, {advice}")
        if self.config.max_grad_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step_count += 1
        self._average()
        return measure

    @torch.no_grad()
    def measure(self, batches: Iterable[tuple[Tensor, Tensor]], own: int) -> Measure:
        """Measures loss and accuracy on validation images, with the averaged weights if ema_decay is set.

        Args:
            batches: Images and labels; the same number of batches in each process.
            own: Number of images to count. The others fill the last batch of this process.
        """
        self.model.eval()
        device = self.parameters[0].device
        found = torch.zeros(3, dtype=torch.float64, device=device)
        with self.averaged():
            for images, labels in batches:
                labels = labels[: max(0, own)].to(device)
                logits = self.forward(images.to(device))[: len(labels)].float()
                own -= len(images)
                if len(labels):
                    loss = F.cross_entropy(logits, labels, reduction="sum").double()
                    correct = (logits.argmax(1) == labels).sum()
                    found += torch.stack([loss, correct, torch.full_like(correct, len(labels))])
        return self._sum(found)

    def _sum(self, found: Tensor) -> Measure:
        total, correct, count = self.processes.sum(found).tolist()
        return Measure(total / count, int(correct), int(count))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Temporarily replaces the weights by their moving average if ema_decay is set."""
        if not self.averages:
            yield
            return
        kept = [parameter.detach().clone() for parameter in self.parameters]
        try:
            _copy(self.averages, self.parameters)
            yield
        finally:
            _copy(kept, self.parameters)

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
        """Applies mixup of the batch with its reversal; returns images, reversed labels, and the larger share."""
        if not self.config.mixup:
            return images, labels, 1.0
        share = torch.distributions.Beta(self.config.mixup, self.config.mixup).sample().item()
        share = max(share, 1 - share)  # accuracy counts the label with the larger share
        return share * images + (1 - share) * images.flip(0), labels.flip(0), share

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.config.label_smoothing)

    @torch.no_grad()
    def _average(self) -> None:
        if self.averages:
            decay = min(self.config.ema_decay, (1 + self.step_count) / (10 + self.step_count))
            get_ema_multi_avg_fn(decay)(self.averages, [p.detach() for p in self.parameters], None)


@torch.no_grad()
def _copy(sources: list[Tensor], targets: list[nn.Parameter]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def parameter_groups(model: VisionTransformer, config: TrainConfig) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups.

    Matrices have weight decay; vectors and model.no_weight_decay() have none. With layer_decay, the embedding is layer
    0, block i is layer i + 1, and the modules after the blocks are the last layer.
    """
    exempt, depth = model.no_weight_decay(), len(model.blocks)
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = _layer(name, depth) if config.layer_decay != 1 else depth + 1
            groups.setdefault((layer, parameter.dim() >= 2 and name not in exempt), []).append(parameter)
    found = []
    for (layer, decays), parameters in sorted(groups.items(), key=lambda item: (item[0][0], not item[0][1])):
        lr, weight_decay = config.lr * config.layer_decay ** (depth + 1 - layer), config.weight_decay * decays
        found.append({"params": parameters, "weight_decay": weight_decay, "lr": lr})
    return found


def _layer(name: str, depth: int) -> int:
    """Returns 0 for parameters before the blocks, depth + 1 for those after them."""
    first, *rest = name.split(".")
    if first == "blocks":
        return int(rest[0]) + 1
    return 0 if first in ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre") else depth + 1


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int, schedule: str = "cosine") -> float:
    """Returns the factor of lr: linear warm-up from 1/warmup_steps to 1, then cosine decay to 0 or constant 1."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
