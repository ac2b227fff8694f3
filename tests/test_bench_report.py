"""The HTML report, by a parser and in a browser; and the time per layer and kernel.

The browser is any Chromium on the path, or the one that CHROME_BIN names; without one these tests are skipped.
"""

from __future__ import annotations

import copy
import functools
import html.parser
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import run
from PIL import Image

from vit_fast.benchmarks import records, rendering, report, runner
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.preparation import PROFILED_CALLS, part_of, profile
from vit_fast.benchmarks.rows import COMPILED, REST, Group
from vit_fast.measure.clock import Protocol
from vit_fast.work import total, work

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "benchmarks" / "results" / "cpu-2core" / "record.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(html.parser.HTMLParser):
    """Text of each element with the tags around it; an element that is closed by another's tag is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attributes)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
            if self.open[-1] in ("th", "td"):
                self.tables[-1][-1][-1] += data


@pytest.fixture
def record() -> records.Record:
    """The committed one in fp32, with a row that has no figures."""
    found = records.read_record(COMMITTED)
    rows = [row for row in found["rows"] if row["dtype"] == "fp32"]
    missing = rows[0] | {"candidate": "optimized", "status": "unsupported", "reason": "nothing is kept"}
    return found | {
        "rows": [*rows, {**missing, "images_per_s": None}],
        "controls": [row for row in found["controls"] if row["dtype"] == "fp32"],
    }


def table_of(page: Page, title: str) -> list[list[str]]:
    return next(table for table in page.tables if title in table[0])


def test_rows_machine_and_configuration_are_in_tables_and_nothing_is_loaded(record):
    text = rendering.render({"run": record})
    page = Page(text)
    for (title, *_), (head, *lines) in zip(report.tables(record), page.tables, strict=False):
        rows = {
            report.label(row, precision=False): row
            for row in report.groups(record)[title]
            if row["status"] == "measured"
        }
        assert [line[0] for line in lines] == list(rows) != []
        for name, *cells in lines:
            assert cells == [column.cell(rows[name]) for column in report.filled_columns(record)]
        assert head == ["candidate", *(column.title for column in report.filled_columns(record))]
    (environment,) = (table for table in page.tables if ["machine.device"] in [line[:1] for line in table])
    found = dict(environment[1:])
    assert found["machine.device"] == record["machine"]["device"]
    assert found["configuration.dtypes"] == ", ".join(record["configuration"]["dtypes"])
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|import\(""", text), "it needs no network"
    policy = next(a["content"] for tag, a in page.attributes if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_names_of_strangers_stay_text(record):
    hostile = '</script><script>alert("x")</script><b>'
    record["rows"][0]["candidate"] = hostile
    record["rows"][1].update(status="failed", reason=hostile)
    record["machine"]["device"] = hostile
    text = rendering.render({hostile: record})
    page = Page(text)
    assert text.count("<script") == rendering.render({}).count("<script")
    assert hostile in [line[0] for line in table_of(page, "images/s")]
    assert any(hostile in text for text in page.texts["li"])


def test_every_candidate_has_its_own_colour_in_plot_and_report(record):
    """Ours are strong, peers pale."""
    names = {row["candidate"]: row["peer"] for row in record["rows"] if row["status"] == "measured"}
    assert len({*map(rendering.colour_of, rendering.NAMES)}) == len(rendering.NAMES) > 60
    page = rendering.render({"run": record})
    pixels = Image.open(io.BytesIO(rendering.draw(record))).convert("RGB").getcolors(2**24)
    for name, peer in names.items():
        colour = tuple(bytes.fromhex(rendering.colour_of(name)[1:]))
        assert colour in {seen for _, seen in pixels}
        assert f'solid {rendering.colour_of(name)}">{name}</th>' in page
        assert (max(colour) - min(colour) < 0.5 * max(colour)) == peer


def told(record: records.Record, **changes: object) -> str:
    """The closing sentence where the best of ours is as said."""
    for row in record["rows"]:
        if row["candidate"] == "timm+fused+frozen":
            row.update({"peer": False, "images_per_s": 1e4, "best_peer": "onnxruntime"} | changes)
    return report.closing(record)


def test_a_run_ends_with_its_result_and_a_command_to_try(record):
    text = told(record, ratio_to_best_peer=1.234, verdict="faster")
    assert text.startswith(
        "Result: best of vit-fast relative to the best peer: 1.23x onnxruntime (fp32, batch 1), 1.23x"
    )
    assert text.endswith("next: vit-fast optimize vit_tiny_patch16_224 --batch 8") and "\n" not in text
    assert "equal to onnxruntime (fp32, batch 8)" in told(record, verdict="no difference")
    noisy = told(record, verdict="cannot be ranked")
    assert "not ranked" in noisy and noisy.partition("next: ")[2].startswith("on a quiet machine, vit-fast bench ")
    assert noisy.count("--seconds") == 1
    nothing = {**record, "rows": [row | {"status": "failed"} for row in record["rows"]]}
    assert report.closing(nothing) == f"Result: nothing was measured; next: {report.command(record)}"


def test_what_was_skipped_is_named_with_the_way_to_get_it(record):
    record["configuration"]["dtypes"] = ["fp32", "bf16"]
    text = report.markdown(record | {"skipped": ["sdpa (bf16)", "eager (fp32)", "eager (bf16)"]})
    assert "- skipped for lack of time; --time-budget 0 measures all: sdpa (bf16), eager\n" in text


def test_a_record_that_nobody_should_cite_says_so_and_fills_no_document(record, tmp_path):
    assert report.objections(record) == []
    assert "Must not be cited" not in rendering.render({"run": record})
    busy, above, cut = (copy.deepcopy(record) for _ in range(3))
    busy["busy"] = ["load 7.5"]
    above["rows"][2]["defect"] = "1.25x the matmul ceiling"
    cut["interrupted"] = True
    for spoilt, word in ((busy, "load 7.5"), (above, "ceiling"), (cut, "interrupted")):
        (reason,) = report.objections(spoilt)
        assert word in reason
        (tmp_path / "r.json").write_bytes(records.to_json(spoilt))
        with pytest.raises(ValueError, match="must not be cited"):
            report.fill("<!-- record: r.json -->\n<!-- /record -->\n", tmp_path)
        assert word in "".join(Page(rendering.render({"run": spoilt})).texts["p"])


def test_other_records_are_tables_of_their_rows(tmp_path):
    host = {
        "note": "Host only",
        "machine": {"cpu": "a cpu"},
        "rows": [{"name": "block", "launches": 5.0, "ours_us": {"median": 123.4, "p20": 1.0}, "timm_us": None}],
    }
    (tmp_path / "record.json").write_text(json.dumps(host))
    page = Page(rendering.render({"host": records.read_any(tmp_path)}))
    assert page.tables[0] == [["name", "launches", "ours_us"], ["block", "5", "123.4"]]


def test_command_writes_a_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert run("report", str(COMMITTED), "--out", str(out)) == 0
    assert table_of(Page(out.read_text()), "images/s")


def test_nothing_in_the_plot_is_cut_at_its_edges(record):
    record["machine"]["device"] = "NVIDIA GB300 NVL72 with a name of uncommon length, " + "W" * 20
    record["rows"][0]["candidate"] = "transformers+fused+compile:max-autotune"
    record["rows"][3].update(status="failed", reason="M " * 90)
    pixels = np.asarray(Image.open(io.BytesIO(rendering.draw(record))).convert("L"))
    assert pixels.min() < 128
    for edge in (pixels[:, :12], pixels[:, -12:], pixels[:12], pixels[-12:]):
        assert edge.min() == 255


@functools.cache
def browser() -> str | None:
    return os.environ.get("CHROME_BIN") or next(filter(None, map(shutil.which, BROWSERS)), None)


def run_in_browser(page: str, script: str, folder: Path) -> tuple[list, str]:
    """Returns the result of a script in the page, and all messages of the browser's console."""
    if browser() is None:
        pytest.skip("no Chromium on the path, and CHROME_BIN is not set")
    probe = f"<script>document.body.textContent = JSON.stringify((() => {{ {script} }})())</script></body>"
    (folder / "page.html").write_text(page.replace("</body>", probe))
    done = subprocess.run(
        [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         "--window-size=400,900", f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()],
        capture_output=True, text=True,
    )  # fmt: skip
    body = re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    assert body, done.stderr
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(html.unescape(body[1])), console


def test_titles_sort_in_the_browser_of_a_phone_and_nothing_is_on_its_console(record, tmp_path):
    record["rows"][0]["images_per_s"] = 1234.0  # is written 1,234
    record["rows"][3]["TFLOP_per_s"] = None
    script = """
        const table = document.querySelector("table"), heads = [...table.tHead.rows[0].cells];
        const read = column => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
        const found = {};
        for (const head of heads) {
            const title = head.textContent;
            head.querySelector("button").click();
            found[title] = [read(head.cellIndex), head.ariaSort];
            head.querySelector("button").click();
            found[title].push(read(head.cellIndex), head.ariaSort, heads.filter(h => h.ariaSort !== "none").length);
        }
        const box = document.documentElement;
        return [found, box.scrollWidth - box.clientWidth];
    """
    (found, beyond), console = run_in_browser(rendering.render({"run": record}), script, tmp_path)
    assert (beyond, console) == (0, ""), "a phone does not scroll sideways"

    def key(text: str) -> tuple[bool, float | str]:
        """Numbers first, of an interval its start; then text."""
        number = re.match(r"\[?(-?[\d,.]+(?:e[+-]\d+)?)", text)
        return (True, text) if number is None else (False, float(number[1].rstrip(",.").replace(",", "")))

    assert found["images/s"][0][-1] == "1,234"
    assert {"candidate", "images/s", "ms", "[p20, p80]", "TFLOP/s", "of ceiling", "max error"} <= set(found)
    for rising, first, falling, second, marked in found.values():
        filled = [text for text in rising if text]
        assert filled == sorted(filled, key=key)
        assert rising[: len(filled)] == filled, "empty cells come last"
        assert [text for text in falling if text] == sorted(filled, key=key, reverse=True)
        assert not any(falling[len(filled) :])
        assert (first, second, marked) == ("ascending", "descending", 1)


@pytest.mark.parametrize(
    ("part", "names"),
    {
        "attention": [
            "attention_fwd_row", "aten::bmm", "aten::_softmax", "aten::_scaled_dot_product_flash_attention_for_cpu",
            "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "cudnn_generated_fort_native_sdpa_fmha_sm90",
        ],
        "linears": [
            "aten::addmm", "aten::mm", "matmul_layer_norm", "matmul_residual", "nvjet_tst_128x256_64x4_h_bz_TNT",
            "sm90_xmma_gemm_bf16bf16_bf16f32", "triton_tem_fused_addmm_gelu_3", "vit_fast::layer_norm_linear",
        ],
        "norms": ["aten::native_layer_norm", "row_statistics", "vectorized_layer_norm_kernel<c10::BFloat16>"],
        "activations": ["aten::gelu", "vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"],
        "embedding": ["aten::mkldnn_convolution", "sm80_xmma_fprop_implicit_conv_bf16"],
        COMPILED: ["triton_per_fused_add_native_layer_norm_2", "cpp_fused_gelu_1", "Torch-Compiled Region: 0/0"],
        REST: ["aten::copy_", "prepare_weight", "Memcpy HtoD", "aten::_convert_element_type"],
    }.items(),
)  # fmt: skip
def test_names_belong_to_parts(part, names):
    assert [part_of(name) for name in names] == [part] * len(names)


def test_a_profile_counts_the_calls_of_a_model_and_what_its_parts_must_do():
    (model,) = resolve("vit_test")(None)
    linears = [torch.nn.Linear(64, 64) for _ in range(5)]
    numbers = []

    def call(number: int) -> object:
        numbers.append(number)
        x = torch.ones(3, 64)
        for linear in linears:
            x = linear(x)
        return x

    with torch.no_grad():
        found = profile(call, torch.device("cpu"), Group(model, "fp32", 2, 2))
    assert numbers == list(range(PROFILED_CALLS))
    ((_, _, calls, ms),) = [kernel for kernel in found["kernels"] if kernel[1] == "aten::addmm"]
    assert calls == 5 and ms > 0
    times = [kernel[3] for kernel in found["kernels"]]
    assert times == sorted(times, reverse=True)
    whole = total(work(model.config, 2).values())
    assert sum(flop for flop, _ in found["least"].values()) == whole.flop
    assert sum(moved for _, moved in found["least"].values()) == 4 * whole.elements


@pytest.mark.usefixtures("small_ceilings")
def test_a_run_explains_every_candidate_side_by_side_and_what_is_lost():
    quick = Protocol(repeats=1, seconds=0.0, least_repeats=1, warmup_repeats=1, warmup_seconds=0.0)
    options = {"models": ["vit_test"], "batch_sizes": [2], "dtypes": ["fp32"], "device": "cpu", "protocol": quick}
    record = runner.run(make_configuration(candidates=["eager", "sdpa"], explain=True, **options))
    record["ceilings"].update(copy_GB_per_s=1.0, matmul_TFLOP_per_s={"fp32": 1.0})
    for row, ms in zip(record["rows"], (6.0, 4.0), strict=True):
        row["ms"] = ms
        assert {kernel[0] for kernel in row["explained"]["kernels"]} >= {"attention", "linears", "norms", "embedding"}
        row["explained"]["kernels"] = [
            ["linears", "addmm", 9, 3.0],
            ["attention", "bmm", 4, 1.0],
            [REST, "cat", 1, 0.5],
        ]
    _, (caption, titles, parts), (_, _, kernels) = report.tables(record)
    assert "vit_test, fp32, batch 2" in caption
    assert set(titles) == {"part", "floor", "eager", "sdpa"}
    lines = {part: dict(zip(titles, [part, *cells], strict=True)) for part, *cells in parts}
    config = resolve("vit_test")(None)[0].config
    assert lines["attention"]["floor"] == f"{4 * work(config, 2)['attention'].elements / 1e6:.4g}"  # at 1 GB/s, in ms
    floor = 4 * total(work(config, 2).values()).elements / 1e6
    assert (lines["linears"]["sdpa"], lines[REST]["floor"], lines["sum"]["eager"]) == ("3", "", "4.5")
    assert lines["measured without the profiler"]["eager"] == "6"
    assert lines["sum"]["floor"] == f"{floor:.4g}"
    assert ["cat", "sdpa", REST, "1", "0.5"] in kernels
    page = rendering.render({"run": record})
    assert "measured without the profiler" in page and "--explain" in page
