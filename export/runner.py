"""OnnxRunner: an exported Vision Transformer in ONNX Runtime, on the provider that was asked for or not at all.

Batches of any size are split; inputs and outputs are bound in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from vit_fast.config import DataConfig, Size
from vit_fast.errors import UnsupportedInputError, check_type
from vit_fast.libraries.image_model import Output

from .metadata import OnnxInfo, Signature, inspect_onnx, read_signature
from .model_files import ModelFileError
from .providers import DEVICES, ProviderError, open_session, parse_device, reasons_against

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

MAX_BATCH = 64

__all__ = ["OnnxRunner", "ProviderError"]


class OnnxRunner:
    """Runs an ONNX file that takes images: one of export_onnx's, or anybody's with one image input.

        runner = OnnxRunner("model.onnx")
        logits = runner(images)               # numpy in, numpy out; torch in, torch out

    Args:
        path: The .onnx file.
        device: "cpu", "cuda", "cuda:N", "tensorrt", "tensorrt:N", "openvino"; "auto" is cuda where it can run, else cpu
            (`notes` says why).
        threads: Threads of one operator on the CPU; None leaves it to ONNX Runtime (all cores).
        max_batch: Larger batches are split into pieces of this size; a file with a fixed batch decides itself.
        io_binding: Whether inputs and outputs are bound as they lie in memory; on CUDA no copy goes through the host.
        cuda_graph: Whether the work is captured once and replayed, always at max_batch (smaller ones are padded).
        data_config: How images are prepared, where the file does not say.
        class_names: Names of the outputs, where the file does not say.
        image_hw: Height and width that images are resized to, if the file has no fixed size.
        output: "logits", "probabilities" or "features", where the file does not say; None means logits there.
        optimise: Whether ONNX Runtime optimises the graph when loading it.

    Attributes:
        info: What the file says about itself.
        providers: The providers in use, the wanted one first.
        notes: Why "auto" did not take CUDA; empty otherwise.

    Raises:
        ModelFileError: the file is missing, damaged, unsafe, or takes no images.
        ProviderError: the provider asked for did not come up; says why and what to do.
        ValueError: an argument is not one of those accepted.
    """

    def __init__(
        self,
        path: str | Path,
        device: str = "auto",
        *,
        threads: int | None = None,
        max_batch: int = MAX_BATCH,
        io_binding: bool = True,
        cuda_graph: bool = False,
        data_config: DataConfig | Mapping[str, Any] | None = None,
        class_names: Sequence[str] | None = None,
        image_hw: Size | None = None,
        output: Output | None = None,
        optimise: bool = True,
    ) -> None:
        check_type("path", path, str, Path)
        kind, index = parse_device(device)
        for name, value in (("threads", threads), ("max_batch", max_batch)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.path = Path(path)
        self.info: OnnxInfo = inspect_onnx(self.path)
        self._signature = read_signature(self.info)
        self.in_chans = self._signature.in_chans
        if data_config is not None and not isinstance(data_config, DataConfig):
            data_config = DataConfig.from_dict(data_config)
        self.data_config = data_config or self.info.data_config
        self._class_names = _class_names(self.info, self._signature, class_names)
        self.output = _output(self.info, output)
        if image_hw is not None:
            self._signature.set_image_hw(image_hw)
        self.image_hw = self._signature.image_hw
        self.notes: tuple[str, ...] = ()
        if kind == "auto":
            self.notes = tuple(reasons_against("cuda"))
            kind = "cpu" if self.notes else "cuda"
        elif reasons := reasons_against(kind):
            raise ProviderError(f"{DEVICES[kind]} cannot come up on device={device!r}: {'; '.join(reasons)}")
        if cuda_graph and kind != "cuda":
            raise UnsupportedInputError("cuda_graph=True", [f"the device must be cuda, got {kind}"])
        options: dict[str, Any] = {"threads": threads, "optimise": optimise, "fp8": self.info.fp8}
        try:
            session = open_session(self.path, kind, index, **options, cuda_graph=cuda_graph)
        except ProviderError as error:
            if device != "auto" or cuda_graph:
                raise
            self.notes, kind = (str(error),), "cpu"
            session = open_session(self.path, kind, index, **options, cuda_graph=False)
        self.device = kind
        self.providers: tuple[str, ...] = tuple(session.get_providers())
        self._execution = Execution(
            session, self._signature, kind, index, max_batch=max_batch, bind=io_binding, cuda_graph=cuda_graph
        )
        self.max_batch = self._execution.max_batch

    def __call__(self, images: Any) -> Any:
        """Runs the model.

        Args:
            images: numpy array or torch tensor, on any device: fp32 (fp16, where the file takes that)
                [B, channels, height, width], or uint8 [B, height, width, channels] or [height, width, channels] for a
                file that does the preprocessing. Any B, 0 included.
        Returns:
            The file's first output [B, ...], as numpy or torch as the input was, on its device.
        Raises:
            ValueError: dtype or shape are not what the file takes; names both.
        """
        if type(images).__module__.split(".")[0] != "torch" and not isinstance(images, np.ndarray):
            raise TypeError(f"images must be a numpy array or a torch tensor, got {type(images).__name__}")
        if self.takes_pixels and images.ndim == 3:
            images = images[None]
        self._signature.check(images)
        return self._execution.run(images)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and copy.deepcopy; refused, since the session belongs to this process."""
        raise UnsupportedInputError("copying an OnnxRunner", [f"open the file again: OnnxRunner({str(self.path)!r})"])

    def probabilities(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Returns class probabilities [B, classes] of images, preprocessed as in the file or `data_config`.

        Raises:
            UnsupportedInputError: the file gives features, or nothing says how images are prepared.
        """
        if self.output == "features":
            raise UnsupportedInputError("probabilities", [f"{self.path} gives features, not logits"])
        if self.takes_pixels:
            rows = [self(self._as_pixels(image)) for image in images]
            output = np.concatenate(rows) if rows else self(np.empty((0, 1, 1, self.in_chans), np.uint8))
        else:
            prepared = [self.prepare(image) for image in images]
            output = self(np.stack(prepared).astype(self._signature.dtype))
        output = output.astype(np.float64)
        if self.output == "probabilities":
            return output / output.sum(axis=-1, keepdims=True)
        exponents = np.exp(output - output.max(axis=-1, keepdims=True))
        result: np.ndarray = exponents / exponents.sum(axis=-1, keepdims=True)
        return result

    def prepare(self, image: Image.Image) -> np.ndarray:
        """Prepares an image for this file: uint8 pixels, or fp32 [channels, height, width] by data_config."""
        if self.takes_pixels:
            return self._as_pixels(image)
        from vit_fast.apps.data import make_transform

        if self.data_config is None:
            raise UnsupportedInputError(
                f"preparing images for {self.path}",
                ["the file has no data_config: pass one (mean, std, crop_pct, ...)"],
            )
        if self.image_hw is None:
            raise UnsupportedInputError(
                f"preparing images for {self.path}", ["the file leaves the size open: give image_hw"]
            )
        return make_transform(self.data_config, self.image_hw, self.in_chans)(image).numpy()

    def example(self, batch: int, generator: np.random.Generator) -> np.ndarray:
        """Random images [batch, ...] as the file takes them, to time it with.

        Raises:
            UnsupportedInputError: the file leaves the size open, and no image_hw was given.
        """
        height, width = self.image_hw or ((224, 224) if self.takes_pixels else (0, 0))
        if not height:
            raise UnsupportedInputError(f"an example for {self.path}", ["the file leaves the size open: give image_hw"])
        if self.takes_pixels:
            return generator.integers(0, 256, (batch, height, width, self.in_chans), np.uint8)
        return generator.standard_normal((batch, self.in_chans, height, width)).astype(self._signature.dtype)

    @property
    def takes_pixels(self) -> bool:
        """True if the file takes uint8 [B, height, width, channels] and contains the preprocessing."""
        return self._signature.takes_pixels

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the outputs, as given or from the file; None if unknown."""
        return self._class_names

    def _as_pixels(self, image: Image.Image) -> np.ndarray:
        pixels = np.asarray(image.convert("L" if self.in_chans == 1 else "RGB"), np.uint8)
        return pixels.reshape(image.height, image.width, self.in_chans)


def _class_names(info: OnnxInfo, signature: Signature, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the names of the outputs, as given or from the file, after checking their number."""
    classes = signature.classes
    if names is not None and classes is not None and len(names) != classes:
        raise ValueError(f"class_names must have {classes} names, one per output of the file, got {len(names)}")
    said = info.class_names
    if said and classes is not None and len(said) != classes and info.output != "features":
        raise ModelFileError(f"{info.path}: its metadata is damaged: {len(said)} class names for {classes} outputs")
    return tuple(names) if names is not None else said


def _output(info: OnnxInfo, output: Output | None) -> str:
    """Returns the meaning of the output, as given or from the file."""
    if output is not None and output not in get_args(Output):
        raise ValueError(f"output must be one of {', '.join(map(repr, get_args(Output)))}, got {output!r}")
    if output is not None and info.output not in (None, output):
        raise ValueError(f"output must be {info.output!r} like the file's, got {output!r}")
    return output or info.output or "logits"


class Execution:
    """One session and how it is run.

    Args:
        session: ONNX Runtime's session.
        signature: What its file takes and gives.
        device: "cpu", "cuda", "tensorrt" or "openvino".
        device_index: Which GPU.
        max_batch: Larger batches are split into pieces of this size; a file with a fixed batch decides itself.
        bind: Whether inputs and outputs are bound as they lie in memory.
        cuda_graph: Whether the work is captured once and replayed, always at max_batch.
    """

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
        """Checked images [B, ...], numpy or torch -> the output [B, ...] as the input was, on its device."""
        if isinstance(images, np.ndarray):
            return self._in_pieces(images, self._run_on_host, np.concatenate)
        if images.device.type == "cuda" and self._device in ("cuda", "tensorrt") and self._bind:
            return self._in_pieces(images, self._run_on_cuda, _torch_cat)
        import torch

        return torch.from_numpy(self.run(images.detach().cpu().numpy())).to(images.device)

    def _in_pieces(self, images: Any, run: Callable[[Any], Any], concatenate: Callable[[list[Any]], Any]) -> Any:
        count, size = len(images), self.max_batch
        if count == 0:
            return self._nothing(images, run)
        if count <= size and not self._needs_full_batch:
            return run(images)
        pieces = [images[start : start + size] for start in range(0, count, size)]
        results = [run(self._padded(piece))[: len(piece)] for piece in pieces]
        return results[0] if len(results) == 1 else concatenate(results)

    def _nothing(self, images: Any, run: Callable[[Any], Any]) -> Any:
        """The output for no image; where the file does not say its shape, that of one, without it."""
        tail = self.signature.output_tail
        if isinstance(images, np.ndarray):
            if tail is not None:
                return np.empty((0, *tail), self.signature.output_dtype)
            return run(np.zeros((1, *(n or 1 for n in images.shape[1:])), self.signature.dtype))[:0]
        import torch

        if tail is not None:
            dtype = getattr(torch, str(self.signature.output_dtype))
            return torch.empty((0, *tail), device=images.device, dtype=dtype)
        return run(images.new_zeros((1, *(n or 1 for n in images.shape[1:]))))[:0]

    def _padded(self, piece: Any) -> Any:
        missing = self.max_batch - len(piece) if self._needs_full_batch else 0
        if missing <= 0:
            return piece
        if isinstance(piece, np.ndarray):
            return np.concatenate([piece, np.repeat(piece[-1:], missing, axis=0)])
        return _torch_cat([piece, piece[-1:].expand(missing, *piece.shape[1:])])

    def _run_on_host(self, images: np.ndarray) -> np.ndarray:
        images = np.ascontiguousarray(images)
        signature = self.signature
        if self._cuda_graph:
            import torch

            on_device = torch.from_numpy(images).to(f"cuda:{self._device_index}")
            replayed: np.ndarray = self._run_on_cuda(on_device).cpu().numpy()
            return replayed
        if not self._bind or signature.output_tail is None:
            with self._explained(images.shape):
                result: np.ndarray = self.session.run([signature.output], {signature.input: images})[0]
            return result
        output = np.empty((len(images), *signature.output_tail), signature.output_dtype)
        self._run_bound("cpu", 0, images, images.ctypes.data, output, output.ctypes.data)
        return output

    def _run_on_cuda(self, images: Any) -> Any:
        """torch tensors on the GPU, bound where they lie; with cuda_graph copied into buffers whose address stays."""
        import torch

        images = images.contiguous()
        signature = self.signature
        if signature.output_tail is None:
            raise UnsupportedInputError(
                "IO binding",
                ["the file does not say its output's shape, or its dtype is not floating: io_binding=False"],
            )
        output = torch.empty(
            (len(images), *signature.output_tail),
            dtype=getattr(torch, str(signature.output_dtype)),
            device=images.device,
        )
        if self._cuda_graph:
            if self._graph_buffers is None:
                self._graph_buffers = (images.clone(), output)
            fixed_input, output = self._graph_buffers
            fixed_input.copy_(images)
            images = fixed_input
        torch.cuda.current_stream(images.device).synchronize()  # ONNX Runtime works on a stream of its own
        self._run_bound("cuda", images.device.index or 0, images, images.data_ptr(), output, output.data_ptr())
        return output.clone() if self._cuda_graph else output

    def _run_bound(self, device: str, index: int, images: Any, at: int, output: Any, output_at: int) -> None:
        """Runs on arrays or tensors at these addresses of a device's memory."""
        signature, shape = self.signature, tuple(images.shape)
        binding = self.session.io_binding()
        binding.bind_input(signature.input, device, index, signature.dtype, shape, at)
        binding.bind_output(signature.output, device, index, signature.output_dtype, tuple(output.shape), output_at)
        with self._explained(shape):
            self.session.run_with_iobinding(binding)

    @contextlib.contextmanager
    def _explained(self, shape: tuple[int, ...]) -> Iterator[None]:
        """A shape that the signature leaves open and the graph does not take is bad input, and said so."""
        try:
            yield
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            if None not in self.signature.shape[1:] or "allocate" in str(error).lower():
                raise
            raise ValueError(
                f"images of shape {shape}: {self.signature.path} cannot run on them: {str(error)[:300]}"
            ) from error


def _torch_cat(tensors: list[Any]) -> Any:
    import torch

    return torch.cat(tensors)
