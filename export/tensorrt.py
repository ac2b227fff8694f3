"""Checks a graph against what TensorRT's parser is known to reject, without TensorRT.

Source: NVIDIA TensorRT documentation, "ONNX Opset Guide" (opsets 9 to 25) and "Working with Quantized Types";
onnx-tensorrt, docs/operators.md; its release notes for 10.14, the first with Attention.
"""

from __future__ import annotations

import onnx_ir as ir

from .graphs import constant_of

OPSETS = range(9, 26)
QUANTIZED = ("INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1")
TYPES = (*QUANTIZED, "FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT64", "INT32", "UINT8", "BOOL")


def tensorrt_reasons(model: ir.Model) -> list[str]:
    """Returns the reasons why TensorRT's parser rejects a graph."""
    reasons = []
    if (opset := model.opset_imports.get("")) not in OPSETS:
        reasons.append(f"opset must be between {OPSETS[0]} and {OPSETS[-1]}, got {opset}")
    for node in model.graph.all_nodes():
        name, outputs = f"{node.op_type} {node.name}", [value for value in node.outputs if value.uses()]
        if node.domain:
            reasons.append(f"{name} must be an operator of ONNX, got domain {node.domain}")
        if node.op_type == "Attention" and len(node.outputs) > 1:
            reasons.append(f"{name} must have one output, got {len(node.outputs)}")
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale, zero = (constant_of(value) for value in (*node.inputs[1:3], None)[:2])
            if scale is None or not (scale > 0).all() or (zero is not None and zero.astype(float).any()):
                reasons.append(f"the scale of {name} must be a positive constant, and its zero point 0")
            if zero is not None and ir.DataType.from_numpy(zero.dtype).name not in QUANTIZED:
                reasons.append(f"the type of {name} must be one of {', '.join(QUANTIZED)}")
        if node.op_type == "QuantizeLinear" and any(
            use.node.op_type != "DequantizeLinear" for value in outputs for use in value.uses()
        ):
            reasons.append(f"the output of {name} must be read by DequantizeLinear only")
    values = (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())
    kinds = {str(value.name): value.dtype.name for value in values if value.dtype is not None}
    reasons += [f"the type of {name} is not supported: {kind}" for name, kind in kinds.items() if kind not in TYPES]
    return reasons
