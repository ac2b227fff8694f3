"""`vit-fast export`: exports a model to ONNX; `vit-fast hf-kernel`: writes the operators as a Hub kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .words import AsJson, ClassNames, Side, model_name


def export(
    model: Annotated[
        str | None,
        typer.Argument(help="One of `vit-fast models`, a weights file of vit-fast, or a Hugging Face Hub id."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The .onnx file to write.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="A weights file or a Hugging Face Hub id (default: random weights).")
    ] = None,
    target: Annotated[
        str, typer.Option(help="Runtime to optimize for: generic, ort-cpu, ort-cuda or tensorrt.")
    ] = "generic",
    precision: Annotated[str, typer.Option(help="fp32, fp16, bf16, int8, int8-dynamic or fp8.")] = "fp32",
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image files or folders for int8 and fp8: up to 32 for calibration, up to 64 others for checks."
        ),
    ] = None,
    preprocess: Annotated[
        bool,
        typer.Option(
            "--preprocess", help="Include resizing and normalization: the file takes uint8 images of any size."
        ),
    ] = False,
    returns: Annotated[
        str, typer.Option(help="Output of the file: logits, probabilities, or features (pooled).")
    ] = "logits",
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Make height and width of the input dynamic.")
    ] = False,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="Labeled images, one subfolder per class: fail if accuracy drops by more than 0.6 percentage points "
            "and more than one image."
        ),
    ] = None,
    classes: ClassNames = None,
    img_size: Side = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare the file's output with the model's.")
    ] = True,
    triton_repository: Annotated[
        Path | None, typer.Option(help="Also add the file to this model repository of NVIDIA Triton Inference Server.")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Also write a model card: source, precision, checks and hashes.")
    ] = False,
    inspect: Annotated[Path | None, typer.Option(help="Print the metadata of an ONNX file and exit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Export a model to ONNX, and verify that the file's output matches the model's."""
    if inspect is not None:
        from ..export import inspect_onnx

        _show(inspect_onnx(inspect), as_json)
        return
    if model is None:
        model, weights = weights, None
    if model is None or out is None:
        raise ValueError("pass MODEL or --weights, and -o FILE.onnx; or pass --inspect FILE.onnx")
    model = model_name(model)

    from ..apps.classifiers import read_class_names
    from ..apps.data import find_images
    from ..export import export_onnx, write_card, write_triton_repository
    from ..export.deployment import accelerator_mode, check_triton_repository
    from ..weights.factory import create_model

    if triton_repository is not None:
        check_triton_repository(triton_repository, out.stem)
        if target == "tensorrt":
            accelerator_mode(precision)
    if calibrate:
        find_images(calibrate)
    names = None if classes is None else read_class_names(classes)
    has_weights = weights is not None or "/" in model  # a Hub id or a path has weights
    overrides: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    report = export_onnx(
        create_model(model, weights=weights, backend="sdpa", **overrides),
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
        report.warnings.append("the weights are random: pass --weights")
    if triton_repository is not None:
        folder = write_triton_repository(out, triton_repository)
        typer.echo(f"wrote {folder} for Triton Inference Server", err=True)
    if card:
        typer.echo(f"wrote model card {write_card(out)}", err=True)
    _show(report, as_json)


def _show(result: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, default=str))
        return
    from rich.console import Console

    Console().print(result.to_table())


def hf_kernel(folder: Annotated[Path, typer.Argument(help="New or empty folder to write.")]) -> None:
    """Write the operators as a Hugging Face Hub kernel, ready to upload."""
    from ..apps.hub_kernel import NAME, build_hf_kernel

    variant = build_hf_kernel(folder)
    files = sum(1 for path in variant.rglob("*") if path.is_file())
    typer.echo(f"wrote {variant} ({NAME}, {files} files)")
    typer.echo(f"To load it, call kernels.get_local_kernel(pathlib.Path({str(folder)!r})).")
