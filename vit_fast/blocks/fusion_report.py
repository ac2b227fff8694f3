"""Report of fuse: lists the fused and the skipped modules of a model."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from ..errors import UnsupportedInputError


@dataclass(frozen=True)
class ModuleReport:
    """Report of one module."""

    name: str  # dotted name in the model; "" for the model itself
    class_name: str  # before fuse
    part: str  # e.g. "attention" or "norm + MLP"
    fused: bool  # True if the module now runs a fused operator
    reasons: tuple[str, ...] = ()  # all reasons why the module was skipped
    notes: tuple[str, ...] = ()  # about a fused module


@dataclass(frozen=True)
class FusionReport:
    """Report of fuse. Print it to show a table."""

    backend: str  # "eager", "sdpa" or "triton", as requested or resolved from "auto"
    modules: tuple[ModuleReport, ...] = ()  # in the model's order
    backend_reasons: tuple[str, ...] = ()  # why "auto" did not select triton
    precision: str | None = None  # as requested; None means the model's own precision
    precision_notes: tuple[str, ...] = ()  # measured effects of the requested precision
    # Names of language models and decoders inside the model, e.g. CLIP's text tower. Only supported classes inside
    # them are fused and reported.
    elsewhere: tuple[str, ...] = ()

    @property
    def fused(self) -> tuple[ModuleReport, ...]:
        return tuple(module for module in self.modules if module.fused)

    @property
    def skipped(self) -> tuple[ModuleReport, ...]:
        return tuple(module for module in self.modules if not module.fused)

    def require_all(self) -> FusionReport:
        """Returns the report if every module in it was fused.

        Raises:
            UnsupportedInputError: a module was skipped, or there was nothing to fuse. Lists the modules and reasons.
        """
        reasons = [
            f"{module.name or 'the model'} ({module.class_name}, {module.part}): {reason}"
            for module in self.skipped
            for reason in module.reasons
        ]
        if not self.modules:
            reasons = ["the model contains no attention or MLP of a supported class (docs/classes.md)"]
        if reasons:
            raise UnsupportedInputError("fuse did not fuse the whole model", reasons)
        return self

    def __str__(self) -> str:
        """Formats a table. Modules share a row if they differ only in the numbers in their names."""
        precision = f", precision {self.precision}" if self.precision else ""
        lines = [f"backend {self.backend}{precision}: {len(self.fused)} fused, {len(self.skipped)} skipped"]
        if not self.modules:
            lines[0] += " (no attention or MLP of a supported class)"
        lines += [f"backend {self.backend}: {'; '.join(self.backend_reasons)}"] if self.backend_reasons else []
        lines += [f"precision {self.precision}: {note}" for note in self.precision_notes]
        lines += [
            f"{each} is a language model or decoder: only supported classes inside it are fused and listed"
            for each in self.elsewhere
        ]
        groups: dict[tuple[str, ...], list[str]] = {}
        for module in self.modules:
            pattern, part = re.sub(r"\d+", "*", module.name), f"{module.class_name}: {module.part}"
            key = pattern, part, "fused" if module.fused else "skipped", "; ".join(module.reasons + module.notes)
            groups.setdefault(key, []).append(module.name)
        rows: list[tuple[str, ...]] = [("module", "part", "result", "reasons and notes")] if groups else []
        for (pattern, *texts), names in groups.items():
            rows.append((f"{pattern} ({len(names)})" if names[1:] else names[0] or "(the model)", *texts))
        widths = [max(map(len, column)) for column in zip(*rows)]
        for *cells, text in rows:
            left = "".join(f"{cell.ljust(width)}  " for cell, width in zip(cells, widths))
            first, *rest = textwrap.wrap(text, 80) or [""]
            lines += [(left + first).rstrip(), *(" " * len(left) + line for line in rest)]
        return "\n".join(lines)
