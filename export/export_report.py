"""ExportReport: what was written, how it differs from the model, and what did not work out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .loss import Accuracy
from .optimise import Fusion
from .quantise import Quantised

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Check:
    """One comparison of the file with the eager model.

    Attributes:
        images: How many, in batches of `batch` and fewer.
        batch: Images in the largest batch.
        image_hw: Their height and width, in pixels, as given to the file.
        max_error: Largest |file - eager|, divided by the largest |eager| where that is above 1.
        rms_error: Root mean square of the difference, in standard deviations of the eager output.
        top1_agreement: Share of images whose largest logit is the same; None for features.
        flips: Images with another class though the model was sure of its own, by a tenth of probability or more.
        passed: Whether the budget was kept.
    """

    images: int
    batch: int
    image_hw: tuple[int, int]
    max_error: float
    rms_error: float
    top1_agreement: float | None
    flips: int
    passed: bool


@dataclass
class ExportReport:
    """Report of export_onnx. `print(report)` prints a table, `report.to_json()` returns JSON.

    Attributes:
        path: The file written.
        model: The model's name.
        library: The library of its class.
        opset: Opset of ONNX's own operators.
        target: What it was optimised for.
        precision: Of weights and products; input and output are fp32 (or uint8 pixels) always.
        output: "logits", "probabilities" or "features".
        bytes: Size of the file and of the weights beside it.
        external_data: Name of the file with the weights, or None when they are inside.
        nodes: How many nodes of each operator.
        fusions: How often each fusion happened, of how often it could have.
        checks: The comparisons with the eager model; empty when verification was switched off.
        reference: The reference of the comparison, e.g. "eager fp64".
        budget: What passes, in words.
        eight_bit: How many products are in eight bits, which were left float because the loss asked for it, and how
            the ranges were chosen; None in other precisions.
        accuracy: On the labelled images: their number, the model's and the file's accuracy; None without.
        trtexec: The command that builds a TensorRT engine of the file; None for other targets.
        seconds: Seconds spent in each step.
        warnings: What a user should know.
    """

    path: str
    model: str
    library: str
    opset: int
    target: str
    precision: str
    output: str
    bytes: int = 0
    external_data: str | None = None
    nodes: dict[str, int] = field(default_factory=dict)
    fusions: list[Fusion] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    reference: str | None = None
    budget: str = ""
    eight_bit: Quantised | None = None
    accuracy: Accuracy | None = None
    trtexec: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def max_error(self) -> float | None:
        """Largest max_error of all checks; None when nothing was checked."""
        return max((check.max_error for check in self.checks), default=None)

    @property
    def top1_agreement(self) -> float | None:
        """The top-1 agreement of the check with the most images; None without checks or if the output is features."""
        return max(self.checks, key=lambda check: check.images).top1_agreement if self.checks else None

    def measured(self) -> dict[str, Any]:
        """Returns the measurements of the file for its metadata."""
        verification = {"reference": self.reference, "budget": self.budget, "checks": [asdict(c) for c in self.checks]}
        return {
            "verification": verification if self.checks else "not verified",
            "eight_bit": None if self.eight_bit is None else asdict(self.eight_bit),
            "accuracy": None if self.accuracy is None else asdict(self.accuracy),
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verified": self.verified, "max_error": self.max_error}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_table(self) -> Table:
        """The report as a rich table."""
        from rich.markup import escape
        from rich.table import Table

        table = Table("what", "value", title=escape(f"{self.model} -> {self.path}"), show_lines=False)
        for what, value in self._rows():
            table.add_row(what, escape(value))
        return table

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(file=text, width=110).print(self.to_table())
        return text.getvalue()

    def _rows(self) -> list[tuple[str, str]]:
        beside = f", weights in {self.external_data}" if self.external_data else ""
        operators = ", ".join(f"{name} {n}" for name, n in sorted(self.nodes.items(), key=lambda item: -item[1]))
        rows = [
            ("opset, target, precision", f"{self.opset}, {self.target}, {self.precision}"),
            ("output", self.output),
            ("size", f"{self.bytes / 1e6:.1f} MB{beside}"),
            (f"{sum(self.nodes.values())} nodes", operators),
        ]
        if self.eight_bit is not None:
            rows.append(("eight bits", self.eight_bit.line()))
        rows += [("fused" if f.complete else "NOT fully fused", f.line()) for f in self.fusions]
        for check in self.checks:
            top1 = "" if check.top1_agreement is None else f", top class the same on {check.top1_agreement:.1%}"
            size = "x".join(map(str, check.image_hw))
            line = f"max {check.max_error:.1e}, rms {check.rms_error:.1e}{top1} against {self.reference}"
            rows.append((f"{'ok' if check.passed else 'FAILED'}: {check.images} of {size}, batch {check.batch}", line))
        if self.accuracy is not None:
            rows.append(("accuracy", self.accuracy.line()))
        if not self.checks:
            rows.append(("NOT verified", "verify=False"))
        if self.trtexec is not None:
            rows.append(("to build an engine", self.trtexec))
        rows.append(("seconds", ", ".join(f"{step} {seconds:.1f}" for step, seconds in self.seconds.items())))
        return rows + [("warning", warning) for warning in self.warnings]
