"""The kernels of attention with a bias match the fp64 reference: output and all gradients, and gradients of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bias_support import FORMS, bias_inputs, formula, in_dtype, output_and_gradients
from emulator.binding import Schedule
from kernel_execution import DTYPES, INTERPRETED, KERNEL_ARCH
from kernel_support import DEVICE, assert_as_exact_as_eager
from mlp_support import check_case, make_block
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vit_fast import ops
from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR
from vit_fast.ops.attention import attend_as_torch

pytest.importorskip("triton", reason="the kernels need triton")

from triton.runtime.interpreter import interpreter_builder

from vit_fast.kernels.attention import bias_launch
from vit_fast.kernels.device import gpu_of

EVERYTHING = ("bias", "masked", "window_mask", "scale", "key_mask")
COMBINED = (*((form,) for form in FORMS if form != "key_mask"), EVERYTHING, (*EVERYTHING, "rel"))
# B, H, N, M, D and Kw: one tile, several query or key tiles, head dimensions of one and of two blocks
SIZES = {
    "window": (5, 2, 17, 20, 16, 5), "tile": (1, 3, 64, 64, 32, 16), "long": (2, 1, 70, 80, 16, 20),
    "few keys": (3, 1, 90, 3, 80, 3), "few queries": (1, 2, 1, 180, 48, 90),  # with two tiles per row of the grid
}  # fmt: skip
LARGE = {"windows": (2500, 1, 49, 49, 32, 7), "image": (1, 1, 4096, 4096, 16, 64)}
FAST = {
    ("window", EVERYTHING, DTYPES[-2]),
    ("long", (*EVERYTHING, "rel"), DTYPES[-2]),
    ("window", ("bias",), DTYPES[-1]),
}


def check(made: dict[str, Tensor], found: dict[str, Tensor], do: Tensor) -> None:
    same = output_and_gradients(formula, made, do)
    exact = output_and_gradients(formula, in_dtype(made, torch.float64), do.double())
    for name, value in found.items():
        factor = FORWARD_FACTOR if name == "o" else GRADIENT_FACTOR
        assert_as_exact_as_eager(name, value, same[name], exact[name], factor)


@pytest.mark.parametrize(
    ("size", "forms", "dtype"),
    [
        pytest.param(size, forms, dtype, marks=[] if (size, forms, dtype) in FAST else pytest.mark.slow)
        for size in SIZES for forms in COMBINED for dtype in DTYPES
    ] + [pytest.param(size, EVERYTHING, DTYPES[-2], marks=pytest.mark.slow) for size in LARGE],
    ids=str,
)  # fmt: skip
def test_every_form(size: str, forms: tuple[str, ...], dtype: torch.dtype) -> None:
    *sizes, grid = (SIZES | LARGE)[size]
    made = bias_inputs(forms, tuple(sizes), dtype, grid=grid)
    B, H, N, _, D = sizes
    do = torch.randn(B, N, H, D, device=DEVICE).to(dtype).transpose(1, 2)
    found = output_and_gradients(ops.attention, made, do, backend="triton")
    check(made, found, do)
    if "masked" in forms:
        assert not found["o"][:, :, 0].any() and not found["q"][:, :, 0].any() and not found["bias"][:, :, 0].any()


@pytest.mark.fast_cases("(2, 5, 1)-torch.float32", "(5, 6)-torch.bool")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 5, 6), (2, 1, 1, 6), (2, 5, 1), (5, 6)], ids=str)
def test_masks_of_torch_become_a_bias(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of every shape that broadcasts. The gradient has the shape of the mask."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)  # the kernel must run
    q, k, v = bias_inputs((), (2, 2, 5, 6, 16), torch.float16).values()
    mask, do = torch.randn(shape, device=DEVICE), torch.randn(2, 2, 5, 16, device=DEVICE).half()
    mask = mask > -0.5 if dtype == torch.bool else mask.to(dtype).requires_grad_()
    bias = torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -torch.inf) if dtype == torch.bool else mask
    leaves = [q, k, v, *([mask] if mask.requires_grad else [])]
    o = attend_as_torch("triton", q, k, v, mask)
    exact = formula(q.double(), k.double(), v.double(), bias=bias.double())
    torch.testing.assert_close(o.double(), exact, rtol=0.01, atol=0.01)
    expected = torch.autograd.grad(exact, leaves, do.double())
    torch.testing.assert_close(torch.autograd.grad(o, leaves, do), expected, rtol=0.02, atol=0.02)


def test_a_block_with_every_term() -> None:
    """Bias, window mask, tables of rel, scale per head and shifted windows in one operator.

    With two heads, the error of the gradient of scale would be the maximum of two random numbers.
    """
    check_case(make_block(torch.float16, tokens=(2, 24), heads=8, terms=True))


def _every_term(kind: str) -> tuple[Callable[..., Tensor], dict[str, Any], Tensor]:
    """Returns a function with its arguments, and the gradient of its output: attention, or a block in windows."""
    if kind == "block":
        case = make_block(torch.float32, tokens=(2, 24), terms=True)
        return lambda x: case.but(x=x).fused()[0], {"x": case.x}, case.grad
    forms = ("masked", "window_mask", "rel" if kind == "rel" else "rel tables", "scale")
    made = bias_inputs(forms, (4, 2, 12, 12, 16), grid=4)
    do = torch.randn(4, 2, 12, 16, device=DEVICE)
    if kind != "packed":
        return functools.partial(ops.attention, backend="triton"), made, do
    qkv = torch.stack([made.pop(name).detach() for name in "qkv"], 2).transpose(1, 3).requires_grad_()
    return functools.partial(ops.attention_qkvpacked, backend="triton"), {"qkv": qkv} | made, do.transpose(1, 2)


@pytest.mark.fast_cases("packed-autocast")
@pytest.mark.parametrize("mode", ["checkpoint", "autocast", "compile", "compile, dynamic", "export"])
@pytest.mark.parametrize("kind", ["rel", "packed", "block"])
def test_modes_of_torch(kind: str, mode: str) -> None:
    """Outputs and gradients equal those of a plain call; torch.export writes torch's attention with a mask."""
    function, made, do = _every_term(kind)
    expected, other, tolerance = output_and_gradients(function, made, do), function, 1e-4
    if mode == "checkpoint":
        other = functools.partial(checkpoint, function, use_reentrant=False)
    elif mode == "autocast":
        other, tolerance = torch.autocast(DEVICE.type, torch.bfloat16)(function), 0.2
        assert other(**made).dtype == (torch.float32 if kind == "block" else torch.bfloat16)
    elif mode == "export" and kind == "block":
        pytest.skip("a block is exported by its modules: test_reading_terms.py")
    elif mode == "export":

        class Module(torch.nn.Module):
            def forward(self, **made: Any) -> Tensor:
                return function(**made)

        graph = torch.export.export(Module(), (), in_dtype(made, torch.float32)).module()
        names = [str(node.target) for node in graph.graph.nodes]
        assert "aten.scaled_dot_product_attention.default" in names and not any("vit_fast" in name for name in names)
        torch.testing.assert_close(graph(**made), expected["o"], rtol=1e-4, atol=1e-4)
        return
    else:
        torch._dynamo.reset()
        other = torch.compile(function, fullgraph=True, dynamic=mode != "compile", backend="aot_eager")
    found = output_and_gradients(other, made, do)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype or name == "o"
        atol = tolerance * max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(value.float(), expected[name], rtol=0, atol=atol, msg=name)


def test_flop_of_tables() -> None:
    """The tables of rel take a matmul with q in the forward, and three in the backward, which computes it again."""
    function, made, do = _every_term("packed")
    with FlopCounterMode(display=False) as forward:
        o = function(**made)
    with FlopCounterMode(display=False) as backward:
        o.backward(do)
    attention, tables = 4 * 4 * 2 * 12 * 12 * 16, 2 * 4 * 2 * 12 * 16 * (3 + 4)
    assert forward.get_total_flops() == attention + tables
    assert backward.get_total_flops() == attention * 5 // 2 + 3 * tables


WINDOWS = ("masked", "window_mask", "scale")


@pytest.mark.parametrize(
    ("forms", "tokens", "runs"),
    [
        (WINDOWS, 9, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            (WINDOWS, 9, 250), (WINDOWS, 70, 2), ((*WINDOWS, "rel tables"), 12, 250),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_programs_of_several_windows(
    forms: tuple[str, ...], tokens: int, runs: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs have three windows, or the one that is left. Random orders of programs or warps compute equal bits."""
    monkeypatch.setattr(bias_launch, "_PROGRAMS", 4)
    monkeypatch.setattr(bias_launch, "gpu_of", lambda device: replace(gpu_of(device), sm_count=1))
    made = bias_inputs(forms, (7, 2, tokens, tokens + 3, 16), torch.float16, grid=3)
    do = torch.randn(7, 2, tokens, 16, device=DEVICE).half()
    first = output_and_gradients(ops.attention, made, do, backend="triton")
    check(made, first, do)
    orders: list[list[int]] = []
    if INTERPRETED:
        place, size = interpreter_builder.set_grid_idx, interpreter_builder.set_grid_dim
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, *yz: place(orders[-1][x], *yz))

        def shuffle(x: int, *yz: int) -> None:
            orders.append(torch.randperm(x).tolist())
            size(x, *yz)

        monkeypatch.setattr(interpreter_builder, "set_grid_dim", shuffle)
    for run in range(runs):
        if KERNEL_ARCH:
            request.getfixturevalue("emulator").schedule(Schedule(run + 1, early=2, reverse=bool(run % 2)))
        again = output_and_gradients(ops.attention, made, do, backend="triton")
        assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not INTERPRETED or any(order != sorted(order) for order in orders)


@pytest.mark.parametrize("kind", [pytest.param("attention", marks=pytest.mark.slow), "block"])
@pytest.mark.usefixtures("gpus")
@torch.no_grad()
def test_graphs_follow_their_inputs(kind: str) -> None:
    """Replays of captured attention, or of a captured block, with terms, on the second of two pretend GPUs."""
    if kind == "block":
        case = make_block(torch.float32, tokens=(2, 24), terms=True)
        made: dict[str, Any] = {"x": case.x, "t": case.t, "options": case.options}

        def call(backend: str, **made: Any) -> Any:
            return replace(case, **made).forward(backend)

    else:
        made = bias_inputs(("masked", "window_mask", "rel tables", "scale", "key_mask"), (4, 2, 6, 6, 16), grid=3)
        call = ops.attention
    there = tree_map_only(Tensor, lambda tensor: tensor.to("cuda:1"), made)
    call(**there, backend="triton")  # a capture must not run the test kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
        o = call(**there, backend="triton")
    for factor in (1.0, 0.5):
        for tensor in tree_leaves((made, there)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.mul_(factor)
        graph.replay()
        torch.testing.assert_close(o.cpu(), call(**made, backend="eager"), rtol=1e-4, atol=1e-4)
