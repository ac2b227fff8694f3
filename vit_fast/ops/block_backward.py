"""`vit_fast::block_backward`, the backward of `vit_fast::block`, and the settings of the two operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .attention_operator import INPUTS, attention_flop, attention_gradient, restored_inputs
from .descriptions import BlockTensors, Keys, ScoreTerms, as_matrix
from .registration import operator, words_of
from .rotary import QkSettings, QkTensors, norm_gradients, qkv_step

if TYPE_CHECKING:
    from ..kernels.linear.folding import NormedLinear
    from ..kernels.linear.scaled_weights import ScaledWeight


class BlockSettings(NamedTuple):
    """Non-tensor arguments of the block operators: eight numbers, then values that `registration.text_of` encodes."""

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
    present: Sequence[int] = ()  # index in `_NAMES` of each tensor in the operator's list

    @classmethod
    def read(cls, flat: Sequence[Any]) -> BlockSettings:
        """Restores the settings from operator arguments: eight numbers and a string from `registration.text_of`."""
        return cls(*flat[:8], *words_of(flat[8]))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.matmul_dtype.removeprefix("torch."))
        return dtype

    @property
    def qk(self) -> QkSettings:
        return QkSettings(self.qk_norm, self.qk_eps, self.over, self.layout, self.prefix)


SETTINGS = (
    "SymInt heads, float scale, SymInt prefix, SymInt max_seqlen, float eps1, float eps2, float qk_eps, "
    "float inner_eps, str words"
)
"""Schema of the operator arguments from which `BlockSettings.read` restores the settings."""


_NAMES = (*BlockTensors._fields, *QkTensors._fields, *INPUTS, "x8", "next_factor")
_QK, _INPUTS = len(BlockTensors._fields), len(BlockTensors._fields + QkTensors._fields)  # where these start in _NAMES
_QKV, _FC1 = _NAMES.index("qkv_weight"), _NAMES.index("fc1_weight")
_CONSTANT = {"qkv_sum", "fc1_sum", "fc2_sum", "cos", "sin", "cu_seqlens", "key_mask", "window_mask", "groups"}


def tensors_of(tensors: Sequence[Any], s: BlockSettings) -> tuple[Any, QkTensors, Keys, ScoreTerms | None, Any, Any]:
    """Converts an operator's tensor list to the arguments of `fused_block`, in the order of `_NAMES`."""
    fields: list[Any] = [None] * len(_NAMES)
    for number, tensor in zip(s.present, tensors, strict=True):
        fields[number] = tensor
    keys, terms = restored_inputs(fields[_INPUTS:-2], s.max_seqlen)
    return BlockTensors._make(fields[:_QK]), QkTensors._make(fields[_QK:_INPUTS]), keys, terms, *fields[-2:]


def gradient_names(s: BlockSettings) -> list[str]:
    """Returns the name of each tensor in the operator's list, or "" for a tensor that has no gradient."""
    return ["" if (name := _NAMES[number]) in _CONSTANT else name for number in s.present]


def saved_names(s: BlockSettings) -> list[str]:
    """Returns the names of the tensors that the forward saves for the backward. M is the number of tokens.

    norm1_input, statistics1: Input of norm1, and its mean and reciprocal standard deviation (rstd), fp32 [2, M]. For
        fp32 x: the normalized input in the dtype of the matmuls, and only rstd, fp32 [1, M].
    norm2_input, statistics2: Input of norm2 and its statistics, stored like those of norm1.
    qkv [B, N, 3, H, D], mixed [B, N, H, D], lse [B, H, N]: Input, output and log-sum-exp of the attention.
    before_norm: qkv before the norms of q and k; saved only with qk-norm.
    z: Output of fc1 [M, F]. With a gate, z is [M, 2 F], and columns of the gate and of fc1 alternate.
    branch: With a norm before fc2: output [M, C] of fc2 without the shift W beta + b (W, b of fc2, beta of this norm).
    hidden: With a norm before fc2: mean and rstd of the input of this norm, fp32 [2, M].
    """
    names = []
    if _QKV in s.present:
        names = ["norm1_input", "statistics1", "qkv", "mixed", "lse", *(["before_norm"] if s.qk_norm != "none" else [])]
    if _FC1 in s.present:
        names += ["norm2_input", "statistics2", "z", *(["branch", "hidden"] if s.inner_norm != "none" else [])]
    return names


def normed_linears(t: Any, norm: str, inner_norm: str, rope_head: int = 0) -> dict[str, NormedLinear]:
    """Returns the linear layers that follow a norm: qkv, fc1 and, with an inner norm, fc2. `rope_head`: see `fold`."""
    from ..kernels.linear.folding import NormedLinear

    linears, rms = {}, norm != "layer_norm"
    if t.qkv_weight is not None:
        linears["qkv"] = NormedLinear(t.qkv_weight, t.qkv_bias, t.norm1_weight, t.norm1_bias, rms, rope_head=rope_head)
    if t.fc1_weight is not None:
        linears["fc1"] = NormedLinear(
            t.fc1_weight, t.fc1_bias, t.norm2_weight, t.norm2_bias, rms, t.gate_weight, t.gate_bias
        )
        if inner_norm != "none":
            linears["fc2"] = NormedLinear(
                t.fc2_weight, t.fc2_bias, t.inner_weight, t.inner_bias, inner_norm == "rms_norm"
            )
    return linears


def _block_gradient(grad_output: Tensor, tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    """Returns gradients of x and parameters. `tensors` contains the saved tensors, then the forward's tensor list."""
    from ..kernels.layer_norm import NormInput
    from ..kernels.linear import folding, hidden_norm, linear, scaled_weights, weight_matmuls
    from ..kernels.linear.gradients import layer_norm_gradient

    s = BlockSettings.read(settings)
    names = saved_names(s)
    saved = SimpleNamespace(**({"before_norm": None, "hidden": None} | dict(zip(names, tensors))))
    t, qk, keys, terms, *_ = tensors_of(tensors[len(names) :], s)
    linears = {name: layer.contiguous() for name, layer in normed_linears(t, s.norm, s.inner_norm).items()}
    inner = linears.get("fc2")  # None without a norm before fc2
    scaled = _scaled_weights(t, linears, s.dtype)
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
        (d_packed,), of_terms = attention_gradient(d_mixed, [saved.qkv], saved.mixed, saved.lse, keys, s.scale, terms)
        gradients |= of_terms
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
    gradients |= _parameter_gradients(t, linears, sums, parts, pairs) | norm_gradients(norm_sums, qk)
    return [stream.view(grad_output.shape), *(gradients[name] for name in gradient_names(s) if name)]


def _scaled_weights(t: BlockTensors, linears: dict[str, NormedLinear], dtype: torch.dtype) -> dict[str, ScaledWeight]:
    """Returns the weights that gradients are multiplied by, times LayerScale; not fc2 if it follows a norm."""
    from ..kernels.linear.scaled_weights import scaled_weights

    weights: dict[str, tuple[Tensor, Tensor | None]] = {}
    if t.qkv_weight is not None:
        weights = {"proj": (t.proj_weight.contiguous(), t.scale1), "qkv": (linears["qkv"].weight, None)}
    if t.fc1_weight is not None and "fc2" not in linears:
        weights["fc2"] = t.fc2_weight.contiguous(), t.scale2
    return dict(zip(weights, scaled_weights(list(weights.values()), dtype)))


def _parameter_gradients(
    t: BlockTensors, linears: dict[str, NormedLinear], sums: dict[str, Tensor], parts: dict[str, Tensor],
    pairs: dict[str, tuple[Tensor, Tensor]],
) -> dict[str, Any]:  # fmt: skip
    """Returns parameter gradients by name, without those of qk-norm. `linears` is the result of `normed_linears`."""
    from ..kernels.linear.weight_gradients import FoldedMatmul, ResidualMatmul, parameter_gradients

    matmuls = [FoldedMatmul(parts[name], sums[name], layer) for name, layer in linears.items()]
    branches = {}
    for name, weight, bias, layer_scale in (
        ("proj", t.proj_weight, t.proj_bias, t.scale1), ("fc2", t.fc2_weight, t.fc2_bias, t.scale2),
    ):  # fmt: skip
        if name in parts and name not in linears:
            vectors = (vector if vector is None else vector.contiguous() for vector in (bias, layer_scale))
            branches[name] = ResidualMatmul(parts[name], pairs[name][0], weight.contiguous(), *vectors)
    of_folded, of_branches = parameter_gradients(matmuls[:2], list(branches.values()))
    if matmuls[2:]:  # the kernel supports at most two folded layers
        of_folded += parameter_gradients(matmuls[2:], [])[0]
    gradients: dict[str, Any] = {}
    for name, of in zip(linears, of_folded):
        norm = {"qkv": "norm1", "fc1": "norm2", "fc2": "inner"}[name]
        gradients |= {f"{name}_weight": of.weight, f"{name}_bias": of.bias}
        gradients |= {f"{norm}_weight": of.gamma, f"{norm}_bias": of.beta}
        if name == "fc1":
            gradients |= {"gate_weight": of.gate, "gate_bias": of.gate_bias}
    for name, branch in zip(branches, of_branches):
        of_scale = "scale1" if name == "proj" else "scale2"
        gradients |= {f"{name}_weight": branch.weight, f"{name}_bias": branch.bias, of_scale: branch.scale}
    return gradients


def block_flop(x: Sequence[int], tensors: Sequence[Any], s: BlockSettings) -> tuple[int, int]:
    """Returns the FLOPs of forward and backward. Takes shapes in place of tensors."""
    t, _, keys, terms, *_ = tensors_of(tensors, s)
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


def _fake(grad_output: Tensor, tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
    s = BlockSettings.read(settings)
    rows, statistics = tensors[:2]
    dx = rows.new_empty(grad_output.shape, dtype=torch.float32 if statistics.shape[0] == 1 else rows.dtype)
    parameters = zip(gradient_names(s), tensors[len(saved_names(s)) :], strict=True)
    return [dx, *(parameter.new_empty(parameter.shape) for name, parameter in parameters if name)]


def _flop(grad_output: Any, tensors: Any, *settings: Any) -> int:
    s = BlockSettings.read(settings)
    return block_flop(grad_output, tensors[len(saved_names(s)) :], s)[1]


block_backward_kernel = operator(
    "block_backward", f"(Tensor grad_output, Tensor[] tensors, {SETTINGS}) -> Tensor[]", _block_gradient,
    what="a block or layer_norm_mlp", fake=_fake, flop=_flop,
)  # fmt: skip
