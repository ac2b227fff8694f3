"""`vit-fast verify`: compares the backends with the fp64 reference on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from .words import AsJson


def verify(
    backend: Annotated[
        str, typer.Option(help="Backends to check, separated by commas: triton, sdpa, auto.")
    ] = "triton",
    as_json: AsJson = False,
) -> None:
    """Compare the operators and a small model with the fp64 reference.

    Without a GPU, the triton backend runs in Triton's interpreter. Exits with 1 if a case fails.
    """
    import torch

    if not torch.cuda.is_available() and "triton" in backend:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported

    from ..apps.verify import verify as run

    result = run(backend.split(","))
    if as_json:
        # "subject" is the former name of "case", for existing readers
        rows = [{"subject": row.case} | asdict(row) | {"ratio": row.ratio, "passed": row.passed} for row in result.rows]
        typer.echo(json.dumps({"device": result.device, "interpreted": result.interpreted, "rows": rows}, indent=2))
    else:
        if result.interpreted:
            typer.echo("No GPU found: using Triton's interpreter, with small shapes and without bf16.")
        for row in result.rows:
            verdict = "pass" if row.passed else "FAIL"
            head = f"{verdict}  {row.backend:6s} {row.dtype}  {row.case:52s}"
            if row.problem is not None:
                typer.echo(f"{head} {row.problem}")
            else:
                ratio = "eager is exact" if row.ratio is None else f"{row.ratio:.2f}x eager's error"
                typer.echo(f"{head} error {row.error:.1e} ({ratio})")
        typer.echo(f"{sum(row.passed for row in result.rows)} of {len(result.rows)} passed on {result.device}")
    if not result.passed:
        raise typer.Exit(1)
