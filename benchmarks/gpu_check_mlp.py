"""LayerNorm + MLP of the gpu-check: the operator, its matmul alone, and whole models, against what they have to beat.

Each row: is it right (against fp64 over all the rows that are timed, by the 2x / 3x rule), then ms, TFLOP/s, GB/s, the
share of the floor that bytes and FLOP set on this device, and how many times faster it is than the best peer of the
same run. On a machine without a GPU the kernels run in Triton's interpreter on a small shape for the first question;
the others are "not measured".

Peers of the operator: eager, compiled eager, and in inference LayerNorm + cuBLASLt's GELU epilogue + matmul + residual
(tanh GELU: its only one). Peer of the matmul: torch.matmul. Peers of the model: timm compiled where timm is installed,
and our own model on the sdpa backend, compiled; at batch 1 all of them, ours too, replay CUDA graphs
(mode "reduce-overhead").
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .gpu_check import write_json
from .machine import measure_ceilings
from .timing import Protocol, time_interleaved

PROTOCOL = Protocol(repeats=50, seconds=0.25, launch="hidden")
MODEL_PROTOCOL = Protocol(repeats=10, seconds=0.5, launch="counted")
_ROTATIONS = 3
Call = Callable[[int], object]


@dataclass(frozen=True)
class Shape:
    """One LayerNorm + MLP problem in bf16: M rows of width C, hidden width F."""

    model: str
    rows: int
    width: int
    hidden: int

    @property
    def name(self) -> str:
        return f"{self.model} M{self.rows} C{self.width} F{self.hidden}"

    @property
    def flop(self) -> int:
        return 4 * self.rows * self.width * self.hidden

    def bytes_moved(self, backward: bool) -> int:
        """What has to be read and written once: tokens and hidden layer, in bf16."""
        narrow, wide = 2 * self.rows * self.width, 2 * self.rows * self.hidden
        # forward: x, y, h twice; backward: x, dy, dx, z, and h and dz written once and read once and twice
        return 3 * narrow + 6 * wide if backward else 2 * narrow + 2 * wide


# The target's shape first, then by how much each is worth should time run out.
SHAPES = (
    Shape("ViT-B/16 B256", 50_432, 768, 3072),
    Shape("ViT-L/16 B64", 12_608, 1024, 4096),
    Shape("ViT-S/16 B256", 50_432, 384, 1536),
    Shape("ViT-B/16 B32", 6_304, 768, 3072),
    Shape("ViT-B/16 B1", 197, 768, 3072),
)
INTERPRETER_SHAPES = (Shape("small", 70, 64, 128),)
# model, images a batch: inference in the first list, a training step in the second
MODELS = (
    ("vit_base_patch16_224", 256),
    ("vit_base_patch16_224", 1),
    ("vit_small_patch16_224", 256),
    ("vit_large_patch16_224", 128),
)
TRAINED_MODELS = (("vit_base_patch16_224", 128),)
# Of a forward of one image.
_GFLOP = {"vit_small_patch16_224": 9.2, "vit_base_patch16_224": 35.1, "vit_large_patch16_224": 123.1}
_NO_MAX_AUTOTUNE = "not measured: autotuning every matmul takes longer than this suite has"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 0 when every row that ran is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    device = torch.device("cuda" if on_gpu else "cpu")
    record: dict[str, Any] = {"rows": []}
    if on_gpu:
        record["ceilings"] = measure_ceilings(device, [torch.bfloat16])
    for name, fill in _rows(device, record.get("ceilings")):
        row: dict[str, Any] = {"name": name}
        if time.monotonic() > end:
            row["error"] = "no time left"
        else:
            try:
                row |= fill()
            except Exception as error:  # a row that fails is a result, and the others go on
                row["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            if on_gpu:
                torch.cuda.empty_cache()
        record["rows"].append(row)
        write_json(options.out, record)
        print(row, flush=True)
    return int(any(not row.get("correct") and row.get("error") != "no time left" for row in record["rows"]))


def _rows(device: torch.device, ceilings: dict[str, Any] | None) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every row's name and what fills it, the targets first."""
    rows: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for shape in SHAPES if ceilings is not None else INTERPRETER_SHAPES:
        for backward in (False, True):
            name = f"layer_norm_mlp {shape.name} {'backward' if backward else 'forward'}"
            rows.append((name, partial(_operator_row, shape, backward, device, ceilings)))
        if shape is SHAPES[0] and ceilings is not None:
            rows.append((f"matmul alone {shape.name}", partial(_matmul_row, shape, device, ceilings)))
            for model, batch in MODELS:
                rows.append((f"{model} B{batch} inference", partial(_model_row, model, batch, False, ceilings)))
            for model, batch in TRAINED_MODELS:
                rows.append((f"{model} B{batch} training step", partial(_model_row, model, batch, True, ceilings)))
    return rows


def _parameters(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias."""
    C, H = shape.width, shape.hidden

    def normal(*size: int, scale: float, shift: float = 0.0) -> Tensor:
        return (torch.randn(size, device=device) * scale + shift).to(dtype)

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


def _operator_row(
    shape: Shape, backward: bool, device: torch.device, ceilings: dict[str, Any] | None
) -> dict[str, Any]:
    row = _check(shape, backward, device)
    if not row["correct"] or ceilings is None:
        return row
    parameters = [p.requires_grad_(backward) for p in _parameters(shape, device, torch.bfloat16)]
    inputs = [torch.randn(shape.rows, shape.width, device=device).bfloat16() for _ in range(_ROTATIONS)]
    subjects = {"ours": _with_backend("triton"), "eager": _with_backend("eager")}
    subjects["compiled"] = torch.compile(_with_backend("eager"), dynamic=False)
    if not backward:
        subjects["cuBLASLt GELU epilogue"] = _cublaslt_epilogue
    factory = _backward_call if backward else _forward_call
    makers: dict[str, Callable[[], Call]] = {
        name: partial(factory, function, inputs, parameters) for name, function in subjects.items()
    }
    flop = 2 * shape.flop if backward else shape.flop
    return row | _measure(makers, PROTOCOL, flop, shape.bytes_moved(backward), ceilings)


def _check(shape: Shape, backward: bool, device: torch.device) -> dict[str, Any]:
    """Ours and eager against eager in fp64; on a CPU in fp16, whose arithmetic the interpreter gets right."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    tensors = [torch.randn(shape.rows, shape.width, device=device).to(dtype), *_parameters(shape, device, dtype)]
    grad = torch.randn(shape.rows, shape.width, device=device).to(dtype)

    def results(backend: str, target: torch.dtype) -> list[Tensor]:
        leaves = [tensor.detach().to(target).requires_grad_() for tensor in tensors]
        out = _with_backend(backend)(*leaves)
        return list(torch.autograd.grad(out, leaves, grad.to(target))) if backward else [out.detach()]

    worst, correct = 0.0, True
    for ours, eager, exact in zip(results("triton", dtype), results("eager", dtype), results("eager", torch.float64)):
        error, eager_error = (
            float((result.double() - exact).abs().nan_to_num(torch.inf).max()) for result in (ours, eager)
        )
        allowed = (3 if backward else 2) * eager_error + torch.finfo(dtype).eps / 2 * float(exact.abs().max())
        correct &= error <= allowed
        worst = max(worst, error / allowed)
    text = f"largest error is {worst:.2f} of what is allowed"
    return {"correct": correct, "correctness": text, "dtype": str(dtype).removeprefix("torch.")}


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


def _matmul_row(shape: Shape, device: torch.device, ceilings: dict[str, Any]) -> dict[str, Any]:
    """fc1's product without any epilogue, to say how much of cuBLAS the main loop reaches."""
    from vit_fast.kernels.linear import linear_residual

    inputs = [torch.randn(shape.rows, shape.width, device=device).bfloat16() for _ in range(_ROTATIONS)]
    weight = torch.randn(shape.hidden, shape.width, device=device).bfloat16()
    ours, cublas = (linear_residual(inputs[0], weight, None, None, None)[0], inputs[0] @ weight.t())
    error = float((ours.float() - cublas.float()).abs().max() / cublas.float().abs().max())
    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: lambda index: linear_residual(inputs[index % _ROTATIONS], weight, None, None, None),
        "cuBLAS": lambda: lambda index: inputs[index % _ROTATIONS] @ weight.t(),
    }
    moved = 2 * shape.rows * (shape.width + shape.hidden)
    row = {"correct": error <= 2**-7, "correctness": f"differs from cuBLAS by {error:.1e} of the largest"}
    return row | _measure(makers, PROTOCOL, shape.flop // 2, moved, ceilings)


def _model_row(model: str, batch: int, training: bool, ceilings: dict[str, Any]) -> dict[str, Any]:
    """A whole model in bf16: a forward, or a forward, backward and AdamW step; with peak memory of each subject."""
    import vit_fast
    from vit_fast.runtime import CompileMode, compile

    images = torch.randn(batch, 3, 224, 224, device="cuda").bfloat16()
    ours, reference = (vit_fast.create_model(model, backend=backend).cuda() for backend in ("triton", "sdpa"))
    reference.load_state_dict(ours.state_dict())
    with torch.no_grad():
        exact = reference.double()(images[:2].double())
        # ours at the timed batch: the batch decides which kernels run
        eager, found = reference.bfloat16()(images[:2]), ours.bfloat16()(images)[:2]
    error, allowed = ((result.double() - exact).norm() / exact.norm() for result in (found, eager))
    correct = bool(error <= 2 * allowed + 2**-9)
    # launching one image's kernels takes longer than running them: there everybody replays CUDA graphs
    mode: CompileMode = "reduce-overhead" if batch == 1 else "default"
    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: _model_call(compile(ours, mode) if batch == 1 else ours, images, training),
        "sdpa compiled": lambda: _model_call(compile(reference, mode), images, training),
        "timm compiled": lambda: _model_call(compile(_timm_model(model), mode), images, training),
    }
    row = {"correct": correct, "correctness": f"error {error:.1e}, eager's {allowed:.1e}"}
    flop = int(_GFLOP[model] * 1e9) * batch * (3 if training else 1)
    weight_bytes = 2 * sum(parameter.numel() for parameter in ours.parameters())
    measured = _measure(makers, MODEL_PROTOCOL, flop, weight_bytes, ceilings)
    measured["missing"] |= {"timm max-autotune": _NO_MAX_AUTOTUNE}
    return row | measured | {"compile_mode": mode, "images_per_s": 1000 * batch / measured["ms"]}


def _timm_model(model: str) -> torch.nn.Module:
    import timm

    created: torch.nn.Module = timm.create_model(model).cuda().bfloat16()
    return created


def _model_call(model: torch.nn.Module, images: Tensor, training: bool) -> Call:
    if not training:
        model.eval()

        def infer(_: int) -> object:
            with torch.no_grad():
                return model(images)

        return infer
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)
    labels = torch.randint(0, 1000, (images.shape[0],), device=images.device)

    def step(_: int) -> object:
        optimizer.zero_grad()
        F.cross_entropy(model(images).float(), labels).backward()
        return optimizer.step()

    return step


def _measure(
    makers: dict[str, Callable[[], Call]], protocol: Protocol, flop: int, moved: int, ceilings: dict[str, Any]
) -> dict[str, Any]:
    """Ours and the peers in turns; peers that cannot run are named with the reason."""
    device = torch.device("cuda")
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    peak_MiB: dict[str, float] = {}
    for name, make in makers.items():
        try:
            call = make()
            call(0)  # compiles, and makes what is kept between calls
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call(1)
            torch.cuda.synchronize()
            peak_MiB[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            calls[name] = call
        except Exception as error:  # a peer that is not installed or does not run is named, not dropped
            missing[name] = f"{type(error).__name__}: {str(error).strip()[:120]}"
    if "ours" not in calls:
        raise RuntimeError(missing["ours"])
    timings = time_interleaved(calls, device, protocol)
    ms = timings["ours"].ms
    peers = {name: timing.ms for name, timing in timings.items() if name != "ours"}
    best = min(peers, key=lambda name: peers[name]) if peers else None
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
        "peak_MiB": peak_MiB,
        "missing": missing,
        "best_peer": best,
        "ratio": peers[best] / ms if best else None,
    }


if __name__ == "__main__":
    sys.exit(main())
