"""The chosen candidate in a form that runs without the search: an ONNX file, or torch's own package."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedInputError
from ..files import check_new_folder, folder_aside
from .build import changed_copy
from .candidate import DTYPES
from .optimization import Optimization
from .optimized import arguments, only_images
from .runtimes import OnnxFile, write_onnx

FIGURES = "optimize.json"


def write(
    result: Optimization, model: nn.Module, example: Any, folder: Path, photographs: tuple[Path, ...]
) -> list[Path]:
    """Writes a folder with what was chosen and its figures.

    What a runtime of files runs as model.onnx (of a file that stays as it is, a copy); what torch.compile runs as an
    AOTInductor package, model.pt2, for `torch._inductor.aoti_load_package`; what torch runs as an exported program,
    model.pt2, for `torch.export.load` (after `import vit_fast`, whose operators are in it). Inputs are in the choice's
    number format; threads, CUDA graphs and the splitting of batches are the caller's, and stand in optimize.json.

    Returns:
        The files.
    Raises:
        OSError: the folder is taken or cannot be written.
        UnsupportedInputError: torch cannot export the model, for instance.
    """
    check_new_folder(folder)
    choice = result.choice
    with folder_aside(folder) as aside:
        images = only_images(example)
        if (choice.runs_file or isinstance(model, OnnxFile)) and images is not None:
            path = aside / "model.onnx"
            write_onnx(choice, model, path, images, photographs)
        else:
            path = aside / "model.pt2"
            _write_program(changed_copy(choice, model, example, photographs), result, example, path)
        (aside / FIGURES).write_text(
            json.dumps(result.answer.to_dict() | {"name": choice.name, "file": path.name}, indent=1) + "\n"
        )
        names = sorted(part.name for part in aside.iterdir())
    return [folder / name for name in names]


def _write_program(work: nn.Module, result: Optimization, example: Any, path: Path) -> None:
    choice = result.choice
    args, kwargs = arguments(example)
    if choice.precision is not None:
        dtype = DTYPES[choice.precision]
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, (args, kwargs)
        )
    try:
        with torch.no_grad():
            program = torch.export.export(work, args, kwargs)
    except Exception as error:  # torch raises many kinds for what it cannot trace
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedInputError(f"export of {choice.name!r}", [f"torch.export: {reason}"]) from None
    package = io.BytesIO()  # torch ends the process if it cannot write its own file
    if choice.engine == "torch":
        torch.export.save(program, package)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    path.write_bytes(package.getbuffer())
