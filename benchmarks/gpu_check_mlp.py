"""LayerNorm + MLP in the gpu-check, and its matmul alone, against what they have to beat.

Each row: is it right over all the rows that are timed, then how fast beside the best peer of the same run. Peers of
the operator: eager, in inference LayerNorm + cuBLASLt's GELU epilogue + matmul + residual (tanh GELU: its only one),
and, in rows of their own, compiled eager. Peer of the matmul: torch.matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR
from vit_fast.ops.linear import linear_residual

from .gpu_check_rows import KERNEL_S, OPERATOR_PROTOCOL, ROTATIONS, Context, Cost, Found, Row, judge, measure
from .timing import Call


@dataclass(frozen=True)
class Shape:
    """One LayerNorm + MLP problem in bf16: M rows of width C, hidden width F."""

    model: str
    rows: int
    width: int
    hidden: int

    @property
    def name(self) -> str:
        return f"layer_norm_mlp {self.model} M{self.rows} C{self.width} F{self.hidden}"

    @property
    def flop(self) -> int:
        return 4 * self.rows * self.width * self.hidden

    def bytes_moved(self, backward: bool) -> int:
        """What has to be read and written once: tokens and hidden layer, in bf16."""
        narrow, wide = 2 * self.rows * self.width, 2 * self.rows * self.hidden
        # forward: x, y, h twice; backward: x, dy, dx, z, and h and dz written once and read once and twice
        return 3 * narrow + 6 * wide if backward else 2 * narrow + 2 * wide


TARGET = Shape("ViT-B/16 B256", 50_432, 768, 3072)
# With the kernels of the forward and of the backward that no earlier row compiles, counted from their launches.
OTHERS = (
    (Shape("ViT-L/16 B64", 12_608, 1024, 4096), 0, 3),
    (Shape("ViT-S/16 B256", 50_432, 384, 1536), 0, 0),
    (Shape("ViT-B/16 B32", 6_304, 768, 3072), 1, 2),
    (Shape("ViT-B/16 B1", 197, 768, 3072), 0, 4),
)
SMALL = Shape("small", 70, 64, 128)


def rows(
    shape: Shape,
    forward_kernels: int = 4,
    backward_kernels: int = 6,
    *,
    compiled: bool = False,
    important: bool = False,
    on_gpu: bool = True,
) -> list[Row]:
    """Forward and backward of a shape, against eager and epilogues or, compiled, against compiled eager.

    Args:
        shape: The problem.
        forward_kernels: How many no earlier row compiles: statistics, folding, two matmuls.
        backward_kernels: The same of the backward: the gradients of these, and what combines their parts.
        compiled: Whether the peer is compiled; our kernels are by then.
        important: See Row.
        on_gpu: See Row.
    """
    found = []
    for backward, kernels in ((False, forward_kernels), (True, backward_kernels)):
        cost = Cost(4.0 if compiled else kernels * KERNEL_S, 0.5, 1.0)
        name = f"{shape.name} {'backward' if backward else 'forward'}{', compiled eager' if compiled else ''}"
        fill = partial(_fill, shape, backward, compiled)
        found.append(Row("mlp", name, cost, fill, important=important, on_gpu=on_gpu))
    return found


def matmul_row(shape: Shape) -> Row:
    """fc1's product without any epilogue, to say how much of cuBLAS the main loop reaches."""
    return Row("mlp", f"matmul alone {shape.name}", Cost(KERNEL_S, 0.2, 0.5), partial(_fill_matmul, shape))


def _fill(shape: Shape, backward: bool, compiled: bool, context: Context) -> Found:
    found = check(shape, backward, context)
    if not found["correct"] or not context.on_gpu:
        return found
    parameters = [parameter.requires_grad_(backward) for parameter in _parameters(shape, context)]
    inputs = [torch.randn(shape.rows, shape.width, device=context.device).bfloat16() for _ in range(ROTATIONS)]
    subjects = {"ours": _with_backend("triton")}
    if compiled:
        subjects["compiled"] = torch.compile(_with_backend("eager"), dynamic=False)
    else:
        subjects["eager"] = _with_backend("eager")
    if not compiled and not backward:
        subjects["cuBLASLt GELU epilogue"] = _cublaslt_epilogue
    factory = _backward_call if backward else _forward_call
    makers = {name: partial(factory, function, inputs, parameters) for name, function in subjects.items()}
    flop = 2 * shape.flop if backward else shape.flop
    return found | measure(makers, context, OPERATOR_PROTOCOL, flop=flop, moved=shape.bytes_moved(backward))


def check(shape: Shape, backward: bool, context: Context) -> Found:
    """Ours and eager against eager in fp64."""
    tensors = [torch.randn(shape.rows, shape.width, device=context.device), *_parameters(shape, context)]
    tensors[0] = tensors[0].to(context.dtype)
    grad = torch.randn(shape.rows, shape.width, device=context.device).to(context.dtype)

    def results(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        out = _with_backend(backend)(*leaves)
        return list(torch.autograd.grad(out, leaves, grad.to(dtype))) if backward else [out.detach()]

    ours, eager, exact = (
        results("triton", context.dtype),
        results("eager", context.dtype),
        results("eager", torch.float64),
    )
    return judge(ours, eager, exact, GRADIENT_FACTOR if backward else FORWARD_FACTOR)


def _parameters(shape: Shape, context: Context) -> list[Tensor]:
    """norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias."""
    C, H = shape.width, shape.hidden

    def normal(*size: int, scale: float, shift: float = 0.0) -> Tensor:
        return (torch.randn(size, device=context.device) * scale + shift).to(context.dtype)

    return [
        normal(C, scale=0.2, shift=1.0), normal(C, scale=0.1), normal(H, C, scale=C**-0.5), normal(H, scale=0.1),
        normal(C, H, scale=H**-0.5), normal(C, scale=0.1),
    ]  # fmt: skip


def _with_backend(backend: str) -> Callable[..., Tensor]:
    from vit_fast.ops import layer_norm_mlp

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return layer_norm_mlp(x, *parameters, backend=backend)

    return run


def _cublaslt_epilogue(x: Tensor, g: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    normed = F.layer_norm(x, (x.shape[-1],), g, b, 1e-6)
    hidden = torch._addmm_activation(b1, normed, w1.t(), use_gelu=True)
    return torch.addmm(b2, hidden, w2.t()) + x


def _forward_call(function: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> Call:
    def run(index: int) -> object:
        with torch.no_grad():
            return function(inputs[index % len(inputs)], *parameters)

    return run


def _backward_call(function: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor]) -> Call:
    """Only the backward is timed: the forwards are done beforehand and kept."""
    graphs = []
    for x in inputs:
        leaf = x.detach().requires_grad_()
        graphs.append((function(leaf, *parameters), [leaf, *parameters], torch.randn_like(x)))

    def run(index: int) -> object:
        out, leaves, grad = graphs[index % len(graphs)]
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return run


def _fill_matmul(shape: Shape, context: Context) -> Found:
    linear = partial(linear_residual, bias=None, layer_scale=None, residual=None)
    inputs = [torch.randn(shape.rows, shape.width, device=context.device).bfloat16() for _ in range(ROTATIONS)]
    weight = torch.randn(shape.hidden, shape.width, device=context.device).bfloat16()
    exact = inputs[0].double() @ weight.double().t()
    ours, cublas = linear(inputs[0], weight)[0], inputs[0] @ weight.t()
    found = judge([ours], [cublas], [exact], FORWARD_FACTOR)
    del ours, cublas, exact
    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: lambda index: linear(inputs[index % ROTATIONS], weight),
        "cuBLAS": lambda: lambda index: inputs[index % ROTATIONS] @ weight.t(),
    }
    moved = 2 * shape.rows * (shape.width + shape.hidden)
    return found | measure(makers, context, OPERATOR_PROTOCOL, flop=shape.flop // 2, moved=moved)
