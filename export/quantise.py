"""Quantizes a graph to 8 bits: smooths, calibrates, and keeps layers in float until the loss is within the budget.

Quantizes the linear layers inside blocks and, for e4m3, the MatMuls of attention. Norms, patch embedding and head stay
in float; they need only a few percent of a ViT's operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vit_fast.apps.data import CALIBRATION_IMAGES, as_inputs, read_images
from vit_fast.errors import UnsupportedInputError, VitFastError
from vit_fast.quantization.schemes import Range, Scheme, fewest_kept

from .eight_bit import Product, attention_products, linears, quantise_dynamically, quantise_products
from .graphs import run_graph, save
from .onnx_calibration import calibrate, observe
from .options import ExportOptions, Target
from .report import EIGHT_BIT_BUDGET, Loss, Quantised, loss_of
from .runtime.metadata import inspect_onnx, read_signature

ERROR_BATCHES = 4
"""Number of held-out batches used to sort the MatMuls by error."""
MARGIN = 0.9
"""Share of the error budget that quantization may use. The file, compared with eager later, may use all of it."""


class QuantisationError(VitFastError, RuntimeError):
    """Quantization changes the model's outputs by more than the budget."""


def quantise(
    model: ir.Model, options: ExportOptions, calibration: Sequence[np.ndarray], held_out: Sequence[np.ndarray],
    cache: Path | None = None,
) -> tuple[ir.Model, Quantised]:  # fmt: skip
    """Quantizes a float graph with one input, which is smoothed in place.

    Args:
        model: The graph.
        options: Options of the file.
        calibration: Batches of inputs to observe; may be empty for "int8-dynamic", and with a cache.
        held_out: Batches of inputs to measure the loss on; if empty, all layers are quantized.
        cache: See `calibrate`.
    Raises:
        CalibrationError: the cache cannot be used, or activations are not finite.
        QuantisationError: the loss exceeds the budget even with half of the linear layers in float.
    """
    scheme = scheme_of(options)
    products = linears(model) + (attention_products(model) if scheme.kind == "e4m3" else [])
    expected = _outputs(model, held_out)
    ranges = calibrate(model, products, options, scheme, calibration, cache)

    def written(kept: Collection[Product]) -> ir.Model:
        chosen = [product for product in products if product not in kept]
        if not options.needs_calibration:
            return quantise_dynamically(model, chosen)
        return quantise_products(model, chosen, scheme, ranges, fused=options.target == "ort-cpu")

    made = written(())  # the last graph that passed, with the fewest layers in float
    losses: list[Loss] = []

    def passes(kept: Collection[Product]) -> bool:
        nonlocal made
        candidate = written(kept) if kept else made
        losses.append(loss_of(_outputs(candidate, held_out), expected, options.output))
        if passed := losses[-1].acceptable(MARGIN):
            made = candidate
        return passed

    kept: tuple[Product, ...] = ()
    if held_out and not passes(()):
        attention = sum(product.weight is None for product in products)
        most = attention + (len(products) - attention) // 2
        kept = fewest_kept(_by_error(model, products, scheme, ranges, held_out), passes, most) or ()
        if not kept:
            raise QuantisationError(
                f"{options.precision}: with {most} of {len(products)} MatMuls in float, {losses[-1].line()}; "
                f"must be within {MARGIN:.0%} of: {EIGHT_BIT_BUDGET}"
            )
    names, methods = tuple(product.name for product in kept), Counter(one.method for one in ranges.values())
    return made, Quantised(len(products) - len(kept), names, dict(methods))


def quantise_file(source: Path, path: Path, target: Target, files: Sequence[Path]) -> Quantised:
    """Quantizes a float file of any exporter: its linear layers over tokens, calibrated on image files, to int8.

    Raises:
        UnsupportedInputError: the input is not preprocessed images [B, channels, height, width] in fp32, or the file
            has no such layers.
        ModelFileError: the file is missing, damaged, unsafe, or takes no images.
    """
    info = inspect_onnx(source)
    signature = read_signature(info)
    reasons = []
    if signature.dtype != np.float32:
        reasons.append(f"the file must take preprocessed images in float32, got {signature.dtype}")
    elif signature.image_hw is None:
        reasons.append("the file must take images of one size, got any size")
    version = max(info.opsets.get(domain, 0) for domain in ("", "ai.onnx"))
    try:
        options = ExportOptions(opset=version, precision="int8", target=target)
    except ValueError as error:
        reasons.append(str(error))
    if reasons or signature.image_hw is None:
        raise UnsupportedInputError(f"int8 of {source.name}", reasons)
    size = signature.shape[0] or 1
    photos = read_images(files, size * -(-CALIBRATION_IMAGES // size))  # whole batches
    inputs = as_inputs(photos, info.data_config, signature.image_hw, signature.in_chans)
    graph = ir.external_data.load_to_model(ir.load(source))
    try:
        made, done = quantise(graph, options, [one.numpy() for one in inputs.split(size)], ())
    except ValueError as error:  # no linear layer to quantize
        raise UnsupportedInputError(f"int8 of {source.name}", [str(error)]) from None
    save(made, path)
    return done


def scheme_of(options: ExportOptions) -> Scheme:
    """Returns the number format of a precision on a target."""
    if options.precision == "fp8":
        return Scheme("e4m3")
    return Scheme("int8" if options.target == "tensorrt" else "uint8")


def _outputs(model: ir.Model, batches: Sequence[np.ndarray]) -> np.ndarray:
    rows = [arrays[0] for arrays in run_graph(model, batches)] if batches else []
    return np.concatenate(rows) if rows else np.empty(0)


def _by_error(
    model: ir.Model, products: Sequence[Product], scheme: Scheme, ranges: Mapping[str, Range],
    held_out: Sequence[np.ndarray],
) -> list[Product]:  # fmt: skip
    """Sorts the MatMuls: attention first, then by the error if one alone is quantized, the largest first."""
    seen = observe(model, products, held_out[:ERROR_BATCHES])

    def error(product: Product) -> float:
        found = [(seen[name].tokens, ranges.get(name)) for name in (str(value.name) for value in product.activations)]
        exact = [x for x, _ in found]
        moved = [scheme.rounded(x, known or Range(float(x.min()), float(x.max()), "its own")) for x, known in found]
        if product.weight is None:
            return max(_relative(m, x) for m, x in zip(moved, exact))
        weight = product.weight.astype(np.float32)
        return _relative(moved[0] @ scheme.rounded_weight(weight), exact[0] @ weight)

    return sorted(products, key=lambda product: (product.weight is not None, -error(product)))


def _relative(moved: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(moved - exact).sum() / max(np.square(exact).sum(), 1e-30))
