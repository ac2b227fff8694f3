"""A pytest plugin that fuses every model that another project's test suite builds; see CONTRIBUTING.md."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import vit_fast

# The function after which a model is complete: module, class and name, by library.
BUILDERS = {
    "transformers": ("transformers.modeling_utils", "PreTrainedModel", "post_init"),
    "timm": ("timm.models", None, "create_model"),
    "torchvision": ("torchvision.models.vision_transformer", "VisionTransformer", "__init__"),
}
COUNTS: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuse-backend", default="sdpa", help="backend: eager, sdpa, triton or auto")


def pytest_configure(config: pytest.Config) -> None:
    for library, (module, cls, name) in BUILDERS.items():
        if importlib.util.find_spec(library) is None:
            continue
        owner = importlib.import_module(module)
        owner = owner if cls is None else getattr(owner, cls)
        build = getattr(owner, name)

        @functools.wraps(build)
        def fusing(*args: Any, build: Callable[..., Any] = build, **kwargs: Any) -> Any:
            result = build(*args, **kwargs)
            report = vit_fast.fuse(
                result if isinstance(result, nn.Module) else args[0], config.getoption("--fuse-backend")
            )
            COUNTS.update({"models": 1, "parts fused": len(report.fused), "parts skipped": len(report.skipped)})
            return result

        setattr(owner, name, fusing)
        for loaded in list(sys.modules.values()):  # timm's function stands in several of its modules
            if cls is None and getattr(loaded, "__name__", "").startswith(library) and vars(loaded).get(name) is build:
                setattr(loaded, name, fusing)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = ", ".join(f"{COUNTS[what]} {what}" for what in ("models", "parts fused", "parts skipped"))
    terminalreporter.write_line(f"fuse_everything: {counts}")
