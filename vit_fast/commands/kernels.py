"""`vit-fast kernels`: compiles all kernels without a GPU and prints registers, spills and instructions."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..cli import AsJson, integers, option

# Options that apply to each mode; "" is the mode that checks kernels.
_OPTIONS = {
    "": {"--arch", "--json", "--update-baseline"}, "--host": {"--arch", "--json"},
    "--model": {"--arch", "--json", "--batch-sizes"}, "--warm-up": {"--batch-sizes"}, "--tune": set(),
}  # fmt: skip


def kernels(
    arch: Annotated[str | None, option("Architectures, separated by commas, e.g. sm_80,sm_90 (default: all).")] = None,
    as_json: AsJson = False,
    update_baseline: Annotated[bool, option("Write the results to baseline.json.", "--update-baseline")] = False,
    tune: Annotated[bool, option(
        "On a GPU: find the fastest attention tile sizes, and write attention_table.json.", "--tune")] = False,
    warm_up: Annotated[str | None, option(
        "On a GPU: compile the kernels of this model in bf16 into Triton's cache.")] = None,
    batch_sizes: Annotated[str | None, option(
        "With --warm-up: batch sizes, separated by commas (default: 1). With --model: a single batch size (default: "
        "256).")] = None,
    model: Annotated[str | None, option(
        "Estimate the GPU time of each kernel launch of one block of this model, in inference after vit_fast.freeze "
        "and in training (default arch: sm_90). Or of attention:TOKENSxHEADSxHEAD_DIM:FORM and of PyTorch. FORM is "
        "bias, masksW (bias and W window masks) or relC (rel, keys in C columns).")] = None,
    host: Annotated[bool, option(
        "Count the kernel launches of one ViT-B block and measure their CPU overhead (default arch: sm_90).",
        "--host")] = False,
) -> None:  # fmt: skip
    """Compile all kernels without a GPU, and check their spills, registers and instructions.

    Exits with 1 if a kernel fails a check, e.g. uses over 10 % more registers than recorded in
    kernels/inspect/baseline.json. A baseline of another Triton version is ignored. --warm-up, --model, --host and
    --tune run instead of the checks.
    """
    sizes = integers("--batch-sizes", batch_sizes)
    modes = {"--warm-up": warm_up, "--host": host, "--model": model, "--tune": tune}
    chosen = [name for name, given in modes.items() if given not in (None, False)]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} cannot be used together")
    mode = chosen[0] if chosen else ""
    options = {"--arch": arch, "--json": as_json, "--update-baseline": update_baseline, "--batch-sizes": sizes}
    for name in options.keys() - _OPTIONS[mode]:
        if options[name] not in (None, False):
            raise ValueError(f"{name} must not be used {f'with {mode}' if mode else 'without --warm-up or --model'}")
    if mode == "--model" and sizes is not None and (len(sizes) != 1 or sizes[0] < 1):
        raise ValueError(f"--batch-sizes must be one integer >= 1 with --model, got {batch_sizes}")
    if warm_up is not None:
        import torch

        from .. import create_model
        from ..run import runtime

        device = "cuda" if torch.cuda.is_available() else "cpu"
        network = create_model(warm_up, backend="triton").to(device, torch.bfloat16)
        compiled = runtime.warm_up(
            network, sizes or [1], progress=lambda done, total: typer.echo(f"{done} of {total}", err=True)
        )
        typer.echo(str(compiled))
        return
    if importlib.util.find_spec("vit_fast.kernels.inspect") is None:
        advice = "run it from a checkout (pip install -e .), or pass --warm-up"
        raise ValueError(f"vit-fast kernels needs the folder kernels/inspect, which wheels do not contain: {advice}")
    try:
        if tune:
            from ..kernels.inspect import attention_tuning

            attention_tuning.tune(report=typer.echo)
            return
        if mode:
            from . import block_times
        if host:
            report = block_times.measure_host_time(arch or "sm_90")
            failed, text_of = bool(report["violations"]), block_times.host_time_text
        elif model is not None:
            report = block_times.estimate_device_time(model, sizes[0] if sizes else 256, arch or "sm_90")
            failed, text_of = False, block_times.device_time_text
        else:
            archs = arch.split(",") if arch else None
            report = collect(archs, core=False, update_baseline=update_baseline, to_stderr=as_json)
            failed, text_of = any(row["problems"] for row in report["builds"]), _summary
    except (RuntimeError, ImportError) as error:  # e.g. without triton or a GPU
        raise ValueError(f"{' '.join(['kernels', *chosen])}: {error}") from error
    typer.echo(json.dumps(report, indent=2) if as_json else text_of(report))
    if failed:
        raise typer.Exit(1)


def collect(archs: list[str] | None, *, core: bool, update_baseline: bool, to_stderr: bool = True) -> dict[str, Any]:
    """Compiles the kernels, compares them with the baseline, prints a line per build, and returns data for JSON."""
    import triton

    from ..kernels import launch
    from ..kernels.inspect import offline, static_checks

    if launch.is_interpreted():
        raise RuntimeError("TRITON_INTERPRET must be unset, because Triton's interpreter compiles nothing")
    # check all names first, because compilation takes minutes
    wanted = [(arch, build) for arch in archs or offline.ARCHS for build in static_checks.builds(arch, core)]
    before = static_checks.read_baseline()
    comparable = static_checks.is_comparable() and not update_baseline
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for arch, build in wanted:
        row: dict[str, Any] = {"arch": arch, "kernel": build.kernel, "case": build.case}
        try:
            stats = static_checks.compile_stats(build.launch, arch)
        except Exception as error:  # record a compiler failure in this row and continue
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            row["problems"] = [f"does not compile: {type(error).__name__}: {lines[-1][:200] if lines else ''}"]
        else:
            row |= stats | {"problems": static_checks.problems(build, stats, arch)}
            if build.core or arch == "sm_90":  # the builds that the baseline contains
                found[build.key(arch)] = stats
                if comparable:
                    row["problems"] += static_checks.regressions(before, build.key(arch), stats)
        rows.append(row)
        typer.echo(_line(row), err=to_stderr)
    if update_baseline:
        static_checks.write_baseline(found)
    return {
        "triton": triton.__version__, "baseline_triton": triton.__version__ if update_baseline else before["triton"],
        "compared_with_baseline": comparable, "builds": rows,
    }  # fmt: skip


def _line(row: Mapping[str, Any]) -> str:
    head = f"{row['arch']:7s} {row['kernel']:24s} {row['case']:28s}"
    if "registers" not in row:
        return head + " " + "; ".join(row["problems"])
    matrix = [f"{row[name]} {name.upper()}" for name in ("hgmma", "tcgen05", "hmma") if row[name]]
    counts = (
        f"{row['registers']:3d} registers, {row['spill_loads'] + row['spill_stores']} spills, "
        f"{row['shared_bytes'] / 1024:.0f} KiB shared, {row['ctas_per_sm']} CTA/SM, "
        f"{' '.join(matrix) or 'no matrix instructions'}, TMA {row['tma_loads']}/{row['tma_stores']}, "
        f"{row['instructions']} instructions"
    )
    return f"{head} {counts}" + "".join(f"  <- {problem}" for problem in row["problems"])


def _summary(report: Mapping[str, Any]) -> str:
    bad = sum(bool(row["problems"]) for row in report["builds"])
    text = f"{len(report['builds'])} builds with triton {report['triton']}, {bad} with problems"
    if report["triton"] != report["baseline_triton"]:
        text += f"\nnot compared with the baseline, which was written with triton {report['baseline_triton']}"
    return text
