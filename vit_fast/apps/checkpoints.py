"""Files of a training run, written after every epoch: checkpoint, log and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..files import check_replaceable, file_aside
from ..weights.load import save_tensors
from .processes import Processes
from .trainer import Trainer, TrainingError

CHECKPOINT, LOG, WEIGHTS = "checkpoint.pth", "log.jsonl", "model.safetensors"
Row = dict[str, Any]

_FORMAT = "vit-fast training 2"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # gathers shards
_CONTENT = {
    "config": dict, "about": dict, "model": dict, "average": dict, "optimizer": dict, "scheduler": dict, "step": int,
    "rows": list,
}  # fmt: skip


def start_run(out: Path, processes: Processes) -> None:
    """Checks that a run can start in a folder.

    Raises:
        TrainingError: the folder contains a run.
        OSError: the folder cannot be written.
    """
    if there := [name for name in (CHECKPOINT, LOG, WEIGHTS) if (out / name).exists()]:
        raise TrainingError(f"{out}: contains {', '.join(there)} of an earlier run: pass --resume, or another folder")
    processes.wait()  # before the first process writes
    check_replaceable(out / CHECKPOINT)


def resume_run(out: Path, trainer: Trainer, about: Mapping[str, Any]) -> list[Row]:
    """Restores a trainer to the end of the run's last finished epoch.

    Args:
        about: Properties of the run by name. They must be the same as in the interrupted run.
    Returns:
        The rows of the log.
    Raises:
        TrainingError: the checkpoint is missing, damaged, or of another run.
    """
    path = out / CHECKPOINT
    state = _read(path)
    compared = {"the config": (state["config"], asdict(trainer.config))}
    compared |= {f"the {name}": (state["about"].get(name), value) for name, value in about.items()}
    pairs = ((name, old, new) for name, (old, new) in compared.items() if old != new)
    if different := "; ".join(f"{name} ({_difference(old, new)})" for name, old, new in pairs):
        advice = "use the same settings, or another folder"
        raise TrainingError(f"{path}: belongs to a run with other settings: {different}: {advice}")
    wanted = {name: tensor.shape for name, tensor in trainer.model.state_dict().items()}
    for part in ("model", "average") if trainer.averages else ("model",):
        if {name: getattr(tensor, "shape", None) for name, tensor in state[part].items()} != wanted:
            raise TrainingError(f"{path}: does not fit this model: its {part} has tensors of other names or shapes")
    try:
        if trainer.averages:
            set_model_state_dict(trainer.model, state["average"], options=_WHOLE)
            trainer.averages = [parameter.detach().clone() for parameter in trainer.parameters]
        set_model_state_dict(trainer.model, state["model"], options=_WHOLE)
        set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"], options=_WHOLE)
        trainer.scheduler.load_state_dict(state["scheduler"])
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise TrainingError(f"{path}: does not fit this model: {error}") from None
    trainer.step_count = state["step"]
    rows: list[Row] = state["rows"]
    return rows


def write_run(out: Path, trainer: Trainer, rows: list[Row], about: Mapping[str, Any], *, best: bool) -> None:
    """Writes the files of a run, each atomically.

    The checkpoint is written last, so an interruption before that repeats the epoch.

    Args:
        about: See resume_run.
        best: True to save these weights.
    """
    average: Any = get_model_state_dict(trainer.model, options=_WHOLE)
    model = average
    if trainer.averages:
        with trainer.averaged():
            then: Any = get_model_state_dict(trainer.model, options=_WHOLE)
            average = {name: tensor.clone() for name, tensor in then.items()}  # on a CPU, these are the model's tensors
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer, options=_WHOLE)
    if trainer.processes.rank == 0:
        state = {
            "format": _FORMAT, "config": asdict(trainer.config), "about": dict(about), "model": model,
            "average": average if trainer.averages else {}, "optimizer": optimizer,
            "scheduler": trainer.scheduler.state_dict(), "step": trainer.step_count, "rows": rows,
        }  # fmt: skip
        with file_aside(out / CHECKPOINT, RuntimeError) as checkpoint:
            torch.save(state, checkpoint)
            if best:
                save_tensors(trainer.model, average, out / WEIGHTS)
            with file_aside(out / LOG) as log:
                log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trainer.processes.wait()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise TrainingError(f"{path}: no such file: there is no run to resume")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for a damaged file, torch.load raises exceptions of many types
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingError(f"{path}: cannot be read (damaged, or not a checkpoint): {first}") from None
    has_format = isinstance(state, dict) and state.get("format") == _FORMAT
    if not has_format or not all(isinstance(state.get(name), kind) for name, kind in _CONTENT.items()):
        raise TrainingError(f"{path}: must be a checkpoint of vit-fast train")
    return state


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        return ", ".join(sorted({str(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}))
    return f"{old!r}, here {new!r}"
