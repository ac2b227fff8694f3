"""The way back through a norm between the hidden layer of an MLP and its second linear layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .checks import present
from .descriptions import is_rms

if TYPE_CHECKING:
    from ..kernels.linear.folding import NormedLinear
    from ..kernels.linear.weight_gradients import FoldedProducts


@dataclass
class HiddenGradient:
    """What the backward has of such a norm and the linear layer behind it.

    Attributes:
        linear: Both, of dense tensors.
        scale: LayerScale [C] behind them, or None.
        branch, statistics: What `kernels/linear/hidden_norm.py` kept.
        sums: Parts of the sums over the rows of dy, from `along` on.
    """

    linear: NormedLinear
    scale: Tensor | None
    branch: Tensor
    statistics: Tensor
    sums: Tensor | None = field(default=None, init=False)

    def along(self, dy: Tensor) -> Tensor:
        """The means of the product of normalised rows and their gradient, fp32 [M], for dy [M, C]."""
        from ..kernels.linear import hidden_norm

        along, self.sums = hidden_norm.along_rows(dy, self.branch, self.scale, self.linear.weight.shape[1])
        return along

    def products(self, part: Tensor) -> FoldedProducts:
        """What the parameters' gradients are made of; `part` is dy^T h^, without LayerScale."""
        from ..kernels.linear.weight_gradients import FoldedProducts

        assert self.sums is not None, "along comes first"
        linear, scale = self.linear, self.scale
        if scale is not None:  # the affine's gradients see W through it
            bias = None if linear.bias is None else linear.bias.float()
            linear = replace(linear, weight=linear.weight.float() * scale.float()[:, None], bias=bias)
        return FoldedProducts(part, self.sums, linear)

    def gradients(self, found: Any, like: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Of the linear layer's weight, bias and LayerScale, and of the norm's; of an absent one an empty tensor."""
        of_norm = present(found.gamma, like), present(found.beta, like)
        linear, scale = self.linear, self.scale
        if scale is None:
            return (found.weight, present(found.bias, like), present(None, like)), of_norm
        d_scale = (found.weight * linear.weight.float()).sum(1)
        d_bias = None
        if linear.bias is not None:
            d_scale = d_scale + found.bias * linear.bias.float()
            d_bias = (found.bias * scale.float()).to(linear.bias.dtype)
        d_weight = (found.weight * scale.float()[:, None]).to(linear.weight.dtype)
        return (d_weight, present(d_bias, like), d_scale.to(scale.dtype)), of_norm


def hidden_gradient(
    branch: Tensor, statistics: Tensor, inner_weight: Tensor | None, inner_bias: Tensor | None, fc2_weight: Tensor,
    fc2_bias: Tensor | None, layer_scale: Tensor | None, inner_norm: str,
) -> HiddenGradient | None:  # fmt: skip
    """The norm `inner_norm` before fc2; None where it is "none"."""
    if inner_norm == "none":
        return None
    from ..kernels.linear.folding import NormedLinear

    linear = NormedLinear(fc2_weight, fc2_bias, inner_weight, inner_bias, is_rms(inner_norm)).contiguous()
    return HiddenGradient(linear, layer_scale, branch, statistics)
