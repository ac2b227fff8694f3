"""Launches of a block without a GPU: host time (`vit-fast kernels --host`), modeled device time (`--model`).

Host time: Triton's launch path runs unchanged, with a stand-in driver that launches nothing. Launches are counted for
ViT-B, B = 1. Process CPU time is measured with small tensors, so that dispatch dominates.

Device time: launches are recorded, compiled, and modeled from machine code and tile sizes. Nothing is measured.
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
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import create_model, freeze
from ..benchmarks.machine import describe
from ..blocks.block import run_blocks
from ..ops.attention import attention_qkvpacked
from ..ops.block import fused_block
from ..ops.descriptions import BlockTensors
from ..variants import get_variant

if TYPE_CHECKING:
    from ..kernels.inspect.stand_in_driver import StandInDriver
    from ..kernels.launch import Launch

MEASURED = "Host time of Triton's launch path, with a stand-in driver that runs no kernels. No GPU time is measured."
MODELED = "Modeled from machine code and tile sizes, not measured."
MODEL = "vit_base_patch16_224"
DEPTH = 12  # blocks of MODEL; they share the overhead of a compiled call
NARROW = {"embed_dim": 64, "num_heads": 1, "img_size": 32, "patch_size": 8}
REPEATS = 15
SECONDS_A_REPEAT = 0.02
_COLUMNS = {
    "kernel": "launch", "tile": "tile/parts", "waves": "waves", "MB": "MB", "GFLOP": "GFLOP", "registers": "registers",
    "step_instructions": "step", "tile_instructions": "tile", "issue_us": "issue us", "floor_us": "floor us",
    "modelled_us": "modeled us", "bottleneck": "bottleneck",
}  # fmt: skip

Call = Callable[[], object]


def measure_host_time(arch: str) -> dict[str, Any]:
    """Returns the results of `vit-fast kernels --host`, measured in a new process; RuntimeError if that fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # keep one heap: otherwise malloc maps large tensors again in each call, unlike on a GPU
    heap = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**30))
    command = [sys.executable, "-c", f"from {__name__} import run_child; run_child({arch!r})"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | heap | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1].partition("Error: ")[2] or lines[-1])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def run_child(arch: str) -> None:
    """Installs the stand-in driver in this process, counts launches, measures, and prints the results as JSON."""
    from ..kernels.inspect import stand_in_driver

    torch.set_num_threads(1)
    driver = stand_in_driver.install(arch)
    counts = {name: _count(driver, name, call) for name, call in _our_calls().items()}
    kernels, narrow = driver.counters().modules, _our_calls(**NARROW)
    compiled = _compiled_calls(**NARROW)
    counts |= {name: _count(driver, name, call) for name, call in compiled.items()}
    report = {
        "note": MEASURED, "arch": arch, "machine": describe("cpu"), "kernels": kernels,
        "rows": _rows(narrow | compiled, counts), "violations": driver.violations(),
    }  # fmt: skip
    print(json.dumps(report))


def _our_calls(**changes: Any) -> dict[str, Call]:
    """Returns calls of operators and of a block. `changes`: fields of ViT-B's configuration."""
    model, x = _model_and_tokens(**changes)
    calls = {name: _without_gradient(call) for name, call in _operator_calls(model.blocks[0], x).items()}
    frozen = copy.deepcopy(model.blocks).eval()
    freeze(frozen)
    calls["block, inference, frozen"] = _without_gradient(partial(run_blocks, frozen, x))
    return calls | _block_calls(model.blocks, run_blocks, x)


def _compiled_calls(**changes: Any) -> dict[str, Call]:
    model, x = _model_and_tokens(**changes)
    compiled = torch.compile(partial(run_blocks, model.blocks.eval()), fullgraph=True, dynamic=False)
    return {"block, inference, compiled": _without_gradient(partial(compiled, x))}


def _model_and_tokens(**changes: Any) -> tuple[Any, Tensor]:
    model = create_model(MODEL, backend="triton", depth=DEPTH, num_classes=0, **changes).bfloat16()
    return model, torch.zeros(1, model.config.seqlen, model.config.embed_dim, dtype=torch.bfloat16)


def _timm_calls() -> dict[str, Call]:
    """Returns calls of timm's blocks in eager mode with small tensors; {} if timm is not installed."""
    if importlib.util.find_spec("timm") is None:
        return {}
    from timm.models.vision_transformer import Block

    width, heads = NARROW["embed_dim"], NARROW["num_heads"]
    tokens = (NARROW["img_size"] // NARROW["patch_size"]) ** 2 + 1
    blocks = nn.Sequential(*(Block(width, heads, qkv_bias=True) for _ in range(DEPTH))).bfloat16()
    return _block_calls(blocks, nn.Sequential.forward, torch.zeros(1, tokens, width, dtype=torch.bfloat16))


def _block_calls(blocks: nn.Sequential, run: Callable[[nn.Sequential, Tensor], Tensor], x: Tensor) -> dict[str, Call]:
    evaluated, trained = copy.deepcopy(blocks).eval(), blocks.train()
    wanted = (x.clone().requires_grad_(), *trained.parameters())
    grad_output = torch.zeros_like(x)

    def step() -> object:
        return torch.autograd.grad(run(trained, wanted[0]), wanted, grad_output)

    return {
        "block, inference": _without_gradient(partial(run, evaluated, x)),
        "block, training forward": partial(run, trained, wanted[0]),
        "block, forward + backward": step,
    }


def _without_gradient(call: Call) -> Call:
    return torch.no_grad()(call)


def _operator_calls(block: Any, x: Tensor) -> dict[str, Call]:
    """Returns calls of the operators with a block's tensors. Both halves pass on LayerNorm statistics."""
    attn, mlp, norm1, norm2 = block.attn, block.mlp, block.norm1, block.norm2
    half = BlockTensors(
        norm1.weight, norm1.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias
    )  # fmt: skip
    first = partial(fused_block, x, None, half, heads=attn.num_heads, eps=(norm1.eps, 0.0), next_statistics=True)
    packed = x.new_zeros(*x.shape[:-1], 3, attn.num_heads, x.shape[-1] // attn.num_heads)
    with torch.no_grad():
        _, statistics, _ = first()
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


def _blocks(name: str) -> int:
    """Returns the number of blocks that a call runs."""
    return DEPTH if name.startswith("block") else 1


def _count(driver: StandInDriver, name: str, call: Call) -> dict[str, float]:
    """Counts the steady-state launches and descriptors of a block."""
    for _ in range(4):
        call()
    before = driver.counters()
    call()
    after = driver.counters()
    launches, descriptors = after.launches - before.launches, after.descriptors - before.descriptors
    return {"launches": launches / _blocks(name), "descriptors": descriptors / _blocks(name)}


def _rows(ours: Mapping[str, Call], counts: Mapping[str, dict[str, float]]) -> list[dict[str, Any]]:
    both = {("ours", name): call for name, call in ours.items()}
    both |= {("timm", name): call for name, call in _timm_calls().items()}
    times = _host_us(both)
    rows = []
    for name in ours:
        us, timm_us = times["ours", name], times.get(("timm", name))
        ratio = round(us["median"] / timm_us["median"], 2) if timm_us else None
        rows.append({"name": name, **counts[name], "ours_us": us, "timm_us": timm_us, "ratio": ratio})
    return rows


def _host_us(timed: Mapping[tuple[str, str], Call]) -> dict[tuple[str, str], dict[str, float]]:
    """Returns process CPU time per block in microseconds: median, 20th and 80th percentile of interleaved rounds."""
    repeats = {}
    for key, call in timed.items():
        call()
        repeats[key] = max(1, round(SECONDS_A_REPEAT / max(_seconds(call, 1), 1e-6)))
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            for key, call in timed.items():
                samples[key].append(_seconds(call, repeats[key]) / repeats[key] / _blocks(key[1]) * 1e6)
    finally:
        gc.enable()
    found = {}
    for key, values in samples.items():
        p20, *_, p80 = statistics.quantiles(values, n=5)
        us = {"median": statistics.median(values), "p20": p20, "p80": p80}
        found[key] = {name: round(value, 1) for name, value in us.items()}
    return found


def _seconds(call: Call, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return time.process_time() - start


def host_time_text(report: Mapping[str, Any]) -> str:
    machine, packages, rows = report["machine"], report["machine"]["packages"], report["rows"]
    cells = [["", "launches", "descriptors", "vit-fast us (p20-p80)", "timm us (p20-p80)", "ratio"]]
    for row in rows:
        counts = (f"{row[name]:g}" for name in ("launches", "descriptors"))
        times = (_spread(row[name]) for name in ("ours_us", "timm_us"))
        cells.append([row["name"], *counts, *times, "" if row["ratio"] is None else str(row["ratio"])])
    lines = [
        report["note"],
        f"{report['arch']}; {machine['cpu']}, 1 thread, torch {packages['torch']}, triton {packages['triton']}",
        *_aligned(cells),
        "Launches and descriptors are counted for ViT-B, B = 1, bf16. Times are microseconds per block with "
        "embed_dim=64 and 17 tokens.",
    ]
    if all(row["timm_us"] is None for row in rows):
        lines.append("timm is not installed, so there is no comparison: pip install timm")
    return "\n".join([*lines, *(f"rejected by the driver: {text}" for text in report["violations"])])


def _spread(us: Mapping[str, float] | None) -> str:
    return "" if us is None else f"{us['median']:.0f} ({us['p20']:.0f}-{us['p80']:.0f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def model_device_time(name: str, batch: int, arch: str) -> dict[str, Any]:
    """Returns a row per launch of a frozen block in bf16, and the sums in us; "training": of forward and backward."""
    from ..kernels.inspect import device_model, offline

    layers, gpu = get_variant(name).config.depth, offline.architecture(arch)
    frozen, training = (
        summed(device_model.model_launches(record_block(name, batch, arch, step), arch)) for step in (False, True)
    )
    return {
        "note": MODELED, "arch": arch, "gpu": gpu.gpu, "clock_GHz": gpu.clock, "DRAM_GB_per_s": gpu.dram,
        "multiprocessors": gpu.sm_count, "model": name, "batch": batch, "dtype": "bf16", "layers": layers,
        **frozen, "training": training,
    }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows with their sums."""
    sums = {key: round(sum(row[key] for row in rows), 2) for key in ("issue_us", "floor_us", "modelled_us")}
    return {"launches": rows, "layer": sums}


def record_block(name: str, batch: int, arch: str, training: bool = False) -> list[Launch]:
    """Returns the launches of a block after another, which passes on its LayerNorm statistics."""
    from ..kernels.inspect import offline

    with torch.set_grad_enabled(training), offline.recorded(offline.gpu(arch)) as launches:
        model = create_model(name, backend="triton", depth=2).bfloat16()
        config = model.config
        x = torch.empty(batch, config.seqlen, config.embed_dim, dtype=torch.bfloat16, requires_grad=training)
        rope = model.rope(torch.empty(1, config.in_chans, *config.image_hw), x)
        if not training:
            freeze(model.blocks)
        launches.clear()
        y = run_blocks(model.blocks, x, *rope)
        found = launches[-(len(launches) // 2) :]
        if training:
            launches.clear()
            y.backward(torch.empty_like(y))
            found += launches[: len(launches) // 2]
    return found


def device_time_text(report: Mapping[str, Any]) -> str:
    lines = [
        f"{report['model']}, batch {report['batch']}, bf16, one of {report['layers']} blocks",
        f"{report['arch']}: {report['gpu']}, {report['multiprocessors']} multiprocessors, {report['clock_GHz']} GHz, "
        f"{report['DRAM_GB_per_s']} GB/s",
        report["note"] + " step: instructions per warp in one iteration of the main loop; tile: outside the loop.",
    ]
    for what, part in (("frozen forward", report), ("training, forward and backward", report["training"])):
        rows = [list(_COLUMNS.values()), *([str(row[key]) for key in _COLUMNS] for row in part["launches"])]
        sums, layers = part["layer"], report["layers"]
        lines += [
            "",
            f"{what}:",
            *_aligned(rows),
            f"block: issue {sums['issue_us']} us, floor {sums['floor_us']} us, modeled {sums['modelled_us']} us",
            f"{layers} blocks: modeled {layers * sums['modelled_us'] / 1e3:.2f} ms",
        ]
    return "\n".join(lines)
