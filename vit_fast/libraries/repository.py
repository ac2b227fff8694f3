"""Facts from the configuration files of a model repository, whatever library wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import DataConfig, ViTConfig


@dataclass(kw_only=True)
class Facts:
    """Facts that come with weights beside the tensors; None where nothing is said.

    Attributes:
        config: The model that the weights were made for.
        data_config: How its images are prepared.
        class_names: Names of the head's outputs.
        notes: What a reader of the report should know.
    """

    config: ViTConfig | None = None
    data_config: DataConfig | None = None
    class_names: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)
