"""Autocast: the residual stream stays in fp32, as in torch, and the output is as accurate as torch's."""

from __future__ import annotations

import pytest
import torch
from fused_models import assert_within
from mlp_support import DEVICE, make_case
from torch import Tensor

from vit_fast.ops import attention_varlen

every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.pairwise
@every_half
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("stream", ["fp32", "half"])
def test_outputs_and_gradients_have_torchs_dtypes(
    dtype: torch.dtype, residual: bool, scaled: bool, stream: str
) -> None:
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


@every_half
@pytest.mark.parametrize("size", [1e-6, 3e5], ids=["tiny", "beyond fp16"])
def test_tokens_that_fp16_cannot_represent(size: float, dtype: torch.dtype) -> None:
    """torch normalizes fp32 tokens in fp32, and so do the kernels."""
    case = make_case(30, 48, 72, torch.float32)
    case = case.but(x=(case.x.detach() * size).requires_grad_())

    def results(backend: str) -> dict[str, Tensor]:
        with torch.autocast(DEVICE, dtype):
            found = case.run(backend)
        assert found["y"].dtype == torch.float32
        return found | {"y": found["y"] - case.x.detach()}  # beside a large residual, the branch's error would not show

    exact = case.to(torch.float64).run("eager")
    exact["y"] -= case.x.detach().double()
    own, eager = results("triton"), results("eager")
    for name, value in own.items():
        assert_within(value, eager[name], exact[name], 2 if name == "y" else 3, name)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
@pytest.mark.parametrize("ends", [(0, 3, 5), (0, 0)], ids=["tokens after the last sequence", "no sequence"])
def test_packed_attention_has_the_autocast_dtype(ends: tuple[int, ...], backend: str) -> None:
    q = torch.randn(7, 2, 16, device=DEVICE)
    bounds = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert attention_varlen(q, q, q, bounds, 3, backend=backend).dtype == torch.bfloat16
