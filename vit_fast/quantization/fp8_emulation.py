"""Emulated FP8: a copy of a model whose blocks run the e4m3 reference instead of the kernels, on any device.

The copy shares the model's tensors. Its blocks run in fp32, with the inputs and weights of selected linear layers
rounded to e4m3. Everything else runs as in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.block import parts_of, runs_whole
from ..blocks.fp8_scales import LINEARS, PLACE
from ..blocks.fused import FusedNormMlp
from ..blocks.parts import BlockParts, LinearParts, block_tensors
from ..blocks.token_facts import NOTHING, TokenFacts
from ..ops import reference
from ..ops.checks import checked_rope
from ..ops.descriptions import BlockScales, BlockTensors, QkNorm, Rope

Look = Callable[[str, Tensor], None]
"""Called with a name of LINEARS and the input of that layer, fp32 [B, N, K]."""


class EmulatedBlock:
    """Runs a block by its reference; replaces the block's Fp8Scales.

    Attributes:
        scales: Scales of the layers that are rounded; None for the others.
        look: Called with each layer's input.
        name: The block's name in its model.
        linears: See `linears_of`.
    """

    emulated = True

    def __init__(self, name: str, parts: BlockParts, linears: dict[str, tuple[str, ...]]) -> None:
        self.scales = BlockScales()
        self.look: Look = lambda name, x: None
        self.name, self.linears = name, linears
        self._attention: Any = parts.attention
        self._mlp: Any = parts.mlp

    @property
    def norm(self) -> str:
        return str(self._mlp.norm.kind)

    @property
    def eps(self) -> tuple[float, float]:
        return self._attention.norm.eps, self._mlp.norm.eps

    def tensors(self) -> BlockTensors:
        """Returns the parameters in fp32."""
        return BlockTensors._make(map(_wide, block_tensors(self._attention, self._mlp)))

    def run(
        self, parts: BlockParts, x: Tensor, facts: TokenFacts, rope: Rope | None, reader: None = None
    ) -> tuple[Tensor, TokenFacts]:
        """Runs the block; see `Fp8Scales.run`."""
        attention, tensors, heads = self._attention, self.tensors(), self._attention.num_heads
        if rope is not None:
            rope = checked_rope(rope, (*x.shape[:2], 3, heads, tensors.qkv_weight.shape[0] // (3 * heads)))
        read = iter(LINEARS if tensors.gate_weight is None else ("qkv", "proj", "fc1", "fc1", "fc2"))

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
            self.look(next(read), x)
            return reference.fp8_linear(x, weight, bias, *rest)

        with torch.autocast(x.device.type, enabled=False):
            y = reference.fp8_block(
                x.float(), tensors, self.scales, heads=heads, attention_scale=attention.scale,
                eps=self.eps, norm=self.norm, activation=self._mlp.activation,
                qk_norm=attention.qk_norm and _wide_norms(attention.qk_norm.now()), rope=rope, linear=linear,
            )  # fmt: skip
        return y.to(x.dtype), NOTHING

    def reader(self, parts: BlockParts) -> None:
        """Returns None, because the block rounds its input itself."""

    def check(self, backend: str) -> None:
        """Accepts every backend."""


def emulate(copied: nn.Module) -> tuple[list[EmulatedBlock], dict[str, str]]:
    """Makes the blocks of a fused copy run the reference, where the kernels could run them as one operator.

    Args:
        copied: A copy that was fused with a backend that runs on any device.
    Returns:
        The blocks in the model's order, without rounded layers, and the reasons for all skipped blocks by name.
    """
    found, left = [], {}
    names = {id(module): name for name, module in copied.named_modules()}
    for name, block in copied.named_modules():
        if not isinstance(block, FusedNormMlp):
            continue
        block.__dict__.pop("vit_fast_parts", None)
        block._modules.pop(PLACE, None)
        parts = parts_of(block)
        if reasons := unsupported_reasons(parts):
            left[name] = "; ".join(reasons)
        else:
            parts.fp8 = EmulatedBlock(name, parts, linears_of(parts, names))
            found.append(parts.fp8)
    return found, left


def unsupported_reasons(parts: BlockParts) -> list[str]:
    """Returns the reasons why the kernels cannot run a block as one operator, whatever the device."""
    inside = parts.mlp is not None and parts.mlp.inner_norm is not None
    if runs_whole(parts) and not inside:
        return []
    reasons = [*parts.attention_reasons, *parts.mlp_reasons]
    if inside:
        reasons.append("the MLP must not have an inner norm in FP8")
    return reasons or ["attention and MLP must belong to one block that the kernels run as one operator"]


def linears_of(parts: BlockParts, names: Mapping[int, str]) -> dict[str, tuple[str, ...]]:
    """Returns the names of the layers behind each of LINEARS: e.g. q, k and v if separate, or fc1 and its gate.

    The projection of a MultiheadAttention is called `in_proj`. `names` are the names of all modules by id.
    """
    attention: Any = parts.attention
    mlp: Any = parts.mlp

    def joined(*linears: LinearParts | None) -> tuple[str, ...]:
        slots = [slot for linear in linears if linear is not None for slot in linear.weights]
        return tuple(
            dict.fromkeys(names[id(owner)] + ("" if slot == "weight" else ".in_proj") for owner, slot in slots)
        )

    return {
        "qkv": joined(attention.qkv), "proj": (names[id(attention.proj)],),
        "fc1": joined(mlp.fc1, mlp.gate), "fc2": (names[id(mlp.fc2)],),
    }  # fmt: skip


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


def _wide_norms(qk_norm: QkNorm) -> QkNorm:
    q, k = (norm._replace(weight=_wide(norm.weight), bias=_wide(norm.bias)) for norm in qk_norm[:2])
    return qk_norm._replace(q=q, k=k)
