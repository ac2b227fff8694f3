"""Builds the same architecture in another library, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from ..config import ViTConfig
from ..errors import UnsupportedInputError
from .rename import Converted


def take_weights(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    convert: Callable[[Mapping[str, Tensor], ViTConfig], Converted],
    config: ViTConfig,
) -> None:
    """Copies all our weights into a library's model, in place, under the library's names.

    Args:
        model: Model for `config`; its parameters keep dtype and device.
        weights: Weights by our names.
        convert: The library's `convert`. For this model it must only rename and concatenate, see
            tests/test_libraries.py.
        config: Shape of both models.
    Raises:
        UnsupportedInputError: a parameter exists in one of the two only; nothing was changed.
        RuntimeError: shapes of a parameter differ.
    """
    theirs = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    converted = convert(theirs, config)
    found = {
        their_name: part
        for our_name, their_names in converted.origins.items()
        if our_name in weights
        for their_name, part in zip(their_names, weights[our_name].chunk(len(their_names)))
    }
    problems = [f"its parameter {name} has no counterpart" for name in theirs if name not in found]
    problems += [f"vit-fast's parameter {name} has no counterpart" for name in weights if name not in converted.origins]
    refuse(type(model).__name__, problems)
    model.load_state_dict(found)


# Fields and properties that have ViTConfig's defaults in the plain ViT of the paper.
_PLAIN = (
    "class_token", "distilled", "reg_tokens", "pos_embed", "no_embed_class", "pre_norm", "global_pool",
    "norm_after_pool", "final_norm", "init_values", "stem_channels", "norm_layer", "mlp_layer", "scale_attn_norm",
    "scale_mlp_norm", "qk_norm", "rope", "proj_bias", "embed_norm",
)  # fmt: skip


def plain_vit_reasons(config: ViTConfig) -> list[str]:
    """Returns the reasons why a config is not the plain ViT of the paper."""
    plain = ViTConfig()
    return reasons(config, **{name: (getattr(plain, name),) for name in _PLAIN})


def reasons(config: ViTConfig, **supported: Iterable[object]) -> list[str]:
    """Returns an error message for each config field whose value is not supported."""
    return [
        f"{name} must be {' or '.join(map(repr, values))}, got {getattr(config, name)!r}"
        for name, values in supported.items()
        if getattr(config, name) not in values
    ]


def refuse(what: str, problems: list[str]) -> None:
    """Raises UnsupportedInputError with all problems, if there are any."""
    if problems:
        raise UnsupportedInputError(what, problems)
