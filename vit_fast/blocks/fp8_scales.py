"""e4m3 scales of the inputs of a block's linear layers, stored as buffers of a submodule of the block.

Scales are powers of two, which fp16 and bf16 represent exactly, so converting the model changes no scale. Finer scales
would not be more accurate, because the rounding error of e4m3 is relative.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ..errors import UnsupportedInputError
from ..ops.block import fused_block
from ..ops.descriptions import BlockScales, BlockTensors, Rope, interleave
from ..ops.folded import fold
from ..ops.registration import is_exporting, needs_gradient
from .frozen import Frozen
from .parts import AttentionParts, BlockParts, MlpParts, block_tensors, options_of, tensor_of
from .token_facts import TokenFacts

LINEARS = BlockScales._fields  # linear layers of a block; also the names of the buffers
PLACE = "vit_fast_fp8"  # name of the `Fp8Scales` submodule in its block
MIN_SCALE, MAX_SCALE = 2.0**-24, 2.0**15  # smallest and largest power of two in fp16
_HOW_TO_LEAVE = "to turn FP8 off, call vit_fast.fuse(model)"


class FrozenFp8(Frozen):
    """Cached linear layers of a block that runs in e4m3; `layers` is refreshed in place."""

    def __init__(self, attention: AttentionParts, mlp: MlpParts, scales: BlockScales, rope_head: int) -> None:
        self._scales = scales
        super().__init__(attention, mlp, tensor_of(*mlp.fc1.weights[0]).dtype, rope_head)

    def _computed(self) -> list[Tensor]:
        tensors = block_tensors(self.attention, self.mlp)
        quantized = fold(tensors, self.dtype, self.mlp.norm.kind, self.rope_head, scales=self._scales)
        # clone, because layers in half precision may hold the parameters, which a refresh must not overwrite
        layers = BlockTensors(*(tensor if tensor is None else tensor.clone() for tensor in quantized))
        if self.layers is None:
            self.layers = layers
        return [tensor for tensor in layers if tensor is not None]


class Fp8Scales(nn.Module):
    """Scales by which inputs of a block's linear layers are divided before rounding to e4m3."""

    emulated = False

    qkv: Tensor  # [C], one scale per channel of the residual stream
    proj: Tensor  # []
    fc1: Tensor  # [C]
    fc2: Tensor  # []
    kept: Tensor  # True for the LINEARS that stay in half precision, bool [4]

    def __init__(self, width: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.active = False  # True if the block runs in e4m3; set by `fuse`
        for name in LINEARS:
            shape = (width,) if name in ("qkv", "fc1") else ()
            self.register_buffer(name, torch.ones(shape, device=device))
        self.register_buffer("kept", torch.zeros(len(LINEARS), dtype=torch.bool, device=device))
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def keep(self, names: Collection[str]) -> None:
        """Selects the LINEARS that stay in half precision."""
        self.kept.copy_(torch.tensor([name in names for name in LINEARS], device="cpu"))

    def names_kept(self) -> list[str]:
        """Returns the LINEARS that stay in half precision; none for meta tensors, which have no values."""
        return [] if self.kept.is_meta else [name for name, kept in zip(LINEARS, self.kept.tolist()) if kept]

    def all(self) -> BlockScales:
        """Returns copies of all scales in fp32, including the scales of layers in half precision."""
        with torch.inference_mode(False):  # inference tensors cannot be written to outside inference mode
            return BlockScales(*(getattr(self, name).to(torch.float32, copy=True) for name in LINEARS))

    def now(self) -> BlockScales:
        """Returns the scales for the operator; None for layers in half precision."""
        return self.all()._replace(**dict.fromkeys(self.names_kept()))

    def check(self, backend: str) -> None:
        """Raises UnsupportedInputError if the block cannot run in e4m3 now."""
        reasons = ["the block must be in evaluation mode: call eval() first"] if self.training else []
        if is_exporting():
            reasons.append("export does not support FP8 blocks: call unfuse, then export_onnx(..., precision='fp8')")
        elif backend != "triton":
            reasons.append(f"the backend of the block must be 'triton', got {backend!r}")
        if reasons:
            raise UnsupportedInputError("a block in FP8", [*reasons, _HOW_TO_LEAVE])

    def run(
        self, parts: BlockParts, x: Tensor, facts: TokenFacts, rope: Rope | None, reader: FrozenFp8 | None = None
    ) -> tuple[Tensor, TokenFacts]:
        """Runs the block on x [B, N, C]; `reader`: cached weights of the next block if the next block reads e4m3."""
        attention, mlp = parts.halves
        self.check("triton")
        options = options_of(attention, mlp, x.device)  # terms are refused with a reason
        qk_norm = options["qk_norm"]
        of_norms = () if qk_norm is None else (*qk_norm.q[:2], *qk_norm.k[:2])
        if torch.is_grad_enabled() and needs_gradient(x, *of_norms, *block_tensors(attention, mlp)):
            reason = "FP8 does not support gradients: call the model within torch.no_grad()"
            raise UnsupportedInputError("a block in FP8", [reason, _HOW_TO_LEAVE])
        cached = self.cached_of(parts)
        # the folded order of q and k requires layout "half" and tables that all heads share
        shared = rope is not None and rope.layout == "half" and (rope.cos.dim() < 4 or rope.cos.shape[1] == 1)
        if cached.rope_head and not shared:
            parts.frozen = cached = FrozenFp8(attention, mlp, self.now(), 0)
        if rope is not None and cached.rope_head:
            rope = interleave(rope, cached.rope_head)
        y, statistics, y8 = fused_block(
            x, facts.statistics, cached.layers, rope=rope, next_statistics=True, **options,
            x8=facts.x8 if facts.reader is cached else None,
            next_factor=None if reader is None else reader.layers.qkv_factor,
        )  # fmt: skip
        return y, TokenFacts(statistics, y8, reader, parts)

    def reader(self, parts: BlockParts) -> FrozenFp8 | None:
        """Returns the cached weights if the qkv layer reads e4m3, else None."""
        cached = self.cached_of(parts)
        return None if cached.layers.qkv_factor is None else cached

    def cached_of(self, parts: BlockParts) -> FrozenFp8:
        if not isinstance(parts.frozen, FrozenFp8):
            attention, mlp = parts.halves
            parts.frozen = FrozenFp8(attention, mlp, self.now(), attention.rope_head)
        return parts.frozen


def scales_of(block: nn.Module) -> Fp8Scales | None:
    """Returns the scales of a block; None if the block is not calibrated."""
    held = block._modules
    scales = held[PLACE] if PLACE in held else None  # noqa: SIM401  # a traced module has no get
    return scales if isinstance(scales, Fp8Scales) else None


@torch.no_grad()
def set_scales(block: nn.Module, scales: BlockScales) -> None:
    """Stores scales in a block and drops the cached weights."""
    buffers = _ensure_scales(block, scales.qkv.shape[0])  # type: ignore[union-attr]  # calibration sets it
    for name, scale in zip(LINEARS, scales):
        getattr(buffers, name).copy_(scale)


def runs_in_fp8(model: nn.Module) -> bool:
    """True if any block of the model runs in e4m3."""
    return any(isinstance(module, Fp8Scales) and module.active for module in model.modules())


def _ensure_scales(block: nn.Module, width: int) -> Fp8Scales:
    """Returns the scales of a block, creates missing scales of this width, and drops cached weights."""
    scales = scales_of(block)
    if scales is None or scales.qkv.shape[0] != width:
        device = next((parameter.device for parameter in block.parameters()), None)
        scales = Fp8Scales(width, device)
        block.add_module(PLACE, scales)
    block.__dict__.pop("vit_fast_parts", None)
    return scales


def remove_scales(model: nn.Module) -> None:
    """Removes the scales of all blocks."""
    for module in model.modules():
        if module._modules.pop(PLACE, None) is not None:
            module.__dict__.pop("vit_fast_parts", None)


def prepare_to_load(block: nn.Module, state: Mapping[str, Tensor], prefix: str) -> None:
    """Creates the buffers for scales in `state` before the block loads this state dict."""
    loaded = state.get(f"{prefix}{PLACE}.{LINEARS[0]}")
    if loaded is not None:
        _ensure_scales(block, loaded.shape[0])


def buffers_to_load(state: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Returns the buffers that `prepare_to_load` creates in blocks of this width."""
    buffers = Fp8Scales(width).state_dict()
    blocks = [name.removesuffix(LINEARS[0]) for name in state if name.endswith(f"{PLACE}.{LINEARS[0]}")]
    return {block + name: buffer for block in blocks for name, buffer in buffers.items()}
