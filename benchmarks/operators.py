"""The operators as tasks: inputs, operations, bytes, the definition, and who computes them, ours and the peers.

The gpu-check's rows and the pytest-benchmark suite time the same tasks by the same entrants. Peers of attention are
SDPA's kernels and FlexAttention; of LayerNorm + MLP eager, eager compiled and, in inference, LayerNorm + cuBLASLt's
GELU epilogue + matmul + residual (tanh GELU: its only one).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast import ops
from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR

from .gpu_check_rows import Found, judge
from .timing import Call

Function = Callable[..., Tensor]


class Operator(Protocol):
    """One problem of an operator."""

    @property
    def part(self) -> str:
        """What its rows belong to."""

    @property
    def name(self) -> str: ...

    @property
    def flop(self) -> int:
        """Operations of its forward."""

    def flop_of(self, backward: bool) -> int: ...

    def bytes_moved(self, backward: bool) -> int:
        """What must be read and written at least, in two bytes an element."""

    def leaves(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """New random inputs, what has a gradient; the output is shaped as grad is."""

    def grad(self, device: torch.device, dtype: torch.dtype) -> Tensor: ...

    def checked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What of leaves, grad and results is held against fp64."""

    def entrants(self) -> dict[str, Function]:
        """Who computes it on leaves, by name; "triton" is ours and "eager" the definition."""

    def peers(self, backward: bool, compiled: bool) -> list[str]:
        """Whom a row of the gpu-check is timed against."""


@dataclass(frozen=True)
class Attention:
    """Attention on packed qkv [B, N, 3, H, D]."""

    model: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    part = "attention"

    @property
    def name(self) -> str:
        return f"attention {self.model} B{self.batch} N{self.tokens} H{self.heads} D{self.head_dim}"

    @property
    def flop(self) -> int:
        return 4 * self.batch * self.heads * self.tokens**2 * self.head_dim

    def flop_of(self, backward: bool) -> int:
        return self.flop * 5 // 2 if backward else self.flop

    def bytes_moved(self, backward: bool) -> int:
        # forward reads q, k, v and writes o; backward also reads o and do and writes dq, dk, dv
        return (8 if backward else 4) * 2 * self.batch * self.heads * self.tokens * self.head_dim

    def leaves(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(self.batch, self.tokens, 3, self.heads, self.head_dim, device=device).to(dtype)]

    def grad(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.batch, self.tokens, self.heads, self.head_dim, device=device).to(dtype)

    def checked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Images are independent; the last one has the largest offsets."""
        return [tensor[[0, -1]] for tensor in tensors]

    def entrants(self) -> dict[str, Function]:
        ours = {name: partial(ops.attention_qkvpacked, backend=name) for name in ("triton", "eager", "sdpa")}
        return ours | {name: partial(_sdpa, backend) for name, backend in _SDPA_BACKENDS.items()} | {"flex": _flex}

    def peers(self, backward: bool, compiled: bool) -> list[str]:
        return ["flex"] if compiled else list(_SDPA_BACKENDS)


_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _sdpa(backend: SDPBackend, qkv: Tensor) -> Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _flex(qkv: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = qkv.transpose(1, 3).unbind(2)
    return _compiled(flex_attention)(q, k, v).transpose(1, 2)


@functools.cache
def _compiled(function: Function) -> Any:
    """Not before it is called: the compiler alone takes seconds to import."""
    # a backward that is run again and again must not reuse the memory of what it reads; decided when it is compiled
    functorch_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class LayerNormMlp:
    """LayerNorm + MLP on M rows of width C, hidden width F; every row is checked."""

    model: str
    rows: int
    width: int
    hidden: int
    activation: str = "gelu"
    part = "mlp"

    @property
    def name(self) -> str:
        return f"layer_norm_mlp {self.model} M{self.rows} C{self.width} F{self.hidden}"

    @property
    def flop(self) -> int:
        return 4 * self.rows * self.width * self.hidden

    def flop_of(self, backward: bool) -> int:
        return 2 * self.flop if backward else self.flop

    def bytes_moved(self, backward: bool) -> int:
        narrow, wide = 2 * self.rows * self.width, 2 * self.rows * self.hidden
        # forward: x, y, h twice; backward: x, dy, dx, z, and h and dz written once and read once and twice
        return 3 * narrow + 6 * wide if backward else 2 * narrow + 2 * wide

    def leaves(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias."""
        M, C, H = self.rows, self.width, self.hidden

        def normal(*size: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            return (torch.randn(size, device=device) * scale + shift).to(dtype)

        return [
            normal(M, C), normal(C, scale=0.2, shift=1.0), normal(C, scale=0.1), normal(H, C, scale=C**-0.5),
            normal(H, scale=0.1), normal(C, H, scale=H**-0.5), normal(C, scale=0.1),
        ]  # fmt: skip

    def grad(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.randn(self.rows, self.width, device=device).to(dtype)

    def checked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)

    def entrants(self) -> dict[str, Function]:
        triton, eager = (
            partial(ops.layer_norm_mlp, activation=self.activation, backend=name) for name in ("triton", "eager")
        )

        def compiled(*leaves: Tensor) -> Tensor:
            out: Tensor = _compiled(eager)(*leaves)
            return out

        return {"triton": triton, "eager": eager, "compiled": compiled, "cuBLASLt GELU epilogue": _cublaslt_epilogue}

    def peers(self, backward: bool, compiled: bool) -> list[str]:
        return ["compiled"] if compiled else ["eager"] if backward else ["eager", "cuBLASLt GELU epilogue"]


def _cublaslt_epilogue(x: Tensor, g: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    normed = F.layer_norm(x, (x.shape[-1],), g, b, 1e-6)
    hidden = torch._addmm_activation(b1, normed, w1.t(), use_gelu=True)
    return torch.addmm(b2, hidden, w2.t()) + x


def check(task: Operator, entrant: str, backward: bool, device: torch.device, dtype: torch.dtype) -> Found:
    """An entrant and eager against eager in fp64; the entrant runs at the very size that is timed."""
    functions = task.entrants()
    leaves, grad = task.leaves(device, dtype), task.grad(device, dtype)
    given = task.checked(_results(functions[entrant], leaves, grad, backward))
    few, (few_grad,) = task.checked(leaves), task.checked([grad])
    eager = _results(functions["eager"], few, few_grad, backward)
    exact = _results(functions["eager"], [leaf.double() for leaf in few], few_grad.double(), backward)
    return judge(given, eager, exact, GRADIENT_FACTOR if backward else FORWARD_FACTOR)


def _results(function: Function, leaves: Sequence[Tensor], grad: Tensor, backward: bool) -> list[Tensor]:
    if not backward:
        return [function(*(leaf.detach() for leaf in leaves))]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return list(torch.autograd.grad(function(*leaves), leaves, grad))


def call(function: Function, inputs: Sequence[tuple[Sequence[Tensor], Tensor]], backward: bool) -> Call:
    """A call by round number on rotated (leaves, grad); for the backward the forwards are done beforehand and kept."""
    if not backward:

        def forward(index: int) -> object:
            with torch.no_grad():
                return function(*inputs[index % len(inputs)][0])

        return forward
    graphs = []
    for leaves, grad in inputs:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        graphs.append((function(*leaves), leaves, grad))

    def run(index: int) -> object:
        out, leaves, grad = graphs[index % len(graphs)]
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return run
