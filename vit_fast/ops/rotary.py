"""qk-norm and rotary positions on the qkv linear's output: public function, validation, dispatch to a backend."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .attention import is_exporting
from .backends import resolve_backend
from .checks import check_tensors
from .descriptions import QkNorm, Rope, check_qk_norm, checked_rope
from .rotary_op import qk_norm_rope_kernel


def qk_norm_rope(
    qkv: Tensor, *, qk_norm: QkNorm | None = None, rope: Rope | None = None, backend: str = "auto"
) -> Tensor:
    """q and k normalised, then rotated; v as it is.

    Args:
        qkv: Packed projections [B, N, 3, H, D], or of one packed batch [total, 3, H, D]; fp32, fp16 or bf16 (fp64 too
            with eager and sdpa).
        qk_norm: None normalises nothing.
        rope: None rotates nothing.
        backend: "eager", "sdpa", "triton" or "auto" (by qkv's device). eager and sdpa are the same formula here.
    Returns:
        The same shape and dtype, a tensor of its own; intermediate results are of the wider of the dtypes.
    Raises:
        ValueError: shapes disagree, or a kind of norm or layout is unknown.
        UnsupportedInputError: this backend cannot run this input; lists all reasons.
    Source: arXiv 2104.09864 (rotary positions), 2302.05442 (qk-norm).
    """
    check_tensors(qkv=qkv)
    if qkv.dim() not in (4, 5) or qkv.shape[-3] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: accepted are [B, N, 3, H, D] and [total, 3, H, D]")
    if qkv.dim() == 4:
        return qk_norm_rope(qkv[None], qk_norm=qk_norm, rope=rope, backend=backend)[0]
    if qk_norm is not None:
        check_qk_norm(qk_norm, *qkv.shape[-2:])
    if rope is not None:
        rope = checked_rope(rope, qkv.shape)
    backend = resolve_backend(backend, qkv.device, qkv.dtype)
    if backend == "triton" and not is_exporting():
        return qk_norm_rope_kernel(qkv, qk_norm, rope)
    return reference.qk_norm_rope(qkv, qk_norm, rope)
