"""A pre-norm encoder block of any library as data: `BlockParts`, which refers to modules and attribute names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.descriptions import BlockTensors, Keys, Norm, QkNorm, Rope, ScoreTerms
from .plain import Watch
from .windows import Windows as Windows

Slot = tuple[Any, str]  # a module, or a `Derived` object, and the name of one of its attributes


class Derived:
    """Base of owners of tensors that are computed from the tensors at `slots`."""

    slots: tuple[Slot, ...]

    def compute(self) -> Tensor:
        raise NotImplementedError


@dataclass(unsafe_hash=True)
class Argument(Derived):
    """A tensor that forward gets beside the tokens; `tensor` is None in parts that are not bound to a call."""

    number: int
    tensor: Tensor | None = field(default=None, compare=False)
    slots = ()

    def compute(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError(f"argument {self.number} must be bound to a call: use `bound`")
        return self.tensor


@dataclass(frozen=True)
class NormParts:
    """A normalization over the last axis. An RMSNorm has no bias."""

    weight: Slot | None
    bias: Slot | None
    kind: str  # "layer_norm", "rms_norm" or "none"
    eps: float

    def tensors(self) -> tuple[Any, Any]:
        return tensor_at(self.weight), tensor_at(self.bias)

    def now(self) -> Norm:
        return Norm(*self.tensors(), self.eps, self.kind)


NO_NORM = NormParts(None, None, "none", 0.0)


@dataclass(frozen=True)
class LinearParts:
    """A linear layer, or several with the same input; timm's EVA has one weight and three biases.

    A convolution of single positions, whose weight is [out, in, 1, 1], is a linear layer too.
    """

    weights: tuple[Slot, ...]
    biases: tuple[Slot | None, ...]
    chunk: int | None = None  # for a layer that computes gate and fc1: 0 or 1, the half of its outputs to use
    # for qkv with rows in another order than [3, H, D]: their sizes, and the axes of 3, H and D in them
    order: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None

    def tensors(self) -> tuple[Any, Any]:
        if len(self.weights) == len(self.biases) == 1:
            weight, bias = matrix(tensor_of(*self.weights[0])), tensor_at(self.biases[0])
        else:
            weights = [matrix(tensor_of(*slot)) for slot in self.weights]
            biases = [tensor_at(slot) for slot in self.biases]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            bias = None
            if any(each is not None for each in biases):
                absent = weight.new_zeros(weight.shape[0] // len(biases))  # BEiT's keys have no bias
                bias = torch.cat([absent if each is None else each for each in biases])
        if self.order is not None:
            sizes, (three, heads, channels) = self.order
            weight = weight.unflatten(0, sizes).permute(three, heads, channels, 3).flatten(0, 2)
            bias = None if bias is None else bias.view(sizes).permute(three, heads, channels).flatten()
        if self.chunk is None:
            return weight, bias
        return weight.chunk(2)[self.chunk], None if bias is None else bias.chunk(2)[self.chunk]


@dataclass(frozen=True)
class QkNormParts:
    """The norms of q and k; see `QkNorm`."""

    q: NormParts
    k: NormParts
    over: str

    def now(self) -> QkNorm:
        return QkNorm(self.q.now(), self.k.now(), self.over)


@dataclass(frozen=True)
class RopeParts:
    """The sources of a block's `Rope`."""

    cos: Slot
    sin: Slot
    prefix: int
    layout: str

    def now(self) -> Rope:
        return Rope(tensor_of(*self.cos), tensor_of(*self.sin), self.prefix, self.layout)


@dataclass(frozen=True)
class TermParts:
    """The sources of a block's `ScoreTerms`; None means absent.

    A bias is a tensor [H or 1, N, M] or [1, H or 1, N, M]. With `index` [N, M], it is a table [T, H], or [H, T] if
    `heads_first`: bias[h, n, m] = table[index[n, m], h]. `freeze` computes terms from tables and from other tensors
    (`Derived`) once, other calls each time. A bias that depends on arguments is [B or 1, H or 1, N or 1, N or 1]. A
    window mask that depends on arguments must not require a gradient.
    """

    bias: Slot | None = None
    index: Slot | None = None
    heads_first: bool = False
    window_mask: Slot | None = None
    rel_h: Slot | None = None  # tables of `ScoreTerms`
    rel_w: Slot | None = None
    scale: Slot | None = None  # [H], the multiplier of q k^T, instead of AttentionParts.scale
    windows: Windows | None = None
    per_call: str = ""  # "bias" or "window_mask", if this term depends on arguments of forward

    @property
    def given(self) -> dict[str, Slot]:
        """The terms that are present, apart from windows."""
        slots = (self.bias, self.window_mask, self.rel_h, self.rel_w, self.scale)
        return {name: slot for name, slot in zip(ScoreTerms._fields, slots) if slot is not None}

    @property
    def derived(self) -> list[str]:
        """Names of the terms that are computed from other tensors, apart from arguments."""
        looked_up = [] if self.index is None else ["bias"]
        given = {name: slot for name, slot in self.given.items() if name != self.per_call}
        return [name for name, slot in given.items() if name in looked_up or isinstance(slot[0], Derived)]

    def with_term(self, name: str, slot: Slot | None) -> TermParts:
        changed: dict[str, Any] = {name: slot}
        return replace(self, **changed)

    def term(self, name: str) -> Tensor:
        """Returns a term; computes it if it is derived."""
        tensor: Tensor = tensor_of(*self.given[name])
        if name == "bias" and self.index is not None:
            index = tensor_of(*self.index)
            tensor = (tensor if self.heads_first else tensor.t())[:, index]  # on GPUs, the backward is deterministic
        if name == self.per_call:
            if tensor.is_cuda or torch.is_autocast_enabled(tensor.device.type):
                low = torch.finfo(tensor.dtype).min / 2  # finite also in bf16, and multiplied by log2(e)
                with torch.no_grad():
                    less = (low - tensor).relu().nan_to_num(posinf=0.0)  # -inf stays -inf
                tensor = tensor + less
            if name == "bias":
                tokens = max(tensor.shape[-2:])
                tensor = tensor.expand(-1, -1, tokens, tokens)
        return tensor

    def now(self, device: torch.device, computed: Sequence[Tensor] = ()) -> ScoreTerms:
        """Returns the current terms; `computed` contains those in `derived` if they were computed earlier."""
        terms = dict(zip(self.derived, computed))
        terms |= {name: self.term(name) for name in self.given if name not in terms}
        return ScoreTerms(**terms, groups=None if self.windows is None else self.windows.groups(device))


@dataclass(frozen=True)
class Half:
    """Parts that both halves of a block have: end_norm(residual + drop_path(branch_norm(branch of norm(x))))."""

    norm: NormParts
    layer_scale: Slot | None  # vector [C], or None
    drop_path: Any = field(compare=False)  # a module with drop_prob, or None
    dropouts: tuple[Slot, ...] = field(compare=False)  # dropout probabilities in training
    # "tokens" for x, "normed" for norm(x), "attention" for an MLP of x that is added to x's attention half, or "none"
    residual: str = field(default="tokens", kw_only=True)
    branch_norm: NormParts = field(default=NO_NORM, kw_only=True)
    end_norm: NormParts = field(default=NO_NORM, kw_only=True)

    @property
    def is_pre_norm(self) -> bool:
        """True for x + drop_path(branch of norm(x)), which the operator of a whole block computes."""
        has_norms = self.norm.kind != "none", self.branch_norm.kind != "none", self.end_norm.kind != "none"
        return has_norms == (True, False, False) and self.residual == "tokens"

    def drops(self) -> bool:
        """Returns True if dropout is active."""
        for owner, name in self.dropouts:  # noqa: SIM110  # a generator is slower, and this runs in every forward
            if owner.training and getattr(owner, name):
                return True
        return False

    def drops_path(self) -> bool:
        """Returns True if drop path is active."""
        return self.drop_path is not None and bool(self.drop_path.training and self.drop_path.drop_prob)

    def with_scale(self, linear: nn.Module) -> tuple[Any, Any, Any]:
        """Returns weight and bias of the half's last linear layer, and LayerScale."""
        return *tensors_of(linear), None if self.layer_scale is None else tensor_of(*self.layer_scale)


@dataclass(frozen=True)
class AttentionParts(Half):
    """The attention half, x + drop_path(layer_scale * proj(attention(qkv(norm(x)))))."""

    module: Any  # the attention layer
    qkv: LinearParts
    num_heads: int
    scale: float | None  # multiplier of q k^T; None means D**-0.5
    proj: Any  # a linear layer
    qk_norm: QkNormParts | None = None
    rotates_halves: bool = False  # True if calls pass rotary embeddings with the layout "half"
    terms: TermParts | None = None  # bias, window mask, scale per head, windows
    rope: RopeParts | None = None  # rotary embeddings, unless the caller passes them to `run_as_block`
    cu_seqlens: Slot | None = None  # of packed sequences, if it is an argument of forward

    @property
    def head_dim(self) -> int:
        return int(sum(tensor_of(*slot).shape[0] for slot in self.qkv.weights) // (3 * self.num_heads))

    @property
    def rope_head(self) -> int:
        """The `rope_head` of `fold`: head_dim if the qkv matmul can rotate q and k, else 0."""
        if not self.rotates_halves or (self.qk_norm is not None and self.qk_norm.over == "width"):
            return 0
        if self.terms is not None and self.terms.rel_h is not None:  # whose tables have q's order of channels
            return 0
        return self.head_dim


@dataclass(frozen=True)
class MlpParts(Half):
    """The MLP half; hidden is activation(fc1(norm(x))), or with a gate activation(gate(norm(x))) * fc1(norm(x))."""

    fc1: LinearParts
    activation: str  # one of `reference.ACTIVATIONS`
    fc2: Any  # a linear layer
    gate: LinearParts | None = None
    inner_norm: NormParts | None = None  # before fc2, as in EVA-02

    @property
    def inner(self) -> tuple[str, float] | None:  # kind and epsilon
        return None if self.inner_norm is None else (self.inner_norm.kind, self.inner_norm.eps)


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
    is_pre_norm: bool = field(init=False)  # two pre-norm halves with norms of one kind, which one operator can compute

    def __post_init__(self) -> None:
        attention, mlp = self.halves
        exist = attention is not None and mlp is not None
        same = exist and attention.norm.kind == mlp.norm.kind
        self.is_pre_norm = same and attention.is_pre_norm and mlp.is_pre_norm

    @property
    def halves(self) -> tuple[Any, Any]:
        return self.attention, self.mlp  # typed as Any for callers that know that both exist

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copies and pickles of a block contain no parts


def block_tensors(attention: AttentionParts | None, mlp: MlpParts | None) -> BlockTensors:
    """Returns the current parameters of a block or of a half."""
    tensors: list[Any] = [None] * 7
    if attention is not None:
        tensors = [*attention.norm.tensors(), *attention.qkv.tensors(), *attention.with_scale(attention.proj)]
    if mlp is None:
        return BlockTensors(*tensors)
    tensors += [*mlp.norm.tensors(), *mlp.fc1.tensors(), *mlp.with_scale(mlp.fc2)]
    tensors += (None, None) if mlp.gate is None else mlp.gate.tensors()
    tensors += (None, None) if mlp.inner_norm is None else (None, None, *mlp.inner_norm.tensors())
    return BlockTensors(*tensors)


def options_of(
    attention: AttentionParts | None, mlp: MlpParts | None, device: torch.device, computed: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """Returns the options of `fused_block` for a block or a half; `computed` as in `TermParts.now`."""
    options: dict[str, Any] = {}
    eps1 = eps2 = 0.0
    if attention is not None:
        eps1, qk_norm, terms = attention.norm.eps, attention.qk_norm, attention.terms
        options = {
            "norm": attention.norm.kind, "heads": attention.num_heads, "attention_scale": attention.scale,
            "qk_norm": None if qk_norm is None else qk_norm.now(),
            "terms": None if terms is None else terms.now(device, computed),
        }  # fmt: skip
    if mlp is not None:
        eps2 = mlp.norm.eps
        options |= {"norm": mlp.norm.kind, "activation": mlp.activation, "inner_norm": mlp.inner}
    options["eps"] = eps1, eps2
    return options


def sources(attention: AttentionParts | None, mlp: MlpParts | None) -> list[Slot]:
    """Returns the slots of all parameters of a block, apart from tables of rotary embeddings."""
    halves = None if attention is None else replace(attention, rope=None), mlp
    found = [origin for slot in slots_of(halves) for origin in origins(slot)]
    return [slot for slot in found if not isinstance(slot[0], Argument)]


def slots_of(parts: Any) -> Iterator[Slot]:
    """Yields the slots of all tensors that parts depend on."""
    if isinstance(parts, tuple) and len(parts) == 2 and isinstance(parts[0], nn.Module | Derived):
        yield parts
    elif isinstance(parts, tuple):
        for each in parts:
            yield from slots_of(each)
    elif isinstance(parts, nn.Module):  # a linear layer
        yield from ((parts, "weight"), (parts, "bias"))
    elif is_dataclass(parts):
        for each in fields(parts):
            if each.name not in ("module", "drop_path", "dropouts"):
                yield from slots_of(getattr(parts, each.name))


def origins(slot: Slot) -> tuple[Slot, ...]:
    """Returns the slots of the tensors and arguments that a slot depends on."""
    if not isinstance(slot[0], Derived) or type(slot[0]) is Argument:
        return (slot,)
    return tuple(origin for each in slot[0].slots for origin in origins(each))


def keys_at(cu_seqlens: Slot | None, x: Tensor) -> Keys | None:
    """Returns the keys of packed sequences x [1, total, ...]. Reads no lengths on the host: the maximum is total."""
    return None if cu_seqlens is None else Keys(tensor_of(*cu_seqlens).to(x.device, torch.int32), x.shape[1])


def tensors_of(owner: nn.Module) -> tuple[Any, Any]:
    return matrix(tensor_of(owner, "weight")), tensor_of(owner, "bias")


def matrix(weight: Tensor) -> Tensor:
    """Returns a weight as [out, in]."""
    return weight if weight.dim() == 2 else weight.flatten(1)


def tensor_at(slot: Slot | None) -> Any:
    return None if slot is None else tensor_of(*slot)


def tensor_of(owner: nn.Module, name: str) -> Any:
    """Returns an attribute without nn.Module's slow look-up. FSDP stores weights in __dict__."""
    if isinstance(owner, Derived):
        return owner.compute()
    if torch.compiler.is_compiling():
        return getattr(owner, name)
    own = owner.__dict__
    if name in own:
        return own[name]
    parameters = own["_parameters"]
    return parameters[name] if name in parameters else getattr(owner, name)  # may now be a buffer
