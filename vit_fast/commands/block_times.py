"""Times of the kernel launches of a block, without a GPU.

`vit-fast kernels --host` measures the host time. Triton's launch path runs unchanged, but a stand-in driver launches
nothing. Launches are counted for ViT-B, B = 1. CPU time is measured with small tensors, so that dispatch dominates.

`vit-fast kernels --model` estimates the GPU time of each launch from FLOPs and bytes.
"""

from __future__ import annotations

import copy
import json
import os
import re
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import create_model, freeze
from ..blocks.block import run_blocks
from ..ops.attention import attention_qkvpacked
from ..ops.attention_bias import additive_mask
from ..ops.attention_operator import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..ops.descriptions import ScoreTerms
from ..variants import get_variant
from ..version import describe

if TYPE_CHECKING:
    from ..kernels.launch import Launch

MEASURED = "Host time of Triton's launch path, with a stand-in driver that runs no kernels. No GPU time is measured."
ESTIMATED = "Times are estimated from FLOPs and bytes at the GPU's sustained rates, not measured."
MODEL = "vit_base_patch16_224"
DEPTH = 12  # blocks of MODEL; they share the overhead of a compiled call
NARROW = {"embed_dim": 64, "num_heads": 1, "img_size": 32, "patch_size": 8}  # changes of MODEL
REPEATS = 15
SECONDS_A_REPEAT = 0.02
_ATTENTION = re.compile(r"attention:([1-9]\d*)x([1-9]\d*)x(\d+):(?:bias|masks([1-9]\d*)|rel([1-9]\d*))")

Call = Callable[[], object]


def measure_host_time(arch: str) -> dict[str, Any]:
    """Returns the results of `vit-fast kernels --host`, measured in a new process. RuntimeError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # serve large tensors from the heap: mmap in each call takes time that a run on a GPU does not spend
    heap = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**30))
    command = [sys.executable, "-c", f"from {__name__} import run_child; run_child({arch!r})"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | heap | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1].partition("Error: ")[2] or lines[-1])
    return json.loads(done.stdout)


def run_child(arch: str) -> None:
    """Installs the stand-in driver in this process, counts launches, measures, and prints the results as JSON."""
    from ..kernels.inspect import stand_in_driver

    torch.set_num_threads(1)
    driver = stand_in_driver.install(arch)

    def count(name: str, call: Call) -> dict[str, float]:
        """Counts launches and TMA descriptors per block, in the steady state."""
        for _ in range(4):
            call()
        before = driver.counters()
        call()
        after = driver.counters()
        return {
            key: (getattr(after, key) - getattr(before, key)) / _blocks(name) for key in ("launches", "descriptors")
        }

    counts = {name: count(name, call) for name, call in _calls().items()}
    kernels, calls = driver.counters().modules, _calls(**NARROW)
    model, x = _model_and_tokens(**NARROW)
    compiled = torch.compile(partial(run_blocks, model.blocks.eval()), fullgraph=True, dynamic=False)
    name = "block, inference, compiled"
    calls[name] = torch.no_grad()(partial(compiled, x))
    counts[name] = count(name, calls[name])
    report = {
        "note": MEASURED, "arch": arch, "machine": describe("cpu"), "kernels": kernels,
        "rows": [{"name": name, **counts[name], "ours_us": us} for name, us in _host_us(calls).items()],
        "violations": driver.violations(),
    }  # fmt: skip
    print(json.dumps(report))


def _model_and_tokens(**changes: Any) -> tuple[Any, Tensor]:
    model = create_model(MODEL, backend="triton", depth=DEPTH, num_classes=0, **changes).bfloat16()
    return model, torch.zeros(1, model.config.seqlen, model.config.embed_dim, dtype=torch.bfloat16)


def _calls(**changes: Any) -> dict[str, Call]:
    """Returns calls of an operator and of all blocks. `changes` replaces fields of ViT-B's configuration."""
    model, x = _model_and_tokens(**changes)
    evaluated, frozen = copy.deepcopy(model.blocks).eval(), copy.deepcopy(model.blocks).eval()
    freeze(frozen)
    heads = model.config.num_heads
    packed = x.new_zeros(*x.shape[:-1], 3, heads, x.shape[-1] // heads)
    inference = {
        "attention": partial(attention_qkvpacked, packed, backend="triton"),
        "block, inference, frozen": partial(run_blocks, frozen, x),
        "block, inference": partial(run_blocks, evaluated, x),
    }
    trained, grad_output = model.blocks.train(), torch.zeros_like(x)
    wanted = (x.clone().requires_grad_(), *trained.parameters())
    forward = partial(run_blocks, trained, wanted[0])
    return {name: torch.no_grad()(call) for name, call in inference.items()} | {
        "block, training forward": forward,
        "block, forward + backward": lambda: torch.autograd.grad(forward(), wanted, grad_output),
    }


def _blocks(name: str) -> int:
    return DEPTH if name.startswith("block") else 1


def _host_us(calls: Mapping[str, Call]) -> dict[str, dict[str, float]]:
    """Returns process CPU time per block in microseconds: median, 20th and 80th percentile of interleaved rounds."""
    timers = {name: timeit.Timer(call, timer=time.process_time) for name, call in calls.items()}
    numbers = {name: max(1, round(SECONDS_A_REPEAT / max(*timer.repeat(2, 1), 1e-6))) for name, timer in timers.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, timer in timers.items():
            samples[name].append(timer.timeit(numbers[name]) / numbers[name] / _blocks(name) * 1e6)
    found = {}
    for name, values in samples.items():
        p20, *_, p80 = (round(value, 1) for value in statistics.quantiles(values, n=5))
        found[name] = {"median": round(statistics.median(values), 1), "p20": p20, "p80": p80}
    return found


def host_time_text(report: Mapping[str, Any]) -> str:
    machine, packages = report["machine"], report["machine"]["packages"]
    cells = [["", "launches", "descriptors", "host us, median (p20-p80)"]]
    for row in report["rows"]:
        us = "{median:.0f} ({p20:.0f}-{p80:.0f})".format(**row["ours_us"])
        cells.append([row["name"], f"{row['launches']:g}", f"{row['descriptors']:g}", us])
    lines = [
        report["note"],
        f"{report['arch']}; {machine['cpu']}, 1 thread, torch {packages['torch']}, triton {packages['triton']}",
        *_aligned(cells),
        "Launches and TMA descriptors are counted for ViT-B, B = 1, bf16. Times are microseconds per block with "
        "embed_dim=64 and 17 tokens.",
    ]
    return "\n".join([*lines, *(f"rejected by the stand-in driver: {text}" for text in report["violations"])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def estimate_device_time(name: str, batch: int, arch: str) -> dict[str, Any]:
    """Returns estimates of the launches of a bf16 block or of attention, in inference and in training."""
    from ..kernels.inspect import device_model, offline

    gpu, layers = offline.architecture(arch), 1
    by_torch: list[list[dict[str, Any]]] = [[], []]
    if matched := _ATTENTION.fullmatch(name):
        launches, calls = record_attention(matched, batch, arch)
        steps = launches[:1], launches
        by_torch = [device_model.estimate_by_torch(call, arch) for call in calls]
    else:
        layers = get_variant(name).config.depth
        steps = record_block(name, batch, arch), record_block(name, batch, arch, training=True)
    parts = [
        {"launches": [device_model.estimate(launch, arch) for launch in launches], "torch": rows}
        for launches, rows in zip(steps, by_torch)
    ]
    return {
        "note": ESTIMATED, "arch": arch, "gpu": gpu.gpu, "clock_GHz": gpu.clock, "DRAM_GB_per_s": gpu.dram,
        "multiprocessors": gpu.sm_count, "model": name, "batch": batch, "dtype": "bf16", "layers": layers,
        **parts[0], "training": parts[1],
    }  # fmt: skip


def record_attention(matched: re.Match[str], batch: int, arch: str) -> tuple[list[Launch], tuple[Call, Call]]:
    """Returns the launches of forward and backward, and calls of PyTorch's attention: forward, and both."""
    from ..kernels.inspect import attention_builds

    tokens, heads, head_dim, masks, columns = (int(word or 0) for word in matched.groups())
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM or tokens % (columns or 1):
        limits = f"head_dim must be between {MIN_HEAD_DIM} and {MAX_HEAD_DIM}, and columns must divide the tokens"
        raise ValueError(f"{limits}, got {matched.string}")
    builds = attention_builds.biased_builds(arch, batch, tokens, heads, head_dim, columns, masks)
    launches = [build.launch for build in builds]
    args = launches[0].args
    bias, _, mask, _, _, rel_h, rel_w, *_ = args["terms"]  # see `_launch` of bias_launch.py
    q, k, v = args["q"], args["k"], args["v"]
    leaves = [each.requires_grad_() for each in (q, k, v, bias, rel_h, rel_w) if each is not None]

    def attend() -> Tensor:
        """Runs the function that torch selects on GPUs for calls with a mask."""
        added: Any = additive_mask(ScoreTerms(bias, mask, rel_h, rel_w), q, None)
        added = added.expand(batch, heads, tokens, tokens)
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, added, True)[0]

    return launches, (torch.no_grad()(attend), lambda: torch.autograd.grad(o := attend(), leaves, torch.empty_like(o)))


def record_block(name: str, batch: int, arch: str, training: bool = False) -> list[Launch]:
    """Returns the launches of the second of two blocks; the first block passes on LayerNorm statistics."""
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
    layers = report["layers"]
    lines = [
        f"{report['model']}, batch {report['batch']}, bf16" + (f", one of {layers} blocks" if layers > 1 else ""),
        f"{report['arch']}: {report['gpu']}, {report['multiprocessors']} multiprocessors, {report['clock_GHz']} GHz, "
        f"{report['DRAM_GB_per_s']} GB/s",
        report["note"],
    ]
    columns = {
        "kernel": "launch", "tile": "tile/parts", "waves": "waves", "MB": "MB", "GFLOP": "GFLOP",
        "registers": "registers", "floor_us": "us", "bottleneck": "bottleneck",
    }  # fmt: skip
    for what, part in (("inference", report), ("training, forward and backward", report["training"])):
        launches, us = part["launches"] + part["torch"], sum(row["floor_us"] for row in part["launches"])
        rows = [list(columns.values()), *([str(row.get(key, "")) for key in columns] for row in launches)]
        total = f"{us:.2f} us" + (f" per block; {layers} blocks: {layers * us / 1e3:.2f} ms" if layers > 1 else "")
        lines += ["", f"{what}:", *_aligned(rows), f"vit-fast: {total}"]
    return "\n".join(lines)
