"""Parses onnxscript's function library once per process: torch.onnx.export does so in every export."""

from __future__ import annotations

import functools
from typing import Any

from torch.onnx._internal.exporter import _registration


class _Once:
    def __init__(self, apis: Any) -> None:
        self._apis = apis
        self.get_torchlib_ops = functools.cache(lambda: apis.get_torchlib_ops())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._apis, name)


if not isinstance(_registration.onnxscript_apis, _Once):
    _registration.onnxscript_apis = _Once(_registration.onnxscript_apis)  # type: ignore[assignment]  # as it is used
