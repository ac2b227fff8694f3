"""Through which files and functions the tokens of a model go in the steady state; printed by a process with the
stand-in driver, as JSON: by what is done with the weights, [file, function] in order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vit_fast import create_model, freeze
from vit_fast.commands.host_time import MODEL, NARROW
from vit_fast.kernels.inspect import stand_in_driver

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(ROOT / folder for folder in ("vit_fast", "kernels", "export", "benchmarks"))  # not .venv beside them


def holds_tokens(value: Any) -> bool:
    """Whether it is a tensor that is no parameter, or such a one is in it."""
    if isinstance(value, tuple | list):
        return any(map(holds_tokens, value))
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def walk(model: torch.nn.Module, images: torch.Tensor) -> list[tuple[str, str]]:
    """The functions of ours that are handed tokens, in the order in which they are first called."""
    passed: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        ours = event == "call" and path.is_absolute() and any(map(path.resolve().is_relative_to, OURS))
        if ours and any(map(holds_tokens, frame.f_locals.values())):
            passed[str(path.resolve().relative_to(ROOT)), frame.f_code.co_qualname] = None

    with torch.inference_mode():
        for _ in range(4):  # what is compiled, recorded and kept
            model(images)
        sys.setprofile(note)
        model(images)
        sys.setprofile(None)
    return list(passed)


if __name__ == "__main__":
    stand_in_driver.install("sm_90")
    model = create_model(MODEL, backend="triton", depth=2, num_classes=10, **NARROW).bfloat16().eval()
    images = torch.zeros(1, 3, 32, 32, dtype=torch.bfloat16)
    walks = {"folded in every forward": walk(model, images)}
    freeze(model)
    print(json.dumps(walks | {"frozen": walk(model, images)}))
