"""A pytest plugin that fuses every model that another project's test suite builds; see CONTRIBUTING.md."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import timm
import torchvision
import transformers
from torch import nn

import vit_fast


def fusing(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function after which a model is complete: one that returns the model, or a method of the model."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        result = build(*args, **kwargs)
        model = result if isinstance(result, nn.Module) else args[0]
        vit_fast.fuse(model, os.environ.get("FUSE_BACKEND", "sdpa"))
        return result

    return built


timm.create_model = timm.models.create_model = fusing(timm.create_model)
for cls, name in ((transformers.PreTrainedModel, "post_init"), (torchvision.models.VisionTransformer, "__init__")):
    setattr(cls, name, fusing(getattr(cls, name)))
