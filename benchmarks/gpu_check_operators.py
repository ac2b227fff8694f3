"""Attention, LayerNorm + MLP and its matmul alone in the gpu-check, against what they have to beat.

Each row: is it right (ours runs at the size that is timed, so that the very kernels that are timed are checked), then
how fast beside the best peer of the same run. Peer of the matmul: torch.matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from vit_fast.accuracy import FORWARD_FACTOR
from vit_fast.ops.linear import linear_residual

from .gpu_check_rows import KERNEL_S, OPERATOR_PROTOCOL, ROTATIONS, Context, Cost, Found, Row, judge, measure
from .operators import Attention, LayerNormMlp, Operator, call, check
from .timing import Call

ATTENTION = Attention("ViT-B/16", 256, 197, 12, 64)
LARGE_ATTENTION = Attention("ViT-L/16-384", 32, 577, 16, 64)
MLP = LayerNormMlp("ViT-B/16 B256", 50_432, 768, 3072)
# By how much each is worth should time run out, with the kernels of its forward and backward that no earlier row
# compiles, counted from their launches: up to 256 keys every number of keys has its own forward.
OTHERS: tuple[tuple[Operator, int, int], ...] = (
    (Attention("ViT-H/14", 64, 257, 16, 80), 1, 2),
    (Attention("SigLIP-So400m/14-384", 32, 729, 16, 72), 1, 2),
    (Attention("ViT-B/16", 32, 197, 12, 64), 0, 0),
    (Attention("ViT-S/16", 256, 197, 6, 64), 0, 2),
    (Attention("ViT-B/16-512", 32, 1025, 12, 64), 1, 0),
    (Attention("ViT-B/16 long", 4, 4096, 12, 64), 1, 2),
    (Attention("SigLIP-B/16", 256, 196, 12, 64), 1, 0),
    (Attention("ViT-B/16", 1, 197, 12, 64), 0, 0),
    (Attention("ViT-L/16", 256, 197, 16, 64), 0, 0),
    (LayerNormMlp("ViT-L/16 B64", 12_608, 1024, 4096), 0, 3),
    (LayerNormMlp("ViT-S/16 B256", 50_432, 384, 1536), 0, 0),
    (LayerNormMlp("ViT-B/16 B32", 6_304, 768, 3072), 1, 2),
    (LayerNormMlp("ViT-B/16 B1", 197, 768, 3072), 0, 4),
)
SMALL = (Attention("small", 2, 50, 2, 64), LayerNormMlp("small", 70, 64, 128))


def rows(
    task: Operator,
    forward_kernels: int = 0,
    backward_kernels: int = 0,
    *,
    compiled: bool = False,
    important: bool = False,
    on_gpu: bool = True,
) -> list[Row]:
    """Forward and backward of a task, against the peers that need no compiler or, compiled, against the one that does.

    Args:
        task: The problem.
        forward_kernels: How many of ours no earlier row compiles.
        backward_kernels: The same of the backward.
        compiled: Whether the peer is compiled; our kernels are by then.
        important: See Row.
        on_gpu: See Row.
    """
    found = []
    for backward, kernels in ((False, forward_kernels), (True, backward_kernels)):
        cost = Cost(4.0 if compiled else kernels * KERNEL_S, 0.5, 1.0)
        peer = f", {'FlexAttention' if task.part == 'attention' else 'compiled eager'}" if compiled else ""
        name = f"{task.name} {'backward' if backward else 'forward'}{peer}"
        fill = partial(_fill, task, backward, compiled)
        found.append(Row(task.part, name, cost, fill, important=important, on_gpu=on_gpu))
    return found


def _fill(task: Operator, backward: bool, compiled: bool, context: Context) -> Found:
    found = check(task, "triton", backward, context.device, context.dtype)
    if not found["correct"] or not context.on_gpu:
        return found
    first, grad = task.leaves(context.device, context.dtype), task.grad(context.device, context.dtype)
    # the first leaf is what flows through; parameters stay where they are
    inputs = [([torch.randn_like(first[0]), *first[1:]], torch.randn_like(grad)) for _ in range(ROTATIONS)]
    functions = task.entrants()
    names = {"ours": "triton"} | {peer: peer for peer in task.peers(backward, compiled)}
    makers = {shown: partial(call, functions[name], inputs, backward) for shown, name in names.items()}
    flop, moved = task.flop_of(backward), task.bytes_moved(backward)
    return found | measure(makers, context, OPERATOR_PROTOCOL, flop=flop, moved=moved)


def matmul_row(task: LayerNormMlp) -> Row:
    """fc1's product without any epilogue, to say how much of cuBLAS the main loop reaches."""
    return Row("mlp", f"matmul alone {task.name}", Cost(KERNEL_S, 0.2, 0.5), partial(_fill_matmul, task))


def _fill_matmul(task: LayerNormMlp, context: Context) -> Found:
    inputs = [torch.randn(task.rows, task.width, device=context.device).bfloat16() for _ in range(ROTATIONS)]
    weight = torch.randn(task.hidden, task.width, device=context.device).bfloat16()
    linear = partial(linear_residual, bias=None, layer_scale=None, residual=None)
    exact = inputs[0].double() @ weight.double().t()
    ours, cublas = linear(inputs[0], weight)[0], inputs[0] @ weight.t()
    found = judge([ours], [cublas], [exact], FORWARD_FACTOR)
    del ours, cublas, exact
    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: lambda index: linear(inputs[index % ROTATIONS], weight),
        "cuBLAS": lambda: lambda index: inputs[index % ROTATIONS] @ weight.t(),
    }
    moved = 2 * task.rows * (task.width + task.hidden)
    return found | measure(makers, context, OPERATOR_PROTOCOL, flop=task.flop // 2, moved=moved)
