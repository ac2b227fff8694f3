"""Trains a VisionTransformer, and writes checkpoint, log and weights after every epoch.

On a CPU, a resumed run gives bitwise the same weights as an uninterrupted run. Random numbers depend only on seed,
epoch, image and rank, so that runs of several backends can be compared step by step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as shards
from torch.utils.data import DataLoader, DistributedSampler

from ..errors import check_choice, check_integer, known_fields
from ..files import check_replaceable, file_aside
from ..model import VisionTransformer
from ..weights.load import save_tensors
from ..weights.source import read_file
from .data import ImageError, ImageFolder, batches_of
from .datasets import PreparedImages, TrainingData, mixed_seed, unreadable
from .trainer import ALONE, Measure, Processes, TrainConfig, Trainer, TrainingError

CHECKPOINT, LOG, WEIGHTS = "checkpoint.pth", "log.jsonl", "model.safetensors"
LISTED, READ_BATCH = 20, 32  # images in an error; images per batch of the check
Row = dict[str, Any]
_FORMAT = "vit-fast training 2"
_WHOLE = shards.StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathers shards

RATES = {"drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"}  # of ViTConfig
# Recipes by variant.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    # as in tutorials on this variant: Adam with a constant learning rate
    "vit_mnist": {
        "epochs": 5, "batch_size": 128, "lr": 5e-3, "weight_decay": 0.0, "warmup_epochs": 0.0, "schedule": "constant",
        "max_grad_norm": 0.0, "augment": False,
    },
    "vit_micro_patch7_28": {"epochs": 60, "batch_size": 32, "lr": 2e-3, "warmup_epochs": 2.0},
}  # fmt: skip


def config_for(
    variant: str, given: Mapping[str, Any], settings: Iterable[str] = ()
) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the recipe of a variant, changed by `given` and by `settings` (NAME=VALUE), and rates of ViTConfig."""
    fields = {name: value for name, value in given.items() if value is not None}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set must be NAME=VALUE, got {setting}")
        if name in fields:
            raise ValueError(f"{name} must be set once, by --set or an option such as --lr, got --set {setting} too")
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text
    rates = {name: fields.pop(name) for name in RATES & fields.keys()}
    return TrainConfig(**{**RECIPES.get(variant, {}), **known_fields(TrainConfig, fields)}), rates


@contextmanager
def _default_device_cpu() -> Iterator[None]:
    with torch.device("cpu"):
        yield


@_default_device_cpu()  # torch's samplers need it, and a user may have set another one
def train(
    model: VisionTransformer, data: TrainingData, out: Path, config: TrainConfig, *, resume: bool = False,
    workers: int = 0, processes: Processes = ALONE, on_bad_image: str = "error",
    on_step: Callable[[int, int, int, Measure], None] = lambda epoch, step, steps, measure: None,
    on_epoch: Callable[[Row], None] = lambda row: None, on_skip: Callable[[list[str]], None] = lambda reasons: None,
) -> list[Row]:  # fmt: skip
    """Trains a model, and writes model.safetensors, checkpoint.pth and log.jsonl after each epoch.

    Args:
        model: A model with one output per class of the data. After training, it has the data's class names and the
            weights of model.safetensors.
        data: See open_data.
        out: Output folder, created if missing. Without `resume`, the folder must not contain a run.
        config: Settings.
        resume: Continue after the last finished epoch in `out`.
        workers: Additional processes that read images.
        processes: Processes of distributed training. Each process gets a part of every batch; rank 0 writes the files.
        on_bad_image: "error", or "skip" to train without image files that cannot be read. Before the first epoch, all
            files are decoded once, JPEG files at an eighth of their size.
        on_step: Called with epoch, step, steps per epoch, and the Measure of the step.
        on_epoch: Called with each new row of the log.
        on_skip: Called before the first epoch with the reasons of the skipped images.
    Returns:
        One row per epoch: epoch, loss, train_accuracy, lr, held_out_loss, accuracy. The training metrics are means over
        the epoch. held_out_loss and accuracy are of the validation images; None without them.
    Raises:
        ImageError: images cannot be read and on_bad_image is "error", or no image can be read.
        TrainingError: out contains another run, or the loss is not finite.
        ReaderLostError: a worker was killed; resume the run.
        ValueError: model and data have different numbers of classes, the model does not pool, or a setting is invalid.
    """
    check_integer("workers", workers, 0)
    check_choice("on_bad_image", on_bad_image, ("error", "skip"))
    _check_run(model, data, out, config, processes, resume)
    model.class_names = data.class_names
    images = PreparedImages(data.train, model, augment=config.augment, mirror=data.mirrored, seed=config.seed)
    unseen = None if data.held_out is None else PreparedImages(data.held_out, model)
    checked = [images] if unseen is None else [images, unseen]
    reasons = [reason for each in checked for reason in _drop_unreadable(each, workers, processes)]
    if reasons and (on_bad_image == "error" or not all(map(len, checked))):
        listed = "; ".join(reasons[:LISTED]) + ("; ..." if len(reasons) > LISTED else "")
        advice = "replace them, or pass on_bad_image='skip' (--on-bad-image skip)"
        raise ImageError(f"all images must be readable, got {len(reasons)} that are not: {listed}: {advice}")
    on_skip(reasons)
    about = {"model": model.config.to_dict(), "classes": list(data.class_names), "images": len(images)}
    sampler: DistributedSampler[Any] = DistributedSampler(images, processes.world, processes.rank, seed=config.seed)
    loader = DataLoader(images, config.batch_size // processes.world, sampler=sampler, num_workers=workers)
    steps = len(loader)
    trainer = Trainer(model, config, config.epochs * steps, round(config.warmup_epochs * steps), processes)
    rows: list[Row] = _resume(out, trainer, about) if resume else []
    processes.wait()  # before the first process writes
    check_replaceable(out / CHECKPOINT)
    for epoch in range(len(rows), config.epochs):
        if config.patience and rows and len(rows) - 1 - saved_epoch(rows, config) >= config.patience:
            break
        torch.manual_seed(mixed_seed(config.seed, epoch, processes.rank))  # mixup, dropout and drop path
        images.epoch = epoch  # restarted workers read it
        sampler.set_epoch(epoch)
        measures: list[Measure] = []
        for step, batch in enumerate(batches_of(loader)):
            measures.append(trainer.step(*batch))
            on_step(epoch, step, steps, measures[-1])
        held_out = None
        if unseen is not None:  # processes with fewer images repeat one of them and do not count it
            order: DistributedSampler[Any] = DistributedSampler(unseen, processes.world, processes.rank, shuffle=False)
            validation = DataLoader(unseen, loader.batch_size, sampler=order, num_workers=workers)
            own = len(range(processes.rank, len(unseen), processes.world))
            held_out = trainer.measure(batches_of(validation), own)
        seen = sum(measure.seen for measure in measures)
        row: Row = {
            "epoch": epoch, "loss": sum(measure.loss * measure.seen for measure in measures) / seen,
            "train_accuracy": sum(measure.correct for measure in measures) / seen,
            "lr": trainer.scheduler.get_last_lr()[-1], "held_out_loss": held_out and held_out.loss,
            "accuracy": held_out and held_out.correct / held_out.seen,
        }  # fmt: skip
        rows.append(row)
        _write(out, trainer, rows, about, save=saved_epoch(rows, config) == epoch)
        on_epoch(row)
    weights: Any = read_file(out / WEIGHTS).found[""]
    shards.set_model_state_dict(model, weights, options=shards.StateDictOptions(full_state_dict=True))
    trainer.set_mode(training=False)
    return rows


def _check_run(
    model: VisionTransformer, data: TrainingData, out: Path, config: TrainConfig, processes: Processes, resume: bool
) -> None:
    if (classes := model.config.num_classes) != (labels := len(data.class_names)):
        raise ValueError(f"model and data must have the same number of classes, got {classes} and {labels}")
    if model.config.global_pool == "":
        raise ValueError("global_pool must not be '', which gives logits per token: use a model that pools")
    if config.patience and data.held_out is None:
        raise ValueError(f"patience must be 0 without validation images, got {config.patience}")
    if config.batch_size % (processes.world * config.accumulation):
        parts = f"the number of processes times accumulation, {processes.world} x {config.accumulation}"
        raise ValueError(f"batch_size must be a multiple of {parts}, got {config.batch_size}")
    if not resume and (there := [name for name in (CHECKPOINT, LOG, WEIGHTS) if (out / name).exists()]):
        raise TrainingError(f"{out}: contains {', '.join(there)} of an earlier run: resume it, or use another folder")


def _drop_unreadable(images: PreparedImages, workers: int, processes: Processes) -> list[str]:
    """Decodes all image files, a part of them in each process; drops the unreadable ones, and returns the reasons."""
    folder = images.source
    if not isinstance(folder, ImageFolder):
        return []
    own: Any = range(processes.rank, len(folder), processes.world)
    loader = DataLoader(own, READ_BATCH, num_workers=workers, collate_fn=partial(unreadable, images=images))
    bad: dict[int, str] = {}
    for found in processes.gather([each for batch in batches_of(loader) for each in batch]):
        bad.update(found)
    images.source = copy.copy(folder)
    images.source.files = [file for index, file in enumerate(folder.files) if index not in bad]
    return [bad[index] for index in sorted(bad)]


def saved_epoch(rows: list[Row], config: TrainConfig) -> int:
    """Returns the epoch whose weights are saved: the last one, or with patience the best one."""
    return max(range(len(rows)), key=lambda epoch: rows[epoch]["accuracy"]) if config.patience else len(rows) - 1


def _resume(out: Path, trainer: Trainer, about: Mapping[str, Any]) -> list[Row]:
    """Restores a trainer to the end of the run's last finished epoch; returns the rows of the log."""
    path = out / CHECKPOINT
    if not path.is_file():
        raise TrainingError(f"{path}: no such file: there is no run to resume")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for a damaged file, torch.load raises exceptions of many types
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingError(f"{path}: cannot be read (damaged, or not a checkpoint): {first}") from None
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise TrainingError(f"{path}: must be a checkpoint of vit-fast train, in the format of this version")
    old = {**state["config"], **state["about"], **state["about"]["model"], "model": None}
    new = {**asdict(trainer.config), **about, **about["model"], "model": None}
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        different = ", ".join(f"{name} (was {old.get(name)!r}, now {new.get(name)!r})" for name in names)
        advice = "use the same settings, or another folder"
        raise TrainingError(f"{path}: belongs to a run with other settings: {different}: {advice}")
    if state["model"].keys() != trainer.model.state_dict().keys():
        raise TrainingError(f"{path}: does not fit this model: the checkpoint has other tensors")
    try:
        if trainer.averages:
            shards.set_model_state_dict(trainer.model, state["average"], options=_WHOLE)
            trainer.averages = [parameter.detach().clone() for parameter in trainer.parameters]
        shards.set_model_state_dict(trainer.model, state["model"], options=_WHOLE)
        shards.set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"], options=_WHOLE)
        trainer.scheduler.load_state_dict(state["scheduler"])
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise TrainingError(f"{path}: does not fit this model: {error}") from None
    trainer.step_count = state["step"]
    return state["rows"]


def _write(out: Path, trainer: Trainer, rows: list[Row], about: Mapping[str, Any], *, save: bool) -> None:
    """Writes the files of a run, each atomically, and the checkpoint last; the weights only if `save`."""
    average: Any = shards.get_model_state_dict(trainer.model, options=_WHOLE)
    model = average
    if trainer.averages:
        with trainer.averaged():
            then: Any = shards.get_model_state_dict(trainer.model, options=_WHOLE)
            average = {name: tensor.clone() for name, tensor in then.items()}  # on a CPU, these are the model's tensors
    optimizer = shards.get_optimizer_state_dict(trainer.model, trainer.optimizer, options=_WHOLE)
    if trainer.processes.rank == 0:
        state = {
            "format": _FORMAT, "config": asdict(trainer.config), "about": dict(about), "model": model,
            "average": average if trainer.averages else {}, "optimizer": optimizer,
            "scheduler": trainer.scheduler.state_dict(), "step": trainer.step_count, "rows": rows,
        }  # fmt: skip
        with file_aside(out / CHECKPOINT, RuntimeError) as checkpoint:
            torch.save(state, checkpoint)
            if save:
                save_tensors(trainer.model, average, out / WEIGHTS)
            with file_aside(out / LOG) as log:
                log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trainer.processes.wait()
