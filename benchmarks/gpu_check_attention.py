"""Attention of the gpu-check: forward and backward at ViT and SigLIP shapes against SDPA's backends and FlexAttention.

Each row: is it right (against fp64, by the 2x / 3x rule; ours runs at the batch that is timed, so that the very kernel
that is timed is checked, on its first and last image), then ms, TFLOP/s, GB/s, the share of the floor that bytes and
FLOP set on this device, and how many times faster it is than the best peer of the same run. On a machine without a GPU
the kernels run in Triton's interpreter on a small shape for the first question; the others are "not measured".
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .gpu_check import write_json
from .machine import measure_ceilings
from .timing import Protocol, time_interleaved

PROTOCOL = Protocol(repeats=50, seconds=0.25, launch="hidden")
_CHECKED_IMAGES = [0, -1]  # images are independent; the last one has the largest offsets
_ROTATIONS = 3
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
    flex: bool = False  # FlexAttention is compiled for each shape, too slowly to do it for all

    @property
    def name(self) -> str:
        return f"{self.model} B{self.batch} N{self.tokens} H{self.heads} D{self.head_dim}"

    @property
    def flop(self) -> int:
        return 4 * self.batch * self.heads * self.tokens**2 * self.head_dim

    @property
    def tensor_bytes(self) -> int:
        return 2 * self.batch * self.heads * self.tokens * self.head_dim


# The target's shape first, then by how much each is worth should time run out.
SHAPES = (
    Shape("ViT-B/16", 256, 197, 12, 64, flex=True),
    Shape("ViT-B/16", 32, 197, 12, 64),
    Shape("ViT-L/16-384", 32, 577, 16, 64, flex=True),
    Shape("ViT-H/14", 64, 257, 16, 80),
    Shape("ViT-S/16", 256, 197, 6, 64),
    Shape("SigLIP-So400m/14-384", 32, 729, 16, 72),
    Shape("ViT-B/16-512", 32, 1025, 12, 64),
    Shape("ViT-B/16 long", 4, 4096, 12, 64),
    Shape("SigLIP-B/16", 256, 196, 12, 64),
    Shape("ViT-B/16", 1, 197, 12, 64),
    Shape("ViT-L/16", 256, 197, 16, 64),
)
INTERPRETER_SHAPES = (Shape("small", 2, 50, 2, 64),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 0 when every row that ran is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=160)
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    device = torch.device("cuda" if on_gpu else "cpu")
    record: dict[str, Any] = {"rows": []}
    if on_gpu:
        record["ceilings"] = measure_ceilings(device, [torch.bfloat16])
    for shape in SHAPES if on_gpu else INTERPRETER_SHAPES:
        for backward in (False, True):
            row: dict[str, Any] = {"name": f"{shape.name} {'backward' if backward else 'forward'}"}
            if time.monotonic() > end:
                row["error"] = "no time left"
            else:
                _fill_row(row, shape, backward, device, record.get("ceilings"))
            record["rows"].append(row)
            write_json(options.out, record)
            print(row, flush=True)
    return int(any(not row.get("correct") and row.get("error") != "no time left" for row in record["rows"]))


def _fill_row(
    row: dict[str, Any], shape: Shape, backward: bool, device: torch.device, ceilings: dict[str, Any] | None
) -> None:
    try:
        row |= check(shape, backward, device)
        if row["correct"] and ceilings is not None:
            row |= measure(shape, backward, device, ceilings)
    except Exception as error:  # a row that fails is a result, and the others go on
        row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"


def _inputs(shape: Shape, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    qkv = torch.randn(batch, shape.tokens, 3, shape.heads, shape.head_dim, device=device).to(dtype)
    grad = torch.randn(batch, shape.tokens, shape.heads, shape.head_dim, device=device).to(dtype)
    return qkv, grad


def _ours(qkv: Tensor) -> Tensor:
    from vit_fast.ops import attention_qkvpacked

    return attention_qkvpacked(qkv, backend="triton")


def _eager(qkv: Tensor) -> Tensor:
    from vit_fast.ops import attention_qkvpacked

    return attention_qkvpacked(qkv, backend="eager")


def check(shape: Shape, backward: bool, device: torch.device) -> dict[str, Any]:
    """Ours and eager against eager in fp64; on a CPU in fp16, whose arithmetic the interpreter gets right."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    qkv, grad = _inputs(shape, shape.batch, device, dtype)
    few, few_grad = qkv[_CHECKED_IMAGES], grad[_CHECKED_IMAGES]
    ours = _result(_ours, qkv.requires_grad_(), grad, backward)[_CHECKED_IMAGES].double()
    eager = _result(_eager, few.clone().requires_grad_(), few_grad, backward).double()
    exact = _result(_eager, few.double().requires_grad_(), few_grad.double(), backward)
    error, eager_error = (float((result - exact).abs().nan_to_num(torch.inf).max()) for result in (ours, eager))
    rounding = torch.finfo(dtype).eps / 2 * float(exact.abs().max())
    allowed = (3 if backward else 2) * eager_error + rounding
    text = f"error {error:.2e}, allowed {allowed:.2e}"
    return {"correct": error <= allowed, "correctness": text, "dtype": str(dtype).removeprefix("torch.")}


def _result(function: Callable[[Tensor], Tensor], qkv: Tensor, grad: Tensor, backward: bool) -> Tensor:
    out = function(qkv)
    return torch.autograd.grad(out, qkv, grad)[0] if backward else out.detach()


def measure(shape: Shape, backward: bool, device: torch.device, ceilings: dict[str, Any]) -> dict[str, Any]:
    """Ours and the peers in turns; peers that cannot run are named with the reason."""
    inputs = [_inputs(shape, shape.batch, device, torch.bfloat16) for _ in range(_ROTATIONS)]
    calls: dict[str, Callable[[int], object]] = {}
    missing: dict[str, str] = {}
    for name, function in _subjects(shape, missing).items():
        try:
            calls[name] = _call(function, inputs, backward)
            calls[name](0)
            torch.cuda.synchronize()
        except Exception as error:  # a peer that does not take this shape is named, not dropped
            calls.pop(name, None)
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:120]}"
    if "ours" not in calls:
        raise RuntimeError(missing["ours"])
    timings = time_interleaved(calls, device, PROTOCOL)
    ms = timings["ours"].ms
    peers = {name: timing.ms for name, timing in timings.items() if name != "ours"}
    best = min(peers, key=lambda name: peers[name]) if peers else None
    # forward reads q, k, v and writes o; backward also reads o and do and writes dq, dk, dv
    moved = shape.tensor_bytes * (8 if backward else 4)
    flop = shape.flop * 5 // 2 if backward else shape.flop
    floor_ms = max(moved / ceilings["copy_GB_per_s"] / 1e6, flop / ceilings["matmul_TFLOP_per_s"]["bf16"] / 1e9)
    return {
        "ms": ms,
        "ms_p20": timings["ours"].ms_p20,
        "ms_p80": timings["ours"].ms_p80,
        "TFLOP_per_s": flop / ms / 1e9,
        "GB_per_s": moved / ms / 1e6,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / ms,
        "peers_ms": peers,
        "missing": missing,
        "best_peer": best,
        "ratio": peers[best] / ms if best else None,
    }


def _subjects(shape: Shape, missing: dict[str, str]) -> dict[str, Callable[[Tensor], Tensor]]:
    subjects: dict[str, Callable[[Tensor], Tensor]] = {"ours": _ours}
    for name, backend in _SDPA_BACKENDS.items():
        subjects[name] = _sdpa(backend)
    if shape.flex:
        subjects["flex"] = _flex
    else:
        missing["flex"] = "compiled for two shapes only, for time"
    return subjects


def _sdpa(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.transpose(1, 3).unbind(2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return run


_compiled_flex: Callable[..., Any] | None = None


def _flex(qkv: Tensor) -> Tensor:
    global _compiled_flex
    from torch.nn.attention.flex_attention import flex_attention

    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    out: Tensor = _compiled_flex(q, k, v)
    return out.transpose(1, 2)


def _call(
    function: Callable[[Tensor], Tensor], inputs: list[tuple[Tensor, Tensor]], backward: bool
) -> Callable[[int], object]:
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


if __name__ == "__main__":
    sys.exit(main())
