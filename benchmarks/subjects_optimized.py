"""What `vit_fast.optimize` found for this model, batch and machine, as a subject: its kept answer, built again.

A bench does not search; where no answer is kept, the row says which command finds one.
"""

from __future__ import annotations

import functools

import torch

from vit_fast.errors import UnsupportedInputError
from vit_fast.tuning import answers
from vit_fast.tuning.build import build as build_choice
from vit_fast.tuning.choices import PRECISIONS, Precision
from vit_fast.tuning.drop_in import Optimized

from . import subjects_given, subjects_ours
from .subjects import Subject, Task, register

# Share of the largest output: another number format, of which the search has judged the answers.
LOSSY_BUDGET = 0.35


def build(precision: Precision | None, task: Task) -> Optimized:
    """The model in the way that was found, in this number format.

    Raises:
        UnsupportedInputError: no answer is kept for it; or what was found cannot be had any more.
    """
    module = subjects_ours.build("eager", task) if task.model.config is not None else subjects_given.build(task)
    example = torch.zeros(task.batch_size, task.model.in_chans, *task.model.image_hw).to(task.device, task.dtype)
    answer = answers.find(module, example, precision)
    if answer is None:
        allowed = "" if precision is None else f" --allow {precision}"
        words = f"vit-fast optimize {task.model.name} --batch {task.batch_size}{allowed}"
        raise UnsupportedInputError("optimized", [f"no answer is kept for this here: {words} finds one"])
    with torch.no_grad():
        return build_choice(answer.choice, module, example, module(example), ())


for name in (None, *PRECISIONS):
    register(
        Subject(
            "optimized" if name is None else f"optimized-{name}",
            f"what vit_fast.optimize found here, {'at full precision' if name is None else f'in {name}'}",
            functools.partial(build, name),
            compilable=False,
            trainable=False,
            budget=None if name is None else (lambda eager_error, largest: LOSSY_BUDGET * largest),
            precision=name,
        )
    )
