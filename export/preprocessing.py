"""Preprocessing as part of the graph: from uint8 images of any size to the input of the model.

    [batch, height, width, channels] uint8 -> resize (antialiased) -> centre crop -> (x / 255 - mean) / std -> NCHW

Steps, order and rounding of sizes are those of `make_transform` in vit_fast/apps/data.py and of timm. Like Pillow,
Resize rounds to uint8; in ONNX Runtime, the result differs from Pillow's by at most one gray level.
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


def preprocessing_model(data_config: DataConfig, image_hw: Size, in_chans: int, opset: int) -> ir.Model:
    """Returns a model of the preprocessing alone; see write_preprocessing."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="preprocess")
    pixels, images = write_preprocessing(Writer(graph, "preprocess"), data_config, image_hw, in_chans, None)
    graph.inputs.append(pixels)
    graph.outputs.append(images)
    return ir.Model(graph, ir_version=10)


def write_preprocessing(
    write: Writer, data_config: DataConfig, image_hw: Size, in_chans: int, batch: int | None
) -> tuple[ir.Value, ir.Value]:
    """Adds the preprocessing for a fixed batch size, or for any if `batch` is None.

    Returns:
        The input "pixels" [batch, height, width, in_chans] uint8, and the output [batch, in_chans, *image_hw] fp32.
    Raises:
        UnsupportedInputError: ONNX's Resize does not support the interpolation, or mean and in_chans do not match.
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
    pixels = ir.val(PIXELS, ir.DataType.UINT8, [batch or BATCH, "height", "width", in_chans])
    planes = write.op("Transpose", pixels, perm=[0, 3, 1, 2])
    cropped = _crop(write, *_resize(write, planes, data_config, image_hw), image_hw)
    scale = write.constant((1 / (255 * std)).astype(np.float32), "scale")
    shift = write.constant((-mean / std).astype(np.float32), "shift")
    images = write.op("Add", write.op("Mul", _cast(write, cropped, ir.DataType.FLOAT), scale), shift)
    images.name, images.shape = f"{INPUT}.normalised", ir.Shape([batch or BATCH, in_chans, *image_hw])
    return pixels, images


def _resize(write: Writer, planes: ir.Value, data: DataConfig, image_hw: Size) -> tuple[ir.Value, ir.Value]:
    """Returns the resized planes and their (height, width)."""
    scaled_hw = [math.floor(side / data.crop_pct) for side in image_hw]
    shape = write.op("Shape", planes, dtype=ir.DataType.INT64)
    two, four = (write.constant([n], "axis") for n in (2, 4))
    hw = write.op("Slice", shape, two, four, dtype=ir.DataType.INT64)
    if data.crop_mode == "squash":
        new_hw = write.constant(scaled_hw, "resized_hw")
    elif scaled_hw[0] == scaled_hw[1]:
        # the shorter side becomes scaled_hw, the longer one int(scaled * long / short), as torchvision rounds
        short = write.op("ReduceMin", hw, keepdims=1)
        new_hw = write.op("Div", write.op("Mul", hw, write.constant([scaled_hw[0]], "short_side")), short)
    else:
        # like timm's ResizeKeepRatio: divide both sides by the smaller ratio, round half to even
        sides = _cast(write, hw, ir.DataType.DOUBLE)
        ratios = write.op("Div", sides, write.constant(np.asarray(scaled_hw, np.float64), "target_hw"))
        ratio = write.op("ReduceMin", ratios, keepdims=1)
        new_hw = _rounded(write, write.op("Div", sides, ratio))
    batch_and_channels = write.op("Slice", shape, write.constant([0], "axis"), two, dtype=ir.DataType.INT64)
    sizes = write.op("Concat", batch_and_channels, new_hw, axis=0)
    resized = write.op(
        "Resize", planes, None, None, sizes, mode=_MODES[data.interpolation],
        coordinate_transformation_mode="half_pixel", antialias=1, cubic_coeff_a=-0.5,
        exclude_outside=1,  # like Pillow; the default repeats the edge
    )  # fmt: skip
    return resized, new_hw


def _crop(write: Writer, resized: ir.Value, resized_hw: ir.Value, image_hw: Size) -> ir.Value:
    size = write.constant(list(image_hw), "crop_hw")
    margin = write.op("Sub", resized_hw, size)
    half = write.op("Div", _cast(write, margin, ir.DataType.DOUBLE), write.constant(np.asarray([2.0]), "two"))
    top_left = _rounded(write, half)
    return write.op("Slice", resized, top_left, write.op("Add", top_left, size), write.constant([2, 3], "axes"))


def _cast(write: Writer, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return write.op("Cast", value, to=dtype, dtype=dtype)


def _rounded(write: Writer, value: ir.Value) -> ir.Value:
    """Rounds half to even, like Python's round, to int64."""
    return _cast(write, write.op("Round", value), ir.DataType.INT64)
