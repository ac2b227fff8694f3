"""ONNX files of any exporter: read with suspicion, described, and run by ONNX Runtime."""
