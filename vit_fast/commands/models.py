"""`vit-fast models`: lists the variants with their size and cost."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .words import AsJson


def models(
    pattern: Annotated[str, typer.Argument(help="Shell-style pattern, e.g. 'vit_base_*'.")] = "*",
    as_json: AsJson = False,
) -> None:
    """List models with parameters, GFLOP per image (2 per multiply-add), tokens and input size."""
    rows = model_rows(pattern)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return

    from .words import table, wide_console

    cells = [
        (
            row["model"],
            f"{row['parameters'] / 1e6:.1f}",
            f"{row['gflop_per_image']:.1f}",
            str(row["tokens"]),
            str(row["embed_dim"]),
            str(row["depth"]),
            str(row["num_heads"]),
            "x".join(map(str, row["img_size"])),
        )
        for row in rows
    ]
    titles = ("model", "Mparams", "GFLOP", "tokens", "width", "depth", "heads", "input")
    wide_console().print(table(f"{len(rows)} models", titles, cells))


def model_rows(pattern: str) -> list[dict[str, Any]]:
    """Returns a dictionary per matching model; counts parameters on the meta device.

    Raises:
        ValueError: no model matches; names the nearest.
    """
    from ..model import VisionTransformer
    from ..variants import get_variant, list_models
    from ..work import total, work

    names = list_models(pattern) or [pattern] * (get_variant(pattern) is not None)
    rows = []
    for name in names:
        config = get_variant(name).config
        model = _on_meta(VisionTransformer, config)
        rows.append(
            {
                "model": name,
                "parameters": sum(p.numel() for p in model.parameters()),
                "gflop_per_image": total(work(config, 1).values()).flop / 1e9,
                "tokens": config.seqlen,
                "embed_dim": config.embed_dim,
                "depth": config.depth,
                "num_heads": config.num_heads,
                "img_size": list(config.image_hw),
            }
        )
    return rows


def _on_meta(make: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return make(config)
