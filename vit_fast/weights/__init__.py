"""Weights: read from files, folders and the Hub (source, hub), loaded into a model and saved (load)."""

from .load import WeightsReport, load, load_weights, overrides_from, save
from .source import WeightsError

__all__ = ["WeightsError", "WeightsReport", "load", "load_weights", "overrides_from", "save"]
