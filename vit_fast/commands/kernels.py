"""`vit-fast kernels`: compiles all kernels without a GPU and prints registers, spills and instructions."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ..cli import AsJson, integers


def kernels(
    arch: Annotated[
        str | None, typer.Option(help="Architectures, separated by commas, e.g. sm_80,sm_90 (default: all).")
    ] = None,
    as_json: AsJson = False,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the registers and instructions to the committed baseline.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="On a GPU: tune the attention kernels and write their table of tile sizes.")
    ] = False,
    warm_up: Annotated[
        str | None,
        typer.Option("--warm-up", help="On a GPU: compile the kernels of this model in bf16 into Triton's cache."),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="With --warm-up: batch sizes, separated by commas (default: 1). With --model: a single batch size "
            "(default: 256)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Estimate the GPU time of one block of this model, frozen and in training (default arch: sm_90).",
        ),
    ] = None,
    host: Annotated[
        bool,
        typer.Option(
            "--host",
            help="Count the kernel launches of one block and measure their CPU launch overhead (default arch: sm_90).",
        ),
    ] = False,
) -> None:
    """Compile all kernels without a GPU, and compare their registers and instructions with the committed baseline.

    Exits with 1 if a kernel spills, uses more registers or instructions than the baseline allows, or loses tensor-core
    or TMA instructions. --warm-up, --model, --host and --tune replace this check.
    """
    sizes = integers("--batch-sizes", batch_sizes)
    modes = {"--warm-up": warm_up is not None, "--host": host, "--model": model is not None, "--tune": tune}
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} cannot be used together")
    mode = chosen[0] if chosen else None
    if sizes is not None and mode not in ("--warm-up", "--model"):
        raise ValueError(f"--batch-sizes requires --warm-up or --model, got {batch_sizes}")
    given = {"--arch": arch is not None, "--json": as_json, "--update-baseline": update_baseline}
    for option, is_given in given.items():
        if is_given and (mode in ("--warm-up", "--tune") or (mode and option == "--update-baseline")):
            raise ValueError(f"{option} must not be used with {mode}")
    if warm_up is not None:
        _warm_up(warm_up, sizes or [1])
        return
    if importlib.util.find_spec("vit_fast.kernels.inspect") is None:
        typer.echo(
            "vit-fast kernels needs the folder kernels/inspect, which wheels do not contain: run it from a checkout "
            "(pip install -e .), or pass --warm-up",
            err=True,
        )
        raise typer.Exit(2)
    if host:
        _print_host_time(arch or "sm_90", as_json=as_json)
        return
    if model is not None:
        if sizes is not None and (len(sizes) != 1 or sizes[0] < 1):
            raise ValueError(f"--batch-sizes must be one integer >= 1 with --model, got {batch_sizes}")
        _print_device_time(model, sizes[0] if sizes else 256, arch or "sm_90", as_json=as_json)
        return
    if tune:
        from ..kernels.inspect.attention_tuning import tune as search

        try:
            search(report=typer.echo)
        except RuntimeError as error:
            typer.echo(f"vit-fast kernels --tune: {error}", err=True)
            raise typer.Exit(2) from error
        return
    try:
        report = collect(
            arch.split(",") if arch else None, core=False, update_baseline=update_baseline, progress=not as_json
        )
    except (RuntimeError, ValueError, ImportError) as error:
        typer.echo(f"vit-fast kernels: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_summary(report)
    if any(row["problems"] for row in report["builds"]):
        raise typer.Exit(1)


def _warm_up(name: str, sizes: list[int]) -> None:
    import torch

    from .. import create_model
    from ..run.runtime import warm_up

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = create_model(name, backend="triton").to(device, torch.bfloat16)
    with _progress("kernels compiled") as progress:
        done = warm_up(model, sizes, progress=progress)
    typer.echo(str(done))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on stderr; yields a function that takes the numbers of finished and of all items."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(what), TextColumn("remaining:"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_host_time(arch: str, *, as_json: bool) -> None:
    from .host_time import measure, render

    try:
        report = measure(arch)
    except RuntimeError as error:
        typer.echo(f"vit-fast kernels --host: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(json.dumps(report, indent=2) if as_json else render(report))
    if report["violations"]:
        raise typer.Exit(1)


def _print_device_time(name: str, batch: int, arch: str, *, as_json: bool) -> None:
    from .device_time import model_block, render

    try:
        report = model_block(name, batch, arch)
    except (RuntimeError, ValueError, ImportError) as error:
        typer.echo(f"vit-fast kernels --model: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(json.dumps(report, indent=2) if as_json else render(report))


def collect(archs: list[str] | None, *, core: bool, update_baseline: bool, progress: bool = False) -> dict[str, Any]:
    """Compiles the kernels, compares them with the baseline, and returns data for JSON.

    Raises:
        ImportError: triton is not installed.
        RuntimeError: triton was imported for its interpreter, which has no compiler.
        ValueError: an architecture is unknown.
    """
    import triton

    from ..kernels import launch
    from ..kernels.inspect import baseline, offline

    if launch.is_interpreted():
        raise RuntimeError("TRITON_INTERPRET must be unset, because Triton's interpreter compiles nothing")
    # check all names first, because compilation takes minutes
    wanted = [
        (arch, build) for arch in archs or offline.ARCHS for build in offline.builds(arch) if build.core or not core
    ]
    before = baseline.read_baseline() if baseline.BASELINE_PATH.exists() else {"triton": None, "builds": {}}
    comparable = baseline.is_comparable(before) and not update_baseline
    found: dict[str, Any] = {}

    def compile_one(arch: str, build: Any) -> dict[str, Any]:
        row: dict[str, Any] = {"arch": arch, "kernel": build.kernel, "case": build.case}
        try:
            stats = offline.compile_build(build, arch)
        except Exception as error:  # record a compiler failure in this row and continue
            row["problems"] = [f"does not compile: {type(error).__name__}: {_last_line(error)}"]
        else:
            recorded = baseline.is_recorded(build, arch)
            if recorded:
                found[build.key(arch)] = stats
            row |= stats.as_dict()
            row["problems"] = offline.problems(build, stats, arch)
            if comparable and recorded:
                row["problems"] += baseline.regressions(before, build.key(arch), stats)
        return row

    rows = []
    with _progress("builds compiled") as bar:
        for one in wanted:
            rows.append(compile_one(*one))
            if progress:
                typer.echo(_line(rows[-1]))
            bar(len(rows), len(wanted))
    if update_baseline:
        baseline.write_baseline(found)
    return {
        "triton": triton.__version__,
        "baseline_triton": before["triton"],
        "compared_with_baseline": comparable,
        "builds": rows,
    }


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def _line(row: dict[str, Any]) -> str:
    head = f"{row['arch']:7s} {row['kernel']:24s} {row['case']:28s}"
    if "registers" not in row:
        return head + " " + "; ".join(row["problems"])
    counts = (
        f"{row['registers']:3d} registers, {row['spill_loads'] + row['spill_stores']} spills, "
        f"{row['shared_bytes'] / 1024:.0f} KiB shared, {row['ctas_per_sm']} CTA/SM, "
        f"{_matrix_instructions(row)}, TMA {row['tma_loads']}/{row['tma_stores']}, {row['instructions']} instructions"
    )
    return f"{head} {counts}" + "".join(f"  <- {problem}" for problem in row["problems"])


def _matrix_instructions(row: dict[str, Any]) -> str:
    names = (("hgmma", "HGMMA"), ("tcgen05", "TCGEN05"), ("hmma", "HMMA"))
    counted = [f"{row[field]} {name}" for field, name in names if row[field]]
    return " ".join(counted) or "no matrix instructions"


def _print_summary(report: dict[str, Any]) -> None:
    bad = sum(bool(row["problems"]) for row in report["builds"])
    typer.echo(f"{len(report['builds'])} builds with triton {report['triton']}, {bad} with problems")
    if not report["compared_with_baseline"]:
        typer.echo(f"not compared with the baseline, which was written with triton {report['baseline_triton']}")
