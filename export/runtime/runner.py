"""OnnxRunner: runs an exported ViT in ONNX Runtime, on the requested execution provider or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError, VitFastError, check_choice, check_integer, check_type, pair
from vit_fast.libraries.interface.image_model import Output

from .metadata import CLASSES, ModelFileError, OnnxInfo, Signature, inspect_onnx, read_signature

if TYPE_CHECKING:
    from PIL import Image

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT, "openvino": "OpenVINOExecutionProvider"}
MAX_BATCH = 64
MAX_THREADS = 1024  # ONNX Runtime itself has no limit


class ProviderError(VitFastError, RuntimeError):
    """A requested execution provider is not available; the message contains the reason and what to do."""


def reasons_against(kind: str) -> list[str]:
    """Returns the reasons why ONNX Runtime cannot use a device on this machine, each with a fix."""
    import onnxruntime

    if PROVIDERS[kind] not in onnxruntime.get_available_providers():
        package = "onnxruntime-openvino" if kind == "openvino" else "onnxruntime-gpu"
        remedy = f"pip uninstall onnxruntime onnxruntime-gpu; pip install {package}"
        return [f"this build of ONNX Runtime has no {PROVIDERS[kind]}: {remedy}"]
    if kind in ("cpu", "openvino"):
        return []
    with contextlib.redirect_stdout(io.StringIO()) as messages:
        onnxruntime.preload_dlls()  # loads CUDA and cuDNN from the nvidia-* wheels
    toolkit = [*re.findall(r"Failed to load ([\w.]+):", messages.getvalue()), "libcudnn.so.9"]
    needed = {
        "there is no NVIDIA driver, or this container cannot see it (--gpus all)": ["libcuda.so.1"],
        "pip install 'onnxruntime-gpu[cuda,cudnn]', or install CUDA and cuDNN 9 on the library path": toolkit,
        "pip install tensorrt": ["libnvinfer.so.10", "libnvonnxparser.so.10"] if kind == "tensorrt" else [],
    }
    reasons = []
    for remedy, libraries in needed.items():
        missing = []
        for library in libraries:
            try:
                ctypes.CDLL(library)
            except OSError:
                missing.append(library)
        if missing:
            reasons.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: {remedy}")
    return reasons


def open_session(
    path: Path, kind: str = "cpu", index: int = 0, *,
    threads: int | None = None, optimize: bool = True, cuda_graph: bool = False, fp8: bool = False,
    prepack: bool = True,
) -> Any:  # fmt: skip
    """Opens a session with the provider of a device first; see OnnxRunner for arguments and errors.

    `prepack` copies weights into a faster layout.
    """
    import onnxruntime

    if reasons := reasons_against(kind):
        raise ProviderError(f"{PROVIDERS[kind]} is not available: {'; '.join(reasons)}")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    # Otherwise threads spin after each call, and slow down other models in this process.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        settings.intra_op_num_threads = threads
    settings.add_session_config_entry("session.disable_prepacking", str(int(not prepack)))
    if fp8:  # ONNX Runtime 1.31 on a CPU would fuse QDQ and MatMul into an operator that does not support e4m3
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
    if not optimize:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # by default, ONNX Runtime computes fp32 in TF32
    cuda: Any = (CUDA, {"device_id": index, "use_tf32": "0"} | ({"enable_cuda_graph": "1"} if cuda_graph else {}))
    # CPU: for shape arithmetic of dynamic files, and for operators that OpenVINO lacks
    providers: dict[str, list[Any]] = {
        "cpu": [CPU], "cuda": [cuda, CPU], "tensorrt": [(TENSORRT, {"device_id": index}), cuda, CPU],
        "openvino": [PROVIDERS["openvino"], CPU],
    }  # fmt: skip
    failure = f"{PROVIDERS[kind]} could not be initialized"
    try:
        session = onnxruntime.InferenceSession(str(path), settings, providers=providers[kind])
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        if kind != "cpu" and any(word in str(error).lower() for word in ("cuda", "tensorrt", "nvinfer")):
            raise ProviderError(f"{failure}: {str(error)[:300]}") from error
        raise ModelFileError(f"{path}: ONNX Runtime cannot load it: {str(error)[:300]}") from error
    if session.get_providers()[0] != PROVIDERS[kind]:
        raise ProviderError(f"{failure}: see the log of ONNX Runtime")
    return session


def _parsed(device: str) -> tuple[str, int]:
    match = re.fullmatch(r"auto|cpu|openvino|(?:cuda|tensorrt)(?::([0-9]{1,4}))?", device)
    if match is None:
        names = "'auto', 'cpu', 'cuda', 'cuda:N', 'tensorrt', 'tensorrt:N' or 'openvino'"
        raise ValueError(f"device must be {names}, got {device!r}")
    return device.partition(":")[0], int(match[1] or 0)


def _chosen_size(signature: Signature, image_hw: Size) -> Size:
    size, fixed = pair("image_hw", image_hw), signature.shape[2:]
    if signature.takes_pixels:
        raise ValueError(f"image_hw must be None, because the file resizes images itself, got {image_hw!r}")
    if any(n is not None and n != side for n, side in zip(fixed, size)):
        raise ValueError(f"image_hw must be {fixed}, the input size of the file, got {image_hw!r}")
    return size


def _allocated(signature: Signature, count: int, device: torch.device) -> list[Tensor]:
    """Returns tensors for the outputs of `count` images."""
    made = []
    for name, (dtype, _) in signature.outputs.items():
        if dtype is None or (shape := signature.shape_of(name, count)) is None:
            remedy = "pass io_binding=False and cuda_graph=False"
            raise UnsupportedInputError("IO binding", [f"the file must contain shape and dtype of {name}: {remedy}"])
        made.append(torch.empty(shape, dtype=getattr(torch, np.dtype(dtype).name), device=device))
    return made


def _run_named(session: Any, inputs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Runs a session on arrays or tensors by name."""
    arrays = {name: x.detach().cpu().numpy() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    try:
        results = session.run(names, arrays)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise ValueError(f"the file does not support these inputs: {str(error)[:300]}") from error
    device = next((x.device for x in inputs.values() if isinstance(x, Tensor)), None)
    found = [y if device is None else torch.from_numpy(y).to(device) for y in results]
    return dict(zip(names, found)) if len(found) > 1 else found[0]


def outputs_of(found: Any) -> list[Any]:
    """Returns all outputs of a call of OnnxRunner."""
    return list(found.values()) if isinstance(found, dict) else [found]


class OnnxRunner:
    """Runs an ONNX file with one image input, from export_onnx or another exporter, or any file of export_onnx.

        runner = OnnxRunner("model.onnx")
        logits = runner(images)               # numpy in, numpy out; torch in, torch out
        tokens = runner(images)["tokens"]     # if the file has several outputs

    Args:
        path: The .onnx file.
        device: "cpu", "cuda", "cuda:N", "tensorrt", "tensorrt:N", "openvino" or "auto". "auto" means cuda if available,
            otherwise cpu.
        threads: Threads per operator on the CPU; None means ONNX Runtime's default (all cores).
        max_batch: Larger batches are split into batches of this size. A fixed batch size of the file takes precedence.
        io_binding: Read and write CUDA tensors in place, without copies to the host.
        cuda_graph: Capture a CUDA graph of max_batch images and replay it; smaller batches are padded.
        data_config: Preprocessing; None means the file's.
        class_names: Names of the classes; None means the file's.
        image_hw: Height and width to resize images to, if the file has no fixed size.
        output: "logits", "probabilities" or "features"; None means the file's metadata, or else logits.
        optimize: Let ONNX Runtime optimize the graph when loading it.

    Attributes:
        info: Description of the file.
        providers: The providers in use, the requested one first.
        takes_pixels: True if the file takes uint8 [B, height, width, channels] and contains the preprocessing.
        notes: Reasons why "auto" selected the CPU; otherwise empty.

    Raises:
        ModelFileError: the file is missing, damaged or unsafe, or has no image input.
        ProviderError: the requested provider is not available; the message contains the reason and what to do.
        ValueError: an argument is invalid.
    """

    def __init__(
        self, path: str | Path, device: str = "auto", *, threads: int | None = None, max_batch: int = MAX_BATCH,
        io_binding: bool = True, cuda_graph: bool = False, data_config: DataConfig | Mapping[str, Any] | None = None,
        class_names: Sequence[str] | None = None, image_hw: Size | None = None, output: Output | None = None,
        optimize: bool = True,
    ) -> None:  # fmt: skip
        kind, index = _parsed(device)
        check_integer("max_batch", max_batch, 1)
        if threads is not None:
            check_integer("threads", threads, 1, MAX_THREADS)
        self.path = Path(path)
        self.info: OnnxInfo = inspect_onnx(self.path)
        # files of export_onnx with other inputs take a dict only, and describe the inputs
        self._named = self.info.metadata.get("inputs") is not None
        self.signature = signature = read_signature(self.info, any_inputs=self._named)
        self.in_chans, self.takes_pixels = signature.in_chans, signature.takes_pixels
        if data_config is not None and not isinstance(data_config, DataConfig):
            data_config = DataConfig.from_dict(data_config)
        self.data_config = data_config or self.info.data_config
        if class_names is not None:
            check_type("class_names", class_names, list, tuple)
        self.class_names = self.info.class_names if class_names is None else tuple(class_names)
        if output is not None:
            check_choice("output", output, get_args(Output))
            if self.info.output not in (None, output):
                raise ValueError(f"output must be {self.info.output!r}, the output of the file, got {output!r}")
        self.output = output or self.info.output or "logits"
        self._classes = self.output if self.output in signature.outputs else next(iter(signature.outputs))
        dims, known = signature.outputs[self._classes][1], self.class_names
        classes = dims[-1] if len(dims) > 1 else None
        if known is not None and isinstance(classes, int) and classes != len(known) and self.output in CLASSES:
            raise ValueError(f"class_names must have {classes} names, one per class of {path}, got {len(known)}")
        self.image_hw = signature.image_hw if image_hw is None else _chosen_size(signature, image_hw)
        if cuda_graph and kind not in ("auto", "cuda"):
            raise UnsupportedInputError("cuda_graph=True", [f"the device must be cuda, got {kind}"])
        options: dict[str, Any] = {"threads": threads, "optimize": optimize, "fp8": self.info.fp8}
        self.notes: tuple[str, ...] = ()
        try:
            kind = "cuda" if kind == "auto" else kind
            self._session = open_session(self.path, kind, index, **options, cuda_graph=cuda_graph)
        except ProviderError as error:
            if device != "auto" or cuda_graph:
                raise
            self.notes, kind = (str(error),), "cpu"
            self._session = open_session(self.path, **options)
        self.device = kind
        self.providers: tuple[str, ...] = tuple(self._session.get_providers())
        self.max_batch = signature.shape[0] or max_batch
        self._needs_full_batch = signature.shape[0] is not None or cuda_graph
        self._bind = io_binding and kind in ("cuda", "tensorrt")
        self._gpu = torch.device("cuda", index)
        self._graph_device = self._gpu if cuda_graph else None
        self._graph_buffers: tuple[Tensor, list[Tensor]] | None = None

    def __call__(self, images: Any) -> Any:
        """Runs the model.

        Args:
            images: numpy array or torch tensor [B, channels, height, width] in the file's dtype, on any device. For a
                file with preprocessing, uint8 [B, height, width, channels] or [height, width, channels]. B may be 0.
                For a file with other inputs, a dict of arrays or tensors by name, which is not split.
        Returns:
            The file's output [B, ...], or a dict of several outputs by name, with the type and device of the input.
        Raises:
            ValueError: dtype or shape does not match the file, or an output of all images needs one batch.
        """
        if isinstance(images, Mapping):
            return _run_named(self._session, images, list(self.signature.outputs))
        is_tensor = isinstance(images, Tensor)
        if self._named:
            names = ", ".join(entry["name"] for entry in self.info.inputs)
            raise TypeError(f"inputs of {self.path.name} must be a dict with {names}, got {type(images).__name__}")
        if not isinstance(images, np.ndarray | Tensor):
            raise TypeError(f"images must be a numpy array or a torch tensor, got {type(images).__name__}")
        if self.takes_pixels and images.ndim == 3:
            images = images[None]
        self.signature.check(images)
        if not len(images):  # one image of zeros gives shape and dtype of the output
            one = np.zeros((1, *images.shape[1:]), self.signature.dtype)
            found = self(torch.from_numpy(one).to(images.device) if is_tensor else one)
            return self.signature.first(found, 0, 1)
        bound = is_tensor and images.is_cuda and self._bind
        inputs = images.detach().to(self._gpu) if bound else images.detach().cpu().numpy() if is_tensor else images
        size, first, results = self.max_batch, self.signature.first, list[dict[str, Any]]()
        for start in range(0, len(inputs), size):
            piece = inputs[start : start + size]
            count = len(piece)
            if count < size and self._needs_full_batch:
                piece = piece[[min(i, count - 1) for i in range(size)]]
            try:
                results.append(first(dict(zip(self.signature.outputs, self._run(piece))), count, len(piece)))
            except Exception as error:  # ONNX Runtime's exceptions share no base class
                if None not in self.signature.shape[1:] or "allocate" in str(error).lower():
                    raise
                shape = tuple(images.shape)
                raise ValueError(f"{self.path} does not support images of shape {shape}: {str(error)[:300]}") from error
        found = {}
        for name in self.signature.outputs:
            y = self.signature.join(name, [each[name] for each in results])
            y = torch.from_numpy(y) if is_tensor and not bound else y
            found[name] = y.to(images.device) if is_tensor else y
        return found if len(found) > 1 else found.popitem()[1]

    def probabilities(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Returns class probabilities [B, classes] of images; see `prepare` for the preprocessing.

        Raises:
            UnsupportedInputError: the file outputs features, or the preprocessing is unknown.
        """
        from PIL import Image

        if self.output not in CLASSES:
            raise UnsupportedInputError("probabilities", [f"{self.path} must output classes, got {self.output}"])
        prepared = [self.prepare(image) for image in images]
        if not prepared:
            return self.probabilities([Image.new("RGB", (8, 8))])[:0]
        if self.takes_pixels:  # images of any size
            outputs = [self(pixels) for pixels in prepared]
        else:
            outputs = [self(np.stack(prepared).astype(self.signature.dtype))]
        parts = [y[self._classes] if isinstance(y, dict) else y for y in outputs]
        output = np.concatenate(parts).astype(np.float64)
        exponents = output if self.output == "probabilities" else np.exp(output - output.max(axis=-1, keepdims=True))
        return exponents / exponents.sum(axis=-1, keepdims=True)

    def prepare(self, image: Image.Image) -> np.ndarray:
        """Returns the file's input for an image: fp32 [channels, H, W], or uint8 [H, W, channels] (takes_pixels)."""
        from PIL import Image

        from vit_fast.apps.data import make_transform

        check_type("image", image, Image.Image)
        if self.takes_pixels:
            pixels = np.asarray(image.convert("L" if self.in_chans == 1 else "RGB"), np.uint8)
            return pixels.reshape(image.height, image.width, self.in_chans)
        if self.data_config is None or self.image_hw is None:
            no_size = "the file has no fixed size: pass image_hw (img_size in --data-config)"
            reason = no_size if self.data_config else "the file has no data_config: pass mean, std, ... (--data-config)"
            raise UnsupportedInputError(f"preprocessing for {self.path}", [reason])
        return make_transform(self.data_config, self.image_hw, self.in_chans)(image).numpy()

    def _run(self, images: Any) -> list[Any]:
        """Returns the outputs [B, ...] of images that were checked, with their type and device."""
        if isinstance(images, Tensor):
            return self._run_on_cuda(images)
        images = np.ascontiguousarray(images)  # torch does not support negative strides
        if self._graph_device is not None:
            return [y.cpu().numpy() for y in self._run_on_cuda(torch.from_numpy(images).to(self._graph_device))]
        return self._session.run(list(self.signature.outputs), {self.signature.input: images})

    def _run_on_cuda(self, images: Tensor) -> list[Tensor]:
        images, signature = images.contiguous(), self.signature
        outputs = _allocated(signature, len(images), images.device)
        if self._graph_device is not None:  # a graph has fixed addresses
            if self._graph_buffers is None:
                self._graph_buffers = (images.clone(), outputs)
            fixed_input, outputs = self._graph_buffers
            images = fixed_input.copy_(images)
        torch.cuda.current_stream(images.device).synchronize()  # ONNX Runtime uses another stream
        binding, place = self._session.io_binding(), ("cuda", images.device.index or 0)
        binding.bind_input(signature.input, *place, signature.dtype, tuple(images.shape), images.data_ptr())
        for (name, (dtype, _)), y in zip(signature.outputs.items(), outputs):
            binding.bind_output(name, *place, dtype, tuple(y.shape), y.data_ptr())
        self._session.run_with_iobinding(binding)
        return outputs if self._graph_device is None else [y.clone() for y in outputs]
