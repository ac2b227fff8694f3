"""Execution providers: which one a device means, and why one that was asked for did not come up, with the fix."""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path
from typing import Any

from vit_fast.errors import VitFastError, check_type

from .model_files import ModelFileError

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
DEVICES = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT, "openvino": OPENVINO}
BUILDS = {CUDA: "onnxruntime-gpu", TENSORRT: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}
"""The package whose ONNX Runtime has a provider; only one of them can be installed."""
CUDA_OPTIONS = {"use_tf32": "0"}
"""ONNX Runtime rounds fp32 products to TF32's 10 bits unless told not to; an fp32 file is to compute in fp32."""

KEEP_FP8_APART = ("session.disable_quant_qdq", "1")
"""ONNX Runtime 1.31's CPU fuses Q, DQ and product to an integer product in e4m3 too, and then refuses what it made."""


class ProviderError(VitFastError, RuntimeError):
    """An execution provider that was asked for did not come up; says why, and what to do."""


def parse_device(device: str) -> tuple[str, int]:
    """("cuda", 1) from "cuda:1".

    Raises:
        ValueError: it is none of the devices known.
    """
    check_type("device", device, str)
    kind, _, index = device.partition(":")
    if kind not in ("auto", *DEVICES) or (index and (not index.isdigit() or kind not in ("cuda", "tensorrt"))):
        raise ValueError(
            f"device must be 'auto', 'cpu', 'cuda', 'cuda:N', 'tensorrt', 'tensorrt:N' or 'openvino', got {device!r}"
        )
    return kind, int(index or 0)


def reasons_against(kind: str) -> list[str]:
    """Why ONNX Runtime cannot run on a device here, each with its fix; empty when nothing is missing."""
    import onnxruntime

    if kind == "cpu":
        return []
    if DEVICES[kind] not in onnxruntime.get_available_providers():
        return [
            f"this build of ONNX Runtime has no {DEVICES[kind]}: "
            f"pip uninstall onnxruntime onnxruntime-gpu; pip install {BUILDS[DEVICES[kind]]}"
        ]
    if kind == "openvino":
        return []
    preload()
    missing = [name for name in _libraries(kind) if not _loads(name)]
    reasons = []
    if "libcuda.so.1" in missing:
        reasons.append(
            "libcuda.so.1 is missing: there is no NVIDIA driver, or this container cannot see it (--gpus all)"
        )
        missing.remove("libcuda.so.1")
    trt = [name for name in missing if name.startswith("libnv")]
    if trt:
        reasons.append(f"TensorRT 10 is missing ({', '.join(trt)}): pip install tensorrt")
    if rest := [name for name in missing if name not in trt]:
        reasons.append(
            f"missing {', '.join(rest)}: pip install 'onnxruntime-gpu[cuda,cudnn]', or install CUDA {_cuda_major()} "
            "and cuDNN 9 where the loader finds them"
        )
    return reasons


def preload() -> None:
    """Loads CUDA and cuDNN from the nvidia-* wheels, as ONNX Runtime offers; what it prints is not repeated."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


def open_session(
    path: Path, kind: str, index: int, *,
    threads: int | None, optimise: bool, cuda_graph: bool, fp8: bool,
) -> Any:  # fmt: skip
    """A session on a device; see OnnxRunner for the arguments.

    Raises:
        ProviderError: the provider did not come up.
        ModelFileError: ONNX Runtime cannot load the file.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    # Idle workers would spin on after a call, and take the cores from whatever runs next: another model of a
    # service, the next entrant of a benchmark that takes turns.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        settings.intra_op_num_threads = threads
    if fp8:
        settings.add_session_config_entry(*KEEP_FP8_APART)
    if not optimise:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted = DEVICES[kind]
    options: dict[str, Any] = {"device_id": index} if wanted in (CUDA, TENSORRT) else {}
    providers: list[Any] = [(wanted, options)]
    if wanted == OPENVINO:
        providers.append(CPU)  # takes what OpenVINO leaves
    elif wanted != CPU:
        preload()
        if cuda_graph:
            options["enable_cuda_graph"] = "1"
        if wanted == CUDA:
            options |= CUDA_OPTIONS
        if wanted == TENSORRT:
            providers.append((CUDA, {"device_id": index} | CUDA_OPTIONS))
        providers.append(CPU)  # shape arithmetic of dynamic files runs there
    try:
        return make_session(path, settings, providers, wanted)
    except ProviderError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise ModelFileError(f"{path}: ONNX Runtime cannot load it: {str(error)[:300]}") from error


def make_session(path: Path, settings: Any, providers: list[Any], wanted: str) -> Any:
    """A session whose first provider is the wanted one.

    Raises:
        ProviderError: ONNX Runtime fell back to another provider, or refused.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        if wanted != CPU and any(word in str(error) for word in ("CUDA", "cuda", "Tensorrt", "TensorRT", "nvinfer")):
            raise ProviderError(f"{wanted} did not come up: {str(error)[:300]}") from error
        raise
    if session.get_providers()[0] != wanted:
        kind = next(kind for kind, provider in DEVICES.items() if provider == wanted)
        reasons = reasons_against(kind) or ["ONNX Runtime's log above says more"]
        raise ProviderError(f"{wanted} did not come up: {'; '.join(reasons)}")
    return session


def _libraries(kind: str) -> list[str]:
    major = _cuda_major()
    names = ["libcuda.so.1", f"libcudart.so.{major}", f"libcublas.so.{major}", f"libcublasLt.so.{major}"]
    names += ["libcurand.so.10", f"libcufft.so.{major - 1}", "libcudnn.so.9"]
    return names + (["libnvinfer.so.10", "libnvonnxparser.so.10"] if kind == "tensorrt" else [])


def _cuda_major() -> int:
    """CUDA's major version that this onnxruntime was built for."""
    try:
        from onnxruntime.capi.build_and_package_info import cuda_version

        return int(cuda_version.split(".")[0])
    except (ImportError, ValueError, AttributeError):
        return 12


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
