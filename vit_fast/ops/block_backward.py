"""The backward of `vit_fast::block`, its tensors and its settings."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .attention_operator import INPUTS, attention_flop, attention_gradient, restored_inputs
from .descriptions import BlockTensors, as_matrix
from .rotary import QkSettings, QkTensors, norm_gradients, qkv_step

if TYPE_CHECKING:
    from ..kernels.linear.folding import NormedLinear
    from ..kernels.linear.weight_gradients import ResidualLinear


class BlockSettings(NamedTuple):
    """Non-tensor arguments of the block operators."""

    heads: int
    scale: float  # multiplier of q k^T
    prefix: int  # number of leading tokens that are not rotated
    max_seqlen: int  # length of the longest packed sequence; 0 without packed sequences
    eps1: float
    eps2: float
    qk_eps: float
    inner_eps: float
    norm: str
    activation: str
    qk_norm: str  # kind of the norms of q and k, or "none"
    over: str  # see `QkNorm`
    layout: str  # see `Rope` and `interleave`
    inner_norm: str  # kind of the norm before fc2, or "none"
    residual: bool
    next_statistics: bool
    saves: bool  # True to return the tensors that the backward needs
    matmul_dtype: Any  # such as "torch.float16"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, str(self.matmul_dtype).removeprefix("torch."))

    @property
    def qk(self) -> QkSettings:
        return QkSettings(self.qk_eps, self.prefix, self.qk_norm, self.over, self.layout)


NAMES = ("x", *BlockTensors._fields, *QkTensors._fields, *INPUTS, "statistics", "x8", "next_factor")
_QK, _INPUTS = NAMES.index("q_weight"), NAMES.index(INPUTS[0])
WITH_GRADIENT = set(NAMES[:-3]).difference(
    ("qkv_sum", "fc1_sum", "fc2_sum", "cos", "sin", "cu_seqlens", "key_mask", "window_mask", "groups")
)


def tensors_of(tensors: Sequence[Any], s: BlockSettings) -> tuple[Any, ...]:
    """Groups the tensors that `NAMES` names: x, parameters, qk-norm and rope, keys, terms, and the last three."""
    keys, terms = restored_inputs(tensors[_INPUTS:-3], s.max_seqlen)
    t, qk = BlockTensors._make(tensors[1:_QK]), QkTensors._make(tensors[_QK:_INPUTS])
    return tensors[0], t, qk, keys, terms, *tensors[-3:]


def saved_outputs(
    shape: Sequence[int], is_fp32: bool, dtype: torch.dtype, t: BlockTensors, s: BlockSettings
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and dtype of the outputs of the forward for the backward. M is the number of tokens.

    `shape` and `is_fp32` describe x, and `dtype` is that of the first output. If x is in half precision, the input of
    the first norm is x itself, and no output.
    """
    M, C, half, fp32 = math.prod(shape[:-1]), shape[-1], s.dtype, torch.float32
    # mean and reciprocal standard deviation (rstd) of the input of a norm; if x is fp32, the input is saved after
    # normalization, and only with rstd
    statistics = (1 if is_fp32 or s.norm == "none" else 2, M), fp32
    saved: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if t.qkv_weight is not None:
        (B, N, _), D = shape, t.qkv_weight.shape[0] // (3 * s.heads)
        saved = {"norm1_input": ((M, C), half), "statistics1": statistics}
        # input, output and log-sum-exp of the attention
        saved |= {"qkv": ((B, N, 3, s.heads, D), half), "mixed": ((B, N, s.heads, D), half)}
        saved["lse"] = (B, s.heads, N), fp32
        if s.qk_norm != "none":
            saved["before_norm"] = saved["qkv"]  # qkv before the norms of q and k
    if t.fc1_weight is not None:
        saved |= {"norm2_input": ((M, C), half), "statistics2": statistics}
        # output of fc1; with a gate, columns of the gate and of fc1 alternate
        saved["z"] = (M, t.fc1_weight.shape[0] * (1 if t.gate_weight is None else 2)), half
        if s.inner_norm != "none":
            saved["branch"] = (M, C), dtype  # output of fc2 without the shift W beta + b (beta of the norm before fc2)
            saved["hidden"] = (2, M), fp32  # mean and rstd of the input of the norm before fc2
    if not is_fp32:
        saved.pop("norm2_input" if t.qkv_weight is None else "norm1_input")
    return saved


# The fields of `BlockTensors` that form a `NormedLinear` or a `ResidualLinear` of kernels/linear/.
_NORMED = {
    "qkv": {"weight": "qkv_weight", "bias": "qkv_bias", "gamma": "norm1_weight", "beta": "norm1_bias"},
    "fc1": {
        "weight": "fc1_weight", "bias": "fc1_bias", "gamma": "norm2_weight", "beta": "norm2_bias",
        "gate": "gate_weight", "gate_bias": "gate_bias",
    },
    "fc2": {"weight": "fc2_weight", "bias": "fc2_bias", "gamma": "inner_weight", "beta": "inner_bias"},
}  # fmt: skip
RESIDUAL = {
    "proj": {"weight": "proj_weight", "bias": "proj_bias", "scale": "scale1"},
    "fc2": {"weight": "fc2_weight", "bias": "fc2_bias", "scale": "scale2"},
}


def _layers(t: Any, fields: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Returns the contiguous parameters of the layers that are present."""
    found = {}
    for name, by_key in fields.items():
        if getattr(t, by_key["weight"]) is not None:
            given = {key: getattr(t, field) for key, field in by_key.items()}
            found[name] = {key: tensor if tensor is None else tensor.contiguous() for key, tensor in given.items()}
    return found


def normed_linears(t: Any, norm: str, inner_norm: str, rope_head: int = 0) -> dict[str, NormedLinear]:
    """Returns the linear layers that follow a norm: qkv, fc1 and, with an inner norm, fc2. `rope_head`: see `fold`."""
    from ..kernels.linear.folding import NormedLinear

    layers, kinds = _layers(t, _NORMED), {"qkv": norm, "fc1": norm, "fc2": inner_norm}
    if inner_norm == "none":
        layers.pop("fc2", None)
    heads = {"qkv": rope_head}
    return {
        name: NormedLinear(**layer, rms=kinds[name] != "layer_norm", rope_head=heads.get(name, 0))
        for name, layer in layers.items()
    }


def residual_linears(t: Any, normed: Collection[str]) -> dict[str, ResidualLinear]:
    """Returns the linear layers before a residual that do not follow a norm: proj and, if not in `normed`, fc2."""
    from ..kernels.linear.weight_gradients import ResidualLinear

    return {name: ResidualLinear(**layer) for name, layer in _layers(t, RESIDUAL).items() if name not in normed}


def block_gradient(
    grad_output: Tensor, tensors: Sequence[Any], outputs: Sequence[Tensor], s: BlockSettings
) -> dict[str, Any]:
    """Returns gradients of x, which is None if it is fp32, and of parameters. `outputs`: see `saved_outputs`."""
    from ..kernels.layer_norm import NormInput
    from ..kernels.linear import folding, hidden_norm, linear, scaled_weights, weight_matmuls
    from ..kernels.linear.gradients import layer_norm_gradient
    from ..kernels.linear.weight_gradients import parameter_gradients

    x, t, qk, keys, terms, *_ = tensors_of(tensors, s)
    names = saved_outputs(grad_output.shape, x is None, grad_output.dtype, t, s)
    absent = {"norm1_input": x, "norm2_input": x, "before_norm": None, "hidden": None}
    saved = SimpleNamespace(**(absent | dict(zip(names, outputs, strict=True))))
    linears = normed_linears(t, s.norm, s.inner_norm)
    inner, branches = linears.get("fc2"), residual_linears(t, linears)  # inner: None without a norm before fc2
    operands = {name: (layer.weight, layer.scale) for name, layer in branches.items()}
    if "qkv" in linears:
        operands = {"proj": operands.pop("proj"), "qkv": (linears["qkv"].weight, None)} | operands
    scaled = dict(zip(operands, scaled_weights.scaled_weights(list(operands.values()), s.dtype)))
    stream, narrow, norm_sums, along = as_matrix(grad_output), None, None, None
    sums: dict[str, Tensor] = {}
    gradients: dict[str, Any] = {}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    if t.fc1_weight is not None:
        norm_input, dy = NormInput(as_matrix(saved.norm2_input), saved.statistics2), stream.to(s.dtype)
        d_branch = dy
        if inner is None:
            (folded,) = folding.fold_linears([linears["fc1"]], s.dtype)
        else:  # h below is the hidden layer after the inner norm, but without gamma and beta
            along, sums["fc2"] = hidden_norm.along_rows(dy, saved.branch, t.scale2, inner.weight.shape[1])
            folded, behind = folding.fold_linears([linears["fc1"], inner], s.dtype)
            (scaled["fc2"],) = scaled_weights.scaled_weights([(behind.weight, t.scale2)], s.dtype)
            if t.scale2 is not None:  # `branch` does not contain the shift W beta + b: add it
                d_scale = (dy.float() * saved.branch).sum(0) + behind.shift * sums["fc2"].sum(0)
                gradients["scale2"] = d_scale.to(t.scale2.dtype)
                d_branch, sums["fc2"] = (dy * t.scale2).to(s.dtype), sums["fc2"] * t.scale2
        gated = t.gate_weight is not None
        d_fc1, row_part, sums["fc1"], h = linear.activation_gradient(
            dy, scaled["fc2"], saved.z, norm_input, folded, s.activation, gated, saved.hidden, along
        )
        if s.norm == "none":  # then the mean of dz * (z - c) has no effect on the input
            row_part.zero_()
        # `narrow` is `stream` in the dtype of the matmuls; the gradients of proj are computed from it
        stream, narrow = linear.input_gradient(
            d_fc1, row_part, norm_input, folded, stream if s.residual else None, t.qkv_weight is not None
        )
        pairs = {"fc1": (d_fc1, norm_input.source), "fc2": (d_branch, h)}
    if t.qkv_weight is not None:
        d_proj = stream.to(s.dtype) if narrow is None else narrow
        d_mixed = linear.matmul_gradient(d_proj, scaled["proj"]).view(saved.mixed.shape)
        gradients |= attention_gradient(d_mixed, [saved.qkv], saved.mixed, saved.lse, keys, s.scale, terms)
        d_packed = gradients.pop("q")
        step = qkv_step(qk, s.qk, saved.qkv.shape[1], saved.qkv.shape[-1], False)
        norm_sums = step.backward(d_packed, saved.before_norm)
        norm_input = NormInput(as_matrix(saved.norm1_input), saved.statistics1)
        d_qkv = as_matrix(d_packed.flatten(2))
        product, residual = linear.matmul_gradient(d_qkv, scaled["qkv"]), stream if s.residual else None
        stream, normalized, sums["qkv"] = layer_norm_gradient(
            product, linears["qkv"].gamma, norm_input, residual, d_qkv, linears["qkv"].rms
        )
        pairs = {"qkv": (d_qkv, normalized), "proj": (d_proj, as_matrix(saved.mixed.flatten(2))), **pairs}
    parts = dict(zip(pairs, weight_matmuls.weight_matmuls(*pairs.values())))
    matmuls = [(parts[name], sums[name], layer) for name, layer in linears.items()]
    of_normed, of_branches = parameter_gradients(
        matmuls[:2], [(parts[name], pairs[name][0], layer) for name, layer in branches.items()]
    )
    if matmuls[2:]:  # the kernel supports at most two layers after norms
        of_normed += parameter_gradients(matmuls[2:], [])[0]
    for fields, layers, found in ((_NORMED, linears, of_normed), (RESIDUAL, branches, of_branches)):
        for name, of in zip(layers, found):
            gradients |= {field: getattr(of, key) for key, field in fields[name].items()}
    gradients |= norm_gradients(norm_sums, qk)
    gradients["x"] = stream.view(grad_output.shape).to(stream.dtype if x is None else x.dtype)
    return gradients


def block_flop(shapes: Sequence[Any], s: BlockSettings) -> tuple[int, int]:
    """Returns the FLOPs of forward and backward."""
    x, t, _, keys, terms, *_ = tensors_of(shapes, s)
    tokens, width, matmuls, attention = math.prod(map(int, x[:-1])), int(x[-1]), 0, (0, 0)
    if t.qkv_weight is not None:
        inner = int(t.qkv_weight[0]) // 3
        matmuls += 2 * tokens * width * 4 * inner
        attention = attention_flop(tokens * inner, int(x[-2]) if keys.cu_seqlens is None else s.max_seqlen, terms)
    if t.fc2_weight is not None:
        hidden = int(t.fc2_weight[1])  # not fc1_weight[0]: a folded fc1 also contains the rows of the gate
        gated = t.gate_weight is not None or int(t.fc1_weight[0]) != hidden
        matmuls += (6 if gated else 4) * tokens * width * hidden
    return matmuls + attention[0], 2 * matmuls + attention[1]
