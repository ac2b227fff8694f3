"""The builds (`offline.Build`: a kernel in one configuration) of the attention kernels, for the static checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ...ops.descriptions import ScoreTerms
from ..attention.attention import attention_backward, attention_forward
from ..attention.attention_launch import AttentionCall
from ..device import generation, has_fp8, matrix_instruction
from . import offline
from .offline import Build

# (tokens, head_dim). First row: ViT at 224 and 384 pixels, ViT-H, SigLIP So400m. Second row: other tile widths
# (`Problem.width`).
_HALF_SHAPES = (
    (197, 64), (256, 64), (577, 64), (197, 80), (257, 80), (256, 72), (729, 72),
    (197, 32), (197, 48), (577, 48), (577, 96), (577, 128),
)  # fmt: skip
_FP32_SHAPES = ((197, 64), (257, 80), (577, 128))
_FP16_SHAPES = ((197, 64), (577, 64), (257, 80))
# (length of each packed sequence, head_dim)
_PACKED_SHAPES = (
    (1024, 80), (64, 80),  # images and windows of Qwen-VL
    (1024, 64), (1024, 72),  # SigLIP 2
    (1024, 128), (64, 128), (1024, 96), (1024, 48), (1024, 32),
)  # fmt: skip
_MASKED_SHAPES = ((256, 72), (1024, 64), (1024, 128))
_E4M3_SHAPES = ((197, 64, "tma"), (577, 64, "tma"), (257, 80, "tma"), (729, 72, "vector"))
# (tokens, head_dim, `Problem.form`) of the core builds, which the tests compile; all in bf16 with access "tma".
_CORE = {(197, 64, "fixed"), (1024, 80, "packed")}
_CORE_OF = {  # additional core builds of an architecture
    "sm_90": {(577, 64, "fixed"), (257, 80, "fixed"), (1024, 72, "packed"), (256, 72, "masked")},
    "sm_120": {(577, 96, "fixed"), (577, 128, "fixed")},  # other tiles than on sm_80, which would spill on sm_120
}
# (batch, tokens, heads, head_dim, columns of the grid of `rel` or 0, rows of the window mask or 0) of models with a
# bias: windows of Swin at 224 and 384 pixels, BEiT, windows and global blocks of SAM, ViT-H with a bias
_BIASED_SHAPES = (
    (8192, 49, 4, 32, 0, 64), (2048, 144, 4, 32, 0, 16), (64, 197, 12, 64, 0, 0), (25, 196, 12, 64, 14, 0),
    (1, 4096, 12, 64, 64, 0), (64, 257, 16, 80, 0, 0), (8, 256, 8, 128, 0, 0),
)  # fmt: skip
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32"}
_HEADS = 4


def attention_builds(arch: str) -> Iterator[Build]:
    """Yields builds for each access, form and dtype that `attention_policy.Problem` distinguishes."""
    for access in ("tma", "vector", "scalar"):
        for shape in _HALF_SHAPES:
            yield from _builds(arch, *shape, access)
    yield from _builds(arch, 197, 64, batch=1)
    yield from _builds(arch, 196, 64, queries=1)  # attention pooling of SigLIP: one query per image
    for shape in _FP16_SHAPES:
        yield from _builds(arch, *shape, dtype=torch.float16)
    for form, shapes in (("packed", _PACKED_SHAPES), ("masked", _MASKED_SHAPES)):
        for shape in shapes:
            for access in ("tma", "scalar"):
                yield from _builds(arch, *shape, access, form=form)
    for form in ("fixed", "packed", "masked"):
        for shape in _FP32_SHAPES:
            yield from _builds(arch, *shape, dtype=torch.float32, form=form)
    for biased in _BIASED_SHAPES:
        yield from biased_builds(arch, *biased)
        if 64 < biased[1] < 4096 and biased[3] < 80:
            yield from biased_builds(arch, *biased, torch.float32)
    for case in _E4M3_SHAPES if has_fp8(arch) else ():
        yield from _builds(arch, *case, form="to e4m3")


def _builds(
    arch: str, tokens: int, head_dim: int, access: str = "tma", *, dtype: torch.dtype = torch.bfloat16,
    batch: int = 256, queries: int | None = None, form: str = "fixed",
) -> Iterator[Build]:  # fmt: skip
    """Yields the builds of forward and backward. For form "to e4m3" (e4m3 output), yields only those of the forward."""
    q, k, v, o, do = _tensors(tokens, head_dim, access, dtype, batch, queries or tokens, form)
    call = AttentionCall(q, k, v, _empty(*q.shape[:3]), head_dim**-0.5)
    if form == "masked":
        call = call._replace(key_mask=_empty(batch, tokens, dtype=torch.bool))
    elif form == "packed":
        call = call._replace(sequences=_empty(batch + 1, dtype=torch.int32), longest=tokens)
    lengths = f"N{tokens}" if queries is None else f"Nq{queries} N{tokens}"
    core = access == "tma" and dtype == torch.bfloat16 and (tokens, head_dim, form) in _CORE | _CORE_OF.get(arch, set())
    case = f"{lengths} D{head_dim} B{batch} {access}" + ("" if form == "fixed" else f" {form}")
    yield from _builds_of(call, o, do, (q, k, v), arch, case, core, _empty(1) if form == "to e4m3" else None)


def biased_builds(
    arch: str, batch: int, tokens: int, heads: int, head_dim: int, grid: int, masks: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Build]:  # fmt: skip
    """Yields the builds of attention with a bias, or with `rel` if grid > 0, and a window mask if masks > 0."""
    qkv, gradients = _empty(2, batch, tokens, 3, heads, head_dim, dtype=dtype).transpose(2, 4)
    (q, k, v), lse = qkv.unbind(2), _empty(batch, heads, tokens)
    o, do = _empty(2, batch, tokens, heads, head_dim, dtype=dtype).transpose(2, 3)
    sides = (tokens // grid, grid) if grid else ()
    rel = [_empty(batch, heads, tokens, side, dtype=dtype) for side in sides] or (None, None)
    bias = None if grid else _empty(1, heads, tokens, tokens, dtype=dtype)
    terms = ScoreTerms(bias, _empty(masks, tokens, tokens, dtype=dtype) if masks else None, *rel)
    call = AttentionCall(q, k, v, lse, head_dim**-0.5, terms=terms)
    # the other architectures of a generation have the same tiles
    core = dtype == torch.bfloat16 and tokens == 49 and arch in ("sm_80", "sm_90", "sm_100")
    ending = (f"rel{grid}" if grid else "bias") + (" masks" if masks else "")
    yield from _builds_of(call, o, do, gradients.unbind(2), arch, f"N{tokens} D{head_dim} B{batch} {ending}", core)


def _builds_of(
    call: AttentionCall, o: torch.Tensor, do: torch.Tensor, gradients: Sequence[torch.Tensor], arch: str, case: str,
    core: bool, o_scale: torch.Tensor | None = None,
) -> Iterator[Build]:  # fmt: skip
    dtype, (dq, dk, dv) = call.q.dtype, gradients
    with offline.recorded(offline.gpu(arch)) as launches:
        if o_scale is None:
            attention_forward(call, o)
            attention_backward(call, o, do, dq, dk, dv)
        else:
            attention_forward(call, torch.empty_like(o, dtype=torch.float8_e4m3fn), o_scale)
    for launch in launches:
        c = launch.constants
        rows = (c.get("LOOP") or c.get("ROW") or c["TILE"])["TILE" in c and "dkdv" in launch.name]
        needs = []
        if dtype != torch.float32 and (rows >= 64 or generation(arch) == "ampere"):  # wgmma and tcgen05 need 64 rows
            needs.append(matrix_instruction(arch))
        descriptors = {name for name, value in launch.args.items() if isinstance(value, TensorDescriptor)}
        needs += ["tma_loads"] if descriptors else []
        needs += ["tma_stores"] if descriptors & {"o_lo", "dq_lo", "dk_lo"} else []
        yield Build(launch.name, f"{_NAMES[dtype]} {case}", launch, core=core, needs=tuple(needs))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _tensors(
    tokens: int, head_dim: int, access: str, dtype: torch.dtype, batch: int, queries: int, form: str
) -> list[torch.Tensor]:
    """Returns q, k, v, o and the gradient of o, each [B, H, N, D], for which the policy selects `access`.

    For "vector", the batch stride of q, k and v is 0, which TMA forbids. For "scalar", q, k and v are unaligned.
    """
    shape = (1 if access == "vector" else batch, max(queries, tokens), 3, _HEADS, head_dim)
    flat = _empty(torch.Size(shape).numel() + 1, dtype=dtype)
    flat = flat[1:] if access == "scalar" else flat[:-1]
    q, k, v = flat.view(shape).expand(batch, -1, -1, -1, -1).transpose(1, 3).unbind(2)
    o, do = _empty(2, batch, queries, _HEADS, head_dim, dtype=dtype).transpose(2, 3)
    tensors = [q[:, :, :queries], k[:, :, :tokens], v[:, :, :tokens], o, do]
    if form == "packed":  # concatenate all images along the tokens
        tensors = [tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for tensor in tensors]
    return tensors
