"""Preprocessing as an ONNX graph: from uint8 images of any size to the input of the model.

    [batch, height, width, channels] uint8 -> resize (antialiased) -> center crop -> (x / 255 - mean) / std -> NCHW

Steps, order and rounding of sizes match `make_transform` in vit_fast/apps/data.py, and timm. Like Pillow, Resize
rounds to uint8; in ONNX Runtime, the result differs from Pillow's by at most one gray level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from vit_fast.apps.data import per_channel
from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError

from .graphs import BATCH

MODES = {"bicubic": "cubic", "bilinear": "linear"}  # not nearest: ONNX Runtime breaks ties differently from Pillow

# the shorter side becomes scaled_hw, the longer side int(scaled * long / short), as in torchvision
SQUARE = """
    short = ReduceMin <keepdims = 1> (hw)
    product = Mul (hw, scaled_hw)
    resized_hw = Div (product, short)"""
# like timm's ResizeKeepRatio: divide both sides by the smaller ratio, round half to even
RECTANGLE = """
    sides = Cast <to = 11> (hw)
    target = Cast <to = 11> (scaled_hw)
    ratios = Div (sides, target)
    ratio = ReduceMin <keepdims = 1> (ratios)
    exact_hw = Div (sides, ratio)
    rounded_hw = Round (exact_hw)
    resized_hw = Cast <to = 7> (rounded_hw)"""
SQUASH = """
    resized_hw = Identity (scaled_hw)"""
# cubic_coeff_a and exclude_outside: like Pillow; by default, ONNX repeats the edge
GRAPH = """<ir_version: 10, opset_import: ["" : {opset}]>
preprocess (uint8[{batch}, height, width, {in_chans}] pixels) => (float[{batch}, {in_chans}, {image_hw}] images)
    <float[1, {in_chans}, 1, 1] scale = {{{scale}}}, float[1, {in_chans}, 1, 1] shift = {{{shift}}},
     int64[2] scaled_hw = {{{scaled_hw}}}, int64[2] crop_hw = {{{image_hw}}}, double two_parts = {{2.0}},
     int64[2] axes = {{2, 3}}, int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] four = {{4}}>
{{
    planes = Transpose <perm = [0, 3, 1, 2]> (pixels)
    shape = Shape (planes)
    hw = Slice (shape, two, four){resize}
    batch_and_channels = Slice (shape, zero, two)
    sizes = Concat <axis = 0> (batch_and_channels, resized_hw)
    resized = Resize <mode = "{mode}", coordinate_transformation_mode = "half_pixel", antialias = 1,
                      cubic_coeff_a = -0.5, exclude_outside = 1> (planes, , , sizes)
    margin = Sub (resized_hw, crop_hw)
    exact_margin = Cast <to = 11> (margin)
    half = Div (exact_margin, two_parts)
    rounded = Round (half)
    top_left = Cast <to = 7> (rounded)
    bottom_right = Add (top_left, crop_hw)
    cropped = Slice (resized, top_left, bottom_right, axes)
    levels = Cast <to = 1> (cropped)
    scaled = Mul (levels, scale)
    images = Add (scaled, shift)
}}"""


def preprocessing_model(
    data_config: DataConfig, image_hw: Size, in_chans: int, opset: int, batch: int | None = None
) -> ir.Model:
    """Returns a graph that preprocesses uint8 "pixels". `batch` None accepts any batch size."""
    if data_config.interpolation not in MODES:
        reason = f"interpolation must be one of {', '.join(MODES)} in ONNX, got {data_config.interpolation}"
        raise UnsupportedInputError("preprocess=True", [reason])
    mean, std = (per_channel(values, in_chans) for values in (data_config.mean, data_config.std))
    scaled_hw = [math.floor(side / data_config.crop_pct) for side in image_hw]
    keep_ratio = SQUARE if scaled_hw[0] == scaled_hw[1] else RECTANGLE
    lists: dict[str, Sequence[float]] = {
        "scale": [1 / (255 * s) for s in std], "shift": [-m / s for m, s in zip(mean, std)], "scaled_hw": scaled_hw,
        "image_hw": image_hw,
    }  # fmt: skip
    return ir.from_onnx_text(
        GRAPH.format(
            opset=opset, batch=batch or BATCH, in_chans=in_chans, mode=MODES[data_config.interpolation],
            resize=SQUASH if data_config.crop_mode == "squash" else keep_ratio,
            **{name: ", ".join(map(str, values)) for name, values in lists.items()},
        )
    )  # fmt: skip


def prepend(model: ir.Model, first: ir.Model) -> None:
    """Moves the nodes of `first` to the start of a model, and feeds its output into the model's only input."""
    nodes, constants = list(first.graph), list(first.graph.initializers.values())
    (pixels,), (images,), old = first.graph.inputs, first.graph.outputs, model.graph.inputs[0]
    for contents in (first.graph.outputs, first.graph.inputs, first.graph.initializers):
        contents.clear()
    first.graph.remove(nodes)
    for value in (*constants, *(node.outputs[0] for node in nodes)):
        value.name = f"preprocess.{value.name}"
    for value in constants:
        model.graph.register_initializer(value)
    model.graph.insert_before(model.graph[0], nodes)
    ir.convenience.replace_all_uses_with(old, images)
    model.graph.inputs[0] = pixels
