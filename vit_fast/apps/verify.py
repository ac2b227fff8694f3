"""Compares the backends with the fp64 reference on this machine, with the accuracy rule of vit_fast/accuracy.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, judge
from ..arguments import as_device
from ..errors import UnsupportedInputError
from ..ops.backends import interpreter_is_active, resolve_backend, triton_unavailable_reasons
from ..weights.factory import create_model

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_SMALL_MODEL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Result of one case, an operator or a model with its shape, in one dtype.

    Attributes:
        error: Largest error; None if the backend failed.
        eager_error: Largest error of eager in the same dtype.
        allowed: Largest error that passes.
        problem: Exception of a backend that failed.
    """

    case: str
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
        """Error divided by eager's error; None if eager is exact."""
        return self.error / self.eager_error if self.error is not None and self.eager_error else None


@dataclass(frozen=True)
class Verification:
    """Rows of all cases on one device."""

    device: str
    interpreted: bool
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def verify(backends: Sequence[str] = ("triton",), device: str | torch.device | None = None) -> Verification:
    """Compares backends with the fp64 reference on this machine.

    Args:
        backends: "sdpa", "triton", or "auto".
        device: Device to compute on; None means CUDA if available, otherwise the CPU. On a CPU, "triton" runs in
            Triton's interpreter, with smaller shapes and without bf16, which the interpreter computes incorrectly.
    Raises:
        ValueError: a backend is unknown, or backends is empty.
        UnsupportedInputError: a backend cannot run here.
    """
    if not backends:
        raise ValueError("backends must contain at least one backend, got none")
    place = as_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    resolved = [resolve_backend(backend, place) for backend in backends]
    if "triton" in resolved and (reasons := triton_unavailable_reasons(place)):
        raise UnsupportedInputError("verify with backend='triton'", reasons)
    interpreted = place.type == "cpu" and "triton" in resolved
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        rows = tuple(row for backend in resolved for row in _rows(backend, place, interpreted))
    return Verification(str(place), interpreted and interpreter_is_active(), rows)


def _rows(backend: str, device: torch.device, interpreted: bool) -> Iterator[Row]:
    # Triton's interpreter computes bf16 incorrectly; compiled kernels compute fp32 matmuls in TF32
    exact = ("fp32",) if interpreted or backend != "triton" else ()
    dtypes = (*exact, "fp16") if interpreted else (*exact, "fp16", "bf16")
    for dtype in dtypes:
        for case, function, inputs in _operators(device, interpreted):
            yield from _compare(case, function, inputs, backend, dtype)
        yield from _compare_model(backend, dtype, device)


Operator = Callable[..., Tensor]


def _operators(device: torch.device, small: bool) -> Iterator[tuple[str, Operator, list[Tensor]]]:
    """Yields operators with random inputs in fp64. The gradient of the first input is compared too."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    tokens = (50,) if small else (50, 197, 257, 577)
    head_dims = (64, 80) if small else (32, 64, 72, 80, 96, 128)
    shapes = [(2, n, 2, 64) for n in tokens] + [(2, tokens[0], 2, d) for d in head_dims if d != 64]
    for batch, n, heads, head_dim in shapes:
        name = f"attention_qkvpacked B{batch} N{n} H{heads} D{head_dim}"
        yield name, ops.attention_qkvpacked, [draw(batch, n, 3, heads, head_dim)]
    q, k, v = draw(2, 2, 1, 64), draw(2, 2, 196, 64), draw(2, 2, 196, 64)
    yield "attention B2 N_q1 N_kv196 H2 D64", ops.attention, [q, k, v]
    width, hidden = (64, 128) if small else (768, 3072)
    rows = 40 if small else 394
    parameters = [
        1 + 0.1 * draw(width), 0.1 * draw(width), draw(hidden, width) / width**0.5, 0.1 * draw(hidden),
        draw(width, hidden) / hidden**0.5, 0.1 * draw(width),
    ]  # fmt: skip
    yield f"layer_norm_mlp M{rows} C{width} F{hidden}", ops.layer_norm_mlp, [draw(rows, width), *parameters]


def _compare(case: str, function: Operator, inputs: list[Tensor], backend: str, dtype: str) -> Iterator[Row]:
    """Yields the rows of an operator: forward and gradient."""
    rounded = [tensor.to(_DTYPES[dtype]) for tensor in inputs]

    def run(name: str, precision: torch.dtype) -> Sequence[Tensor]:
        first, *others = (tensor.to(precision) for tensor in rounded)
        first = first.detach().requires_grad_()
        out = function(first, *others, backend=name)
        return out.detach(), *torch.autograd.grad(out.square().sum(), first)

    return _judged((case, f"{case} gradient"), backend, dtype, run)


def _compare_model(backend: str, dtype: str, device: torch.device) -> Iterator[Row]:
    """Yields the row of a model with two blocks and embed_dim=64, whose parameters are rounded to the dtype."""
    exact_model = create_model("vit_base_patch16_224", backend="eager", device=device, **_SMALL_MODEL)
    weights: dict[str, Any] = {n: value.to(_DTYPES[dtype]).double() for n, value in exact_model.state_dict().items()}
    images = torch.randn(2, 3, 32, 32, device=device).to(_DTYPES[dtype])

    def logits(name: str, precision: torch.dtype) -> Sequence[Tensor]:
        model = create_model("vit_base_patch16_224", backend=name, device=device, **_SMALL_MODEL)
        model.load_state_dict(weights)
        with torch.no_grad():
            return (model.to(precision)(images.to(precision)),)

    return _judged(("VisionTransformer, 2 blocks, C64 N17",), backend, dtype, logits)


def _judged(
    cases: Sequence[str], backend: str, dtype: str, run: Callable[[str, torch.dtype], Sequence[Tensor]]
) -> Iterator[Row]:
    """Yields a row for each output of run(backend, dtype); the second output is a gradient."""
    try:
        found = run(backend, _DTYPES[dtype])
    except Exception as error:  # report the failure in a row and continue with the other cases
        yield from (Row(each, backend, dtype, problem=f"{type(error).__name__}: {error}") for each in cases)
        return
    outputs = zip(cases, (FORWARD_FACTOR, GRADIENT_FACTOR), found, run("eager", _DTYPES[dtype]),
                  run("eager", torch.float64))  # fmt: skip
    for case, factor, one, eager, exact in outputs:
        verdict = judge(one, eager, exact, factor)
        yield Row(case, backend, dtype, verdict.error, verdict.eager_error, verdict.allowed)
