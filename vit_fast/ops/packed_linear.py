"""Linear layers on the CPU whose weights are packed once, instead of in every call of `F.linear`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256  # tokens that weights are packed for; tested with 5, 197 and 1,576 tokens
FEW_TOKENS = 16  # with fewer tokens, the convolution is not faster

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "relu": torch.relu_,
    "silu": torch.ops.aten.silu_.default,
    "quick_gelu": lambda x: torch.sigmoid(1.702 * x).mul_(x),
}
_NO_EPILOGUE: tuple[str, list[float], str] = ("none", [], "")
_EPILOGUES: dict[str, tuple[str, list[float], str]] = {
    "gelu": ("gelu", [], "none"), "gelu_tanh": ("gelu", [], "tanh"), "relu": ("relu", [], ""),
    "silu": ("swish", [], ""),
}  # fmt: skip
_ONE_PIXEL = ([0, 0], [1, 1], [1, 1], 1)  # padding, stride, dilation and groups of a convolution


def implementations(dtype: torch.dtype) -> list[str]:
    """Returns the implementations of a linear layer; the first is the default, and runs as before `freeze`.

    "onednn-epilogue" fuses activation and residual into the matmul; all others compute them afterwards, in place.
    "conv" is oneDNN's convolution with a kernel of one pixel, whose pixels are the tokens.
    """
    return ["aten", "onednn-epilogue", "onednn"] + (["mkl", "conv"] if dtype == torch.float32 else [])


class PackedLinear:
    """Computes activation(x W^T + b) or residual + x W^T + b for contiguous x; folds LayerScale into W and b."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None, activation: str | None = None, *,
        implementation: str,
    ) -> None:  # fmt: skip
        if scale is not None:
            weight = (weight.float() * scale.float()[:, None]).to(weight.dtype)
            bias = None if bias is None else bias.float() * scale.float()
        self._by, _, self._fused = implementation.partition("-")
        self.in_place = self._by == "aten" and scale is None and weight.is_contiguous()  # reads the tensors themselves
        # copy the bias, so that an update of the parameter changes no bias before the weight is packed again
        self._bias = None if bias is None else bias.to(weight.dtype, copy=not self.in_place)
        self._epilogue = _EPILOGUES.get(str(activation), _NO_EPILOGUE) if self._fused else _NO_EPILOGUE
        after = activation is not None and self._epilogue is _NO_EPILOGUE
        self._activation = _IN_PLACE[str(activation)] if after else None
        self.shape = weight.shape
        if self._by in ("aten", "conv"):
            self._weight: Any = weight if self.in_place else weight.clone(memory_format=torch.contiguous_format)
        else:
            mkl, mkldnn = torch.ops.mkl, torch.ops.mkldnn
            pack = mkl._mkl_reorder_linear_weight if self._by == "mkl" else mkldnn._reorder_linear_weight
            self._weight = pack(weight.contiguous(), ROWS)
        if self._by == "conv":
            self._weight = self._weight, None  # and the number of tokens and the layout if it is packed; (): no more
        self._shape_only = weight.new_empty(()).expand(weight.shape)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._by == "mkl":
            # The last argument is the number of tokens that the weight was packed for. If it differs from the number
            # of tokens in x, torch reads the unpacked weight.
            rows = x.numel() // x.shape[-1]
            y: Tensor = torch.ops.mkl._mkl_linear.default(x, self._weight, self._shape_only, self._bias, rows)
        elif self._by == "aten":
            y = F.linear(x, self._weight, self._bias)
        elif self._by == "conv":
            y = self._convolve(x)
        elif residual is not None and self._fused:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        else:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, *self._epilogue)
        if self._activation is not None:
            y = self._activation(y)
        return y if residual is None else y.add_(residual)

    def _convolve(self, x: Tensor) -> Tensor:
        """Packs the weight in the first call, because oneDNN's layout depends on the numbers of images and tokens.

        Unpacks it for good if a call has another layout, for which oneDNN would take up to 100 times as long. The same
        for another number of tokens, because a model with images of many sizes would search for the layout of each.
        """
        *_, tokens, channels = x.shape
        pixels = x.view(-1, 1, tokens, channels).permute(0, 3, 1, 2)  # channels_last
        weight, layout = self._weight
        if layout is None and tokens >= FEW_TOKENS:
            weight = _packed_kernel(weight, pixels.shape)
            self._weight = weight, (tokens, _layout(self.shape, pixels.shape, torch.get_num_threads()))
        elif weight.is_mkldnn and (
            tokens != layout[0] or _layout(self.shape, pixels.shape, torch.get_num_threads()) != layout[1]
        ):
            weight = weight.to_dense().flatten(1)
            self._weight = weight, ()
        if not weight.is_mkldnn:
            return F.linear(x, weight, self._bias)
        y: Tensor = torch.ops.mkldnn._convolution_pointwise.default(
            pixels, weight, self._bias, *_ONE_PIXEL, *_NO_EPILOGUE
        )
        return y.permute(0, 2, 3, 1).view(*x.shape[:-1], -1)


def _packed_kernel(weight: Tensor, pixels: Sequence[int]) -> Tensor:
    return torch.ops.mkldnn._reorder_convolution_weight(weight[:, :, None, None], *_ONE_PIXEL, pixels)


@functools.lru_cache(256)
def _layout(shape: torch.Size, pixels: torch.Size, threads: int) -> tuple[int, ...]:
    """Returns oneDNN's description of the layout of a weight [N, K] for pixels [B, K, 1, tokens]."""
    packed = _packed_kernel(torch.empty(shape, device="cpu", dtype=torch.float32), pixels)
    return tuple(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Returns True if linear layers of a dtype can be packed on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return torch.backends.mkl.is_available()
    names = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in names and bool(getattr(torch.ops.mkldnn, names[dtype])())
