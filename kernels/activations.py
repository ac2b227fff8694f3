"""Activation functions of the MLP and their derivatives, computed in fp32.

Exact GELU is x Phi(x), where Phi is the standard normal CDF. For results in fp32, Phi is computed with erf. For results
in other dtypes, Phi is approximated, with a third of the instructions, by

    Phi(x) = 1 / (1 + exp(-x P(|x|)))

The polynomial P of degree 5 is fitted to log(Phi(x) / Phi(-x)) / x on |x| <= 5.6. The error of the approximated GELU
before rounding is below one fp16 ulp of the result or 1e-8, whichever is larger.

Tanh GELU is also x times a logistic function, because 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u)).

Source: GELU, arXiv 1606.08415.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ptx import reciprocal

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")


@triton.jit
def _logistic(u):
    """Returns 1 / (1 + 2^u): 0 for large u, 1 for very negative u, NaN for NaN."""
    return reciprocal(1.0 + tl.math.exp2(u))


@triton.jit
def _normal_cdf(x, EXACT: tl.constexpr):
    """Returns Phi(x), computed with erf if EXACT, else as 1 / (1 + 2^(-log2(e) x P(|x|)))."""
    if EXACT:
        return 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476)
    else:
        a = tl.abs(x)
        p = a * (a * (a * (a * (a * -1.84459644e-4 + 2.14581418e-3) + 7.93352273e-4) - 0.120539328) + 0.0229874214)
        return _logistic(x * (p - 2.3113057))


@triton.jit
def _gate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """Returns g(x), where act(x) = x g(x)."""
    if ACTIVATION == "gelu":
        return _normal_cdf(x, EXACT)
    elif ACTIVATION == "gelu_tanh":
        # the argument is -2 log2(e) sqrt(2/pi) (x + 0.044715 x^3)
        return _logistic(x * (-2.302208198 - 0.1029432396 * (x * x)))
    elif ACTIVATION == "quick_gelu":
        return _logistic(x * -2.455466959)  # -1.702 log2(e)
    else:
        tl.static_assert(ACTIVATION == "silu", "unknown activation")
        return _logistic(x * -1.4426950408889634)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """Returns act(x) in fp32. Set EXACT if the result is stored in fp32; GELU is then computed with erf."""
    if ACTIVATION == "identity":
        return x
    elif ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)  # tl.maximum would replace NaN by 0
    else:
        return x * _gate(x, ACTIVATION, EXACT)


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """Returns (act(x), act'(x)) in fp32; see `activate` for EXACT."""
    if ACTIVATION == "identity":
        return x, tl.full(x.shape, 1.0, tl.float32)
    elif ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)
    else:
        gate = _gate(x, ACTIVATION, EXACT)
        value = x * gate
        if ACTIVATION == "gelu":
            density = 0.3989422804014327 * tl.math.exp2(x * x * -0.7213475204444817)
            slope = gate + x * density
        elif ACTIVATION == "gelu_tanh":
            # value * (1 - gate) is 0 for large |x|; clamp x^2, because 0 * infinity is NaN
            square = tl.minimum(x * x, 1e4)
            slope = gate + value * (1.0 - gate) * (1.5957691216057308 + 0.2140644488 * square)
        elif ACTIVATION == "quick_gelu":
            slope = gate + value * (1.0 - gate) * 1.702
        else:
            slope = gate + value * (1.0 - gate)
        return value, slope
