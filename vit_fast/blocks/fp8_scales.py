"""e4m3 scales of a block's operands, stored as buffers of a submodule of the block.

They are in the state dict (`blocks.0.vit_fast_fp8.qkv`) and are loaded, copied, pickled and moved with it. They are
powers of two, which all floating dtypes represent exactly, so that converting the model does not change them; and
rounding to a floating format is the same at any power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedInputError
from ..ops.descriptions import BlockScales, Rope
from ..ops.fp8 import Quantised, fused_block_fp8
from ..ops.operators import is_exporting, needs_gradient
from .parts import BlockParts, block_tensors, frozen_sources, tensor_of
from .row_statistics import RowFacts

LINEARS = BlockScales._fields
"""Linear layers of a block; also the names of the buffers."""
PLACE = "vit_fast_fp8"
"""Name of the module in its block."""
LEAST, MOST = 2.0**-24, 2.0**15
"""Range of fp16."""
BACK = "vit_fast.fuse(model) restores the model's own precision"


class Fp8Scales(nn.Module):
    """Divisors of the operands of a block before rounding to e4m3.

    Args:
        width: Channels C of the residual stream.
        device: Device of the buffers.
    Attributes:
        qkv, fc1: Scales of the residual stream per channel, [C].
        proj, fc2: Scales of the attention's output and of the hidden layer, [].
        kept: True for the LINEARS that stay in half precision, bool [4].
        active: True if the block runs in e4m3; set by `vit_fast.fuse`.
    """

    emulated = False

    qkv: Tensor
    proj: Tensor
    fc1: Tensor
    fc2: Tensor
    kept: Tensor

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.active = False
        for name in LINEARS:
            shape = (width,) if name in ("qkv", "fc1") else ()
            self.register_buffer(name, torch.ones(shape, device=device))
        self.register_buffer("kept", torch.zeros(len(LINEARS), dtype=torch.bool, device=device))
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def set(self, scales: BlockScales) -> None:
        """Copies these scales; `kept` stays unchanged."""
        for name, scale in scales._asdict().items():
            getattr(self, name).copy_(scale)

    @torch.no_grad()
    def keep(self, names: Collection[str]) -> None:
        """Selects the LINEARS that stay in half precision."""
        self.kept.copy_(torch.tensor([name in names for name in LINEARS]))

    def names_kept(self) -> list[str]:
        """Returns the LINEARS that stay in half precision; none on meta, where this is unknown."""
        if self.kept.is_meta:
            return []
        return [name for name, kept in zip(LINEARS, self.kept.tolist()) if kept]

    def all(self) -> BlockScales:
        """Returns copies of all scales in fp32, including those of layers in half precision."""
        with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
            return BlockScales(*(getattr(self, name).to(torch.float32, copy=True) for name in LINEARS))

    def now(self) -> BlockScales:
        """Returns the scales for the operator; None for layers in half precision."""
        return self.all()._replace(**dict.fromkeys(self.names_kept()))

    def check(self, backend: str) -> None:
        """Raises UnsupportedInputError if the block cannot run in e4m3 now."""
        reasons = ["the block must be in evaluation mode: call eval() first"] if self.training else []
        if is_exporting():
            reasons.append("export does not support FP8 blocks: export the unfused model with precision='fp8'")
        elif backend != "triton":
            reasons.append(f"the backend of the block must be 'triton', got {backend!r}")
        if reasons:
            raise UnsupportedInputError("a block in FP8", [*reasons, BACK])

    def run(
        self, parts: BlockParts, x: Tensor, rows: RowFacts, rope: Rope | None, reader: Quantised | None = None
    ) -> tuple[Tensor, RowFacts]:
        """Runs the block, [B, N, C] -> [B, N, C]; also returns facts about its output for the next block.

        Args:
            parts: Parts of the block, which the kernels run as a whole.
            rows: Facts about x from the previous block.
            reader: Cached weights of the next block if that reads e4m3.
        """
        attention: Any = parts.attention
        mlp: Any = parts.mlp
        self.check("triton")
        if torch.is_grad_enabled() and needs_gradient(x, *block_tensors(attention, mlp)):
            reason = "FP8 does not support gradients: call the model within torch.no_grad()"
            raise UnsupportedInputError("a block in FP8", [reason, BACK])
        cached = self.cached_of(parts)
        if cached.rope_head and not _matmul_can_rotate(rope):
            parts.frozen = cached = self._quantised(parts, 0)
        y, y8, statistics = fused_block_fp8(
            x, rows.x8 if rows.reader is cached else None, rows.statistics, cached.layers,
            None if reader is None else reader.layers.qkv.operand_factor,
            heads=attention.num_heads, attention_scale=attention.scale,
            eps=(attention.norm.eps, mlp.norm.eps), norm=mlp.norm.kind, activation=mlp.activation,
            qk_norm=attention.qk_norm and attention.qk_norm.now(), rope=rope,
        )  # fmt: skip
        return y, RowFacts(statistics, y8, reader, parts)

    def reader(self, parts: BlockParts) -> Quantised | None:
        """Returns a block's cached weights if its first layer reads e4m3, else None."""
        cached = self.cached_of(parts)
        return None if cached.layers.qkv.operand_factor is None else cached

    def cached_of(self, parts: BlockParts) -> Quantised:
        """Returns the cached weights of a block, and creates them if needed."""
        if not isinstance(parts.frozen, Quantised):
            attention: Any = parts.attention
            parts.frozen = self._quantised(parts, attention.rope_head)
        return parts.frozen

    def _quantised(self, parts: BlockParts, rope_head: int) -> Quantised:
        attention: Any = parts.attention
        mlp: Any = parts.mlp
        sources = [*frozen_sources(attention, mlp), (attention.proj, "bias"), (mlp.fc2, "bias")]
        sources += [part.layer_scale for part in (attention, mlp) if part.layer_scale is not None]
        tensors, dtype = partial(block_tensors, attention, mlp), tensor_of(*mlp.fc1.weights[0]).dtype
        return Quantised(sources, tensors, self.now(), dtype, mlp.norm.kind, rope_head)


def _matmul_can_rotate(rope: Rope | None) -> bool:
    """True if the qkv matmul can apply the rotary positions itself: half layout, shared by all heads."""
    return rope is not None and rope.layout == "half" and (rope.cos.dim() < 4 or rope.cos.shape[1] == 1)


def scales_of(block: nn.Module) -> Fp8Scales | None:
    """Returns the scales of a block; None if it is not calibrated."""
    held = block._modules
    scales = held[PLACE] if PLACE in held else None  # noqa: SIM401  # a traced module has no get
    return scales if isinstance(scales, Fp8Scales) else None


def give_scales(block: nn.Module, scales: BlockScales) -> None:
    """Stores scales in a block and drops weights cached for other scales."""
    width = scales.qkv.shape[0]  # type: ignore[union-attr]  # calibration sets it
    _place(block, width).set(scales)
    block.__dict__.pop("vit_fast_parts", None)


def runs_in_fp8(model: nn.Module) -> bool:
    """True if any block of the model runs in e4m3."""
    return any(isinstance(module, Fp8Scales) and module.active for module in model.modules())


def _place(block: nn.Module, width: int) -> Fp8Scales:
    """Returns the scales of a block, and creates them if it has none of this width."""
    scales = scales_of(block)
    if scales is None or scales.qkv.shape[0] != width:
        device = next((parameter.device for parameter in block.parameters()), None)
        scales = Fp8Scales(width, device)
        block.add_module(PLACE, scales)
    return scales


def take_scales_away(model: nn.Module) -> None:
    """Removes the scales, which restores the state dict from before calibrate."""
    for module in model.modules():
        if module._modules.pop(PLACE, None) is not None:
            module.__dict__.pop("vit_fast_parts", None)


def make_room(block: nn.Module, state: Mapping[str, Tensor], prefix: str) -> None:
    """Creates buffers for the scales in a state dict, before it is loaded, and drops cached weights."""
    coming = state.get(f"{prefix}{PLACE}.{LINEARS[0]}")
    if coming is not None:
        _place(block, coming.shape[0])
        block.__dict__.pop("vit_fast_parts", None)


def scales_that_come(state: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Returns the buffers that `make_room` creates in blocks of this width for the scales in a state dict."""
    end = f"{PLACE}.{LINEARS[0]}"
    buffers = Fp8Scales(width).state_dict()
    blocks = [name.removesuffix(LINEARS[0]) for name in state if name.endswith(end)]
    return {block + name: buffer for block in blocks for name, buffer in buffers.items()}
