"""LayerNorm + MLP (+ LayerScale + residual): public function, validation, dispatch to a backend."""

from __future__ import annotations

from torch import Tensor

from ..errors import UnsupportedInputError
from . import reference
from .backends import resolve_backend


def layer_norm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-6,
    activation: str = "gelu",
    layer_scale: Tensor | None = None,
    residual: bool = True,
    backend: str = "auto",
) -> Tensor:
    """The second half of a pre-norm block: [x +] layer_scale * (act(LN(x) W1^T + b1) W2^T + b2).

    Args:
        x: Tokens [..., C]; fp32, fp16 or bf16 (fp64 too with eager and sdpa).
        norm_weight: LayerNorm's gamma [C]; None means ones.
        norm_bias: LayerNorm's beta [C]; None means zeros.
        fc1_weight: First linear's weight [F, C].
        fc1_bias: Its bias [F]; None means zeros.
        fc2_weight: Second linear's weight [C, F].
        fc2_bias: Its bias [C]; None means zeros.
        eps: LayerNorm's epsilon, in units of x squared.
        activation: "gelu" (exact), "gelu_tanh", "quick_gelu", "relu" or "silu".
        layer_scale: Per-channel multiplier of the branch [C]; None means ones.
        residual: Whether x is added to the branch.
        backend: "eager", "sdpa", "triton" or "auto" (by x's device). eager and sdpa are the same formula here.
    Returns:
        [..., C] in x.dtype.
    Raises:
        ValueError: shapes disagree or the activation is unknown.
        UnsupportedInputError: this backend cannot run this input; lists all reasons.
    """
    _check_inputs(x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, activation)
    backend = resolve_backend(backend, x.device)
    if backend == "triton":
        raise UnsupportedInputError(
            "layer_norm_mlp with backend='triton'", ["the Triton kernel is not part of this version"]
        )
    return reference.layer_norm_mlp(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias,
        eps=eps, activation=activation, layer_scale=layer_scale, residual=residual,
    )  # fmt: skip


def _check_inputs(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    layer_scale: Tensor | None,
    activation: str,
) -> None:
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: accepted are {', '.join(map(repr, reference.ACTIVATIONS))}")
    if x.dim() < 1 or fc1_weight.dim() != 2:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, fc1_weight {tuple(fc1_weight.shape)}: accepted are [..., C], [F, C]"
        )
    C, F = x.shape[-1], fc1_weight.shape[0]
    expected: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("norm_weight", norm_weight, (C,)),
        ("norm_bias", norm_bias, (C,)),
        ("fc1_weight", fc1_weight, (F, C)),
        ("fc1_bias", fc1_bias, (F,)),
        ("fc2_weight", fc2_weight, (C, F)),
        ("fc2_bias", fc2_bias, (C,)),
        ("layer_scale", layer_scale, (C,)),
    )
    for name, tensor, shape in expected:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: accepted is {shape} for x of width {C}")
