"""Runs frozen blocks on the CPU with packed weights, and with less work between operators.

`F.linear` converts a weight to the CPU's layout in every call. Packing does that once, with the operators that torch's
compiler uses for frozen models. Two libraries can pack a layer. The faster one was measured on two cores of a Xeon with
AMX, for 197, 788 and 1,576 tokens:

- bf16 and fp16: oneDNN, with activation and residual in its epilogue.
- fp32: MKL, followed by activation and residual in place. oneDNN has the only fast GELU, in its tanh form.

LayerNorm is not folded, because dropping its weight and bias does not make it faster on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import reference
from .attention import attention_among
from .descriptions import BlockTensors, Keys, Norm, QkNorm, Rope
from .frozen import Frozen
from .operators import in_transform
from .rotary import qk_norm_rope

ROWS = 256
"""Number of tokens that weights are packed for. The layout works for any number; 5, 197 and 1,576 were measured."""

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "relu": torch.relu_,
    "silu": torch.ops.aten.silu_.default,
    "quick_gelu": lambda x: torch.sigmoid(1.702 * x).mul_(x),
}
_NO_EPILOGUE: tuple[str, list[float], str] = ("none", [], "")
_EPILOGUES: dict[str, tuple[str, list[float], str]] = {
    "gelu": ("gelu", [], "none"), "gelu_tanh": ("gelu", [], "tanh"), "relu": ("relu", [], ""),
}  # fmt: skip


class Settings(NamedTuple):
    """Settings of a block that are not parameters.

    Attributes:
        heads, attention_scale: Settings of the attention; a scale of None means D**-0.5.
        norm, inner_norm: Kinds of the norms before each half and before fc2; None if there is none.
        eps: Epsilons of these three norms.
        activation: Activation of the MLP.
    """

    heads: int
    attention_scale: float | None
    norm: str
    inner_norm: str | None
    eps: tuple[float, float, float]
    activation: str


class PackedLinear:
    """Computes activation(x W^T + b) or residual + x W^T + b, for contiguous x [..., K] with W's dtype.

    Args:
        weight: W [N, K] on the CPU.
        bias: b [N] or None.
        activation: A key of `reference.ACTIVATIONS`, or None.
        scale: LayerScale [N], folded into weight and bias; None means ones.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: str | None = None, scale: Tensor | None = None
    ) -> None:
        by_mkl = weight.dtype == torch.float32 and activation != "gelu_tanh"
        if scale is not None:
            weight = (weight.float() * scale.float()[:, None]).to(weight.dtype)
            bias = None if bias is None else bias.float() * scale.float()
        # a copy, so that bias and weight change together
        self._bias = None if bias is None else bias.to(weight.dtype, copy=True)
        self._epilogue = _NO_EPILOGUE if by_mkl or activation is None else _EPILOGUES.get(activation, _NO_EPILOGUE)
        in_epilogue = activation is None or self._epilogue is not _NO_EPILOGUE
        self._activation = None if in_epilogue else _IN_PLACE[str(activation)]
        pack = torch.ops.mkl._mkl_reorder_linear_weight if by_mkl else torch.ops.mkldnn._reorder_linear_weight
        self._weight = pack(weight.contiguous(), ROWS)
        self._shape_only = weight.new_empty(()).expand(weight.shape) if by_mkl else None
        self.inputs = weight.shape[1]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._shape_only is not None:
            # The last argument is the number of tokens that the weight was packed for. If it differs from the number
            # of tokens in x, torch reads the unpacked weight.
            rows = x.numel() // x.shape[-1]
            y: Tensor = torch.ops.mkl._mkl_linear.default(x, self._weight, self._shape_only, self._bias, rows)
        elif residual is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        else:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, *self._epilogue)
        if self._activation is not None:
            y = self._activation(y)
        return y if residual is None else y.add_(residual)


class Steps(NamedTuple):
    """The norms and linear layers of a block, in the order of computation."""

    norm1: Norm
    qkv: PackedLinear
    qk_norm: QkNorm | None
    proj: PackedLinear
    norm2: Norm
    fc1: PackedLinear
    gate: PackedLinear | None
    inner_norm: Norm | None
    fc2: PackedLinear


class Packed(Frozen):
    """The packed linear layers of one block, updated like a `Frozen` when the weights change.

    Args:
        sources: Modules and attribute names of all parameters.
        block: Returns the parameters.
        dtype: Dtype of the weights.
        settings: The other settings of the block.
        qk_norm: Returns the norms of q and k, or None.
    """

    _steps: Steps

    def __init__(
        self,
        sources: Sequence[tuple[nn.Module, str]],
        block: Callable[[], BlockTensors],
        dtype: torch.dtype,
        settings: Settings,
        qk_norm: Callable[[], QkNorm] | None = None,
    ) -> None:
        self._settings, self._qk_norm = settings, qk_norm
        super().__init__(sources, block, dtype)

    def linears(self) -> list[PackedLinear]:
        """The linear layers that are present, in order."""
        return [step for step in self._steps if isinstance(step, PackedLinear)]

    def make(self) -> None:
        """Packs the current weights."""
        t, settings = self._block(), self._settings
        kind, inner_kind = settings.norm, settings.inner_norm
        gate = None if t.gate_weight is None else PackedLinear(t.gate_weight, t.gate_bias, settings.activation)
        self._steps = Steps(
            norm1=Norm(t.norm1_weight, t.norm1_bias, settings.eps[0], kind),
            qkv=PackedLinear(t.qkv_weight, t.qkv_bias),
            qk_norm=self._qk_norm and self._qk_norm(),
            proj=PackedLinear(t.proj_weight, t.proj_bias, scale=t.scale1),
            norm2=Norm(t.norm2_weight, t.norm2_bias, settings.eps[1], kind),
            fc1=PackedLinear(t.fc1_weight, t.fc1_bias, settings.activation if gate is None else None),
            gate=gate,
            inner_norm=Norm(t.inner_weight, t.inner_bias, settings.eps[2], inner_kind) if inner_kind else None,
            fc2=PackedLinear(t.fc2_weight, t.fc2_bias, scale=t.scale2),
        )

    def takes(self, x: Tensor) -> bool:
        """Returns True if a call with these tokens can run packed: without gradients, and not traced or intercepted."""
        if x.dtype is not self.dtype or type(x) is not Tensor or torch.compiler.is_compiling():
            return False
        # FLOP counters and FakeTensor are dispatch modes; neither they nor tracers support packed weights
        if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
            return False
        if x.numel() == 0 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        return not in_transform()

    def steps(self) -> tuple[Steps, Settings]:
        """Returns the current steps and settings."""
        self.ensure_current()
        return self._steps, self._settings


def run_packed(
    blocks: Sequence[Packed], x: Tensor, rope: Rope | None, keys: Keys | None, outputs: int | None = None
) -> Tensor:
    """Runs consecutive blocks on [B, N, C] or [total, C]; the first one must accept x, see `takes`.

    Args:
        rope, keys: Rotary positions of q and k; keys that queries attend to, or None for all keys of an image.
        outputs: The last block computes only this many leading tokens; None means all. Requires keys=None.
    """
    steps = [packed.steps() for packed in blocks]  # in advance: threads go to sleep while Python runs between operators
    for left, (step, settings) in zip(reversed(range(len(steps))), steps):
        norm1, qkv_linear, qk_norm, proj, norm2, fc1, gate, inner_norm, fc2 = step
        qkv = qkv_linear(_normalise(x, norm1))
        qkv = qkv.view(*qkv.shape[:-1], 3, settings.heads, -1)
        if rope is not None or qk_norm is not None:
            qkv = qk_norm_rope(qkv, qk_norm=qk_norm, rope=rope, backend="sdpa")
        if keys is None:
            q, k, v = qkv.transpose(1, 3).unbind(2)
            if outputs is not None and left == 0:
                q, x = q[:, :, :outputs], x[:, :outputs].contiguous()
            mixed = F.scaled_dot_product_attention(q, k, v, scale=settings.attention_scale).transpose(1, 2)
        else:
            mixed = attention_among(qkv, keys, scale=settings.attention_scale, backend="sdpa")
        x = proj(mixed.flatten(-2), x)
        normed = _normalise(x, norm2)
        hidden = fc1(normed) if gate is None else gate(normed).mul_(fc1(normed))
        if inner_norm is not None:
            hidden = _normalise(hidden, inner_norm)
        x = fc2(hidden, x)
    return x


def _normalise(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "layer_norm":  # bypasses F.layer_norm, which doubles the time of its operator in a narrow model
        return torch.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps, False)
    return reference.normalise(x, norm)


@functools.cache
def pack_reasons(dtype: torch.dtype) -> tuple[str, ...]:
    """Returns all reasons why linear layers of a dtype cannot be packed on this CPU."""
    mkldnn = torch.ops.mkldnn
    if dtype == torch.float32:
        has_mkl = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
        return () if has_mkl else ("packing fp32 weights requires a build of torch with MKL",)
    supported = {
        torch.bfloat16: lambda: mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: lambda: mkldnn._is_mkldnn_fp16_supported(),
    }
    if dtype not in supported:
        return (f"weights to pack must be fp32, bf16 or fp16, got {dtype}",)
    if not (torch.backends.mkldnn.is_available() and supported[dtype]()):
        return (f"oneDNN does not compute in {str(dtype).removeprefix('torch.')} on this CPU",)
    return ()
