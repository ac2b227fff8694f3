"""Autocast: the residual stream stays in fp32, as torch keeps it, and the result as exact as torch's own."""

from __future__ import annotations

import pytest
import torch
from fused_models import assert_within
from mlp_support import DEVICE, make_case
from torch import Tensor

from vit_fast.ops import attention_varlen, layer_norm_mlp

HALF = [torch.bfloat16, torch.float16]
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)


@pytest.mark.pairwise
@every_half
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("stream", ["fp32", "half"])
def test_every_output_has_the_dtype_that_torch_gives(
    dtype: torch.dtype, residual: bool, scaled: bool, stream: str
) -> None:
    """A half-precision stream stays one; gradients come in the dtype of what they are of."""
    case = make_case(20, 48, 72, torch.float32, residual=residual)
    if not scaled:
        case = case.but(scale2=None)
    with torch.autocast(DEVICE, dtype):
        expected = dtype if stream == "half" else case.forward("eager").dtype
    if stream == "half":
        case = case.but(x=case.x.detach().to(dtype).requires_grad_())
    with torch.autocast(DEVICE, dtype):
        y = case.forward("triton")
    assert y.dtype == expected
    leaves = list(case.leaves().values())
    for leaf, gradient in zip(leaves, torch.autograd.grad(y.float().square().sum(), leaves)):
        assert gradient.dtype == leaf.dtype


def _mlp(tensors: list[Tensor], fused: bool) -> Tensor:
    x, gamma, beta, weight = tensors
    options = {"activation": "gelu", "layer_scale": gamma, "backend": "triton" if fused else "eager"}
    return layer_norm_mlp(x, gamma, beta, weight, None, weight.t(), beta, **options)


@every_half
@pytest.mark.parametrize("size", [1e-6, 3e5], ids=["tiny", "beyond fp16"])
def test_rows_of_any_size(size: float, dtype: torch.dtype) -> None:
    """fp32 rows that fp16 cannot hold: torch normalizes them in fp32, and so do we."""
    base = [torch.randn(shape, device=DEVICE) for shape in ((30, 48), (48,), (48,), (72, 48))]
    base[0] *= size
    grad = torch.randn(30, 48, device=DEVICE)

    def results(precision: torch.dtype, fused: bool) -> dict[str, Tensor]:
        leaves = [tensor.to(precision, copy=True).requires_grad_() for tensor in base]
        with torch.autocast(DEVICE, dtype, enabled=precision != torch.float64):
            y = _mlp(leaves, fused)
        assert y.dtype == precision
        branch = y.detach() - leaves[0].detach()  # beside a large residual its error would not show
        names = ("d x", "d gamma", "d beta", "d weight")
        return {"y": branch, **dict(zip(names, torch.autograd.grad(y, leaves, grad.to(precision))))}

    exact, usual = results(torch.float64, False), results(torch.float32, False)
    for name, value in results(torch.float32, True).items():
        assert_within(value, usual[name], exact[name], 2 if name == "y" else 3, name)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("ends", [(0, 3, 5), (0, 0)], ids=["tokens after the last sequence", "no sequence"])
def test_packed_attention_has_autocasts_dtype(ends: tuple[int, ...], backend: str) -> None:
    q = torch.randn(7, 2, 16, device=DEVICE)
    bounds = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert attention_varlen(q, q, q, bounds, 3, backend=backend).dtype == torch.bfloat16
