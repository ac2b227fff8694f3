"""Compares the backends with the fp64 reference on this machine, with the accuracy rule of vit_fast/accuracy.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, judge
from ..errors import UnsupportedInputError, as_device
from ..ops.backends import interpreter_is_active, resolve_backend, triton_unavailable_reasons
from ..weights import create_model

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Case = tuple[str, Callable[..., Tensor], list[Tensor]]  # name, function, and its inputs


def verify(backends: Sequence[str] = ("triton",), device: str | torch.device | None = None) -> dict[str, Any]:
    """Compares backends with the fp64 reference on this machine.

    Returns device, interpreted, and rows. A row is the result of one operator or model, shape and dtype. Its `ratio` is
    the error divided by eager's error, or None if eager is exact.
    """
    if not backends:
        raise ValueError("backends must contain at least one backend, got none")
    place = as_device(device or "auto")
    resolved = [resolve_backend(backend, place) for backend in backends]
    if "triton" in resolved and (reasons := triton_unavailable_reasons(place)):
        raise UnsupportedInputError("verify with backend='triton'", reasons)
    interpreted = place.type == "cpu" and "triton" in resolved
    rows: list[dict[str, Any]] = []
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)  # all inputs are drawn on the CPU, so GPUs keep their generators' states
        for backend in resolved:
            # Triton's interpreter computes bf16 incorrectly; compiled kernels compute fp32 matmuls in TF32
            names = ("fp32", "fp16") if interpreted else ("fp16", "bf16") if backend == "triton" else tuple(_DTYPES)
            rows += [row for name in names for case in _cases(place, interpreted) for row in _rows(case, backend, name)]
    return {"device": str(place), "interpreted": interpreted and interpreter_is_active(), "rows": rows}


def _rows(case: Case, backend: str, dtype_name: str) -> Iterator[dict[str, Any]]:
    """Yields the result of a case and, for an operator, of the gradient of its first input."""
    name, function, inputs = case
    dtype, problem, runs = _DTYPES[dtype_name], None, []
    titles = (name,) if name.startswith("VisionTransformer") else (name, f"{name} gradient")
    try:
        for on, at in ((backend, dtype), ("eager", dtype), ("eager", torch.float64)):
            first, *others = (tensor.to(dtype).to(at) for tensor in inputs)
            with torch.set_grad_enabled(len(titles) == 2):
                out = function(first.requires_grad_(len(titles) == 2), *others, backend=on)
            runs.append([out.detach(), *(torch.autograd.grad(out.square().sum(), first) if out.requires_grad else ())])
    except Exception as error:  # a failed case gives a row; the next cases still run
        problem = f"{type(error).__name__}: {error}"
    for i, title in enumerate(titles):
        row: dict[str, Any] = {"case": title, "backend": backend, "dtype": dtype_name}
        row |= dict.fromkeys(("error", "eager_error", "allowed", "ratio")) | {"problem": problem, "passed": False}
        if problem is None:
            verdict = judge(runs[0][i], runs[1][i], runs[2][i], (FORWARD_FACTOR, GRADIENT_FACTOR)[i])
            row |= vars(verdict) | {"passed": verdict.passed}
            row["ratio"] = verdict.error / verdict.eager_error if verdict.eager_error else None
        yield row


def _cases(device: torch.device, small: bool) -> Iterator[Case]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(device)

    tokens = (50,) if small else (50, 197, 257, 577)
    head_dims = (80,) if small else (32, 72, 80, 96, 128)
    for n, head_dim in [(n, 64) for n in tokens] + [(tokens[0], head_dim) for head_dim in head_dims]:
        yield f"attention_qkvpacked B2 N{n} H2 D{head_dim}", ops.attention_qkvpacked, [draw(2, n, 3, 2, head_dim)]
    q, k, v = draw(2, 2, 1, 64), draw(2, 2, 196, 64), draw(2, 2, 196, 64)
    yield "attention B2 N_q1 N_kv196 H2 D64", ops.attention, [q, k, v]
    rows, width, hidden = (40, 64, 128) if small else (394, 768, 3072)
    parameters = [
        1 + 0.1 * draw(width), 0.1 * draw(width), draw(hidden, width) / width**0.5, 0.1 * draw(hidden),
        draw(width, hidden) / hidden**0.5, 0.1 * draw(width),
    ]  # fmt: skip
    yield f"layer_norm_mlp M{rows} C{width} F{hidden}", ops.layer_norm_mlp, [draw(rows, width), *parameters]
    weights = create_model("vit_test").to(device).state_dict()

    def model(images: Tensor, *values: Tensor, backend: str) -> Tensor:
        built = create_model("vit_test", backend=backend).to(device, images.dtype)
        built.load_state_dict(dict(zip(weights, values)))
        return built(images)

    yield "VisionTransformer, 2 blocks, C64 N17", model, [draw(2, 3, 32, 32), *weights.values()]
