"""Running a session of ONNX Runtime on batches of any size, bound to the memory of its inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_fast.errors import UnsupportedInputError

from .signature import Signature

if TYPE_CHECKING:
    from torch import Tensor


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
