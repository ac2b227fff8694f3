"""A graph in eight bits: smoothed, calibrated, and with as many layers left float as its budget asks for.

Quantised are the linears inside the blocks, and for e4m3 attention's products too. What is left float otherwise is a
few per cent of a ViT's arithmetic: norms, patch embedding, head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vit_fast.errors import UnsupportedInputError, VitFastError
from vit_fast.quantization.ranges import Range
from vit_fast.quantization.schemes import Scheme, fewest_kept

from . import model_files
from .eight_bit import Product, attention_products, linears, quantise_dynamically, quantise_products
from .graphs import run_graph
from .loss import BUDGET, Loss, loss_of
from .metadata import inspect_onnx, read_signature
from .onnx_calibration import Calibration, choose_ranges, fingerprint_of, load_calibration, observe, smooth
from .options import ExportOptions, Target
from .photographs import CALIBRATION_IMAGES, as_inputs, photographs

DAMAGE_BATCHES = 4
"""Held-out batches that tell which products to leave float."""
MARGIN = 0.9
"""Share of the error budget for the graph; the file is compared with eager afterwards."""


@dataclass(frozen=True)
class Quantised:
    """Result of quantise.

    Attributes:
        products: Number of products in eight bits.
        kept: Names of the layers that stay floating to limit the loss.
        methods: Number of ranges by the method that chose them.
    """

    products: int
    kept: tuple[str, ...]
    methods: dict[str, int]

    def line(self) -> str:
        kept = f"; left float: {', '.join(self.kept)}" if self.kept else ""
        methods = "; ranges by " + ", ".join(f"{how} {n}" for how, n in sorted(self.methods.items()))
        return f"{self.products} products{methods if self.methods else ''}{kept}"


class QuantisationError(VitFastError, RuntimeError):
    """A model loses more in eight bits than its user would accept."""


def quantise(
    model: ir.Model,
    options: ExportOptions,
    calibration: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    cache: Path | None = None,
) -> tuple[ir.Model, Quantised]:
    """Returns a graph in eight bits, in the scheme of its precision and target.

    Args:
        model: A float graph with one input; its large channels are smoothed in place.
        options: What was asked of the file.
        calibration: Batches of inputs to measure ranges on; may be empty for "int8-dynamic", and with a cache that
            exists.
        held_out: Batches that the loss is measured on; none means that it is not.
        cache: A calibration's file: written when there are calibration images, else read.
    Raises:
        CalibrationError: the cache cannot be used, or activations are not finite.
        QuantisationError: the loss is beyond the budget with half of the linears left float.
    """
    scheme = scheme_of(options)
    products = linears(model) + (attention_products(model) if scheme.kind == "e4m3" else [])
    fingerprint = fingerprint_of(products, f"{options.precision} {options.target}")
    expected = _outputs(model, held_out)
    if calibration:
        seen = observe(model, products, calibration)
        known = Calibration(fingerprint, sum(map(len, calibration)), {n: o.peak.tolist() for n, o in seen.items()}, {})
        scales = smooth(model, products, known.peaks, scheme)
        if options.needs_calibration:
            smoothed = {name: one.divided(scales[name]) if name in scales else one for name, one in seen.items()}
            known.ranges.update(choose_ranges(products, smoothed, scheme))
        if cache is not None:
            known.save(cache)
    else:
        known = Calibration(fingerprint, 0, {}, {}) if cache is None else load_calibration(cache, fingerprint)
        smooth(model, products, known.peaks, scheme)

    def written(kept: Collection[Product]) -> ir.Model:
        chosen = [product for product in products if product not in kept]
        if not options.needs_calibration:
            return quantise_dynamically(model, chosen)
        return quantise_products(model, chosen, scheme, known.ranges, fused=options.target == "ort-cpu")

    made: list[ir.Model] = []  # the last that passed: the one that keeps the fewest
    losses: list[Loss] = []

    def passes(kept: Collection[Product]) -> bool:
        candidate = written(kept)
        losses.append(loss_of(_outputs(candidate, held_out), expected, options.output))
        if passed := losses[-1].acceptable(MARGIN):
            made[:] = [candidate]
        return passed

    kept: tuple[Product, ...] = ()
    if not held_out:
        made.append(written(()))
    elif not passes(()):
        by_damage = _by_damage(model, products, scheme, known.ranges, held_out)
        attention = sum(product.weight is None for product in products)
        most = attention + (len(products) - attention) // 2
        found = fewest_kept(by_damage, passes, most)
        if found is None:
            raise QuantisationError(
                f"{options.precision}: with {most} of {len(products)} products left float, {losses[-1].line()}; "
                f"must be {BUDGET}"
            )
        kept = found
    return made[0], Quantised(
        products=len(products) - len(kept),
        kept=tuple(product.name for product in kept),
        methods=dict(Counter(one.method for one in known.ranges.values())),
    )


def quantise_file(source: Path, path: Path, target: Target, files: Sequence[Path]) -> Quantised:
    """Writes a floating file of any exporter again with its linears over tokens in int8.

    Args:
        source: A file that takes prepared images [B, channels, height, width] in fp32.
        path: The file to write.
        target: See export_onnx.
        files: Image files that ranges are measured on.
    Raises:
        UnsupportedInputError: the file takes other inputs, or has no such linears.
        ModelFileError: the file is missing, damaged, unsafe, or takes no images.
    """
    proto = model_files.read_proto(source)
    info = inspect_onnx(source)
    signature = read_signature(info)
    reasons = []
    if signature.dtype != np.float32:
        reasons.append(f"it takes {signature.dtype}: must take prepared images in float32")
    elif signature.image_hw is None:
        reasons.append("it leaves the size of its images open: must take one size")
    version = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    try:
        options = ExportOptions(opset=version, precision="int8", target=target)
    except ValueError as error:
        reasons.append(str(error))
    if reasons or signature.image_hw is None:
        raise UnsupportedInputError(f"int8 of {source.name}", reasons)
    photos = photographs(files, CALIBRATION_IMAGES)
    inputs = as_inputs(photos, info.data_config, signature.image_hw, signature.in_chans)
    graph = ir.external_data.load_to_model(ir.load(source))
    size = signature.shape[0] or 1
    try:
        made, done = quantise(graph, options, [one.numpy() for one in inputs.split(size) if len(one) == size], ())
    except ValueError as error:  # there is nothing in it that could be
        raise UnsupportedInputError(f"int8 of {source.name}", [str(error)]) from None
    model_files.save(made, path, model_files.weight_bytes(made) > model_files.PROTOBUF_LIMIT)
    return done


def scheme_of(options: ExportOptions) -> Scheme:
    """Returns the number format in which a target takes a precision."""
    if options.precision == "fp8":
        return Scheme("e4m3")
    return Scheme("int8" if options.target == "tensorrt" else "uint8")


def _outputs(model: ir.Model, batches: Sequence[np.ndarray]) -> np.ndarray:
    rows = [arrays[0] for arrays in run_graph(model, batches)] if batches else []
    return np.concatenate(rows) if rows else np.empty(0)


def _by_damage(
    model: ir.Model,
    products: Sequence[Product],
    scheme: Scheme,
    ranges: Mapping[str, Range],
    held_out: Sequence[np.ndarray],
) -> list[Product]:
    """The products by how much eight bits change each of them alone, the worst first.

    Those of attention, a small part of the work, come before all linears.
    """
    seen = observe(model, products, held_out[:DAMAGE_BATCHES])

    def damage(product: Product) -> float:
        names = [str(value.name) for value in product.activations]
        exact = [seen[name].tokens for name in names]
        moved = [
            scheme.rounded(x, ranges.get(name) or Range(float(x.min()), float(x.max()), "its own"))
            for name, x in zip(names, exact)
        ]
        if product.weight is None:
            return max(_relative(m, x) for m, x in zip(moved, exact))
        weight = product.weight.astype(np.float32)
        return _relative(moved[0] @ scheme.rounded_weight(weight), exact[0] @ weight)

    return sorted(products, key=lambda product: (product.weight is not None, -damage(product)))


def _relative(moved: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(moved - exact).sum() / max(np.square(exact).sum(), 1e-30))
