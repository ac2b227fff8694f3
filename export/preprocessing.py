"""Preprocessing in the graph: uint8 images of any size -> the model's inputs.

    [batch, height, width, channels] uint8 -> resize (antialiased) -> centre crop -> (x / 255 - mean) / std -> NCHW

Steps, order and rounding of sizes are those of `make_transform` in vit_fast/apps/data.py and of timm. Resizes
uint8 values like Pillow. ONNX Runtime's antialiased Resize matches Pillow to one grey level.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from vit_fast.apps.data import per_channel
from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError

from .capture import BATCH, INPUT
from .graphs import Writer

PIXELS = "pixels"
_MODES = {"bicubic": "cubic", "bilinear": "linear"}  # not nearest: ONNX Runtime breaks ties differently from Pillow


def preprocessing_model(
    data_config: DataConfig, image_hw: Size, in_chans: int, opset: int, batch: int | None
) -> ir.Model:
    """Returns a graph from "pixels" [batch, height, width, in_chans] uint8 to [batch, in_chans, H, W] fp32.

    Args:
        data_config: Interpolation, crop, mean and standard deviation.
        image_hw: Height and width of the output.
        in_chans: Number of channels.
        opset: Opset version.
        batch: Fixed batch size, or None for any.
    Raises:
        UnsupportedInputError: ONNX's Resize does not support the filter, or mean and in_chans do not match.
    """
    problems = []
    if data_config.interpolation not in _MODES:
        problems.append(f"interpolation must be one of {', '.join(_MODES)} in ONNX, got {data_config.interpolation}")
    try:
        mean, std = (
            np.asarray(per_channel(values, in_chans)).reshape(1, -1, 1, 1)
            for values in (data_config.mean, data_config.std)
        )
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise UnsupportedInputError("preprocess=True", problems)
    pixels = ir.Value(
        name=PIXELS,
        type=ir.TensorType(ir.DataType.UINT8),
        shape=ir.Shape([BATCH if batch is None else batch, "height", "width", in_chans]),
    )
    graph = ir.Graph([pixels], [], nodes=[], opset_imports={"": opset}, name="preprocess")
    write = Writer(graph, "preprocess")
    planes = write.op("Transpose", pixels, perm=[0, 3, 1, 2])
    cropped = _crop(write, *_resize(write, planes, data_config, image_hw), image_hw)
    scale = write.constant((1 / (255 * std)).astype(np.float32), "scale")
    shift = write.constant((-mean / std).astype(np.float32), "shift")
    scaled = write.op("Mul", write.op("Cast", cropped, to=ir.DataType.FLOAT, dtype=ir.DataType.FLOAT), scale)
    images = write.op("Add", scaled, shift)
    images.name = f"{INPUT}.normalised"
    images.shape = ir.Shape([BATCH if batch is None else batch, in_chans, *image_hw])
    graph.outputs.append(images)
    return ir.Model(graph, ir_version=10)


def _resize(write: Writer, planes: ir.Value, data: DataConfig, image_hw: Size) -> tuple[ir.Value, ir.Value]:
    """Returns the resized planes and their (height, width)."""
    INT64 = ir.DataType.INT64
    scaled_hw = [math.floor(side / data.crop_pct) for side in image_hw]
    shape = write.op("Shape", planes, dtype=INT64)
    two, four = (write.constant([n], "axis") for n in (2, 4))
    hw = write.op("Slice", shape, two, four, dtype=INT64)
    if data.crop_mode == "squash":
        new_hw = write.constant(scaled_hw, "resized_hw")
    elif scaled_hw[0] == scaled_hw[1]:
        # the shorter side becomes scaled_hw, the longer one int(scaled * long / short), as torchvision rounds
        short = write.op("ReduceMin", hw, keepdims=1)
        new_hw = write.op("Div", write.op("Mul", hw, write.constant([scaled_hw[0]], "short_side")), short)
    else:
        # like timm's ResizeKeepRatio: divide both sides by the smaller ratio, round half to even
        ratios = write.op("Div", _double(write, hw), write.constant(np.asarray(scaled_hw, np.float64), "target_hw"))
        ratio = write.op("ReduceMin", ratios, keepdims=1)
        new_hw = write.op("Cast", write.op("Round", write.op("Div", _double(write, hw), ratio)), to=INT64, dtype=INT64)
    batch_and_channels = write.op("Slice", shape, write.constant([0], "axis"), two, dtype=INT64)
    sizes = write.op("Concat", batch_and_channels, new_hw, axis=0)
    resized = write.op(
        "Resize", planes, None, None, sizes, mode=_MODES[data.interpolation],
        coordinate_transformation_mode="half_pixel", antialias=1, cubic_coeff_a=-0.5,
        exclude_outside=1,  # like Pillow; the default repeats the edge
    )  # fmt: skip
    return resized, new_hw


def _crop(write: Writer, resized: ir.Value, resized_hw: ir.Value, image_hw: Size) -> ir.Value:
    INT64 = ir.DataType.INT64
    size = write.constant(list(image_hw), "crop_hw")
    margin = write.op("Sub", resized_hw, size)
    half = write.op("Div", _double(write, margin), write.constant(np.asarray([2.0]), "two"))
    top_left = write.op("Cast", write.op("Round", half), to=INT64, dtype=INT64)  # half to even, like Python's round
    cropped: ir.Value = write.op(
        "Slice", resized, top_left, write.op("Add", top_left, size), write.constant([2, 3], "axes")
    )
    return cropped


def _double(write: Writer, value: ir.Value) -> ir.Value:
    converted: ir.Value = write.op("Cast", value, to=ir.DataType.DOUBLE, dtype=ir.DataType.DOUBLE)
    return converted
