"""The backend "vit_fast" of torch.compile: replaces attention, MLPs and blocks, also those that no module contains.

Dynamo captures the graph and guards its shapes and settings; `reading/regions.py` reads it. What was read becomes one
call. The compiler of the rest, e.g. Inductor, traces this call, also for the gradients.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..blocks.block import run_block, runs_whole
from ..blocks.fused import FusedModule
from ..blocks.fusion_report import FusionReport, ModuleReport, table
from ..blocks.parts import BlockParts, tensor_of
from ..errors import check_choice
from ..ops.attention import attention
from ..ops.attention_operator import MAX_HEAD_DIM, MIN_HEAD_DIM
from ..ops.backends import BACKENDS, resolve_backend
from ..ops.descriptions import DTYPES
from ..ops.registration import matmul_dtype
from ..reading.capture import UnreadableError
from ..reading.cores import Core, core_of
from ..reading.proof import run_reading
from ..reading.regions import ATTENTION, Found, Regions, hint, is_linear, name_of, value_of
from ..version import __version__

_LOG = logging.getLogger(__name__)
_REST = ("inductor", "eager")
_NAMES = {"attention, norm + MLP": "blocks", "attention": "attention layers", "attention core": "attention cores"}
_Change = tuple[tuple[fx.Node, ...], Callable[..., Tensor], Sequence[fx.Node]]  # nodes, their replacement, its inputs


class Backend:
    """A backend for torch.compile, with a report for each of the last 100 graphs."""

    __name__ = "vit_fast"

    def __init__(self) -> None:
        self.reports: deque[GraphReport] = deque(maxlen=100)

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
        return inductor(graph_module, example_inputs)

    def reset(self) -> None:
        """Forgets the CUDA graphs of Inductor, for torch.compiler.reset()."""
        if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
            trees.reset_cudagraph_trees()


backend = Backend()  # the entry point of the package


class GraphReport(FusionReport):
    """Report of a graph of torch.compile. Print it to show a table."""

    def __str__(self) -> str:
        counts = Counter(_NAMES.get(row.part, "MLPs") for row in self.fused)
        replaced = ", ".join(f"{counts[name]} {name}" for name in (*_NAMES.values(), "MLPs"))
        return "\n".join([f"replaced {replaced}; skipped {len(self.skipped)}", *table(self.modules, "replaced")])


def replace(graph_module: fx.GraphModule, backend: str) -> GraphReport:
    """Replaces what can be read in a graph, and in the graphs inside it, e.g. of checkpoints."""
    rows: list[ModuleReport] = []
    for each in graph_module.modules():
        if isinstance(each, fx.GraphModule):
            rows += _rewrite(each.graph, backend)
            each.recompile()
    return GraphReport(backend, tuple(rows))


def _rewrite(graph: fx.Graph, backend: str) -> list[ModuleReport]:
    regions, done = Regions(graph), set[fx.Node]()
    rows: dict[fx.Node, ModuleReport] = {}
    changes: list[_Change] = []
    for attends in (True, False):
        for seed in regions.nodes:
            if seed in done or _is_fused(seed) or not (name_of(seed) in ATTENTION if attends else is_linear(seed)):
                continue
            found, reasons = regions.read_around(seed, done)
            if found is not None:
                changes.append(_parts_change(found, backend))
                rows[seed] = _row(found.region.y, found.recipe.kind)
            elif attends:
                try:
                    changes.append(_core_change(core_of(seed), regions, backend))
                    rows[seed] = _row(seed, "attention core", notes=[f"only the core: {each}" for each in reasons[:1]])
                except UnreadableError as error:
                    rows[seed] = _row(seed, "attention core", [str(error), *reasons[:1]])
            elif reasons:
                rows[seed] = _row(seed, "norm + MLP", reasons[:1])
            done.update(changes[-1][0] if seed in rows and rows[seed].fused else ())
    now: dict[fx.Node, fx.Node] = {}
    for nodes, function, inputs in changes:
        y = nodes[-1]
        with graph.inserting_before(y):
            new = graph.call_function(function, tuple(now.get(each, each) for each in inputs))
        new.meta = y.meta | {"is_wrapped": True, "user_cache_hash": function.__name__}  # for the cache of AOTAutograd
        y.replace_all_uses_with(new)
        now[y] = new
        for node in reversed(nodes):
            graph.erase_node(node)
    return [rows[node] for node in regions.nodes if node in rows]


def _is_fused(node: fx.Node) -> bool:
    return any(isinstance(cls, type) and issubclass(cls, FusedModule) for _, cls in _modules(node))


def _modules(node: fx.Node) -> list[tuple[str, Any]]:
    """Returns path and class of the modules whose forward contains a node, outermost first."""
    return list((node.meta.get("nn_module_stack") or {}).values())


def _row(node: fx.Node, part: str, reasons: Sequence[str] = (), notes: Sequence[str] = ()) -> ModuleReport:
    """Names the innermost module, or the line of the source if there is none."""
    modules, lines = (
        _modules(node),
        re.findall(r'File "(.*)", line (\d+), in (\w+)', node.meta.get("stack_trace") or ""),
    )
    if modules:
        path, cls = modules[-1]
        name, class_name = (
            re.sub(r"_modules\['(\w+)'\]|L\['self'\]\.?", r"\1", path),
            getattr(cls, "__name__", str(cls)),
        )
    else:
        path, line, class_name = lines[-1] if lines else ("graph", "0", node.name)
        name = f"{Path(path).name}:{line}"
    return ModuleReport(name, class_name, part, not reasons, tuple(reasons), tuple(notes))


def _backend_of(backend: str, x: Tensor, tensors: Sequence[Tensor], head_dim: int) -> str:
    """Resolves "auto" for tensors that the kernels may not support. Depends on autocast, so call it while tracing."""
    fits = head_dim == 0 or MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
    fits = fits and x.dtype in DTYPES and all(each.dtype in (torch.float32, matmul_dtype(x)) for each in tensors)
    return "sdpa" if backend == "auto" and not fits else resolve_backend(backend, x.device, x.dtype)


def _named(function: Callable[..., Tensor], y: fx.Node, *content: object) -> Callable[..., Tensor]:
    """Gives a function a name that depends on what it computes, and an output like that of a node."""
    value = value_of(y)
    dtype, strides = value.dtype, list(map(hint, value.stride()))
    order = sorted(range(len(strides)), key=lambda i: -strides[i])
    back = sorted(range(len(order)), key=order.__getitem__)

    def replacement(*tensors: Tensor) -> Tensor:
        return function(*tensors).to(dtype).permute(order).contiguous().permute(back)

    text = repr((content, dtype, order, value.device, torch.is_autocast_enabled(value.device.type), __version__))
    replacement.__name__ = f"vit_fast_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return replacement


def _parts_change(found: Found, backend: str) -> _Change:
    recipe, places = found.recipe, [(at, name, transposed) for at, name, _, transposed in found.weights]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        root = nn.Module()
        for (at, name, transposed), weight in zip(places, weights):
            holder = vars(root).setdefault(f"holder{at}", nn.Module())
            vars(holder).setdefault("bias", None)
            vars(holder)[name] = weight.t() if transposed else weight
        reading, head_dim = recipe.reading(root), 0
        if (half := reading.attention) is not None:
            head_dim = sum(tensor_of(*slot).shape[0] for slot in half.qkv.weights) // (3 * half.num_heads)
        chosen = _backend_of(backend, x, weights, head_dim)
        parts = BlockParts(half, reading.mlp, (), (), watch=None)  # type: ignore[arg-type]
        if chosen == "triton" and half is not None and half.norm is not None and runs_whole(parts):
            return reading.restored(run_block(parts, reading.batched(x))[0], x)
        return run_reading(reading, x, chosen)

    inputs = (found.region.x, *(node for _, _, node, _ in found.weights))
    y = found.region.y
    return (
        found.region.nodes,
        _named(run, y, recipe, places, backend, resolve_backend(backend, value_of(y).device)),
        inputs,
    )


def _core_change(core: Core, regions: Regions, backend: str) -> _Change:
    y, (q, *_) = core.nodes[-1], (value_of(node) for node, _ in core.operands)
    resolved = _backend_of(backend, q, (), q.shape[core.operands[0][1][-1]])
    if not core.is_spelled and resolved != "triton":
        raise UnreadableError(f"it is scaled_dot_product_attention already, for which {resolved} has nothing faster")
    if not regions.is_closed(core.nodes):
        raise UnreadableError("tensors are written while it runs")
    orders, divides = [order for _, order in core.operands], [each for _, each in core.factors]

    def run(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
        q, k, v = (each.permute(order) for each, order in zip((q, k, v), orders))
        for factor, divide in zip(factors, divides):
            q = q / factor if divide else q * factor
        batch = q.shape[:-3]
        q, k, v = (each.flatten(0, -4) if each.dim() > 4 else each.view(-1, *each.shape[-3:]) for each in (q, k, v))
        chosen = _backend_of(backend, q, (), q.shape[-1])
        out = attention(q, k, v, scale=core.scale, backend=chosen)
        return out.view(*batch, *out.shape[1:]).permute(core.order)

    inputs = (*(node for node, _ in core.operands), *(node for node, _ in core.factors))
    return core.nodes, _named(run, y, orders, divides, core.scale, core.order, backend, resolved), inputs
