"""Single operators as models to measure: what they take and do; who computes them is in candidates_operators.py.

attention:197x12x64               softmax attention on packed qkv [B, tokens, 3, heads, head_dim]
mlp:197x768x3072[:activation]     LayerNorm + MLP + residual on [B, tokens, width]; gelu unless named
matmul:197x768x3072               the product of its first linear alone

`--train` measures their backward alone, its forward done and kept beforehand. "eager" is the definition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vit_fast.ops.reference import ACTIVATIONS
from vit_fast.work import Work

_WORD = re.compile(r"(attention|mlp|matmul):(\d+)x(\d+)x(\d+)(?::(\w+))?")


@dataclass(frozen=True)
class Operator:
    """One problem of an operator.

    Attributes:
        part: "attention", "mlp" or "matmul".
        sizes: Tokens, heads and head_dim; or tokens, width and hidden width.
        activation: Of an MLP.
    """

    part: str
    sizes: tuple[int, int, int]
    activation: str = "gelu"

    @classmethod
    def parse(cls, word: str) -> Operator | None:
        """Parses a word like those above; None if it is none."""
        if not (matched := _WORD.fullmatch(word)):
            return None
        part, tokens, second, third, activation = matched.groups()
        if activation and (part != "mlp" or activation not in ACTIVATIONS):
            raise ValueError(f"{word}: expected behind an mlp's sizes: {', '.join(ACTIVATIONS)}")
        return cls(part, (int(tokens), int(second), int(third)), activation or "gelu")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image's input."""
        tokens, second, third = self.sizes
        return (tokens, 3, second, third) if self.part == "attention" else (tokens, second)

    @property
    def checked(self) -> int:
        """The images of a batch that are compared with fp64: all, where they add to a parameter's gradient."""
        return 2 if self.part == "attention" else 2**31

    def parts(self, batch: int, training: bool) -> dict[str, Work]:
        """Returns the least work of its forward or, in training, of its backward."""
        tokens, second, third = self.sizes
        if self.part == "attention":
            # forward reads q, k, v and writes o; backward also reads o and do and writes dq, dk, dv
            flop, moved = 4 * batch * second * tokens**2 * third, batch * tokens * second * third
            return {"attention": Work(flop * 5 // 2 if training else flop, (8 if training else 4) * moved)}
        narrow, wide = batch * tokens * second, batch * tokens * third
        weights, passes = second * third, 2 if training else 1
        if self.part == "matmul":
            return {"linears": Work(2 * passes * narrow * third, passes * (narrow + wide + weights))}
        # forward: x, y, h twice; backward: x, dy, dx, z, and h and dz written once and read once and twice
        moved = 3 * narrow + 6 * wide if training else 2 * narrow + 2 * wide
        return {"linears": Work(4 * passes * narrow * third, moved + 2 * passes * weights)}

    def weights(self) -> dict[str, Tensor]:
        """Random parameters, fp32, in the order in which functions take them; the same each time."""
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
        _, C, H = self.sizes
        if self.part == "attention":
            return {}
        if self.part == "matmul":
            return {"weight": normal(H, C) * C**-0.5}
        return {
            "norm_weight": 1 + 0.2 * normal(C), "norm_bias": 0.1 * normal(C), "fc1_weight": normal(H, C) * C**-0.5,
            "fc1_bias": 0.1 * normal(H), "fc2_weight": normal(C, H) * H**-0.5, "fc2_bias": 0.1 * normal(C),
        }  # fmt: skip
