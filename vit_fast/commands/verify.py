"""`vit-fast verify`: verifies the accuracy of the backends on this machine."""

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
    """Compare operators and a model with the fp64 reference. Exits with 1 if an error is too large."""
    import torch

    if not torch.cuda.is_available() and "triton" in backend:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: without a GPU nothing else runs

    from ..apps.verify import verify as run

    result = run(backend.split(","))
    if as_json:
        rows = [asdict(row) | {"ratio": row.ratio, "passed": row.passed} for row in result.rows]
        typer.echo(json.dumps({"device": result.device, "interpreted": result.interpreted, "rows": rows}, indent=2))
    else:
        if result.interpreted:
            typer.echo("no GPU: Triton's interpreter, small shapes, no bf16 (incorrect in the interpreter)")
        for row in result.rows:
            verdict = "pass" if row.passed else "FAIL"
            head = f"{verdict}  {row.backend:6s} {row.dtype}  {row.subject:52s}"
            if row.problem is not None:
                typer.echo(f"{head} {row.problem}")
            else:
                ratio = "eager is exact" if row.ratio is None else f"{row.ratio:.2f} x eager's"
                typer.echo(f"{head} error {row.error:.1e} = {ratio}")
        typer.echo(f"{sum(row.passed for row in result.rows)} of {len(result.rows)} pass on {result.device}")
    if not result.passed:
        raise typer.Exit(1)
