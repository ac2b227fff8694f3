"""`vit-fast kernels --host`: counts the launches of a block and measures their host time, without a GPU.

    report = measure("sm_90")        # in separate processes
    print(render(report))

Triton's launch path runs unchanged, with a stand-in driver that launches nothing
(`kernels/inspect/stand_in_driver.py`). Launches and tensor map descriptors are counted for ViT-B, B = 1. Time is
measured for blocks of vit-fast and timm (eager) with small tensors, so that dispatch dominates. It is process CPU time,
which excludes the work of a real CUDA driver and allocator.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import create_model, freeze
from ..benchmarks.machine import describe
from ..benchmarks.operators import NARROW_TOWER, tower_calls
from ..blocks.block import run_blocks
from ..ops.attention import attention_qkvpacked
from ..ops.block import fused_block
from ..ops.descriptions import BlockTensors

if TYPE_CHECKING:
    from ..kernels.inspect.stand_in_driver import StandInDriver

NOTE = "Host time of Triton's launch path, with a stand-in driver that runs no kernels. No GPU time is measured."
MODEL = "vit_base_patch16_224"
DEPTH = 12  # blocks of MODEL; they share the overhead of a compiled call
NARROW = {"embed_dim": 64, "num_heads": 1, "img_size": 32, "patch_size": 8}
REPEATS = 15
SECONDS_A_REPEAT = 0.02

Call = Callable[[], object]


@dataclass(frozen=True)
class HostCall:
    """A call, and the number of blocks that it runs."""

    call: Call
    blocks: int = 1


def measure(arch: str) -> dict[str, Any]:
    """Returns the results of `vit-fast kernels --host`: compiles in a new process, and measures in a second one.

    Args:
        arch: Architecture of the launches, e.g. "sm_90".
    Raises:
        RuntimeError: a process failed, e.g. without a C compiler, with a GPU, or for an unknown architecture.
    """
    with tempfile.TemporaryDirectory(prefix="vit-fast-host-") as cache:
        cold = _run(arch, "compile", cache)
        report = _run(arch, "measure", cache)
    report["seconds_cold"] = cold["seconds"]
    report["seconds_warm"] = report.pop("seconds")
    return report


def _run(arch: str, what: str, cache: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # keep one heap: otherwise malloc maps large tensors again in each call, unlike on a GPU
    environment |= {
        "TRITON_CACHE_DIR": cache,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
    }
    command = [sys.executable, "-c", f"from {__name__} import run_child; run_child({arch!r}, {what!r})"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1].partition("Error: ")[2] or lines[-1])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def run_child(arch: str, what: str) -> None:
    """Installs the stand-in driver in this process, measures, and prints the results as JSON.

    Args:
        arch: See measure.
        what: "compile" counts only, "measure" also measures time.
    """
    from ..kernels.inspect import stand_in_driver

    torch.set_num_threads(1)
    driver = stand_in_driver.install(arch)
    start = time.perf_counter()
    full = our_calls()
    counts = {name: count(driver, one) for name, one in full.items()}
    report: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 2)}
    if what == "measure":
        machine = describe("cpu")
        report |= {
            "note": NOTE, "arch": arch, "machine": machine, "kernels": driver.counters().modules,
            "violations": driver.violations(),
        }  # fmt: skip
        compiled = compiled_calls(**NARROW)
        counts |= {name: count(driver, one) for name, one in compiled.items()}
        report["rows"] = _rows(our_calls(**NARROW) | compiled, counts)
        report["towers"] = _tower_rows(driver)
    print(json.dumps(report))


def our_calls(**changes: Any) -> dict[str, HostCall]:
    """Returns calls of vit-fast's operators, and of a block in inference and in training.

    Args:
        changes: Fields of ViT-B's configuration to replace.
    """
    model, x = _model_and_tokens(**changes)
    calls = {name: HostCall(_without_gradient(call)) for name, call in _operator_calls(model.blocks[0], x).items()}
    frozen = copy.deepcopy(model.blocks).eval()
    freeze(frozen)
    calls["block, inference, frozen"] = HostCall(_without_gradient(partial(run_blocks, frozen, x)), DEPTH)
    return calls | _block_calls(model.blocks, run_blocks, x)


def compiled_calls(**changes: Any) -> dict[str, HostCall]:
    """Returns calls of vit-fast's blocks, compiled by torch.compile into one graph; see our_calls."""
    model, x = _model_and_tokens(**changes)
    compiled = torch.compile(partial(run_blocks, model.blocks.eval()), fullgraph=True, dynamic=False)
    return {"block, inference, compiled": HostCall(_without_gradient(partial(compiled, x)), DEPTH)}


def _model_and_tokens(**changes: Any) -> tuple[Any, Tensor]:
    model = create_model(MODEL, backend="triton", depth=DEPTH, num_classes=0, **changes).bfloat16()
    return model, torch.zeros(1, model.config.seqlen, model.config.embed_dim, dtype=torch.bfloat16)


def _tower_rows(driver: StandInDriver) -> list[dict[str, Any]]:
    """Returns launches and host time of Qwen2.5-VL's tower per image size, without and with (empty) graphs."""
    from ..run import graph_runner

    def capture(run: Call, device: torch.device, pool: object) -> Call:
        output = run()
        return lambda: output

    graph_runner.capture = capture
    graph_runner._no_graph_reasons = lambda model, like: []
    rows = []
    for size, candidates in tower_calls("cpu", scale=8, **NARROW_TOWER).items():
        calls = {name: HostCall(call) for name, call in candidates.items()}
        counts = {name: count(driver, one) for name, one in calls.items()}
        times = _host_us(calls)
        rows += [{"size": size, "candidate": name, **counts[name], "us": times[name]} for name in calls]
    return rows


def timm_calls() -> dict[str, HostCall]:
    """Returns calls of timm's blocks in eager mode with small tensors; {} if timm is not installed."""
    if importlib.util.find_spec("timm") is None:
        return {}
    from timm.models.vision_transformer import Block

    width, heads = NARROW["embed_dim"], NARROW["num_heads"]
    tokens = (NARROW["img_size"] // NARROW["patch_size"]) ** 2 + 1
    blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(DEPTH))).bfloat16()
    return _block_calls(blocks, nn.Sequential.forward, torch.zeros(1, tokens, width, dtype=torch.bfloat16))


def _block_calls(
    blocks: nn.Sequential, run: Callable[[nn.Sequential, Tensor], Tensor], x: Tensor
) -> dict[str, HostCall]:
    evaluated, trained = copy.deepcopy(blocks).eval(), blocks.train()
    wanted = (x.clone().requires_grad_(), *trained.parameters())
    grad_output = torch.zeros_like(x)

    def step() -> object:
        return torch.autograd.grad(run(trained, wanted[0]), wanted, grad_output)

    return {
        "block, inference": HostCall(_without_gradient(partial(run, evaluated, x)), DEPTH),
        "block, training forward": HostCall(partial(run, trained, wanted[0]), DEPTH),
        "block, forward + backward": HostCall(step, DEPTH),
    }


def _without_gradient(call: Call) -> Call:
    return torch.no_grad()(call)


def _operator_calls(block: Any, x: Tensor) -> dict[str, Call]:
    """Returns calls of the operators with a block's tensors. Both halves pass on LayerNorm statistics."""
    attn, mlp, norm1, norm2 = block.attn, block.mlp, block.norm1, block.norm2
    absent: Any = (None,) * 7
    first = partial(
        fused_block, x, None, BlockTensors(
            norm1.weight, norm1.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias, None, *absent
        ), heads=attn.num_heads, eps=(norm1.eps, 0.0), next_statistics=True,
    )  # fmt: skip
    packed = x.new_zeros(*x.shape[:-1], 3, attn.num_heads, x.shape[-1] // attn.num_heads)
    with torch.no_grad():
        _, statistics = first()
    return {
        "attention": partial(attention_qkvpacked, packed, backend="triton"),
        "LN + attention half": first,
        "LN + MLP": partial(
            fused_block, x, statistics, BlockTensors(
                norm2_weight=norm2.weight, norm2_bias=norm2.bias, fc1_weight=mlp.fc1.weight, fc1_bias=mlp.fc1.bias,
                fc2_weight=mlp.fc2.weight, fc2_bias=mlp.fc2.bias,
            ), eps=(0.0, norm2.eps), activation=mlp.activation, next_statistics=True,
        ),
    }  # fmt: skip


def count(driver: StandInDriver, one: HostCall) -> dict[str, float]:
    """Counts the steady-state launches and descriptors of a block."""
    for _ in range(4):
        one.call()
    before = driver.counters()
    one.call()
    after = driver.counters()
    return {
        "launches": (after.launches - before.launches) / one.blocks,
        "descriptors": (after.descriptors - before.descriptors) / one.blocks,
    }


def _rows(ours: Mapping[str, HostCall], counts: Mapping[str, dict[str, float]]) -> list[dict[str, Any]]:
    timm = timm_calls()
    both = {("ours", name): one for name, one in ours.items()}
    both |= {("timm", name): one for name, one in timm.items()}
    times = _host_us(both)
    rows = []
    for name in ours:
        us, timm_us = times["ours", name], times.get(("timm", name))
        ratio = round(us["median"] / timm_us["median"], 2) if timm_us else None
        rows.append({"name": name, **counts[name], "ours_us": us, "timm_us": timm_us, "ratio": ratio})
    return rows


def _host_us(timed: Mapping[Any, HostCall]) -> dict[Any, dict[str, float]]:
    """Returns process CPU time per block in microseconds: median, 20th and 80th percentile of interleaved rounds."""
    calls = {}
    for key, one in timed.items():
        one.call()
        calls[key] = max(1, round(SECONDS_A_REPEAT / max(_seconds(one, 1), 1e-6)))
    samples: dict[Any, list[float]] = {key: [] for key in timed}
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            for key, one in timed.items():
                samples[key].append(_seconds(one, calls[key]) / calls[key] / one.blocks * 1e6)
    finally:
        gc.enable()
    found = {}
    for key, values in samples.items():
        fifths = statistics.quantiles(values, n=5)
        found[key] = {
            "median": round(statistics.median(values), 1),
            "p20": round(fifths[0], 1),
            "p80": round(fifths[-1], 1),
        }
    return found


def _seconds(one: HostCall, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        one.call()
    return time.process_time() - start


def render(report: Mapping[str, Any]) -> str:
    """Formats a report as text."""
    machine, packages = report["machine"], report["machine"]["packages"]
    columns = "vit-fast us (p20-p80)", "timm us (p20-p80)"
    lines = [
        report["note"],
        f"{report['arch']}; {machine['cpu']}, 1 thread, torch {packages['torch']}, triton {packages['triton']}",
        f"{'':28s} {'launches':>8s} {'descriptors':>11s} {columns[0]:>24s} {columns[1]:>24s}     ratio",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['name']:28s} {row['launches']:8g} {row['descriptors']:11g} {_spread(row['ours_us']):>24s} "
            f"{_spread(row['timm_us']):>24s} {'' if row['ratio'] is None else row['ratio']:>9}"
        )
    if all(row["timm_us"] is None for row in report["rows"]):
        lines.append("timm is not installed, so there is no comparison: pip install timm")
    lines.append(
        "Launches and descriptors are counted for ViT-B, B = 1, bf16. Times are microseconds per block with "
        "embed_dim=64 and 17 tokens."
    )
    lines.append(
        f"{report['kernels']} kernels compiled for ViT-B: {report['seconds_cold']:.1f} s cold, "
        f"{report['seconds_warm']:.1f} s with a warm cache"
    )
    if report["towers"]:
        lines.append("Qwen2.5-VL's tower with embed_dim=64, at 1/8 of each image size; graphs are not replayed:")
        lines.append(f"{'':18s} {'':8s} {'launches':>8s} {'host us (p20-p80)':>24s}")
    for row in report["towers"]:
        spread = _spread(row["us"])
        lines.append(f"{row['size']:18s} {row['candidate']:8s} {row['launches']:8g} {spread:>24s}")
    return "\n".join([*lines, *(f"rejected by the driver: {text}" for text in report["violations"])])


def _spread(us: Mapping[str, float] | None) -> str:
    return "" if us is None else f"{us['median']:.0f} ({us['p20']:.0f}-{us['p80']:.0f})"
