"""`vit-fast export`: exports a model to ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cli import AsJson, ClassNames, DataConfigFile, Side, argument, integers, model_name, option, split_words

if TYPE_CHECKING:
    from ..export import ExportReport
    from ..export.runtime.metadata import OnnxInfo


def export(
    model: Annotated[str | None, argument(
        "One of `vit-fast models`, a weights file of vit-fast, a Hugging Face Hub id, or module:function. The function "
        "returns a model, or a model and an example of its inputs.")] = None,
    out: Annotated[Path | None, option("The .onnx file to write.", "--out", "-o")] = None,
    weights: Annotated[str | None, option(
        "A file, a folder or a Hub id (default: MODEL if it is a file or Hub id, else random).")] = None,
    target: Annotated[str, option("Runtime to optimize for: generic, ort-cpu, ort-cuda or tensorrt.")] = "generic",
    precision: Annotated[str, option(
        "fp32, fp16, bf16, int8, int8-dynamic or fp8. In fp16, layers that can overflow on the verification images "
        "stay in fp32.")] = "fp32",
    calibrate: Annotated[list[Path] | None, option(
        "Image files or folders for int8 and fp8. Up to 32 of the images are for calibration, and up to 64 others for "
        "verification.")] = None,
    preprocess: Annotated[bool, option(
        "Include resizing and normalization: the file takes uint8 images of any size.", "--preprocess")] = False,
    returns: Annotated[str | None, option(
        "Outputs of the file: logits, probabilities, features (pooled), tokens, intermediate; separated by commas "
        "(default: logits, or what a model without head returns).")] = None,
    layers: Annotated[str | None, option(
        "Encoder blocks for intermediate, e.g. 2,5,8,11; with negative numbers, --layers=-4,-1.")] = None,
    normed: Annotated[bool, option("Apply the last norm to intermediate tokens.", "--normed")] = False,
    spatial: Annotated[bool, option("Output patch tokens as [B, C, rows, columns].", "--spatial")] = False,
    dynamic_size: Annotated[bool, option("Make height and width of the input dynamic.", "--dynamic-size")] = False,
    validation: Annotated[Path | None, option(
        "Labeled images, one subfolder per class. Fail if the file's top-1 accuracy is over 0.6 percentage points "
        "lower than the model's. A loss of one image is always allowed.")] = None,
    classes: ClassNames = None,
    img_size: Side = None,
    data_config: DataConfigFile = None,
    ir_version: Annotated[int | None, option(
        "Version of the ONNX format, for older runtimes. The opset is 20 or the newest that it allows.")] = None,
    verify: Annotated[bool, option(
        "Compare the file's output with the model's. --no-verify also skips the search for layers that overflow.",
        "--verify/--no-verify")] = True,
    triton_repository: Annotated[Path | None, option(
        "Also add the file to this model repository of NVIDIA Triton Inference Server.")] = None,
    card: Annotated[bool, option("Also write a model card: source, precision, checks and hashes.", "--card")] = False,
    inspect: Annotated[Path | None, option("Print the metadata of an ONNX file and exit.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Export a model to ONNX, and verify that the file's output matches the model's."""
    import torch

    from ..apps.classifiers import read_class_names
    from ..apps.data import channels_of, find_images
    from ..export import export_onnx, inspect_onnx, write_card, write_triton_repository
    from ..export.deployment import check_triton_repository
    from ..files import find_function, read_object
    from ..weights import create_model

    if inspect is not None:
        _print(inspect_onnx(inspect), as_json)
        return
    if model is None:
        model, weights = weights, None
    if model is None or out is None:
        raise ValueError("pass MODEL or --weights, and -o FILE.onnx; or pass --inspect FILE.onnx")
    model, function = model_name(model), find_function(model)
    if triton_repository is not None:
        check_triton_repository(triton_repository, out.stem, precision if target == "tensorrt" else None)
    if calibrate:
        find_images(calibrate)
    has_weights = function is not None or weights is not None or "/" in model  # a Hub id or a path has weights
    overrides: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    options: dict[str, Any] = {"precision": precision, "target": target, "output": split_words(returns)}
    built: Any = create_model(model, weights=weights, backend="sdpa", **overrides) if function is None else function()
    if isinstance(built, tuple):
        built, options["example"] = built
    elif function is not None and img_size is not None:
        options["example"] = torch.randn(1, channels_of(built), img_size, img_size)
    if data_config is not None:
        options["data_config"] = read_object(data_config)
        options["data_config"].pop("img_size", None)
    result = export_onnx(
        built, out, layers=integers("--layers", layers) or (), normed=normed, spatial=spatial, ir_version=ir_version,
        dynamic_size=dynamic_size, preprocess=preprocess, calibration=calibrate or None, validation=validation,
        class_names=None if classes is None else read_class_names(classes), verify=verify,
        source=model if has_weights and weights is None else f"{model}, {weights or 'random weights'}",
        **options,
    )  # fmt: skip
    if not has_weights:
        result.warnings.append("the weights are random: pass --weights")
    if triton_repository is not None:
        folder = write_triton_repository(out, triton_repository)
        typer.echo(f"wrote {folder} for Triton Inference Server", err=True)
    if card:
        typer.echo(f"wrote model card {write_card(out)}", err=True)
    _print(result, as_json)


def _print(described: ExportReport | OnnxInfo, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(described.to_dict(), indent=2, default=str))
    else:
        Console().print(described.to_table())
