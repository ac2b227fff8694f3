"""A whole encoder block of another library by the Triton kernels, with no pointwise pass between its matmuls.

    a = attention(qkv(LN(x)))           LayerNorm folded into the matmul, where one linear gives q, k and v
    x = x + ls (a Wproj^T + b)          residual and LayerScale in the epilogue, which leaves the row statistics
    x = x + ls MLP(LN(x))               that this LayerNorm takes over

Only with backend "triton", and only while every part is what it was: with a hook, a wrapper, a mask or dropout the
attention layer runs as a module, and the second half stays one operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..layers import is_touched
from ..ops.attention import is_exporting
from ..ops.layer_norm_mlp import fused_layer_norm_mlp
from ..ops.linear import linear_residual
from .common import FusedModule, FusedNormMlp, NormMlp, at, linear_reasons, norm_reasons


@dataclass(frozen=True)
class AttentionHalf:
    """Where a block keeps the parts of x + drop_path(layer_scale * out(attention(norm(x)))).

    All are dotted attribute paths from the block; the attribute behind the last dot of layer_scale is the Parameter.
    """

    norm: str
    attention: str
    out: str
    linears: tuple[str, ...] = ()  # inside attention, read past their forward
    identities: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    layer_scale: str | None = None
    drop_path: str | None = None

    def modules(self, block: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules whose forward is bypassed, attention apart, with their paths."""
        paths = [self.norm, self.out, *self.linears, *self.identities, *self.dropouts]
        for owned in (self.layer_scale and self.layer_scale.rpartition(".")[0], self.drop_path):
            if owned:
                paths.append(owned)
        return [(path, at(block, path)) for path in paths if isinstance(at(block, path), nn.Module)]

    def fits(self, block: nn.Module) -> bool:
        """Whether the parts are there and of the classes that the kernels stand for."""
        out = at(block, self.out)
        plain_out = type(out) is nn.modules.linear.NonDynamicallyQuantizableLinear or not linear_reasons("", out)
        if not plain_out or norm_reasons("", at(block, self.norm)):
            return False
        if any(linear_reasons("", at(block, path)) for path in self.linears):
            return False
        if any(type(at(block, path)) is not nn.Identity for path in self.identities):
            return False
        return all(type(at(block, path)) is nn.Dropout for path in self.dropouts)


class FusedBlockBase(FusedNormMlp):
    """A block whose second half is one operator, and which is a chain of kernels altogether where that is possible."""

    vit_fast_first_half: AttentionHalf | None = None
    vit_fast_first_children: tuple[tuple[tuple[str, ...], type], ...] = ()

    @classmethod
    def first_half_of(cls, module: Any) -> AttentionHalf | None:
        """Where this instance keeps its attention half; None when it is of no known shape."""
        raise NotImplementedError

    def mixed_heads(self, x: Tensor) -> Tensor:
        """attention(norm(x)) before its output linear: [B, N, C] -> [B, N, H * D]."""
        raise NotImplementedError

    def prepare(self) -> None:
        super().prepare()
        half = type(self).first_half_of(self)
        if half is not None and half.fits(self):
            children = half.modules(self)
            self.vit_fast_first_half = half
            self.vit_fast_first_children = tuple((tuple(path.split(".")), type(child)) for path, child in children)

    def runs_whole(self) -> bool:
        """Whether the first half, too, can be computed past its modules; the second half has been checked."""
        half = self.vit_fast_first_half
        if self.vit_fast_backend != "triton" or half is None:
            return False
        if is_exporting():
            return False
        attention = at(self, half.attention)
        if not isinstance(attention, FusedModule) or is_touched(attention):
            return False
        if attention.vit_fast_backend != "triton":
            return False
        return self.untouched(self.vit_fast_first_children)

    def whole_block(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        half: Any = self.vit_fast_first_half  # runs_whole() holds
        out, drop_path = at(self, half.out), at(self, half.drop_path) if half.drop_path else None
        scale = _scale(self, half.layer_scale)
        mixed = self.mixed_heads(x)
        parts = self.vit_fast_parts
        norm = at(self, parts.norm)
        if drop_path is not None and _drops(drop_path):
            branch, statistics = linear_residual(mixed, out.weight, out.bias, layer_scale=scale, residual=None)
            x = x + drop_path(branch)
        else:
            x, statistics = linear_residual(
                mixed, out.weight, out.bias, layer_scale=scale, residual=x, next_eps=norm.eps
            )
        return self._mlp_half(x, statistics, parts)

    def _mlp_half(self, x: Tensor, statistics: Tensor | None, parts: NormMlp) -> Tensor:
        norm, fc1, fc2 = at(self, parts.norm), at(self, parts.fc1), at(self, parts.fc2)
        drop_path = at(self, parts.drop_path) if parts.drop_path else None
        dropping = drop_path is not None and _drops(drop_path)
        y, _ = fused_layer_norm_mlp(
            x, statistics, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias,
            eps=norm.eps, activation=self.vit_fast_activation, layer_scale=_scale(self, parts.layer_scale),
            residual=not dropping,
        )  # fmt: skip
        return y if drop_path is None or not dropping else x + drop_path(y)


def _drops(drop_path: nn.Module) -> bool:
    return bool(drop_path.training and getattr(drop_path, "drop_prob", 0))


def _scale(block: nn.Module, path: str | None) -> Tensor | None:
    scale = at(block, path) if path else None
    return scale if isinstance(scale, Tensor) else None
