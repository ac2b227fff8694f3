"""The backend "vit_fast" of torch.compile: replaces attention, MLPs and blocks, also those that no module contains.

Dynamo captures the graph and guards its shapes and settings; `reading/regions.py` reads it. What was read becomes one
call. The compiler of the rest, e.g. Inductor, traces this call, also for the gradients.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
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
from ..reading.regions import ATTENTION, Region, Regions, hint, is_linear, is_same_shape, name_of, value_of
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
    regions, done, now = Regions(graph), set[fx.Node](), dict[fx.Node, fx.Node]()
    found: dict[fx.Node, tuple[ModuleReport, _Change | None]] = {}
    for attends in (True, False):
        for seed in regions.nodes:
            if seed in done or _is_fused(seed) or not (name_of(seed) in ATTENTION if attends else is_linear(seed)):
                continue
            region, reasons = regions.read(seed, done)
            change, part, why = None, "attention core" if attends else "MLP", reasons[:1]
            try:
                if region is not None:
                    change, part = _region_change(region, backend), region.recipe.kind
                elif attends:
                    change = _core_change(core_of(seed), regions, backend)
            except UnreadableError as error:
                why = [str(error), *why]
            if change is not None or why:
                found[seed] = _row(seed if region is None else region.nodes[-1], part, change is not None, why), change
                done.update(() if change is None else change[0])
    for _, change in found.values():
        if change is not None:
            nodes, function, inputs = change
            with graph.inserting_before(nodes[-1]):
                new = graph.call_function(function, tuple(now.get(each, each) for each in inputs))
            # for the cache of AOTAutograd
            new.meta = nodes[-1].meta | {"is_wrapped": True, "user_cache_hash": function.__name__}
            nodes[-1].replace_all_uses_with(new)
            now[nodes[-1]] = new
            for node in reversed(nodes):
                graph.erase_node(node)
    return [found[node][0] for node in regions.nodes if node in found]


def _is_fused(node: fx.Node) -> bool:
    classes = [cls for _, cls in (node.meta.get("nn_module_stack") or {}).values()]
    return any(isinstance(cls, type) and issubclass(cls, FusedModule) for cls in classes)


def _row(node: fx.Node, part: str, replaced: bool, why: Sequence[str]) -> ModuleReport:
    """Returns a row with the innermost module that contains a node, or the line of the source if there is none."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    lines = re.findall(r'([^/\\]*)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
    if modules:
        name, cls = modules[-1]
        name, cls = re.sub(r"L\['self'\]\.?", "", name), getattr(cls, "__name__", str(cls))
    else:
        file, line, cls = lines[-1] if lines else ("graph", node.name, "")
        name = f"{file}:{line}"
    notes = tuple(f"only the core: {reason}" for reason in why if replaced)
    return ModuleReport(name, cls, part, replaced, () if replaced else tuple(why), notes)


def _resolved(backend: str, x: Tensor, weights: Sequence[Tensor], head_dim: int | None) -> str:
    """Resolves "auto", also by what the kernels support. Depends on autocast, so call it while tracing."""
    fits = x.dtype in DTYPES and all(each.dtype in (torch.float32, matmul_dtype(x)) for each in weights)
    fits = fits and (head_dim is None or MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM)
    return "sdpa" if backend == "auto" and not fits else resolve_backend(backend, x.device, x.dtype)


def _like(y: fx.Node, function: Callable[..., Tensor], *content: object) -> Callable[..., Tensor]:
    """Gives a function the dtype and the order of strides of a node, and a name that tells what it computes."""
    value = value_of(y)
    dtype, strides = value.dtype, list(map(hint, value.stride()))
    order = sorted(range(len(strides)), key=lambda i: -strides[i])
    back = sorted(range(len(order)), key=order.__getitem__)

    def replacement(*tensors: Tensor) -> Tensor:
        return function(*tensors).to(dtype).permute(order).contiguous().permute(back)

    text = repr((content, dtype, order, resolve_backend("auto", value.device), matmul_dtype(value), __version__))
    replacement.__name__ = f"vit_fast_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return replacement


def _region_change(region: Region, backend: str) -> _Change:
    recipe, places = region.recipe, [(at, name, transposed) for at, name, _, transposed in region.weights]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        root = nn.Module()
        for (at, name, transposed), weight in zip(places, weights):
            holder = vars(root).setdefault(f"holder{at}", nn.Module())
            vars(holder).setdefault("bias", None)
            vars(holder)[name] = weight.t() if transposed else weight
        reading, head_dim = recipe.reading(root), None
        if (half := reading.attention) is not None:
            head_dim = sum(tensor_of(*slot).shape[0] for slot in half.qkv.weights) // (3 * half.num_heads)
        chosen = _resolved(backend, x, weights, head_dim)
        parts = BlockParts(half, reading.mlp, (), (), watch=None)  # type: ignore[arg-type]
        if chosen == "triton" and runs_whole(parts):
            return reading.restored(run_block(parts, reading.batched(x))[0], x)
        return run_reading(reading, x, chosen)

    inputs = (region.x, *(node for _, _, node, _ in region.weights))
    return region.nodes, _like(region.nodes[-1], run, recipe, places, backend), inputs


def _core_change(core: Core, regions: Regions, backend: str) -> _Change:
    q, v = value_of(core.q), value_of(core.v)
    if core.nodes[1:] == () and _resolved(backend, q, (), q.shape[-1]) != "triton":
        raise UnreadableError("it is scaled_dot_product_attention already")
    dtypes = {value_of(each).dtype for each in (core.q, core.k, core.v)}
    if len(dtypes) > 1 or not is_same_shape(q.shape[-1:], v.shape[-1:]):
        raise UnreadableError("its q, k and v have different dtypes or widths")
    if not regions.is_closed(core.nodes):
        raise UnreadableError("other operators write into tensors between its operators")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, k = q.shape[:-2], k.mT if core.transposes else k
        q, k, v = (each.reshape(-1, *each.shape[-3:]) for each in (q, k, v))  # [B, H, N, D]
        out = attention(q, k, v, scale=core.scale, backend=_resolved(backend, q, (), q.shape[-1]))
        return out.reshape(*batch, *out.shape[2:]).permute(core.order)

    content = (core.scale, core.order, core.transposes, backend)
    return core.nodes, _like(core.nodes[-1], run, *content), (core.q, core.k, core.v)
