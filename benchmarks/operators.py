"""Single operators as models, with the functions of all libraries that compute them.

attention:197x12x64[:bias]        softmax attention on packed qkv [B, tokens, 3, heads, head_dim]; with a bias
                                  [heads, tokens, tokens], whose gradient belongs to the backward
mlp:197x768x3072[:activation]     LayerNorm + MLP + residual on [B, tokens, width]; gelu by default

`--train` measures the backward alone. The reference is "eager". To add an operator of a library, add its function to
FUNCTIONS, and its name and packages to candidates.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast import ops
from vit_fast.errors import UnsupportedInputError
from vit_fast.ops.reference import ACTIVATIONS
from vit_fast.work import Work

Function = Callable[..., Tensor]
_WORD = re.compile(r"(attention|mlp):(\d+)x(\d+)x(\d+)(?::(\w+))?")


@dataclass(frozen=True)
class Operator:
    """An "attention" of tokens x heads x head_dim, or an "mlp" of tokens x width x hidden width.

    `activation` is "bias" for attention with a bias.
    """

    part: str
    sizes: tuple[int, int, int]
    activation: str = "gelu"

    @classmethod
    def parse(cls, word: str) -> Operator | None:
        """Parses a word such as `attention:197x12x64`; returns None for other words."""
        if not (matched := _WORD.fullmatch(word)):
            return None
        part, tokens, second, third, activation = matched.groups()
        accepted = tuple(ACTIVATIONS) if part == "mlp" else ("bias",)
        if activation and activation not in accepted:
            raise ValueError(f"{word}: the end for {part} must be one of {', '.join(accepted)}, got {activation}")
        return cls(part, (int(tokens), int(second), int(third)), activation or "gelu")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input for one image."""
        tokens, second, third = self.sizes
        return (tokens, 3, second, third) if self.part == "attention" else (tokens, second)

    def parts(self, batch: int, training: bool) -> dict[str, Work]:
        """Returns the least work of the forward or, in training, of the backward."""
        tokens, second, third = self.sizes
        passes = 2 if training else 1
        if self.part == "attention":
            # forward reads q, k, v, bias and writes o; backward also reads o and do and writes the gradients
            flop, moved = 4 * batch * second * tokens**2 * third, batch * tokens * second * third
            bias = passes * second * tokens**2 if self.activation == "bias" else 0
            return {"attention": Work(flop * 5 // 2 if training else flop, (8 if training else 4) * moved + bias)}
        narrow, wide = batch * tokens * second, batch * tokens * third
        weights = second * third
        # forward moves x, y and 2 h (h: hidden); backward x, dy, dx, z (before the activation), 2 h and 3 dz
        moved = 3 * narrow + 6 * wide if training else 2 * narrow + 2 * wide
        return {"linears": Work(4 * passes * narrow * third, moved + 2 * passes * weights)}

    def weights(self) -> dict[str, Tensor]:
        """Returns random parameters in fp32, in the order of the functions' arguments; the same each time."""
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
        _, C, H = self.sizes
        if self.part == "attention":
            return {"bias": normal(C, self.sizes[0], self.sizes[0])} if self.activation == "bias" else {}
        return {
            "norm_weight": 1 + 0.2 * normal(C), "norm_bias": 0.1 * normal(C), "fc1_weight": normal(H, C) * C**-0.5,
            "fc1_bias": 0.1 * normal(H), "fc2_weight": normal(C, H) * H**-0.5, "fc2_bias": 0.1 * normal(C),
        }  # fmt: skip


class Operation(nn.Module):
    """A module that calls a function with x and the parameters."""

    def __init__(self, function: Function, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters())


def build(name: str, operator: Operator, weights: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Builds a library's version of an operator as a module of x; may raise UnsupportedInputError."""
    table = FUNCTIONS[operator.part]
    reasons = [] if name in table else [f"the candidate must be one of {', '.join(table)} for {operator.part}"]
    if name in ("flash-attn", "cublaslt") and device.type == "cpu":
        reasons.append("a GPU is required")  # on a CPU, the epilogue of _addmm_activation is exact GELU
    if name == "flash-attn" and operator.activation == "bias":
        reasons.append("flash-attn has no bias")
    if name == "cublaslt" and operator.activation != "gelu_tanh":
        reasons.append(f"the activation must be gelu_tanh, got {operator.activation}")
    if reasons:
        raise UnsupportedInputError(name, reasons)
    function = table[name]
    if name in ("eager", "sdpa", "triton") and operator.part == "mlp":
        function = partial(function, activation=operator.activation)
    return Operation(function, weights).to(device)


def _packed(backend: str, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.attention_qkvpacked(qkv, bias=bias, backend=backend)


def _sdpa(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)


def _flex(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if qkv.device.type == "cpu" and qkv.requires_grad:
        raise UnsupportedInputError("flex", ["FlexAttention has no backward on a CPU"])
    q, k, v = qkv.transpose(1, 3).unbind(2)
    added = None if bias is None else lambda score, batch, head, query, key: score + bias[head, query, key]
    return _compiled(flex_attention)(q, k, v, added).transpose(1, 2)


@functools.cache
def _compiled(function: Function) -> Any:
    """Compiles at the first call, because importing the compiler takes seconds."""
    return torch.compile(function, dynamic=False)


def _flash_attn(qkv: Tensor) -> Tensor:
    from flash_attn import flash_attn_qkvpacked_func

    return flash_attn_qkvpacked_func(qkv)


def _cublaslt(x: Tensor, g: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    normed = F.layer_norm(x, (x.shape[-1],), g, b, 1e-6).flatten(0, -2)
    hidden = torch._addmm_activation(b1, normed, w1.t(), use_gelu=True)
    return torch.addmm(b2, hidden, w2.t()).view_as(x) + x


FUNCTIONS: dict[str, dict[str, Function]] = {
    "attention": {
        "eager": partial(_packed, "eager"),
        "sdpa": _sdpa,
        "triton": partial(_packed, "triton"),
        "flex": _flex,
        "flash-attn": _flash_attn,
    },
    "mlp": {
        **{name: partial(ops.layer_norm_mlp, backend=name) for name in ("eager", "sdpa", "triton")},
        "cublaslt": _cublaslt,
    },
}
