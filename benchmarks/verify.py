"""`vit-fast verify`: compares backends with the fp64 reference on this machine, like `vit-fast bench` before timing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vit_fast.apps.data import sample_image
from vit_fast.errors import UnsupportedInputError, as_device
from vit_fast.measure.candidate import why_failed
from vit_fast.ops.backends import interpreter_is_active, resolve_backend, triton_unavailable_reasons
from vit_fast.variants import get_variant

from .candidates import CANDIDATES
from .models import Group, Model, describe_vit, image_views, resolve
from .preparation import check_once

BATCH = 2
OPERATORS = (
    *(f"attention:{tokens}x2x64" for tokens in (50, 197, 257, 577)),
    *(f"attention:50x2x{head_dim}" for head_dim in (32, 72, 80, 96, 128)),
    "attention:49x2x32:bias", "mlp:197x768x3072",
)  # fmt: skip
SMALL = "attention:50x1x64", "attention:50x1x80", "attention:49x1x32:bias", "mlp:20x64x128"  # for the interpreter


def verify(backends: Sequence[str] = ("triton",), device: str | torch.device | None = None) -> dict[str, Any]:
    """Compares backends with the fp64 reference on this machine; see vit_fast.accuracy.

    Returns device, interpreted, and rows. A row is the result of an operator or a model in a dtype: case, backend,
    dtype, max_error, allowed_error, reason (of a failure) and passed. A case that ends with "backward" compares
    gradients.
    """
    if not backends:
        raise ValueError("backends must contain at least one backend, got none")
    place = as_device(device or "auto")
    resolved = [resolve_backend(backend, place) for backend in backends]
    if "triton" in resolved and (reasons := triton_unavailable_reasons(place)):
        raise UnsupportedInputError("verify with backend='triton'", reasons)
    interpreted = place.type == "cpu" and "triton" in resolved
    rows = []
    for backend in resolved:
        # Triton's interpreter computes bf16 incorrectly; compiled kernels compute fp32 matmuls in TF32
        skipped = "bf16" if interpreted else "fp32" if backend == "triton" else None
        dtypes = [name for name in ("fp32", "fp16", "bf16") if name != skipped]
        for dtype, (model, training) in itertools.product(dtypes, _cases(interpreted)):
            group = Group(model, dtype, BATCH, training, device=place)
            images = image_views([sample_image()], model, BATCH).to(place, group.dtype)
            try:
                found = check_once(CANDIDATES[backend], group, [images])[1]._asdict()
            except Exception as error:  # a failed case gives a row; the next cases still run
                found = {"max_error": None, "allowed_error": None, "reason": why_failed(error)[1]}
            rows.append({
                "case": model.name + " backward" * training, "backend": backend, "dtype": dtype, **found,
                "passed": found["reason"] is None,
            })  # fmt: skip
    return {"device": str(place), "interpreted": interpreted and interpreter_is_active(), "rows": rows}


def _cases(small: bool) -> Iterator[tuple[Model, bool]]:
    """Yields models, each with False for inference, and operators also with True for their backward."""
    models = (model for word in (SMALL if small else OPERATORS) for model in resolve(word)(None))
    yield from itertools.product(models, (False, True))
    variant = get_variant("vit_test")
    for pooling in ("token", "map"):  # with "map", one query attends to all patches
        config = variant.config.replace(global_pool=pooling)
        yield describe_vit(f"vit_test, {pooling} pooling", config, variant.data), False
