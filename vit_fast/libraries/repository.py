"""Facts from the configuration files of a model repository, whatever library wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config import DataConfig, ViTConfig


@dataclass(kw_only=True)
class Facts:
    """Facts that accompany the weights; None for unknown ones.

    Attributes:
        config: Config of the model of these weights.
        data_config: Preprocessing.
        class_names: Names of the head's outputs.
        notes: Notes for the report.
    """

    config: ViTConfig | None = None
    data_config: DataConfig | None = None
    class_names: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)
