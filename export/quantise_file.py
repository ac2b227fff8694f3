"""A file in int8: what export_onnx does to the graph of a model, done to a graph that was exported by anybody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from vit_fast.config import DataConfig
from vit_fast.errors import UnsupportedInputError

from . import model_files
from .metadata import inspect_onnx
from .options import ExportOptions, Target
from .photographs import CALIBRATION_IMAGES, as_inputs, photographs
from .quantise import Quantised, quantise
from .signature import read_signature


def quantise_file(source: Path, path: Path, target: Target, files: Sequence[Path]) -> Quantised:
    """Writes a floating file again with its linears over tokens in int8.

    Args:
        source: A file that takes prepared images [B, channels, height, width] in fp32.
        path: The file to write.
        target: See export_onnx.
        files: Image files that ranges are measured on.
    Raises:
        UnsupportedInputError: the file takes other inputs, or has no such linears.
        ModelFileError: the file is missing, damaged, unsafe, or takes no images.
    """
    proto = model_files.read_proto(source)
    info = inspect_onnx(source)
    signature = read_signature(info)
    reasons = []
    if signature.dtype != np.float32:
        reasons.append(f"it takes {signature.dtype}: accepted are prepared images in float32")
    elif signature.image_hw is None:
        reasons.append("it leaves the size of its images open: accepted is one size")
    version = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    try:
        options = ExportOptions(
            opset=version, dynamic_batch=True, dynamic_size=False, precision="int8", preprocess=False, target=target,
            output="logits", external_data=None,
        )  # fmt: skip
    except ValueError as error:
        reasons.append(str(error))
    if reasons or signature.image_hw is None:
        raise UnsupportedInputError(f"int8 of {source.name}", reasons)
    data: Any = info.data_config
    data = data if data is None or isinstance(data, DataConfig) else DataConfig.from_dict(data)
    inputs = as_inputs(photographs(files, CALIBRATION_IMAGES), data, signature.image_hw, signature.in_chans)
    graph = ir.external_data.load_to_model(ir.load(source))
    size = signature.shape[0] or 1
    try:
        done = quantise(graph, options, [one.numpy() for one in inputs.split(size) if len(one) == size], ())
    except ValueError as error:  # there is nothing in it that could be
        raise UnsupportedInputError(f"int8 of {source.name}", [str(error)]) from None
    model_files.save(graph, path, model_files.weight_bytes(graph) > model_files.PROTOBUF_LIMIT)
    return done
