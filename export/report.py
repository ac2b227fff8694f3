"""Report of an export: fusions, quantization, and the comparison of the file with the model.

Quantization changes all outputs a little: their largest error means little, so `Check` also counts changed classes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .runtime.metadata import CHECKED, CLASSES, two_columns

if TYPE_CHECKING:
    from rich.table import Table

SURE = 0.1  # a changed class counts if the model's probabilities of the two classes differ by at least this
FLIPS = 0.01  # allowed share of images with a changed class that counts (see SURE)
RMS = 0.05  # allowed root mean square error of the logits, in standard deviations of the logits
EIGHT_BIT_BUDGET = f"rms error <= {RMS:g}, confident predictions change on at most {FLIPS:.0%} of the images"
POINTS = 0.006  # allowed loss of accuracy relative to the model; one image is always allowed
ROUNDING = 1e-5  # smallest standard deviation that counts, relative to the largest value: e.g. a constant has none
LEAST_PROBABILITY = 1e-30  # replaces smaller probabilities before the logarithm


@dataclass(frozen=True)
class Fusion:
    """Number of nodes of a fused operator, and the number if all blocks were fused; `note` explains a difference."""

    name: str
    fused: int
    wanted: int
    note: str = ""

    @property
    def complete(self) -> bool:
        return self.fused >= self.wanted

    def line(self) -> str:
        return f"{self.name}: {self.fused} of {self.wanted}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Quantized:
    """Number of quantized MatMuls, and names of layers that stay in float."""

    matmuls: int
    in_float: tuple[str, ...]

    def line(self) -> str:
        kept = f"; in float, to limit the error: {', '.join(self.in_float)}" if self.in_float else ""
        return f"{self.matmuls} MatMuls{kept}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Comparison of one output of a file with the model's, for images of one size."""

    output: str = "logits"
    images: int
    max_error: float  # largest |file - model|, divided by the largest |model| if that is above 1
    rms_error: float  # root mean square of the difference, in standard deviations of the model's output
    top1_agreement: float | None  # share of images with the same most probable class; None for features
    flips: int  # images with a changed class that counts (see SURE)
    batch: int = 0  # the largest batch size
    image_hw: tuple[int, int] = (0, 0)
    passed: bool = False  # the error is within the budget
    saturating: bool = False  # computed like x86 CPUs without VNNI, whose int8 sums saturate

    def acceptable(self, margin: float = 1.0) -> bool:
        """Returns True if the loss is within the budget of 8-bit precisions; `margin` < 1 makes it stricter."""
        return bool(self.rms_error <= margin * RMS and self.flips <= margin * FLIPS * self.images)

    def title(self) -> str:
        if not self.batch:  # of all outputs, flattened
            return self.output
        emulated = ", without VNNI" if self.saturating else ""
        shown = f"images of {'x'.join(map(str, self.image_hw))}" if all(self.image_hw) else "copies of the example"
        return f"{self.output}, {self.images} {shown}, batch {self.batch}{emulated}"

    def line(self) -> str:
        same = "" if self.top1_agreement is None else f"top-1 agreement {self.top1_agreement:.1%}, "
        sure = f"confident predictions change on {self.flips} of {self.images} images, " if self.flips else ""
        return f"max error {self.max_error:.1e}, {same}{sure}rms error {self.rms_error:.1e}"


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy of a model and of its exported file on labeled images."""

    images: int
    model: float
    file: float

    @property
    def acceptable(self) -> bool:
        lost = (self.model - self.file) * self.images
        return lost <= max(1.0, POINTS * self.images) + 1e-6

    def line(self) -> str:
        return f"top-1 accuracy {self.file:.2%} on {self.images} images, model {self.model:.2%}"


@dataclass
class ExportReport:
    """Report of export_onnx. `print(report)` prints a table, `report.to_json()` returns JSON."""

    path: str
    model: str
    library: str
    opset: int
    target: str
    precision: str  # of weights and matmuls
    inputs: dict[str, str] = field(default_factory=dict)  # dtype and shape; fp32 for any floating-point dtype
    outputs: dict[str, list[int | str]] = field(default_factory=dict)  # shape of each output; names of dynamic axes
    ir_version: int = 0  # of the file format
    bytes: int = 0  # size of the file and of the weights beside it
    external_data: str | None = None  # name of the file with the weights; None if they are inside
    nodes: dict[str, int] = field(default_factory=dict)  # number of nodes per operator
    fusions: list[Fusion] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)  # comparisons with the eager model; empty without verification
    reference: str | None = None  # of the comparison, e.g. "eager fp64"
    device: str | None = None  # of the comparison, "CPU" or "CUDA"; for int8, with the kinds of CPUs
    budget: str = ""  # the largest error that passes
    in_fp32: tuple[str, ...] = ()  # layers of an fp16 file whose values are too large for fp16
    eight_bit: Quantized | None = None  # None for other precisions
    accuracy: Accuracy | None = None  # None without labeled images
    trtexec: str | None = None  # the command that builds a TensorRT engine from the file; None for other targets
    warnings: list[str] = field(default_factory=list)  # limitations of this file

    @property
    def output(self) -> str:
        """Names of the outputs."""
        return ", ".join(self.outputs)

    @property
    def verified(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def max_error(self) -> float | None:
        """The largest max_error of all checks; None without checks."""
        return max((check.max_error for check in self.checks), default=None)

    def checked(self) -> dict[str, str]:
        """Returns the measurements of the file, in words."""
        rows = {
            "verification": f"on {self.device}; allowed: {self.budget}" if self.checks else "not verified",
            **{check.title(): f"{check.line()} against {self.reference}" for check in self.checks},
            "accuracy": self.accuracy and self.accuracy.line(),
            "8-bit": self.eight_bit and self.eight_bit.line(),
            "in fp32, because fp16 may overflow": "; ".join(self.in_fp32),
        }
        return {name: text for name, text in rows.items() if text}

    def measured(self) -> dict[str, Any]:
        """Returns the measurements of the file for its metadata."""
        facts = asdict(self)
        verification = {name: facts[name] for name in ("reference", "device", "budget", "checks")}
        facts |= {"verification": verification if self.checks else "not verified", "checked": self.checked()}
        return {name: facts[name] for name in CHECKED}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verified": self.verified, "max_error": self.max_error, "output": self.output}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_table(self) -> Table:
        """Returns the report as a rich table."""
        beside = f", weights in {self.external_data}" if self.external_data else ""
        rows = [
            ("opset, target, precision", f"{self.opset}, {self.target}, {self.precision}"),
            ("IR version", str(self.ir_version)),
            *((f"input {name}", text) for name, text in self.inputs.items()),
            *((f"output {name}", str(shape)) for name, shape in self.outputs.items()),
            ("size", f"{self.bytes / 1e6:.1f} MB{beside}"),
            (f"{sum(self.nodes.values())} nodes", self.nodes),
            *(("fused", fusion.line()) for fusion in self.fusions if fusion.complete),
            *self.checked().items(),
            ("to build an engine", self.trtexec),
            *(("warning", warning) for warning in self.warnings),
        ]
        return two_columns(f"{self.model} -> {self.path}", [(name, text) for name, text in rows if text])

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=110).print(self.to_table())
        return text.getvalue()


def joined(batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the outputs of several batches; flattens all but logits and probabilities."""
    outputs: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for name, array in batch.items():
            outputs.setdefault(name, []).append(array if name in CLASSES else array.ravel())
    return {name: np.concatenate(arrays) for name, arrays in outputs.items()}


def worst(checks: Sequence[Check]) -> str:
    """Describes the check with the largest error; NaN counts as infinite."""
    check = max(checks, key=lambda check: check.max_error if np.isfinite(check.max_error) else np.inf)
    return f"{check.title()}: {check.line()}"


def losses_of(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> list[Check]:
    """Compares the outputs of all images, by name."""
    return [loss_of(got[name], expected[name], name) for name in expected]


def loss_of(got: np.ndarray, expected: np.ndarray, output: str) -> Check:
    """Compares logits or probabilities [B, ..., classes], or other values [B, ...].

    Compares probabilities by their logarithms log max(p, 1e-30). With many classes, all probabilities are small, so
    that even unrelated probabilities would look equal.
    """
    agreement, flips = None, 0
    if not expected.size:  # e.g. no register tokens
        got = expected = np.zeros(1)
    if output == "probabilities":
        got, expected = (np.log(np.maximum(p.astype(np.float64), LEAST_PROBABILITY)) for p in (got, expected))
    if output in CLASSES:
        classes = [each.argmax(-1)[..., None] for each in (expected, got)]
        agreement = float((classes[0] == classes[1]).mean())
        exponents = np.exp(expected - expected.max(-1, keepdims=True))
        probabilities = exponents / exponents.sum(-1, keepdims=True)
        of_expected, of_got = (np.take_along_axis(probabilities, each, -1) for each in classes)
        flips = int((of_expected - of_got >= SURE).sum())
    infinite = np.isinf(expected) & (got == expected)  # e.g. masked scores
    got, expected = (np.where(infinite, 0.0, each.astype(np.float64)) for each in (got, expected))
    difference, largest = got - expected, np.abs(expected).max()
    return Check(
        output=output,
        images=len(got),
        max_error=float(np.abs(difference).max() / max(1.0, largest)),
        rms_error=float(np.sqrt((difference**2).mean()) / max(expected.std(), ROUNDING * largest, 1e-12)),
        top1_agreement=agreement,
        flips=flips,
    )
