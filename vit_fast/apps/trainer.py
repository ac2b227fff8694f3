"""Training steps of a model, in one process or several."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..errors import VitFastError
from ..model import VisionTransformer
from .processes import ALONE, Processes
from .train_config import TrainConfig


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
        """Measures loss and accuracy on held-out images, with the averaged weights if ema_decay is set.

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
