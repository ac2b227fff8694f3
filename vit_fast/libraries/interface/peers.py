"""Peers: models of other libraries with our architecture and our weights, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from ...config import ViTConfig
from ...errors import UnsupportedInputError
from .rename import Converted


def take_weights(
    peer: nn.Module,
    weights: Mapping[str, Tensor],
    convert: Callable[[Mapping[str, Tensor], ViTConfig], Converted],
    config: ViTConfig,
) -> None:
    """Copies our weights into a library's model, in place, under the library's names.

    Args:
        peer: Model for `config`; its parameters keep dtype and device.
        weights: Weights by our names.
        convert: The library's `convert`. For this model, it may only rename and concatenate.
        config: Shape of both models.
    Raises:
        UnsupportedInputError: one of the two models has a parameter that the other lacks; nothing was changed.
        RuntimeError: shapes of a parameter differ.
    """
    theirs = {name: tensor.to("meta") for name, tensor in peer.state_dict().items()}
    converted = convert(theirs, config)
    found = {
        their_name: part
        for our_name, their_names in converted.origins.items()
        if our_name in weights
        for their_name, part in zip(their_names, weights[our_name].chunk(len(their_names)))
    }
    reasons = [f"its parameter {name} has no counterpart" for name in theirs if name not in found]
    reasons += [f"vit-fast's parameter {name} has no counterpart" for name in weights if name not in converted.origins]
    raise_unsupported(type(peer).__name__, reasons)
    peer.load_state_dict(found)


# Fields and properties that have ViTConfig's defaults in the plain ViT of the paper.
_PLAIN = (
    "class_token", "distilled", "reg_tokens", "pos_embed", "no_embed_class", "pre_norm", "global_pool",
    "norm_after_pool", "final_norm", "init_values", "stem_channels", "norm_layer", "mlp_layer", "scale_attn_norm",
    "scale_mlp_norm", "qk_norm", "rope", "proj_bias", "embed_norm",
)  # fmt: skip


def plain_vit_reasons(config: ViTConfig) -> list[str]:
    """Returns the reasons why a config is not the plain ViT of the paper."""
    plain = ViTConfig()
    return config_reasons(config, **{name: (getattr(plain, name),) for name in _PLAIN})


def config_reasons(config: ViTConfig, **supported: Iterable[object]) -> list[str]:
    """Returns a reason for each field whose value is not among the supported ones."""
    return [
        f"{name} must be {' or '.join(map(repr, values))}, got {getattr(config, name)!r}"
        for name, values in supported.items()
        if getattr(config, name) not in values
    ]


def raise_unsupported(what: str, reasons: list[str]) -> None:
    """Raises UnsupportedInputError with all reasons, if there are any."""
    if reasons:
        raise UnsupportedInputError(what, reasons)
