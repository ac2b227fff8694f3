"""Fused encoder layers of transformers, whose parts are found by their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...blocks.fused import FusedNormMlp, fused_class
from ...blocks.parts import AttentionParts, MlpParts
from ...blocks.plain import is_touched
from ...blocks.reading import Reader, describe
from .self_attention import (
    DROPOUT_RATES,
    FusedPackedAttention,
    FusedRotarySelfAttention,
    FusedSelfAttention,
    TransformersReader,
    container_classes_beside,
    is_set,
    projections_of,
)

# Possible names of the parts of a layer; the first existing one applies
NORMS = ("layernorm_before", "norm1", "layer_norm1", "attention_norm")
MLP_NORMS = ("layernorm_after", "norm2", "layer_norm2", "ffn_norm")
ATTENTIONS = ("attention", "self_attn", "attn")
MLPS = ("mlp", "feed_forward")
AFTER = ("dropout", "layer_scale1", "drop_path")
# fc1, activation and fc2 of an MLP, which may also have a gate_proj
LINEARS = (
    ("fc1", "activation_fn", "fc2"), ("fc1", "activation", "fc2"), ("fc1", "act", "fc2"),
    ("linear_fc1", "act_fn", "linear_fc2"), ("up_proj", "act_fn", "down_proj"),
)  # fmt: skip
SPLIT_MLP = ["intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"]  # transformers 4


def _first(block: Reader, names: Iterable[str]) -> str:
    """Returns the first path that exists in a block, or the last one."""
    for name in names:
        if block.at(name) is not None:
            break
    return name


def _present(block: Reader, *paths: str) -> list[str]:
    return [path for path in paths if block.at(path) is not None]


class FusedLayer(FusedNormMlp):
    """An encoder layer of transformers. Its first half is fused if its attention layer has four projections."""

    reader = TransformersReader
    in_sequence = False
    vit_fast_returns_tuple: bool
    vit_fast_arguments: tuple[str, ...]
    vit_fast_first_half: tuple[str, str, tuple[str, ...]]  # names of norm and attention layer, and of what follows

    @classmethod
    def read_attention(cls, block: Reader) -> AttentionParts | None:
        known = container_classes_beside(cls.original)
        name, norm = _first(block, ATTENTIONS), _first(block, NORMS)
        module = block.watch(name)
        if fused_class(module, FusedPackedAttention):
            return block.attention(
                name, norm, (f"{name}.qkv",), f"{name}.proj", num_heads=module.num_heads,
                scale=block.value(f"{name}.scaling"), rotates_halves=True,
            )  # fmt: skip
        inside, dropouts = _present(block, "layer_scale1"), _present(block, "dropout")
        names, out = projections_of(module), None
        if block.at(f"{name}.output.dense") is not None:  # transformers 4: the output linear layer is in another module
            inside += [name, f"{name}.output"]
            out, dropouts = f"{name}.output.dense", [f"{name}.output.dropout"]
            name, module = f"{name}.attention", block.watch(f"{name}.attention")
            names = projections_of(module)
        if names is None or not (out or names[3]) or not fused_class(module, FusedSelfAttention):
            block.reasons.append(f"{name} must be fused, with q, k, v and output projection, got {describe(module)}")
            return None
        *qkv, own = (f"{name}.{linear}" for linear in names)
        linears = [block.linear(path) for path in qkv]
        if not block.check_fusible() or len({linear.weight.shape for linear in linears}) > 1:
            return None
        rate = next(rate for rate in DROPOUT_RATES if hasattr(module, rate))
        return block.attention(
            name, norm, tuple(qkv), out or own, inside=dict.fromkeys(inside, known),
            dropouts=dropouts, rates=(f"{name}.{rate}",),
            num_heads=linears[0].out_features // type(module).head_width(module),
            scale=block.value(_first(block, (f"{name}.scaling", f"{name}.scale"))),
            rotates_halves=isinstance(module, FusedRotarySelfAttention),
            layer_scale="layer_scale1.lambda1", drop_path="drop_path",
        )  # fmt: skip

    @classmethod
    def read_mlp(cls, block: Reader) -> MlpParts | None:
        mlp = _first(block, MLPS)
        candidates = [[f"{mlp}.{name}" for name in names] for names in LINEARS] + [SPLIT_MLP]
        paths = next((paths for paths in candidates if all(block.at(path) is not None for path in paths)), None)
        if paths is None:
            got = describe(block.watch(mlp))
            block.reasons.append(f"the MLP must have linear layers with known names such as fc1 and fc2, got {got}")
            return None
        gated = block.at(f"{mlp}.gate_proj") is not None
        inside = _present(block, mlp, "intermediate", "output", "layer_scale2")
        return block.mlp(
            _first(block, MLP_NORMS), *paths, gate=f"{mlp}.gate_proj" if gated else None,
            inside=dict.fromkeys(inside, container_classes_beside(cls.original)),
            dropouts=_present(block, "dropout", "output.dropout"), layer_scale="layer_scale2.lambda1",
            drop_path="drop_path",
        )  # fmt: skip

    def set_up(self) -> None:
        names = tuple(inspect.signature(type(self).original_forward).parameters)
        self.vit_fast_arguments = names[2:]
        # layers with this parameter return tuples, to which they can append attention weights
        self.vit_fast_returns_tuple = "output_attentions" in names
        block, after = self.reader(self), tuple(name for name in AFTER if hasattr(self, name))
        self.vit_fast_first_half = _first(block, NORMS), _first(block, ATTENTIONS), after

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Maps [B, N, C] to [B, N, C], in a tuple if this version of transformers expects one."""
        parts = self.ready()
        norm, attention, after = self.vit_fast_first_half
        named = self.named(args, kwargs)
        # hooks on the attention layer would get arguments by keyword that transformers passes by position
        hooked = parts is not None and parts.attention is None and is_touched(getattr(self, attention))
        if parts is None or hooked or is_set(named.get("output_attentions")):
            return super().forward(hidden_states, *args, **kwargs)

        def attend(x: Tensor) -> Tensor:
            result = getattr(self, attention)(getattr(self, norm)(x), **named)
            branch: Tensor = result[0] if isinstance(result, tuple) else result
            for name in after:
                branch = getattr(self, name)(branch)
            return branch + x

        rope = keys = None
        module = None if parts.attention is None else parts.attention.module
        if ordinary := module is not None and not module.needs_original_forward((), named):
            rope, keys = module.rope_of(hidden_states, named), module.keys_of(hidden_states, named)
        output = self.run_as_block(parts, hidden_states, attend, ordinary, rope, keys)
        return (output,) if self.vit_fast_returns_tuple else output

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the attention layer by name."""
        return {**dict(zip(self.vit_fast_arguments, args, strict=False)), **kwargs}
