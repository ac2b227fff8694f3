"""`vit-fast hf-kernel`: writes the operators as a repository for Hugging Face's `kernels` loader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def hf_kernel(folder: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")]) -> None:
    """Write the operators as a kernel of the Hugging Face Hub, ready to upload."""
    from ..apps.hub_kernel import NAME, build_hf_kernel

    variant = build_hf_kernel(folder)
    files = sum(1 for path in variant.rglob("*") if path.is_file())
    typer.echo(f"{NAME}: {files} files in {variant}")
    typer.echo(f"load it here: kernels.get_local_kernel(pathlib.Path({str(folder)!r}))")
