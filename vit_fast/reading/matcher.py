"""Reads the parts of attention and MLP from the values of a graph.

Spellings differ (einsum, chunk, einops, norms by hand), values do not. The graph only selects candidates: linear
layers, products of activations, parameters between them. A candidate counts if it reproduces the values of the next
linear layer's input. Tokens are compared in any order, because modules transpose them; `proof.py` compares in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, fx, nn

from ..blocks.parts import NO_NORM, AttentionParts, MlpParts, tensor_at
from ..ops import reference
from .capture import Graph, UnreadableError, operator_of
from .elements import MATMULS, same_tokens
from .halves import NORM_ENDS, Halves

Parts = TypeVar("Parts", AttentionParts, MlpParts)
# Layouts of a module's input, by its number of dimensions
LAYOUTS = {2: ("[N, C]",), 3: ("[B, N, C]", "[N, B, C]"), 4: ("[B, H, W, C]",), 5: ("[B, D, H, W, C]",)}


@dataclass(frozen=True)
class Reading:
    """The parts of a module that maps tokens to tokens."""

    attention: AttentionParts | None
    mlp: MlpParts | None
    layout: str
    uses_sdpa: bool = True  # True unless the module computes softmax attention without SDPA

    def batched(self, x: Tensor) -> Tensor:
        """Returns tokens as [B, N, C]."""
        if self.layout == "[N, B, C]":
            return x.transpose(0, 1)
        return x[None] if x.dim() == 2 else x.flatten(1, -2)

    @property
    def batch_axis(self) -> int | None:
        return {"[N, B, C]": 1, "[N, C]": None}.get(self.layout, 0)

    @property
    def kind(self) -> str:
        """Returns the parts, for the report."""
        mlp = None if self.mlp is None else "MLP" if self.mlp.norm.kind == "none" else "norm + MLP"
        return ", ".join(filter(None, ("attention" if self.attention else None, mlp)))

    def base(self, x: Tensor) -> Tensor | float:
        """Returns what a small branch is added to, so that errors can be compared with the branch."""
        halves = [half for half in (self.attention, self.mlp) if half is not None]
        plain = all(half.residual == "tokens" and half.end_norm.kind == "none" for half in halves)
        return x if plain else 0.0

    def restored(self, y: Tensor, x: Tensor) -> Tensor:
        """Undoes `batched` for the output y of an input x."""
        return y.transpose(0, 1) if self.layout == "[N, B, C]" else y.view(x.shape)


def read_graph(graph: Graph, root: nn.Module) -> Reading:
    """Reads the whole graph as one block, half or attention layer; raises UnreadableError with the reason."""
    matcher = Matcher(graph, root)
    x, y = graph.values[graph.input], matcher.output
    if y.shape != x.shape:
        raise UnreadableError(f"it maps {tuple(x.shape)} to {tuple(y.shape)}, not tokens to tokens of the same shape")
    if not matcher.linears:
        raise UnreadableError("it has no linear layer that maps its tokens")
    first = None
    for layout in LAYOUTS.get(x.dim(), ()) if matcher.cores else ("[..., C]",):
        try:
            uses_sdpa = all(core.scores is None for core in matcher.cores)
            return matcher.read(Reading(None, None, layout, uses_sdpa))
        except UnreadableError as error:
            first = first or error
    raise first or UnreadableError(f"its tokens must have two to five dimensions, got {tuple(x.shape)}")


class Matcher(Halves):
    def __init__(self, graph: Graph, root: nn.Module) -> None:
        super().__init__(graph, root)
        outputs = [each for each in graph.nodes[-1].all_input_nodes if graph.is_live(each)]
        if len(outputs) != 1:
            raise UnreadableError(f"it returns {len(outputs)} tensors")
        self.output: Tensor = self.values[outputs[0]]
        self.last = outputs[0]

    def read(self, reading: Reading) -> Reading:
        x = reading.batched(self.values[self.graph.input])
        if not self.cores:
            if any(operator_of(node) in MATMULS and len(self.graph.live_inputs(node)) > 1 for node in self.graph.nodes):
                raise UnreadableError("it multiplies tokens by tokens, but not as softmax(scale * q k^T) v")
            mlp, branch, end = self.mlp_half(x, self.graph.input, self.linears)
            return replace(reading, mlp=self._ended(mlp, x, branch, end))
        attention, branch, proj = self.attention_half(x)
        after = [each for each in self.linears if proj.node in self.graph.ancestors[each.node]]
        before = self.graph.ancestors[proj.node]
        beside = [each for each in self.linears if each is not proj and each.node not in before]
        if not after and beside:
            return self._parallel(
                reading, x, (attention, branch, proj.node), self.mlp_half(x, self.graph.input, beside)
            )
        if not after:
            return replace(reading, attention=self._ended(attention, x, branch, proj.node))
        problem = None
        for half, middle, node in self._sums(attention, x, branch, proj.node, after[0].x):
            try:
                mlp, branch, end = self.mlp_half(middle, node, after)
                return replace(reading, attention=half, mlp=self._ended(mlp, middle, branch, end))
            except UnreadableError as error:
                problem = problem or error
        raise problem or self._no_sum(attention, proj.node)

    def _parallel(
        self, reading: Reading, x: Tensor, attends: tuple[AttentionParts, Tensor, fx.Node],
        computes: tuple[MlpParts, Tensor, fx.Node],
    ) -> Reading:  # fmt: skip
        """Returns x + attention(x) + MLP(x), also with LayerScale."""
        (attention, first, _), (mlp, second, node) = attends, computes
        choices = (self._scales(end, self.last, x.shape[-1]) for _, _, end in (attends, computes))
        for a, b in itertools.product(*choices):
            y = x + (first if a is None else first * tensor_at(a)) + (second if b is None else second * tensor_at(b))
            if same_tokens(y, self.output):
                attention, mlp = replace(attention, layer_scale=a), replace(mlp, layer_scale=b, residual="attention")
                return replace(reading, attention=attention, mlp=mlp)
        raise self._no_sum(mlp, node)

    def _sums(
        self, half: Parts, x: Tensor, branch: Tensor, node: fx.Node, end: fx.Node
    ) -> Iterator[tuple[Parts, Tensor, fx.Node]]:
        """Yields a half with LayerScale, norm of the branch and residual, the sum in the graph, and its node."""
        path = [node, *self.graph.path(node, end)]
        bases: list[tuple[str, Tensor | float]] = [("tokens", x), ("none", 0.0)]
        if half.norm.kind != "none":
            bases.insert(1, ("normed", reference.normalize(x, half.norm.now())))
        for scale in self._scales(node, end, x.shape[-1]):
            scaled = branch if scale is None else branch * tensor_at(scale)
            norms = (self._norm(scaled, self.values[each], node, each) for each in path[1:] if self._ends_norm(each))
            for norm in itertools.chain([NO_NORM], filter(None, norms)):
                normed = reference.normalize(scaled, norm.now())
                for residual, base in bases:
                    y = base + normed
                    at = next((each for each in path if self._holds(each, y)), None)
                    if at is not None:
                        yield replace(half, layer_scale=scale, residual=residual, branch_norm=norm), y, at

    def _ended(self, half: Parts, x: Tensor, branch: Tensor, node: fx.Node) -> Parts:
        """Returns a half whose output is the output of the module, possibly after a norm."""
        for found, y, at in self._sums(half, x, branch, node, self.last):
            if same_tokens(y, self.output):
                return found
            end = self._norm(y, self.output, at, self.last)
            if end is not None and found.residual != "none":
                return replace(found, end_norm=end)
        raise self._no_sum(half, node)

    def _no_sum(self, half: Parts, node: fx.Node) -> UnreadableError:
        what = "MLP" if isinstance(half, MlpParts) else "attention"
        follows = sorted(
            {operator_of(each) for each in self.graph.path(node, self.last)}
            & {"layer_norm", "rms_norm", "batch_norm", "convolution", "conv2d"}
        )
        detail = f": {', '.join(follows)} follows" if follows else ""
        return UnreadableError(f"its output is not the residual sum of its input and the {what}{detail}")

    def _holds(self, node: fx.Node, tokens: Tensor) -> bool:
        value = self.values[node]
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return same_tokens(tokens, value) or (value.dim() > 2 and same_tokens(tokens, value.movedim(1, -1)))

    def _ends_norm(self, node: fx.Node) -> bool:
        return operator_of(node) in NORM_ENDS
