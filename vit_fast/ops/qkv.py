"""What a block does to q and k between the qkv matmul and the attention: qk-norm and rotary positions, by the kernels.

Both are the matmul's own business where its epilogue can do them: it turns q and k where all heads share the tables and
their pairs are neighbours in the folded weight, and normalises heads of some sizes in half precision, where no backward
wants them as they were. The rest is the kernel's of `rotary_op.py`, in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import no_tensor
from .rotary_op import qkv_settings, require_qkv_supported

if TYPE_CHECKING:
    from ..kernels.matmul.matmul_launch import HeadStep
    from ..kernels.rotary import QkvSettings


@dataclass(frozen=True)
class QkvStep:
    """Norms and positions of one block.

    Attributes:
        settings: As the kernels take them.
        in_matmul: Whether the matmul does it.
        head_dim: D.
        tensors: Norms and tables by name, to be checked.
    """

    settings: QkvSettings
    in_matmul: bool
    head_dim: int
    tensors: dict[str, Tensor | None]

    @property
    def is_nothing(self) -> bool:
        """Whether q and k stay as they are."""
        return self.settings.tables is None and self.settings.norm == "none"

    @property
    def brings_together(self) -> bool:
        """Whether the matmul is to have pairs as neighbours that are none outside."""
        return self.in_matmul and self.settings.tables is not None and self.settings.layout == "half"

    @property
    def paired_head(self) -> int:
        """What `folding.NormedLinear` is told of the qkv layer."""
        return self.head_dim if self.brings_together else 0

    def of_heads(self, tokens: int) -> HeadStep | None:
        """What the matmul is told to do to q and k in images of so many tokens."""
        if not self.in_matmul:
            return None
        from ..kernels.matmul.matmul_launch import HeadStep

        return HeadStep(self.settings, tokens, self.head_dim)

    def check(self, packed: Tensor) -> None:
        """Raises UnsupportedInputError with every reason why the kernels cannot do this to qkv [B, N, 3, H, D]."""
        if not self.is_nothing:
            require_qkv_supported("a block", packed, self.tensors)

    def forward(self, packed: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
        """qkv [B, N, 3, H, D] for the attention, in the memory of `packed`, the matmul's result, unless that is kept.

        Returns:
            That, and what the backward needs of the matmul's result; no tensor where that is nothing.
        """
        from ..kernels import rotary

        if self.in_matmul or self.is_nothing:
            return packed, no_tensor(packed)
        if keep and self.settings.norm != "none":
            return rotary.qk_norm_rope(packed, self.settings), packed
        rotary.qk_norm_rope_launch(packed, packed, self.settings).run()
        return packed, no_tensor(packed)

    def backward(self, grad: Tensor, kept: Tensor) -> Tensor | None:
        """The gradient of the matmul's result, in the natural order of channels, in the memory of that of q, k and v.

        Args:
            grad: [B, N, 3, H, D], contiguous.
            kept: From `forward`.
        Returns:
            fp32 [2, 2, D or H D]: of q and k the gradients of the norm's weight and bias; None without those.
        """
        from ..kernels import rotary

        if self.settings.norm != "none":
            return rotary.qk_norm_rope_gradients(grad, kept, self.settings, grad)[1]
        if not self.is_nothing:
            together = self.brings_together
            settings = replace(self.settings, layout="neighbours") if together else self.settings
            rotary.qk_norm_rope_launch(grad, grad, settings, inverse=True, separate=together).run()
        return None


def qkv_step(
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, norm: str, eps: float, over: str, prefix: int, layout: str,
    head_dim: int, is_folded: bool, norms_in: torch.dtype | None = None,
) -> QkvStep:  # fmt: skip
    """The step of these arguments, which are `flat_settings`.

    Args:
        is_folded: Whether the qkv layer was folded beforehand, with its rows in their natural order unless the layout
            is "neighbours".
        norms_in: The dtype of a matmul that may normalise; None: it may not, as a backward wants what it made.
    """
    settings = qkv_settings(q_weight, q_bias, k_weight, k_bias, cos, sin, norm, eps, over, prefix, layout)
    in_matmul = norm == "none" or (over == "head" and norms_in is not None and _normalises(norms_in, head_dim))
    if cos is not None:
        in_matmul = in_matmul and cos.shape[1] == 1 and (layout != "half" or not is_folded)
    tensors = {
        "q_weight": q_weight, "q_bias": q_bias, "k_weight": k_weight, "k_bias": k_bias, "cos": cos, "sin": sin,
    }  # fmt: skip
    return QkvStep(settings, in_matmul and (cos is not None or norm != "none"), head_dim, tensors)


def _normalises(dtype: torch.dtype, head_dim: int) -> bool:
    from ..kernels.matmul.matmul_policy import NORMED_HEADS

    return dtype.itemsize == 2 and head_dim in NORMED_HEADS
