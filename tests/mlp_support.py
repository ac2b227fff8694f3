"""Blocks and MLPs with random parameters, their reference, and the tolerance rule of their tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from kernel_execution import HAS_GPU
from torch import Tensor

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR, judge
from vit_fast.blocks.parts import Windows
from vit_fast.kernels.row_parts import PIECE
from vit_fast.ops import Norm, QkNorm, Rope, qk_norm_rope, reference
from vit_fast.ops.attention import attention_among
from vit_fast.ops.block import fused_block
from vit_fast.ops.descriptions import BlockTensors, Keys, ScoreTerms

DEVICE = "cuda" if HAS_GPU else "cpu"
QK_NAMES = ("q_weight", "q_bias", "k_weight", "k_bias")


@dataclass(frozen=True)
class Case:
    """A call of a block or of one half; the tensors are leaves that require gradients."""

    x: Tensor
    t: BlockTensors
    grad: Tensor
    options: dict[str, Any]  # of `fused_block`

    def to(self, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None) -> Case:
        """Returns new leaves with the same values in another dtype."""

        def leaf(tensor: Tensor | None, target: torch.dtype) -> Any:
            return None if tensor is None else tensor.detach().to(target).clone().requires_grad_()

        t = BlockTensors(*(leaf(tensor, parameter_dtype or dtype) for tensor in self.t))
        options = dict(self.options)
        if qk := options.get("qk_norm"):
            norms = [
                norm._replace(weight=leaf(norm.weight, dtype), bias=leaf(norm.bias, dtype)) for norm in (qk.q, qk.k)
            ]
            options["qk_norm"] = QkNorm(*norms, qk.over)
        if terms := options.get("terms"):
            given = {name: leaf(tensor, dtype) for name, tensor in _leaf_terms(terms).items()}
            options["terms"] = terms._replace(**given, window_mask=terms.window_mask.to(dtype))
        return replace(self, x=leaf(self.x, dtype), t=t, grad=self.grad.to(dtype), options=options)

    def but(self, x: Tensor | None = None, grad: Tensor | None = None, **tensors: Tensor | None) -> Case:
        """Returns the case with other tensors."""
        given, gradient = (old if new is None else new for old, new in ((self.x, x), (self.grad, grad)))
        return replace(self, x=given, grad=gradient, t=self.t._replace(**tensors))

    def half(self, number: int) -> Case:
        """Returns the attention (1) or the MLP (2) alone."""
        of_mlp = {*BlockTensors._fields[7:16], "inner_weight", "inner_bias"}
        absent = of_mlp if number == 1 else BlockTensors._fields[:7]
        return self.but(**dict.fromkeys(absent))

    def forward(self, backend: str) -> Tensor:
        return self.fused()[0] if backend == "triton" else self._eager()

    def _eager(self) -> Tensor:
        x, t = self.x, self.t
        options = {"norm": "layer_norm", "activation": "gelu", "residual": True, "inner_norm": None} | self.options
        eps1, eps2 = options.pop("eps")
        heads, qk_norm, rope, keys, terms = (
            options.pop(name, None) for name in ("heads", "qk_norm", "rope", "keys", "terms")
        )
        if t.qkv_weight is not None:
            if rope is not None and x.dtype == torch.float64:
                rope = rope._replace(cos=rope.cos.double(), sin=rope.sin.double())
            normed = reference.normalize(x, Norm(t.norm1_weight, t.norm1_bias, eps1, options["norm"]))
            qkv = F.linear(normed, t.qkv_weight, t.qkv_bias).unflatten(-1, (3, heads, -1))
            qkv = qk_norm_rope(qkv, qk_norm=qk_norm, rope=rope, backend="eager")
            mixed = attention_among(qkv, keys, backend="eager", terms=terms)
            branch = F.linear(mixed.flatten(2), t.proj_weight, t.proj_bias)
            branch = branch if t.scale1 is None else branch * t.scale1
            x = x + branch if options["residual"] else branch
        return x if t.fc1_weight is None else reference.layer_norm_mlp(x, t, eps=eps2, **options)

    def fused(self, statistics: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Runs the kernels with statistics of x, and returns those of the output if requested."""
        return fused_block(self.x, statistics, self.t, **self.options | options)[:2]

    def leaves(self) -> dict[str, Tensor]:
        qk = self.options.get("qk_norm")
        of_qk = {} if qk is None else dict(zip(QK_NAMES, (*qk.q[:2], *qk.k[:2])))
        if terms := self.options.get("terms"):
            of_qk |= _leaf_terms(terms)
        return {name: leaf for name, leaf in {"x": self.x, **self.t._asdict(), **of_qk}.items() if leaf is not None}

    def run(self, backend: str) -> dict[str, Tensor]:
        """Returns the output and every gradient, by name."""
        y, leaves = self.forward(backend), self.leaves()
        gradients = torch.autograd.grad(y, list(leaves.values()), self.grad)
        return {"y": y.detach(), **{f"d {name}": gradient for name, gradient in zip(leaves, gradients)}}


def _leaf_terms(terms: ScoreTerms) -> dict[str, Any]:
    return {name: getattr(terms, name) for name in ("bias", "rel_h", "rel_w", "scale")}


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift).to(DEVICE)


def make_case(
    M: int, C: int, F: int, dtype: torch.dtype, *, mean: float = 0.0, seed: int = 0, gated: bool = False,
    norm: str = "layer_norm", inner_norm: str | None = None, activation: str = "gelu", residual: bool = True,
) -> Case:  # fmt: skip
    """An MLP: tokens [M, C] of spread 1 and the given mean, and parameters like those of a trained model."""
    normal = partial(_normal, torch.Generator().manual_seed(seed))
    t = BlockTensors(
        norm2_weight=normal(C, scale=0.2, shift=1.0), norm2_bias=normal(C, scale=0.1),
        fc1_weight=normal(F, C, scale=C**-0.5), fc1_bias=normal(F, scale=0.1),
        fc2_weight=normal(C, F, scale=F**-0.5), fc2_bias=normal(C, scale=0.1), scale2=normal(C, scale=0.3, shift=0.5),
    )  # fmt: skip
    if norm != "layer_norm":
        t = t._replace(norm2_bias=None, norm2_weight=t.norm2_weight if norm == "rms_norm" else None)
    if gated:
        t = t._replace(gate_weight=normal(F, C, scale=C**-0.5), gate_bias=normal(F, scale=0.1))
    if inner_norm is not None:
        beta = normal(F, scale=0.1) if inner_norm == "layer_norm" else None
        t = t._replace(inner_weight=normal(F, scale=0.2, shift=1.0), inner_bias=beta)
    options = {"norm": norm, "activation": activation, "residual": residual, "eps": (1e-6, 1e-6)}
    options["inner_norm"] = None if inner_norm is None else (inner_norm, 1e-6)
    return Case(normal(M, C, shift=mean), t, normal(M, C), options).to(dtype)


def make_block(
    dtype: torch.dtype, *, width: int = 48, hidden: int = 40, tokens: tuple[int, int] = (2, 7), heads: int = 2,
    head_dim: int = 16, qk: str | None = None, over: str = "head", leading: tuple[int, ...] | None = None,
    layout: str = "half", prefix: int = 1, keys: str = "all", norm: str = "layer_norm", terms: bool = False,
    **mlp: Any,
) -> Case:  # fmt: skip
    """A block of B x N tokens; `qk` is the norm of q and k, `leading` the shape of the rotary tables before [T, D/2].

    `terms` adds all terms, in shifted windows of 2 x 3 of the N = 4 x 6 tokens.

    `keys` is "all", "mask", or "packed" for one packed sequence of all tokens, with an empty image and padding.
    """
    (B, N), inner, rms = tokens, heads * head_dim, norm == "rms_norm"
    case = make_case(B * N, width, hidden, torch.float64, norm=norm, **mlp)
    normal = partial(_normal, torch.Generator().manual_seed(1))
    case = case.but(
        norm1_weight=normal(width, scale=0.2, shift=1.0), norm1_bias=None if rms else normal(width, scale=0.1),
        qkv_weight=normal(3 * inner, width, scale=width**-0.5), qkv_bias=normal(3 * inner, scale=0.1),
        proj_weight=normal(width, inner, scale=inner**-0.5), proj_bias=normal(width, scale=0.1),
        scale1=normal(width, scale=0.3, shift=0.5),
    )  # fmt: skip
    options: dict[str, Any] = case.options | {"heads": heads, "eps": (1e-6, 1e-5)}
    if keys == "packed":
        options["keys"] = Keys(torch.tensor([0, 5, 5, B * N - 1], dtype=torch.int32, device=DEVICE), B * N)
        B, N = 1, B * N
    elif keys == "mask":
        options["keys"] = Keys(mask=torch.arange(N, device=DEVICE) < torch.tensor([[N], [N - 3]], device=DEVICE))
    if terms:
        mask = torch.where(normal(4, 6, 6) > 0.5, -100.0, 0.0)
        scale, groups = (
            normal(heads, scale=0.1, shift=0.4),
            Windows((4, 6), (2, 3), (1, 2)).groups(torch.device(DEVICE)),
        )
        tables = (normal(size, size, head_dim, scale=0.3) for size in (2, 3))
        options["terms"] = ScoreTerms(normal(1, heads, 6, 6), mask, *tables, scale=scale, groups=groups)
    if leading is not None:
        angles = 3 * normal(*leading, N - prefix, head_dim // 2).float()
        options["rope"] = Rope(angles.cos(), angles.sin(), prefix, layout)
    if qk is not None:
        size = inner if over == "width" else head_dim
        weights = [normal(size, scale=0.3, shift=1.0) for _ in "qk"]
        biases = [normal(size, scale=0.3) if qk == "layer_norm" else None for _ in "qk"]
        options["qk_norm"] = QkNorm(*(Norm(*each, 1e-5, qk) for each in zip(weights, biases)), over)
    x, grad = (tensor.detach().view(B, N, width) for tensor in (case.x, case.grad))
    return replace(case, x=x, grad=grad, options=options).to(dtype)


def statistics_of(x: Tensor) -> Tensor:
    """Returns statistics of the rows of x [..., C] as operators pass them on: fp32 [M, 2, parts]."""
    rows = x.detach().float().flatten(0, -2)
    pieces = rows.split(PIECE, 1)
    found = [torch.stack((piece.mean(1), piece.var(1, unbiased=False) * piece.shape[1]), 1) for piece in pieces]
    return torch.stack(found, 2)


def assert_rule(
    own: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], names: Sequence[str] | None = None
) -> None:
    """Checks the rule of accuracy over the largest error, forward and every gradient."""
    for name in names or own:
        factor = FORWARD_FACTOR if name == "y" else GRADIENT_FACTOR
        found = judge(own[name], eager[name], exact[name], factor)
        assert found.passed, f"{name}: {found}"


def check_case(case: Case, parameter_dtype: torch.dtype | None = None, inference: bool = False) -> None:
    """Checks a case against fp64: forward and every gradient, or the forward without gradients."""
    dtype = case.x.dtype
    own, eager, exact = case.to(dtype, parameter_dtype), case.to(dtype), case.to(torch.float64)
    if inference:
        with torch.no_grad():
            assert_rule(*({"y": each.forward(name)} for each, name in ((own, "triton"), (eager, ""), (exact, ""))))
    else:
        assert_rule(own.run("triton"), eager.run("eager"), exact.run("eager"))
