"""`vit-fast bench`: measures images per second of Vision Transformers of vit-fast and other libraries.

`vit-fast compare` compares two records of `bench`, and `vit-fast report` writes an HTML page of records.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli import PLAIN, AsJson, Device, argument, integers, option, split_words, table, wide_console


def bench(
    images: Annotated[list[Path] | None, argument("Image files or folders (default: a sample image).")] = None,
    models: Annotated[str | None, option(
        "Names that `vit-fast models` lists, or patterns such as 'vit_base*'; timm:NAME, hf:FOLDER, weights files, "
        "FILE.onnx, or module:function, where the function returns a model.", metavar="A,B")] = None,
    img_size: Annotated[str | None, option("Image sizes (default: the model's).", metavar="N|HxW,...")] = None,
    train: Annotated[bool, option("Measure training steps instead of inference.", "--train")] = False,
    data: Annotated[str, option(
        "device: images are on the device before a call. host (GPU only): images are in CPU memory, and their copy is "
        "timed too.")] = "device",
    explain: Annotated[bool, option("Print time per part of the model, and the longest kernels.", "--explain")] = False,
    cold: Annotated[bool, option("Also measure the time from process start to the first output.", "--cold")] = False,
    latency: Annotated[bool, option("Measure p50, p90 and p99 latency of one image per call.", "--latency")] = False,
    batch_sizes: Annotated[str | None, option(
        "Batch sizes (default: 1,8 on a CPU; 1,32,256 on a GPU). With best: 1, 2, 4, ... while throughput grows.",
        metavar="1,8|best")] = None,
    dtypes: Annotated[str | None, option(
        "Dtypes: fp32, tf32 (GPU only), fp16, bf16, and with --train amp (bf16 autocast). Default: bf16 on a GPU; on a "
        "CPU fp32, and bf16 if it has bf16 instructions and time allows.", metavar="A,B")] = None,
    candidates: Annotated[str | None, option(
        "Candidates to measure; docs/howto/benchmark.md lists them, and so does the error for an unknown one.",
        metavar="eager,timm+compile")] = None,
    device: Device = "auto",
    out: Annotated[Path | None, option("New or empty output folder (default: one in vit-fast-results).")] = None,
    time_budget: Annotated[float | None, option(
        "Time limit in seconds, without start and output, or 0 for no limit and more candidates. Default: 155 on a "
        "CPU, 900 on a GPU, and 0 with --candidates or --seconds.")] = None,
    seconds: Annotated[float | None, option("Measure each candidate for this many seconds.")] = None,
    resume: Annotated[Path | None, option("Resume the interrupted run in this folder.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure images per second of models in vit-fast and other libraries, and verify the outputs.

    A candidate is one way to run a model, e.g. timm+compile. By default, measures ViT-Ti within three minutes on a CPU,
    and ViT-B with a time limit of 15 minutes on a GPU. Writes record.json, table.md, plot.png and report.html. Exits
    with 1 if a candidate fails or its output is incorrect, and with 130 after Ctrl-C.
    """
    from rich.markup import escape

    from ..benchmarks import report as texts
    from ..benchmarks.configuration import make_configuration
    from ..benchmarks.records import RECORD_NAME, Journal, check_folder, to_json
    from ..benchmarks.runner import header_of, reopen, run
    from ..measure.limits import patient_interrupt

    console = wide_console(stderr=as_json)
    if out is not None:
        check_folder(out)
    given: dict[str, Any] = {
        "images": images or (), "models": split_words(models), "dtypes": split_words(dtypes),
        "batch_sizes": "best" if batch_sizes == "best" else integers("--batch-sizes", batch_sizes),
        "candidates": split_words(candidates), "device": device, "data": data, "time_budget_s": time_budget,
        "img_size": [integers("--img-size", size, "x") or [] for size in img_size.split(",")] if img_size else None,
        "seconds": seconds, "train": train, "explain": explain, "cold": cold, "latency": latency,
    }  # fmt: skip
    if resume is None:
        configuration = make_configuration(**given)
        journal = Journal.begin(out, header_of(configuration))
    # a time budget may be 0
    elif out or any(value is not False and value not in ((), None, "auto", "device") for value in given.values()):
        message = f"--resume must be the only argument besides --json: {resume} stores the arguments of the run"
        raise ValueError(message)
    else:
        configuration, journal = reopen(resume)
    with patient_interrupt(signal.SIGINT, signal.SIGTERM):
        with console.status("preparing", refresh_per_second=2) as status:  # a higher rate disturbs the timing

            def tell(step: str) -> None:
                if console.is_terminal:
                    status.update(escape(step))
                else:
                    console.print(f"... {step}", **PLAIN)

            record = run(configuration, tell, journal)
        if record["gpu_failed"]:  # continues in a new process
            command = [sys.executable, "-c", "from vit_fast.cli import main; main()", "bench", "--resume"]
            os.execv(sys.executable, [*command, str(journal.folder), *(["--json"] if as_json else [])])
        for part in texts.sections(record, console.width):
            if isinstance(part, texts.Table):
                console.print(table(part.caption, part.titles, part.rows))
            else:
                console.print(part if isinstance(part, str) else "\n".join(part), **PLAIN)
        files = {
            RECORD_NAME: to_json(record), "table.md": texts.markdown(record).encode(), "plot.png": texts.draw(record),
            "report.html": texts.render({journal.folder.name: record}).encode(),
        }  # fmt: skip
        journal.finish(files, keep=record["interrupted"])
    console.print(f"wrote {journal.folder}/", **PLAIN)
    console.print(texts.closing(record), **PLAIN)
    if as_json:
        typer.echo(to_json(record), nl=False)
    if record["interrupted"]:
        console.print(f"to resume: vit-fast bench --resume {journal.folder}", **PLAIN)
        raise typer.Exit(130)
    if any(row["status"] in ("incorrect", "failed") for row in record["rows"]):
        raise typer.Exit(1)


def compare(
    first: Annotated[Path, argument("Baseline: a record.json or its folder.")],
    second: Annotated[Path, argument("The record to compare with the baseline.")],
    as_json: AsJson = False,
) -> None:
    """Compare the images per second of two records (record.json) of `bench`.

    Prints for each candidate, e.g. timm+compile, the ratio second / first, its 99 % confidence interval, and a verdict.
    Also prints the resolution: the smallest difference that the two runs can measure, because of their noise.
    """
    from ..benchmarks.records import compare_records, damaged, read_record
    from ..measure.clock import format_number

    one, other = read_record(first), read_record(second)
    with damaged(first, second):
        comparison = compare_records(one, other)
    if as_json:
        typer.echo(json.dumps(comparison, indent=2))
        return
    rows = []
    for pair in comparison["pairs"]:
        interval = "" if pair["interval"] is None else "[{:.3f}, {:.3f}]".format(*pair["interval"])
        resolution = "unknown" if pair["resolution"] is None else f"{pair['resolution']:.1%}"
        about = (str(pair[name]) for name in ("model", "dtype", "batch", "candidate", "verdict"))
        rows.append((*about, *map(format_number, pair["images_per_s"]), f"{pair['ratio']:.3f}", interval, resolution))
    titles = ["model", "dtype", "batch", "candidate", "verdict", "first", "second", "ratio", "interval", "resolution"]
    console = wide_console()
    console.print(table("second / first, images per second", titles, rows, texts=5))
    for line in (*comparison["warnings"], *comparison["unpaired"]):
        console.print(line, **PLAIN)


def report(
    records: Annotated[list[Path], argument(
        "Records of `bench` (or their folders), `make gpu-check` or `kernels --host --json`.")],
    out: Annotated[Path, option("Output file.")] = Path("report.html"),
) -> None:  # fmt: skip
    """Write an HTML page with sortable tables of records, e.g. record.json of `bench`. The page needs no network."""
    from ..benchmarks.records import read_record
    from ..benchmarks.report import render
    from ..files import file_aside

    page = render({str(path): read_record(path, of_bench=False) for path in records})
    with file_aside(out) as aside:
        aside.write_text(page, encoding="utf-8", errors="backslashreplace")
    typer.echo(f"wrote {out}")
