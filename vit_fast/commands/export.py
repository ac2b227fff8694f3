"""`vit-fast export`: a model into an ONNX file, verified; or what an ONNX file says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .words import model_name


def register(app: typer.Typer) -> None:
    app.command(name="export")(export)


def export(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A variant of `vit-fast models`, a weights file that says its shape, or a Hugging Face Hub id."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The .onnx file to write.")] = None,
    weights: Annotated[str | None, typer.Option(help="A weights file or a Hugging Face Hub id; else random.")] = None,
    target: Annotated[str, typer.Option(help="generic, ort-cpu, ort-cuda or tensorrt.")] = "generic",
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16, int8, int8-dynamic or fp8.")] = "fp32",
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help="Images or folders: 32, spread evenly, give int8's and fp8's ranges, 64 others judge them."),
    ] = None,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="Take uint8 photographs of any size.")] = False,
    returns: Annotated[str, typer.Option(help="logits, probabilities, or features (pooled).")] = "logits",
    dynamic_size: Annotated[bool, typer.Option("--dynamic-size", help="Take any height and width.")] = False,
    validation: Annotated[
        Path | None,
        typer.Option(help="Labelled images, one subfolder a class: the file must not lose accuracy on them."),
    ] = None,
    classes: Annotated[Path | None, typer.Option(help="Class names: one a line, or JSON.")] = None,
    img_size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Hold the file against the model.")] = True,
    triton_repository: Annotated[
        Path | None, typer.Option(help="Also put the file into this NVIDIA Triton Inference Server repository.")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card beside the file: source, precision, checks, hashes.")
    ] = False,
    inspect: Annotated[Path | None, typer.Option(help="Print what an ONNX file says about itself, and stop.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Exports a model to ONNX and checks that the file computes what the model does."""
    if inspect is not None:
        from ..export import inspect_onnx

        _show(inspect_onnx(inspect), as_json)
        return
    if model is None:
        model, weights = weights, None
    if model is None or out is None:
        raise ValueError("export needs a MODEL or --weights, and -o FILE.onnx; or --inspect FILE.onnx")
    model = model_name(model)

    from ..apps.classifiers import read_class_names
    from ..apps.data import find_images
    from ..export import export_onnx, write_card, write_triton_repository
    from ..export.deployment import accelerator_mode, check_triton_repository

    if triton_repository is not None:
        check_triton_repository(triton_repository, out.stem)
        if target == "tensorrt":
            accelerator_mode(precision)
    if calibrate:
        find_images(calibrate)
    names = None if classes is None else read_class_names(classes)
    has_weights = weights is not None or "/" in model  # which brings its own
    made = _make_model(model, weights, img_size)
    report = export_onnx(
        made,
        out,
        dynamic_size=dynamic_size,
        precision=precision,  # type: ignore[arg-type]  # checked by export_onnx
        preprocess=preprocess,
        target=target,  # type: ignore[arg-type]  # checked by export_onnx
        output=returns,  # type: ignore[arg-type]  # checked by export_onnx
        calibration=calibrate or None,
        validation=validation,
        class_names=names,
        source=model if has_weights and weights is None else f"{model}, {weights or 'random weights'}",
        verify=verify,
    )
    if not has_weights:
        report.warnings.append("the weights are random: give --weights")
    if triton_repository is not None:
        folder = write_triton_repository(out, triton_repository)
        typer.echo(f"for Triton Inference Server: {folder}", err=True)
    if card:
        typer.echo(f"model card: {write_card(out)}", err=True)
    _show(report, as_json)


def _make_model(name: str, weights: str | None, img_size: int | None) -> Any:
    from ..weights.factory import create_model

    overrides: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    return create_model(name, weights=weights, backend="sdpa", **overrides)


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, default=str))
        return
    from rich.console import Console

    Console().print(result.to_table())
