"""Text, HTML page and plot of a record; and the time per layer and kernel."""

from __future__ import annotations

import copy
import html
import io
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from bench_support import measure
from command_line import run
from PIL import Image
from rich.console import Console

from vit_fast.benchmarks import records, report
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.preparation import COMPILED, REST, part_of
from vit_fast.cli import table
from vit_fast.work import work

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
documents = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make_tables.py")))
COMMITTED = RESULTS / "amd-epyc-family-26-avx512-2-threads" / "record.json"


@pytest.fixture
def record() -> records.Record:
    """The committed one in fp32, with a row that has no figures."""
    found = records.read_record(COMMITTED)
    rows = [row for row in found["rows"] if row["dtype"] == "fp32"]
    missing = rows[0] | {"candidate": "optimized", "status": "unsupported", "reason": "no result", "images_per_s": None}
    return found | {
        "rows": [*rows, missing],
        "controls": [row for row in found["controls"] if row["dtype"] == "fp32"],
    }


def tables_of(page: str) -> list[list[list[str]]]:
    """The texts of the cells of each table."""
    trees = map(ElementTree.fromstring, re.findall(r"<table>.*?</table>", page, re.DOTALL))
    return [[["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")] for tree in trees]


def test_the_page_contains_rows_machine_and_command_loads_nothing_and_escapes_names(record, tmp_path):
    page = report.render({"run": record})
    for made, cells in zip(report.tables(record), tables_of(page), strict=True):
        assert cells == [list(made.titles), *map(list, made.rows)] and len(cells) > 1
        assert len(made.bars) == len(made.rows) and "--share:100.0%" in made.bars[0]
    assert page.count('<td class="bar ') == sum(row["status"] == "measured" for row in record["rows"])
    assert record["machine"]["device"] in page and report.command(record) in html.unescape(page)
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|import\(""", page), "it needs no network"
    assert "default-src 'none'" in page
    assert run("report", str(COMMITTED), "--out", str(tmp_path / "page.html")) == 0
    assert "images/s" in (tmp_path / "page.html").read_text()
    hostile = '</script><script>alert("x")</script><b>'
    record["rows"][0]["candidate"] = record["machine"]["device"] = hostile
    record["rows"][1].update(status="failed", reason=hostile)
    page = report.render({hostile: record})
    assert page.count("<script") == report.render({}).count("<script") and html.escape(hostile) in page


OPTIMIZE = "vit-fast optimize vit_tiny_patch16_224 --batch 8"


@pytest.mark.parametrize(
    ("changes", "result", "next_step"),
    [
        ({"ratio_to_best_peer": 1.234, "verdict": "faster"}, "1.23x onnxruntime (fp32, batch 1), ", OPTIMIZE),
        ({"verdict": "cannot be ranked"}, "not ranked", "on a quiet machine, vit-fast bench "),
        ({"status": "failed"}, "nothing was measured", "vit-fast bench "),
        (
            {"model": "block:vit_test", "status": "measured", "ratio_to_best_peer": 1.5, "verdict": "faster"}, "1.50x",
            "vit-fast bench ",
        ),
    ],
)  # fmt: skip
def test_a_run_ends_with_its_result_and_the_next_command(changes, result, next_step, record):
    for row in record["rows"]:
        if row["candidate"] == "timm+fused+frozen" or "status" in changes:
            row.update({"peer": False, "images_per_s": 1e4, "best_peer": "onnxruntime"} | changes)
    text, _, following = report.closing(record).partition("; next: ")
    assert result in text
    assert following.startswith(next_step) and "\n" not in text + following


def test_the_text_names_resolution_defects_and_what_was_not_measured(record):
    record["controls"][0]["resolution"], record["controls"][1]["resolution"] = 0.031, 0.34
    record["rows"][0].update(ceiling_share=None, defect="1.25x the matmul ceiling of this run")
    text = report.markdown(record | {"busy": ["load 7.5"]})
    title = "vit_tiny_patch16_224, fp32, batch"
    for line in (
        "- BUSY: load 7.5",
        f'- {title} 1, 224x224: "=" marks differences below 3.1%, the resolution of the timings',
        f"- {title} 8, 224x224: cannot be ranked: repeated timings differed by 34%; to reduce noise",
        "DEFECT: timm at 1.25x the matmul ceiling of this run",
        f"- optimized: unsupported: no result ({title} 1, 224x224)",
    ):
        assert line in text, line
    assert "125%" not in text and "| above |" in text and "| `optimized` |" not in text
    assert "host ms" not in text, "only GPUs have this column"
    record["rows"][1].update(host_ms=11.0, host_bound=True)
    assert re.search(r"\| host ms \|(.*\n)*.*\| 11(\.0)? bound \|", report.markdown(record))


def test_rows_of_lower_precision_have_their_own_table_and_best_peer(record):
    """The committed record is older: it contains the ratio of int8 to a peer in fp32."""
    stored = next(row for row in json.loads(COMMITTED.read_bytes())["rows"] if row["precision"] == "int8")
    assert stored["best_peer"] == "openvino" and stored["ratio_to_best_peer"] > 1.5
    int8 = next(row for row in record["rows"] if row["precision"] == "int8")
    assert int8["best_peer"] is int8["ratio_to_best_peer"] is None
    fields = {"candidate": "onnxruntime-int8-dynamic", "peer": True}
    peer = int8 | fields | {"samples_ms": [2 * ms for ms in int8["samples_ms"]], "images_per_s": 100.0}
    record["rows"].append(peer)
    records.finish(record["rows"], record["ceilings"], record["controls"])
    made = {one.caption: [row[0] for row in one.rows] for one in report.tables(record)}
    title = "vit_tiny_patch16_224, {}, batch 1, 224x224"
    assert made[title.format("int8 (from fp32)")] == ["onnxruntime-int8", "onnxruntime-int8-dynamic"]
    assert "onnxruntime-int8" not in made[title.format("fp32")]
    assert "2.00x onnxruntime-int8-dynamic (int8, batch 1), " in report.closing(record)
    line = "| int8 | 1 | 237 (`onnxruntime-int8`) |  | 100 (`onnxruntime-int8-dynamic`) | 2.00 "
    assert line in documents.summary({"results": record})


def test_documents_contain_each_machine_that_may_be_cited(record, tmp_path):
    document = tmp_path / "README.md"
    block = "before\n<!-- summary: results/*/record.json -->\n{}<!-- /summary -->\nafter"
    document.write_text(block.format("old\n"))
    with pytest.raises(ValueError, match=r"results/\*/record.json must match a record"):
        documents.fill(document)
    other = copy.deepcopy(record)
    other["machine"]["device"] = "AMD EPYC (family 25, AVX2, 2 threads)"
    for row in other["rows"]:
        row["images_per_s"] = row["images_per_s"] and 100 * (1 + (row["candidate"] == "timm+fused+frozen"))
    for name, each in {"zen5": record, "zen3": other, "zen3/more": other}.items():
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "record.json").write_bytes(records.to_json(each))
    for _ in range(2):
        documents.fill(document)
        assert document.read_text() == block.format(documents.summary({"results/zen3": other, "results/zen5": record}))
    rows = [line for line in document.read_text().splitlines() if line.startswith("| AMD")]
    assert [line.split(" | ")[0][2:] for line in rows] == [
        each["machine"]["device"] for each in (other, record) for _ in "18"
    ]
    notes = [line for line in document.read_text().splitlines() if line.startswith("- ")]
    assert notes[0].startswith(
        "- vit-fast is 2.0 times as fast as timm on AMD EPYC (family 25, AVX2, 2 threads); torch "
    )
    assert notes[1].startswith("- vit-fast is 1.9 to 2.2 times as fast as timm on AMD EPYC (family 26, AVX512")
    assert "[all results](results/zen5/table.md), [plot](results/zen5/plot.png)" in notes[1]
    record["rows"][2]["defect"] = "1.25x the matmul ceiling"
    record |= {"busy": ["load 7.5"], "interrupted": True}
    (tmp_path / "results" / "zen5" / "record.json").write_bytes(records.to_json(record))
    with pytest.raises(ValueError, match=r"must not be cited: .*load 7.5.*ceiling.*interrupted"):
        documents.fill(document)
    assert "Must not be cited" in report.render({"run": record})


def test_committed_records_lie_in_the_folder_of_their_machine_with_their_tables():
    paths = [*RESULTS.rglob("record.json")]
    assert COMMITTED in paths
    for path in paths:
        record = documents.check(path)
        assert path.relative_to(RESULTS).parts[0] == records.folder_name(record["machine"])
        assert report.markdown(record) == (path.parent / "table.md").read_text()


@pytest.mark.parametrize("width", [80, 126, 200])
def test_a_table_fits_any_terminal(width, record):
    """Columns that do not fit are omitted."""
    record["rows"][0]["candidate"] = "timm+fused+compile:freezing+more"
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    made, *_ = report.tables(record, width)
    console.print(table(made.caption, made.titles, made.rows))
    lines = console.file.getvalue().splitlines()
    assert not any("…" in line for line in lines) and max(map(len, lines)) <= width
    assert lines[2].split() == " ".join(made.titles).split()
    assert made.titles[:2] == ["candidate", "images/s"] and "x best peer" in made.titles
    assert len(made.titles) <= 1 + report.MOST_ON_SCREEN


def test_other_records_are_tables_of_their_rows(tmp_path):
    row = {"name": "block", "launches": 5.0, "ours_us": {"median": 123.4, "p20": 1.0}, "timm_us": None}
    (tmp_path / "record.json").write_text(json.dumps({"machine": {"cpu": "a cpu"}, "rows": [row]}))
    page = report.render({"host": records.read_record(tmp_path, of_bench=False)})
    assert tables_of(page) == [[["name", "launches", "ours_us"], ["block", "5", "123.4"]]] and "a cpu" in page


def test_nothing_in_the_plot_is_cut_at_its_edges(record):
    record["machine"]["device"] = "NVIDIA GB300 NVL72 with a name of uncommon length, " + "W" * 20
    record["rows"][0]["candidate"] = "transformers+fused+compile:max-autotune"
    pixels = np.asarray(Image.open(io.BytesIO(report.draw(record))).convert("L"))
    for edge in (pixels[:, :12], pixels[:, -12:], pixels[:12], pixels[-12:]):
        assert edge.min() == 255 > 128 > pixels.min()
    assert len(report.draw(record | {"rows": []})) > 5_000


def test_kernels_belong_to_parts():
    for part, names in {
        "attention": "attention_fwd_row aten::bmm aten::_softmax flash_fwd_kernel<traits<64,128>>",
        "linears": "aten::addmm matmul_layer_norm nvjet_tst_128x256_64x4_h_bz_TNT triton_tem_fused_addmm_3",
        "norms": "aten::native_layer_norm row_statistics",
        "activations": "aten::gelu vectorized_elementwise_kernel<4,at::native::GeluCUDAKernelImpl>",
        "embedding": "aten::mkldnn_convolution sm80_xmma_fprop_implicit_conv_bf16",
        COMPILED: "triton_per_fused_add_native_layer_norm_2 cpp_fused_gelu_1 Torch-Compiled_Region:0/0",
        REST: "aten::copy_ Memcpy_HtoD aten::_convert_element_type",
    }.items():
        assert {part_of(name) for name in names.split()} == {part}


@pytest.mark.usefixtures("small_ceilings")
def test_explain_prints_the_time_per_part_beside_its_lower_bound():
    record = measure("vit_test", "eager", "sdpa", dtypes=["fp32"], explain=True)
    record["ceilings"].update(copy_GB_per_s=1.0, matmul_TFLOP_per_s={"fp32": 1.0})
    config = resolve("vit_test")(None)[0].config
    for row, ms in zip(record["rows"], (6.0, 4.0), strict=True):
        kernels, row["ms"] = row["explained"]["kernels"], ms
        assert {kernel[0] for kernel in kernels} >= {"attention", "linears", "norms", "embedding"}
        assert ["norms", "aten::native_layer_norm", 2 * config.depth + 1] in [kernel[:3] for kernel in kernels]
        assert kernels == sorted(kernels, key=lambda kernel: -kernel[3])
        kernels[:] = [["linears", "addmm", 9, 3.0], ["attention", "bmm", 4, 1.0], [REST, "cat", 1, 0.5]]
    _, by_part, longest = report.tables(record)
    lines = {part: dict(zip(by_part.titles, [part, *cells], strict=True)) for part, *cells in by_part.rows}
    floors = {part: 4 * some.elements / 1e6 for part, some in work(config, 2).items()}  # at 1 GB/s, in ms
    for part, title, cell in (
        ("attention", "floor", f"{floors['attention']:.4g}"), ("sum", "floor", f"{sum(floors.values()):.4g}"),
        (REST, "floor", ""), ("linears", "sdpa", "3"), ("sum", "eager", "4.5"),
        ("measured without the profiler", "eager", "6"),
    ):  # fmt: skip
        assert lines[part][title] == cell, part
    assert ["cat", "sdpa", REST, "1", "0.5"] in longest.rows and "--explain" in report.render({"run": record})
