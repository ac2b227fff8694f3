"""Holds the backends against fp64 eager on this machine: operators and a whole model, forward and gradients.

Every row gives the largest error of a backend, that of eager in the same dtype, and their ratio: the error budget. What
is allowed is the rule of vit_fast.accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, judge
from ..errors import UnsupportedInputError
from ..factory import create_model
from ..ops.backends import interpreter_is_active, resolve_backend, triton_unavailable_reasons

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SMALL_MODEL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}


@dataclass(frozen=True)
class Row:
    """One subject in one dtype.

    Attributes:
        subject: What was computed, with its shape.
        error: Largest absolute error against fp64 eager; eager_error is eager's own in that dtype.
        allowed: What the rule allows.
        problem: Why there is no error to show, if so.
    """

    subject: str
    backend: str
    dtype: str
    error: float | None = None
    eager_error: float | None = None
    allowed: float | None = None
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is not None and self.allowed is not None and self.error <= self.allowed

    @property
    def ratio(self) -> float | None:
        """The error in units of eager's own; None where eager has none."""
        return self.error / self.eager_error if self.error is not None and self.eager_error else None


@dataclass(frozen=True)
class Verification:
    """All rows, and what they were measured on."""

    device: str
    interpreted: bool
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def verify(backends: Sequence[str] = ("triton",), device: str | torch.device | None = None) -> Verification:
    """Compare backends with fp64 eager on this machine.

    Args:
        backends: "sdpa", "triton", or "auto".
        device: Where to compute; None means CUDA where there is one, else the CPU (triton then in its interpreter,
            on smaller shapes, without bf16, whose arithmetic the interpreter gets wrong).
    Raises:
        ValueError: a backend is unknown.
        UnsupportedInputError: a backend cannot run here.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    resolved = [resolve_backend(backend, place) for backend in backends]
    for backend in resolved:
        if backend == "triton" and (reasons := triton_unavailable_reasons(place)):
            raise UnsupportedInputError("verify with backend='triton'", reasons)
    interpreted = place.type == "cpu" and "triton" in resolved
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        rows = tuple(row for backend in resolved for row in _rows(backend, place, interpreted))
    finally:
        torch.set_rng_state(generator_state)
    return Verification(str(place), interpreted and interpreter_is_active(), rows)


def _rows(backend: str, device: torch.device, interpreted: bool) -> Iterator[Row]:
    # bf16 under the interpreter is wrong in Triton itself; half precision on a CPU is of no use to sdpa's users
    dtypes = ("fp32", "fp16") if interpreted else ("fp32", "fp16", "bf16")
    for dtype in dtypes:
        for subject, function, inputs in _operators(device, interpreted):
            yield from _compare(subject, function, inputs, backend, dtype)
        yield _compare_model(backend, dtype, device)


Operator = Callable[..., Tensor]


def _operators(device: torch.device, small: bool) -> Iterator[tuple[str, Operator, list[Tensor]]]:
    """Every operator with fresh random inputs in fp64; the first input's gradient is compared too."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    tokens = (50,) if small else (50, 197, 257, 577)
    head_dims = (64, 80) if small else (32, 64, 72, 80, 96, 128)
    shapes = [(2, n, 2, 64) for n in tokens] + [(2, tokens[0], 2, d) for d in head_dims if d != 64]
    for batch, n, heads, head_dim in shapes:
        name = f"attention_qkvpacked B{batch} N{n} H{heads} D{head_dim}"
        yield name, ops.attention_qkvpacked, [draw(batch, n, 3, heads, head_dim)]
    yield (
        "attention B2 N_q1 N_kv196 H2 D64",
        ops.attention,
        [draw(2, 2, 1, 64), draw(2, 2, 196, 64), draw(2, 2, 196, 64)],
    )
    width, hidden = (64, 128) if small else (768, 3072)
    rows = 40 if small else 394
    parameters = [
        1 + 0.1 * draw(width), 0.1 * draw(width), draw(hidden, width) / width**0.5, 0.1 * draw(hidden),
        draw(width, hidden) / hidden**0.5, 0.1 * draw(width),
    ]  # fmt: skip
    yield f"layer_norm_mlp M{rows} C{width} F{hidden}", ops.layer_norm_mlp, [draw(rows, width), *parameters]


def _compare(subject: str, function: Operator, inputs: list[Tensor], backend: str, dtype_name: str) -> tuple[Row, Row]:
    """Forward and gradient rows of one operator."""
    dtype = _DTYPES[dtype_name]
    rounded = [tensor.to(dtype) for tensor in inputs]
    try:
        found = _run(function, rounded, backend)
    except Exception as error:  # a backend that fails is a row that fails; the others are still worth knowing
        problem = f"{type(error).__name__}: {error}"
        return (
            Row(subject, backend, dtype_name, problem=problem),
            Row(f"{subject} gradient", backend, dtype_name, problem=problem),
        )
    eager = _run(function, rounded, "eager")
    exact = _run(function, [tensor.double() for tensor in rounded], "eager")
    return (
        _judge(subject, backend, dtype_name, found[0], eager[0], exact[0], FORWARD_FACTOR),
        _judge(f"{subject} gradient", backend, dtype_name, found[1], eager[1], exact[1], GRADIENT_FACTOR),
    )


def _run(function: Operator, inputs: Sequence[Tensor], backend: str) -> tuple[Tensor, Tensor]:
    first = inputs[0].detach().requires_grad_()
    out = function(first, *inputs[1:], backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), first)
    return out.detach(), gradient


def _compare_model(backend: str, dtype_name: str, device: torch.device) -> Row:
    """The logits of a two-block model of width 64, every parameter rounded to the dtype."""
    dtype = _DTYPES[dtype_name]
    subject = "VisionTransformer, 2 blocks, C64 N17"
    exact_model = create_model("vit_base_patch16_224", backend="eager", device=device, **_SMALL_MODEL)
    weights: dict[str, Any] = {name: value.to(dtype).double() for name, value in exact_model.state_dict().items()}
    images = torch.randn(2, 3, 32, 32, device=device).to(dtype)

    def logits(name: str, precision: torch.dtype) -> Tensor:
        model = create_model("vit_base_patch16_224", backend=name, device=device, **_SMALL_MODEL)
        model.load_state_dict(weights)
        with torch.no_grad():
            out: Tensor = model.to(precision)(images.to(precision))
        return out

    try:
        found = logits(backend, dtype)
    except Exception as error:  # as for an operator
        return Row(subject, backend, dtype_name, problem=f"{type(error).__name__}: {error}")
    eager, exact = logits("eager", dtype), logits("eager", torch.float64)
    return _judge(subject, backend, dtype_name, found, eager, exact, FORWARD_FACTOR)


def _judge(
    subject: str, backend: str, dtype_name: str, found: Tensor, eager: Tensor, exact: Tensor, factor: int
) -> Row:
    verdict = judge(found, eager, exact, factor)
    return Row(subject, backend, dtype_name, verdict.error, verdict.eager_error, verdict.allowed)
