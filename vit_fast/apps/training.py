"""Trains a VisionTransformer. A resumed run gives bitwise identical results.

Random numbers depend only on seed, epoch, image and rank, so a run can be repeated, resumed, and compared step by step
between backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ..arguments import check_integer
from ..model import VisionTransformer
from ..weights.source import read_file
from .checkpoints import WEIGHTS, Row, resume_run, start_run, write_run
from .data import batches_of
from .datasets import LabelledImages, PreparedImages, TrainingData, mixed_seed
from .processes import ALONE, Processes
from .train_config import TrainConfig
from .trainer import Measure, Trainer, TrainingError

__all__ = ["TrainConfig", "Trainer", "TrainingError", "train"]


def train(
    model: VisionTransformer,
    data: TrainingData,
    out: Path,
    config: TrainConfig,
    *,
    resume: bool = False,
    workers: int = 0,
    processes: Processes = ALONE,
    on_step: Callable[[int, int, int, Measure], None] = lambda epoch, step, steps, measure: None,
    on_epoch: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Trains a model, and writes model.safetensors, checkpoint.pth and log.jsonl after each epoch.

    Args:
        model: A model with one output per class of the data. Gets the data's class names, and finally the weights of
            model.safetensors.
        data: See open_data.
        out: Output folder, created if missing. Without `resume`, it must not contain a run.
        config: Settings.
        resume: True continues after the last finished epoch in out.
        workers: Additional processes that read images.
        processes: Processes of distributed training. Each gets a share of every batch; rank 0 writes the files.
        on_step: Called with epoch, step, steps per epoch, and measure.
        on_epoch: Called with each new row of the log.
    Returns:
        One row per epoch: epoch, loss and train_accuracy (running means over the epoch), lr at its end, and
        held_out_loss and accuracy, which are None without held-out images.
    Raises:
        ImageError: an image cannot be read.
        TrainingError: out contains another run, or the loss is not finite.
        ReaderLostError: a worker was killed; resume the run.
        ValueError: model and data have different numbers of classes, the model does not pool, or a setting does not
            fit the data or the number of processes.
    """
    if (classes := model.config.num_classes) != (labels := len(data.train.class_names)):
        raise ValueError(f"model and data must have the same number of classes, got {classes} and {labels}")
    if model.config.global_pool == "":
        raise ValueError("global_pool must not be '', which gives logits per token: use a model that pools")
    check_integer("workers", workers, 0)
    if config.patience and data.held_out is None:
        raise ValueError(f"patience must be 0 without held-out images, got {config.patience}")
    if config.batch_size % (processes.world * config.accumulation):
        parts = f"the number of processes times accumulation, {processes.world} x {config.accumulation}"
        raise ValueError(f"batch_size must be a multiple of {parts}, got {config.batch_size}")
    model.class_names = data.train.class_names
    images = PreparedImages(data.train, model, augment=config.augment, seed=config.seed)
    about = {"model": model.config.to_dict(), "classes": list(data.train.class_names), "images": len(data.train)}
    sampler: DistributedSampler[Any] = DistributedSampler(images, processes.world, processes.rank, seed=config.seed)
    loader = DataLoader(images, config.batch_size // processes.world, sampler=sampler, num_workers=workers)
    steps = len(loader)
    trainer = Trainer(model, config, config.epochs * steps, round(config.warmup_epochs * steps), processes)
    rows: list[Row] = resume_run(out, trainer, about) if resume else []
    if not resume:
        start_run(out, processes)
    for epoch in range(len(rows), config.epochs):
        if _has_stopped(rows, config.patience):
            break
        torch.manual_seed(mixed_seed(config.seed, epoch, processes.rank))  # mixup, dropout and drop path
        images.epoch = epoch  # restarted workers read it
        sampler.set_epoch(epoch)
        measures: list[Measure] = []
        for step, batch in enumerate(batches_of(loader)):
            measures.append(trainer.step(*batch))
            on_step(epoch, step, steps, measures[-1])
        seen = sum(measure.seen for measure in measures)
        held_out = None if data.held_out is None else _measure(trainer, data.held_out, workers)
        row: Row = {
            "epoch": epoch,
            "loss": sum(measure.loss * measure.seen for measure in measures) / seen,
            "train_accuracy": sum(measure.correct for measure in measures) / seen,
            "lr": trainer.scheduler.get_last_lr()[-1],
            "held_out_loss": None if held_out is None else held_out.loss,
            "accuracy": None if held_out is None else held_out.correct / held_out.seen,
        }
        rows.append(row)
        write_run(out, trainer, rows, about, best=kept_row(rows, config) is row)
        on_epoch(row)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, read_file(out / WEIGHTS).tensors, options=whole)  # type: ignore[arg-type]  # tensors are values
    model.eval()
    return rows


def kept_row(rows: list[Row], config: TrainConfig) -> Row:
    """Returns the row of the epoch whose weights are saved: the last one, or with patience the best one."""
    return rows[_best(rows) if config.patience else -1]


def _measure(trainer: Trainer, source: LabelledImages, workers: int) -> Measure:
    """Measures a share in each process. Ranks with fewer images repeat the first one and do not count it."""
    rank, world = trainer.processes.rank, trainer.processes.world
    own = list(range(rank, len(source), world))
    filled = own + [0] * (math.ceil(len(source) / world) - len(own))
    images: Subset[tuple[Tensor, int]] = Subset(PreparedImages(source, trainer.model), filled)
    loader = DataLoader(images, trainer.config.batch_size // world, num_workers=workers)
    return trainer.measure(batches_of(loader), len(own))


def _best(rows: list[Row]) -> int:
    return max(range(len(rows)), key=lambda epoch: rows[epoch]["accuracy"])


def _has_stopped(rows: list[Row], patience: int) -> bool:
    return bool(patience and rows) and len(rows) - 1 - _best(rows) >= patience
