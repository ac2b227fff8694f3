"""Candidates for single operators: our backends, which candidates_models.py registers, and the peers of each.

To add one: its function of x and the operator's parameters into the tables, its name and package at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_fast import ops
from vit_fast.errors import UnsupportedInputError
from vit_fast.ops.matmul import matmul

from .candidates import Task, register

Function = Callable[..., Tensor]


class Operation(nn.Module):
    """A function of x and of parameters."""

    def __init__(self, function: Function, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters())


def build(name: str, task: Task) -> nn.Module:
    """The candidate of this name for the task's operator, as a module of x on the task's device.

    Raises:
        UnsupportedInputError: it does not compute that, or not here.
    """
    operator = task.model.operator
    if operator is None or task.weights is None:
        raise UnsupportedInputError(name, [f"{task.model.name} is no single operator"])
    table = {"attention": _ATTENTION, "mlp": _MLP, "matmul": _MATMUL}[operator.part]
    reasons = [] if name in table else [f"it computes no {operator.part}: expected {', '.join(table)}"]
    if name in _ON_A_GPU and task.device.type == "cpu":
        reasons.append("expected a GPU")
    if name in _OF_GELU_TANH and operator.activation != "gelu_tanh":
        reasons.append("its activation is gelu_tanh")
    if reasons:
        raise UnsupportedInputError(name, reasons)
    function = table[name]
    if name in ("eager", "sdpa", "triton") and operator.part == "mlp":
        function = partial(function, activation=operator.activation)
    return Operation(function, task.weights).to(task.device)


def _sdpa(qkv: Tensor) -> Tensor:
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _flex(qkv: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if qkv.device.type == "cpu" and qkv.requires_grad:
        raise UnsupportedInputError("flex", ["FlexAttention has no backward on a CPU"])
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return _compiled(flex_attention)(q, k, v).transpose(1, 2)


@functools.cache
def _compiled(function: Function) -> Any:
    """Compiles at the first call; importing the compiler takes seconds."""
    return torch.compile(function, dynamic=False)


def _flash_attn(qkv: Tensor) -> Tensor:
    from flash_attn import flash_attn_qkvpacked_func

    return flash_attn_qkvpacked_func(qkv)


def _xformers(qkv: Tensor) -> Tensor:
    from xformers.ops import memory_efficient_attention

    return memory_efficient_attention(*qkv.unbind(2))


def _cublaslt(x: Tensor, g: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    normed = F.layer_norm(x, (x.shape[-1],), g, b, 1e-6).flatten(0, -2)
    hidden = torch._addmm_activation(b1, normed, w1.t(), use_gelu=True)
    return torch.addmm(b2, hidden, w2.t()).view_as(x) + x


def _transformer_engine(x: Tensor, *parameters: Tensor) -> Tensor:
    module = _transformer_engine_module(*parameters[2].shape[::-1], x.dtype)
    return torch.func.functional_call(module, dict(zip(_TE_NAMES, parameters, strict=True)), (x,)) + x


_TE_NAMES = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


@functools.cache
def _transformer_engine_module(width: int, hidden: int, dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch import LayerNormMLP

    return LayerNormMLP(width, hidden, eps=1e-6, activation="gelu", params_dtype=dtype)


_ATTENTION: dict[str, Function] = {
    "eager": partial(ops.attention_qkvpacked, backend="eager"),
    "sdpa": _sdpa,
    "triton": partial(ops.attention_qkvpacked, backend="triton"),
    "flex": _flex,
    "flash-attn": _flash_attn,
    "xformers": _xformers,
}
_MLP: dict[str, Function] = {
    **{name: partial(ops.layer_norm_mlp, backend=name) for name in ("eager", "sdpa", "triton")},
    "cublaslt": _cublaslt,
    "transformer-engine": _transformer_engine,
}
_MATMUL: dict[str, Function] = {"eager": F.linear, "triton": matmul}
# On a CPU the epilogue of _addmm_activation is exact GELU.
_ON_A_GPU = ("flash-attn", "xformers", "cublaslt", "transformer-engine")
_OF_GELU_TANH = ("cublaslt", "transformer-engine")

for peer, summary, packages in (
    ("flex", "FlexAttention, compiled", ()),
    ("flash-attn", "attention of the flash-attn package", ("flash_attn",)),
    ("xformers", "xformers' memory-efficient attention", ("xformers",)),
    ("cublaslt", "MLP by torch with cuBLASLt's GELU epilogue", ()),
    ("transformer-engine", "NVIDIA TransformerEngine's LayerNormMLP", ("transformer_engine",)),
):
    register(peer, summary, partial(build, peer), packages=packages, peer=True, compilable=False)
