"""Data, prediction and evaluation."""
