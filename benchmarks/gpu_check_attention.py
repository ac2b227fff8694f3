"""Attention in the gpu-check: forward and backward at ViT and SigLIP shapes against SDPA's backends and FlexAttention.

Each row: is it right (ours runs at the batch that is timed, so that the very kernel that is timed is checked, on its
first and last image), then how fast beside the best peer of the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR

from .gpu_check_rows import KERNEL_S, OPERATOR_PROTOCOL, ROTATIONS, Context, Cost, Found, Row, judge, measure
from .timing import Call

_CHECKED_IMAGES = [0, -1]  # images are independent; the last one has the largest offsets
_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    """One attention problem in bf16, packed qkv [B, N, 3, H, D]."""

    model: str
    batch: int
    tokens: int
    heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"attention {self.model} B{self.batch} N{self.tokens} H{self.heads} D{self.head_dim}"

    @property
    def flop(self) -> int:
        return 4 * self.batch * self.heads * self.tokens**2 * self.head_dim

    @property
    def tensor_bytes(self) -> int:
        return 2 * self.batch * self.heads * self.tokens * self.head_dim


TARGET = Shape("ViT-B/16", 256, 197, 12, 64)
LARGE = Shape("ViT-L/16-384", 32, 577, 16, 64)
# By how much each is worth should time run out, with the kernels of its forward and backward that no earlier row
# compiles, counted from their launches: up to 256 keys every number of keys has its own forward.
OTHERS = (
    (Shape("ViT-H/14", 64, 257, 16, 80), 1, 2),
    (Shape("SigLIP-So400m/14-384", 32, 729, 16, 72), 1, 2),
    (Shape("ViT-B/16", 32, 197, 12, 64), 0, 0),
    (Shape("ViT-S/16", 256, 197, 6, 64), 0, 2),
    (Shape("ViT-B/16-512", 32, 1025, 12, 64), 1, 0),
    (Shape("ViT-B/16 long", 4, 4096, 12, 64), 1, 2),
    (Shape("SigLIP-B/16", 256, 196, 12, 64), 1, 0),
    (Shape("ViT-B/16", 1, 197, 12, 64), 0, 0),
    (Shape("ViT-L/16", 256, 197, 16, 64), 0, 0),
)
SMALL = Shape("small", 2, 50, 2, 64)


def rows(
    shape: Shape,
    forward_kernels: int = 1,
    backward_kernels: int = 2,
    *,
    compiled: bool = False,
    important: bool = False,
    on_gpu: bool = True,
) -> list[Row]:
    """Forward and backward of a shape, against SDPA's backends or, compiled, against FlexAttention.

    Args:
        shape: The problem.
        forward_kernels: How many of ours no earlier row compiles.
        backward_kernels: The same of the backward.
        compiled: Whether the peer is compiled; our kernels are by then.
        important: See Row.
        on_gpu: See Row.
    """
    found = []
    for backward, kernels in ((False, forward_kernels), (True, backward_kernels)):
        cost = Cost(4.0 if compiled else kernels * KERNEL_S, 0.5, 1.0)
        name = f"{shape.name} {'backward' if backward else 'forward'}{', FlexAttention' if compiled else ''}"
        fill = partial(_fill, shape, backward, compiled)
        found.append(Row("attention", name, cost, fill, important=important, on_gpu=on_gpu))
    return found


def _fill(shape: Shape, backward: bool, compiled: bool, context: Context) -> Found:
    found = check(shape, backward, context)
    if not found["correct"] or not context.on_gpu:
        return found
    inputs = [_inputs(shape, shape.batch, context) for _ in range(ROTATIONS)]
    subjects = {"flex": _flex()} if compiled else {name: _sdpa(backend) for name, backend in _SDPA_BACKENDS.items()}
    makers = {
        name: partial(_call, function, inputs, backward) for name, function in ({"ours": _ours} | subjects).items()
    }
    # forward reads q, k, v and writes o; backward also reads o and do and writes dq, dk, dv
    moved = shape.tensor_bytes * (8 if backward else 4)
    flop = shape.flop * 5 // 2 if backward else shape.flop
    return found | measure(makers, context, OPERATOR_PROTOCOL, flop=flop, moved=moved)


def _inputs(shape: Shape, batch: int, context: Context) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(batch, shape.tokens, 3, shape.heads, shape.head_dim, device=context.device).to(context.dtype)
    grad = torch.randn(batch, shape.tokens, shape.heads, shape.head_dim, device=context.device).to(context.dtype)
    return qkv, grad


def _ours(qkv: Tensor) -> Tensor:
    from vit_fast.ops import attention_qkvpacked

    return attention_qkvpacked(qkv, backend="triton")


def _eager(qkv: Tensor) -> Tensor:
    from vit_fast.ops import attention_qkvpacked

    return attention_qkvpacked(qkv, backend="eager")


def check(shape: Shape, backward: bool, context: Context) -> Found:
    """Ours and eager against eager in fp64."""
    qkv, grad = _inputs(shape, shape.batch, context)
    few, few_grad = qkv[_CHECKED_IMAGES], grad[_CHECKED_IMAGES]
    ours = _result(_ours, qkv.requires_grad_(), grad, backward)[_CHECKED_IMAGES]
    eager = _result(_eager, few.clone().requires_grad_(), few_grad, backward)
    exact = _result(_eager, few.double().requires_grad_(), few_grad.double(), backward)
    return judge([ours], [eager], [exact], GRADIENT_FACTOR if backward else FORWARD_FACTOR)


def _result(function: Callable[[Tensor], Tensor], qkv: Tensor, grad: Tensor, backward: bool) -> Tensor:
    out = function(qkv)
    return torch.autograd.grad(out, qkv, grad)[0] if backward else out.detach()


def _sdpa(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.transpose(1, 3).unbind(2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return run


def _flex() -> Callable[[Tensor], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.transpose(1, 3).unbind(2)
        out: Tensor = compiled(q, k, v)
        return out.transpose(1, 2)

    return run


def _call(function: Callable[[Tensor], Tensor], inputs: list[tuple[Tensor, Tensor]], backward: bool) -> Call:
    """A call by round number on rotated inputs; for the backward the forwards are done beforehand and kept."""
    if not backward:

        def forward(index: int) -> object:
            with torch.no_grad():
                return function(inputs[index % len(inputs)][0])

        return forward
    graphs = []
    for qkv, grad in inputs:
        leaf = qkv.detach().requires_grad_()
        graphs.append((function(leaf), leaf, grad))

    def run(index: int) -> object:
        out, leaf, grad = graphs[index % len(graphs)]
        return torch.autograd.grad(out, leaf, grad, retain_graph=True)

    return run
