"""Large channels moved out of the activations into the weights: exact, folded into norm and linear.

    x W = (x / s) (s W),     s_j = sqrt(max |x_j| / max |W_j|)

The norm before the linear gives x / s when its own weight and bias are divided by s. Large ViTs have single channels
100 to 1000 times the rest, which would take an activation's whole range in eight bits.

Source: SmoothQuant, arxiv.org/abs/2211.10438; s as in `vit_fast/quantization/ranges.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from vit_fast.quantization.ranges import power_of_two, smoothing_scale

from .graphs import Writer, constant_of
from .products import Product

PARAMETERS = {
    "LayerNormalization": (1, 2), "SkipLayerNormalization": (2, 3), "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,), "SkipSimplifiedLayerNormalization": (2,),
}  # fmt: skip
"""Where a norm's inputs have weight and bias."""
DEVIATIONS = 3.0
"""How far from the mean, in standard deviations, a normalised channel is taken to go where no image says more."""


def smooth(
    model: ir.Model, products: Sequence[Product], peaks: Mapping[str, Sequence[float]], *, floating: bool
) -> dict[str, np.ndarray]:
    """Moves scale from every norm's output into the linears that follow; in place, the function stays the same.

    Args:
        model: The graph.
        products: The linears. A norm that something else reads as well is left alone.
        peaks: By name of an activation, the largest magnitude of each channel [C]; a norm's output that is not in it
            is estimated by the norm's own weight and bias.
        floating: Whether the eight bits are e4m3: then by powers of two.
    Returns:
        By name of the activation, the scale [C] that it was divided by; the linears' weights are new constants.
    """
    readers: dict[str, list[Product]] = {}
    for product in products:
        if product.weight is not None:
            readers.setdefault(str(product.activations[0].name), []).append(product)
    scales = {}
    for name, users in readers.items():
        x = users[0].activations[0]
        norm = x.producer()
        if norm is None or norm.op_type not in PARAMETERS or len(x.uses()) != len(users) or x.is_graph_output():
            continue
        inputs = [norm.inputs[i] if i < len(norm.inputs) else None for i in PARAMETERS[norm.op_type]]
        parameters = [constant_of(value) for value in inputs]
        if parameters[0] is None or any(value is not None and p is None for value, p in zip(inputs, parameters)):
            continue
        peak = np.asarray(peaks[name]) if name in peaks else _expected_peak(parameters)
        scale = smoothing_scale(peak, [constant_of(user.node.inputs[1]) for user in users])  # type: ignore[misc]  # linears
        scale = power_of_two(scale) if floating else scale
        write = Writer(model.graph, f"{norm.name}.smoothed", before=norm)
        for index, parameter in zip(PARAMETERS[norm.op_type], parameters):
            if parameter is not None:
                divided = (parameter.astype(np.float64) / scale).astype(parameter.dtype)
                norm.replace_input_with(index, write.constant(divided, "parameter"))
        for user in users:
            weight = constant_of(user.node.inputs[1])
            assert weight is not None
            scaled = (weight.astype(np.float64) * scale[:, None]).astype(weight.dtype)
            user.node.replace_input_with(1, write.constant(scaled, "weight"))
        scales[name] = scale
    return scales


def _expected_peak(parameters: list[np.ndarray | None]) -> np.ndarray:
    weight, bias = parameters[0], parameters[1] if len(parameters) > 1 else None
    assert weight is not None
    peak: np.ndarray = DEVIATIONS * np.abs(weight.astype(np.float64))
    return peak if bias is None else peak + np.abs(bias.astype(np.float64))
