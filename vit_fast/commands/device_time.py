"""`vit-fast kernels --model`: models the device time of each launch of a block, without a GPU.

    report = model_block("vit_base_patch16_224", 256, "sm_90")
    print(render(report))

The module records the launches with the stand-in driver, compiles them, and models their time from machine code and
tile sizes (`kernels/inspect/device_model.py`). It measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import create_model, freeze
from ..blocks.block import run_blocks
from ..variants import get_variant

if TYPE_CHECKING:
    from ..kernels.launch import Launch

NOTE = "Modeled from machine code and tile sizes, not measured."
_COLUMNS = {
    "kernel": "launch", "tile": "tile/parts", "waves": "waves", "MB": "MB", "GFLOP": "GFLOP", "registers": "registers",
    "step_instructions": "step", "tile_instructions": "tile", "issue_us": "issue us", "floor_us": "floor us",
    "modelled_us": "modeled us", "bottleneck": "bottleneck",
}  # fmt: skip


def model_block(name: str, batch: int, arch: str) -> dict[str, Any]:
    """Returns a row per launch of a frozen block in bf16, and the sums in microseconds.

    The key "training" contains the same for forward and backward.

    Raises:
        ValueError: the model or the architecture is unknown.
        RuntimeError: the stand-in driver cannot be installed in this process.
    """
    from ..kernels.inspect import stand_in_driver
    from ..kernels.inspect.device_model import GPUS, model_launches

    layers = get_variant(name).config.depth
    driver = stand_in_driver.install(arch)
    frozen, training = (summed(model_launches(record_layer(name, batch, step), arch)) for step in (False, True))
    gpu, clock, dram = GPUS[arch]
    return {
        "note": NOTE, "arch": arch, "gpu": gpu, "clock_GHz": clock, "DRAM_GB_per_s": dram,
        "multiprocessors": driver.gpu.sm_count, "model": name, "batch": batch, "dtype": "bf16", "layers": layers,
        **frozen, "training": training,
    }  # fmt: skip


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows with their sums."""
    sums = {key: round(sum(row[key] for row in rows), 2) for key in ("issue_us", "floor_us", "modelled_us")}
    return {"launches": rows, "layer": sums}


def record_layer(name: str, batch: int, training: bool = False) -> list[Launch]:
    """Returns the launches of a block that reuses the LayerNorm statistics of the previous block.

    Args:
        name: One of list_models().
        batch: Batch size.
        training: True for forward and backward, False for the forward with frozen weights.
    """
    from ..kernels.inspect.device_model import recorded

    model = create_model(name, backend="triton", depth=2).bfloat16()
    config = model.config
    x = torch.empty(batch, config.seqlen, config.embed_dim, dtype=torch.bfloat16, requires_grad=training)
    rope = model.rope(torch.empty(1, config.in_chans, *config.image_hw), x)
    with torch.set_grad_enabled(training), recorded() as launches:
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


def render(report: Mapping[str, Any]) -> str:
    """Formats a report as text."""
    lines = [
        f"{report['model']}, batch {report['batch']}, bf16, one of {report['layers']} blocks",
        f"{report['arch']}: {report['gpu']}, {report['multiprocessors']} multiprocessors, {report['clock_GHz']} GHz, "
        f"{report['DRAM_GB_per_s']} GB/s",
        report["note"] + " step: instructions per warp in one iteration of the main loop; tile: outside the loop.",
    ]
    for what, part in (("frozen forward", report), ("training, forward and backward", report["training"])):
        rows = [list(_COLUMNS.values()), *([str(row[key]) for key in _COLUMNS] for row in part["launches"])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sums, layers = part["layer"], report["layers"]
        lines += [
            "",
            f"{what}:",
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
            f"block: issue {sums['issue_us']} us, floor {sums['floor_us']} us, modeled {sums['modelled_us']} us",
            f"{layers} blocks: modeled {layers * sums['modelled_us'] / 1e3:.2f} ms",
        ]
    return "\n".join(lines)
