"""A pre-norm encoder block of any library as data: `BlockParts`.

A file per library in `vit_fast/libraries/` reads the blocks with a reader (`reading.py`). Parts refer to modules and
attribute names, never to tensors, because a Parameter may be replaced at any time.

If a graph of torch.compile read modules from both the block and `BlockParts`, torch.compile would add one Python guard
per module. So while it traces, `built` rebuilds the parts from the block's modules and their `outline`: names and
numbers that are a constant of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ..ops.descriptions import BlockTensors, Norm, QkNorm
from .plain import Watch, forward_is_replaced, is_hooked

Slot = tuple[Any, str]  # a module and the name of one of its attributes
Path = tuple[str, ...]
Node = tuple[str, Any]  # kind and content
Outline = tuple[Node, Node, tuple[Path, ...], tuple[tuple[Path, str, Any], ...]]

_LITERALS = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class NormParts:
    """A normalization over the last axis.

    Attributes:
        module: Holds weight and, for a LayerNorm, bias.
        kind: "layer_norm" or "rms_norm".
        eps: Added to the variance or mean square before the square root.
    """

    module: Any
    kind: str
    eps: float

    @property
    def slots(self) -> tuple[Slot, ...]:
        names = ("weight", "bias") if self.kind == "layer_norm" else ("weight",)
        return tuple((self.module, name) for name in names)

    def tensors(self) -> tuple[Any, Any]:
        return tensors_of(self.module) if self.kind == "layer_norm" else (tensor_of(self.module, "weight"), None)

    def now(self) -> Norm:
        return Norm(*self.tensors(), self.eps, self.kind)


@dataclass(frozen=True, eq=False)
class LinearParts:
    """A linear layer, or several with the same input (q, k and v), concatenated along the outputs.

    Attributes:
        weights: One weight, or one per layer.
        biases: One bias, or one per layer; timm's EVA has one weight and three biases.
        chunk: 0 or 1: half of the outputs of a layer that computes gate and hidden layer; None means all outputs.
    """

    weights: tuple[Slot, ...]
    biases: tuple[Slot, ...]
    chunk: int | None = None

    def tensors(self) -> tuple[Any, Any]:
        """Returns weight and bias, each a tensor or None."""
        if len(self.weights) == len(self.biases) == 1:
            weight, bias = tensor_of(*self.weights[0]), tensor_of(*self.biases[0])
        else:
            weights, biases = ([tensor_of(*slot) for slot in slots] for slots in (self.weights, self.biases))
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            bias = None
            if any(each is not None for each in biases):
                absent = weight.new_zeros(weight.shape[0] // len(biases))  # BEiT's keys have no bias
                bias = torch.cat([absent if each is None else each for each in biases])
        if self.chunk is None:
            return weight, bias
        return weight.chunk(2)[self.chunk], None if bias is None else bias.chunk(2)[self.chunk]


@dataclass(frozen=True, eq=False)
class QkNormParts:
    """The norms of q and k; see `QkNorm` in `ops/descriptions.py`."""

    q: NormParts
    k: NormParts
    over: str

    def now(self) -> QkNorm:
        return QkNorm(self.q.now(), self.k.now(), self.over)


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """The attention half, x + drop_path(layer_scale * proj(attention(qkv(norm(x))))).

    Attributes:
        rotates_halves: True if the rotary embeddings, which each call passes, have the layout "half" (`Rope`).
    """

    module: Any  # the attention layer
    norm: NormParts
    qkv: LinearParts
    num_heads: int
    scale: float | None  # multiplier of q k^T; None means D**-0.5
    proj: Any  # a linear layer
    layer_scale: Slot | None  # vector [C]
    drop_path: Any  # a module with drop_prob, or None
    dropouts: tuple[Slot, ...]  # dropout probabilities in training
    qk_norm: QkNormParts | None = None
    rotates_halves: bool = False

    @property
    def rope_head(self) -> int:
        """The `rope_head` of `fold`: head_dim if the qkv matmul can rotate q and k, else 0."""
        if not self.rotates_halves or (self.qk_norm is not None and self.qk_norm.over == "width"):
            return 0
        return sum(tensor_of(*slot).shape[0] for slot in self.qkv.weights) // (3 * self.num_heads)


@dataclass(frozen=True, eq=False)
class MlpParts:
    """The MLP half, x + drop_path(layer_scale * fc2(inner_norm(hidden))).

    hidden is activation(fc1(norm(x))); with a gate, activation(gate(norm(x))) * fc1(norm(x)). Attributes without a
    comment are as in AttentionParts.
    """

    norm: NormParts
    fc1: LinearParts
    activation: str  # one of `reference.ACTIVATIONS`
    fc2: Any  # a linear layer
    layer_scale: Slot | None
    drop_path: Any
    dropouts: tuple[Slot, ...]
    gate: LinearParts | None = None
    inner_norm: NormParts | None = None  # before fc2, as in EVA-02

    def tensors(self) -> tuple[Any, ...]:
        """Returns norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias."""
        return (*self.norm.tensors(), *self.fc1.tensors(), *tensors_of(self.fc2))

    def options(self) -> dict[str, Any]:
        """Returns the other arguments of the operator."""
        options = {"eps": self.norm.eps, "activation": self.activation, "layer_scale": scale_of(self)}
        if self.norm.kind != "layer_norm":
            options["norm"] = self.norm.kind
        if self.gate is not None:
            options["gate_weight"], options["gate_bias"] = self.gate.tensors()
        if self.inner_norm is not None:
            options["inner_norm"] = self.inner_norm.now()
        return options


@dataclass(eq=False)
class BlockParts:
    """A block as data; a half that runs as modules is None."""

    attention: AttentionParts | None
    mlp: MlpParts | None
    attention_reasons: tuple[str, ...]  # why a half runs as modules
    mlp_reasons: tuple[str, ...]
    watch: Watch  # checks that the block did not change
    frozen: Any = None  # cached weights: `Frozen`, or its subclass `Packed` or `FrozenFp8`
    fp8: Any = None  # `Fp8Scales`, which run the block in e4m3
    reader: Any = None  # cached weights of the next block if that block reads e4m3

    @property
    def halves(self) -> tuple[Any, Any]:
        """Attention and MLP, typed as Any for callers that know that both exist."""
        return self.attention, self.mlp

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copied or unpickled block is read again


def scale_of(parts: AttentionParts | MlpParts) -> Any:
    return None if parts.layer_scale is None else tensor_of(*parts.layer_scale)


def drops(dropouts: tuple[Slot, ...]) -> bool:
    """True if dropout is active."""
    for owner, name in dropouts:  # noqa: SIM110  # a generator is slower, and this runs in every forward
        if owner.training and getattr(owner, name):
            return True
    return False


def drops_path(drop_path: Any) -> bool:
    """True if drop path is active."""
    return drop_path is not None and bool(drop_path.training and drop_path.drop_prob)


def block_tensors(attention: AttentionParts | None, mlp: MlpParts | None) -> BlockTensors:
    """Returns the current parameters of a block or of a half; concatenates separate linear layers of q, k and v."""
    first: tuple[Any, ...] = (None,) * 7
    second: tuple[Any, ...] = (None,) * 7
    gate = inner = (None, None)
    if attention is not None:
        first = *attention.norm.tensors(), *attention.qkv.tensors(), *tensors_of(attention.proj), scale_of(attention)
    if mlp is not None:
        second = *mlp.tensors(), scale_of(mlp)
        gate = gate if mlp.gate is None else mlp.gate.tensors()
        inner = inner if mlp.inner_norm is None else mlp.inner_norm.tensors()
    return BlockTensors._make((*first, *second, *gate, None, None, *inner, None))


def frozen_sources(attention: AttentionParts, mlp: MlpParts) -> list[Slot]:
    """Returns the parameters that folded weights depend on: not LayerScale and the biases of unfolded layers."""
    norms = [norm for norm in (attention.norm, mlp.norm, mlp.inner_norm) if norm is not None]
    unread = [(attention.proj, "bias")] if mlp.inner_norm is not None else [(attention.proj, "bias"), (mlp.fc2, "bias")]
    linears = [slot for slot in linear_sources(attention, mlp) if slot not in unread]
    return [*(slot for norm in norms for slot in norm.slots), *linears]


def linear_sources(attention: AttentionParts, mlp: MlpParts) -> list[Slot]:
    """Returns the slots of the weights and biases of qkv, fc1, gate, proj and fc2."""
    linears = (attention.qkv, mlp.fc1, *(() if mlp.gate is None else (mlp.gate,)))
    behind = [(layer, name) for layer in (attention.proj, mlp.fc2) for name in ("weight", "bias")]
    return [*(slot for linear in linears for slot in (*linear.weights, *linear.biases)), *behind]


def tensors_of(owner: nn.Module) -> tuple[Any, Any]:
    """Returns weight and bias of a module, each a tensor or None."""
    if torch.compiler.is_compiling():
        return owner.weight, owner.bias
    own = owner.__dict__
    parameters = own["_parameters"]
    if "weight" in parameters and "bias" in parameters and "weight" not in own and "bias" not in own:
        return parameters["weight"], parameters["bias"]
    return tensor_of(owner, "weight"), tensor_of(owner, "bias")


def tensor_of(owner: nn.Module, name: str) -> Any:
    """Returns an attribute without nn.Module's slow look-up. FSDP stores weights in __dict__."""
    if torch.compiler.is_compiling():
        return getattr(owner, name)
    own = owner.__dict__
    if name in own:
        return own[name]
    parameters = own["_parameters"]
    return parameters[name] if name in parameters else getattr(owner, name)  # may now be a buffer


_CLASSES = {cls.__name__: cls for cls in (AttentionParts, LinearParts, MlpParts, NormParts, QkNormParts)}


def outline(block: nn.Module, parts: BlockParts) -> Outline | None:
    """Returns names and numbers from which `built` rebuilds the parts; None if parts contain any other object.

    Returns:
        Both halves; the path of every watched module; and path, name and value of every watched attribute.
    """
    paths = {id(module): tuple(name.split(".")) if name else () for name, module in block.named_modules()}
    try:
        values = tuple(
            (paths[id(owner)], name, _literal(value))
            for owner, name, value in parts.watch.values
            if type(owner) is not nn.Identity  # an Identity has no values; its class is guarded
        )
        modules = tuple(paths[id(module)] for module in parts.watch.modules)
        return _node(parts.attention, paths), _node(parts.mlp, paths), modules, values
    except LookupError:  # an object that is neither a module of the block, nor parts, nor a literal
        return None


def _node(value: Any, paths: dict[int, Path]) -> Node:
    if isinstance(value, nn.Module):
        return "module", paths[id(value)]
    if type(value) is tuple:
        return "tuple", tuple(_node(each, paths) for each in value)
    if type(value).__name__ in _CLASSES:
        inner = (getattr(value, field.name) for field in fields(value))
        return type(value).__name__, tuple(_node(each, paths) for each in inner)
    return "value", _literal(value)


def _literal(value: Any) -> Any:
    if type(value) not in _LITERALS:
        raise LookupError
    return value


def built(block: Any, traced: Outline) -> BlockParts:
    """Rebuilds the parts, and reads all watched attributes, so that torch.compile guards these."""
    attention, mlp, modules, values = traced
    for path in modules:  # guards classes, and hooks if configured; parameters are guarded as inputs
        is_hooked(_at(block, path))
        forward_is_replaced(_at(block, path))
    for path, name, value in values:
        if getattr(_at(block, path), name, None) != value:
            break
    parts: BlockParts = block.vit_fast_parts
    return BlockParts(_built(block, attention), _built(block, mlp), (), (), parts.watch, parts.frozen, parts.fp8)


def _built(block: Any, node: Node) -> Any:
    kind, content = node
    if kind == "module":
        return _at(block, content)
    if kind == "value":
        return content
    inner = [_built(block, each) for each in content]
    return tuple(inner) if kind == "tuple" else _CLASSES[kind](*inner)


def _at(block: Any, path: Path) -> Any:
    for name in path:
        block = getattr(block, name)
    return block
