"""Runs frozen blocks on the CPU with weights that are packed once, instead of in every call of `F.linear`.

`freeze` selects the implementation of each linear layer (`ops/packed_linear.py`) and of attention by a measurement
(`fastest.py`): oneDNN Graph or torch's flash attention, and with a bias or windows also matmuls and softmax.

LayerNorm is not folded, because a LayerNorm without weight and bias is not faster on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import qk_norm_rope, reference
from ..ops.attention import attention_among
from ..ops.attention_bias import additive_mask, by_groups, with_rel
from ..ops.descriptions import Keys, Norm, Rope, ScoreTerms
from ..ops.packed_linear import PackedLinear, can_pack, implementations
from ..ops.registration import needs_gradient
from .fastest import Timed, fastest, is_traced, on_images
from .frozen import Frozen
from .parts import AttentionParts, BlockParts, MlpParts, sources, tensor_of

GRAPHS = 64  # maximum number of attention graphs in the cache
# Maximum bytes of a linear layer's output, and per thread; the larger one counts. Larger batches are split, because
# malloc maps buffers of 32 MiB or more anew in every call.
GROUP_BYTES, THREAD_BYTES = 2**24, 2**21
TOKENS = (197, 50, 577)  # numbers of tokens that attention is measured with; linear layers only with the first


class Packed(Frozen):
    """The packed linear layers of a block or half; packed again, like a `Frozen`, when the weights change."""

    _selected: dict[str, str] | None = None  # implementations by name of the layer and number of tokens of attention

    def _recompute(self) -> None:
        attention, mlp = self.attention, self.mlp
        linears: dict[str, tuple[Any, ...]] = {}  # weight, bias, LayerScale and activation
        steps: dict[str, Any] = {"first": None, "second": None, "gate": None, "terms": None}
        norms: list[Norm] = []
        for name, half in (("first", attention), ("second", mlp)):
            if half is not None:
                norm, branch, end = (each.now() for each in (half.norm, half.branch_norm, half.end_norm))
                norms += (norm, branch, end)
                steps[name] = SimpleNamespace(norm=norm, branch=branch, end=end, residual=half.residual)
        if attention is not None:
            linears["qkv"] = *attention.qkv.tensors(), None, None
            linears["proj"] = *attention.with_scale(attention.proj), None
            steps |= {"heads": attention.num_heads, "scale": attention.scale}
            steps["qk_norm"] = None if attention.qk_norm is None else attention.qk_norm.now()
            if attention.terms is not None and not attention.terms.per_call:
                steps["terms"] = attention.terms.now(torch.device("cpu"))
        if mlp is not None:
            linears["fc1"] = *mlp.fc1.tensors(), None, mlp.activation if mlp.gate is None else None
            linears["fc2"] = *mlp.with_scale(mlp.fc2), None
            linears |= {} if mlp.gate is None else {"gate": (*mlp.gate.tensors(), None, mlp.activation)}
            steps["inner_norm"] = None if mlp.inner_norm is None else mlp.inner_norm.now()
        if self._selected is None:
            _reuse_freed_buffers()
            self._selected = _select(linears, steps, self.dtype)
        in_place = {id(tensor) for norm in norms for tensor in (norm.weight, norm.bias)}
        copied: set[int] = set()
        for name, tensors in linears.items():
            steps[name] = PackedLinear(*tensors, implementation=self._selected[name])
            (in_place if steps[name].in_place else copied).update(map(id, tensors))
        self.in_place = in_place - copied
        attends = {tokens: self._selected.get(f"attend {tokens}", "") for tokens in TOKENS}
        attend: Callable[..., Tensor] = functools.partial(_attend, attends)
        if steps["terms"] is not None:
            attend = functools.partial(_attend_terms, self._selected["terms"], _with_one_bias(steps["terms"]))
        first, *_ = linears.values()
        width = max(len(weight) for weight, *_ in linears.values())  # of the widest output, for each token
        self._steps = SimpleNamespace(**steps, attend=attend, bytes=width * self.dtype.itemsize / first[0].shape[1])

    def steps(self) -> Any:
        self.ensure_current()
        return self._steps


def run_packed(
    blocks: Sequence[Packed], x: Tensor, rope: Rope | None, keys: Keys | None, outputs: int | None = None,
    terms: ScoreTerms | None = None,  # of a single block, if they depend on the call
) -> Tensor:  # fmt: skip
    """Runs blocks on [B, N, C] or [total, C]; the last one computes only the first `outputs` tokens (None: all)."""
    steps = [packed.steps() for packed in blocks]  # first, because operators wait while Python runs
    groups: Sequence[Tensor] = (x,)
    if terms is not None:
        attend = functools.partial(_attend_terms, "flash", _with_one_bias(terms))
        steps = [SimpleNamespace(**vars(step) | {"attend": attend}) for step in steps]
    elif x.numel() * steps[0].bytes > GROUP_BYTES and keys is None and (rope is None or rope.cos.ndim == 2):
        most = max(GROUP_BYTES, THREAD_BYTES * torch.get_num_threads())
        images = max(1, int(most / (x[0].numel() * max(step.bytes for step in steps))))  # that can run in a group
        groups = x.split(math.ceil(len(x) / math.ceil(len(x) / images)))
    for step in steps[:-1]:
        groups = [_run_block(each, step, rope, keys, None) for each in groups]
    groups = [_run_block(each, steps[-1], rope, keys, outputs) for each in groups]
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _run_block(x: Tensor, step: Any, rope: Rope | None, keys: Keys | None, outputs: int | None) -> Tensor:
    y = x
    if step.first is not None:
        normed = _normalize(x, step.first.norm)
        qkv = step.qkv(normed)
        qkv = qkv.view(*qkv.shape[:-1], 3, step.heads, -1)
        if rope is not None or step.qk_norm is not None:
            qkv = qk_norm_rope(qkv, qk_norm=step.qk_norm, rope=rope, backend="sdpa")
        if keys is None:
            mixed = step.attend(qkv, step.scale, outputs)
        else:
            mixed = attention_among(qkv, keys, scale=step.scale, terms=step.terms, backend="sdpa").flatten(-2)
        if outputs is not None:
            mixed, x, normed = mixed[:, :outputs], x[:, :outputs].contiguous(), normed[:, :outputs].contiguous()
        y = _ended(step.proj, mixed, step.first, {"tokens": x, "normed": normed})
    if step.second is None:
        return y
    x = x if step.second.residual == "attention" else y
    normed = _normalize(x, step.second.norm)
    hidden = step.fc1(normed) if step.gate is None else step.gate(normed).mul_(step.fc1(normed))
    if step.inner_norm is not None:
        hidden = _normalize(hidden, step.inner_norm)
    return _ended(step.fc2, hidden, step.second, {"tokens": x, "normed": normed, "attention": y})


def _ended(linear: PackedLinear, x: Tensor, half: Any, residuals: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of a half whose last linear layer gets x."""
    residual = residuals.get(half.residual)
    if half.branch.kind == "none":
        return _normalize(linear(x, residual), half.end)
    y = _normalize(linear(x), half.branch)
    return _normalize(y if residual is None else y.add_(residual), half.end)


def _attend(by_tokens: dict[int, str], qkv: Tensor, scale: float | None, outputs: int | None) -> Tensor:
    """Returns attention [B, outputs, H * D] of the first `outputs` queries (None: all) of qkv [B, N, 3, H, D].

    `by_tokens` are implementations ("graph" is oneDNN Graph) for some numbers of tokens. The nearest one counts.
    """
    if outputs is None and "graph" in by_tokens.values():
        nearest = min(by_tokens, key=lambda tokens: abs(math.log(tokens / qkv.shape[1])))
        if by_tokens[nearest] == "graph" and (graph := _graph_of(qkv, scale)) is not None:
            return graph()
    q, k, v = qkv.transpose(1, 3).unbind(2)
    q = q if outputs is None else q[:, :, :outputs]
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(-2)


def _with_one_bias(terms: ScoreTerms) -> ScoreTerms:
    """Replaces bias and window mask by their sum [W or 1, H or 1, N, M], whose row b % W belongs to batch element b."""
    W = 1 if terms.window_mask is None else len(terms.window_mask)
    bias = reference.score_bias(terms._replace(rel_h=None, rel_w=None), W)
    return terms._replace(bias=bias if bias is None or bias.dim() == 4 else bias[None], window_mask=None)


def _attend_terms(by: str, terms: ScoreTerms, qkv: Tensor, scale: float | None, outputs: int | None = None) -> Tensor:
    """Returns attention [B, N, H * D] with `terms` of `_with_one_bias`, by "flash", "graph" or "matmul"."""
    if terms.groups is not None:
        if terms.groups.numel() != qkv.shape[1]:
            raise ValueError(f"x must have {terms.groups.numel()} tokens for windows, got {qkv.shape[1]}")
        alone = terms._replace(groups=None)
        return by_groups(lambda windows: _attend_terms(by, alone, windows, scale), qkv, terms.groups)
    q, k, v = qkv.transpose(1, 3).unbind(2)
    if terms.bias is not None and len(terms.bias) not in (1, len(q)):
        terms = terms._replace(bias=terms.bias[torch.arange(len(q)) % len(terms.bias)])
    mask = additive_mask(with_rel(terms, q), q, None)
    if by == "graph" and (graph := _graph_of(qkv, scale, mask)) is not None:
        return graph()
    if terms.scale is not None:
        q, scale = (q * terms.scale[:, None, None]).to(q.dtype), 1.0
    if by == "matmul":
        scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
        mixed = (scores if mask is None else scores.add_(mask)).softmax(-1) @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return mixed.transpose(1, 2).flatten(-2)


def _select_for_terms(steps: dict[str, Any], dtype: torch.dtype, channels: int) -> str:
    """Returns the fastest implementation of attention with the terms of a block, for one image."""
    terms = _with_one_bias(steps["terms"])
    if terms.bias is not None and bool((terms.bias == -torch.inf).all(-1).any()):
        return "flash"  # the only one that returns 0 for queries without keys
    tokens = TOKENS[0] if terms.bias is None else terms.bias.shape[-1]
    if terms.rel_h is not None and terms.rel_w is not None:
        tokens = len(terms.rel_h) * len(terms.rel_w)
    if terms.groups is not None:
        tokens = terms.groups.numel()
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in terms]
    key = f"attention, {dtype}, {tokens} tokens, {steps['heads']} heads, {channels} channels, terms {shapes}"
    names = ["flash", "matmul", *(["graph"] if dtype != torch.float16 and terms.scale is None else [])]

    def build(by: Mapping[str, str], timed: Timed) -> Callable[[], object]:
        attend = timed(key, functools.partial(_attend_terms, by[key], terms))
        return on_images((tokens, 3, steps["heads"], channels), dtype, lambda qkv: attend(qkv, None))

    return fastest({key: names}, build)[key]


def _select(linears: dict[str, tuple[Any, ...]], steps: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Returns the fastest implementation of each linear layer, and of attention for some numbers of tokens.

    Measures linear layers inside of a block, because the contents of the caches differ from a loop over one layer: on
    an AMD EPYC (Zen 3), MKL is faster in a loop, and oneDNN in a block.
    """
    inputs, heads = next(iter(linears.values()))[0].shape[1], steps.get("heads", 0)
    width = linears["proj"][0].shape[1] if heads else 0
    keys, names = {}, {}
    for name, (weight, bias, _, activation) in linears.items():
        keys[name] = f"{name} {tuple(weight.shape)}, {dtype}, {activation}, bias {bias is not None}"
        names[keys[name]] = implementations(dtype)

    def build(by: Mapping[str, str], timed: Timed, tokens: int) -> Callable[[], object]:
        layers: dict[str, Any] = {"terms": None, "scale": None}  # terms depend on the tokens
        if heads:
            layers["attend"] = timed(keys["attend"], functools.partial(_attend, {tokens: by[keys["attend"]]}))
        if tokens != TOKENS[0]:
            attend = layers["attend"]
            return on_images((tokens, 3, heads, width // heads), dtype, lambda qkv: attend(qkv, None, None))
        for name, tensors in linears.items():
            layers[name] = timed(keys[name], PackedLinear(*tensors, implementation=by[keys[name]]))
        step = SimpleNamespace(**steps | layers)
        return on_images((tokens, inputs), dtype, lambda x: _run_block(x, step, None, None, None))

    selected: dict[str, str] = {}
    attends = ["flash"] if dtype == torch.float16 or steps["terms"] is not None else ["flash", "graph"]
    for tokens in TOKENS if heads else TOKENS[:1]:
        measured = names if tokens == TOKENS[0] else {}
        if heads:
            key = f"attention, {dtype}, {tokens} tokens, {heads} heads, width {width}"
            keys["attend"] = keys[f"attend {tokens}"] = key
            measured = measured | {key: attends}
        selected |= fastest(measured, functools.partial(build, tokens=tokens))
    found = {name: selected[key] for name, key in keys.items()}
    if steps["terms"] is not None:
        found["terms"] = _select_for_terms(steps, dtype, width // heads)
    return found


_ATTENTION = """
def attention(qkv{argument}):
    q, k, v = qkv.transpose(1, 3).unbind(2)
    scores = torch.matmul(q, k.transpose(-1, -2)) * {scale!r}{added}
    return torch.matmul(torch.softmax(scores, -1), v).transpose(1, 2).flatten(-2)
"""
_FUSION = threading.Lock()


def _graph_of(qkv: Tensor, scale: float | None, mask: Tensor | None = None) -> Callable[[], Tensor] | None:
    inputs, scale = (qkv,) if mask is None else (qkv, mask), qkv.shape[-1] ** -0.5 if scale is None else scale
    layouts = tuple((tensor.shape, tensor.stride()) for tensor in inputs)
    graph = _attention_graph(layouts, qkv.dtype, scale, torch.get_num_threads())
    return None if graph is None else functools.partial(graph, *inputs)


@functools.lru_cache(maxsize=GRAPHS)
def _attention_graph(
    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...], dtype: torch.dtype, scale: float, threads: int
) -> Callable[..., Tensor] | None:
    """Compiles attention of qkv and, if there are two layouts (shape, strides), of a mask with oneDNN Graph.

    Returns None if this is not supported.

    torch offers oneDNN Graph only in TorchScript, as a setting of the process. This function restores the setting.
    """
    try:
        argument, added = (", mask", " + mask") if len(layouts) > 1 else ("", "")
        source = _ATTENTION.format(scale=scale, argument=argument, added=added)
        attention: Callable[..., Tensor] = torch.jit.CompilationUnit(source).attention
        with _FUSION, torch.inference_mode():
            was_enabled = torch.jit.onednn_fusion_enabled()
            torch.jit.enable_onednn_fusion(True)
            try:
                for _ in range(2):  # the first call records shapes, the second compiles
                    attention(*(torch.empty_strided(*layout, dtype=dtype).zero_() for layout in layouts))
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
def _reuse_freed_buffers() -> None:
    """Lets glibc's malloc reuse freed buffers, instead of returning them to the system.

    After a mapping of at most 32 MiB is freed, malloc maps only larger buffers, and releases memory less often. For
    vit_tiny at batch 8 on an AMD EPYC (Zen 3, 2026-11), 3,800 page faults per call took 4 to 12 % of the time.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")


def packing_reasons(attention: AttentionParts | None, mlp: MlpParts | None) -> list[str]:
    """Returns the reasons why the weights of a block cannot be packed: they need one dtype that this CPU can pack."""
    attention = attention and dataclasses.replace(attention, terms=None)  # their tensors are not packed
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
    # few functions, because each takes microseconds after a large operator: the CPU's caches do not contain its code
    if type(x) is not Tensor or not x.is_cpu or x.numel() == 0 or is_traced():
        return None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cpu"):
        return None
    for half, own in zip(parts.halves, (packed.attention, packed.mlp)):  # None if the half must run as modules
        if own is not None and (
            half is None or (half.dropouts and half.drops()) or (half.drop_path and half.drops_path())
        ):
            return None
    needs_grad = torch.is_grad_enabled() and needs_gradient(x, *parts.watch.owner.parameters())
    return None if needs_grad else packed
