"""Data classes for a pre-norm encoder block of any library.

A library reads its blocks into `BlockParts` with the help of `reading.py`. Modules that must not be bypassed stay
modules, and the parts contain the reasons. Parts contain modules and attribute names, never tensors, because a
Parameter may be replaced at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.descriptions import BlockTensors, Norm, QkNorm
from ..ops.frozen import Frozen
from .plain import Watch

Slot = tuple[Any, str]  # a module and the name of one of its attributes


@dataclass(frozen=True, eq=False)
class NormParts:
    """A normalization over the last axis.

    Attributes:
        module: Holds weight and, for a LayerNorm, bias.
        kind: "layer_norm" or "rms_norm".
        eps: Epsilon, in units of x squared.
    """

    module: Any
    kind: str
    eps: float

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Slots of its parameters."""
        names = ("weight", "bias") if self.kind == "layer_norm" else ("weight",)
        return tuple((self.module, name) for name in names)

    def tensors(self) -> tuple[Any, Any]:
        """Weight and bias; None where there is none."""
        return tensors_of(self.module) if self.kind == "layer_norm" else (tensor_of(self.module, "weight"), None)

    def now(self) -> Norm:
        """Returns it as an argument of operators."""
        return Norm(*self.tensors(), self.eps, self.kind)


@dataclass(frozen=True, eq=False)
class LinearParts:
    """A linear layer, or several with one input and concatenated rows: q, k and v.

    Attributes:
        weights: One weight, or one per layer.
        biases: The biases. Their number may differ: timm's EVA has one weight and three biases.
        chunk: Half of the rows, 0 or 1, of a layer that packs gate and up; None means all rows.
    """

    weights: tuple[Slot, ...]
    biases: tuple[Slot, ...]
    chunk: int | None = None

    def tensors(self) -> tuple[Any, Any]:
        """Weight and bias; None where there is none."""
        if self.chunk is not None:
            packed = tensor_of(*self.weights[0]), tensor_of(*self.biases[0])
            weight, bias = (None if each is None else each.chunk(2)[self.chunk] for each in packed)
            return weight, bias
        if len(self.weights) == len(self.biases) == 1:
            return tensor_of(*self.weights[0]), tensor_of(*self.biases[0])
        weights = [tensor_of(*slot) for slot in self.weights]
        biases = [tensor_of(*slot) for slot in self.biases]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if len(biases) == 1:
            return weight, biases[0]
        if all(bias is None for bias in biases):
            return weight, None
        absent = weight.new_zeros(weight.shape[0] // len(biases))  # BEiT's keys have no bias
        return weight, torch.cat([absent if bias is None else bias for bias in biases])


@dataclass(frozen=True, eq=False)
class QkNormParts:
    """The norms of q and k: over each head separately ("head"), or over all heads of a token ("width")."""

    q: NormParts
    k: NormParts
    over: str

    def now(self) -> QkNorm:
        """Returns it as an argument of operators."""
        return QkNorm(self.q.now(), self.k.now(), self.over)


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """x + drop_path(layer_scale * proj(attention(qkv(norm(x))))); rotary positions are arguments of each call.

    Attributes:
        module: The attention layer.
        norm: The norm before it.
        qkv: The projections to q, k and v, of equal width.
        qk_norm: Norms of q and k, applied before the rotation; None if there are none.
        num_heads: Number of heads.
        scale: Multiplier of q k^T; None means D**-0.5.
        proj: The output projection.
        layer_scale: The vector [C]; None if there is none.
        drop_path: A module with drop_prob, or None.
        dropouts: Dropout probabilities in training.
        rotates_halves: True if the rotary positions rotate channels j and j + D/2 of a head.
    """

    module: Any
    norm: NormParts
    qkv: LinearParts
    num_heads: int
    scale: float | None
    proj: Any
    layer_scale: Slot | None
    drop_path: Any
    dropouts: tuple[Slot, ...]
    qk_norm: QkNormParts | None = None
    rotates_halves: bool = False

    @property
    def paired_head(self) -> int:
        """Head width if freeze must make the channels of a pair adjacent so that the matmul can rotate them; else 0."""
        if not self.rotates_halves or (self.qk_norm is not None and self.qk_norm.over == "width"):
            return 0
        return sum(tensor_of(*slot).shape[0] for slot in self.qkv.weights) // (3 * self.num_heads)


@dataclass(frozen=True, eq=False)
class MlpParts:
    """x + drop_path(layer_scale * fc2(inner_norm(hidden))) after norm; other attributes as in AttentionParts.

    Attributes:
        fc1: hidden = activation(fc1(norm(x))); with a gate activation(gate(norm(x))) * fc1(norm(x)).
        gate: The gate's linear layer; None if there is none.
        activation: The operators' name of the activation.
        inner_norm: EVA-02's norm before fc2; None if there is none.
        fc2: The second linear layer.
    """

    norm: NormParts
    fc1: LinearParts
    activation: str
    fc2: Any
    layer_scale: Slot | None
    drop_path: Any
    dropouts: tuple[Slot, ...]
    gate: LinearParts | None = None
    inner_norm: NormParts | None = None

    def tensors(self) -> tuple[Any, ...]:
        """norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias."""
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
    """A block as data.

    Attributes:
        attention: The first half; None if it stays modules.
        mlp: The second half; None if it stays modules.
        attention_reasons: All reasons why the first half stays modules.
        mlp_reasons: All reasons why the second half stays modules.
        watch: Detects changes of the block.
        frozen: Cached qkv and fc1 weights with their norms folded in, if the block is frozen (`freezing.py`).
        fp8: The scales of a block that runs in e4m3 (`fp8_scales.py`).
        reader: Cached weights of the next block if that reads e4m3.
    """

    attention: AttentionParts | None
    mlp: MlpParts | None
    attention_reasons: tuple[str, ...]
    mlp_reasons: tuple[str, ...]
    watch: Watch
    frozen: Frozen | None = None
    fp8: Any = None
    reader: Any = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and unpickled blocks are read again


def scale_of(parts: AttentionParts | MlpParts) -> Any:
    """Returns the LayerScale of a half, or None."""
    return None if parts.layer_scale is None else tensor_of(*parts.layer_scale)


def drops(dropouts: tuple[Slot, ...]) -> bool:
    """Returns True if dropout is active."""
    for owner, name in dropouts:  # noqa: SIM110  # a generator is slower, and this runs in every forward
        if owner.training and getattr(owner, name):
            return True
    return False


def drops_path(drop_path: Any) -> bool:
    """Returns True if drop path is active."""
    return drop_path is not None and bool(drop_path.training and drop_path.drop_prob)


def block_tensors(attention: AttentionParts, mlp: MlpParts) -> BlockTensors:
    """Returns the current parameters of a block; concatenates separate linear layers of q, k and v."""
    first = (*attention.norm.tensors(), *attention.qkv.tensors(), *tensors_of(attention.proj), scale_of(attention))
    gate = (None, None) if mlp.gate is None else mlp.gate.tensors()
    inner = (None, None) if mlp.inner_norm is None else mlp.inner_norm.tensors()
    everything: Any = (*first, *mlp.tensors(), scale_of(mlp), *gate, None, None, *inner)
    return BlockTensors(*everything)


def frozen_sources(attention: AttentionParts, mlp: MlpParts) -> list[Slot]:
    """Returns the slots of all parameters that the cached weights of a frozen block depend on."""
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
    """Returns weight and bias."""
    if torch.compiler.is_compiling():
        return owner.weight, owner.bias
    own = owner.__dict__
    parameters = own["_parameters"]
    if "weight" in parameters and "bias" in parameters and "weight" not in own and "bias" not in own:
        return parameters["weight"], parameters["bias"]
    return tensor_of(owner, "weight"), tensor_of(owner, "bias")


def tensor_of(owner: nn.Module, name: str) -> Any:
    """Returns an attribute without nn.Module's slow __getattr__; FSDP stores weights outside _parameters."""
    if torch.compiler.is_compiling():
        return getattr(owner, name)
    own = owner.__dict__
    if name in own:
        return own[name]
    parameters = own["_parameters"]
    return parameters[name] if name in parameters else getattr(owner, name)  # it may have become a buffer
