"""A pre-norm encoder block in FP8, for inference: quantizes its parameters, and runs them as one operator.

`reference.fp8_block` is the reference. Scales come from an earlier calibration (`vit_fast.calibrate`); nothing
is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UnsupportedInputError
from . import reference
from .backends import fp8_reasons
from .block import checked_qk
from .descriptions import BlockScales, BlockTensors, QkNorm, Rope, interleave, is_rms
from .fp8_op import DIVISOR, E4M3, HALF, Fp8Linear, block_fp8_kernel, unsupported_reasons
from .frozen import Frozen
from .operators import text_of


class Fp8Block(NamedTuple):
    """The parameters of a block for `fused_block_fp8`, from `quantize_block`.

    Attributes:
        qkv, proj, fc1, fc2: The linear layers, with the norms before them and LayerScale after them folded in. Rows of
            fc1 and of its gate are interleaved.
        rope_head: head_dim D if rows of channels j and j + D/2 of q and k are adjacent, so that the matmul can apply
            rotary positions; otherwise 0.
    """

    qkv: Fp8Linear
    proj: Fp8Linear
    fc1: Fp8Linear
    fc2: Fp8Linear
    rope_head: int = 0


def quantize_block(
    tensors: BlockTensors,
    scales: BlockScales,
    dtype: torch.dtype,
    norm: str = "layer_norm",
    rope_head: int = 0,
) -> Fp8Block:
    """Folds the norms into qkv and fc1, and rounds the weights of layers with a scale to e4m3.

    The result is not updated when the parameters change, and has no gradients.

    Args:
        tensors: The parameters, in `dtype` or fp32.
        scales: Scales of the operands. They and their reciprocals must be positive and finite.
        dtype: float16 or bfloat16, of the activations and of weights that are not quantized.
        norm: "layer_norm" or "rms_norm".
        rope_head: head_dim D for rotary positions of layout "half" without a qk-norm over the width; the matmul can
            then rotate q and k if all heads share the tables. Otherwise 0.
    Raises:
        ValueError: a scale has an incorrect shape or device, or it or its reciprocal is not positive and finite.
        UnsupportedInputError: FP8 cannot run this block; lists all reasons.
    """
    rms = is_rms(norm)
    reasons = fp8_reasons(tensors.qkv_weight.device)
    if dtype not in HALF:
        reasons.append(f"dtype must be float16 or bfloat16, got {dtype}")
    if others := [name for name, tensor in list(tensors._asdict().items())[16:] if tensor is not None]:
        reasons.append(f"{', '.join(others)} must be None: FP8 supports neither folded blocks nor norms inside the MLP")
    for name, weight, scale, columns in _layers(tensors, scales):
        _check_scale(name, scale, columns, weight.device)
        if scale is not None and weight.shape[1] % DIVISOR:
            reasons.append(
                f"the input width of {name} must be a multiple of {DIVISOR} in FP8, got {weight.shape[1]} "
                f"(scales.{name}=None keeps it in half precision)"
            )
    if reasons:
        raise UnsupportedInputError("a block in FP8", reasons)
    with torch.no_grad():
        t = BlockTensors._make(tensor if tensor is None else tensor.detach() for tensor in tensors)
        return Fp8Block(
            _normed(
                t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias, None, None, scales.qkv, dtype, rms, rope_head
            ),
            _before_residual(t.proj_weight, t.proj_bias, t.scale1, scales.proj, dtype),
            _normed(
                t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias, t.gate_weight, t.gate_bias, scales.fc1, dtype,
                rms,
            ),
            _before_residual(t.fc2_weight, t.fc2_bias, t.scale2, scales.fc2, dtype),
            rope_head,
        )  # fmt: skip


def _layers(tensors: BlockTensors, scales: BlockScales) -> list[tuple[str, Tensor, Tensor | None, int | None]]:
    """Lists name, weight, operand's scale and the length of that scale (None for one number) of each linear layer."""
    width = tensors.qkv_weight.shape[1]
    return [
        ("qkv", tensors.qkv_weight, scales.qkv, width),
        ("proj", tensors.proj_weight, scales.proj, None),
        ("fc1", tensors.fc1_weight, scales.fc1, width),
        ("fc2", tensors.fc2_weight, scales.fc2, None),
    ]


def _check_scale(name: str, scale: Tensor | None, columns: int | None, device: torch.device) -> None:
    if scale is None:
        return
    shape = () if columns is None else (columns,)
    if tuple(scale.shape) != shape or scale.dtype != torch.float32:
        raise ValueError(
            f"scales.{name} must be float32 of shape {shape}, got {scale.dtype} of shape {tuple(scale.shape)}"
        )
    if scale.device != device:
        raise ValueError(f"scales.{name} must be on {device} like the weight, got {scale.device}")
    factor = scale.reciprocal()  # kernels multiply by the reciprocal
    if not bool(((scale > 0) & scale.isfinite() & factor.isfinite()).all()):
        raise ValueError(f"scales.{name} must be positive and finite, with finite reciprocals, got "
                         f"{float(scale.min()):g} to {float(scale.max()):g}")  # fmt: skip


def _normed(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, gate: Tensor | None,
    gate_bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype, rms: bool, rope_head: int = 0,
) -> Fp8Linear:  # fmt: skip
    """Quantizes a linear layer that follows a norm."""
    if scale is None:
        from ..kernels.linear.folding import NormedLinear, fold_linear

        folded = fold_linear(NormedLinear(weight, bias, gamma, beta, rms, gate, gate_bias, rope_head), dtype)
        return Fp8Linear(folded.weight, folded.shift, None, folded.weight_sum, None)
    shift = weight.new_zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double()
    if gate is not None:
        of_gate = torch.zeros_like(shift) if gate_bias is None else gate_bias.double()
        weight, shift = torch.stack((gate, weight), 1).flatten(0, 1), torch.stack((of_gate, shift), 1).flatten()
    if rope_head:
        weight, shift = _interleaved(weight, rope_head), _interleaved(shift, rope_head)
    if beta is not None:
        shift = shift + weight.double() @ beta.double()
    values, rows = reference.fp8_weight(weight, scale, gamma)
    sums = None if rms else (values / scale).sum(1).mul(rows).float()
    return Fp8Linear(values.to(E4M3), shift.float(), rows, sums, scale.reciprocal().contiguous())


def _interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Permutes [3 H D, ...] so that rows j and j + D/2 of each head of q and k are adjacent, as in `folding.py`."""
    of_qk = rows.shape[0] // 3 * 2
    heads = rows[:of_qk].unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((heads, rows[of_qk:]))


def _before_residual(
    weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Fp8Linear:
    """Quantizes a linear layer with LayerScale, before a residual: layer_scale * rows * (a W8^T + bias / rows)."""
    if scale is None:
        shift, factor = (vector if vector is None else vector.contiguous() for vector in (bias, layer_scale))
        return Fp8Linear(weight.to(dtype).contiguous(), shift, factor, None, None)
    values, rows = reference.fp8_weight(weight, scale)
    factor = rows if layer_scale is None else rows * layer_scale.float()
    return Fp8Linear(
        values.to(E4M3), None if bias is None else bias.float() / rows, factor, None, scale.reciprocal().reshape(1)
    )


def fused_block_fp8(
    x: Tensor,
    x8: Tensor | None,
    statistics: Tensor | None,
    block: Fp8Block,
    next_factor: Tensor | None,
    *,
    heads: int,
    attention_scale: float | None,
    eps: tuple[float, float],
    norm: str = "layer_norm",
    activation: str,
    qk_norm: QkNorm | None = None,
    rope: Rope | None = None,
    next_statistics: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs a block in FP8, with an e4m3 input and LayerNorm statistics passed in and out.

    Args:
        x: [B, N, C]; fp16 or bf16.
        x8: x times block.qkv.operand_factor in e4m3, from the previous block; None computes it.
        statistics: LayerNorm statistics of x from the previous block; None computes them.
        block: Result of `quantize_block` for x.dtype.
        next_factor: Multiplier of y for the next block, fp32 [C]: its qkv.operand_factor. None if it reads half
            precision.
        heads: Number of heads H.
        attention_scale: Multiplier of q k^T; None means D**-0.5.
        eps: Epsilons of the two norms, in units of x squared.
        norm: The `norm` of `quantize_block`.
        activation: One of `reference.ACTIVATIONS`; with a gate, the activation of the gate.
        qk_norm: Norms of q and k, applied before the rotation.
        rope: Rotary positions of q and k.
        next_statistics: True to return the LayerNorm statistics of y.
    Returns:
        y [B, N, C] in x.dtype; y times next_factor in e4m3, or None; and the LayerNorm statistics of y, or None.
    Raises:
        UnsupportedInputError: FP8 cannot run this input; lists all reasons.
    """
    width = block.qkv.weight.shape[0]
    _require_supported(x, x8, block, next_factor, norm, qk_norm)
    if attention_scale is None:
        attention_scale = (width // (3 * heads)) ** -0.5
    if block.rope_head:
        if rope is None or rope.layout != "half" or (qk_norm is not None and qk_norm.over == "width"):
            reason = (
                "rope_head must be 0 without positions of layout 'half' or with qk-norm over the width, got "
                f"{block.rope_head}: quantize the block with rope_head=0"
            )
            raise UnsupportedInputError("a block in FP8", [reason])
        rope = interleave(rope, block.rope_head)
    of_qk, qk, prefix = checked_qk(x, width, heads, qk_norm, rope, block.rope_head > 0)
    words = text_of(norm, activation, qk.norm, qk.over, qk.layout, "none", True, next_statistics, False, x.dtype)
    tensors = [x8, statistics, next_factor, *block.qkv, *block.proj, *block.fc1, *block.fc2, *of_qk[:6]]
    outputs = block_fp8_kernel(x, tensors, heads, attention_scale, prefix, 0, *eps, qk.eps, 0.0, words)
    return outputs[0], None if next_factor is None else outputs[1], outputs[-1] if next_statistics else None


def _require_supported(
    x: Tensor, x8: Tensor | None, block: Fp8Block, next_factor: Tensor | None, norm: str, qk_norm: QkNorm | None
) -> None:
    """Raises UnsupportedInputError for inputs that the operator misses, because it checks each signature only once."""
    reasons, linears = [], block[:4]
    if torch.is_grad_enabled():
        of_norms = () if qk_norm is None else (*qk_norm.q[:2], *qk_norm.k[:2])
        requires_grad = {"x": x.requires_grad, "qk_norm": any(t is not None and t.requires_grad for t in of_norms)}
        reasons += [
            f"{name} must not require a gradient in FP8: use torch.no_grad() or the model in half precision"
            for name, requires in requires_grad.items()
            if requires
        ]
    if is_rms(norm) != (block.qkv.weight_sum is None):
        reasons.append(f"norm must be the kind that the block was quantized with, got {norm!r}")
    # torch's dispatcher chooses one device before the operator sees its inputs
    if reasons or any(linear.weight.device != x.device for linear in linears):
        raise UnsupportedInputError("a block in FP8", unsupported_reasons(x, x8, next_factor, linears) + reasons)


class Quantised(Frozen):
    """The linear layers of one block that runs in e4m3, including those that stay in half precision.

    Args:
        sources: Modules and attribute names of all parameters.
        block: Returns the parameters.
        scales: Scales of the operands; must not change.
        dtype: Dtype of the activations.
        norm: Kind of the norms.
        rope_head: See `quantize_block`.
    Attributes:
        layers: The `Fp8Block` for `fused_block_fp8`; refreshed in place.
    """

    def __init__(
        self,
        sources: Sequence[tuple[nn.Module, str]],
        block: Callable[[], BlockTensors],
        scales: BlockScales,
        dtype: torch.dtype,
        norm: str,
        rope_head: int,
    ) -> None:
        self._scales = scales
        self.layers: Any = None
        super().__init__(sources, block, dtype, norm, rope_head)

    def _computed(self) -> list[Tensor]:
        layers = quantize_block(self._block(), self._scales, self.dtype, self._norm, self.rope_head)
        # clone half-precision layers: they may hold the parameters themselves, which a refresh must not overwrite
        tensors_of_layers = [
            [_cloned(tensor) if linear.operand_factor is None else tensor for tensor in linear] for linear in layers[:4]
        ]
        if self.layers is None:
            self.layers = Fp8Block._make([*map(Fp8Linear._make, tensors_of_layers), layers.rope_head])
        return [tensor for tensors in tensors_of_layers for tensor in tensors if tensor is not None]


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
