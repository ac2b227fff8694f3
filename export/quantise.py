"""A graph in eight bits: smoothed, calibrated, and with as many layers left float as its budget asks for.

Quantised are the linears inside the blocks, and for e4m3 attention's products too. What is left float otherwise is a
few per cent of a ViT's arithmetic: norms, patch embedding, head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from vit_fast.errors import VitFastError
from vit_fast.quantization.ranges import Observation, Range

from .calibration import (
    Calibration,
    choose_range,
    fingerprint_of,
    in_integers,
    load_calibration,
    observe,
)
from .eight_bit import LARGEST_E4M3, EightBit, Scheme, in_e4m3, quantise_weight
from .graphs import replace, run_graph
from .loss import BUDGET, loss_of
from .options import ExportOptions
from .products import Product, attention_products, is_probability, linears
from .smoothing import smooth

DAMAGE_BATCHES = 4
"""Held-out batches that tell which products to leave float."""
MARGIN = 0.9
"""Part of the budget to stay within on the graph, since the file is held against eager afterwards."""


@dataclass(frozen=True)
class Quantised:
    """What quantise did.

    Attributes:
        products: How many are in eight bits.
        kept: Names of the layers left float because the loss asked for it.
        methods: How many ranges were chosen in which way.
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
) -> Quantised:
    """Brings a graph into eight bits, in the scheme of its precision and target; in place.

    Args:
        model: A float graph with one input.
        options: What was asked of the file.
        calibration: Batches of inputs to measure ranges on; none for "int8-dynamic" is accepted, for the others with a
            cache that exists.
        held_out: Batches that the loss is measured on; none means that it is not.
        cache: A calibration's file: written when there are calibration images, else read.
    Raises:
        CalibrationError: the cache cannot be used, or activations are not finite.
        QuantisationError: the loss is beyond the budget with half of the products left float.
    """
    scheme = scheme_of(options)
    products = linears(model) + (attention_products(model) if scheme == "e4m3" else [])
    floating = scheme == "e4m3"
    fingerprint = fingerprint_of(products, f"{scheme} {options.precision}")
    expected = _outputs(model, held_out)
    if calibration:
        seen = observe(model, products, calibration)
        known = Calibration(fingerprint, sum(map(len, calibration)), {n: o.peak.tolist() for n, o in seen.items()}, {})
        scales = smooth(model, products, known.peaks, floating=floating)
        smoothed = {name: one.divided(scales[name]) if name in scales else one for name, one in seen.items()}
        if not scheme.startswith("dynamic"):
            known.ranges.update(_ranges(products, smoothed, scheme))
        if cache is not None:
            known.save(cache)
    else:
        known = Calibration(fingerprint, 0, {}, {}) if cache is None else load_calibration(cache, fingerprint)
        smooth(model, products, known.peaks, floating=floating)

    kept: list[Product] = []
    retreat: list[list[Product]] = []
    while True:
        eight_bit = EightBit(model, scheme, known.ranges)
        undo = [eight_bit.replace(product) for product in products if product not in kept]
        if not held_out:
            break
        loss = loss_of(_outputs(model, held_out), expected, options.output)
        if loss.acceptable(MARGIN):
            break
        for old, new in undo:
            replace(new, old)
        common_passes.RemoveUnusedNodesPass()(model)
        retreat = retreat or _retreat(_by_damage(model, products, scheme, known.ranges, held_out))
        if len(kept) == len(retreat[-1]):
            raise QuantisationError(
                f"{options.precision}: with {len(kept)} of {len(products)} products left float, {loss.line()}; "
                f"accepted is {BUDGET}"
            )
        kept = next(more for more in retreat if len(more) > len(kept))
    common_passes.RemoveUnusedNodesPass()(model)
    return Quantised(
        products=len(products) - len(kept),
        kept=tuple(product.name for product in kept),
        methods=dict(Counter(one.method for one in known.ranges.values())),
    )


def scheme_of(options: ExportOptions) -> Scheme:
    """How a target takes a precision in eight bits."""
    if options.precision == "fp8":
        return "e4m3"
    fused = options.target == "ort-cpu"
    if options.precision == "int8-dynamic":
        return "dynamic-fused" if fused else "dynamic"
    return "int8" if options.target == "tensorrt" else "uint8-fused" if fused else "uint8"


def _outputs(model: ir.Model, batches: Sequence[np.ndarray]) -> np.ndarray:
    rows = [arrays[0] for arrays in run_graph(model, batches)] if batches else []
    return np.concatenate(rows) if rows else np.empty(0)


def _ranges(products: Sequence[Product], seen: dict[str, Observation], scheme: Scheme) -> dict[str, Range]:
    weights: dict[str, list[np.ndarray]] = {}
    probabilities = set()
    for product in products:
        for value in product.activations:
            weights.setdefault(str(value.name), []).extend([] if product.weight is None else [product.weight])
            if is_probability(value):
                probabilities.add(str(value.name))
    ranges = {}
    for name, one in seen.items():
        if name in probabilities:
            ranges[name] = Range(0.0, 1.0, "a softmax")
        elif scheme == "e4m3":  # floating: its small numbers are no coarser for a large one
            ranges[name] = Range(float(one.low.min()), float(one.high.max()), "largest")
        else:
            ranges[name] = choose_range(one, [w.astype(np.float32) for w in weights[name]], symmetric=scheme == "int8")
    return ranges


def _retreat(by_damage: Sequence[Product]) -> list[list[Product]]:
    """What to leave float, more and more: attention's products, a small part of the work, then linears, up to half.

    Args:
        by_damage: All products, the most sensitive first.
    """
    attention = [product for product in by_damage if product.weight is None]
    rest = [product for product in by_damage if product.weight is not None]
    counts, steps = [0], [attention]
    while 2 * (count := counts[-1] + max(1, counts[-1] // 2)) <= len(rest):
        counts.append(count)
        steps.append(attention + rest[:count])
    return steps


def _by_damage(
    model: ir.Model,
    products: Sequence[Product],
    scheme: Scheme,
    ranges: dict[str, Range],
    held_out: Sequence[np.ndarray],
) -> list[Product]:
    """The products by how much eight bits change each of them alone, the worst first."""
    seen = observe(model, products, held_out[:DAMAGE_BATCHES])

    def damage(product: Product) -> float:
        exact = [seen[str(value.name)].tokens for value in product.activations]
        moved = [_emulated(x, scheme, ranges.get(str(v.name))) for x, v in zip(exact, product.activations)]
        if product.weight is None:
            return max(_relative(m, x) for m, x in zip(moved, exact))
        weight = product.weight.astype(np.float32)
        return _relative(moved[0] @ _emulated_weight(weight, scheme), exact[0] @ weight)

    return sorted(products, key=damage, reverse=True)


def _emulated(x: np.ndarray, scheme: Scheme, limits: Range | None) -> np.ndarray:
    limits = limits or Range(float(x.min()), float(x.max()), "its own")
    if scheme != "e4m3":
        return in_integers(x, limits, symmetric=scheme == "int8")
    scale = max(-limits.low, limits.high, 1e-30) / LARGEST_E4M3
    return in_e4m3(x / scale) * scale


def _emulated_weight(weight: np.ndarray, scheme: Scheme) -> np.ndarray:
    if scheme == "e4m3":
        scale = max(float(np.abs(weight).max()), 1e-30) / LARGEST_E4M3
        return in_e4m3(weight / scale) * scale
    quantised, scales = quantise_weight(weight)
    return quantised * scales


def _relative(moved: np.ndarray, exact: np.ndarray) -> float:
    return float(np.square(moved - exact).sum() / max(np.square(exact).sum(), 1e-30))
