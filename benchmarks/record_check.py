"""The fields that tables, curves and comparisons take from a record of `vit-fast bench`, checked when it is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .rows import CHECKED_FIELDS, SPEED_FIELDS

_MISSING = object()
_MOST = sys.float_info.max  # JSON also holds longer integers
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda v: isinstance(v, str),
    "a flag": lambda v: isinstance(v, bool),
    "a list": lambda v: isinstance(v, list),
    "an object": lambda v: isinstance(v, dict),
    "a count": lambda v: isinstance(v, int) and v is not True and v >= 1,
    "a number >= 0": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= _MOST,
    "a number > 0": lambda v: v != 0 and _KINDS["a number >= 0"](v),
    "null": lambda v: v is None,
    "missing": lambda v: v is _MISSING,
}
_ABOUT = dict.fromkeys(("model", "dtype"), "a text") | dict.fromkeys(("batch", "requested_batch"), "a count")
_ABOUT |= {"data": "a text or missing"}
_ROW: dict[str, Any] = _ABOUT | dict.fromkeys(("subject", "task", "precision", "status", "compile_mode"), "a text")
_ROW |= {"img_size": ["a count"], "peer": "a flag"} | dict.fromkeys(("reason", "defect"), "a text or null")
_ROW |= {"images_per_s": "a number > 0 or null"}
# Of a measured row, first what none lacks; the lists where they are not null.
_RATES = dict.fromkeys(("images_per_s", "ms", "ms_p20", "ms_p80"), "a number > 0")
_FIGURES = dict.fromkeys((*CHECKED_FIELDS, *SPEED_FIELDS, "cold_s", "cold_MiB"), "a number >= 0 or null or missing")
_FIGURES |= _RATES | {"host_bound": "a flag or null or missing", "ratio_to_best_peer": "a number > 0 or null"}
_FIGURES |= dict.fromkeys(("verdict", "best_peer", "defect"), "a text or null")
_FIGURES |= dict.fromkeys(("samples_ms", "ratio_interval"), "a list or null")
_LISTS = {
    "samples_ms": ["a number > 0"],
    "ratio_interval": ("a number > 0", "a number > 0"),
    "explained": {
        "kernels": [("a text", "a text", "a number >= 0", "a number >= 0")],
        "least": {"*": ("a number >= 0", "a number >= 0")},
    },
}
_CEILINGS = {"matmul_TFLOP_per_s": {"*": "a number > 0"}, "copy_GB_per_s": "a number > 0"}
_CEILINGS |= dict.fromkeys(("copy_bytes", "matmul_size"), "a count")
_MACHINE = dict.fromkeys(("device", "date", "float32_matmul_precision"), "a text")
_MACHINE |= {"threads": "a count", "packages": "an object", "gpu": "an object or null", "commit": "a text or null"}
_CONTROL = {"img_size": "a list or missing", "resolution": "a number >= 0", "between_runs": "a number >= 0 or missing"}
_PLAN = {"images": ["a text"], "batch_sizes": "a list", "img_size": "a list or null or missing"}
_RECORD = {
    "vit_fast": "a text",
    "busy": ["a text"],
    "plan": _PLAN,
    "machine": _MACHINE,
    "controls": [_ABOUT | _CONTROL],
    "rows": [_ROW],
}


def check_bench(record: dict[str, Any]) -> None:
    """Checks a record of `vit-fast bench`.

    Raises:
        ValueError: names the field, what it must be and what came.
    """
    check(record, _RECORD | {"ceilings": _CEILINGS if record["ceilings"] else "an object"}, "")
    for number, row in enumerate(record["rows"]):
        if row["status"] == "measured":
            lists = {name: fields for name, fields in _LISTS.items() if row.get(name) is not None}
            check(row, _FIGURES | lists, f"rows[{number}]")


def check(value: Any, schema: Any, where: str) -> None:
    """Refuses what does not fit: a text names kinds, [one] is for every item, a tuple for each, "*" for every field."""
    kinds = schema if isinstance(schema, str) else "an object" if isinstance(schema, dict) else "a list"
    fits = any(_KINDS[kind](value) for kind in kinds.split(" or "))
    if not fits or (isinstance(schema, tuple) and len(value) != len(schema)):
        came = "nothing" if value is _MISSING else repr(value)[:60]
        raise ValueError(f"{where or 'the record'} must be {kinds}, got {came}")
    if isinstance(schema, dict):
        for name in value if "*" in schema else schema:
            check(value.get(name, _MISSING), schema.get("*") or schema[name], f"{where}.{name}".lstrip("."))
    elif not isinstance(schema, str):
        for number, item in enumerate(value):
            check(item, schema[number if isinstance(schema, tuple) else 0], f"{where}[{number}]")


def check_depth(value: Any, levels: int = 20) -> None:
    """Refuses values nested deeper than any record's.

    Raises:
        ValueError: they are.
    """
    if not levels:
        raise ValueError("values must be nested at most 20 deep, got more")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_depth(inner, levels - 1)
