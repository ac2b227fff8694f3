"""FLOP formulas of our operators for torch.utils.flop_counter.

Importing that module imports triton, which would triple the time of `import vit_fast`. The formulas are therefore
registered by the first check that finds triton usable, before any of our operators runs.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_waiting: list[tuple[Any, Callable[..., int]]] = []
_lock = threading.Lock()

Formula = TypeVar("Formula", bound=Callable[..., int])


def flop_formula(operators: Any) -> Callable[[Formula], Formula]:
    """Decorates a formula for torch's register_flop_formula, which register_flop_formulas calls later."""

    def decorate(formula: Formula) -> Formula:
        _waiting.append((operators, formula))
        return formula

    return decorate


@functools.cache
def register_flop_formulas() -> None:
    """Registers every formula in torch, and in existing counters, which copied torch's table when they were created."""
    may_have_counters = "torch.utils.flop_counter" in sys.modules
    from torch.utils import flop_counter

    with _lock:  # torch raises an error if another thread already registered the formula
        while _waiting:
            operators, formula = _waiting.pop()
            flop_counter.register_flop_formula(operators)(formula)
    if may_have_counters:
        for thing in gc.get_objects():
            if issubclass(type(thing), flop_counter.FlopCounterMode):
                thing.flop_registry = flop_counter.flop_registry | thing.flop_registry
