"""Whole models of torch as candidates: ours on each of its backends, the libraries' with the very same weights, a model
as it was given by id, file or function, these after vit_fast.fuse, and what vit_fast.optimize found.

A library's model is built by its own class, then given our weights under its own names; one that the library cannot
express is refused with every reason. A bench does not search: where optimize has kept no answer, the row says which
command finds one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast.errors import UnsupportedInputError
from vit_fast.fusion.freezing import freeze
from vit_fast.fusion.fuse import fuse, set_backend
from vit_fast.libraries import transformers
from vit_fast.libraries.known import PEERS
from vit_fast.libraries.peers import take_weights
from vit_fast.measure.candidate import PRECISIONS, Candidate, Precision
from vit_fast.model import VisionTransformer

from . import candidates_operators
from .candidates import Task, get_candidate, register
from .models import OutputOf

# Share of the largest output that e4m3 and the lossy formats of vit_fast.optimize may be off: other number formats, of
# which the rule for fp32 says nothing; of the last the search has judged the answers.
LOSSY_TOLERANCE = 0.35


def build(backend: str, task: Task) -> nn.Module:
    """Our model with the task's weights, or our operator."""
    if task.model.operator is not None:
        return candidates_operators.build(backend, task)
    config, weights = task.ours
    with torch.device("meta"):
        model = VisionTransformer(config, data_config=task.model.data)
    model = model.to_empty(device=task.device).to(task.dtype)
    model.load_state_dict(dict(weights))
    set_backend(model, backend)
    return model.eval().requires_grad_(False)


def build_as(candidate: Candidate, task: Task) -> nn.Module:
    """Our model with the kernels, changed as a candidate of vit_fast.optimize.

    Raises:
        UnsupportedInputError: the candidate is not available here; every reason.
    """
    from vit_fast.measure.build import changed_copy
    from vit_fast.quantization.fp8 import unable_reasons

    reasons = []
    if candidate.precision == "fp8":  # before anything is built in vain
        reasons = unable_reasons(task.device, task.dtype)
        reasons += [] if task.whole else [f"{task.model.name} is no whole model"]
    if reasons:
        raise UnsupportedInputError("triton-fp8", reasons)
    return changed_copy(candidate, build("triton", task), _example(task, task.batch_size), ())


def _example(task: Task, batch: int) -> Tensor:
    return torch.zeros(batch, *task.model.shape, dtype=task.dtype, device=task.device)


def build_graphs(backend: str, task: Task) -> Callable[[Tensor], Tensor]:
    """The same, frozen, in a captured CUDA graph: as it should be served for one batch size.

    Raises:
        UnsupportedInputError: the task is for a CPU.
    """
    from vit_fast.run.graph_runner import GraphRunner

    return GraphRunner(build(backend, task), _example(task, 1), batch_sizes=(task.batch_size,))


def build_peer(peer: ModuleType, task: Task) -> nn.Module:
    """The model of a library's (see vit_fast.libraries) with our weights, all of them, on the task's device.

    Raises:
        UnsupportedInputError: the library has no such model; every reason.
    """
    config, weights = task.ours
    model = peer.build_peer(config).to(device=task.device, dtype=task.dtype)
    take_weights(model, weights, peer.convert, config)
    model = model.eval().requires_grad_(False)
    return OutputOf(model) if peer is transformers else model


def build_given(task: Task) -> nn.Module:
    """The model itself on the task's device, in its dtype.

    Raises:
        UnsupportedInputError: the task is one of our own shapes.
    """
    if task.model.make is None:
        raise UnsupportedInputError("given", [f"{task.model.name} is no model that was given as a module"])
    return task.model.make().to(task.device, task.dtype).requires_grad_(False)


def define(task: Task) -> nn.Module:
    """Builds the reference of a task: our eager model or operator, or the given model itself."""
    made = build_given(task) if task.model.kind == "given" else get_candidate("eager").make(task)
    assert isinstance(made, nn.Module)
    return made


def build_fused(
    build_model: Callable[[Task], nn.Module], whole: bool, task: Task, *, frozen: bool = False
) -> nn.Module:
    """A model after vit_fast.fuse, by the kernels where they can run.

    Args:
        build_model: What builds it.
        whole: Whether every attention and MLP must be fused, or any; what could not be then stays as it was.
        task: What it is to compute.
        frozen: True to call vit_fast.freeze, too.
    Raises:
        UnsupportedInputError: something in it could not be fused, or nothing; all reasons; or nothing can be frozen.
    """
    model = build_model(task)
    report = fuse(model)
    if whole or not report.fused:
        report.require_all()
    if frozen and not freeze(model):
        raise UnsupportedInputError("freeze", ["no block of this model can be frozen here"])
    return model


def build_optimized(precision: Precision | None, task: Task) -> nn.Module:
    """The model in the way that vit_fast.optimize found in this number format.

    Raises:
        UnsupportedInputError: no answer is kept for it; or what was found cannot be had any more.
    """
    from vit_fast.measure import cache
    from vit_fast.measure.build import build as build_candidate

    module = define(task)
    example = _example(task, task.batch_size)
    answer = cache.find(module, example, precision)
    if answer is None:
        allowed = "" if precision is None else f" --allow {precision}"
        words = f"vit-fast optimize {task.model.name} --batch {task.batch_size}{allowed}"
        raise UnsupportedInputError("optimized", [f"no answer is kept for this here: {words} finds one"])
    with torch.no_grad():
        return build_candidate(answer.choice, module, example, module(example), ())


definition = "our model, plain formulas: the definition"
register("eager", definition, partial(build, "eager"), fullgraph=True)
register("sdpa", "our model, torch's scaled_dot_product_attention", partial(build, "sdpa"), fullgraph=True)
register("triton", "our model, our Triton kernels", partial(build, "triton"), fullgraph=True)
frozen, graphs = "the same, its weights folded and laid out once", "the same, frozen, in a captured CUDA graph"
register("triton-frozen", frozen, partial(build_as, Candidate(frozen=True)), trainable=False)
register("triton-graphs", graphs, partial(build_graphs, "triton"), trainable=False, compilable=False)
in_e4m3 = {"precision": "fp8", "tolerance": LOSSY_TOLERANCE, "trainable": False}
register(
    "triton-fp8",
    "our model, our Triton kernels, linear layers in e4m3, calibrated",
    partial(build_as, Candidate(precision="fp8")),
    **in_e4m3,
)
for name, kernel in (
    ("flash", SDPBackend.FLASH_ATTENTION),
    ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ("efficient", SDPBackend.EFFICIENT_ATTENTION),
):
    confined, context = f"our model, torch's attention confined to its {name} kernel", partial(sdpa_kernel, kernel)
    register(f"sdpa-{name}", confined, partial(build, "sdpa"), fullgraph=True, context=context)
for library in PEERS:
    name, build_it, packages = library.NAME, partial(build_peer, library), (library.NAME,)
    register(name, library.PEER, build_it, packages=packages, peer=True)
    fused, build_whole = f"{name}'s model after vit_fast.fuse", partial(build_fused, build_it, True)
    register(f"{name}+fused", fused, build_whole, packages=packages, fullgraph=True)
    traits = {"packages": packages, "fullgraph": True, "trainable": False}
    register(f"{name}+fused+frozen", f"{fused} and vit_fast.freeze", partial(build_whole, frozen=True), **traits)
as_given = "the model as it was given"
fused, build_some = f"{as_given} after vit_fast.fuse", partial(build_fused, build_given, False)
register("given", as_given, build_given, peer=True)
register("given+fused", fused, build_some)
register("given+fused+frozen", f"{fused} and vit_fast.freeze", partial(build_some, frozen=True), trainable=False)
found = "what vit_fast.optimize found here"
register("optimized", f"{found}, at full precision", partial(build_optimized, None), compilable=False, trainable=False)
for precision in PRECISIONS:
    lossy = {"precision": precision, "tolerance": LOSSY_TOLERANCE, "compilable": False, "trainable": False}
    register(f"optimized-{precision}", f"{found}, in {precision}", partial(build_optimized, precision), **lossy)
