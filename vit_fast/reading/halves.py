"""Reads the attention half and the MLP half of a module from the values of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..blocks.parts import (
    AttentionParts,
    LinearParts,
    MlpParts,
    NormParts,
    QkNormParts,
    RopeParts,
    Slot,
    TermParts,
    block_tensors,
    keys_at,
    tensor_at,
    tensors_of,
)
from ..ops import reference
from ..ops.attention import attention_among
from .arguments import derived
from .capture import Graph, UnreadableError, operator_of
from .elements import TOLERANCE, Linear, Vectors, among_sequences, cores_of, is_equal, linears_of, rows, same_tokens
from .terms import factor_of, ropes_of, rotated_by, terms_of

NORM_ENDS = {"layer_norm", "rms_norm", "mul", "add", "div"}  # operators that may be the last one of a norm


class Halves(Vectors):
    """Reads the attention half and the MLP half of a module `root`."""

    def __init__(self, graph: Graph, root: nn.Module) -> None:
        super().__init__(graph)
        self.root = root
        self.linears, self.cores = linears_of(graph), among_sequences(graph, list(cores_of(graph)))

    def attention_half(self, x: Tensor) -> tuple[AttentionParts, Tensor, Linear]:
        """Returns the attention half, its output before LayerScale, and its output projection."""
        graph, cores = self.graph, self.cores
        ends = {core.node for core in cores}
        proj = next((each for each in self.linears if ends <= graph.ancestors[each.node]), None)
        if proj is None:
            raise UnreadableError("no linear layer of the tokens follows its attention")
        sources = [[self._source(getattr(core, part), part) for core in cores] for part in "qkv"]
        first = sources[0][0]
        if not all(is_equal(self.values[each.x], self.values[first.x]) for part in sources for each in part):
            raise UnreadableError("its q, k and v are linear layers of different tokens")
        norm = self._normed(x, first, graph.input, "q, k and v")
        normed = reference.normalize(x, norm.now())
        if changes := "; ".join(dict.fromkeys(filter(None, (core.changes for core in cores)))):
            problem = f"its scores are changed before the softmax ({changes}), e.g. by a bias or mask"
        else:
            problem = "its attention is not softmax(scale * q k^T) v of all tokens of an image"
            if (changed := graph.computed_between(first.node, cores[0].q)) not in ("", ": div", ": mul"):
                problem += f", or its q is changed by more than a norm of all heads or rotary tables{changed}"
        heads, keys = self._heads(x)
        target = self.values[proj.x]
        if target.shape[-1] % heads:
            raise UnreadableError("its heads do not divide its width")
        orders = list(_packed(graph, sources, heads, target.shape[-1]))
        cu_seqlens = cores[0].cu_seqlens
        given = self.values[graph.input]
        terms: list[TermParts | None] = []
        try:
            for found in terms_of(graph, cores[0], given if given.dim() > 3 else x, heads, keys):
                terms.append(found)
        except UnreadableError as error:
            problem = str(error)
        for normalizes, qkv, term in itertools.product((False, True), orders, terms):
            weight, bias = qkv.tensors()
            projected = F.linear(normed, weight, bias).unflatten(-1, (3, heads, -1))
            for qk_norm, rope, rotated in self._rotated(projected, normalizes):
                scale = self._scale(rotated, term)
                if scale is None:
                    continue
                if term is not None and term.scale is not None:
                    term = replace(term, scale=derived(graph, (term.scale,), "mul.Scalar", scale))
                mixed = mix(rotated, scale, term, cu_seqlens)
                if not same_tokens(mixed, target):
                    continue
                width = projected.shape[-1]
                attention = AttentionParts(
                    norm=norm, layer_scale=None, drop_path=None, dropouts=(), module=self.root, qkv=qkv,
                    num_heads=heads, scale=None if abs(scale * width**0.5 - 1) < TOLERANCE else scale,
                    proj=_owner(proj, "its output projection"), qk_norm=qk_norm, terms=term, rope=rope,
                    rotates_halves=rope is not None and rope.layout == "half", cu_seqlens=cu_seqlens,
                )  # fmt: skip
                return attention, F.linear(mixed, *tensors_of(attention.proj)), proj
        raise UnreadableError(problem)

    def _rotated(self, qkv: Tensor, normalizes: bool) -> Iterator[tuple[QkNormParts | None, RopeParts | None, Tensor]]:
        """Yields norms and rotary embeddings of q and k, and the result."""
        for qk_norm in self._qk_norms(qkv) if normalizes else (None,):
            normed = reference.qk_norm_rope(qkv, None if qk_norm is None else qk_norm.now(), None)
            start = self._source(self.cores[0].q, "q").node
            for rope in ropes_of(self.graph, self.cores[0], start, normed):
                yield qk_norm, rope, rotated_by(rope, normed)

    def _source(self, operand: fx.Node, part: str) -> Linear:
        """Returns the linear layer from which an operand of a product is computed."""
        before = {operand, *self.graph.ancestors[operand]}
        found = [each for each in self.linears if each.node in before]
        found = [each for each in found if not any(each.node in self.graph.ancestors[other.node] for other in found)]
        if len(found) != 1:
            raise UnreadableError(f"its {part} is not one linear layer of the tokens")
        return found[0]

    def _heads(self, x: Tensor) -> tuple[int, int]:
        """Returns the number of heads, and of tokens that a query attends to."""
        core, tokens = self.cores[0], x.shape[0] * x.shape[1]
        if core.scores is None:
            keys = self.values[core.k].shape[-2] if core.cu_seqlens is None else tokens
            heads, rest = divmod(self.values[core.q].numel(), tokens * self.values[core.q].shape[-1])
        else:
            keys = self.values[core.scores].shape[-1]
            heads, rest = divmod(self.values[core.scores].numel(), tokens * keys)
        if rest or not heads or x.shape[1] % keys:
            raise UnreadableError("its attention is not among all tokens of an image or window")
        return heads * len(self.cores), keys

    def _qk_norms(self, qkv: Tensor) -> Iterator[QkNormParts]:
        core = self.cores[0]
        if len(self.cores) > 1:
            return
        for over in ("head", "width"):
            found = []
            for i, operand in enumerate((core.q, core.k)):
                x = qkv[:, :, i] if over == "head" else qkv[:, :, i].flatten(-2)
                start = self._source(operand, "qk"[i]).node
                path = [node for node in self.graph.path(start, operand) if operator_of(node) in NORM_ENDS]
                norms = (
                    self._norm(x, self.values[node], start, node) or self._unit(x, node) for node in reversed(path)
                )
                found.append(next((norm for norm in norms if norm is not None), None))
            q, k = found
            if q is not None and k is not None and (q.kind, q.eps) == (k.kind, k.eps):
                yield QkNormParts(q, k, over)

    def _unit(self, x: Tensor, node: fx.Node) -> NormParts | None:
        """Returns an RMSNorm if a node divides by the Euclidean norm; `_scale` finds the constant factor."""
        norm = NormParts(None, None, "rms_norm", 1e-24)
        unit = reference.normalize(x, norm.now()) * x.shape[-1] ** -0.5
        return norm if same_tokens(unit, self.values[node]) else None

    def _scale(self, qkv: Tensor, term: TermParts | None) -> float | None:
        """Returns the multiplier of q k^T apart from a scale per head. Frobenius norms do not depend on the layout."""
        core = self.cores[0]
        q, k, _ = qkv.transpose(1, 3).unbind(2)
        factor = factor_of(self.graph, core, q.shape[1], None if term is None else term.scale)
        if factor is None:
            return None
        if core.product is None:
            shared = k.numel() / self.values[core.k].numel()  # with SDPA's enable_gqa
            ratio = self.values[core.q].norm() * self.values[core.k].norm() * shared**0.5 / (q.norm() * k.norm())
        else:
            if term is not None and term.windows is not None:  # only scores inside of windows
                groups = term.windows.groups(q.device).long()
                q, k = (each[:, :, groups] for each in (q, k))
            scores = (q @ k.transpose(-2, -1))[:, : q.shape[1] // len(self.cores)]
            product = self.values[core.product]
            if operator_of(core.product) == "baddbmm" and core.product.kwargs.get("beta", 1) == 1:
                product = core.product.kwargs.get("alpha", 1) * self.values[core.q] @ self.values[core.k]
            ratio = product.norm() / scores.norm()
        return float(f"{factor * float(ratio):.7g}")

    def mlp_half(self, x: Tensor, before: fx.Node, linears: Sequence[Linear]) -> tuple[MlpParts, Tensor, fx.Node]:
        """Returns the MLP half of tokens x, its output before LayerScale, and the node of the output."""
        if len(linears) not in (2, 3):
            raise UnreadableError(f"its MLP must have two or three linear layers, got {len(linears)}")
        *firsts, fc2 = linears
        norm = self._normed(x, firsts[0], before, "MLP")
        if len(firsts) == 2 and not is_equal(self.values[firsts[0].x], self.values[firsts[1].x]):
            raise UnreadableError("the linear layers of its MLP read different tokens")
        for activation, parts, hidden in self._hidden(firsts):
            target = self.values[fc2.x]
            inner = None
            if not same_tokens(hidden, target):
                inner = self._norm(hidden, target, firsts[0].node, fc2.x)
                if inner is None:
                    continue
            mlp = MlpParts(
                norm=norm, layer_scale=None, drop_path=None, dropouts=(), activation=activation, inner_norm=inner,
                fc2=_owner(fc2, "its last linear layer"), **parts,
            )  # fmt: skip
            return mlp, branch_of(mlp, x), fc2.node
        names = ", ".join(reference.ACTIVATIONS)
        other = self.graph.computed_between(firsts[-1].node, fc2.x)
        raise UnreadableError(f"its MLP computes none of {names} between its linear layers, plain or as a gate{other}")

    def _hidden(self, firsts: Sequence[Linear]) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
        values = [self.values[each.node] for each in firsts]
        layers = [LinearParts(each.weights, each.biases, each.half()) for each in firsts]
        if len(firsts) == 1 and values[0].shape[-1] % 2 == 0 and layers[0].chunk is None:
            pairs = list(zip((replace(layers[0], chunk=i) for i in (0, 1)), values[0].chunk(2, -1)))
        else:
            pairs = list(zip(layers, values)) if len(firsts) == 2 else []
        for name, function in reference.ACTIVATIONS.items():
            if len(firsts) == 1:
                yield name, {"fc1": layers[0]}, function(values[0])
            for (gate, a), (fc1, b) in itertools.permutations(pairs, 2):
                yield name, {"fc1": fc1, "gate": gate}, function(a) * b


def _packed(graph: Graph, sources: list[list[Linear]], heads: int, width: int) -> Iterator[LinearParts]:
    """Yields the possible orders of the rows of q, k and v."""
    layers = list({(each.weights, each.chunk): each for part in sources for each in part}.values())
    chunks = [each.chunk for each in layers]
    slots = {each.weights for each in layers}
    count = sum(tensor_at(slot).shape[0] for weights in slots for slot in weights)
    if count != 3 * width:
        yield from _grouped(graph, layers, heads, width, count)
    elif len(slots) == 1 and chunks in ([(0, 1)], [(0, 3), (1, 3), (2, 3)]):
        qkv = LinearParts(layers[0].weights, layers[0].biases)
        yield qkv
        size = {"three": 3, "heads": heads, "channels": qkv.tensors()[0].shape[0] // (3 * heads)}
        for names in list(itertools.permutations(size))[1:]:
            sizes: Any = tuple(size[name] for name in names)
            yield replace(qkv, order=(sizes, tuple(names.index(name) for name in size)))  # type: ignore[arg-type]
    elif all(chunk == (0, 1) for chunk in chunks):
        weights = tuple(slot for each in layers for slot in each.weights)
        yield LinearParts(weights, tuple(slot for each in layers for slot in each.biases))
    else:
        raise UnreadableError("its q, k and v use parts of several weights")


def _grouped(graph: Graph, layers: list[Linear], heads: int, width: int, count: int) -> Iterator[LinearParts]:
    """Yields layers whose keys and values are shared by groups of heads: their rows are repeated."""
    keys = (count - width) // 2
    simple = all(each.chunk == (0, 1) and len(each.weights) == len(each.biases) == 1 for each in layers)
    if not simple or keys <= 0 or width + 2 * keys != count or width % keys or keys % (width // heads):
        raise UnreadableError("its q, k and v have different widths")

    def part(start: int, size: int, name: str) -> Slot | None:
        for layer in layers:
            (slot,), length = getattr(layer, name), tensor_at(layer.weights[0]).shape[0]
            if 0 <= start <= length - size:
                return slot and rows(graph, slot, start, size)
            start -= length
        raise UnreadableError("its q, k and v use parts of several weights")

    def repeated(slot: Slot | None, operator: str, *args: Any) -> Slot | None:
        if slot is None:
            return None
        dims = tensor_at(slot).dim()
        slot = derived(graph, (slot,), "unflatten.int", 0, (keys * heads // width, width // heads))
        given = args or ((width // keys, *[1] * dims),)
        return derived(graph, (derived(graph, (slot,), operator, *given),), "flatten.using_ints", 0, 1)

    for how in (("repeat_interleave.self_int", width // keys, 0), ("repeat.default",)):
        weights, biases = (
            (part(0, width, name), *(repeated(part(start, keys, name), *how) for start in (width, width + keys)))
            for name in ("weights", "biases")
        )
        yield LinearParts(weights, biases)  # type: ignore[arg-type]  # weights exist


def _owner(linear: Linear, what: str) -> nn.Module:
    """Returns the module with weight and bias of a linear layer."""
    owner, name = linear.weights[0]
    bias = linear.biases[0]
    own_bias = bias == (owner, "bias") if bias is not None else getattr(owner, "bias", UnreadableError) is None
    if len(linear.weights) > 1 or linear.chunk != (0, 1) or name != "weight" or not own_bias:
        raise UnreadableError(f"weight and bias of {what} are not those of one module")
    return owner


def branch_of(mlp: MlpParts, x: Tensor) -> Tensor:
    """Computes the MLP half of x without residual by the reference."""
    return reference.layer_norm_mlp(
        x, block_tensors(None, mlp), eps=mlp.norm.eps, norm=mlp.norm.kind, activation=mlp.activation, residual=False,
        inner_norm=mlp.inner,
    )  # fmt: skip


def mix(qkv: Tensor, scale: float, terms: TermParts | None, cu_seqlens: Slot | None) -> Tensor:
    """Computes attention from qkv [B, N, 3, H, D] by the reference, -> [B, N, H * D]."""
    now = None if terms is None else terms.now(qkv.device)
    return attention_among(qkv, keys_at(cu_seqlens, qkv), scale=scale, terms=now, backend="eager").flatten(2)
