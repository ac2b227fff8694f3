"""Runs frozen blocks on the CPU with weights that are packed once, instead of in every call of `F.linear`.

`freeze` selects the implementation of each linear layer and of attention by a measurement (`fastest.py`): oneDNN with
the activation in its epilogue or after it, MKL, or ATen; oneDNN Graph or torch's flash attention.

LayerNorm is not folded, because a LayerNorm without weight and bias is not faster on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import qk_norm_rope, reference
from ..ops.attention import attention_among
from ..ops.descriptions import Keys, Norm, Rope
from ..ops.registration import in_transform, needs_gradient
from .fastest import Call, fastest
from .frozen import Frozen
from .parts import AttentionParts, BlockParts, MlpParts, sources, tensor_of

GRAPHS = 64  # maximum number of attention graphs in the cache
# Maximum bytes per thread of a linear layer's output; larger batches are split. malloc often returns larger buffers to
# the system, and page faults took a fifth of the time of vit_tiny at batch 8 in bf16.
HIDDEN_BYTES = 2**21
ROWS = 256  # tokens that weights are packed for; tested with 5, 197 and 1,576 tokens
TOKENS = (50, 197, 577)  # numbers of tokens that attention is measured with
ROWS_TIMED = (197, 788)  # numbers of tokens that linear layers are measured with: one image, and several in one group

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "relu": torch.relu_,
    "silu": torch.ops.aten.silu_.default,
    "quick_gelu": lambda x: torch.sigmoid(1.702 * x).mul_(x),
}
_NO_EPILOGUE: tuple[str, list[float], str] = ("none", [], "")
_EPILOGUES: dict[str, tuple[str, list[float], str]] = {
    "gelu": ("gelu", [], "none"), "gelu_tanh": ("gelu", [], "tanh"), "relu": ("relu", [], ""),
    "silu": ("swish", [], ""),
}  # fmt: skip


def implementations(dtype: torch.dtype, activation: str | None) -> list[str]:
    """Returns the implementations of a linear layer; the first is the default."""
    names = ["onednn", "aten"] + (["mkl"] if dtype == torch.float32 else [])
    return names if activation not in _EPILOGUES else ["onednn-epilogue", *names]


class PackedLinear:
    """Computes activation(x W^T + b) or residual + x W^T + b for contiguous x; folds LayerScale into W and b."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, activation: str | None = None, *,
        implementation: str,
    ) -> None:  # fmt: skip
        if scale is not None:
            weight = (weight.float() * scale.float()[:, None]).to(weight.dtype)
            bias = None if bias is None else bias.float() * scale.float()
        # copy the bias, so that an update of the parameter changes no bias before the weight is packed again
        self._bias = None if bias is None else bias.to(weight.dtype, copy=True)
        in_epilogue = implementation == "onednn-epilogue"
        self._epilogue = _EPILOGUES[str(activation)] if in_epilogue else _NO_EPILOGUE
        self._activation = None if in_epilogue or activation is None else _IN_PLACE[activation]
        self._by, self.shape = implementation.partition("-")[0], weight.shape
        if self._by == "aten":
            self._weight = weight.clone(memory_format=torch.contiguous_format)
        else:
            mkl, mkldnn = torch.ops.mkl, torch.ops.mkldnn
            pack = mkl._mkl_reorder_linear_weight if self._by == "mkl" else mkldnn._reorder_linear_weight
            self._weight = pack(weight.contiguous(), ROWS)
        self._shape_only = weight.new_empty(()).expand(weight.shape)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._by == "mkl":
            # The last argument is the number of tokens that the weight was packed for. If it differs from the number
            # of tokens in x, torch reads the unpacked weight.
            rows = x.numel() // x.shape[-1]
            y: Tensor = torch.ops.mkl._mkl_linear.default(x, self._weight, self._shape_only, self._bias, rows)
        elif self._by == "aten":
            y = F.linear(x, self._weight, self._bias)
        elif residual is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        else:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, *self._epilogue)
        if self._activation is not None:
            y = self._activation(y)
        return y if residual is None else y.add_(residual)


def _fastest_linear(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str | None, adds: bool
) -> str:
    """Returns the fastest implementation of PackedLinear for the ROWS_TIMED that fit into one group of images."""
    outputs, inputs = weight.shape
    most = HIDDEN_BYTES * torch.get_num_threads() // (outputs * weight.element_size())
    sizes = [rows for rows in ROWS_TIMED if rows <= max(most, ROWS_TIMED[0])]

    def build(name: str) -> list[Call]:
        layer = PackedLinear(weight, bias, scale, activation, implementation=name)
        xs = [_random(weight.dtype, 1, rows, inputs) for rows in sizes]
        residuals = [_random(weight.dtype, 1, rows, outputs) if adds else None for rows in sizes]
        return [functools.partial(layer, x, residual) for x, residual in zip(xs, residuals)]

    sums = " + residual" if adds else ""
    key = f"linear, {weight.dtype}, {inputs} to {outputs}, {activation}{sums}, bias {bias is not None}, rows {sizes}"
    return fastest(key, implementations(weight.dtype, activation), build)


def _fastest_attention(dtype: torch.dtype, heads: int, head_dim: int) -> Callable[[int], str]:
    """Returns a function that maps a number of tokens to "graph" (oneDNN Graph) or "flash"."""
    found = {}
    for tokens in TOKENS:

        def build(name: str, tokens: int = tokens) -> list[Call]:
            qkv = _random(dtype, 1, tokens, 3, heads, head_dim)
            return [] if name == "graph" and _graph_of(qkv, None) is None else [lambda: _attend(qkv, None, None, name)]

        names = ["flash"] if dtype == torch.float16 else ["graph", "flash"]
        key = f"attention, {dtype}, {heads} heads, head_dim {head_dim}, {tokens} tokens"
        found[tokens] = fastest(key, names, build)

    @functools.lru_cache(maxsize=GRAPHS)
    def select(tokens: int) -> str:
        return found[min(found, key=lambda measured: abs(math.log(measured / tokens)))]

    return select


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32).to(dtype)


class Packed(Frozen):
    """The packed linear layers of one block; packed again, like a `Frozen`, when the weights change."""

    every_source = True

    def __init__(self, attention: AttentionParts, mlp: MlpParts, dtype: torch.dtype, rope_head: int) -> None:
        self._selected: dict[str, str] = {}  # implementations of the linear layers, selected by the first _recompute
        self._select_attention: Callable[[int], str] | None = None
        super().__init__(attention, mlp, dtype, rope_head)

    def _recompute(self) -> None:
        attention, mlp = self.attention, self.mlp
        hidden = mlp.activation if mlp.gate is None else None
        qkv = self._pack("qkv", *attention.qkv.tensors())
        if self._select_attention is None and attention.terms is None:
            head_dim = qkv.shape[0] // (3 * attention.num_heads)
            self._select_attention = _fastest_attention(self.dtype, attention.num_heads, head_dim)
        self._steps = SimpleNamespace(
            norm1=attention.norm.now(),
            qkv=qkv,
            select_attention=self._select_attention,
            heads=attention.num_heads,
            qk_norm=None if attention.qk_norm is None else attention.qk_norm.now(),
            scale=attention.scale,
            terms=None if attention.terms is None else attention.terms.now(torch.device("cpu")),
            proj=self._pack("proj", *attention.with_scale(attention.proj), adds=True),
            norm2=mlp.norm.now(),
            fc1=self._pack("fc1", *mlp.fc1.tensors(), activation=hidden),
            gate=None if mlp.gate is None else self._pack("gate", *mlp.gate.tensors(), activation=mlp.activation),
            inner_norm=None if mlp.inner_norm is None else mlp.inner_norm.now(),
            fc2=self._pack("fc2", *mlp.with_scale(mlp.fc2), adds=True),
        )

    def _pack(
        self, name: str, weight: Any, bias: Any, scale: Any = None, activation: str | None = None, adds: bool = False
    ) -> PackedLinear:
        if name not in self._selected:
            self._selected[name] = _fastest_linear(weight, bias, scale, activation, adds)
        return PackedLinear(weight, bias, scale, activation, implementation=self._selected[name])

    def steps(self) -> Any:
        self.ensure_current()
        return self._steps


def run_packed(
    blocks: Sequence[Packed], x: Tensor, rope: Rope | None, keys: Keys | None, outputs: int | None = None
) -> Tensor:
    """Runs blocks on [B, N, C] or [total, C]; the last one computes only the first `outputs` tokens (None: all)."""
    steps = [packed.steps() for packed in blocks]  # first, because operators wait while Python runs
    parts: tuple[Tensor, ...] = (x,)
    if keys is None and (rope is None or rope.cos.ndim == 2):  # images can run in groups
        width = max(max(step.qkv.shape[0], step.fc1.shape[0]) for step in steps)
        images = max(1, HIDDEN_BYTES * torch.get_num_threads() // (x.shape[1] * width * x.element_size()))
        parts = x.split(math.ceil(len(x) / math.ceil(len(x) / images)))
    for left, step in zip(reversed(range(len(steps))), steps):
        parts = tuple(_run_block(part, step, rope, keys, None if left else outputs) for part in parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_block(x: Tensor, step: Any, rope: Rope | None, keys: Keys | None, outputs: int | None) -> Tensor:
    qkv = step.qkv(_normalize(x, step.norm1))
    qkv = qkv.view(*qkv.shape[:-1], 3, step.heads, -1)
    if rope is not None or step.qk_norm is not None:
        qkv = qk_norm_rope(qkv, qk_norm=step.qk_norm, rope=rope, backend="sdpa")
    if step.terms is not None:
        mixed = attention_among(qkv, keys, scale=step.scale, terms=step.terms, backend="sdpa").flatten(-2)
        mixed, x = (mixed, x) if outputs is None else (mixed[:, :outputs], x[:, :outputs].contiguous())
    elif keys is None:
        implementation = step.select_attention(qkv.shape[1]) if outputs is None else "flash"
        mixed = _attend(qkv, step.scale, outputs, implementation)
        x = x if outputs is None else x[:, :outputs].contiguous()
    else:
        mixed = attention_among(qkv, keys, scale=step.scale, backend="sdpa").flatten(-2)
    x = step.proj(mixed, x)
    normed = _normalize(x, step.norm2)
    hidden = step.fc1(normed) if step.gate is None else step.gate(normed).mul_(step.fc1(normed))
    if step.inner_norm is not None:
        hidden = _normalize(hidden, step.inner_norm)
    y: Tensor = step.fc2(hidden, x)
    return y


def _attend(qkv: Tensor, scale: float | None, outputs: int | None, implementation: str) -> Tensor:
    """Returns attention [B, outputs, H * D] of the first `outputs` queries (None: all) of qkv [B, N, 3, H, D]."""
    if implementation == "graph" and (graph := _graph_of(qkv, scale)) is not None:
        return graph(qkv)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    return F.scaled_dot_product_attention(q[:, :, :outputs], k, v, scale=scale).transpose(1, 2).flatten(-2)


_ATTENTION = """
def attention(qkv):
    q, k, v = qkv.transpose(1, 3).unbind(2)
    scores = torch.matmul(q, k.transpose(-1, -2)) * {scale!r}
    return torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).flatten(-2)
"""
_FUSION = threading.Lock()


def _graph_of(qkv: Tensor, scale: float | None) -> Callable[[Tensor], Tensor] | None:
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    return _attention_graph(qkv.shape, qkv.stride(), qkv.dtype, scale, torch.get_num_threads())


@functools.lru_cache(maxsize=GRAPHS)
def _attention_graph(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, scale: float, threads: int
) -> Callable[[Tensor], Tensor] | None:
    """Compiles attention of qkv with oneDNN Graph; returns None if this is not supported.

    torch offers oneDNN Graph only in TorchScript, as a setting of the process. This function restores the setting.
    """
    try:
        attention: Callable[[Tensor], Tensor] = torch.jit.CompilationUnit(_ATTENTION.format(scale=scale)).attention
        with _FUSION, torch.inference_mode():
            was_enabled = torch.jit.onednn_fusion_enabled()
            torch.jit.enable_onednn_fusion(True)
            try:
                for _ in range(2):  # the first call records shapes, the second compiles
                    attention(torch.empty_strided(shape, stride, dtype=dtype).zero_())
                graph, *_ = str(torch.jit.last_executed_optimized_graph()).split("with prim::")
            finally:
                torch.jit.enable_onednn_fusion(was_enabled)
    except (AttributeError, RuntimeError):  # torch was built without oneDNN Graph
        return None
    return attention if "aten::softmax" not in graph else None


def _normalize(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "layer_norm":  # in a narrow model, half the time of F.layer_norm, which adds Python code
        return torch.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps, False)
    return reference.normalize(x, norm)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Returns True if linear layers of a dtype can be packed on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return torch.backends.mkl.is_available()
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in names and bool(getattr(torch.ops.mkldnn, names[dtype])())


def packing_reasons(attention: AttentionParts, mlp: MlpParts) -> list[str]:
    """Returns the reasons why the weights of a block cannot be packed: they need one dtype that this CPU can pack."""
    attention = dataclasses.replace(attention, terms=None)  # their tensors are not packed
    tensors = [tensor for slot in sources(attention, mlp) if (tensor := tensor_of(*slot)) is not None]
    kinds = sorted({f"{tensor.dtype} on {tensor.device.type}" for tensor in tensors})
    if len(kinds) > 1 or tensors[0].device.type != "cpu":
        return [f"with backend 'sdpa', the weights must have one dtype on the CPU, got {', '.join(kinds)}"]
    return [] if can_pack(tensors[0].dtype) else [f"this CPU cannot pack weights in {tensors[0].dtype}"]


def packed_for(parts: BlockParts, x: Tensor) -> Packed | None:
    """Returns the packed linear layers of a block if they support a call with x, else None."""
    packed = parts.frozen
    if not isinstance(packed, Packed) or parts.fp8 is not None or x.dtype is not packed.dtype:
        return None
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return None
    # tracers and dispatch modes (FLOP counters, FakeTensor) do not support packed weights
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None or in_transform():
        return None
    if x.numel() == 0 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    for half in (parts.attention, parts.mlp):  # None if the half must run as modules
        if half is None or half.drops() or half.drops_path():
            return None
    needs_grad = torch.is_grad_enabled() and needs_gradient(x, *parts.watch.owner.parameters())
    return None if needs_grad else packed
