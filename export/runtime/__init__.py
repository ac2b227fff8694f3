"""Checks, describes and runs ONNX files of any exporter."""
