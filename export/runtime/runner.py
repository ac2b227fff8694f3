"""OnnxRunner: runs an exported ViT in ONNX Runtime, and never replaces a provider that was requested by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from vit_fast.arguments import check_choice, check_integer
from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError, check_type
from vit_fast.libraries.interface.image_model import Output

from .metadata import OnnxInfo, Signature, inspect_onnx, read_signature
from .model_files import ModelFileError
from .providers import DEVICES, ProviderError, open_session, parse_device, reasons_against

if TYPE_CHECKING:
    from PIL import Image

MAX_BATCH = 64
MAX_THREADS = 1024  # ONNX Runtime itself has no limit


class OnnxRunner:
    """Runs an ONNX file with one image input, from export_onnx or another exporter.

        runner = OnnxRunner("model.onnx")
        logits = runner(images)               # numpy in, numpy out; torch in, torch out

    Args:
        path: The .onnx file.
        device: "cpu", "cuda", "cuda:N", "tensorrt", "tensorrt:N", "openvino"; "auto" is cuda if available, else cpu
            (`notes` contains the reason).
        threads: Threads per operator on the CPU; None means ONNX Runtime's default (all cores).
        max_batch: Larger batches are split into batches of this size. A fixed batch size of the file takes precedence.
        io_binding: Bind inputs and outputs without copies; CUDA tensors stay on the device.
        cuda_graph: Capture a CUDA graph of max_batch images and replay it; smaller batches are padded.
        data_config: Preprocessing, if the file has none.
        class_names: Names of the outputs, if the file has none.
        image_hw: Height and width to resize images to, if the file has no fixed size.
        output: "logits", "probabilities" or "features", if the file has no such metadata; None means logits.
        optimise: Let ONNX Runtime optimize the graph when loading it.

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
        optimise: bool = True,
    ) -> None:  # fmt: skip
        check_type("path", path, str, Path)
        kind, index = parse_device(device)
        check_integer("max_batch", max_batch, 1)
        if threads is not None:
            check_integer("threads", threads, 1, MAX_THREADS)
        self.path = Path(path)
        self.info: OnnxInfo = inspect_onnx(self.path)
        self._signature = read_signature(self.info)
        self.in_chans, self.takes_pixels = self._signature.in_chans, self._signature.takes_pixels
        if data_config is not None and not isinstance(data_config, DataConfig):
            data_config = DataConfig.from_dict(data_config)
        self.data_config = data_config or self.info.data_config
        self.class_names = _class_names(self.info, self._signature, class_names)
        self.output = _output(self.info, output)
        if image_hw is not None:
            self._signature.set_image_hw(image_hw)
        self.image_hw = self._signature.image_hw
        self.notes: tuple[str, ...] = ()
        if kind == "auto":
            self.notes = tuple(reasons_against("cuda"))
            kind = "cpu" if self.notes else "cuda"
        elif reasons := reasons_against(kind):
            raise ProviderError(f"{DEVICES[kind]} is not available for device={device!r}: {'; '.join(reasons)}")
        if cuda_graph and kind != "cuda":
            raise UnsupportedInputError("cuda_graph=True", [f"the device must be cuda, got {kind}"])
        options: dict[str, Any] = {"threads": threads, "optimise": optimise, "fp8": self.info.fp8}
        try:
            session = open_session(self.path, kind, index, **options, cuda_graph=cuda_graph)
        except ProviderError as error:
            if device != "auto" or cuda_graph:
                raise
            self.notes, kind = (str(error),), "cpu"
            session = open_session(self.path, **options)
        self.device = kind
        self.providers: tuple[str, ...] = tuple(session.get_providers())
        self._execution = _Execution(
            session, self._signature, kind, index, max_batch=max_batch, bind=io_binding, cuda_graph=cuda_graph
        )
        self.max_batch = self._execution.max_batch

    def __call__(self, images: Any) -> Any:
        """Runs the model.

        Args:
            images: numpy array or torch tensor, on any device: fp32 (or fp16, like the file's input)
                [B, channels, height, width], or uint8 [B, height, width, channels] or [height, width, channels] for a
                file with preprocessing. Any B, including 0.
        Returns:
            The file's first output [B, ...], with the type and device of the input.
        Raises:
            ValueError: dtype or shape does not match the file.
        """
        if not isinstance(images, np.ndarray | Tensor):
            raise TypeError(f"images must be a numpy array or a torch tensor, got {type(images).__name__}")
        if isinstance(images, Tensor) and (images.is_meta or images.layout != torch.strided):
            raise ValueError(f"images must be a dense tensor with values, got {images.layout} on {images.device}")
        if self.takes_pixels and images.ndim == 3:
            images = images[None]
        self._signature.check(images)
        return self._execution.run(images)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises an error for pickle and copy.deepcopy: a session cannot leave its process."""
        reason = f"ONNX Runtime cannot copy a session; open the file again: OnnxRunner({str(self.path)!r})"
        raise UnsupportedInputError("pickling or copying an OnnxRunner", [reason])

    def probabilities(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Returns class probabilities [B, classes] of images; see `prepare` for the preprocessing.

        Raises:
            UnsupportedInputError: the file outputs features, or the preprocessing is unknown.
        """
        if self.output == "features":
            raise UnsupportedInputError("probabilities", [f"{self.path} must output classes, got features"])
        prepared = [self.prepare(image) for image in images]
        if self.takes_pixels:  # of any size
            output = np.concatenate([self(pixels) for pixels in prepared] or [self(self.example(0))])
        else:
            output = self(np.stack(prepared).astype(self._signature.dtype) if prepared else self.example(0))
        output = output.astype(np.float64)
        exponents = output if self.output == "probabilities" else np.exp(output - output.max(axis=-1, keepdims=True))
        result: np.ndarray = exponents / exponents.sum(axis=-1, keepdims=True)
        return result

    def prepare(self, image: Image.Image) -> np.ndarray:
        """Returns an image: preprocessed fp32 [channels, H, W], or uint8 [H, W, channels] if the file preprocesses."""
        from PIL import Image

        check_type("image", image, Image.Image)
        if self.takes_pixels:
            pixels = np.asarray(image.convert("L" if self.in_chans == 1 else "RGB"), np.uint8)
            return pixels.reshape(image.height, image.width, self.in_chans)
        from vit_fast.apps.data import make_transform

        what = f"preprocessing for {self.path}"
        if self.data_config is None:
            raise UnsupportedInputError(what, ["the file has no data_config: pass one (mean, std, crop_pct, ...)"])
        if self.image_hw is None:
            raise UnsupportedInputError(what, ["the file has no fixed size: pass image_hw"])
        return make_transform(self.data_config, self.image_hw, self.in_chans)(image).numpy()

    def example(self, batch: int, generator: np.random.Generator | None = None) -> np.ndarray:
        """Returns random inputs [batch, ...].

        Raises:
            UnsupportedInputError: the file has no fixed size, and image_hw was not passed.
        """
        generator = generator or np.random.default_rng(0)
        height, width = self.image_hw or ((224, 224) if self.takes_pixels else (0, 0))
        if not height:
            raise UnsupportedInputError(f"an example for {self.path}", ["the file has no fixed size: pass image_hw"])
        if self.takes_pixels:
            return generator.integers(0, 256, (batch, height, width, self.in_chans), np.uint8)
        return generator.standard_normal((batch, self.in_chans, height, width)).astype(self._signature.dtype)


def _class_names(info: OnnxInfo, signature: Signature, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the given class names, otherwise the file's, after checking their number."""
    classes, known = signature.classes, info.class_names
    if names is not None:
        check_type("class_names", names, list, tuple)
        if classes is not None and len(names) != classes:
            raise ValueError(f"class_names must have {classes} names, one per class of the file, got {len(names)}")
        return tuple(names)
    if known and classes is not None and len(known) != classes and info.output != "features":
        raise ModelFileError(f"{info.path}: its metadata is damaged: {len(known)} class names for {classes} outputs")
    return known


def _output(info: OnnxInfo, output: Output | None) -> str:
    """Returns the given meaning of the output, otherwise the file's."""
    if output is not None:
        check_choice("output", output, get_args(Output))
        if info.output not in (None, output):
            raise ValueError(f"output must be {info.output!r} like the file's, got {output!r}")
    return output or info.output or "logits"


class _Execution:
    """Runs batches of any size in a session; see OnnxRunner for the arguments."""

    def __init__(
        self, session: Any, signature: Signature, device: str, device_index: int, *,
        max_batch: int, bind: bool, cuda_graph: bool,
    ) -> None:  # fmt: skip
        self.session, self.signature = session, signature
        self.max_batch = signature.shape[0] or max_batch
        self._device, self._device_index = device, device_index
        self._bind, self._cuda_graph = bind, cuda_graph
        self._needs_full_batch = signature.shape[0] is not None or cuda_graph
        self._graph_buffers: tuple[Tensor, Tensor] | None = None

    def run(self, images: Any) -> Any:
        """Returns the output [B, ...] of images that were checked, with their type and device."""
        if isinstance(images, Tensor):
            if len(images) and self._bind and images.is_cuda and self._device in ("cuda", "tensorrt"):
                return self._in_pieces(images, self._run_on_cuda, torch.cat)
            return torch.from_numpy(self.run(images.detach().cpu().numpy())).to(images.device)
        if len(images):
            return self._in_pieces(images, self._run_on_host, np.concatenate)
        if self.signature.output_tail is not None:
            return np.empty((0, *self.signature.output_tail), self.signature.output_dtype)
        one = np.zeros((1, *(n or 1 for n in images.shape[1:])), self.signature.dtype)
        return self.run(one)[:0]

    def _in_pieces(self, images: Any, run: Callable[[Any], Any], concatenate: Callable[[list[Any]], Any]) -> Any:
        size = self.max_batch
        if len(images) <= size and not self._needs_full_batch:
            return run(images)
        results = []
        for start in range(0, len(images), size):
            piece = images[start : start + size]
            count = len(piece)
            if count < size and self._needs_full_batch:
                piece = piece[[min(i, count - 1) for i in range(size)]]
            results.append(run(piece)[:count])
        return results[0] if len(results) == 1 else concatenate(results)

    def _run_on_host(self, images: np.ndarray) -> np.ndarray:
        images = np.ascontiguousarray(images)
        signature = self.signature
        if self._cuda_graph:
            on_device = torch.from_numpy(images).to(f"cuda:{self._device_index}")
            return np.asarray(self._run_on_cuda(on_device).cpu())
        if not self._bind or signature.output_tail is None:
            with self._explained(images.shape):
                result: np.ndarray = self.session.run([signature.output], {signature.input: images})[0]
            return result
        output = np.empty((len(images), *signature.output_tail), signature.output_dtype)
        self._run_bound("cpu", 0, images, images.ctypes.data, output, output.ctypes.data)
        return output

    def _run_on_cuda(self, images: Tensor) -> Tensor:
        """Runs on CUDA tensors without a copy; for a CUDA graph, copies them into its buffers."""
        images = images.contiguous()
        signature = self.signature
        if signature.output_tail is None:
            remedy = "pass io_binding=False and cuda_graph=False"
            reason = f"the file must state the shape and a floating dtype of its output: {remedy}"
            raise UnsupportedInputError("IO binding", [reason])
        dtype = getattr(torch, str(signature.output_dtype))
        output = torch.empty((len(images), *signature.output_tail), dtype=dtype, device=images.device)
        if self._cuda_graph:
            if self._graph_buffers is None:
                self._graph_buffers = (images.clone(), output)
            fixed_input, output = self._graph_buffers
            images = fixed_input.copy_(images)
        torch.cuda.current_stream(images.device).synchronize()  # ONNX Runtime uses another stream
        self._run_bound("cuda", images.device.index or 0, images, images.data_ptr(), output, output.data_ptr())
        return output.clone() if self._cuda_graph else output

    def _run_bound(self, device: str, index: int, images: Any, at: int, output: Any, output_at: int) -> None:
        """Runs with inputs and outputs at these addresses of the device."""
        signature, shape = self.signature, tuple(images.shape)
        binding = self.session.io_binding()
        binding.bind_input(signature.input, device, index, signature.dtype, shape, at)
        binding.bind_output(signature.output, device, index, signature.output_dtype, tuple(output.shape), output_at)
        with self._explained(shape):
            self.session.run_with_iobinding(binding)

    @contextlib.contextmanager
    def _explained(self, shape: tuple[int, ...]) -> Iterator[None]:
        """Raises ValueError for a shape that the signature allows but the graph does not support."""
        try:
            yield
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            if None not in self.signature.shape[1:] or "allocate" in str(error).lower():
                raise
            message = f"{self.signature.path} does not support images of shape {shape}: {str(error)[:300]}"
            raise ValueError(message) from error
