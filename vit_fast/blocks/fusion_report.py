"""Reports of fuse and freeze: list the fused or frozen, and the skipped modules of a model."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import raise_unsupported

UNKNOWN = "is not a supported class"
HINT = "pass example=, an input of the model, to fuse modules of other classes by what they compute"


@dataclass(frozen=True)
class ModuleReport:
    """Report of one module."""

    name: str  # dotted name in the model; "" for the model itself
    class_name: str  # before fuse
    part: str  # e.g. "attention" or "norm + MLP"
    fused: bool  # True if the module now runs a fused operator; with `condition`, only in some calls
    reasons: tuple[str, ...] = ()  # all reasons why the module was skipped
    notes: tuple[str, ...] = ()  # about a fused module
    condition: str = ""  # calls that run fused, if it is unknown whether there are any


@dataclass(frozen=True)
class FusionReport:
    """Report of fuse. Print it to show a table."""

    backend: str  # "eager", "sdpa" or "triton", as requested or resolved from "auto"
    modules: tuple[ModuleReport, ...] = ()  # in the model's order
    backend_reasons: tuple[str, ...] = ()  # why "auto" did not select triton
    precision: str | None = None  # as requested; None means the model's own precision
    precision_notes: tuple[str, ...] = ()  # measured effects of the requested precision
    # Language models and decoders with attention inside the model, e.g. "text_model (CLIPTextTransformer) is a
    # language model". Only supported classes inside them are fused and reported.
    elsewhere: tuple[str, ...] = ()
    is_read: bool = False  # True if the modules are those that run in the forward of an example

    @property
    def fused(self) -> tuple[ModuleReport, ...]:
        return tuple(module for module in self.modules if module.fused and not module.condition)

    @property
    def conditional(self) -> tuple[ModuleReport, ...]:
        """Returns the modules that only some calls run fused, if no example shows how they are called."""
        return tuple(module for module in self.modules if module.condition)

    @property
    def skipped(self) -> tuple[ModuleReport, ...]:
        return tuple(module for module in self.modules if not module.fused)

    @property
    def _has_unknown(self) -> bool:
        reasons = (reason for module in self.modules for reason in module.reasons)
        return any(module.condition and module.name for module in self.modules) or any(
            reason.endswith(UNKNOWN) for reason in reasons
        )

    @property
    def _nothing(self) -> str:
        if self.is_read:
            return "no attention or MLP of tokens in the forward of the example"
        return f"no attention or MLP of a supported class (docs/classes.md): {HINT}"

    def require_all(self) -> FusionReport:
        """Returns the report if every module in it was fused.

        A conditional module counts as fused only if it is the model itself, because then your code calls it.

        Raises:
            UnsupportedInputError: a module was skipped or is conditional, or there was nothing to fuse. Lists the
                modules and reasons.
        """
        reasons = [
            f"{module.name or 'the model'} ({module.class_name}, {module.part}): {reason}"
            for module in self.modules
            for reason in [*module.reasons, *(_condition(module) if module.name else [])]
        ]
        if not self.modules:
            reasons = [f"the model contains {self._nothing}"]
        if self._has_unknown:
            reasons.append(HINT)
        raise_unsupported("fuse did not fuse the whole model", reasons)
        return self

    def __str__(self) -> str:
        """Formats a table. Modules share a row if they differ only in the numbers in their names."""
        precision = f", precision {self.precision}" if self.precision else ""
        counts = f"{len(self.fused)} fused, {len(self.skipped)} skipped"
        counts += f", {len(self.conditional)} conditional" if self.conditional else ""
        lines = [f"backend {self.backend}{precision}: {counts if self.modules else self._nothing}"]
        lines += [HINT] if self._has_unknown else []
        lines += [f"backend {self.backend}: {'; '.join(self.backend_reasons)}"] if self.backend_reasons else []
        lines += [f"precision {self.precision}: {note}" for note in self.precision_notes]
        lines += [f"{each}: only supported classes inside it are fused and listed" for each in self.elsewhere]
        return "\n".join([*lines, *table(self.modules, "fused")])


class FreezeReport(tuple[str, ...]):
    """Names of the blocks that freeze prepared, with a report of all blocks. Print it to show a table."""

    modules: tuple[ModuleReport, ...]  # `fused` is True if the weights are prepared

    def __new__(cls, modules: Iterable[ModuleReport]) -> FreezeReport:
        rows = tuple(modules)
        report = super().__new__(cls, (row.name for row in rows if row.fused))
        report.modules = rows
        return report

    def __getnewargs__(self) -> tuple[Any]:  # for copies and pickles
        return (self.modules,)

    @property
    def skipped(self) -> tuple[ModuleReport, ...]:
        return tuple(module for module in self.modules if not module.fused)

    def __str__(self) -> str:
        """Formats a table. Blocks share a row if they differ only in the numbers in their names."""
        first = f"{len(self)} frozen, {len(self.skipped)} skipped"
        nothing = "" if self.modules else " (no fused block: call vit_fast.fuse first)"
        return "\n".join([first + nothing, *table(self.modules, "frozen")])


def table(modules: Sequence[ModuleReport], done: str) -> list[str]:
    """Formats rows; `done` names the result of modules that were not skipped."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for module in modules:
        pattern, part = re.sub(r"\d+", "*", module.name), f"{module.class_name}: {module.part}"
        result = "conditional" if module.condition else done if module.fused else "skipped"
        key = pattern, part, result, "; ".join([*module.reasons, *_condition(module), *module.notes])
        groups.setdefault(key, []).append(module.name)
    rows: list[tuple[str, ...]] = [("module", "part", "result", "reasons and notes")] if groups else []
    for (pattern, *texts), names in groups.items():
        rows.append((f"{pattern} ({len(names)})" if names[1:] else names[0] or "(the model)", *texts))
    widths, lines = [max(map(len, column)) for column in zip(*rows)], []
    for *cells, text in rows:
        left = "".join(f"{cell.ljust(width)}  " for cell, width in zip(cells, widths))
        first, *rest = textwrap.wrap(text, 80) or [""]
        lines += [(left + first).rstrip(), *(" " * len(left) + line for line in rest)]
    return lines


def _condition(module: ModuleReport) -> list[str]:
    return [f"fused if called {module.condition}"] if module.condition else []
