"""Reads the parts of a block by attribute paths, and collects all reasons why the block cannot be fused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import type_name
from ..ops import reference
from .parts import AttentionParts, BlockParts, LinearParts, MlpParts, NormParts, QkNormParts, Slot
from .plain import Edge, Watch, tensor_reasons, touch_reasons

ACTIVATION_FUNCTIONS: dict[Any, str] = {F.gelu: "gelu", F.relu: "relu", torch.relu: "relu", F.silu: "silu"}
LINEAR_CLASSES = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)  # the second in MultiheadAttention

Classes = tuple[type, ...]
Parts = TypeVar("Parts", AttentionParts, MlpParts)


class Inspector:
    """Inspects a module, and watches all modules on the paths to its parts, because their forward will be bypassed."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.reasons: list[str] = []  # reasons found so far why the block cannot be fused
        self.notes: list[str] = []  # for the report of a fused block
        self.edges: dict[str, Edge] = {}  # watched modules by path
        self.values: list[tuple[Any, str, object]] = []  # all other attributes that were read

    def at(self, path: str) -> Any:
        """Returns the attribute at a dotted path; None if part of the path is missing."""
        value: Any = self.owner
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def watch(self, path: str) -> Any:
        """Returns the attribute at a dotted path like `at`, and watches every module on the path."""
        parent: Any = self.owner
        names = path.split(".")
        for i, name in enumerate(names):
            child = getattr(parent, name, None)
            if isinstance(child, nn.Module):
                self.edges[".".join(names[: i + 1])] = (parent, name, child)
            elif not isinstance(child, Tensor):
                self.values.append((parent, name, child))
            if child is None:
                return None
            parent = child
        return parent

    def slot(self, path: str) -> Slot:
        owner, _, name = path.rpartition(".")
        return (self.at(owner) if owner else self.owner), name

    def value(self, path: str) -> Any:
        owner, name = self.slot(path)
        value = getattr(owner, name, None)
        self.values.append((owner, name, value))
        return value

    def check_fusible(self) -> bool:
        """Returns True if all inspected modules may be bypassed, else adds `reasons`; must be called last."""
        if not self.reasons:
            self.watch_children({path.partition(".")[0] for path in self.edges})
        self.reasons += touch_reasons([(path, child) for path, (_, _, child) in self.edges.items()])
        return not self.reasons

    def watch_children(self, children: Collection[str]) -> None:
        """Watches these children of the owner and all their submodules."""
        for path, module in self.owner.named_modules(remove_duplicate=False):
            parent, _, name = path.rpartition(".")
            if path.partition(".")[0] in children and path not in self.edges:
                self.edges[path] = (self.owner.get_submodule(parent), name, module)


class Reader(Inspector):
    """Reads the two halves of a block. Subclasses add classes, by dotted path, with their operator names."""

    activation_classes: ClassVar[dict[str, str]] = {
        "torch.nn.modules.activation.ReLU": "relu",
        "torch.nn.modules.activation.SiLU": "silu",
    }
    norm_classes: ClassVar[dict[str, str]] = {
        "torch.nn.modules.normalization.LayerNorm": "layer_norm",
        "torch.nn.modules.normalization.RMSNorm": "rms_norm",
    }

    def norm(self, path: str) -> NormParts:
        norm = self.watch(path)
        kind = self.norm_classes.get(type_name(norm))
        eps = self.value(f"{path}.{'variance_epsilon' if hasattr(norm, 'variance_epsilon') else 'eps'}")
        if kind is None:
            self.reasons.append(f"{path} must be a LayerNorm or RMSNorm, got {describe(norm)}")
        elif norm.weight is not None and norm.weight.dim() != 1:
            self.reasons.append(f"{path} must normalize over one axis, got axes of sizes {tuple(norm.weight.shape)}")
        elif eps is None:
            self.reasons.append(f"{path}.eps must be a number, got None, which selects epsilon by dtype")
        elif getattr(norm, "_fast_norm", False):
            self.reasons.append(
                f"{path} uses timm's fast norm: call timm.layers.set_fast_norm(False), then create the model again"
            )
        return NormParts((norm, "weight"), (norm, "bias") if kind == "layer_norm" else None, kind or "", eps)

    def linear(self, path: str, classes: Classes = (nn.Linear,)) -> Any:
        """Reads a linear layer that is not wrapped (LoRA), quantized or parametrized."""
        linear = self.watch(path)
        if type(linear) not in classes:
            self.reasons.append(f"{path} must be torch.nn.Linear itself, got {type_name(linear)}")
        return linear

    def activation(self, path: str) -> str:
        """Returns the name that operators use for an activation, which is a module, a function or a name."""
        activation = self.watch(path)
        name: str | None
        if type(activation) is nn.GELU:
            name = "gelu_tanh" if self.value(f"{path}.approximate") == "tanh" else "gelu"
        elif isinstance(activation, str):
            name = activation if activation in reference.ACTIVATIONS else None
        elif isinstance(activation, nn.Module):
            name = self.activation_classes.get(type_name(activation))
        else:
            name = ACTIVATION_FUNCTIONS.get(activation)
        if name is None:
            names = ", ".join(reference.ACTIVATIONS)
            got = activation if isinstance(activation, str) else getattr(activation, "__name__", describe(activation))
            self.reasons.append(f"{path} must be one of {names}, got {got}")
        return name or ""

    def require_absent(self, path: str) -> None:
        if not self._is_absent(path):
            self.reasons.append(f"{path} must be absent or an Identity, got {describe(self.at(path))}")

    def dropout(self, path: str) -> Slot:
        dropout = self.watch(path)
        if type(dropout) is not nn.Dropout:
            self.reasons.append(f"{path} must be torch.nn.Dropout, got {describe(dropout)}")
        else:
            self.notes += dropout_notes(path, dropout.p)
        return dropout, "p"

    def mlp(
        self, norm: str, fc1: str, activation: str, fc2: str, *, gate: str | None = None, gate_chunk: int | None = None,
        inner_norm: str | None = None, inside: Mapping[str, Classes] | None = None, empty: Iterable[str] = (),
        dropouts: Iterable[str] = (), layer_scale: str | None = None, drop_path: str | None = None,
    ) -> MlpParts | None:  # fmt: skip
        """Reads the second half of a block by the paths of its parts; returns None and adds `reasons` if not fusible.

        If fc1 also computes the gate, `gate_chunk` (0 or 1) is the half of its outputs with the gate. `inside` maps
        modules that contain parts to their supported classes. Paths in `empty` must be absent or an Identity.
        """
        if not self._check_classes(inside):
            return None
        parts = MlpParts(
            norm=self.norm(norm), fc1=self._joined((fc1,), None if gate_chunk is None else 1 - gate_chunk),
            gate=None if gate is None and gate_chunk is None else self._joined((gate or fc1,), gate_chunk),
            activation=self.activation(activation),
            inner_norm=None if inner_norm is None or self._is_absent(inner_norm) else self.norm(inner_norm),
            fc2=self.linear(fc2), layer_scale=self._layer_scale(layer_scale), drop_path=self._drop_path(drop_path),
            dropouts=tuple(map(self.dropout, dropouts)),
        )  # fmt: skip
        return self._if_fusible(parts, empty)

    def attention(
        self, module: str, norm: str, qkv: tuple[str, ...], proj: str, *, biases: tuple[str, ...] | None = None,
        qk_norm: tuple[str, str] | None = None, inside: Mapping[str, Classes] | None = None, empty: Iterable[str] = (),
        dropouts: Iterable[str] = (), rates: Iterable[str] = (), layer_scale: str | None = None,
        drop_path: str | None = None, num_heads: int, scale: float | None = None, rotates_halves: bool = False,
    ) -> AttentionParts | None:  # fmt: skip
        """Reads the first half of a block by the paths of its parts; returns None and adds `reasons` if not fusible.

        `qkv` is one linear layer, three linear layers, or a MultiheadAttention. `biases` replace the biases of qkv.
        `rates` are dropout probabilities that are plain attributes. See `mlp` for `inside` and `empty`.
        """
        if not self._check_classes(inside):
            return None
        parts = AttentionParts(
            module=self.watch(module), norm=self.norm(norm), qkv=self._joined(qkv, None, biases),
            qk_norm=None if qk_norm is None else self._qk_norm(*qk_norm), num_heads=num_heads,
            scale=scale, proj=self.linear(proj, LINEAR_CLASSES), layer_scale=self._layer_scale(layer_scale),
            drop_path=self._drop_path(drop_path), dropouts=(*map(self.dropout, dropouts), *map(self.slot, rates)),
            rotates_halves=rotates_halves,
        )  # fmt: skip
        return self._if_fusible(parts, empty)

    def _check_classes(self, modules: Mapping[str, Classes] | None) -> bool:
        before = len(self.reasons)
        for path, classes in (modules or {}).items():
            module = self.watch(path)
            if type(module) not in classes:
                names = [f"the {cls.__qualname__} of {cls.__module__.partition('.')[0]}" for cls in classes]
                expected = " or ".join(dict.fromkeys(names)) or "fused"
                self.reasons.append(f"{path} must be {expected}, got {describe(module)}")
        return len(self.reasons) == before

    def _is_absent(self, path: str) -> bool:
        return type(self.watch(path)) in (type(None), nn.Identity)

    def _joined(self, paths: Collection[str], chunk: int | None, biases: Iterable[str] | None = None) -> LinearParts:
        """Concatenates linear layers with the same input; for a MultiheadAttention, uses in_proj."""
        is_mha = [isinstance(self.at(path), nn.MultiheadAttention) for path in paths]
        owners = [self.watch(path) if mha else self.linear(path) for path, mha in zip(paths, is_mha)]
        weights, own = (
            tuple((owner, f"in_proj_{name}" if mha else name) for owner, mha in zip(owners, is_mha))
            for name in ("weight", "bias")
        )
        for path in biases or ():
            self.reasons += tensor_reasons(path, self.watch(path))
        return LinearParts(weights, own if biases is None else tuple(map(self.slot, biases)), chunk)

    def _qk_norm(self, q: str, k: str) -> QkNormParts | None:
        norms = [None if self._is_absent(path) else self.norm(path) for path in (q, k)]
        of_q, of_k = norms
        if of_q is not None and of_k is not None and (of_q.kind, of_q.eps) == (of_k.kind, of_k.eps):
            return QkNormParts(of_q, of_k, "head")
        if of_q is not of_k:
            self.reasons.append(f"{q} and {k} must be norms of equal kind and epsilon, or both be absent")
        return None

    def _drop_path(self, path: str | None) -> Any:
        if path is None or self._is_absent(path):
            return None
        drop_path = self.at(path)
        if not hasattr(drop_path, "drop_prob"):
            self.reasons.append(f"{path} must be a DropPath with drop_prob, got {describe(drop_path)}")
        return drop_path

    def _layer_scale(self, path: str | None) -> Slot | None:
        """Returns the slot of the LayerScale vector; None if the path does not exist or the value is 1."""
        scale = None if path is None else self.watch(path)
        if path is not None and isinstance(scale, Tensor):
            self.reasons += tensor_reasons(path, scale)
            return self.slot(path)
        if scale is not None and scale != 1.0:
            self.reasons.append(f"{path} must be a tensor or 1, got {scale!r}")
        return None

    def _if_fusible(self, parts: Parts, empty: Iterable[str]) -> Parts | None:
        for path in empty:
            self.require_absent(path)
        return parts if self.check_fusible() else None


def read_block(block: Any) -> BlockParts:
    """Reads the parts of a fused block, each half separately, so that one half can be fused without the other."""
    first, second = block.reader(block), block.reader(block)
    attention, mlp = block.read_attention(first), block.read_mlp(second)
    edges = first.edges | second.edges
    rest = Inspector(block)
    if first.edges:  # otherwise the block's forward calls every module of its first half
        reached = {path.partition(".")[0] for path in edges}
        missed = [name for name in block._modules if name not in reached and not name.startswith("vit_fast_")]
        rest.watch_children(missed)
    if not rest.check_fusible():  # a module that no reader reached may belong to either half
        attention = mlp = None
        first.reasons += rest.reasons
        second.reasons += rest.reasons
    watch = Watch(block, list((edges | rest.edges).values()), first.values + second.values)
    return BlockParts(attention, mlp, tuple(first.reasons), tuple(second.reasons), watch)


def dropout_notes(name: str, p: float) -> list[str]:
    return [f"in training the original forward runs, because {name} drops with probability {p}"] if p else []


def describe(thing: object) -> str:
    if thing is None:
        return "none"
    name = type(thing).__qualname__
    return ("an " if name[:1] in "AEIO" else "a ") + name
