"""Time per layer and kernel: the names of layers, a profile of a model, and the loss against the floor."""

from __future__ import annotations

import pytest
import torch

from vit_fast.benchmarks import rendering, runner
from vit_fast.benchmarks.configuration import make_configuration
from vit_fast.benchmarks.models import resolve
from vit_fast.benchmarks.preparation import PROFILED_CALLS, part_of, profile
from vit_fast.benchmarks.report import tables
from vit_fast.benchmarks.rows import COMPILED, REST, Group
from vit_fast.measure.clock import Protocol
from vit_fast.work import total, work


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
    _, (caption, titles, parts), (_, _, kernels) = tables(record)
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
