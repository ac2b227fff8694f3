"""Parses onnxscript's function library once per process: torch.onnx.export does so in every export."""

from __future__ import annotations

import functools

from torch.onnx._internal.exporter._registration import onnxscript_apis as apis

# `apis` imports onnxscript when an attribute is read; one that is set takes precedence over that of the module
apis.get_torchlib_ops = functools.cache(lambda: apis.__getattr__("get_torchlib_ops")())
