"""The backend "vit_fast" of torch.compile: replaces attention cores, also those that no module contains.

Dynamo captures the graph and guards its shapes and settings; `reading/cores.py` reads it. Each core becomes one call.
The compiler of the rest, e.g. Inductor, traces this call, also for the gradients.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..blocks.fused import FusedModule
from ..blocks.fusion_report import FusionReport, ModuleReport, table
from ..errors import check_choice
from ..ops.attention import attention
from ..ops.attention_operator import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..ops.backends import BACKENDS, resolve_backend
from ..ops.descriptions import DTYPES
from ..ops.registration import matmul_dtype
from ..reading.capture import UnreadableError
from ..reading.cores import Core, core_of, hint, name_of, value_of
from ..version import __version__

_LOG = logging.getLogger(__name__)
_REST = ("inductor", "eager")
_MODULE = "multi_head_attention_forward"  # of nn.MultiheadAttention


class Backend:
    """A backend for torch.compile, with a report for each of the last 100 graphs."""

    __name__ = "vit_fast"

    def __init__(self) -> None:
        self.reports: deque[GraphReport] = deque(maxlen=100)
        self.reset: Callable[[], None] = lambda: None

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Compiles a graph of Dynamo.

        Args:
            graph_module: The graph, which is changed.
            example_inputs: Its inputs.
            mode: Mode of Inductor; see torch.compile.
            options: "rest" is the compiler of what is not replaced, "inductor" (default) or "eager". "backend" is the
                backend of the operators, by default "auto"; see `vit_fast.ops.attention`. Inductor gets all others.
        Raises:
            ValueError: an option is unknown, or rest="eager" with a mode or with options of Inductor.
        """
        others = dict(options or {})
        rest, backend = others.pop("rest", "inductor"), others.pop("backend", "auto")
        check_choice("options['rest']", rest, _REST)
        check_choice("options['backend']", backend, BACKENDS)
        if rest == "eager" and (mode or others):
            raise ValueError(f"only Inductor has modes and other options, got {mode or others} with rest='eager'")
        report = replace(graph_module, backend)
        self.reports.append(report)
        _LOG.info("%s", report)
        if rest == "eager":
            return graph_module.forward
        inductor = torch._TorchCompileInductorWrapper(mode or "default", others or None, None)
        self.reset = inductor.reset  # of CUDA graphs, for torch.compiler.reset()
        return inductor(graph_module, example_inputs)


backend = Backend()  # the entry point of the package


class GraphReport(FusionReport):
    """Report of a graph of torch.compile. Print it to show a table."""

    def __str__(self) -> str:
        counts = f"replaced {len(self.fused)} attention cores, skipped {len(self.skipped)}"
        return "\n".join([counts, *table(self.modules, "replaced")])


def replace(graph_module: fx.GraphModule, backend: str) -> GraphReport:
    """Replaces what can be read in a graph, and in the graphs inside it, e.g. of checkpoints."""
    rows: list[ModuleReport] = []
    for each in graph_module.modules():
        if isinstance(each, fx.GraphModule):
            rows += _rewrite(each.graph, backend)
            each.recompile()
    return GraphReport(backend, tuple(rows))


def _rewrite(graph: fx.Graph, backend: str) -> list[ModuleReport]:
    rows: list[ModuleReport] = []
    for node in list(graph.nodes):
        if name_of(node) not in ("softmax", "scaled_dot_product_attention", _MODULE) or _is_fused(node):
            continue
        try:
            if name_of(node) == _MODULE:
                raise UnreadableError("it is one function with its linear layers: call vit_fast.fuse first")
            core = core_of(node)
            function, y = _replacement(core, backend), core.nodes[-1]
        except UnreadableError as error:
            rows.append(_row(node, (str(error),)))
            continue
        rows.append(_row(node))
        with graph.inserting_before(y):
            new = graph.call_function(function, (core.q, core.k, core.v))
        new.meta = y.meta | {"is_wrapped": True, "user_cache_hash": function.__name__}  # for the cache of AOTAutograd
        y.replace_all_uses_with(new)
        for each in reversed(core.nodes):
            graph.erase_node(each)
    return rows


def _is_fused(node: fx.Node) -> bool:
    classes = [cls for _, cls in (node.meta.get("nn_module_stack") or {}).values()]
    return any(isinstance(cls, type) and issubclass(cls, FusedModule) for cls in classes)


def _row(node: fx.Node, reasons: tuple[str, ...] = ()) -> ModuleReport:
    """Returns a row with the innermost module that contains a node, or the line of the source if there is none."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    lines = re.findall(r'([^/\\]*)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
    if modules:
        name, cls = modules[-1]
        name, cls = re.sub(r"L\['self'\]\.?", "", name), getattr(cls, "__name__", str(cls))
    else:
        file, line, cls = lines[-1] if lines else ("graph", node.name, "")
        name = f"{file}:{line}"
    return ModuleReport(name, cls, "attention core", not reasons, reasons)


def _resolved(backend: str, q: Tensor) -> str:
    """Resolves "auto", also by what the kernels support. Depends on autocast, so call it while tracing."""
    fits = q.dtype in DTYPES and MIN_HEAD_DIM <= q.shape[-1] <= MAX_HEAD_DIM
    return "sdpa" if backend == "auto" and not fits else resolve_backend(backend, q.device, q.dtype)


def _replacement(core: Core, backend: str) -> Callable[..., Tensor]:
    """Returns a function of q, k and v with the dtype and the order of strides of the core."""
    q, value = value_of(core.q), value_of(core.nodes[-1])
    if name_of(core.nodes[0]) == "scaled_dot_product_attention" and _resolved(backend, q) != "triton":
        raise UnreadableError("it is scaled_dot_product_attention already")
    dtype, strides = value.dtype, list(map(hint, value.stride()))
    order = sorted(range(len(strides)), key=lambda i: -strides[i])
    back = sorted(range(len(order)), key=order.__getitem__)

    def replacement(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, k = q.shape[:-2], k.mT if core.transposes else k
        q, k, v = (each.reshape(-1, *each.shape[-3:]) for each in (q, k, v))  # [B, H, N, D]
        out = attention(q, k, v, scale=core.scale, backend=_resolved(backend, q))
        out = out.reshape(*batch, *out.shape[2:]).permute(core.order)
        return out.to(dtype).permute(order).contiguous().permute(back)

    content = (core.scale, core.order, core.transposes, backend, dtype, order, _resolved(backend, q), matmul_dtype(q))
    text = repr((content, __version__))
    replacement.__name__ = f"vit_fast_{hashlib.sha256(text.encode()).hexdigest()[:16]}"  # tells what it computes
    return replacement
