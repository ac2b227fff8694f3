"""The model of a layer's device time: its sums for ViT-B on an H100, and the command that prints it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from children import environment, run_python

pytest.importorskip("triton", reason="the kernels need triton")

from vit_fast.commands.device_time import NOTE, render, summed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in driver is for machines without a GPU")

# With instructions as they were counted in SASS of tiles of 128 x 256; nothing is compiled here.
_MODEL = """
import json
from types import SimpleNamespace
from vit_fast.commands.device_time import record_layer
from vit_fast.kernels.inspect import stand_in_driver
from vit_fast.kernels.inspect.device_model import model_launch
from vit_fast.kernels.inspect.sass import Loops
stand_in_driver.install("sm_90")
counted = {"identity": 1130, "gelu": 2411, "residual": 2381, "activation_grad": 4782, "layer_norm_grad": 1804}
stats = SimpleNamespace(registers=184, ctas_per_sm=3, warps=4)
found = {}
for batch in (1, 64, 256, -128):
    rows = []
    for launch in record_layer("vit_base_patch16_224", abs(batch), training=batch < 0):
        c = launch.constants
        loops = Loops(823, 0, 600)
        if "EPILOGUE" in c:
            tile = counted.get(c["EPILOGUE"]) or counted[c["ACTIVATION"]]
            loops = Loops(110, tile * c["BLOCK_M"] * c["BLOCK_N"] // 128 // launch.num_warps // 32, 500)
        rows.append(model_launch(launch, "sm_90", loops, stats))
    found[batch] = rows
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def modelled() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(run_python(["-c", _MODEL], environment()))
    return found


@pytest.mark.slow
def test_a_layer_of_vit_b_at_batch_256(modelled: dict[str, list[dict[str, Any]]]) -> None:
    """Computed by hand: qkv 252 us, attention 100, proj 102, fc1 406, fc2 336; floors 226, 100, 76, 301, 301."""
    rows = modelled["256"]
    assert [row["modelled_us"] for row in rows] == pytest.approx([252, 102, 102, 406, 336], rel=0.02)
    assert [row["floor_us"] for row in rows] == pytest.approx([226, 101, 77, 301, 301], rel=0.02)
    assert [row["waves"] for row in rows if row["tile"]] == [26.86, 8.95, 35.82, 8.95]
    assert rows[1]["bottleneck"] == "DRAM"
    assert rows[3]["MB"] == pytest.approx((50_432 * (768 + 3072) + 3072 * 768) * 2 / 1e6, rel=0.02)
    assert rows[3]["GFLOP"] == pytest.approx(2 * 50_432 * 768 * 3072 / 1e9, rel=1e-3)
    assert rows[3]["issue_us"] == pytest.approx(36 * (12 * 1024 + 2411 * 2) / 1755, rel=1e-3)


@pytest.mark.slow
def test_a_training_step_has_three_times_the_products_of_the_forward(
    modelled: dict[str, list[dict[str, Any]]],
) -> None:
    """A negative batch: in training. The attention's backward has seven products for the two of its forward."""
    layers, attention = 2 * 128 * 197 * 12 * 768**2, 4 * 128 * 12 * 197**2 * 64
    rows = modelled["-128"]
    assert sum(row["GFLOP"] for row in rows) == pytest.approx((3 * layers + 4.5 * attention) / 1e9, rel=1e-3)
    (products,) = (row for row in rows if row["kernel"] == "weight_products")
    assert products["tile"].startswith("128x256x64/") and products["GFLOP"] == pytest.approx(layers / 1e9, rel=1e-3)


@pytest.mark.slow
def test_nothing_is_modelled_below_its_floor(modelled: dict[str, list[dict[str, Any]]]) -> None:
    for rows in modelled.values():
        assert all(row["modelled_us"] >= row["floor_us"] > 0 for row in rows)
    assert sum(row["modelled_us"] for row in modelled["64"]) < sum(row["modelled_us"] for row in modelled["256"]) / 3
    assert [row["kernel"] for row in modelled["1"]][-2:] == ["matmul, partial", "finish_residual"]


@pytest.mark.slow
def test_the_text_states_that_it_is_modeled(modelled: dict[str, list[dict[str, Any]]]) -> None:
    report = {
        "note": NOTE, "arch": "sm_90", "gpu": "H100 SXM", "clock_GHz": 1.755, "DRAM_GB_per_s": 3350,
        "multiprocessors": 132, "model": "vit_base_patch16_224", "batch": 256, "layers": 12,
        **summed(modelled["256"]), "training": summed(modelled["-128"]),
    }  # fmt: skip
    text = render(report)
    assert "not measured" in text
    assert "matmul, layer_norm, gelu  128x256x64  35.82" in text
    for rows in (modelled["256"], modelled["-128"]):
        assert f"12 blocks: modeled {12 * summed(rows)['layer']['modelled_us'] / 1e3:.2f} ms" in text


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_command_counts_what_it_compiles(arch: str) -> None:
    command = ["-m", "vit_fast.cli", "kernels", "--model", "vit_base_patch16_224", "--batch-sizes", "8", "--arch", arch]
    report = json.loads(run_python([*command, "--json"], environment()))
    matmuls = [row for row in report["launches"] if row["tile"]]
    assert len(matmuls) == 4
    assert all(row["step_instructions"] > 50 and row["tile_instructions"] > 200 for row in matmuls)
    assert report["layer"]["modelled_us"] > report["layer"]["floor_us"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--model", "vit_base_patch16_224", "--arch", "sm_75"], "arch must be one of sm_80"),
        (["--model", "vit_bse_patch16_224"], "unknown model 'vit_bse_patch16_224'"),
    ],
)
def test_the_command_says_what_is_wrong(options: list[str], error: str, capfd: pytest.CaptureFixture[str]) -> None:
    import typer

    from vit_fast.commands.kernels import _print_device_time

    arch = options[-1] if "--arch" in options else "sm_90"
    with pytest.raises(typer.Exit):
        _print_device_time(options[1], 1, arch, as_json=False)
    assert error in capfd.readouterr().err
