"""Inputs, references and the tolerance rule that the tests of the LayerNorm + MLP kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_execution import HAS_GPU
from torch import Tensor

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, judge
from vit_fast.kernels.row_parts import PIECE
from vit_fast.ops import Norm, layer_norm_mlp

DEVICE = "cuda" if HAS_GPU else "cpu"
GATE = ("gate_weight", "gate_bias")
NAMES = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


@dataclass(frozen=True)
class Case:
    """Arguments of a call of layer_norm_mlp; the tensors are leaves that require gradients."""

    x: Tensor
    parameters: tuple[Tensor | None, ...]
    layer_scale: Tensor | None
    grad: Tensor
    activation: str = "gelu"
    residual: bool = True
    norm: str = "layer_norm"
    gate: tuple[Tensor | None, Tensor | None] = (None, None)
    inner: tuple[Tensor | None, Tensor | None] = (None, None)
    inner_norm: str = "none"

    def to(self, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None) -> Case:
        """Fresh leaves with the same values in another dtype."""

        def leaf(tensor: Tensor | None, target: torch.dtype) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(target).clone().requires_grad_()

        inner = parameter_dtype or dtype
        return replace(
            self,
            x=leaf(self.x, dtype),
            parameters=tuple(leaf(parameter, inner) for parameter in self.parameters),
            layer_scale=leaf(self.layer_scale, inner),
            gate=tuple(leaf(parameter, inner) for parameter in self.gate),
            inner=tuple(leaf(parameter, inner) for parameter in self.inner),
            grad=self.grad.to(dtype),
        )

    def forward(self, backend: str) -> Tensor:
        inner_norm = None if self.inner_norm == "none" else Norm(*self.inner, 1e-6, self.inner_norm)
        return layer_norm_mlp(
            self.x, *self.parameters, activation=self.activation, layer_scale=self.layer_scale,
            residual=self.residual, norm=self.norm, gate_weight=self.gate[0], gate_bias=self.gate[1],
            inner_norm=inner_norm, backend=backend,
        )  # fmt: skip

    def run(self, backend: str) -> dict[str, Tensor]:
        """The output and every gradient, by name."""
        y = self.forward(backend)
        leaves = {"x": self.x, **dict(zip((*NAMES, *GATE), (*self.parameters, *self.gate)))}
        leaves |= {"layer_scale": self.layer_scale, "inner_weight": self.inner[0], "inner_bias": self.inner[1]}
        present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        gradients = torch.autograd.grad(y, list(present.values()), self.grad)
        return {"y": y.detach(), **{f"d {name}": gradient for name, gradient in zip(present, gradients)}}


def make_case(
    M: int, C: int, F: int, dtype: torch.dtype, *, mean: float = 0.0, seed: int = 0, gated: bool = False, **choices: Any
) -> Case:
    """Random tokens [M, C] of spread 1 and the given mean, and parameters as a trained model has them, in `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
        return values.to(DEVICE, dtype)

    parameters = (
        normal(C, scale=0.2, shift=1.0), normal(C, scale=0.1), normal(F, C, scale=C**-0.5), normal(F, scale=0.1),
        normal(C, F, scale=F**-0.5), normal(C, scale=0.1),
    )  # fmt: skip
    if choices.get("norm") == "rms_norm":
        parameters = (parameters[0], None, *parameters[2:])
    if gated:
        choices["gate"] = normal(F, C, scale=C**-0.5), normal(F, scale=0.1)
    if choices.get("inner_norm", "none") != "none":
        beta = normal(F, scale=0.1) if choices["inner_norm"] == "layer_norm" else None
        choices["inner"] = normal(F, scale=0.2, shift=1.0), beta
    case = Case(normal(M, C, shift=mean), parameters, normal(C, scale=0.3, shift=0.5), normal(M, C), **choices)
    return case.to(dtype)


def statistics_of(x: Tensor) -> Tensor:
    """Statistics of the rows of x [..., C] as one operator hands them to the next: fp32 [M, 2, parts]."""
    rows = x.detach().float().flatten(0, -2)
    pieces = rows.split(PIECE, 1)
    found = [torch.stack((piece.mean(1), piece.var(1, unbiased=False) * piece.shape[1]), 1) for piece in pieces]
    return torch.stack(found, 2)


def combined(part: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    """(mean, rstd) of rows of `width` columns in fp64, from statistics of their pieces."""
    counts = torch.tensor([min(PIECE, width - first) for first in range(0, width, PIECE)], device=part.device).double()
    means, squares = part.double().unbind(1)
    mean = (counts * means).sum(1) / width
    return mean, torch.rsqrt((squares + counts * (means - mean[:, None]) ** 2).sum(1) / width + eps)


def assert_rule(
    ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], names: Sequence[str] | None = None
) -> None:
    """The rule of accuracy over the largest error, forward and every gradient."""
    for name in names or ours:
        factor = FORWARD_FACTOR if name == "y" else GRADIENT_FACTOR
        found = judge(ours[name], eager[name], exact[name], factor)
        assert found.passed, f"{name}: {found}"


def check_case(case: Case, parameter_dtype: torch.dtype | None = None) -> None:
    """Hold a case against fp64 by the rule, forward and every gradient."""
    dtype = case.x.dtype
    ours = case.to(dtype, parameter_dtype).run("triton")
    assert_rule(ours, case.to(dtype).run("eager"), case.to(torch.float64).run("eager"))
