"""What a block does to q and k between the qkv matmul and the attention: qk-norm and rotary positions, by the kernels.

Positions alone are the matmul's own business, whose epilogue turns q and k where all heads share the tables and their
pairs are neighbours in the folded weight. The rest is the kernel's of `rotary_op.py`, in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from .checks import no_tensor
from .rotary_op import qkv_settings, require_qkv_supported

if TYPE_CHECKING:
    from ..kernels.matmul_launch import Turns
    from ..kernels.rotary import QkvSettings


@dataclass(frozen=True)
class QkvStep:
    """Norms and positions of one block.

    Attributes:
        settings: As the kernels take them.
        in_matmul: Whether the matmul turns q and k.
        tensors: Norms and tables by name, to be checked.
    """

    settings: QkvSettings
    in_matmul: bool
    tensors: dict[str, Tensor | None]

    @property
    def is_nothing(self) -> bool:
        """Whether q and k stay as they are."""
        return self.settings.tables is None and self.settings.norm == "none"

    def paired_head(self, head_dim: int) -> int:
        """What `folding.NormedLinear` is told of the qkv layer."""
        return head_dim if self.in_matmul and not self.settings.interleaved else 0

    def turns(self, tokens: int) -> Turns | None:
        """What the matmul is told of the positions in images of so many tokens."""
        if not self.in_matmul or self.settings.tables is None:
            return None
        from ..kernels.matmul_launch import Turns

        cos, sin = self.settings.tables
        return Turns(cos[:, 0], sin[:, 0], tokens, self.settings.prefix)

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
            brought_together = self.in_matmul and not self.settings.interleaved
            settings = replace(self.settings, interleaved=self.settings.interleaved or brought_together)
            rotary.qk_norm_rope_launch(grad, grad, settings, inverse=True, separate=brought_together).run()
        return None


def qkv_step(
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, norm: str, eps: float, over: str, prefix: int, layout: str,
    is_folded: bool,
) -> QkvStep:  # fmt: skip
    """The step of these arguments, which are `flat_settings`.

    Args:
        is_folded: Whether the qkv layer was folded beforehand, with its rows in their natural order.
    """
    settings = qkv_settings(q_weight, q_bias, k_weight, k_bias, cos, sin, norm, eps, over, prefix, layout)
    shared = cos is not None and cos.shape[1] == 1
    in_matmul = shared and norm == "none" and (settings.interleaved or not is_folded)
    tensors = {
        "q_weight": q_weight, "q_bias": q_bias, "k_weight": k_weight, "k_bias": k_bias, "cos": cos, "sin": sin,
    }  # fmt: skip
    return QkvStep(settings, in_matmul, tensors)
