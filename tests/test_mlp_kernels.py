"""The LayerNorm + MLP kernels match the fp64 reference, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_execution import DTYPES, KERNEL_ARCH
from mlp_support import assert_rule, check_case, make_case, statistics_of
from torch import Tensor

from vit_fast.kernels.linear import linear
from vit_fast.kernels.matmul import matmul_policy
from vit_fast.kernels.matmul.matmul_launch import MatmulConfig
from vit_fast.ops.reference import ACTIVATIONS

GATED: dict[str, Any] = {"gated": True, "activation": "silu"}
FORMS: dict[str, dict[str, Any]] = {
    "LayerNorm": {},
    "RMSNorm": {"norm": "rms_norm"},
    "gated": GATED,
    "plain": {"norm": "none"},
    "plain, gated": GATED | {"norm": "none"},
    "RMSNorm, gated": GATED | {"norm": "rms_norm"},
    "norm inside": {"inner_norm": "layer_norm"},
    "gated, norm inside": GATED | {"inner_norm": "layer_norm"},
    "gated, RMSNorm inside": GATED | {"inner_norm": "rms_norm"},
}
any_form = pytest.mark.parametrize("form", FORMS)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.each_value
@any_dtype
@any_form
@pytest.mark.parametrize(
    ("M", "C", "F"),
    [(17, 192, 264), (1, 48, 72), (127, 100, 150), (128, 65, 33), (129, 40, 328), (300, 40, 56), (17, 2, 3)],
)
def test_sizes(M: int, C: int, F: int, form: str, dtype: torch.dtype) -> None:
    """Multiples of 8 use TMA descriptors, others pointers; bias gradients of 300 tokens are sums of two parts."""
    check_case(make_case(M, C, F, dtype, **FORMS[form]))


@pytest.mark.each_value
@any_dtype
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, gated: bool, dtype: torch.dtype) -> None:
    check_case(make_case(20, 48, 72, dtype, activation=activation, gated=gated))


@pytest.mark.each_value
@any_form
@any_dtype
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("missing", ["norm2_weight", "norm2_bias", "fc1_bias gate_bias", "fc2_bias", "scale2", "all"])
def test_absent_parameters(missing: str, residual: bool, dtype: torch.dtype, form: str) -> None:
    """The parameters are fp32."""
    every = "norm2_weight norm2_bias fc1_bias fc2_bias scale2 gate_bias inner_weight inner_bias"
    case = make_case(20, 136, 72, dtype, residual=residual, **FORMS[form])
    check_case(case.but(**dict.fromkeys((every if missing == "all" else missing).split())), torch.float32)


def _constant(x: Tensor) -> None:
    """Variance 0: LayerNorm returns beta, and its gradient has the factor 1 / sqrt(eps) = 1000."""
    x[::3], x[1::6] = 3.0, 0.0


def _massive(x: Tensor) -> None:
    """A few channels of about 1000, as in trained ViTs (arXiv 2402.17762)."""
    x[:, [7, 50]] += torch.tensor([1000.0, -600.0], device=x.device).to(x.dtype)
    x[5] *= 30


TOKENS = {
    "constant": _constant,
    "massive": _massive,
    "mean 100": lambda x: x.add_(100),
    "mean 1000": lambda x: x.add_(1e3),
}


@pytest.mark.pairwise
@any_dtype
@pytest.mark.parametrize("form", ["LayerNorm", "RMSNorm", "norm inside"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_unusual_tokens(tokens: str, form: str, dtype: torch.dtype) -> None:
    case = make_case(24, 96, 72, dtype, **FORMS[form])
    with torch.no_grad():
        TOKENS[tokens](case.x)
    check_case(case)


@pytest.mark.parametrize("size", [1e-5, 30.0])
def test_small_layer_scale_in_fp16(size: float) -> None:
    """CaiT and DINOv2 start with such a LayerScale; diag(ls) W2 would underflow in fp16."""
    case = make_case(40, 64, 96, torch.float16, residual=False)
    with torch.no_grad():
        case.t.scale2.mul_(size)
    case = case.but(grad=case.grad * 64).to(torch.float16, torch.float32)
    exact = case.to(torch.float64).run("eager")
    results = case.run("triton")
    del results["y"]  # 1e-5 is subnormal in fp16
    for name, gradient in results.items():
        error = (gradient.double() - exact[name]).norm() / exact[name].norm()
        assert error < 4e-3, f"{name}: relative error {error:.1e}"


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["LayerNorm", "RMSNorm", "gated"])
@pytest.mark.parametrize("width", [32, 100, 1100])
@pytest.mark.parametrize("rows", ["usual", "constant", "far from 0", "pieces apart"])
@torch.no_grad()
def test_statistics_of_input_and_output(rows: str, width: int, form: str) -> None:
    """Statistics of one piece, of a shorter last piece, and of more pieces than are combined at once."""
    case = make_case(18, width, 48, torch.bfloat16, residual=False, **FORMS[form])
    # whoever reads statistics applies an epsilon of its own
    case = replace(case, options=case.options | {"eps": (0.0, 0.5 if rows == "usual" else 1e-5)})
    if rows == "constant":
        case.x[::3] = 3.1
    elif rows == "far from 0":
        case.x.add_(100)
    elif rows == "pieces apart":
        case.x[:, :64] += 50
    eager, exact = ({"y": case.to(dtype).forward("eager")} for dtype in (torch.bfloat16, torch.float64))
    whole = replace(case, options=case.options | {"residual": True})
    for known in (statistics_of(case.x), None):
        assert_rule({"y": case.fused(known)[0]}, eager, exact)
        y, emitted = whole.fused(known, next_statistics=True)
        torch.testing.assert_close(emitted, statistics_of(y))


def _shipped() -> list[tuple[torch.dtype, MatmulConfig]]:
    archs = (KERNEL_ARCH,) if KERNEL_ARCH else ("sm_80", "sm_90", "sm_100")
    kinds = (("half", torch.bfloat16), ("tf32", torch.float32))
    shipped = [
        (dtype, config)
        for arch, (kind, dtype), epilogue, tma in product(
            archs, kinds, ("layer_norm", "activation_grad"), (True, False)
        )
        for config in matmul_policy.config_table(arch, kind, epilogue, tma)
    ]
    return list(dict.fromkeys(shipped))


@pytest.mark.parametrize(
    ("dtype", "config"),
    [pytest.param(*case, marks=[pytest.mark.slow] if i % 4 else []) for i, case in enumerate(_shipped())],
    ids=lambda value: str(value).replace("MatmulConfig", ""),
)
def test_every_shipped_configuration(dtype: torch.dtype, config: MatmulConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With these sizes, each configuration has full, partial and empty tiles."""
    monkeypatch.setattr(linear, "matmul_config", lambda *_: config)
    check_case(make_case(140, 40, 264, dtype))


# With fewer than 8 x 16 elements, the error of eager may be near zero by chance. Without relu, because rounding decides
# the sign of values near 0, where its derivative jumps.
@given(
    M=st.integers(8, 150), C=st.integers(16, 90), F=st.integers(16, 140), dtype=st.sampled_from(DTYPES),
    form=st.sampled_from([*FORMS]), activation=st.sampled_from([name for name in ACTIVATIONS if name != "relu"]),
    residual=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_any_shape(M: int, C: int, F: int, dtype: torch.dtype, form: str, **options: Any) -> None:
    check_case(make_case(M, C, F, dtype, **FORMS[form] | options))
