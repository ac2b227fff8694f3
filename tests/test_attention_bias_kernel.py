"""The kernels of attention with a bias match the fp64 reference: output and all gradients, and gradients of blocks."""

from __future__ import annotations

import pytest
import torch
from bias_support import FORMS, bias_inputs, formula, in_dtype, output_and_gradients
from kernel_execution import DTYPES
from kernel_support import DEVICE, assert_as_exact_as_eager
from mlp_support import check_case, make_block
from torch import Tensor

from vit_fast import ops
from vit_fast.accuracy import FORWARD_FACTOR, GRADIENT_FACTOR

pytest.importorskip("triton", reason="the kernels need triton")

EVERYTHING = ("bias", "masked", "window_mask", "scale", "key_mask")
COMBINED = (*((form,) for form in FORMS if form != "key_mask"), EVERYTHING, (*EVERYTHING, "rel"))
# B, H, N, M, D and Kw: one tile, several query or key tiles, head dimensions of one and of two blocks
SIZES = {
    "window": (5, 2, 17, 20, 16, 5), "tile": (1, 3, 64, 64, 32, 16), "long": (2, 1, 70, 80, 16, 20),
    "few keys": (3, 1, 90, 3, 80, 3), "few queries": (1, 2, 1, 180, 48, 90),  # with two tiles per row of the grid
}  # fmt: skip
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
    ],
    ids=str,
)  # fmt: skip
def test_every_form(size: str, forms: tuple[str, ...], dtype: torch.dtype) -> None:
    *sizes, grid = SIZES[size]
    made = bias_inputs(forms, tuple(sizes), dtype, grid=grid)
    B, H, N, _, D = sizes
    do = torch.randn(B, N, H, D, device=DEVICE).to(dtype).transpose(1, 2)
    found = output_and_gradients(ops.attention, made, do, backend="triton")
    check(made, found, do)
    if "masked" in forms:
        assert not found["o"][:, :, 0].any() and not found["q"][:, :, 0].any() and not found["bias"][:, :, 0].any()


def test_masks_of_torch_become_a_bias() -> None:
    """A bias that torch's masks express by broadcasting: its gradient has the shape of the mask."""
    made = bias_inputs((), (2, 2, 5, 6, 16), torch.float16)
    mask = torch.randn(2, 1, 1, 6, device=DEVICE).half().requires_grad_()
    do = torch.randn(2, 2, 5, 16, device=DEVICE).half()
    expanded = made | {"bias": mask.expand(2, 1, 5, 6)}
    o = ops.attention(**expanded, backend="triton")
    (found,) = torch.autograd.grad(o, mask, do)
    (exact,) = torch.autograd.grad(formula(**in_dtype(made, torch.float64), bias=mask.double()), mask, do.double())
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02)


def test_a_block_with_every_term() -> None:
    """Bias, window mask, tables of rel, scale per head and shifted windows in one operator.

    With two heads, the error of the gradient of scale would be the maximum of two random numbers.
    """
    check_case(make_block(torch.float16, tokens=(2, 24), heads=8, terms=True))
