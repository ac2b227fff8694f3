"""Training on a folder of images, one subfolder a class: AdamW, warm-up and cosine decay, resumable to the bit.

What is random depends on the seed, the epoch and the image alone, so that a run can be repeated, resumed, and compared
step by step between backends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .errors import VitFastError
from .image_folder import ImageFolder, mixed_seed
from .model import VisionTransformer
from .weights import save

MAX_GRAD_NORM = 1.0  # of all gradients together
CHECKPOINT, LOG, WEIGHTS = "checkpoint.pth", "log.jsonl", "model.safetensors"


class TrainingError(VitFastError, RuntimeError):
    """Training cannot go on, or not be resumed from here."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train.

    Attributes:
        epochs: Passes over the images.
        batch_size: Images a step; an epoch's last batch may be smaller.
        lr: Learning rate at the end of the warm-up.
        weight_decay: Of matrices; biases, norms, LayerScale, tokens and positions have none.
        warmup_epochs: The rate rises linearly from 0 over these, then falls along a cosine to 0.
        dtype: Autocast dtype of the forward pass; "float32" means no autocast.
        grad_checkpointing: Recompute blocks in the backward pass instead of keeping their activations.
        augment: Random crops of 35 to 100 percent of the image and random mirroring; else the evaluation transform.
        seed: Of order, augmentation, dropout and drop path.

    Raises:
        ValueError: A field is not acceptable.
    """

    epochs: int = 10
    batch_size: int = 64
    lr: float = 5e-4
    weight_decay: float = 0.05
    warmup_epochs: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    grad_checkpointing: bool = False
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: accepted is an integer >= 1")
        for name, exclusive in (("lr", True), ("weight_decay", False), ("warmup_epochs", False)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (exclusive and value == 0):
                raise ValueError(f"{name}={value}: accepted is a {'positive' if exclusive else 'non-negative'} number")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: accepted are 'float32', 'bfloat16'")


class Trainer:
    """One model's optimisation, step by step; any module that turns images into logits.

    Args:
        model: Trained in place, where it is.
        config: How.
        total_steps: Over which the learning rate runs.
        warmup_steps: Over which it rises.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, total_steps: int, warmup_steps: int) -> None:
        self.model, self.config = model, config
        self.optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, warmup_steps, total_steps)
        )
        if isinstance(model, VisionTransformer):
            model.set_grad_checkpointing(config.grad_checkpointing)
        self.step_count = 0

    def step(self, images: Tensor, labels: Tensor) -> float:
        """One update from images [B, C, H, W] and labels [B]; the loss before it.

        Raises:
            TrainingError: the loss is not finite; nothing was updated.
        """
        self.model.train()
        device = next(self.model.parameters()).device
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        if not loss.isfinite():
            raise TrainingError(f"step {self.step_count}: the loss is {loss.item()}; a smaller lr may help")
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step_count += 1
        return loss.item()

    @torch.no_grad()
    def accuracy(self, loader: DataLoader[tuple[Tensor, int]]) -> float:
        """The share of images whose most probable class is theirs."""
        self.model.eval()
        device = next(self.model.parameters()).device
        right = [(self.model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader]
        return sum(right) / len(loader.dataset)  # type: ignore[arg-type]  # a Dataset with a length


def train(
    model: VisionTransformer,
    folder: Path,
    out: Path,
    config: TrainConfig,
    *,
    validation: Path | None = None,
    resume: bool = False,
    on_epoch: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Trains on a folder and writes model.safetensors, checkpoint.pth and log.jsonl, after every epoch.

    Args:
        model: As many classes as the folder; it gets the folder's class names.
        folder: See ImageFolder.
        out: Made if missing; an earlier run in it is resumed or refused, never overwritten.
        config: How.
        validation: A folder with the same classes, to measure accuracy on.
        resume: Go on after the last finished epoch in out.
        on_epoch: Called with each new row of the log.
    Returns:
        A row an epoch: epoch, loss (mean over its images), lr (at its end), accuracy (of validation, or None).
    Raises:
        ImageError: an image or a folder is not usable.
        TrainingError: out holds another run, or the loss is not finite.
        ValueError: model and folder differ in classes.
    """
    dataset = ImageFolder(folder, model, augment=config.augment, seed=config.seed)
    held_out = None if validation is None else _validation_loader(validation, model, dataset, config)
    if model.config.num_classes != len(dataset.class_names):
        raise ValueError(f"the model has {model.config.num_classes} classes, {folder} has {len(dataset.class_names)}")
    model.class_names = dataset.class_names
    per_epoch = math.ceil(len(dataset) / config.batch_size)
    trainer = Trainer(model, config, config.epochs * per_epoch, round(config.warmup_epochs * per_epoch))
    out.mkdir(parents=True, exist_ok=True)
    rows = _resume(out, trainer) if resume else _start(out)
    for epoch in range(len(rows), config.epochs):
        torch.manual_seed(mixed_seed(config.seed, epoch))  # dropout and drop path
        dataset.epoch = epoch
        order = torch.Generator().manual_seed(mixed_seed(config.seed, epoch))
        loader = DataLoader(dataset, config.batch_size, shuffle=True, generator=order)
        losses = [(trainer.step(images, labels), len(labels)) for images, labels in loader]
        row = {
            "epoch": epoch,
            "loss": sum(loss * count for loss, count in losses) / len(dataset),
            "lr": trainer.scheduler.get_last_lr()[0],
            "accuracy": None if held_out is None else trainer.accuracy(held_out),
        }
        rows.append(row)
        _write(out, trainer, rows)
        on_epoch(row)
    model.eval()
    return rows


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; vectors and what model.no_weight_decay() names, without."""
    exempt = model.no_weight_decay() if isinstance(model, VisionTransformer) else set()
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.dim() < 2 or name in exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """Linear from 1/warmup_steps to 1, then half a cosine down to 0 at total_steps."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _validation_loader(
    folder: Path, model: VisionTransformer, dataset: ImageFolder, config: TrainConfig
) -> DataLoader[tuple[Tensor, int]]:
    held_out = ImageFolder(folder, model)
    if held_out.class_names != dataset.class_names:
        raise ValueError(f"{folder} has classes {held_out.class_names}, training {dataset.class_names}")
    return DataLoader(held_out, config.batch_size)


def _start(out: Path) -> list[dict[str, Any]]:
    if there := [name for name in (CHECKPOINT, LOG, WEIGHTS) if (out / name).exists()]:
        raise TrainingError(f"{out}: holds {', '.join(there)} of an earlier run: resume it, or name another folder")
    return []


def _resume(out: Path, trainer: Trainer) -> list[dict[str, Any]]:
    path = out / CHECKPOINT
    if not path.is_file():
        raise TrainingError(f"{path}: no such file, nothing to resume")
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["config"] != asdict(trainer.config):
        changed = [name for name, value in asdict(trainer.config).items() if state["config"].get(name) != value]
        raise TrainingError(f"{path}: was made with another {', '.join(changed)}; resuming changes nothing")
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.step_count = state["step"]
    rows: list[dict[str, Any]] = state["rows"]
    return rows


def _write(out: Path, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
    """Everything beside first, then renamed."""
    state = {
        "config": asdict(trainer.config),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "step": trainer.step_count,
        "rows": rows,
    }
    beside = out / f".{CHECKPOINT}.partial"
    torch.save(state, beside)
    beside.replace(out / CHECKPOINT)
    if isinstance(trainer.model, VisionTransformer):
        save(trainer.model, out / WEIGHTS)
    beside = out / f".{LOG}.partial"
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    beside.replace(out / LOG)
