"""Export of the result of `optimize`: an ONNX file or a PyTorch package."""

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
    result: Optimization, model: nn.Module, example: Any, folder: Path, image_files: tuple[Path, ...]
) -> list[Path]:
    """Writes a folder with the chosen candidate and its figures, optimize.json.

    A candidate of ONNX Runtime or OpenVINO becomes model.onnx, one of torch.compile an AOTInductor package model.pt2
    for `torch._inductor.aoti_load_package`, any other an exported program model.pt2 for `torch.export.load` (after
    `import vit_fast`, which registers the operators). Inputs must be in the candidate's precision. The caller sets
    threads, CUDA graphs and the splitting of batches, see optimize.json.

    Returns:
        The files.
    Raises:
        OSError: the folder exists or cannot be written.
        UnsupportedInputError: the model cannot be exported.
    """
    check_new_folder(folder)
    candidate = result.candidate
    with folder_aside(folder) as aside:
        images = only_images(example)
        if (candidate.runs_file or isinstance(model, OnnxFile)) and images is not None:
            path = aside / "model.onnx"
            write_onnx(candidate, model, path, images, image_files)
        else:
            path = aside / "model.pt2"
            _write_program(changed_copy(candidate, model, example, image_files), result, example, path)
        (aside / FIGURES).write_text(
            json.dumps(result.cached.to_dict() | {"name": candidate.name, "file": path.name}, indent=1) + "\n"
        )
        names = sorted(part.name for part in aside.iterdir())
    return [folder / name for name in names]


def _write_program(work: nn.Module, result: Optimization, example: Any, path: Path) -> None:
    candidate = result.candidate
    args, kwargs = arguments(example)
    if candidate.precision is not None:
        dtype = DTYPES[candidate.precision]
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, (args, kwargs)
        )
    try:
        with torch.no_grad():
            program = torch.export.export(work, args, kwargs)
    except Exception as error:  # of many types
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedInputError(f"export of {candidate.name!r}", [f"torch.export: {reason}"]) from None
    package = io.BytesIO()  # torch aborts the process if it cannot write a file
    if candidate.engine == "torch":
        torch.export.save(program, package)
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    path.write_bytes(package.getbuffer())
