"""Candidates of the benchmark: names, defaults, and the functions that build them.

All candidates of a group (see models.Group) have the same weights. To add a candidate, add it to `_own`, `_others`
or `_files`, and to the table in docs/howto/benchmark.md. A compile mode may follow the name: `timm+compile`,
`timm+compile:max-autotune`.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit_fast.errors import UnsupportedInputError
from vit_fast.fusion.fuse import fuse, set_backend
from vit_fast.libraries.interface.weight_names import take_weights
from vit_fast.libraries.known import PEERS, find
from vit_fast.libraries.transformers import hf_model
from vit_fast.measure.candidate import COMPILE_MODES, PRECISIONS, RUNTIMES, Candidate
from vit_fast.model import VisionTransformer

from .models import Group, OutputOf, weights_of

# Default candidates by device or kind of model (see Model.kind), cheap preparations first. Limited runs omit those
# after "|", and select the faster mode of torch.compile at the first batch size.
NAMES = {
    "cpu": "timm timm+fused timm+fused+frozen onnxruntime openvino onnxruntime-int8 onnxruntime-int8-dynamic"
    " timm+compile timm+compile:freezing | timm+fused+compile:freezing transformers torchvision sdpa eager",
    "cuda": "timm timm+fused timm+fused+frozen triton-graphs onnxruntime triton-fp8 torchao-fp8+compile tensorrt"
    " timm+compile:reduce-overhead timm+compile:max-autotune | eager sdpa sdpa-flash sdpa-cudnn sdpa-efficient triton"
    " triton-frozen transformers torchvision eager+compile sdpa+compile sdpa+compile:max-autotune triton+compile"
    " triton+compile:reduce-overhead triton+compile:max-autotune timm+compile timm+fused+compile transformers+compile"
    " transformers+fused optimized torchao-int8+compile",
    "given": "given given+fused given+fused+frozen onnxruntime openvino given+compile given+compile:freezing"
    " | given+fused+compile:freezing given+fused+compile",
    "onnx": "onnxruntime openvino",
    "block": "eager sdpa triton timm timm+fused",
    "attention": "eager sdpa sdpa-flash sdpa-cudnn sdpa-efficient triton flex flash-attn",
    "mlp": "eager triton cublaslt eager+compile",
}


def parse_candidate(word: str) -> Candidate:
    """Parses a word such as `timm+compile:max-autotune`; raises ValueError for an unknown name or mode."""
    name, compiled, mode = word.strip().partition("+compile")
    if name not in CANDIDATES:
        raise ValueError(f"a candidate must be one of {', '.join(CANDIDATES)}, got {name!r}")
    if not compiled:
        return CANDIDATES[name]
    found: Any = mode.removeprefix(":") or "default"
    if found not in COMPILE_MODES:
        raise ValueError(f"candidate {word!r}: the mode must be one of {', '.join(COMPILE_MODES)}, got {found!r}")
    if not CANDIDATES[name].compilable:
        raise ValueError(f"candidate {name!r} cannot be compiled by torch.compile: use {name!r} alone")
    return dataclasses.replace(CANDIDATES[name], engine=found)


def choose(
    names: Sequence[str] | None, device: torch.device, kind: str = "vit-fast", training: bool = False, full: bool = True
) -> list[Candidate]:  # fmt: skip
    """Returns the named candidates, or the default ones for a kind of model on a device; see NAMES for `full`."""
    if names is not None:
        return list({candidate.name: candidate for candidate in map(parse_candidate, names)}.values())
    first, _, others = NAMES[device.type if kind == "vit-fast" else kind].partition("|")
    found = list(map(parse_candidate, f"{first} {others if full else ''}".split()))
    if training:
        return [candidate for candidate in found if candidate.trainable and candidate.compile_mode != "freezing"]
    bases = () if full else {candidate.base for candidate in found}
    return [candidate for candidate in found if f"{candidate.base}+frozen" not in bases]  # a frozen copy is faster


# The allowed error of lower precision as a share of the largest output; the accuracy rule is for full precision.
LOSSY_TOLERANCE = 0.35
ORT = ("onnx", "onnxscript", "onnxruntime")

Function = Callable[[Tensor], Tensor]
Builder = Callable[[Candidate, Group], Any]
Quantizer = Callable[[Path, Path], None]  # takes the fp32 file and the path to write


def make(candidate: Candidate, group: Group) -> Function:
    """Builds a candidate, or only its first block for `block:NAME`; may raise UnsupportedInputError."""
    assert candidate.builder is not None
    made: Any = candidate.builder(candidate, group)
    if group.model.block:
        blocks = getattr(made, "blocks", None)
        if not isinstance(blocks, nn.Sequential):
            reason = "model.blocks must be an nn.Sequential of blocks that take only tokens"
            raise UnsupportedInputError(candidate.base, [reason])
        made = blocks[0]
    return made


def build_reference(group: Group) -> nn.Module:
    """Builds the reference of a group: vit-fast's eager model or operator, or the given model itself."""
    made = make(CANDIDATES["given" if group.model.kind == "given" else "eager"], group)
    assert isinstance(made, nn.Module)
    return made


def build(candidate: Candidate, group: Group) -> nn.Module:
    """Builds vit-fast's model or an operator on the candidate's backend."""
    backend = candidate.attention or candidate.base
    if group.model.operator is not None:
        from . import operators

        return operators.build(backend, group.model.operator, weights_of(group.model, group.dtype) or {}, group.device)
    if candidate.attention is None:
        raise UnsupportedInputError(backend, [f"the model must be a single operator, got {group.model.name}"])
    config, weights = group.config_and_weights
    with torch.device("meta"):
        model = VisionTransformer(config, data_config=group.model.data)
    model = model.to_empty(device=group.device).to(group.dtype)
    model.load_state_dict(dict(weights))
    set_backend(model, backend)
    return model.eval().requires_grad_(False)


def _build_changed(builder: Builder, changes: Candidate, candidate: Candidate, group: Group) -> Any:
    """Builds a model, then freezes it, captures it in a CUDA graph, or converts it to FP8."""
    from vit_fast.measure.build import changed_copy
    from vit_fast.quantization.fp8 import unable_reasons
    from vit_fast.run.graph_runner import GraphRunner

    if changes.precision == "fp8":  # checked before anything is built
        _require_whole(candidate, group, unable_reasons(group.device, group.dtype))
    model = builder(candidate, group)
    if changes.graphs:
        return GraphRunner(model, _images(group)[:1], batch_sizes=(group.batch_size,), fuse=False)
    return changed_copy(changes, model, _images(group), ())


def _require_whole(candidate: Candidate, group: Group, reasons: Sequence[str]) -> None:
    part = f"the model must not be a single block or operator, got {group.model.name}"
    if reasons := [*reasons, *([] if group.model.is_whole else [part])]:
        raise UnsupportedInputError(candidate.base, reasons)


def _images(group: Group) -> Tensor:
    return torch.zeros(group.batch_size, *group.model.shape, dtype=group.dtype, device=group.device)


def _build_peer(library: ModuleType, candidate: Candidate, group: Group) -> nn.Module:
    config, weights = group.config_and_weights
    model = library.build_peer(config).to(device=group.device, dtype=group.dtype)
    take_weights(model, weights, library.convert, config)
    model = model.eval().requires_grad_(False)
    return OutputOf(model) if library is hf_model else model


def _build_given(candidate: Candidate, group: Group) -> nn.Module:
    if group.model.make is None:
        reason = f"the model must be timm:NAME, hf:FOLDER or module:function, got {group.model.name}"
        raise UnsupportedInputError("given", [reason])
    return group.model.make().to(group.device, group.dtype).requires_grad_(False)


def _build_fused(builder: Builder, whole: bool, candidate: Candidate, group: Group) -> nn.Module:
    """Builds a model and calls vit_fast.fuse. `whole` requires that every attention and MLP is fused."""
    model: nn.Module = builder(candidate, group)
    report = fuse(model, example=None if whole else _images(group))
    if whole or not report.fused:
        report.require_all()
    return model


def _build_optimized(candidate: Candidate, group: Group) -> Function:
    """Builds the cached result of vit_fast.optimize in the candidate's precision."""
    from vit_fast.measure import cache
    from vit_fast.measure.build import build as build_candidate

    module, example = build_reference(group), _images(group)
    key = cache.key_of(module, example, {"allow": [candidate.precision] if candidate.precision else []})
    decisive = {name: part for name, part in key.items() if part is not None and name != "request"}
    found = next((one for one in cache.find(decisive) if one.candidate.precision == candidate.precision), None)
    if found is None:
        words = ["vit-fast", "optimize", group.model.source or group.model.name, "--batch", str(group.batch_size)]
        words += [] if group.model.config is None else ["--img-size", "x".join(map(str, group.model.image_hw))]
        command = shlex.join(words + (["--allow", candidate.precision] if candidate.precision else []))
        raise UnsupportedInputError("optimized", [f"the cache contains no result for this model: run {command}"])
    with torch.no_grad():
        return build_candidate(found.candidate, module, example, module(example), ())


def _build_file(candidate: Candidate, group: Group, quantizer: Quantizer | None = None) -> Function:
    """Opens the export of the group's model, or the given ONNX file, in the candidate's runtime."""
    from vit_fast.measure.runtimes import open_file, provide_onnx

    fp32, on_cpu, bf16 = group.dtype == torch.float32, group.device.type == "cpu", group.dtype == torch.bfloat16
    in_openvino, path, found = candidate.engine == "openvino", group.model.onnx, f"{group.dtype} on {group.device}"
    checks = {
        f"fp32 or bf16 on a CPU is required, got {found}": in_openvino and not (on_cpu and (fp32 or bf16)),
        "bf16 is not supported on a CPU": bf16 and on_cpu and not in_openvino,
        "a GPU is required": candidate.engine == "tensorrt" and on_cpu,
        f"the dtype must be fp32 for int8, got {group.dtype}": candidate.precision == "int8" and not fp32,
        "an ONNX file must be run in fp32, and cannot be quantized further": path and (candidate.precision or not fp32),
    }
    if reasons := [reason for reason, fails in checks.items() if fails]:
        raise UnsupportedInputError(RUNTIMES[candidate.engine], reasons)
    as_file = Candidate(candidate.engine, precision=candidate.precision if fp32 else "bf16" if bf16 else "fp16")
    if path is None:  # exported once for all batch sizes
        one = dataclasses.replace(group, batch_size=1)
        folder = Path(_files_of(one).name)
        provide = partial(provide_onnx, model=partial(_exportable, one), folder=folder, images=_images(one))
        if quantizer is None:
            path = provide(as_file)
        elif not (path := folder / "dynamic.onnx").exists():
            quantizer(provide(dataclasses.replace(as_file, precision=None)), path)
    run = open_file(as_file, path, _images(group), group.model.image_hw)
    return lambda images: run(images if in_openvino else images.float()).to(group.dtype)


@functools.lru_cache(maxsize=4)
def _files_of(group: Group) -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def _exportable(group: Group) -> nn.Module:
    """Builds a given model, or vit-fast's model with its weights rounded to the group's dtype."""
    if group.model.make is None:
        return build(CANDIDATES["sdpa"], dataclasses.replace(group, device=torch.device("cpu"))).float()
    model = group.model.make()
    return model.model if isinstance(model, OutputOf) and find(model.model) is not None else model


def _quantize_dynamically(source: Path, path: Path) -> None:
    """Quantizes the linear layers by ONNX Runtime's own tool in its default format: ranges computed at run time."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model, done = onnx.load(source), ("onnx.infer", "onnx.quant.pre_process")
    del model.graph.value_info[:]
    onnx.helper.set_model_props(model, dict.fromkeys(done, "onnxruntime.quant"))  # otherwise the tool warns
    types = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # shape inference fails for operators of ONNX Runtime
    quantize_dynamic(model, path, op_types_to_quantize=["MatMul"], extra_options=types)


def _build_torchao(candidate: Candidate, group: Group) -> nn.Module:
    """Quantizes vit-fast's model with torchao: int8, or fp8 per row, with dynamic activation quantization."""
    if fp8 := candidate.precision == "fp8":
        reason = f"the model must be in bf16, got {group.dtype}"
        _require_whole(candidate, group, [] if group.dtype == torch.bfloat16 else [reason])
    from torchao import quantization as ao

    model, int8 = build(CANDIDATES["sdpa"], group), ao.Int8DynamicActivationInt8WeightConfig
    ao.quantize_(model, ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()) if fp8 else int8())
    return model


_ON_EAGER, _ON_SDPA, _ON_TRITON = ({"attention": name, "mlp": name} for name in ("eager", "sdpa", "triton"))
_INFERENCE = {"trainable": False}
_LOSSY = _INFERENCE | {"tolerance": LOSSY_TOLERANCE}
_FILE = _INFERENCE | {"compilable": False}


def _named(base: str, builder: Builder, **fields: Any) -> Candidate:
    return Candidate(base=base, builder=builder, **fields)


def _fused(base: str, builder: Builder, **fields: Any) -> Iterator[Candidate]:
    """Yields a model after fuse, and after fuse and freeze."""
    builder = partial(_build_fused, builder, fields["fullgraph"])
    yield _named(f"{base}+fused", builder, **fields)
    frozen = partial(_build_changed, builder, Candidate(frozen=True))
    yield _named(f"{base}+fused+frozen", frozen, **fields, **_INFERENCE)


def _own() -> Iterator[Candidate]:
    """Yields vit-fast's model on each backend, and cached results of optimize."""
    for backend, fields in (("eager", _ON_EAGER), ("sdpa", _ON_SDPA), ("triton", _ON_TRITON)):
        yield _named(backend, build, **fields, fullgraph=True)
    frozen, graphs, e4m3 = (
        partial(_build_changed, build, changes)
        for changes in (Candidate(frozen=True), Candidate(graphs=True), Candidate(precision="fp8"))
    )
    yield _named("triton-frozen", frozen, **_ON_TRITON, **_INFERENCE)
    yield _named("triton-graphs", graphs, **_ON_TRITON, **_FILE)
    yield _named("triton-fp8", e4m3, **_ON_TRITON, **_LOSSY, precision="fp8")
    for kernel in ("flash", "cudnn", "efficient"):
        only = partial(sdpa_kernel, getattr(SDPBackend, f"{kernel.upper()}_ATTENTION"))
        yield _named(f"sdpa-{kernel}", build, **_ON_SDPA, fullgraph=True, context=only)
    yield _named("optimized", _build_optimized, **_FILE)
    for precision in PRECISIONS:
        yield _named(f"optimized-{precision}", _build_optimized, **_FILE | _LOSSY | {"precision": precision})


def _others() -> Iterator[Candidate]:
    """Yields models of libraries and of the user, and operators of other packages."""
    for library in PEERS:
        peer, needs = partial(_build_peer, library), (library.NAME,)
        yield _named(library.NAME, peer, packages=needs, peer=True)
        yield from _fused(library.NAME, peer, packages=needs, fullgraph=True)
    yield _named("given", _build_given, peer=True)
    yield from _fused("given", _build_given, fullgraph=False)
    for precision in ("int8", "fp8"):
        fields = _LOSSY | {"packages": ("torchao",), "peer": True, "precision": precision}
        yield _named(f"torchao-{precision}", _build_torchao, **fields)
    for base, packages in (("flex", ()), ("flash-attn", ("flash_attn",)), ("cublaslt", ())):
        yield _named(base, build, packages=packages, peer=True, compilable=False)


def _files() -> Iterator[Candidate]:
    """Yields the export of a model in each runtime."""
    onnx: dict[str, Any] = _FILE | {"engine": "onnxruntime", "packages": ORT, "peer": True}
    yield _named("onnxruntime", _build_file, **onnx)
    calibrated = onnx | _LOSSY | {"precision": "int8", "peer": False}
    yield _named("onnxruntime-int8", _build_file, **calibrated)
    dynamic = partial(_build_file, quantizer=_quantize_dynamically)
    yield _named("onnxruntime-int8-dynamic", dynamic, **calibrated | {"peer": True})
    yield _named("tensorrt", _build_file, **onnx | {"engine": "tensorrt"})
    yield _named("openvino", _build_file, **onnx | {"engine": "openvino", "packages": (*ORT[:2], "openvino")})


CANDIDATES: dict[str, Candidate] = {candidate.base: candidate for candidate in (*_own(), *_others(), *_files())}
