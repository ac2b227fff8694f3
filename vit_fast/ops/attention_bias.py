"""Attention with `ScoreTerms`: a bias, a window mask, decomposed relative positions, a scale per head, groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .descriptions import Keys, ScoreTerms, check_tensors, four_sizes


def score_terms(
    scale: float | Tensor | None, bias: Tensor | None, window_mask: Tensor | None, rel: Any
) -> ScoreTerms | None:
    """Groups the arguments of `attention`; returns None if `scale` is not a tensor and the others are absent."""
    if bias is None and window_mask is None and rel is None and not isinstance(scale, Tensor):
        return None  # the usual call, without the host time of the checks below
    per_head = scale if isinstance(scale, Tensor) else None
    given: dict[str, Any] = {"bias": bias, "window_mask": window_mask, "scale": per_head}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    if rel is not None:
        if not isinstance(rel, tuple | list) or len(rel) != 2:
            got = f"a {type(rel).__name__}" + (f" of {len(rel)}" if isinstance(rel, tuple | list) else "")
            raise ValueError(f"rel must be a pair of tensors, got {got}: pass (rel_h, rel_w)")
        given |= {"rel_h": rel[0], "rel_w": rel[1]}
    check_tensors(**given)
    for name, tensor in given.items():
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}: call .to_dense()")
    return ScoreTerms(**given)


def checked_terms(
    terms: ScoreTerms, keys: Keys | None, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> ScoreTerms:
    """Checks the terms for `shape` (B, H, N, M, D) and q of `dtype`; returns them with a 4-d bias."""
    B, H, N, M, D = shape
    if keys is not None and (keys.cu_seqlens is not None or terms.groups is not None):
        name = "packed sequences" if keys.cu_seqlens is not None else "a key_mask with groups"
        raise ValueError(f"attention does not support {name} with a bias, window_mask, rel or a tensor as scale")
    if (groups := terms.groups) is not None:
        fits = groups.dim() == 2 and groups.numel() == N and groups.device == device
        if not fits or groups.dtype not in (torch.int32, torch.int64):
            got = f"{groups.dtype} {list(groups.shape)} on {groups.device}"
            raise ValueError(f"groups must be int32 or int64 [W, n] with W * n = {N} on {device}, got {got}")
        B, N, M = B * groups.shape[0], groups.shape[1], groups.shape[1]
    if terms.bias is not None and terms.bias.dim() == 3:
        terms = terms._replace(bias=terms.bias[None])
    tables = has_tables(terms)
    of_rel = (None, None, (D,)) if tables else ((B,), (H,), (N,), None)
    wanted: dict[str, tuple[Any, ...]] = {
        "bias": ((1, B), (1, H), (N,), (M,)), "window_mask": (None, (N,), (M,)), "rel_h": of_rel, "rel_w": of_rel,
        "scale": ((H,),),
    }  # fmt: skip
    for (name, sizes), tensor in zip(wanted.items(), terms):
        if tensor is None:
            continue
        fits = tensor.dim() == len(sizes) and all(
            wanted is None or size in wanted for size, wanted in zip(tensor.shape, sizes)
        )
        if not fits or tensor.device != device:
            shown = [" or ".join(map(str, dict.fromkeys(size))) if size else "any" for size in sizes]
            got = f"{list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} must have shape [{', '.join(shown)}] on {device}, got {got}")
        if tensor.dtype not in (dtype, torch.float32):
            accepted = " or ".join(dict.fromkeys(map(str, (torch.float32, dtype))))
            raise ValueError(f"{name} must be {accepted} like q, got {tensor.dtype}")
    if terms.rel_h is not None and terms.rel_w is not None:
        sides = [("Kh * Kw", 1 if tables else 3, M, "keys"), *([("h * w", 0, N, "queries")] if tables else [])]
        for name, axis, count, what in sides:
            high, wide = terms.rel_h.shape[axis], terms.rel_w.shape[axis]
            if high * wide != count:
                raise ValueError(f"rel must have {name} = {count}, the number of {what}, got {high} * {wide}")
    if (mask := terms.window_mask) is not None:
        if mask.shape[0] == 0:
            raise ValueError(f"window_mask must have at least one window, got {list(mask.shape)}")
        if mask.requires_grad and torch.is_grad_enabled():
            raise ValueError("window_mask must not require a gradient: call .detach(), or pass it as a part of bias")
    return terms


def has_tables(terms: ScoreTerms) -> bool:
    """True if rel consists of tables [h, Kh, D] and [w, Kw, D] for queries on a grid."""
    return terms.rel_h is not None and terms.rel_h.dim() == 3


def _on_grid(terms: ScoreTerms, q: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the queries [B, H, N, D] as [B, H, h, w, D], or B * W windows of them; and the tables in q's dtype."""
    rel: Any = terms.rel_h, terms.rel_w
    if terms.groups is not None:
        q = q.index_select(2, terms.groups.flatten()).unflatten(2, terms.groups.shape).transpose(1, 2).flatten(0, 1)
    return q.unflatten(2, [len(table) for table in rel]), [table.to(q.dtype) for table in rel]


def with_rel(terms: ScoreTerms, q: Tensor) -> ScoreTerms:
    """Replaces the tables of rel by the values for the queries q [B, H, N, D]."""
    if not has_tables(terms):
        return terms
    grid, (table_h, table_w) = _on_grid(terms, q)
    rel_h = torch.einsum("bhyxd,ykd->bhyxk", grid, table_h).flatten(2, 3)
    return terms._replace(rel_h=rel_h, rel_w=torch.einsum("bhyxd,xkd->bhyxk", grid, table_w).flatten(2, 3))


def rel_gradients(terms: ScoreTerms, q: Tensor, d_rel_h: Tensor, d_rel_w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `with_rel`: of q, and of both tables."""
    grid, (table_h, table_w) = _on_grid(terms, q)
    dh, dw = (each.to(q.dtype).unflatten(2, grid.shape[2:4]) for each in (d_rel_h, d_rel_w))
    dq = torch.einsum("bhyxk,ykd->bhyxd", dh, table_h) + torch.einsum("bhyxk,xkd->bhyxd", dw, table_w)
    dq = dq.flatten(2, 3)
    if (groups := terms.groups) is not None:
        dq = dq.unflatten(0, (-1, len(groups))).transpose(1, 2).flatten(2, 3)
        dq = torch.empty_like(dq).index_copy_(2, groups.flatten().long(), dq)
    return dq, torch.einsum("bhyxk,bhyxd->ykd", dh, grid), torch.einsum("bhyxk,bhyxd->xkd", dw, grid)


def additive_mask(terms: ScoreTerms, q: Tensor, valid: Tensor | None) -> Tensor | None:
    """Returns the attn_mask of torch's scaled_dot_product_attention; `valid` is False for masked keys."""
    added = reference.score_bias(terms, q.shape[0])
    if added is None:
        return valid
    return (added if valid is None else added.masked_fill(~valid, -torch.inf)).to(q.dtype)


def bias_of_mask(attn_mask: Tensor, q: Tensor, k: Tensor) -> ScoreTerms | None:
    """Converts a mask of scaled_dot_product_attention to a bias; returns None if torch must run the call."""
    sizes = four_sizes(attn_mask, q, k)
    if sizes is None or attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return None
    bias = attn_mask.reshape(sizes)
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill(~bias, -torch.inf)
    return ScoreTerms(bias.expand(*sizes[:2], q.shape[2], k.shape[2]))


def by_groups(attend: Callable[[Tensor], Tensor], qkv: Tensor, groups: Tensor) -> Tensor:
    """Calls `attend` with the groups of qkv [B, N, 3, H, D] as its batch [B * W, n, 3, H, D]; returns [B, N, H, D]."""
    tokens = groups.flatten()
    windows = qkv.index_select(1, tokens).unflatten(1, tuple(groups.shape)).flatten(0, 1)
    mixed = attend(windows).unflatten(0, (-1, groups.shape[0])).flatten(1, 2)
    return torch.zeros_like(mixed).index_copy(1, tokens.long(), mixed)
