"""Opens sessions of ONNX Runtime, and finds out why an execution provider is not available."""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
from pathlib import Path
from typing import Any

from vit_fast.errors import VitFastError, check_type

from .model_files import ModelFileError

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
DEVICES = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT, "openvino": OPENVINO}
BUILDS = {CUDA: "onnxruntime-gpu", TENSORRT: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}
"""Package of each provider; only one of these packages can be installed."""


class ProviderError(VitFastError, RuntimeError):
    """A requested execution provider is not available; the message contains the reason and what to do."""


def parse_device(device: str) -> tuple[str, int]:
    """Returns ("cuda", 1) for "cuda:1"; raises ValueError for an unknown device."""
    check_type("device", device, str)
    match = re.fullmatch(r"auto|cpu|openvino|(?:cuda|tensorrt)(?::([0-9]{1,4}))?", device)
    if match is None:
        raise ValueError(
            f"device must be 'auto', 'cpu', 'cuda', 'cuda:N', 'tensorrt', 'tensorrt:N' or 'openvino', got {device!r}"
        )
    return device.partition(":")[0], int(match[1] or 0)


def reasons_against(kind: str) -> list[str]:
    """Returns the reasons why ONNX Runtime cannot use a device on this machine, each with a fix."""
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
    _preload()
    missing = [name for name in _libraries(kind) if not _loads(name)]
    driver = [name for name in missing if name == "libcuda.so.1"]
    trt = [name for name in missing if name.startswith("libnv")]
    cuda = [name for name in missing if name not in (*trt, *driver)]
    fixes = (
        (driver, "libcuda.so.1 is missing: there is no NVIDIA driver, or this container cannot see it (--gpus all)"),
        (trt, f"TensorRT 10 is missing ({', '.join(trt)}): pip install tensorrt"),
        (cuda, f"missing {', '.join(cuda)}: pip install 'onnxruntime-gpu[cuda,cudnn]', or install CUDA {_cuda_major()} "
         "and cuDNN 9 on the library path"),
    )  # fmt: skip
    return [reason for missing_here, reason in fixes if missing_here]


def open_session(
    path: Path, kind: str = "cpu", index: int = 0, *,
    threads: int | None = None, optimise: bool = True, cuda_graph: bool = False, fp8: bool = False,
) -> Any:  # fmt: skip
    """Opens a session with the provider of a device first; see OnnxRunner for the arguments.

    Raises:
        ProviderError: the provider is not available.
        ModelFileError: ONNX Runtime cannot load the file.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    # Otherwise threads spin after each call, and slow down other models in this process.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        settings.intra_op_num_threads = threads
    if fp8:  # ONNX Runtime 1.31 on a CPU would fuse QDQ and MatMul into an operator that does not support e4m3
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
    if not optimise:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted = DEVICES[kind]
    # by default, ONNX Runtime computes fp32 in TF32
    cuda: Any = (CUDA, {"device_id": index, "use_tf32": "0"} | ({"enable_cuda_graph": "1"} if cuda_graph else {}))
    on_gpu: dict[str, list[Any]] = {CUDA: [cuda], TENSORRT: [(TENSORRT, {"device_id": index}), cuda]}
    providers = on_gpu.get(wanted, [wanted])
    if wanted != CPU:
        providers.append(CPU)  # for shape arithmetic of dynamic files, and for operators that OpenVINO lacks
    if wanted in (CUDA, TENSORRT):
        _preload()
    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        if wanted != CPU and any(word in str(error).lower() for word in ("cuda", "tensorrt", "nvinfer")):
            raise ProviderError(f"{wanted} could not be initialized: {str(error)[:300]}") from error
        raise ModelFileError(f"{path}: ONNX Runtime cannot load it: {str(error)[:300]}") from error
    if session.get_providers()[0] != wanted:
        reasons = reasons_against(kind) or ["ONNX Runtime's log contains the reason"]
        raise ProviderError(f"{wanted} could not be initialized: {'; '.join(reasons)}")
    return session


def _preload() -> None:
    """Loads CUDA and cuDNN from the nvidia-* wheels, without ONNX Runtime's messages."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


def _libraries(kind: str) -> list[str]:
    major = _cuda_major()
    names = ["libcuda.so.1", f"libcudart.so.{major}", f"libcublas.so.{major}", f"libcublasLt.so.{major}"]
    names += ["libcurand.so.10", f"libcufft.so.{major - 1}", "libcudnn.so.9"]
    return names + (["libnvinfer.so.10", "libnvonnxparser.so.10"] if kind == "tensorrt" else [])


def _cuda_major() -> int:
    """Returns the major version of CUDA for which this onnxruntime was built."""
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
