"""Sizes: offsets beyond 2^31 elements, and what training keeps in memory."""

from __future__ import annotations

import mlp_support as support
import pytest
import torch
import triton
import triton.language as tl
from mlp_support import DEVICE, make_case
from torch import Tensor, nn

import vit_fast
from vit_fast.kernels.matmul.matmul_tiles import load_rows, load_tile, store_tile


@triton.jit
def _copy_tile_kernel(source, target, row, col, rows, columns, SIZE: tl.constexpr):
    tile = load_tile(source, row, col, rows, columns, SIZE, SIZE, False)
    store_tile(target, tile, row, col, rows, columns, SIZE, SIZE, False)


@pytest.mark.parametrize(("rows", "columns"), [(2**31 // 3072 + 40, 3072), (40, 2**31 // 32)])
def test_tiles_beyond_two_to_the_31_elements(rows: int, columns: int) -> None:
    """The last tile of two tensors of more than 2^31 elements; only the pages that it touches exist."""
    source, target = (torch.empty(rows, columns, dtype=torch.float16, device=DEVICE) for _ in range(2))
    assert source.numel() > 2**31
    row, col = rows - 20, columns - 20
    source[row:, col:] = torch.randn(20, 20, dtype=torch.float16, device=DEVICE)
    target[row:, col:] = 0
    _copy_tile_kernel[(1,)](source, target, row, col, rows, columns, 32)
    assert torch.equal(target[row:, col:], source[row:, col:])


@triton.jit
def _copy_rows_kernel(source, target, row, M, SIZE: tl.constexpr):
    tl.store(target + tl.arange(0, SIZE), load_rows(source, row, M, SIZE))


def test_row_vectors_end_at_their_end() -> None:
    source = torch.arange(1.0, 101.0, device=DEVICE)
    target = torch.full((32,), float("nan"), device=DEVICE)
    _copy_rows_kernel[(1,)](source, target, 90, 100, 32)
    assert torch.equal(target, torch.cat([source[90:], source.new_zeros(22)]))


def _saved_bytes(model: nn.Module, images: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward, without the parameters."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images).sum().backward()
    return sum(kept.values())


def test_training_keeps_less_than_torch() -> None:
    """Per block: x, qkv, lse, attention, x and z, and no normalised copies, no activated hidden layer."""
    images = torch.randn(4, 3, 32, 32, device=DEVICE)
    sizes = {}
    for backend in ("sdpa", "triton"):
        torch.manual_seed(0)
        sizes[backend] = _saved_bytes(vit_fast.create_model("vit_test", backend=backend).to(DEVICE).train(), images)
    assert sizes["triton"] < 0.75 * sizes["sdpa"]


@pytest.mark.gpu
def test_peak_memory_of_training_is_below_eager() -> None:
    """The operator at ViT-B's shape and 50,432 rows: forward and backward."""
    peaks = {}
    for backend in ("eager", "triton"):
        case = make_case(50_432, 768, 3072, torch.bfloat16)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.run(backend)
        peaks[backend] = torch.cuda.max_memory_allocated() - before
        del case
    assert peaks["triton"] < peaks["eager"]


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 127, 128, 129, 197, 50_432])
def test_vit_b_against_fp64(M: int) -> None:
    support.check_case(make_case(M, 768, 3072, torch.bfloat16))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    """The hidden layer of 700,000 rows passes 2^31 elements; its last rows are those of a small call."""
    case = make_case(64, 768, 3072, torch.bfloat16)
    rows = torch.randn(700_000, 768, device=DEVICE, dtype=torch.bfloat16)
    rows[-64:] = case.x.detach()
    with torch.no_grad():
        long = support.replace(case, x=rows).forward("triton")
        short = case.forward("triton")
    torch.testing.assert_close(long[-64:], short, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_250_runs_have_the_same_bits() -> None:
    case = make_case(1970, 768, 3072, torch.bfloat16)
    first = case.run("triton")
    for _ in range(249):
        again = case.run("triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_a_training_step_in_a_captured_graph() -> None:
    """Forward and backward captured once, replayed on other tokens."""
    case = make_case(394, 192, 768, torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run("triton")
    with torch.no_grad():
        case.x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for name, expected in case.run("triton").items():
        assert torch.equal(results[name], expected), name
