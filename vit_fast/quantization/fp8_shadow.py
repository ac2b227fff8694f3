"""A model whose blocks are computed by the definition of e4m3 in place of kernels, on any device: to look, and to try.

It is a copy that shares the model's tensors. What comes before, between and after its blocks runs as in the model; the
blocks run in fp32, with those of their linear layers rounded that are asked for.
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
from ..blocks.row_statistics import NOTHING, RowFacts
from ..ops import reference
from ..ops.descriptions import BlockScales, BlockTensors, QkNorm, Rope, checked_rope

Look = Callable[[str, Tensor], None]
"""Is handed a name of LINEARS and what that layer reads, fp32 [B, N, K]."""


class Simulated:
    """Runs a block by its definition; stands where otherwise its scales do.

    Attributes:
        scales: Of the layers that are rounded; None of the others.
        look: Sees what the layers read.
        name: Of the block in its model.
        linears: By name of LINEARS, as `linears_of` gives them.
    """

    simulated = True

    def __init__(self, name: str, parts: BlockParts, linears: dict[str, tuple[str, ...]]) -> None:
        self.scales = BlockScales()
        self.look: Look = _look_away
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
        """The parameters, in fp32."""
        return BlockTensors._make(map(_wide, block_tensors(self._attention, self._mlp)))

    def run(
        self, parts: BlockParts, x: Tensor, rows: RowFacts, rope: Rope | None, reader: None = None
    ) -> tuple[Tensor, RowFacts]:
        """As `Fp8Scales.run`."""
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
        """It rounds what it reads itself."""

    def check(self, backend: str) -> None:
        """It runs anywhere."""


def simulate(shadow: nn.Module) -> tuple[list[Simulated], dict[str, str]]:
    """Makes the blocks of a fused copy run by their definition, those that the kernels could run as a whole.

    Args:
        shadow: Fused with a backend that runs anywhere.
    Returns:
        One a block, in the model's order, nothing of which is rounded so far; and why the others are left, by name.
    """
    found, left = [], {}
    names = {id(module): name for name, module in shadow.named_modules()}
    for name, block in shadow.named_modules():
        if not isinstance(block, FusedNormMlp):
            continue
        block.__dict__.pop("vit_fast_parts", None)
        block._modules.pop(PLACE, None)
        parts = parts_of(block)
        if reasons := left_reasons(parts):
            left[name] = "; ".join(reasons)
        else:
            parts.fp8 = Simulated(name, parts, linears_of(parts, names))
            found.append(parts.fp8)
    return found, left


def left_reasons(parts: BlockParts) -> list[str]:
    """Why the kernels cannot run a block as a whole, whatever its device."""
    inside = parts.mlp is not None and parts.mlp.inner_norm is not None
    if runs_whole(parts, "triton") and not inside:
        return []
    reasons = [*parts.attention_reasons, *parts.mlp_reasons]
    if inside:
        reasons.append("its MLP has a norm inside: the kernels of e4m3 take none")
    return reasons or ["its attention and MLP are not of one block that the kernels run as a whole"]


def linears_of(parts: BlockParts, names: Mapping[int, str]) -> dict[str, tuple[str, ...]]:
    """By name of LINEARS, the names of the layers that it stands for: q, k and v where they are apart, or one and its
    gate. A projection that a MultiheadAttention holds itself is its `in_proj`.

    Args:
        names: Of all modules, by id.
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


def _look_away(name: str, x: Tensor) -> None:
    """What is read is of no interest."""


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


def _wide_norms(qk_norm: QkNorm) -> QkNorm:
    q, k = (norm._replace(weight=_wide(norm.weight), bias=_wide(norm.bias)) for norm in qk_norm[:2])
    return qk_norm._replace(q=q, k=k)
