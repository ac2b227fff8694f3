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
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors
from vit_fast.ops.layer_norm_mlp import mlp_half

DEVICE = "cuda" if HAS_GPU else "cpu"


@dataclass(frozen=True)
class Case:
    """A call of layer_norm_mlp; the tensors are leaves that require gradients."""

    x: Tensor
    t: BlockTensors
    grad: Tensor
    options: dict[str, Any]  # norm, activation, residual, inner_norm

    def to(self, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None) -> Case:
        """Returns new leaves with the same values in another dtype."""

        def leaf(tensor: Tensor | None, target: torch.dtype) -> Any:
            return None if tensor is None else tensor.detach().to(target).clone().requires_grad_()

        t = BlockTensors(*(leaf(tensor, parameter_dtype or dtype) for tensor in self.t))
        return replace(self, x=leaf(self.x, dtype), t=t, grad=self.grad.to(dtype))

    def but(self, x: Tensor | None = None, grad: Tensor | None = None, **tensors: Tensor | None) -> Case:
        """Returns the case with other tensors."""
        given, gradient = (old if new is None else new for old, new in ((self.x, x), (self.grad, grad)))
        return replace(self, x=given, grad=gradient, t=self.t._replace(**tensors))

    def forward(self, backend: str) -> Tensor:
        return mlp_half(self.x, self.t, eps=1e-6, backend=backend, **self.options)

    def fused(self, statistics: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Runs the kernels with statistics of x, and returns those of the output if requested."""
        return fused_block(self.x, statistics, self.t, **{"eps": (0.0, 1e-6)} | self.options | options)[:2]

    def leaves(self) -> dict[str, Tensor]:
        return {name: leaf for name, leaf in {"x": self.x, **self.t._asdict()}.items() if leaf is not None}

    def run(self, backend: str) -> dict[str, Tensor]:
        """Returns the output and every gradient, by name."""
        y, leaves = self.forward(backend), self.leaves()
        gradients = torch.autograd.grad(y, list(leaves.values()), self.grad)
        return {"y": y.detach(), **{f"d {name}": gradient for name, gradient in zip(leaves, gradients)}}


def make_case(
    M: int, C: int, F: int, dtype: torch.dtype, *, mean: float = 0.0, seed: int = 0, gated: bool = False,
    norm: str = "layer_norm", inner_norm: str | None = None, activation: str = "gelu", residual: bool = True,
) -> Case:  # fmt: skip
    """Random tokens [M, C] of spread 1 and the given mean, and parameters as a trained model has them, in `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
        return values.to(DEVICE, dtype)

    t = BlockTensors(
        norm2_weight=normal(C, scale=0.2, shift=1.0), norm2_bias=normal(C, scale=0.1),
        fc1_weight=normal(F, C, scale=C**-0.5), fc1_bias=normal(F, scale=0.1),
        fc2_weight=normal(C, F, scale=F**-0.5), fc2_bias=normal(C, scale=0.1), scale2=normal(C, scale=0.3, shift=0.5),
    )  # fmt: skip
    if norm == "rms_norm":
        t = t._replace(norm2_bias=None)
    if gated:
        t = t._replace(gate_weight=normal(F, C, scale=C**-0.5), gate_bias=normal(F, scale=0.1))
    if inner_norm is not None:
        beta = normal(F, scale=0.1) if inner_norm == "layer_norm" else None
        t = t._replace(inner_weight=normal(F, scale=0.2, shift=1.0), inner_bias=beta)
    options = {"norm": norm, "activation": activation, "residual": residual}
    options["inner_norm"] = None if inner_norm is None else (inner_norm, 1e-6)
    return Case(normal(M, C, shift=mean), t, normal(M, C), options).to(dtype)


def statistics_of(x: Tensor) -> Tensor:
    """Returns statistics of the rows of x [..., C] as operators pass them on: fp32 [M, 2, parts]."""
    rows = x.detach().float().flatten(0, -2)
    pieces = rows.split(PIECE, 1)
    found = [torch.stack((piece.mean(1), piece.var(1, unbiased=False) * piece.shape[1]), 1) for piece in pieces]
    return torch.stack(found, 2)


def combined(part: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    """Returns mean and rstd of rows of `width` columns in fp64, from statistics of their pieces."""
    counts = torch.tensor([min(PIECE, width - first) for first in range(0, width, PIECE)], device=part.device).double()
    means, squares = part.double().unbind(1)
    mean = (counts * means).sum(1) / width
    return mean, torch.rsqrt((squares + counts * (means - mean[:, None]) ** 2).sum(1) / width + eps)


def assert_rule(
    own: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], names: Sequence[str] | None = None
) -> None:
    """Checks the rule of accuracy over the largest error, forward and every gradient."""
    for name in names or own:
        factor = FORWARD_FACTOR if name == "y" else GRADIENT_FACTOR
        found = judge(own[name], eager[name], exact[name], factor)
        assert found.passed, f"{name}: {found}"


def check_case(case: Case, parameter_dtype: torch.dtype | None = None) -> None:
    """Checks a case against fp64, forward and every gradient."""
    dtype = case.x.dtype
    own = case.to(dtype, parameter_dtype).run("triton")
    assert_rule(own, case.to(dtype).run("eager"), case.to(torch.float64).run("eager"))
