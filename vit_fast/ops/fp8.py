"""A pre-norm encoder block in FP8: its parameters quantised, and the operator that runs them; for inference.

`reference.fp8_block` is the definition. Scales are chosen beforehand, from what the operands of the linear layers were
on images like those to come; nothing is measured here.
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
from .descriptions import BlockScales, BlockTensors, QkNorm, Rope, is_rms, neighbours
from .fp8_op import DIVISOR, E4M3, HALF, Fp8Linear, block_fp8_kernel, unsupported_reasons
from .frozen import Frozen
from .operators import text_of


class Fp8Block(NamedTuple):
    """The parameters of a block as `fused_block_fp8` takes them; made by `quantize_block`.

    Attributes:
        qkv, proj, fc1, fc2: The linear layers, with the norms before them and LayerScale behind them; fc1 with its
            gate, whose rows lie by turns with its own.
        paired_head: Channels of a head of q and k where the rows of each pair of channels j and j + D/2 are neighbours,
            for positions that the matmul turns; else 0.
    """

    qkv: Fp8Linear
    proj: Fp8Linear
    fc1: Fp8Linear
    fc2: Fp8Linear
    paired_head: int = 0


def quantize_block(
    tensors: BlockTensors,
    scales: BlockScales,
    dtype: torch.dtype,
    norm: str = "layer_norm",
    paired_head: int = 0,
) -> Fp8Block:
    """Folds the norms into qkv and fc1, and rounds the weights to e4m3 where their operand has a scale.

    The result follows no change of the parameters, and gives no gradients.

    Args:
        tensors: The parameters themselves, in `dtype` or fp32.
        scales: Of the operands: positive and finite, as are their reciprocals.
        dtype: Of the activations, and of what is not quantised: float16 or bfloat16.
        norm: "layer_norm" or "rms_norm".
        paired_head: D, where rotary positions of layout "half" without a qk-norm over the width are to be turned as
            neighbours, by the matmul where all heads share them; else 0.
    Raises:
        ValueError: a scale has another shape or device, or it or its reciprocal is not a positive finite number.
        UnsupportedInputError: FP8 cannot run on these; lists all reasons.
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
                t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias, None, None, scales.qkv, dtype, rms, paired_head
            ),
            _before_residual(t.proj_weight, t.proj_bias, t.scale1, scales.proj, dtype),
            _normed(
                t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias, t.gate_weight, t.gate_bias, scales.fc1, dtype,
                rms,
            ),
            _before_residual(t.fc2_weight, t.fc2_bias, t.scale2, scales.fc2, dtype),
            paired_head,
        )  # fmt: skip


def _layers(tensors: BlockTensors, scales: BlockScales) -> list[tuple[str, Tensor, Tensor | None, int | None]]:
    """Name, weight, scale of the operand and its length, None for one number, of each linear layer."""
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
    if not bool(((scale > 0) & scale.isfinite() & scale.reciprocal().isfinite()).all()):  # kernels multiply by that
        raise ValueError(f"scales.{name} must be positive and finite, with finite reciprocals, got "
                         f"{float(scale.min()):g} to {float(scale.max()):g}")  # fmt: skip


def _normed(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, gate: Tensor | None,
    gate_bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype, rms: bool, paired_head: int = 0,
) -> Fp8Linear:  # fmt: skip
    """A linear layer behind a norm."""
    if scale is None:
        from ..kernels.linear.folding import NormedLinear, fold_linear

        folded = fold_linear(NormedLinear(weight, bias, gamma, beta, rms, gate, gate_bias, paired_head), dtype)
        return Fp8Linear(folded.weight, folded.shift, None, folded.weight_sum, None)
    shift = weight.new_zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double()
    if gate is not None:
        of_gate = torch.zeros_like(shift) if gate_bias is None else gate_bias.double()
        weight, shift = torch.stack((gate, weight), 1).flatten(0, 1), torch.stack((of_gate, shift), 1).flatten()
    if paired_head:
        weight, shift = _paired(weight, paired_head), _paired(shift, paired_head)
    if beta is not None:
        shift = shift + weight.double() @ beta.double()
    values, rows = reference.fp8_weight(weight, scale, gamma)
    sums = None if rms else (values / scale).sum(1).mul(rows).float()
    return Fp8Linear(values.to(E4M3), shift.float(), rows, sums, scale.reciprocal().contiguous())


def _paired(rows: Tensor, head_dim: int) -> Tensor:
    """[3 H D, ...] with rows j and j + D/2 of each head of q and k as neighbours, as `folding.py` lays them."""
    of_qk = rows.shape[0] // 3 * 2
    heads = rows[:of_qk].unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return torch.cat((heads, rows[of_qk:]))


def _before_residual(
    weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Fp8Linear:
    """A linear layer with LayerScale, behind which a residual is added: layer_scale rows (a W8^T + bias / rows)."""
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
    """A block in FP8, with rows in e4m3 and row statistics handed in and out.

    Args:
        x: [B, N, C]; fp16 or bf16.
        x8: x times block.qkv.operand_factor, in e4m3, as the block before gave it; None computes it.
        statistics: Of the rows of x, as the block before gave them; None computes them.
        block: From `quantize_block`, for x's dtype.
        next_factor: What y is multiplied by for the next block, fp32 [C]: its qkv.operand_factor; None: it reads half
            precision.
        heads: H.
        attention_scale: Multiplier of q k^T; None means D**-0.5.
        eps: Of the two norms, in units of x squared.
        norm: As `quantize_block` was told.
        activation: One of `reference.ACTIVATIONS`; with a gate, the gate's.
        qk_norm: Of q and k, before they are rotated.
        rope: Rotary positions of q and k.
        next_statistics: Whether a block or norm follows that takes the statistics of the rows over.
    Returns:
        y [B, N, C] in x.dtype; y times next_factor in e4m3, or None; and the statistics of its rows, or None.
    Raises:
        UnsupportedInputError: FP8 cannot run this input; lists all reasons.
    """
    width = block.qkv.weight.shape[0]
    _require_supported(x, x8, block, next_factor, norm, qk_norm)
    if attention_scale is None:
        attention_scale = (width // (3 * heads)) ** -0.5
    if block.paired_head:
        if rope is None or rope.layout != "half" or (qk_norm is not None and qk_norm.over == "width"):
            reason = (
                f"paired_head is {block.paired_head}, for positions of layout 'half' and no qk-norm over the width: "
                "quantize the block with paired_head=0"
            )
            raise UnsupportedInputError("a block in FP8", [reason])
        rope = neighbours(rope, block.paired_head)
    of_qk, qk, prefix = checked_qk(x, width, heads, qk_norm, rope, block.paired_head > 0)
    words = text_of(norm, activation, qk.norm, qk.over, qk.layout, "none", True, next_statistics, False, x.dtype)
    tensors = [x8, statistics, next_factor, *block.qkv, *block.proj, *block.fc1, *block.fc2, *of_qk[:6]]
    y, *others = block_fp8_kernel(x, tensors, heads, attention_scale, prefix, 0, *eps, qk.eps, 0.0, words)
    emitted = others.pop() if next_statistics else None
    return y, others[0] if others else None, emitted


def _require_supported(
    x: Tensor, x8: Tensor | None, block: Fp8Block, next_factor: Tensor | None, norm: str, qk_norm: QkNorm | None
) -> None:
    """Raises UnsupportedInputError for inputs that the operator, which checks each signature once, cannot detect."""
    reasons, linears = [], block[:4]
    if torch.is_grad_enabled():
        of_norms = () if qk_norm is None else (*qk_norm.q[:2], *qk_norm.k[:2])
        wanted = {"x": x.requires_grad, "qk_norm": any(t is not None and t.requires_grad for t in of_norms)}
        reasons += [
            f"{name} requires a gradient: FP8 gives none, use torch.no_grad or the model in half precision"
            for name, requires in wanted.items()
            if requires
        ]
    if is_rms(norm) != (block.qkv.weight_sum is None):
        reasons.append(f"norm is {norm!r}: the block was quantized with the other kind")
    # torch would choose one of several devices before the operator sees its inputs
    if reasons or any(linear.weight.device != x.device for linear in linears):
        raise UnsupportedInputError("a block in FP8", unsupported_reasons(x, x8, next_factor, linears) + reasons)


class Quantised(Frozen):
    """The linear layers of one block that runs in e4m3, those among them that stay in half precision too.

    Args:
        sources: Where the parameters are, all of them.
        block: Gives them.
        scales: Of the operands; they are what they are for as long as this lives.
        dtype: Of the activations.
        norm: The kind of the norms.
        paired_head: As `quantize_block` takes it.
    Attributes:
        layers: The block as `fused_block_fp8` takes it; in the same memory for as long as this lives.
    """

    def __init__(
        self,
        sources: Sequence[tuple[nn.Module, str]],
        block: Callable[[], BlockTensors],
        scales: BlockScales,
        dtype: torch.dtype,
        norm: str,
        paired_head: int,
    ) -> None:
        self._scales = scales
        self.layers: Any = None
        super().__init__(sources, block, dtype, norm, paired_head)

    def _made(self) -> list[Tensor]:
        layers = quantize_block(self._block(), self._scales, self.dtype, self._norm, self.paired_head)
        # one in half precision may hold the parameters themselves, which are not ours to write to
        made = [
            [_own(tensor) if linear.operand_factor is None else tensor for tensor in linear] for linear in layers[:4]
        ]
        if self.layers is None:
            self.layers = Fp8Block._make([*map(Fp8Linear._make, made), layers.paired_head])
        return [tensor for tensors in made for tensor in tensors if tensor is not None]


def _own(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
