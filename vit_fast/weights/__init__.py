"""Weights: read files, folders and the Hub (source), load and save them (load), build models (factory)."""

from .load import WeightsReport, load, load_weights, overrides_from, save
from .source import WeightsError

__all__ = ["WeightsError", "WeightsReport", "load", "load_weights", "overrides_from", "save"]
