"""Weights: read files, folders and the Hub (source); build models, load and save their weights (load)."""

from .load import WeightsReport, create_model, load, load_weights, save
from .source import WeightsError

__all__ = ["WeightsError", "WeightsReport", "create_model", "load", "load_weights", "save"]
