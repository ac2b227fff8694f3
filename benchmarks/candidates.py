"""The candidates of the benchmark: their names, which of them are the default, and the functions that build them.

All candidates of a task have the same weights. To add a candidate, add it to `_all`. A name may have a compile mode:
`timm+compile`, `timm+compile:max-autotune`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast.errors import UnsupportedInputError
from vit_fast.fusion.fuse import fuse, set_backend
from vit_fast.libraries.interface.weight_names import take_weights
from vit_fast.libraries.known import PEERS
from vit_fast.libraries.transformers import hf_model
from vit_fast.measure.candidate import AS_FILE, COMPILE_MODES, PRECISIONS, RUNTIMES, Candidate, Engine, Precision
from vit_fast.model import VisionTransformer

from . import operators
from .models import Model, OutputOf, Task, weights_of

# The most important ones first: the last ones are skipped if time runs out.
DEFAULT_NAMES = {
    "cpu": (
        "timm", "timm+fused+frozen", "openvino", "onnxruntime", "timm+compile:freezing", "timm+fused+compile:freezing",
        "timm+compile", "timm+fused", "transformers", "torchvision", "sdpa", "eager", "onnxruntime-int8",
    ),
    "cuda": (
        "eager", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "triton", "triton-frozen", "triton-graphs",
        "timm", "transformers", "torchvision", "eager+compile", "sdpa+compile", "sdpa+compile:max-autotune",
        "triton+compile", "triton+compile:reduce-overhead", "triton+compile:max-autotune", "timm+compile",
        "timm+compile:max-autotune", "transformers+compile", "timm+fused", "timm+fused+compile", "transformers+fused",
        "optimized", "onnxruntime", "tensorrt", "torchao-int8+compile", "triton-fp8",
        "torchao-fp8+compile",
    ),
}  # fmt: skip
# Without bf16 on a CPU.
FP32_ALONE = ("onnxruntime", "onnxruntime-int8")

_SDPA = ("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
# For other models than our variants, and for parts of models.
NAMES = {
    "given": (
        "given", "given+fused+frozen", "openvino", "onnxruntime", "given+compile:freezing",
        "given+fused+compile:freezing", "given+compile", "given+fused", "given+fused+compile",
    ),
    "onnx": ("onnxruntime", "openvino"),
    "block": ("eager", "sdpa", "triton", "timm", "timm+fused"),
    "attention": ("eager", *_SDPA, "triton", "flex", "flash-attn", "xformers"),
    "mlp": ("eager", "triton", "cublaslt", "transformer-engine", "eager+compile"),
    "matmul": ("eager", "triton"),
}  # fmt: skip


def get_candidate(name: str) -> Candidate:
    """Returns the candidate of this name; otherwise ValueError names the nearest one and all others."""
    if name not in CANDIDATES:
        nearest = difflib.get_close_matches(name, CANDIDATES, n=1, cutoff=0.6)
        hint = f"did you mean {nearest[0]}?" if nearest else f"must be one of {', '.join(CANDIDATES)}"
        raise ValueError(f"unknown candidate {name!r}: {hint}")
    return CANDIDATES[name]


def parse_candidate(word: str) -> Candidate:
    """Returns the candidate of a word such as `timm+compile:max-autotune`; ValueError if there is none."""
    name, separator, mode = word.strip().partition("+compile")
    candidate = get_candidate(name)
    if not separator:
        return candidate
    if mode and not mode.startswith(":"):
        raise ValueError(f"candidate {word!r}: +compile must be followed by :MODE or nothing, got {mode}")
    found = mode[1:] or "default"
    if found not in COMPILE_MODES:
        raise ValueError(f"the compile mode must be one of {', '.join(COMPILE_MODES)}, got {found!r}")
    if not candidate.compilable:
        raise ValueError(f"candidate {name!r} cannot be compiled by torch.compile: use {name!r} alone")
    engine: Any = "compile" if found in ("default", "freezing") else found
    return dataclasses.replace(candidate, engine=engine, frozen=found == "freezing")


def choose(
    names: Sequence[str] | None, device: torch.device, kind: str = "vit-fast", training: bool = False
) -> list[Candidate]:
    """Returns the named candidates, or the default ones for a kind of model (see models.Model) on a device."""
    if names is not None:
        return list({candidate.name: candidate for candidate in map(parse_candidate, names)}.values())
    found = map(parse_candidate, DEFAULT_NAMES[device.type] if kind == "vit-fast" else NAMES[kind])
    return [candidate for candidate in found if candidate.trainable or not training]


# The allowed error of lower precision as a share of the largest output; the accuracy rule is for full precision.
LOSSY_TOLERANCE = 0.35
ORT = ("onnx", "onnxscript", "onnxruntime")

Function = Callable[[Tensor], Tensor]


def make(candidate: Candidate, task: Task) -> Function:
    """Builds a candidate, or its first block if that is the task; UnsupportedInputError lists all reasons."""
    assert candidate.builder is not None
    made: Function = candidate.builder(candidate, task)
    if not task.model.block:
        return made
    blocks = getattr(made, "blocks", None)
    if not isinstance(blocks, nn.Sequential):
        reason = "model.blocks must be an nn.Sequential of blocks that take only tokens"
        raise UnsupportedInputError(candidate.base, [reason])
    block: Function = blocks[0]
    return block


def build_reference(task: Task) -> nn.Module:
    """Builds the reference of a task: our eager model or operator, or the given model itself."""
    given = task.model.kind == "given"
    made = build_given(AS_FILE, task) if given else make(CANDIDATES["eager"], task)
    assert isinstance(made, nn.Module)
    return made


def build(candidate: Candidate, task: Task) -> nn.Module:
    """Builds our model with the task's weights on the candidate's backend, or an operator."""
    backend = candidate.attention or candidate.base
    if task.model.operator is not None:
        return operators.build(backend, task.model.operator, task.weights or {}, task.device)
    config, weights = task.config_and_weights
    with torch.device("meta"):
        model = VisionTransformer(config, data_config=task.model.data)
    model = model.to_empty(device=task.device).to(task.dtype)
    model.load_state_dict(dict(weights))
    set_backend(model, backend)
    return model.eval().requires_grad_(False)


def _build_operator(candidate: Candidate, task: Task) -> nn.Module:
    if task.model.operator is None:
        raise UnsupportedInputError(candidate.base, [f"the model must be a single operator, got {task.model.name}"])
    return build(candidate, task)


def _build_changed(changes: Candidate, candidate: Candidate, task: Task) -> nn.Module:
    """Builds our model with the kernels, and freezes it or converts it to FP8."""
    from vit_fast.measure.build import changed_copy
    from vit_fast.quantization.fp8 import unable_reasons

    if changes.precision == "fp8":  # checked before anything is built
        reasons = unable_reasons(task.device, task.dtype)
        reasons += [] if task.whole else [f"the model must not be a single block or operator, got {task.model.name}"]
        if reasons:
            raise UnsupportedInputError(candidate.base, reasons)
    return changed_copy(changes, build(candidate, task), _images(task, task.batch_size), ())


def _build_graphs(candidate: Candidate, task: Task) -> Function:
    """Captures our frozen model in a CUDA graph."""
    from vit_fast.run.graph_runner import GraphRunner

    return GraphRunner(build(candidate, task), _images(task, 1), batch_sizes=(task.batch_size,))


def _images(task: Task, batch: int) -> Tensor:
    return torch.zeros(batch, *task.model.shape, dtype=task.dtype, device=task.device)


def build_peer(library: ModuleType, candidate: Candidate, task: Task) -> nn.Module:
    """Builds a library's model with our weights."""
    config, weights = task.config_and_weights
    model = library.build_peer(config).to(device=task.device, dtype=task.dtype)
    take_weights(model, weights, library.convert, config)
    model = model.eval().requires_grad_(False)
    return OutputOf(model) if library is hf_model else model


def build_given(candidate: Candidate, task: Task) -> nn.Module:
    """Builds a model that was given by id, file or function."""
    if task.model.make is None:
        reason = f"the model must be timm:NAME, hf:FOLDER or module:function, got {task.model.name}"
        raise UnsupportedInputError("given", [reason])
    return task.model.make().to(task.device, task.dtype).requires_grad_(False)


def _build_fused(
    build_model: Callable[[Candidate, Task], nn.Module], whole: bool, frozen: bool, candidate: Candidate, task: Task
) -> nn.Module:
    """Builds a model and calls vit_fast.fuse; whole: every attention and MLP must be fused, otherwise any part."""
    from vit_fast.fusion.fuse import freeze

    model = build_model(candidate, task)
    report = fuse(model)
    if whole or not report.fused:
        report.require_all()
    if frozen and not freeze(model):
        raise UnsupportedInputError("freeze", ["no block of this model can be frozen"])
    return model


def _build_optimized(candidate: Candidate, task: Task) -> nn.Module:
    """Builds the cached result of vit_fast.optimize in the candidate's precision."""
    from vit_fast.measure import cache
    from vit_fast.measure.build import build as build_candidate

    module = build_reference(task)
    example = _images(task, task.batch_size)
    found = cache.find(module, example, candidate.precision)
    if found is None:
        allowed = "" if candidate.precision is None else f" --allow {candidate.precision}"
        command = f"vit-fast optimize {task.model.name} --batch {task.batch_size}{allowed}"
        raise UnsupportedInputError("optimized", [f"the cache contains no result for this model: run {command}"])
    with torch.no_grad():
        return build_candidate(found.candidate, module, example, module(example), ())


def build_file(candidate: Candidate, task: Task) -> Function:
    """Opens the export of the task's model, or the given ONNX file, in the candidate's runtime."""
    from vit_fast.measure.runtimes import open_file

    fp32, on_cpu = task.dtype == torch.float32, task.device.type == "cpu"
    in_openvino, bf16 = candidate.engine == "openvino", task.dtype == torch.bfloat16
    given, found = task.model.onnx is not None, f"{task.dtype} on {task.device}"
    checks = (
        (in_openvino and not (on_cpu and (fp32 or bf16)), f"it must run on the CPU in fp32 or bf16, got {found}"),
        (bf16 and on_cpu and not in_openvino, "it has no bf16 kernels for CPUs"),
        (candidate.engine == "tensorrt" and on_cpu, "it needs a GPU"),
        (candidate.precision == "int8" and not fp32, f"the dtype must be fp32 for int8, got {task.dtype}"),
        (given and (candidate.precision or not fp32), "an ONNX file must be run in fp32, without further quantization"),
    )
    if reasons := [reason for fails, reason in checks if fails]:
        raise UnsupportedInputError(RUNTIMES[candidate.engine], reasons)
    if not fp32:
        candidate = dataclasses.replace(candidate, precision="bf16" if bf16 else "fp16")
    if (path := task.model.onnx) is None:
        exported = _exported(candidate.engine, candidate.precision, task.model, task.dtype, task.device)
        path = Path(exported.name) / "model.onnx"
    run = open_file(candidate, path, _images(task, task.batch_size), task.model.image_hw)
    return lambda images: run(images if in_openvino else images.float()).to(task.dtype)


@functools.lru_cache(maxsize=4)
def _exported(
    engine: Engine, precision: Precision | None, model: Model, dtype: torch.dtype, device: torch.device
) -> tempfile.TemporaryDirectory[str]:
    """Exports a model to model.onnx in a folder, once for all batch sizes."""
    from vit_fast.measure.runtimes import write_onnx

    task, folder = Task(model, weights_of(model, dtype), dtype, device, 1), tempfile.TemporaryDirectory()
    path = Path(folder.name) / "model.onnx"
    write_onnx(Candidate(engine, precision=precision), _exportable(task), path, _images(task, 1), ())
    return folder


def _exportable(task: Task) -> nn.Module:
    if task.model.make is not None:
        model = task.model.make()
        return model.model if isinstance(model, OutputOf) else model
    on_cpu = dataclasses.replace(task, dtype=torch.float32, device=torch.device("cpu"))
    return build(CANDIDATES["sdpa"], on_cpu)


def _build_torchao(candidate: Candidate, task: Task) -> nn.Module:
    """Quantizes our model with torchao: dynamic activation quantization, per row in fp8."""
    fp8 = candidate.precision == "fp8"
    checks = (
        (task.dtype != torch.bfloat16, f"the model must be in bf16, got {task.dtype}"),
        (not task.whole, f"the model must not be a single block or operator, got {task.model.name}"),
    )
    if fp8 and (reasons := [reason for fails, reason in checks if fails]):
        raise UnsupportedInputError(candidate.base, reasons)
    from torchao import quantization as ao

    model, int8 = build(CANDIDATES["sdpa"], task), ao.Int8DynamicActivationInt8WeightConfig
    ao.quantize_(model, ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()) if fp8 else int8())
    return model


def _all() -> Iterator[Candidate]:
    def named(base: str, summary: str, builder: Callable[..., Any], **fields: Any) -> Candidate:
        return Candidate(base=base, summary=summary, builder=builder, **fields)

    on_eager, on_sdpa, on_triton = ({"attention": name, "mlp": name} for name in ("eager", "sdpa", "triton"))
    inference = {"trainable": False}
    lossy = inference | {"tolerance": LOSSY_TOLERANCE}
    file = inference | {"compilable": False}
    onnx: dict[str, Any] = file | {"engine": "onnxruntime", "packages": ORT, "peer": True, "build_s": 7.0}

    yield named("eager", "vit-fast's model in plain PyTorch: the reference", build, **on_eager, fullgraph=True)
    yield named("sdpa", "vit-fast's model with torch's scaled_dot_product_attention", build, **on_sdpa, fullgraph=True)
    yield named("triton", "vit-fast's model with the Triton kernels", build, **on_triton, fullgraph=True)
    frozen, e4m3 = partial(_build_changed, Candidate(frozen=True)), partial(_build_changed, Candidate(precision="fp8"))
    yield named("triton-frozen", "triton with frozen weights", frozen, **on_triton, **inference)
    yield named("triton-graphs", "triton-frozen in a CUDA graph", _build_graphs, **on_triton, **file)
    summary = "triton with linear layers in e4m3, calibrated"
    yield named("triton-fp8", summary, e4m3, **on_triton, **lossy, precision="fp8")
    for kernel in ("flash", "cudnn", "efficient"):
        only = partial(sdpa_kernel, getattr(SDPBackend, f"{kernel.upper()}_ATTENTION"))
        summary = f"sdpa restricted to the {kernel} kernel"
        yield named(f"sdpa-{kernel}", summary, build, **on_sdpa, fullgraph=True, context=only)

    for library in PEERS:
        peer, needs = partial(build_peer, library), (library.NAME,)
        yield named(library.NAME, library.PEER, peer, packages=needs, peer=True)
        yield from _fused(library.NAME, f"the model of {library.NAME}", peer, True, needs)
    yield named("given", "your model", build_given, peer=True)
    yield from _fused("given", "your model", build_given, False, ())

    summary = "cached result of vit_fast.optimize"
    yield named("optimized", f"{summary}, lossless", _build_optimized, **file)
    for precision in PRECISIONS:
        fields = file | lossy | {"precision": precision}
        yield named(f"optimized-{precision}", f"{summary} in {precision}", _build_optimized, **fields)

    yield named("onnxruntime", "ONNX Runtime, exported by vit_fast.export", build_file, **onnx)
    calibrated = onnx | lossy | {"precision": "int8", "peer": False, "build_s": 9.0}
    yield named("onnxruntime-int8", "onnxruntime, static int8 calibrated on an image", build_file, **calibrated)
    yield named("tensorrt", "onnxruntime with the TensorRT provider", build_file, **onnx | {"engine": "tensorrt"})
    openvino = onnx | {"engine": "openvino", "packages": (*ORT[:2], "openvino")}
    yield named("openvino", "OpenVINO on a CPU, exported by vit_fast.export", build_file, **openvino)

    ao = lossy | {"packages": ("torchao",), "peer": True}
    summary = "sdpa with torchao's int8 weights and dynamic activation quantization"
    yield named("torchao-int8", summary, _build_torchao, **ao, precision="int8", build_s=9.0)
    summary = "sdpa with torchao's float8 weights and dynamic activation quantization, per row"
    yield named("torchao-fp8", summary, _build_torchao, **ao, precision="fp8")
    for base, summary, packages in (
        ("flex", "FlexAttention, compiled", ()),
        ("flash-attn", "attention of flash-attn", ("flash_attn",)),
        ("xformers", "memory-efficient attention of xformers", ("xformers",)),
        ("cublaslt", "MLP in PyTorch with cuBLASLt's GELU epilogue", ()),
        ("transformer-engine", "LayerNormMLP of NVIDIA TransformerEngine", ("transformer_engine",)),
    ):
        yield named(base, summary, _build_operator, packages=packages, peer=True, compilable=False)


def _fused(
    base: str, what: str, build_model: Callable[[Candidate, Task], nn.Module], whole: bool, packages: tuple[str, ...]
) -> Iterator[Candidate]:
    for frozen, name, done in ((False, "fused", "fuse"), (True, "fused+frozen", "fuse and vit_fast.freeze")):
        yield Candidate(
            base=f"{base}+{name}", summary=f"{what} after vit_fast.{done}", packages=packages, fullgraph=whole,
            builder=partial(_build_fused, build_model, whole, frozen), trainable=not frozen,
        )  # fmt: skip


CANDIDATES: dict[str, Candidate] = {candidate.base: candidate for candidate in _all()}
