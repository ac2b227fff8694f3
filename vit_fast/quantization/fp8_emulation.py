"""Emulated FP8: a copy of a model whose blocks run the e4m3 reference instead of the kernels, on any device.

The copy shares the tensors of the model. Its blocks run in fp32, with the inputs and weights of selected linear layers
rounded to e4m3. Everything else runs as in the model. `find_kept` calls such a copy to find the linear layers that must
stay in half precision, so that the top-1 class of the model rarely changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.block import parts_of, runs_whole
from ..blocks.fp8_scales import LINEARS, PLACE
from ..blocks.fused import FusedNormMlp, device_of, dtype_of
from ..blocks.parts import BlockParts, LinearParts, block_tensors
from ..blocks.token_facts import NOTHING, TokenFacts
from ..errors import UnsupportedInputError, type_name
from ..ops import reference
from ..ops.descriptions import BlockScales, BlockTensors, Norm, Rope, checked_rope
from .schemes import fewest_kept

IMAGES_FOR_ORDER = 32
"""Number of images used to rank the layers by sensitivity."""
IMAGES: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
"""Calibration images of each model."""
Linear = tuple[str, str]  # a block's name, and one of LINEARS


class EmulatedBlock:
    """Runs a block by its reference; replaces the block's Fp8Scales.

    Attributes:
        scales: Scales of the layers that are rounded; None for the others.
        look: Called with a name of LINEARS and the input of that layer, fp32 [B, N, K].
        name: The block's name in its model.
        linears: See `linears_of`.
    """

    emulated = True

    def __init__(self, name: str, parts: BlockParts, linears: dict[str, tuple[str, ...]]) -> None:
        self.scales = BlockScales()
        self.look: Callable[[str, Tensor], None] = lambda name, x: None
        self.name, self.linears = name, linears
        self._attention, self._mlp = parts.halves
        self.norm = str(self._mlp.norm.kind)
        self.eps = self._attention.norm.eps, self._mlp.norm.eps

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
        qk_norm = attention.qk_norm and attention.qk_norm.now()
        if qk_norm is not None:
            qk_norm = qk_norm._replace(q=_wide_norm(qk_norm.q), k=_wide_norm(qk_norm.k))
        read = iter(LINEARS if tensors.gate_weight is None else ("qkv", "proj", "fc1", "fc1", "fc2"))

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
            self.look(next(read), x)
            return reference.fp8_linear(x, weight, bias, *rest)

        with torch.autocast(x.device.type, enabled=False):
            y = reference.fp8_block(
                x.float(), tensors, self.scales, heads=heads, attention_scale=attention.scale, eps=self.eps,
                norm=self.norm, activation=self._mlp.activation, qk_norm=qk_norm, rope=rope, linear=linear,
            )  # fmt: skip
        return y.to(x.dtype), NOTHING

    def reader(self, parts: BlockParts) -> None:
        """Returns None, because the block rounds its input itself."""

    def check(self, backend: str) -> None:
        """Accepts every backend."""


def emulate(copied: nn.Module) -> tuple[list[EmulatedBlock], dict[str, str]]:
    """Makes the blocks of a fused copy run the reference, where the kernels could run them as one operator.

    Returns the blocks in the model's order, without rounded layers, and the reasons for all skipped blocks by name.
    """
    found, skipped = [], {}
    names = {id(module): name for name, module in copied.named_modules()}
    for name, block in copied.named_modules():
        if not isinstance(block, FusedNormMlp):
            continue
        block.__dict__.pop("vit_fast_parts", None)
        block._modules.pop(PLACE, None)
        parts = parts_of(block)
        if reasons := _unsupported_reasons(parts):
            skipped[name] = "; ".join(reasons)
        else:
            parts.fp8 = EmulatedBlock(name, parts, linears_of(parts, names))
            found.append(parts.fp8)
    return found, skipped


def _unsupported_reasons(parts: BlockParts) -> list[str]:
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
    attention, mlp = parts.halves

    def joined(*linears: LinearParts | None) -> tuple[str, ...]:
        slots = [slot for linear in linears if linear is not None for slot in linear.weights]
        found = (names[id(owner)] + ("" if slot == "weight" else ".in_proj") for owner, slot in slots)
        return tuple(dict.fromkeys(found))

    return {
        "qkv": joined(attention.qkv), "proj": (names[id(attention.proj)],),
        "fc1": joined(mlp.fc1, mlp.gate), "fc2": (names[id(mlp.fc2)],),
    }  # fmt: skip


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


def _wide_norm(norm: Norm) -> Norm:
    return norm._replace(weight=_wide(norm.weight), bias=_wide(norm.bias))


def as_taken(model: nn.Module, batch: Tensor) -> Tensor:
    """Moves a batch to the model's device and, if it is floating, to its dtype."""
    return batch.detach().to(device_of(model), dtype_of(model) if batch.is_floating_point() else None)


def find_kept(
    copied: nn.Module, blocks: Sequence[EmulatedBlock], scales: Mapping[str, BlockScales], batches: Sequence[Tensor],
    wanted: float, always: Mapping[str, Collection[str]],
) -> tuple[set[Linear], float]:  # fmt: skip
    """Finds the fewest linear layers to keep in half precision, besides `always`, for the top-1 agreement `wanted`.

    A layer's sensitivity is the change of the logits if this layer alone is rounded. Bisection finds how many of the
    most sensitive layers must be kept. Also returns the agreement that is reached.
    """

    def logits(rounded: Callable[[Linear], bool], images: Sequence[Tensor]) -> Tensor:
        for block in blocks:
            own = scales[block.name]._asdict()
            block.scales = BlockScales(**{k: own[k] if rounded((block.name, k)) else None for k in LINEARS})
        with torch.inference_mode():
            outputs = [copied(batch) for batch in images]
        found = [each for each in map(logits_of, outputs) if each is not None]
        if len(found) < len(outputs):
            got = type_name(outputs[0])
            raise ValueError(f"the model must return logits [B, classes] for min_agreement, got {got}")
        return torch.cat(found)

    exact = logits(lambda linear: False, batches)
    linears = [(block.name, k) for block in blocks for k in LINEARS if k not in always.get(block.name, ())]
    reached: dict[int, float] = {}  # by number of layers kept

    def passes(kept: Collection[Linear]) -> bool:
        chosen = set(linears) - set(kept)
        same = logits(chosen.__contains__, batches).argmax(-1) == exact.argmax(-1)
        reached[len(kept)] = same.double().mean().item()
        return reached[len(kept)] >= wanted

    if passes(()):
        return set(), reached[0]
    first, count = [], 0
    for batch in batches:
        first.append(batch[: IMAGES_FOR_ORDER - count])
        count += len(first[-1])
    few = exact[:count]
    first = [batch for batch in first if len(batch)]
    damage = {one: (logits(one.__eq__, first) - few).square().sum().item() for one in linears}
    kept = fewest_kept(sorted(linears, key=lambda one: -damage[one]), passes, len(linears) - 1)
    if kept is None:
        enough = max(reached)
        reason = (
            f"the top-1 agreement on {len(exact)} images is {reached[enough]:.1%} with {enough} of "
            f"{len(linears)} linear layers in half precision, and {reached[0]:.1%} with none"
        )
        raise UnsupportedInputError(f"fuse with precision='fp8', min_agreement={wanted:g}", [reason])
    return set(kept), reached[len(kept)]


def logits_of(output: object) -> Tensor | None:
    """Returns the logits [B, classes] in the output of a model; None if it has none."""
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    return logits.float() if isinstance(logits, Tensor) and logits.dim() == 2 else None
