"""`vit-fast info`: prints versions and backends; `models`: lists the models; `verify`: checks the backends."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import typer

from ..cli import AsJson, argument, option, table, wide_console


def info(as_json: AsJson = False) -> None:
    """Show versions, devices and available backends."""
    import torch

    from ..version import PACKAGES, __version__, cpu_instructions, cpu_name, installed

    packages = (*PACKAGES, "onnx", "onnxscript", "safetensors", "huggingface-hub")
    instructions = " ".join(cpu_instructions()) or "unknown"
    cpu = f"{cpu_name()}, {torch.get_num_threads()} threads, instructions: {instructions}"
    devices = {torch.device("cpu"): cpu}
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        devices[torch.device("cuda", i)] = (
            f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, "
            f"{gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )
    facts: dict[str, Any] = {
        "vit_fast": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "packages": {name: installed(name) for name in packages},
        "devices": [{"device": str(device), "description": text} for device, text in devices.items()],
        "backends": [row for device in devices for row in _backend_rows(device)],
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = wide_console()
    console.print(f"vit-fast {facts['vit_fast']} | Python {facts['python']} | {facts['platform']}")
    versions = [(name, version or "not installed") for name, version in facts["packages"].items()]
    backends = [
        (row["backend"], row["device"], "yes" if row["available"] else "no", "; ".join(row["reasons"]))
        for row in facts["backends"]
    ]
    console.print(table("packages", ("package", "version"), versions, texts=2))
    console.print(table("devices", ("device", "description"), [[*row.values()] for row in facts["devices"]], texts=2))
    console.print(table("backends", ("backend", "device", "available", "notes"), backends, texts=4))


def _backend_rows(device: Any) -> list[dict[str, Any]]:
    import torch

    from ..ops.backends import auto_reasons, interpreter_is_active, resolve_backend, triton_unavailable_reasons

    automatic = resolve_backend("auto", device)
    for_fp32 = () if automatic != "triton" else auto_reasons(device, torch.float32)
    reasons = list(triton_unavailable_reasons(device))
    interpreted = not reasons and device.type == "cpu" and interpreter_is_active()
    remarks = {"triton": ["runs in Triton's interpreter, which is very slow"] if interpreted else reasons}
    remarks[automatic] = ["selected by backend='auto'", *for_fp32]
    return [
        {
            "backend": backend, "device": str(device), "available": backend != "triton" or not reasons,
            "reasons": remarks.get(backend, []),
        }
        for backend in ("eager", "sdpa", "triton")
    ]  # fmt: skip


def models(
    pattern: Annotated[str, argument("Names to list, as a shell-style pattern such as 'vit_base_*'.")] = "*",
) -> None:
    """List models with parameter count, GFLOPs per image (2 FLOPs per multiply-add), tokens and input size."""
    from ..variants import get_variant, list_models
    from ..work import parameter_count, total, work

    rows = []
    for name in list_models(pattern) or [pattern]:
        config = get_variant(name).config  # raises ValueError with similar names if there is no such model
        millions, gflop = parameter_count(config) / 1e6, total(work(config, 1).values()).flop / 1e9
        sizes = config.seqlen, config.embed_dim, config.depth, config.num_heads, "x".join(map(str, config.image_hw))
        rows.append([name, f"{millions:.1f}", f"{gflop:.1f}", *map(str, sizes)])
    titles = ("model", "Mparams", "GFLOP", "tokens", "embed_dim", "depth", "heads", "img_size")
    wide_console().print(table(f"{len(rows)} models", titles, rows))


def verify(
    backend: Annotated[str, option("Backends to check, separated by commas: triton, sdpa, auto.")] = "triton",
    as_json: AsJson = False,
) -> None:
    """Compare attention, LayerNorm + MLP and small models with the fp64 reference.

    Without a GPU, the triton backend runs in Triton's interpreter. Exits with 1 if a comparison fails.
    """
    import torch

    if not torch.cuda.is_available() and "triton" in backend:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported

    from ..benchmarks.verify import verify as run

    result = run(backend.split(","))
    rows = result["rows"]
    passed = sum(row["passed"] for row in rows)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        if result["interpreted"]:
            typer.echo("No GPU found: using Triton's interpreter, with small shapes and without bf16.")
        for row in rows:
            found = row["reason"] or f"error {row['max_error']:.1e}, allowed {row['allowed_error']:.1e}"
            status = "pass" if row["passed"] else "FAIL"
            typer.echo(f"{status}  {row['backend']:6s} {row['dtype']}  {row['case']:32s} {found}")
        typer.echo(f"{passed} of {len(rows)} passed on {result['device']}")
    if passed < len(rows):
        raise typer.Exit(1)
