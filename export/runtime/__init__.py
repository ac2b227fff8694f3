"""ONNX files of any exporter: checked, described, and run by ONNX Runtime."""
