"""Random inputs of attention with a bias, and its formula, written independently of the operators."""

from __future__ import annotations

from typing import Any

import torch
from kernel_support import DEVICE
from torch import Tensor

FORMS = ("bias", "bias per image", "one head", "window_mask", "rel", "rel tables", "scale", "key_mask", "masked")


def bias_inputs(
    forms: tuple[str, ...], sizes: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32, grid: int = 1,
    fp32_bias: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns q, k, v and the arguments that `forms` names; `sizes` are B, H, N, M and D, `grid` is Kw."""
    B, H, N, M, D = sizes
    normal = lambda *shape: torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()  # noqa: E731
    qkv = normal(B, N, H, D), normal(B, M, H, D), normal(B, M, H, D)
    made: dict[str, Any] = dict(zip("qkv", (tensor.transpose(1, 2) for tensor in qkv)))
    if {"bias", "bias per image", "one head", "masked"} & {*forms}:
        shape = (B if "bias per image" in forms else 1, 1 if "one head" in forms else H, N, M)
        bias = torch.randn(shape, device=DEVICE)
        if "masked" in forms:  # some keys of all queries, and all keys of query 0
            bias[torch.rand_like(bias) < 0.2] = -torch.inf
            bias[:, :, 0] = -torch.inf
        made["bias"] = bias.to(torch.float32 if fp32_bias else dtype).requires_grad_()
    if "window_mask" in forms:
        made["window_mask"] = torch.where(torch.rand(2, N, M, device=DEVICE) < 0.3, -100.0, 0.0).to(dtype)
    if "rel" in forms:
        made["rel"] = normal(B, H, N, M // grid), normal(B, H, N, grid)
    if "rel tables" in forms:
        columns = next((width for width in range(2, N) if N % width == 0), N)
        made["rel"] = normal(N // columns, M // grid, D), normal(columns, grid, D)
    if "scale" in forms:
        made["scale"] = ((torch.rand(H, device=DEVICE) + 0.1) * 2 * D**-0.5).to(dtype).requires_grad_()
    if "key_mask" in forms:
        made["key_mask"] = torch.rand(B, M, device=DEVICE) < 0.7
    return made


def leaves_of(made: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors that have a gradient, by name."""
    flat = {name: tensor for name, tensor in made.items() if name != "rel"}
    flat |= dict(zip(("rel_h", "rel_w"), made.get("rel", ())))
    return {name: tensor for name, tensor in flat.items() if tensor.requires_grad}


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, scale: Any = None, key_mask: Any = None, bias: Any = None,
    window_mask: Any = None, rel: Any = None,
) -> Tensor:  # fmt: skip
    (B, H, _, D), M = q.shape, k.shape[2]
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k)
    scores = scores * (D**-0.5 if scale is None else scale.view(1, H, 1, 1))
    if bias is not None:
        scores = scores + bias
    if window_mask is not None:
        scores = scores + torch.stack([window_mask[b % len(window_mask)] for b in range(B)])[:, None]
    if rel is not None:
        if rel[0].dim() == 3:
            places = [(n // len(rel[1]), n % len(rel[1])) for n in range(q.shape[2])]
            rel = [
                torch.stack([q[:, :, n] @ table[place[i]].t() for n, place in enumerate(places)], 2)
                for i, table in enumerate(rel)
            ]
        Kw = rel[1].shape[-1]
        scores = scores + torch.stack([rel[0][..., m // Kw] + rel[1][..., m % Kw] for m in range(M)], -1)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask.view(B, 1, 1, M), -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("bhnm,bhmd->bhnd", weights.to(v.dtype), v)


def in_dtype(made: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Converts the floating-point tensors to new leaves."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value

    return {name: convert(value) for name, value in made.items()}


def output_and_gradients(function: Any, made: dict[str, Any], do: Tensor, **options: Any) -> dict[str, Tensor]:
    """Returns the output "o" and the gradients of `leaves_of`, by name."""
    o, leaves = function(**made, **options), leaves_of(made)
    gradients = torch.autograd.grad(o, [*leaves.values()], do.to(o.dtype))
    return {"o": o.detach()} | dict(zip(leaves, gradients))
